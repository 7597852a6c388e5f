from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from npuserve.service.processes.sandbox import MAX_START_SECONDS, Sandbox

CHILD = """
import os, resource, signal, sys
from npuserve.service.processes import sandbox
for message in sandbox.messages():
    if message == b"loop":
        sandbox.limit_time(0.1)
        while True:
            pass
    if message == b"memory":
        sandbox.limit_growth(64 << 20)
        try:
            bytes(1 << 30)
        except MemoryError:
            sys.exit(1)
    if message == b"core":
        message = str(resource.getrlimit(resource.RLIMIT_CORE)).encode()
    if message == b"signals":
        os.kill(os.getpid(), signal.SIGTERM)
    sandbox.reply(message)
"""


@pytest.fixture
def child() -> Sandbox:
    return Sandbox((sys.executable, "-c", CHILD))


@pytest.mark.parametrize("size", [0, 1, 3 << 20])
def test_call_returns_the_reply_of_any_size(child: Sandbox, size: int) -> None:
    """A message larger than a pipe is sent while the child reads it."""
    message = os.urandom(size)
    assert child.call(message, MAX_START_SECONDS) == message
    assert child.call(b"again", MAX_START_SECONDS) == b"again"


@pytest.mark.parametrize("message", [b"loop", b"memory"])
def test_child_beyond_a_limit_of_the_kernel_has_exceeded_it(child: Sandbox, message: bytes) -> None:
    assert child.call(message, MAX_START_SECONDS) is None
    child.end()
    assert child.has_exceeded_limits
    assert child.returncode == (-signal.SIGPROF if message == b"loop" else 1)


@pytest.mark.parametrize("size", [1, 3 << 20])
def test_call_of_a_stopped_child_ends_in_time(child: Sandbox, size: int) -> None:
    """While it reads nothing, and while it does not reply. It has not exceeded its limits."""
    assert child.call(b"start", MAX_START_SECONDS)
    os.kill(child.pid, signal.SIGSTOP)
    assert child.call(bytes(size), 0.05) is None
    child.end()
    assert child.returncode == -signal.SIGKILL
    assert not child.has_exceeded_limits


def test_interrupt_ends_a_call_in_another_thread(child: Sandbox) -> None:
    assert child.call(b"start", MAX_START_SECONDS)
    os.kill(child.pid, signal.SIGSTOP)
    threading.Timer(0.1, child.interrupt).start()
    assert child.call(b"never", MAX_START_SECONDS) is None
    child.end()


def test_child_ignores_signals_to_the_server_and_writes_no_core(child: Sandbox) -> None:
    assert child.call(b"signals", MAX_START_SECONDS) == b"signals"
    assert child.call(b"core", MAX_START_SECONDS) == b"(0, 0)"


def test_child_ends_with_its_owner() -> None:
    owner = Sandbox((sys.executable, "-c", CHILD))
    assert owner.call(b"start", MAX_START_SECONDS)
    process = owner._process
    del owner
    assert process.returncode == -signal.SIGKILL
