"""Metrics file of a process: its format, its growth, and values without disk space."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from prometheus_client.mmap_dict import MmapedDict

from npuserve.service import metrics_file
from npuserve.service.metrics_file import MIN_FILE_BYTES, MetricsFile, entries

KEYS = [f'["calls", "calls_total", {{"number": "{"x" * length}"}}, "Calls"]' for length in range(40)]


class Disk:
    """Disk without space while `is_full`, for files of more than `free` bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = True
        self.free = 0
        self.attempts = 0
        self._reserve = os.posix_fallocate
        monkeypatch.setattr(os, "posix_fallocate", self.reserve)
        monkeypatch.setattr(metrics_file, "RETRY_SECONDS", 0.0)

    def reserve(self, descriptor: int, offset: int, size: int) -> None:
        self.attempts += 1
        if self.is_full and offset + size > self.free:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._reserve(descriptor, offset, size)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def content(path: Path) -> dict[str, float]:
    """Return the values of a file as prometheus_client reads it."""
    return {key: value for key, value, _, _ in MmapedDict.read_all_values_from_file(str(path))}


def test_metrics_file_is_read_by_prometheus_client_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "counter_1.db"
    file = MetricsFile(path)
    for number, key in enumerate(KEYS):
        assert file.read(key) == 0.0
        file.write(key, number)
    file.write(KEYS[3], 0.5)
    expected = {key: float(number) for number, key in enumerate(KEYS)} | {KEYS[3]: 0.5}
    assert content(path) == expected
    again = MetricsFile(path)
    assert {key: again.read(key) for key in KEYS} == expected
    again.write("new", 7)
    assert content(path) == expected | {"new": 7}


def test_metrics_file_grows_with_reserved_space(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "counter_1.db")
    for number in range(3000):
        file.write(f"{number:0100}", number)
    assert file.error is None
    assert content(tmp_path / "counter_1.db") == {f"{number:0100}": number for number in range(3000)}
    state = (tmp_path / "counter_1.db").stat()
    assert state.st_size > 4 * MIN_FILE_BYTES
    assert state.st_blocks * 512 >= state.st_size


@pytest.mark.parametrize("damage", [b"\xff\xff\xff\x7f", b"\x40\0\0\0" + bytes(4) + b"\xff\xff\xff\x7f"])
def test_metrics_file_that_is_broken_is_begun_anew(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "counter_1.db"
    path.write_bytes(damage.ljust(MIN_FILE_BYTES, b"\0"))
    MetricsFile(path).write("a", 1)
    assert content(path) == {"a": 1}


@pytest.mark.parametrize("free", [0, MIN_FILE_BYTES])
def test_metrics_file_without_space_keeps_values_in_memory(free: int, disk: Disk, tmp_path: Path) -> None:
    """From the start, and when it has to grow. What has space in the file is written to it meanwhile."""
    disk.free = free
    path, values = tmp_path / "counter_1.db", {f"{number:0100}": float(number) for number in range(1000)}
    file = MetricsFile(path)
    for key, value in values.items():
        file.write(key, value)
    assert isinstance(file.error, OSError)
    assert file.error.errno == errno.ENOSPC
    written = content(path) if free else {}
    assert len(written) == (MIN_FILE_BYTES // 128 - 1 if free else 0)
    for key in values:
        file.write(key, values[key] + 1)
    assert {key: file.read(key) - 1 for key in values} == values
    assert (content(path) if free else {}) == {key: value + 1 for key, value in written.items()}
    disk.is_full = False
    file.store()
    assert file.error is None
    assert content(path) == {key: value + 1 for key, value in values.items()}


def test_metrics_file_without_space_is_tried_once_in_a_while(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_file, "RETRY_SECONDS", 1000.0)
    file = MetricsFile(tmp_path / "counter_1.db")
    for number in range(100):
        file.write(str(number), 1)
        file.store()
    assert disk.attempts == 1


def test_entries_of_a_cut_file_are_refused(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "counter_1.db").write("key", 1)
    data = (tmp_path / "counter_1.db").read_bytes()
    assert [key for key, _ in entries(data, 8, 32)] == [b"key"]
    with pytest.raises(ValueError, match="does not fit 24 used bytes"):
        list(entries(data, 8, 24))
