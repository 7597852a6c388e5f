"""Child process as the supervisor sees it: its start, events, heartbeats, orders and exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from npuserve.service import logs
from npuserve.service.processes.child import HEARTBEAT, encode_line, parse_event

log = logging.getLogger("npuserve.service.supervisor.supervisor")

LAST_LINES_SECONDS = 0.5
"""Maximum wait for the last lines of an exited process. A helper that holds its pipes must not delay the restart."""
START_FILES = 9
"""Number of files that the start of a process opens temporarily."""
OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}
"""Arguments of Popen for a process group of its own. A session of its own would be a scheduling group of its own
(autogroup) where Linux makes one for each session. Groups are scheduled more coarsely than processes: on Linux 6.18 a
front end waited up to 0.15 s for a core that the engine used, and within one group a few milliseconds."""
MAX_LINE_BYTES = 1 << 20
"""Maximum length of a line of output. Longer output is passed on in pieces."""


class ChildProcess:
    """Child process that can be started repeatedly, one run at a time.

    Each run has its own process group, so that the terminal's Ctrl-C does not reach it.

    arguments: returns the first line for its stdin. Called at each start.
    on_event: called with each JSON line of its stdout, except heartbeats.
    files: open descriptors that it inherits under the same numbers.
    defers_sigterm: runs after the first begin with SIGTERM blocked, until the process has chosen how to handle it.

    starts: number of runs.
    started_at: start of the current run, time.monotonic() seconds.
    age: seconds of the current run, as counted by `tick`.
    silence: seconds without a heartbeat, as counted by `tick`; 0 before the first one and before the process is ready.
    is_hung: whether the current run was killed because it hung.
    kill_seconds: seconds since that kill.
    ready_event: event by which the current run reported that it is ready; None before. The supervisor sets it.
    ready_at: when the supervisor set it, time.monotonic() seconds.
    is_killer_found: whether the request that crashed the earlier runs was found. The supervisor sets it.
    stopping: set once it must not be started again.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        arguments: Callable[[], Mapping[str, object]],
        on_event: Callable[[ChildProcess, dict[str, Any]], None],
        files: Sequence[int] = (),
        defers_sigterm: bool = False,
    ):
        self.name = name
        self.starts = 0
        self.started_at = 0.0
        self.age = 0.0
        self.silence = 0.0
        self.is_hung = False
        self.ready_event: dict[str, Any] | None = None
        self.ready_at = 0.0
        self.is_killer_found = False
        self.kill_seconds = 0.0
        self.stopping = asyncio.Event()
        self.pid = 0
        self._command = command
        self._environment = environment
        self._arguments = arguments
        self._on_event = on_event
        self._files = files
        self._defers_sigterm = defers_sigterm
        self._heartbeats = 0  # of the current run
        self._counted_heartbeats = 0  # at the last tick
        self._transport: asyncio.SubprocessTransport | None = None

    async def run(self) -> int:
        """Start the process and wait for its exit. Return its exit code; negative for a signal.

        Raises OSError or RuntimeError if the system cannot start a process now. Processes that it left in its process
        group are killed.
        """
        self.starts += 1
        self.started_at = time.monotonic()
        self.age = self.silence = self.kill_seconds = 0.0
        self._heartbeats = self._counted_heartbeats = 0
        self.is_hung = False
        self.pid = 0
        _require_files(START_FILES)
        output = _Output(self._on_line)
        pipe = asyncio.subprocess.PIPE
        deferred = {signal.SIGTERM} if self._defers_sigterm and self.starts > 1 else set()
        signal.pthread_sigmask(signal.SIG_BLOCK, deferred)  # the process inherits it; the fork precedes any other task
        try:
            transport, _ = await asyncio.get_running_loop().subprocess_exec(
                lambda: output, *self._command, env=self._environment, pass_fds=self._files, stdin=pipe, stdout=pipe,
                stderr=pipe, **OWN_GROUP)
        except (OSError, RuntimeError):
            output.is_abandoned = True
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, deferred)
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
        """Send a signal that ends the process for good: SIGTERM or SIGKILL. A pause before a restart ends too."""
        self.stopping.set()
        self._send(number)

    def drain(self, seconds: float) -> None:
        """End the process for good once its requests have ended, at most `seconds` from now."""
        self.stopping.set()
        self.order(drain=seconds)

    def stop(self) -> None:
        """End the engine for good: by an order if it runs, by a signal if it still loads, see engine/process.py."""
        self.order(stop=True)
        self.signal(signal.SIGKILL if self.starts > 1 and self.ready_event is None else signal.SIGTERM)

    def order(self, **order: object) -> None:
        """Write an order on its stdin, if it is running."""
        if self.is_running:
            self._write(order)

    @property
    def has_beaten(self) -> bool:
        """Return whether the current run has sent a heartbeat or is ready."""
        return self._heartbeats > 0

    @property
    def is_running(self) -> bool:
        return self._transport is not None and self._transport.get_returncode() is None

    def tick(self, seconds: float) -> None:
        """Count time. Call it every `seconds`.

        Counted time, unlike a clock, does not advance while the supervisor itself or the whole machine is suspended.
        """
        if not self.is_running:
            return
        is_silent = self._heartbeats == self._counted_heartbeats > 0
        self._counted_heartbeats = self._heartbeats
        self.age += seconds
        self.silence = self.silence + seconds if is_silent else 0.0
        self.kill_seconds += seconds if self.is_hung else 0.0

    def kill_hung(self) -> None:
        """Kill the process because it hangs. It may be started again."""
        self.is_hung = True
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self._transport and self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self._transport.send_signal(number)

    def _write(self, line: Mapping[str, object]) -> None:
        stdin = self._transport and self._transport.get_pipe_transport(0)
        if isinstance(stdin, asyncio.WriteTransport):
            with contextlib.suppress(OSError, RuntimeError):
                stdin.write(encode_line(line))

    def _on_line(self, line: bytes) -> None:
        event = parse_event(line)
        if event is None:
            logs.event(log, f"{self.name} said", text=line.decode(errors="replace").rstrip())
            return
        if event["event"] == HEARTBEAT:
            self._heartbeats += 1
            return
        if event["event"] == "ready":
            # It counts as the first heartbeat. The process's own first one may be dropped, see Heartbeat, and the
            # process may hang before the next.
            self._heartbeats = self._heartbeats or 1
        self._on_event(self, event)


def _require_files(count: int) -> None:
    """Raise OSError if this process cannot open `count` more files.

    subprocess.Popen of Python before 3.13 leaks the pipes that it has opened when it fails to open further ones.
    """
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def _forward(line: bytes) -> None:
    logs.forward(line + b"\n")


class _Output(asyncio.SubprocessProtocol):
    """Output of one run. Lines of stdout go to `on_line`, lines of stderr to this process's log.

    exited: done when the process has exited, even if other processes hold its pipes.
    closed: done when both pipes are closed.
    is_abandoned: whether nothing waits for its exit, as the system has no thread for that. The process is then killed.
    """

    def __init__(self, on_line: Callable[[bytes], None]):
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.is_abandoned = False
        self._sinks: dict[int, Callable[[bytes], None]] = {1: on_line, 2: _forward}
        self._rest = {1: b"", 2: b""}
        self._open = {1, 2}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self.is_abandoned:
            transport.close()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, rest = (self._rest[fd] + data).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            lines = [*lines, rest]
            rest = b""
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
        """Pass on an incomplete last line."""
        for fd, rest in self._rest.items():
            self._rest[fd] = b""
            if rest:
                self._sinks[fd](rest)
