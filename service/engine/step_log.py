"""A file in memory that holds which requests were in the steps in flight, so that it survives the engine's SIGKILL.

The engine writes it before each launch. The file has three parts: two lists of sequence ids, each with its length
first, since at most two steps are in flight, and a table of the sequences' names. A sequence keeps its place in the
table from its first step until it has ended, so that a step's list is written without a look at its requests. The next
life of the engine reads all before it writes.
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

_WORD = struct.calcsize("<Q")
_NAME = struct.Struct("<QQ")
"""1 + a sequence's id, 0 for a free place; its request's name."""


def name_of(request: Request) -> int:
    """Return a 64-bit name that is the same in every life of the engine."""
    text = f"{request.client}\0{request.request_id}\0{request.arrival.hex()}".encode()
    return int.from_bytes(blake2b(text, digest_size=_WORD).digest(), "little")


class StepLog:
    """The names of the requests in the steps in flight.

    path: of the file, made where it is missing; "" keeps nothing. OSError where it cannot be made.
    rows: most rows of a step.
    places: most sequences that have begun and not ended; others are not noted.
    """

    def __init__(self, path: str, rows: int, places: int):
        self._is_on = bool(path)
        self._rows = rows
        self._half = _WORD * (1 + rows)
        self._size = 2 * self._half + places * _NAME.size
        self._map: mmap.mmap | bytearray = _open(path, self._size) if path else bytearray(self._size)
        self._ids: list[list[int]] = [[], []]  # as they are in the lists
        self._is_mine = False  # what the last life wrote is removed
        self._next = 0
        self._free = list(range(2 * self._half, self._size, _NAME.size))  # offsets in the table
        self._places: dict[int, int] = {}

    def read(self) -> frozenset[int]:
        """Return the names of the requests in both lists."""
        table = _NAME.iter_unpack(self._map[2 * self._half : self._size])
        names = {number - 1: name for number, name in table if number}
        found: set[int] = set()
        for at in (0, self._half):
            (count,) = struct.unpack_from("<Q", self._map, at)
            ids = struct.unpack_from(f"<{min(count, self._rows)}Q", self._map, at + _WORD)
            found.update(names[one] for one in ids if one in names)
        return frozenset(found)

    def write(self, step: Step, sequence: Callable[[int], Sequence], is_first: bool) -> None:
        """Write a step's requests before its launch.

        sequence: returns the one of a request_id.
        is_first: no other step is in flight.
        """
        if not self._is_on:
            return
        if not self._is_mine:
            self.clear()
        half = self._next = 1 - self._next
        if is_first and self._ids[1 - half]:
            self._put(1 - half, [])
        for ended in step.ended:
            if (place := self._places.pop(ended, None)) is not None:
                self._free.append(place)
        for new in step.new:
            if self._free:
                self._places[new.request_id] = place = self._free.pop()
                name = name_of(sequence(new.request_id).request)
                _NAME.pack_into(self._map, place, 1 + new.request_id, name)
        ids = [row.request_id for row in step.rows]
        if ids != self._ids[half]:
            self._put(half, ids)

    def clear(self) -> None:
        """No step is in flight."""
        if not self._is_mine:
            self._is_mine = True
            self._map[:] = bytes(self._size)
        self._put(0, [])
        self._put(1, [])

    def _put(self, half: int, ids: list[int]) -> None:
        self._ids[half] = ids
        data, at = array("Q", [len(ids), *ids]).tobytes(), half * self._half
        self._map[at : at + len(data)] = data


def _open(path: str, size: int) -> mmap.mmap:
    """Map the file, whose blocks are on the disk: a full disk then fails here, and no later write."""
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
