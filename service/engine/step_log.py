"""Log of the requests in the steps in flight: a file in memory that survives the engine's SIGKILL.

The engine writes it before each launch. The file has three parts: two lists of sequence ids, each after its length,
since at most two steps are in flight, and a table of the sequences' request hashes. A sequence keeps its place in the
table from its first step until it has ended, so that a step's list is written without access to its requests. After a
restart the engine reads the whole file before it writes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from array import array
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from npuserve.npu.step import Step
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling.sequence import Sequence

_WORD_BYTES = struct.calcsize("<Q")
_ENTRY = struct.Struct("<QQ")
"""Table entry: 1 + the sequence's id, 0 for a free place; the hash of its request."""


def request_hash(request: Request) -> int:
    """Return a 64-bit hash of a request that is the same in every life of the engine."""
    text = f"{request.client}\0{request.request_id}\0{request.arrival.hex()}\0{request.index}".encode()
    return int.from_bytes(blake2b(text, digest_size=_WORD_BYTES).digest(), "little")


class StepLog:
    """Request hashes of the steps in flight.

    path: of the file, created if missing; "" keeps nothing. OSError if it cannot be created.
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
        self._is_cleared = False  # the last life's contents are removed
        self._last = 0  # list that was written last
        self._free = list(range(2 * self._list_bytes, self._size, _ENTRY.size))  # offsets in the table
        self._places: dict[int, int] = {}  # offset in the table by sequence id

    def read(self) -> frozenset[int]:
        """Return the hashes of the requests in both lists."""
        table = _ENTRY.iter_unpack(self._map[2 * self._list_bytes : self._size])
        hashes = {number - 1: key for number, key in table if number}
        found: set[int] = set()
        for start in (0, self._list_bytes):
            (count,) = struct.unpack_from("<Q", self._map, start)
            ids = struct.unpack_from(f"<{min(count, self._rows)}Q", self._map, start + _WORD_BYTES)
            found.update(hashes[one] for one in ids if one in hashes)
        return frozenset(found)

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
        data, start = array("Q", [len(ids), *ids]).tobytes(), index * self._list_bytes
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
