"""Folder of traces: names, bounds, and what stays of processes that were killed."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from npuserve.npu.profile import ProfileError
from npuserve.npu.profiling import trace_folder
from npuserve.npu.profiling.trace_folder import TraceFolder


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "a.b", "-a", "x" * 65, "a b", "ä"])
def test_reserve_refuses_names_outside_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProfileError, match="name: must be letters"):
        TraceFolder(tmp_path).reserve(name)


def test_reserve_counts_on_from_the_kept_traces_and_refuses_a_taken_name(tmp_path: Path) -> None:
    folder = TraceFolder(tmp_path)
    assert folder.reserve("") == "profile-1"
    folder.write("profile-7", b"{}")
    assert folder.reserve("") == "profile-8"
    assert folder.reserve("x" * 64) == "x" * 64
    with pytest.raises(ProfileError, match="name: a trace of this name is kept"):
        folder.reserve("profile-7")


def test_write_compresses_large_traces_and_refuses_larger_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = TraceFolder(tmp_path / "made")
    monkeypatch.setattr(trace_folder, "PLAIN_BYTES", 10)
    monkeypatch.setattr(trace_folder, "MAX_TRACE_BYTES", 20)
    small, large = folder.write("small", b"x" * 10), folder.write("large", b"x" * 11)
    assert (small.name, large.name) == ("small.trace.json", "large.trace.json.gz")
    assert gzip.decompress(large.read_bytes()) == b"x" * 11
    assert small.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ProfileError, match="the trace has 21 bytes, more than 20"):
        folder.write("larger", b"x" * 21)
    assert len(list(folder.path.iterdir())) == 2


def test_write_removes_the_oldest_beyond_number_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of others stay, whatever their age."""
    (tmp_path / "other.json").write_bytes(b"x" * 100)
    (tmp_path / "link.trace.json").symlink_to(tmp_path / "other.json")
    monkeypatch.setattr(trace_folder, "MAX_TRACES", 3)
    monkeypatch.setattr(trace_folder, "MAX_TRACES_BYTES", 25)
    folder = TraceFolder(tmp_path)
    for number in range(1, 6):
        made = folder.write(f"t{number}", b"x" * 5)
        os.utime(made, (number, number))
    kept = {"other.json", "link.trace.json"}
    assert {file.name for file in tmp_path.iterdir()} == kept | {f"t{n}.trace.json" for n in (3, 4, 5)}
    folder.write("large", b"x" * 18)
    assert {file.name for file in tmp_path.iterdir()} == kept | {"t5.trace.json", "large.trace.json"}


def test_parts_of_a_killed_process_are_removed_at_the_start(tmp_path: Path) -> None:
    folder = TraceFolder(tmp_path)
    (folder.scratch("a") / "device.json").write_text("{}")
    (tmp_path / ".b.trace.json.part").write_text("{}")
    TraceFolder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unusable_folder_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        TraceFolder(tmp_path / "file" / "traces")
