"""A process's sign of life: a counter in a small mapped file, which its main loop moves on with each turn.

The supervisor only looks whether the counter has moved since it last looked, and counts its own looks: so it compares
no clocks, and a pause of the whole machine, its own included, is nobody's hang. Until the first beat there is nothing
to miss: a process loads, compiles and captures for as long as it takes.
"""

from __future__ import annotations

import mmap
import os
import struct

_COUNTER = struct.Struct("<Q")


class Pulse:
    """The beating end. path: made by `Watch`; "" for nobody who looks."""

    def __init__(self, path: str):
        self._beats = 0
        self._map: mmap.mmap | bytearray = _open(path) if path else bytearray(_COUNTER.size)

    def beat(self) -> None:
        self._beats += 1
        _COUNTER.pack_into(self._map, 0, self._beats)


class Watch:
    """The looking end. Makes the file; OSError where it cannot."""

    def __init__(self, path: str):
        self.path = path
        with open(path, "wb") as file:
            file.write(bytes(_COUNTER.size))  # has its block on the disk: a full one cannot fail a beat
        self._map = _open(path)
        self._last = 0

    def reset(self) -> None:
        """A new process begins."""
        self._last = 0
        _COUNTER.pack_into(self._map, 0, 0)

    def missed(self) -> bool:
        """Whether a process that beats has not since the last look."""
        beats: int = _COUNTER.unpack_from(self._map)[0]
        missed = beats == self._last > 0
        self._last = beats
        return missed


def _open(path: str) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, _COUNTER.size)
    finally:
        os.close(descriptor)
