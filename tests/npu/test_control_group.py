"""Control groups of versions 1 and 2: the limits of a group and of its ancestors."""

from __future__ import annotations

from pathlib import Path

import pytest

from npuserve.npu import control_group

V2 = {
    "memory.max": "1000", "memory.current": "700", "memory.stat": "anon 600\ninactive_file 50\n",
    "cpu.max": "150000 100000",
}
V1 = {
    "memory/{}/memory.limit_in_bytes": "1000", "memory/{}/memory.usage_in_bytes": "950",
    "memory/{}/memory.stat": "inactive_file 5\ntotal_inactive_file 100\n",
    "cpu/{}/cpu.cfs_quota_us": "300000", "cpu/{}/cpu.cfs_period_us": "100000",
}
UNIT = "system.slice/npuserve.service"
CONTAINER_V1 = "2:cpu,cpuacct:/docker/0\n1:memory:/docker/0\n"
NESTED_V1 = f"3:cpuset:/\n2:cpu,cpuacct:/{UNIT}\n1:memory:/{UNIT}\n0::/\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(control_group, "ROOT", tmp_path / "root")
    monkeypatch.setattr(control_group, "MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def write(root: Path, files: dict[str, str], membership: str = "0::/\n") -> None:
    (root.parent / "membership").write_text(membership)
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


@pytest.mark.parametrize(("files", "membership", "free", "cores"), [
    ({}, "", [], []),
    ({"memory.max": "max\n", "memory.current": "5", "cpu.max": "max 100000"}, "0::/\n", [], []),
    (V2, "0::/\n", [350], [2]),
    (V2, "0::/../other\n", [350], [2]),
    ({f"{UNIT}/{name}": text for name, text in V2.items()}, f"0::/{UNIT}\n", [350], [2]),
    ({f"{UNIT}/{name}": text for name, text in V2.items()}, "0::/user.slice\n", [], []),
    ({name.format("."): text for name, text in V1.items()}, CONTAINER_V1, [150], [3]),
    ({name.format(UNIT): text for name, text in V1.items()}, NESTED_V1, [150], [3]),
    ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, NESTED_V1, [], []),
])
def test_control_group_limits(root: Path, files: dict[str, str], membership: str, free: list[int], cores: list[int]):
    write(root, files, membership)
    assert (control_group.free_memory(), control_group.core_quotas()) == (free, cores)


def test_control_group_limits_of_ancestors_count(root: Path):
    write(root, {
        "memory.max": "max", "a/cpu.max": "100000 100000", "a/memory.max": "500", "a/memory.current": "480",
        "a/b/cpu.max": "400000 100000", "a/b/memory.max": "900", "a/b/memory.current": "100",
    }, "0::/a/b\n")
    assert (control_group.free_memory(), control_group.core_quotas()) == ([20, 800], [1, 4])


def test_control_group_without_proc(root: Path):
    write(root, V2)
    (root.parent / "membership").unlink()
    assert (control_group.free_memory(), control_group.core_quotas()) == ([350], [2])
