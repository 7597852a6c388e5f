"""Search for requests that crash the engine: crashes are counted by the requests of the steps in flight.

- A request in a fatal step gets one crash more. After the restart it is in quarantine: it makes QUARANTINE_TOKENS
  tokens apart from all others (quarantine.py) before it runs beside them again.
- A request is the killer if it was alone in two successive fatal steps, at the same place, and has MIN_CRASHES crashes.
  The same place is near the same token of the answer, or after about as many tokens in three successive runs of the
  engine: twice may be chance if the engine is killed from outside. A killer among up to
  MAX_QUARANTINE_STEPS // QUARANTINE_TOKENS requests is found at the third crash: with others, alone, alone.
- A request that passed its quarantine in two runs, and was in a fatal step nevertheless, gets a longer quarantine: the
  tokens that it made in the last run, and QUARANTINE_TOKENS more. This finds requests that crash the engine after that
  many tokens of each run. After only one such run another request may be the killer, and the quarantine stays short.
- A request that made CLEAR_TOKENS tokens since its last crash starts anew.

The counts are in a file beside the step log. Both are files in memory that survive the engine's SIGKILL, and whose disk
space is reserved at the start.

The engine writes the step log before each launch. It has three parts: two lists of sequence ids, each after its length,
since at most two steps are in flight, and a table of the sequences' request hashes. A sequence keeps its place in the
table from its first step until it has ended, so that a step's list is written without access to its requests. After a
restart the engine reads the whole file before it writes.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import struct
from array import array
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import msgspec

from npuserve.npu.step import Step
from npuserve.service import logs
from npuserve.service.errors import EngineKiller
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling.quarantine import QUARANTINE_TOKENS
from npuserve.service.scheduling.sequence import Sequence

log = logging.getLogger(__name__)

MIN_CRASHES = 3
"""Crashes of the engine before a request is failed for them."""
NEAR_TOKENS = QUARANTINE_TOKENS - 1
"""Two crashes this many tokens apart count as at the same place: tokens of the steps in flight are lost. A request that
has passed its quarantine is beyond."""
MIN_REPEATS = 2
"""See CrashRecord.repeats."""
CLEAR_TOKENS = 256
MAX_RECORDS = 4096
"""The oldest are forgotten beyond this."""
MAX_RECORD_BYTES = 48
"""Maximum size of an encoded record with its key."""
_WORD_BYTES = struct.calcsize("<Q")
_ENTRY = struct.Struct("<QQ")
"""Table entry: 1 + the sequence's id, 0 for a free place; the hash of its request."""


class CrashRecord(msgspec.Struct, array_like=True):
    """Crashes of one request.

    crashes: number of engine crashes while the request was in a step in flight.
    quarantine_tokens: tokens to generate apart from other requests after the last crash.
    tokens: tokens of its answer at the last crash.
    generated_tokens: number of `tokens` that the crashed engine itself generated.

    is_alone: no other request was in the steps in flight at the last crash.
    has_passed: it had passed a quarantine before one of the crashes.
    repeats: number of last crashes before each of which `generated_tokens` was about the same as at the crash before.
    is_killer: it was found to be the killer.
    """

    crashes: int
    quarantine_tokens: int
    tokens: int
    generated_tokens: int
    is_alone: bool = False
    has_passed: bool = False
    repeats: int = 0
    is_killer: bool = False


class CrashTracker:
    """Crash records of requests across restarts of the engine.

    path: file of the step log; "" keeps nothing. The records are in the file `path`.counts.
    rows, places: see StepLog.
    on_killer: called once for each killer.

    OSError where the files cannot be used.
    """

    def __init__(self, path: str = "", rows: int = 0, places: int = 0, on_killer: Callable[[], None] = lambda: None):
        self._steps = StepLog(path, rows, places)
        self._counts = _open(f"{path}.counts", _WORD_BYTES + MAX_RECORDS * MAX_RECORD_BYTES) if path else None
        self._on_killer = on_killer
        self._fatal = self._steps.read()  # hashes of the requests in the last run's fatal step
        self._assessed: set[int] = set()  # hashes of the requests whose last crash is counted
        self._is_changed = False
        self._records = _read_records(self._counts) if self._counts else {}

    def before_launch(self, step: Step, sequence: Callable[[int], Sequence], is_first: bool) -> None:
        """Log a step before its launch. See StepLog.write."""
        self._steps.write(step, sequence, is_first)

    def mark_idle(self) -> None:
        """Clear the step log while no step is in flight: a crash is then no request's fault."""
        self._steps.clear()

    def assess(self, request: Request, tokens: int) -> CrashRecord | None:
        """Return the crash record of a request, which may continue after `tokens` tokens of its answer.

        None if the request needs no quarantine. Raises EngineKiller if the request is the killer.
        """
        if not self._fatal and not self._records:
            return None
        key = request_hash(request)
        record = self._records.get(key)
        if key in self._fatal and key not in self._assessed:
            self._assessed.add(key)
            record = self._records[key] = self._after_crash(record, tokens)
            self._is_changed = True
            if record.is_killer:
                self._on_killer()
                logs.event(log, "a request ends: it has crashed the engine", level=logging.ERROR, id=request.request_id,
                           deaths=record.crashes, tokens=tokens)
        if record is None:
            return None
        if record.is_killer:
            raise EngineKiller(
                f"the engine died {record.crashes} times while it ran this request, the last two times with no other")
        return record if tokens - record.tokens < record.quarantine_tokens else None

    def save(self) -> None:
        """Write the records that `assess` has changed."""
        if not self._is_changed or self._counts is None:
            return
        self._is_changed = False
        while len(self._records) > MAX_RECORDS:
            del self._records[next(iter(self._records))]
        data = msgspec.msgpack.encode(self._records)
        self._counts[:_WORD_BYTES] = bytes(_WORD_BYTES)  # no records, if the engine dies before the next two lines
        self._counts[_WORD_BYTES : _WORD_BYTES + len(data)] = data
        self._counts[:_WORD_BYTES] = struct.pack("<Q", len(data))

    def _after_crash(self, record: CrashRecord | None, tokens: int) -> CrashRecord:
        """Return the record after one more crash."""
        is_alone = len(self._fatal) == 1
        if record is None:
            return CrashRecord(1, QUARANTINE_TOKENS, tokens, tokens, is_alone)
        num_tokens = tokens - record.tokens
        if num_tokens >= CLEAR_TOKENS:
            return CrashRecord(1, QUARANTINE_TOKENS, tokens, num_tokens, is_alone)
        passes = num_tokens >= record.quarantine_tokens
        longer = passes and record.has_passed
        repeats = record.repeats + 1 if abs(num_tokens - record.generated_tokens) <= QUARANTINE_TOKENS else 0
        is_near = num_tokens <= NEAR_TOKENS or repeats >= MIN_REPEATS
        crashes = record.crashes + 1
        quarantine_tokens = num_tokens + QUARANTINE_TOKENS if longer else record.quarantine_tokens
        return CrashRecord(
            crashes, quarantine_tokens, tokens, num_tokens, is_alone, record.has_passed or passes, repeats,
            is_killer=is_alone and record.is_alone and is_near and crashes >= MIN_CRASHES)


def _read_records(counts: mmap.mmap) -> dict[int, CrashRecord]:
    """Return the records that an earlier run has saved."""
    (size,) = struct.unpack_from("<Q", counts, 0)
    try:
        return msgspec.msgpack.decode(counts[_WORD_BYTES : _WORD_BYTES + size], type=dict[int, CrashRecord])
    except msgspec.MsgspecError:  # none were saved
        return {}


def request_hash(request: Request) -> int:
    """Return a 64-bit hash of a request that is the same in every run of the engine."""
    text = f"{request.client}\0{request.request_id}\0{request.arrival.hex()}\0{request.index}".encode()
    return int.from_bytes(blake2b(text, digest_size=_WORD_BYTES).digest(), "little")


class StepLog:
    """Request hashes of the steps in flight.

    path: path of the file, created if missing; "" keeps nothing. OSError if it cannot be created.
    rows: maximum number of rows in a step.
    places: maximum number of sequences that have begun and not ended. Others are not logged.
    """

    def __init__(self, path: str, rows: int, places: int):
        self._is_on = bool(path)
        self._rows = rows
        self._list_bytes = _WORD_BYTES * (1 + rows)
        self._size = 2 * self._list_bytes + places * _ENTRY.size
        self._map: mmap.mmap | bytearray = _open(path, self._size) if path else bytearray(self._size)
        self._ids: list[list[int]] = [[], []]  # contents of the two lists
        self._is_cleared = False  # the last run's contents are removed
        self._last = 0  # list that was written last
        self._free = list(range(2 * self._list_bytes, self._size, _ENTRY.size))  # offsets in the table
        self._places: dict[int, int] = {}  # offset in the table by sequence id

    def read(self) -> frozenset[int]:
        """Return the hashes of the requests in both lists."""
        table = _ENTRY.iter_unpack(self._map[2 * self._list_bytes : self._size])
        hashes = {number - 1: key for number, key in table if number}
        live: set[int] = set()
        for start in (0, self._list_bytes):
            (count,) = struct.unpack_from("<Q", self._map, start)
            ids = struct.unpack_from(f"<{min(count, self._rows)}Q", self._map, start + _WORD_BYTES)
            live.update(hashes[id] for id in ids if id in hashes)
        return frozenset(live)

    def write(self, step: Step, sequence: Callable[[int], Sequence], is_first: bool) -> None:
        """Write a step's requests before its launch.

        sequence: returns the sequence of a request_id.
        is_first: no other step is in flight.
        """
        if not self._is_on:
            return
        if not self._is_cleared:
            self.clear()
        current = self._last = 1 - self._last
        if is_first and self._ids[1 - current]:
            self._put(1 - current, [])
        for ended in step.ended:
            if (place := self._places.pop(ended, None)) is not None:
                self._free.append(place)
        for new in step.new:
            if self._free:
                self._places[new.request_id] = place = self._free.pop()
                key = request_hash(sequence(new.request_id).request)
                _ENTRY.pack_into(self._map, place, 1 + new.request_id, key)
        ids = [row.request_id for row in step.rows]
        if ids != self._ids[current]:
            self._put(current, ids)

    def clear(self) -> None:
        """Empty both lists: no step is in flight."""
        if not self._is_cleared:
            self._is_cleared = True
            self._map[:] = bytes(self._size)
        self._put(0, [])
        self._put(1, [])

    def _put(self, index: int, ids: list[int]) -> None:
        """Write one of the two lists."""
        self._ids[index] = ids
        data = array("Q", [len(ids), *ids]).tobytes()
        start = index * self._list_bytes
        self._map[start : start + len(data)] = data


def _open(path: str, size: int) -> mmap.mmap:
    """Map the file. Its blocks are allocated here, so that a full disk fails here and not in a later write."""
    with contextlib.suppress(FileNotFoundError):
        if Path(path).stat().st_size == size:
            return _map(path, size)
    Path(path).write_bytes(bytes(size))
    return _map(path, size)


def _map(path: str, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
