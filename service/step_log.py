"""A file in memory that holds which requests were in the steps in flight, so that it survives the engine's SIGKILL.

The engine writes it before each launch. At most two steps are in flight, and each has its own half of the file: a
number of names, then the names. The next life of the engine reads them before it writes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from npuserve.npu.step import Row
from npuserve.service.messages import Request
from npuserve.service.sequence import Sequence

_WORD = struct.calcsize("<Q")


def name_of(request: Request) -> int:
    """Return a 64-bit name that is the same in every life of the engine."""
    text = f"{request.client}\0{request.request_id}\0{request.arrival.hex()}".encode()
    return int.from_bytes(blake2b(text, digest_size=_WORD).digest(), "little")


class StepLog:
    """The names of the requests in the steps in flight.

    path: of the file, made where it is missing; "" keeps nothing. OSError where it cannot be made.
    rows: most rows of a step.
    """

    def __init__(self, path: str, rows: int):
        self._rows = rows if path else 0
        self._half = _WORD * (1 + self._rows)
        self._map: mmap.mmap | bytearray = _open(path, 2 * self._half) if path else bytearray(2 * self._half)
        self._ids: list[list[int] | None] = [None, None]  # sequences in each half, None: of the last life
        self._names: dict[int, int] = {}
        self._next = 0

    def read(self) -> frozenset[int]:
        """Return the names of both halves."""
        found: set[int] = set()
        for at in (0, self._half):
            (count,) = struct.unpack_from("<Q", self._map, at)
            found.update(struct.unpack_from(f"<{min(count, self._rows)}Q", self._map, at + _WORD))
        return frozenset(found)

    def write(self, rows: list[Row], sequence: Callable[[int], Sequence], is_first: bool) -> None:
        """Write a step's requests before its launch.

        sequence: returns the one of a row's request_id.
        is_first: no other step is in flight.
        """
        if not self._rows:
            return
        half = self._next = 1 - self._next
        if is_first and self._ids[1 - half] != []:
            self._put(1 - half, [], [])
        ids = [row.request_id for row in rows]
        if ids != self._ids[half]:
            known = self._names
            self._names = {one: known.get(one) or name_of(sequence(one).request) for one in ids}
            self._put(half, ids, list(self._names.values()))

    def clear(self) -> None:
        """No step is in flight."""
        self._put(0, [], [])
        self._put(1, [], [])

    def _put(self, half: int, ids: list[int], names: list[int]) -> None:
        self._ids[half] = ids
        struct.pack_into(f"<{1 + len(names)}Q", self._map, half * self._half, len(names), *names)


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
