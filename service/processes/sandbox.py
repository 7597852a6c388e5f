"""Sandbox: a child process that computes on input which may be hostile, so that the computation can be killed.

A constraint, a chat template and a text for an unusual tokenizer may need minutes, gigabytes, or more stack than there
is. No check in Python can interrupt a call in C that does not return. So a child computes one reply at a time under
limits:

- of memory and processor time, by the kernel: a failed allocation, and a timer whose signal has no handler. Neither the
  load of the machine nor a stopped process decides;
- of real time, by the parent, which kills the child.

A child has only the environment variables that Python needs, writes no core file, and cannot read the memory of other
processes. It ends with its parent: at the end of its stdin, or by SIGPIPE.

A message is a length of 4 bytes and that many bytes. The child replies once to each, also to the first one, by which it
prepares itself.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence

from npuserve.service.processes import process_control

KEPT_VARIABLES = frozenset({
    "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "PYTHONUTF8", "TMPDIR", "TZ"})
"""Environment variables that a sandbox inherits. Other ones may hold secrets."""
LIMIT_SIGNALS = frozenset({
    signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGBUS, signal.SIGFPE})
"""Signals that end a child whose input exceeds a limit: the timer's, and the ones of faults without stack or memory."""
MAX_START_SECONDS = 60.0
"""Real time for Python and its modules to start, on a busy machine."""
_LENGTH = struct.Struct("<I")


class Sandbox:
    """Child process for one thread at a time, see the module. It is killed when this object is garbage-collected.

    command: program and arguments. Its last argument is added: "1" if it may write core files, else "0".

    Raises OSError if it cannot be started.
    """

    def __init__(self, command: Sequence[str]):
        kept = {name: value for name, value in os.environ.items() if name in KEPT_VARIABLES}
        self._process = subprocess.Popen(
            (*command, str(int(process_control.is_dumpable()))),
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=kept,
        )
        assert self._process.stdin
        os.set_blocking(self._process.stdin.fileno(), False)
        self._finalizer = weakref.finalize(self, _end, self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit code, or minus the signal that ended the child; None until `end`."""
        return self._process.returncode

    @property
    def has_exceeded_limits(self) -> bool:
        """Whether the child ended because of its input; False if it was killed. Known after `end`."""
        code = self._process.returncode
        return code > 0 or -code in LIMIT_SIGNALS

    def call(self, message: bytes, seconds: float) -> bytes | None:
        """Send a message and return the reply. The child is killed after `seconds` of real time.

        None if the child has ended or cannot be used any more; the caller calls `end`.
        """
        deadline = time.monotonic() + seconds
        try:
            if not self._write(_LENGTH.pack(len(message)) + message, deadline):
                return None
            head = self._read(_LENGTH.size, deadline)
            return None if head is None else self._read(_LENGTH.unpack(head)[0], deadline)
        except (OSError, MemoryError):
            return None

    def interrupt(self) -> None:
        """Kill the child, for another thread than the one in `call`, which then returns None."""
        self._process.kill()

    def end(self) -> None:
        """Kill the child and wait for its end. Nothing if it has ended."""
        self._finalizer()

    def _write(self, data: bytes, deadline: float) -> bool:
        """Return False if the deadline has passed. Raises OSError if the child has ended."""
        assert self._process.stdin
        descriptor = self._process.stdin.fileno()
        rest = memoryview(data)
        while rest:
            if not _wait(descriptor, select.POLLOUT, deadline):
                return False
            rest = rest[os.write(descriptor, rest) :]
        return True

    def _read(self, size: int, deadline: float) -> bytes | None:
        """Return `size` bytes; None if the deadline has passed or the child has ended."""
        assert self._process.stdout
        descriptor = self._process.stdout.fileno()
        data = bytearray()
        while len(data) < size:
            if not _wait(descriptor, select.POLLIN, deadline):
                return None
            part = os.read(descriptor, size - len(data))
            if not part:
                return None
            data += part
        return bytes(data)


def _wait(descriptor: int, event: int, deadline: float) -> bool:
    """Wait until a pipe is ready or broken. Return False if the deadline comes first."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def messages() -> Iterator[bytes]:
    """Prepare this process, which `Sandbox` started, and yield its messages until the parent ends.

    SIGINT and SIGTERM, which are sent to all processes of the server, are ignored: the parent ends this one.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGPROF, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    process_control.set_dumpable(sys.argv[-1] == "1")
    stdin = sys.stdin.buffer
    while len(head := stdin.read(_LENGTH.size)) == _LENGTH.size:
        (size,) = _LENGTH.unpack(head)
        message = stdin.read(size)
        if len(message) < size:
            return
        yield message


def reply(message: bytes) -> None:
    """Send the reply to the last message, and end its time limit."""
    limit_time(0)
    sys.stdout.buffer.write(_LENGTH.pack(len(message)) + message)
    sys.stdout.buffer.flush()


def limit_time(seconds: float) -> None:
    """Let the kernel end this process after `seconds` of processor time, unless it replies before. 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_growth(max_bytes: int) -> None:
    """Limit this process's address space to its present size and `max_bytes`, until the next call of this function."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = process_control.memory_bytes()[0] + max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
