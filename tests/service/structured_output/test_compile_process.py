"""The process that compiles constraints, by itself."""

from __future__ import annotations

import signal
import struct
import subprocess

import msgspec

from npuserve.service.structured_output.compile_process import COMMAND, Start
from tests.support.grammars import vocabulary


def test_compile_process_whose_engine_ends_writes_nothing() -> None:
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    process.stdout.close()
    start = msgspec.msgpack.encode(Start(vocabulary().data, 1.0, 1 << 29))
    assert process.communicate(struct.pack("<I", len(start)) + start)[1] == b""
    assert process.returncode == -signal.SIGPIPE
