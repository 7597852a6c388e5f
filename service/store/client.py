"""Client of a store, over a process that has the native client (store_process.py).

The engine's loop adds calls to queues, and a thread makes them one after another: lookups and loads before saves. Each
call has a time limit from the moment it is queued. A call that waits for half of it is not made. The process is killed
if a call takes longer.

Circuit breaker: after MAX_FAILURES failures in a row, or one kill, the store is not asked. The process is started again
after a pause, which doubles (`longer_pause`) until a call succeeds.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from npuserve.service import logs
from npuserve.service.processes.sandbox import KEPT_VARIABLES
from npuserve.service.store import messages
from npuserve.service.store.connector import UNREADABLE, SlotMemory, StoreResult, longer_pause
from npuserve.service.store.messages import Call, Clear, Connect, Load, Lookup, Save, Start

log = logging.getLogger("npuserve.service.store.client")

COMMAND = (sys.executable, "-m", "npuserve.service.store.store_process")
TUNING_PREFIX = "MC_"
"""Prefix of environment variables that Mooncake's client reads."""
MAX_ASKS = 64
"""Maximum number of lookups and loads that wait."""
MAX_FAILURES = 3
IDENTITY_SECONDS = 3600.0
"""Maximum time to read the files of the model."""
CONNECT_SECONDS = 10.0
"""Maximum time to connect to the store."""
MAX_WAIT_SHARE = 0.5
"""Share of a call's time after which it is not made: the process would be killed as slow, though it had many calls."""
LOAD_SHARE = 0.75
"""Share of the time that a load has left, after which the process reads no further value, so that it need not be
killed."""
REASONS = {messages.MISSING: "lost", messages.CORRUPT: "corrupt", messages.FULL: "full", messages.ERROR: "error",
           messages.LATE: "timeout"}


class _Broken(Exception):
    """The process has ended, or is too slow. reason: one of FAILURES."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True)
class _Waiting:
    """Call that waits, or is in progress. slots: of a load, or the one of a save."""

    id: int
    call: Lookup | Load | Save
    deadline: float
    slots: Sequence[int] = field(default_factory=tuple)


class StoreClient:
    """Connector (connector.py) over a process of its own.

    start: arguments of the process.
    memory: slots of host memory.
    seconds: time limit of a call.
    max_saves: maximum number of saves that wait.
    command: starts the process; a test replaces it.
    """

    def __init__(
        self, start: Start, memory: SlotMemory, seconds: float, max_saves: int,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.failures: Counter[str] = Counter()
        self.is_available = False
        self._start = start
        self._memory = memory
        self._seconds = seconds
        self._max_saves = max_saves
        self._command = command
        self._asks: deque[_Waiting] = deque()
        self._saves: deque[_Waiting] = deque()
        self._must_clear = False
        self._is_closed = False
        self._changed = threading.Condition()
        self._results: deque[StoreResult] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._num_failures = 0  # in a row
        self._pause = 0.0
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def lookup(self, call: int, keys: Sequence[bytes]) -> bool:
        return self._add(self._asks, MAX_ASKS, _Waiting(call, Lookup(list(keys)), self._deadline()))

    def load(self, call: int, keys: Sequence[bytes], slots: Sequence[int], *, is_whole: bool) -> bool:
        load = Load(list(keys), self._seconds, is_whole)
        return self._add(self._asks, MAX_ASKS, _Waiting(call, load, self._deadline(), slots))

    def save(self, call: int, key: bytes, slot: int) -> bool:
        return self._add(self._saves, self._max_saves, _Waiting(call, Save(key), 0.0, [slot]))

    def clear(self) -> None:
        with self._changed:
            self._must_clear = True
            self._drop_all()
            self._changed.notify()

    def take_results(self) -> list[StoreResult]:
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def close(self) -> None:
        """End the process and the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(2 * self._seconds + CONNECT_SECONDS)

    def _deadline(self) -> float:
        return time.monotonic() + self._seconds

    def _add(self, queue: deque[_Waiting], limit: int, waiting: _Waiting) -> bool:
        with self._changed:
            if not self.is_available:
                return False
            if len(queue) >= limit:
                self.failures["dropped"] += 1
                return False
            queue.append(waiting)
            self._changed.notify()
        return True

    def _end(self, waiting: _Waiting, num_values: int, present: bytes = b"") -> None:
        self._results.append(StoreResult(waiting.id, num_values, present))

    def _drop_all(self) -> None:
        """End the calls that wait without success. The caller holds the lock."""
        for queue in (self._asks, self._saves):
            while queue:
                self._end(queue.popleft(), 0)

    # The thread.

    def _run(self) -> None:
        while True:
            try:
                if self._process is None:
                    self._pause_before_start()
                    if self._is_closed:
                        return
                    self._open()
                waiting = self._next()
                if waiting is None:
                    self._stop()
                    return
                self._make(waiting)
            except _Broken as error:
                self._break(error.reason)
            except Exception as error:  # whatever it is: without this thread, requests would wait for ever
                logs.event(log, "a call of the store of prefixes failed", level=logging.ERROR, error=repr(error))
                self._break("error")

    def _next(self) -> _Waiting | Clear | None:
        """Wait for the next call. None: the client is closed."""
        with self._changed:
            while not (self._asks or self._saves or self._must_clear or self._is_closed):
                self._changed.wait()
            if self._is_closed:
                return None
            if self._must_clear:
                return Clear()
            return self._asks.popleft() if self._asks else self._saves.popleft()

    def _make(self, waiting: _Waiting | Clear) -> None:
        if isinstance(waiting, Clear):
            self._send(waiting, self._deadline())
            if self._check(self._receive(1, self._deadline())):
                with self._changed:
                    self._must_clear = False
            return
        num_values = 0
        present = b""
        try:
            match waiting.call:
                case Lookup():
                    present = self._lookup(waiting, len(waiting.call.keys))
                case Load():
                    num_values = self._load(waiting, waiting.call)
                case Save():
                    num_values = self._save(waiting)
        finally:
            self._end(waiting, num_values, present)

    def _lookup(self, waiting: _Waiting, num_keys: int) -> bytes:
        if self._is_late(waiting):
            return b""
        self._send(waiting.call, waiting.deadline)
        if not self._check(self._receive(1, waiting.deadline)):
            return b""
        return self._receive(num_keys, waiting.deadline)

    def _load(self, waiting: _Waiting, load: Load) -> int:
        if self._is_late(waiting):
            return 0
        seconds = LOAD_SHARE * (waiting.deadline - time.monotonic())
        self._send(msgspec.structs.replace(load, seconds=seconds), waiting.deadline)
        count = 0
        try:
            for slot in waiting.slots:
                if not self._check(self._receive(1, waiting.deadline)):
                    break
                self._receive_into(self._memory.view(slot), waiting.deadline)
                count += 1
        except _Broken as error:
            self._break(error.reason)  # what has arrived is of use
        return count

    def _save(self, waiting: _Waiting) -> int:
        deadline = self._deadline()
        value = self._memory.read(waiting.slots[0])
        if value is None:
            self.failures["corrupt"] += 1
            return UNREADABLE
        self._send(waiting.call, deadline)
        self._send_bytes(value, deadline)
        return int(self._check(self._receive(1, deadline)))

    def _is_late(self, waiting: _Waiting) -> bool:
        if waiting.deadline - time.monotonic() > (1 - MAX_WAIT_SHARE) * self._seconds:
            return False
        self.failures["timeout"] += 1
        return True

    def _check(self, status: bytes) -> bool:
        """Return whether a call succeeded. Count it, and break the connection after MAX_FAILURES failures in a row."""
        if status == messages.OK:
            self._num_failures = 0
            self._pause = 0.0
            return True
        if status in REASONS:
            self.failures[REASONS[status]] += 1
        if status in (messages.ERROR, messages.LATE):
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                self._break("")
        return False

    def _pause_before_start(self) -> None:
        until = time.monotonic() + self._pause
        with self._changed:
            while not self._is_closed and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)

    def _open(self) -> None:
        """Start the process and connect it to the store. Raises _Broken."""
        ours, theirs = socket.socketpair()
        kept = {name: value for name, value in os.environ.items()
                if name in KEPT_VARIABLES or name.startswith(TUNING_PREFIX)}
        with theirs:
            self._socket = ours
            try:
                self._process = subprocess.Popen(
                    (*self._command, str(theirs.fileno())), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, env=kept, pass_fds=[theirs.fileno()])
            except OSError as error:
                raise _Broken("error") from error
        deadline = time.monotonic() + IDENTITY_SECONDS
        self._send(self._start, deadline)
        size = messages.LENGTH.unpack(self._receive(messages.LENGTH.size, deadline))[0]
        if not size:
            raise _Broken("error")
        self._start = msgspec.structs.replace(self._start, identity=self._receive(size, deadline))
        deadline = time.monotonic() + CONNECT_SECONDS
        self._send(Connect(), deadline)
        if self._receive(1, deadline) != messages.OK:
            raise _Broken("error")
        with self._changed:
            self.is_available = True
        logs.event(log, "the store of prefixes is connected", address=self._start.address)

    def _break(self, reason: str) -> None:
        """Kill the process, and end the calls that wait. reason: of FAILURES; "" if the failure is counted."""
        if reason:
            self.failures[reason] += 1
        with self._changed:
            self.is_available = False
            self._drop_all()
        self._stop()
        self._num_failures = 0
        self._pause = longer_pause(self._pause)
        logs.event(log, "the store of prefixes does not answer; prompts are computed", level=logging.WARNING,
                   address=self._start.address, retry_seconds=self._pause)

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, call: Call, deadline: float) -> None:
        body = msgspec.msgpack.encode(call)
        self._send_bytes(messages.LENGTH.pack(len(body)) + body, deadline)

    def _send_bytes(self, data: bytes | memoryview, deadline: float) -> None:
        try:
            self._limited(deadline).sendall(data)
        except OSError as error:
            raise _Broken(_reason(error)) from error

    def _receive(self, size: int, deadline: float) -> bytes:
        data = bytearray(size)
        self._receive_into(memoryview(data), deadline)
        return bytes(data)

    def _receive_into(self, view: memoryview, deadline: float) -> None:
        while view:
            try:
                count = self._limited(deadline).recv_into(view)
            except OSError as error:
                raise _Broken(_reason(error)) from error
            if not count:
                raise _Broken("error")
            view = view[count:]

    def _limited(self, deadline: float) -> socket.socket:
        """Return the socket, whose next call ends at the deadline. Raises _Broken if it is closed or too late."""
        left = deadline - time.monotonic()
        if self._socket is None or left <= 0:
            raise _Broken("error" if self._socket is None else "timeout")
        self._socket.settimeout(left)
        return self._socket


def _reason(error: OSError) -> str:
    return "timeout" if isinstance(error, TimeoutError) else "error"
