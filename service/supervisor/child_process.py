"""One process at a time of one kind, as the supervisor sees it: its start, its events, its orders, its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from npuserve.service import logs
from npuserve.service.ipc.heartbeat import Watch

log = logging.getLogger("npuserve.service.supervisor.supervisor")

LAST_LINES_SECONDS = 0.5
"""Time from a process's exit for its last lines. A helper that has its pipes open must not delay its restart."""
START_FILES = 9
"""Open files that the start of a process takes for a moment."""
MAX_LINE_BYTES = 1 << 20
"""Output without an end of line is passed on in pieces of this size."""


class Child:
    """One process at a time of one kind, in a session of its own, so that the terminal's Ctrl-C does not reach it.

    arguments: its first line on stdin, made anew at each start. heard: called with each JSON line of its stdout.
    pulse: its sign of life. files: open ones that it gets under the same numbers. `starts` counts its lives; `stopping`
    is set once it must not live again; `age` is the seconds of its life, and `silence` those for which its main loop
    has stood still; `hung` is whether this life was killed for that, and `dying` the seconds since; `forgiven` is set
    when the request was found of which its last lives died.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        arguments: Callable[[], Mapping[str, object]],
        heard: Callable[[Child, dict[str, Any]], None],
        pulse: Watch,
        files: Sequence[int] = (),
    ):
        self.name = name
        self.starts = 0
        self.age = 0.0
        self.silence = 0.0
        self.hung = False
        self.forgiven = False
        self.dying = 0.0
        self.pulse = pulse
        self.stopping = asyncio.Event()
        self.pid = 0
        self._command = command
        self._environment = environment
        self._arguments = arguments
        self._heard = heard
        self._files = files
        self._transport: asyncio.SubprocessTransport | None = None

    async def live(self) -> int:
        """Run one life, from its start to its exit code; negative for a signal.

        Raises OSError or RuntimeError if the system starts no process now. Processes that it left in its session are
        killed.
        """
        self.starts += 1
        self.age = self.silence = self.dying = 0.0
        self.hung = False
        self.pid = 0
        self.pulse.reset()
        _require_files(START_FILES)
        output = _Output(self._line)
        pipe = asyncio.subprocess.PIPE
        transport, _ = await asyncio.get_running_loop().subprocess_exec(
            lambda: output, *self._command, env=self._environment, start_new_session=True, pass_fds=self._files,
            stdin=pipe, stdout=pipe, stderr=pipe)
        try:
            self._transport = transport
            self.pid = transport.get_pid()
            if self.stopping.is_set():
                self.signal(signal.SIGTERM)
            self._write(self._arguments())
            await output.exited
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # helpers, which may hold the device
            await asyncio.wait((output.closed,), timeout=LAST_LINES_SECONDS)
            output.finish()
        finally:
            transport.close()
        code = transport.get_returncode()
        assert code is not None
        return code

    def signal(self, number: signal.Signals) -> None:
        """End it for good: SIGTERM asks, SIGKILL does not. A pause between two lives ends too."""
        self.stopping.set()
        self._send(number)

    def drain(self, seconds: float) -> None:
        """End it for good, once its requests have ended, or so many seconds are over."""
        self.stopping.set()
        self.order(drain=seconds)

    def order(self, **order: object) -> None:
        """Write an order on its stdin; lost if it has ended."""
        if self.lives:
            self._write(order)

    @property
    def lives(self) -> bool:
        return self._transport is not None and self._transport.get_returncode() is None

    def look(self, seconds: float) -> None:
        """Count time. To be called every so many seconds."""
        if not self.lives:
            return
        self.age += seconds
        self.silence = self.silence + seconds if self.pulse.missed() else 0.0
        self.dying += seconds if self.hung else 0.0

    def kill_hung(self) -> None:
        """Kill the process because it hangs; the next life may start."""
        self.hung = True
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self._transport and self.lives:
            with contextlib.suppress(ProcessLookupError):
                self._transport.send_signal(number)

    def _write(self, line: Mapping[str, object]) -> None:
        stdin = self._transport and self._transport.get_pipe_transport(0)
        if isinstance(stdin, asyncio.WriteTransport):
            with contextlib.suppress(OSError, RuntimeError):
                stdin.write(msgspec.json.encode(line) + b"\n")

    def _line(self, line: bytes) -> None:
        try:
            event = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:
            logs.event(log, f"{self.name} said", text=line.decode(errors="replace").rstrip())
        else:
            self._heard(self, event)


def _require_files(count: int) -> None:
    """Raise OSError if this process may not open so many more files.

    subprocess.Popen of Python before 3.13 leaks the pipes that it has got when it gets no further ones.
    """
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def _forward(line: bytes) -> None:
    logs.forward(line + b"\n")


class _Output(asyncio.SubprocessProtocol):
    """Output of one process. stdout's lines are passed to `said`, stderr's to this process's own log.

    `exited` is done when the process has ended, whoever else has its pipes open; `closed`, when both are at their end.
    """

    def __init__(self, said: Callable[[bytes], None]):
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._sinks: dict[int, Callable[[bytes], None]] = {1: said, 2: _forward}
        self._rest = {1: b"", 2: b""}
        self._open = {1, 2}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, rest = (self._rest[fd] + data).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        self._rest[fd] = rest
        for line in lines:
            self._sinks[fd](line)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open and not self.closed.done():
            self.closed.set_result(None)

    def process_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)

    def finish(self) -> None:
        """Pass on what had no end of line."""
        for fd, rest in self._rest.items():
            self._rest[fd] = b""
            if rest:
                self._sinks[fd](rest)
