"""Metrics files of a process: values by key, in memory-mapped files that outlive the process.

The format is that of prometheus_client's multiprocess mode. A file holds the number of its used bytes, and entries. An
entry is the length of its key, the key (a JSON list: metric, sample, labels, help), padding, and two doubles: the value
and a timestamp, which is not used here. Entries never move. The kind of the metrics, the way in which gauges are
combined, and the process are in the file's name.

A process that writes to a mapped page without disk space dies by SIGBUS. A file's space is therefore reserved before it
is mapped. Values without space wait in memory: a full disk costs their samples on the page until there is space again.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from prometheus_client.mmap_dict import mmap_key

LENGTH = struct.Struct("i")
HEADER_BYTES = 8
VALUE_BYTES = 16
"""Size of the value and the timestamp of an entry."""
MIN_FILE_BYTES = 1 << 16
"""Size of a new file, which doubles as entries are added."""
RETRY_SECONDS = 1.0
"""Minimum time between two attempts to reserve space."""
_DOUBLE = struct.Struct("d")


def entries(data: bytes | mmap.mmap, start: int, end: int) -> Iterator[tuple[bytes, int]]:
    """Yield the key of each entry between two offsets, and the offset of its value. Raises ValueError."""
    position = start
    while position < end:
        (length,) = LENGTH.unpack_from(data, position)
        key_start = position + LENGTH.size
        key_end = key_start + length
        position = key_end + 8 - key_end % 8  # aligned, with at least one byte of padding
        if length < 1 or position + VALUE_BYTES > end:
            raise ValueError(f"an entry of {length} bytes at {key_start} does not fit {end} used bytes")
        yield data[key_start:key_end], position
        position += VALUE_BYTES


class MetricsFile:
    """Metrics file of this process. A file of a dead process with the same id is continued. Not thread-safe.

    error: why values wait in memory; None if none do.
    """

    def __init__(self, path: Path):
        self.error: OSError | None = None
        self._path = path
        self._map: mmap.mmap | None = None
        self._used = 0
        self._offsets: dict[str, int] = {}  # of the values in the file
        self._waiting: dict[str, float] = {}  # values without space in the file
        self._next_attempt = 0.0
        self.store()

    def read(self, key: str) -> float:
        """Return the value of a key; 0.0 before the first `write`."""
        if self._map and key in self._offsets:
            value: float = _DOUBLE.unpack_from(self._map, self._offsets[key])[0]
            return value
        return self._waiting.get(key, 0.0)

    def write(self, key: str, value: float) -> None:
        if self._map and key in self._offsets:
            offset = self._offsets[key]
            self._map[offset : offset + _DOUBLE.size] = _DOUBLE.pack(value)  # at once, unlike pack_into
            return
        self._waiting[key] = value
        self.store()

    def store(self) -> None:
        """Add the waiting values to the file. If there is no space, retry after RETRY_SECONDS at the earliest."""
        if self.error and time.monotonic() < self._next_attempt:
            return
        try:
            if self._map is None:
                self._open()
            for key, value in list(self._waiting.items()):
                self._add(key, value)
                del self._waiting[key]
        except OSError as error:
            self.error = error
            self._next_attempt = time.monotonic() + RETRY_SECONDS
        else:
            self.error = None

    def _open(self) -> None:
        """Create the file, or continue an existing one unless it is broken. Raises OSError."""
        mapped = self._reserve(MIN_FILE_BYTES)
        (used,) = LENGTH.unpack_from(mapped, 0)
        try:
            self._offsets = {key.decode(): offset for key, offset in entries(mapped, HEADER_BYTES, used)}
        except (ValueError, struct.error):
            used = 0
        self._map = mapped
        self._set_used(max(used, HEADER_BYTES))

    def _add(self, key: str, value: float) -> None:
        """Add an entry. Raises OSError if there is no space for it."""
        text = key.encode()
        padding = b" " * (8 - (LENGTH.size + len(text)) % 8)
        entry = LENGTH.pack(len(text)) + text + padding + _DOUBLE.pack(value) + _DOUBLE.pack(0.0)
        assert self._map
        while self._used + len(entry) > len(self._map):
            self._map = self._reserve(2 * len(self._map))
        self._map[self._used : self._used + len(entry)] = entry
        self._offsets[key] = self._used + len(entry) - VALUE_BYTES
        self._set_used(self._used + len(entry))

    def _set_used(self, used: int) -> None:
        assert self._map
        self._used = used
        self._map[: LENGTH.size] = LENGTH.pack(used)

    def _reserve(self, size: int) -> mmap.mmap:
        """Reserve disk space for at least `size` bytes and map the file. Raises OSError."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = max(size, os.fstat(descriptor).st_size)
            os.posix_fallocate(descriptor, 0, size)
            return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)


_lock = threading.Lock()
_files: dict[str, MetricsFile] = {}  # of this process, by the beginning of their names


class FileValue:
    """Value of one sample in a metrics file of this process: a ValueClass of prometheus_client."""

    _multiprocess = True

    def __init__(
        self, typ: str, metric_name: str, name: str, labelnames: Sequence[str], labelvalues: Sequence[str],
        help_text: str, multiprocess_mode: str = "", **_options: object,
    ):
        kind = f"{typ}_{multiprocess_mode}" if typ == "gauge" else typ
        self._key = mmap_key(metric_name, name, list(labelnames), list(labelvalues), help_text)
        with _lock:
            if kind not in _files:
                _files[kind] = MetricsFile(Path(os.environ["PROMETHEUS_MULTIPROC_DIR"], f"{kind}_{os.getpid()}.db"))
            self._file = _files[kind]
            self._value = self._file.read(self._key)
            self._file.write(self._key, self._value)

    def inc(self, amount: float) -> None:
        with _lock:
            self._value += amount
            self._file.write(self._key, self._value)

    def set(self, value: float, timestamp: float | None = None) -> None:
        with _lock:
            self._value = value
            self._file.write(self._key, value)

    def get(self) -> float:
        return self._value

    def set_exemplar(self, exemplar: object) -> None:
        """Ignore an exemplar, which the page cannot show."""

    def get_exemplar(self) -> None:
        return None


def store() -> OSError | None:
    """Add the waiting values of all files of this process to the files. Return why values still wait; None if not."""
    with _lock:
        for file in _files.values():
            if file.error:
                file.store()
        return next((file.error for file in _files.values() if file.error), None)
