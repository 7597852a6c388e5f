"""Text of the metrics page, compared with the page that prometheus_client makes of the same files."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.utils import floatToGoString

from npuserve.service.supervisor import page_text
from npuserve.service.supervisor.page_text import PageText
from tests.service.supervisor.test_metrics_page import samples

BOUNDS = (0.005, 0.25, 1.0, 2.5, 10.0, float("inf"))
DECLARED = (("calls", "counter", "Calls"), ("seconds", "histogram", 'Time\nin "s" \\'), ("live", "gauge", "Sum"),
            ("top", "gauge", "Maximum"), ("low", "gauge", "Minimum"), ("unused", "counter", "Nothing"))


class Process:
    """Metrics files of one process, written as prometheus_client does."""

    def __init__(self, folder: Path, pid: int):
        self._folder, self._pid = folder, pid
        self._files: dict[str, MmapedDict] = {}

    def add(self, prefix: str, name: str, sample: str, labels: dict[str, str], value: float) -> None:
        if prefix not in self._files:
            self._files[prefix] = MmapedDict(str(self._folder / f"{prefix}_{self._pid}.db"))
        file, key = self._files[prefix], mmap_key(name, sample, list(labels), list(labels.values()), "text")
        before = file.read_value(key)[0] if key in file._positions else 0.0
        file.write_value(key, value if prefix.startswith("gauge") else before + value, 0.0)

    def count(self, value: float, **labels: str) -> None:
        self.add("counter", "calls", "calls_total", labels, value)

    def observe(self, value: float, **labels: str) -> None:
        """Add a sample to the histogram, whose series it creates first."""
        self.add("histogram", "seconds", "seconds_sum", labels, value)
        for bound in BOUNDS:
            bucket = {**labels, "le": floatToGoString(bound)}
            below = max((b for b in BOUNDS if b < bound), default=float("-inf"))
            self.add("histogram", "seconds", "seconds_bucket", bucket, float(below < value <= bound))

    def set(self, name: str, value: float, **labels: str) -> None:
        mode = {"live": "livesum", "top": "livemax", "low": "livemin"}[name]
        self.add(f"gauge_{mode}", name, name, labels, value)

    def remove(self) -> None:
        """Remove the files, as of a process that has died."""
        for prefix, file in self._files.items():
            file.close()
            (self._folder / f"{prefix}_{self._pid}.db").unlink()
        self._files.clear()


def expected(folder: Path) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the samples of prometheus_client's own page."""

    class Collector:
        def collect(self) -> Any:
            return MultiProcessCollector.merge([str(file) for file in folder.glob("*.db")])

    registry = CollectorRegistry()
    registry.register(Collector())  # type: ignore[arg-type]
    return samples(generate_latest(registry).decode())


def page(text: PageText) -> str:
    text.refresh()
    return "".join(family.text for family in text.families.values())


def made(folder: Path, broken: list[str] | None = None) -> PageText:
    def on_broken(name: str, error: Exception) -> None:
        assert broken is not None, error
        broken.append(name)

    return PageText(folder, DECLARED, on_broken)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 4))])
def test_page_equals_that_of_prometheus_client_after_any_changes(tmp_path: Path, seed: int) -> None:
    chance, pids = random.Random(seed), iter(range(100, 1000))
    text = made(tmp_path)
    processes = [Process(tmp_path, next(pids))]
    words = ["a", 'q"u\\o\nte', "漢", ""]
    for _ in range(150):
        one = chance.choice(processes)
        match chance.randrange(8):
            case 0 | 1:
                one.count(chance.choice([1, 0.5, 10**9]), rpc=chance.choice(words), code=chance.choice(words))
            case 2 | 3:
                one.observe(chance.choice([0.001, 0.25, 3, 99]), phase=chance.choice(words))
            case 4 | 5:
                one.set(chance.choice(["live", "top", "low"]), chance.uniform(-5, 5), state=chance.choice(words))
            case 6 if len(processes) < 5:
                processes.append(Process(tmp_path, next(pids)))
            case 7 if len(processes) > 1:
                processes.remove(one)
                one.remove()
        if chance.random() < 0.4:
            assert samples(page(text)) == pytest.approx(expected(tmp_path))
    text.close()


def test_page_without_samples_names_the_metrics(tmp_path: Path) -> None:
    text = made(tmp_path)
    assert page(text).splitlines()[:4] == [
        "# HELP calls_total Calls", "# TYPE calls_total counter", '# HELP seconds Time\\nin "s" \\\\',
        "# TYPE seconds histogram"]
    (tmp_path / "counter_1.db").touch()  # a process has not set the file's size yet
    assert page(text) == page(made(tmp_path))


def test_refresh_returns_what_has_changed_and_formats_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, process = made(tmp_path), Process(tmp_path, 7)
    for phase in ("a", "b"):
        process.observe(0.1, phase=phase)
    process.count(1)
    assert text.refresh() == {"seconds", "calls"}
    assert text.refresh() == set()
    formatted: list[object] = []
    real = page_text.Group.update
    monkeypatch.setattr(page_text.Group, "update", lambda group: formatted.append(group.labels) or real(group))
    process.observe(0.1, phase="b")
    assert text.refresh() == {"seconds"}
    assert formatted == [(("phase", "b"),)]
    assert list(text.values("calls")) == [1]


def test_page_after_an_error_shows_what_changed_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, process, gone = made(tmp_path), Process(tmp_path, 7), Process(tmp_path, 8)
    process.count(1)
    gone.set("top", 5)
    page(text)
    process.count(1)
    gone.remove()
    process.set("live", 3)
    with monkeypatch.context() as patch:
        patch.setattr(page_text.os, "open", lambda *_: os.read(-1, 1))  # an OSError, when the new file is opened
        with pytest.raises(OSError, match="descriptor"):
            text.refresh()
    assert samples(page(text)) == expected(tmp_path)


def test_page_beside_a_broken_file_shows_a_new_process_in_place_of_another(tmp_path: Path) -> None:
    text, process = made(tmp_path, []), Process(tmp_path, 7)
    (tmp_path / "counter_1.db").write_bytes(b"x" * 100)
    process.set("live", 3)
    page(text)
    process.remove()
    Process(tmp_path, 8).set("live", 4)
    assert samples(page(text))["live", ()] == 4


@pytest.mark.parametrize("content", [
    b"\xff\xff\xff\xff", struct.pack("i", 1 << 30), struct.pack("ii", 4096, 0),
    struct.pack("iii", 64, 0, -5) + bytes(52),
    struct.pack("iii20s", 64, 0, 20, b"not json" + b" " * 12) + bytes(32),
    struct.pack("iii36s", 80, 0, 36, b'["calls", "calls_total", [], 5]     ') + bytes(32),
])
def test_page_leaves_out_a_broken_file(tmp_path: Path, content: bytes) -> None:
    broken: list[str] = []
    text, process = made(tmp_path, broken), Process(tmp_path, 7)
    process.count(3)
    before = page(text)
    (tmp_path / "counter_8.db").write_bytes(content)
    assert page(text) == before
    assert broken == ["counter_8.db"]
    (tmp_path / "counter_8.db").unlink()
    text.keep("counter_8.db")
    assert page(text) == before
    Process(tmp_path, 8).count(4)
    assert list(made(tmp_path).refresh()) == ["calls"]
    assert samples(page(text))["calls_total", ()] == 7


def test_keep_counts_of_removed_files(tmp_path: Path) -> None:
    text, one, other = made(tmp_path), Process(tmp_path, 7), Process(tmp_path, 8)
    for process in (one, other):
        process.count(2, rpc=f"of {process._pid}")
        process.observe(0.5, phase="a")
    wanted = samples(page(text))
    for process in (one, other):
        process.remove()
        text.keep(f"counter_{process._pid}.db")
        text.keep(f"histogram_{process._pid}.db")
        assert samples(page(text)) == wanted
    third = Process(tmp_path, 9)
    third.count(1, rpc="of 7")
    third.observe(2, phase="a")
    found = samples(page(text))
    assert found["calls_total", (("rpc", "of 7"),)] == 3
    assert found["seconds_count", (("phase", "a"),)] == 3
    assert found["seconds_sum", (("phase", "a"),)] == 3
    third.remove()
    assert samples(page(text)) == wanted


def test_page_of_a_file_that_was_replaced_is_that_of_the_new_one(tmp_path: Path) -> None:
    text = made(tmp_path)
    Process(tmp_path, 7).count(100)
    assert samples(page(text))["calls_total", ()] == 100
    (tmp_path / "counter_7.db").rename(tmp_path / "old")
    Process(tmp_path, 7).count(1)
    assert samples(page(text))["calls_total", ()] == 1


def test_page_closes_the_files_that_are_gone(tmp_path: Path) -> None:
    text = made(tmp_path)
    page(text)
    before = len(os.listdir("/proc/self/fd"))
    for pid in range(50):
        process = Process(tmp_path, pid)
        process.count(1)
        page(text)
        process.remove()
    page(text)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not text.families["calls"].groups
