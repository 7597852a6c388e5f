"""Sentences about addresses on which a server cannot listen."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from npuserve.service import probe


@pytest.mark.parametrize(("error", "next_step"), [
    (OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)),
     "; end the program that has the port, or set another port"),
    (OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL)),
     "; it must be an address of this machine, or 0.0.0.0 for all"),
    (socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
     "; it must be an address of this machine, or 0.0.0.0 for all"),
    (OSError(errno.EACCES, os.strerror(errno.EACCES)),
     "; a port below 1024 needs a right (CAP_NET_BIND_SERVICE); set a higher one"),
    (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), ""),
])
def test_listening_failure_ends_with_the_next_step(error: OSError, next_step: str) -> None:
    sentence = f"cannot listen on 127.0.0.1:80: {error.strerror}{next_step}"
    assert probe.listening_failure("127.0.0.1:80", error) == sentence
