"""Plans of processors on fake hosts, and their application to fake threads."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from npuserve.npu.cann import processors
from npuserve.npu.cann.processors import Plan, bind, make_plan
from npuserve.npu.cann.readings import Readings
from tests.npu.cann.host import host

TOPOLOGY = """
           NPU0       NPU1       NPU2       NPU3       CPU Affinity
NPU0       X          HCCS       HCCS       HCCS       0-23
NPU1       HCCS       X          HCCS       HCCS       0-23
NPU2       HCCS       HCCS       X          HCCS       24-35,40-47
NPU3       HCCS       HCCS       HCCS       X          48-71

Legend:

  X    = Self
  HCCS = Connection traversing HCCS.
"""
MAPPING = """
        NPU ID                         Chip ID                        Chip Logic ID                  Chip Name
        0                              0                              0                              Ascend 910B4
        1                              0                              1                              Ascend 910B4
        2                              0                              2                              Ascend 910B4
        3                              0                              3                              Ascend 910B4
        3                              1                              -                              Mcu
"""
PRINTED = {("info", "-t", "topo"): TOPOLOGY, ("info", "-m"): MAPPING}
ALL = range(72)


def on(root: Path, visible: str = "0", printed: dict[tuple[str, ...], str] | None = None,
       threads: dict[int, str] | None = None) -> Readings:
    files: dict[str, str | None] = {f"/proc/self/task/{number}/comm": f"{name}\n" for number, name in
                                    (threads or {}).items()}
    return host(root, files, {"ASCEND_RT_VISIBLE_DEVICES": visible}, npu_smi=PRINTED if printed is None else printed)


@pytest.mark.parametrize(("visible", "allowed", "plan"), [
    # Two NPUs share 24 processors: 12 each. The first two are for interrupts.
    ("0", ALL, Plan(tuple(range(2, 9)), 9, 10, 11)),
    ("1,0", ALL, Plan(tuple(range(14, 21)), 21, 22, 23)),
    ("2", ALL, Plan((*range(26, 36), *range(40, 45)), 45, 46, 47)),
    ("3", ALL, Plan(tuple(range(50, 69)), 69, 70, 71)),
    ("", ALL, Plan(tuple(range(2, 9)), 9, 10, 11)),
    # A container with six of an NPU's processors.
    ("3", range(50, 56), Plan((52,), 53, 54, 55)),
])
def test_plan_takes_the_near_processors_that_are_allowed(
    tmp_path: Path, visible: str, allowed: Collection[int], plan: Plan
) -> None:
    assert make_plan(on(tmp_path, visible), allowed) == plan


def test_each_rank_has_the_processors_of_its_own_npu(tmp_path: Path) -> None:
    assert [make_plan(on(tmp_path, "3, 2"), ALL, index) for index in range(2)] == [
        make_plan(on(tmp_path, npu), ALL) for npu in ("3", "2")]
    assert make_plan(on(tmp_path, ""), ALL, 1) == make_plan(on(tmp_path, "1"), ALL)


def test_plan_without_topology_divides_all_processors(tmp_path: Path) -> None:
    """As on A3, whose NPUs are equally far from all processors."""
    printed = {("info", "-m"): MAPPING}
    plans = [make_plan(on(tmp_path, str(npu), printed), range(40)) for npu in range(4)]
    assert plans[0] == Plan((2, 3, 4, 5, 6), 7, 8, 9)
    assert plans[3] == Plan((32, 33, 34, 35, 36), 37, 38, 39)


@pytest.mark.parametrize(("visible", "allowed", "printed", "why"), [
    ("0", range(4), PRINTED, "may use 2 of the processors that are near NPU 0 and not another NPU's, and 6 are needed"),
    ("3", range(8), PRINTED, "may use 0 of"),
    ("0", ALL, {}, "npu-smi lists no NPU 0"),
    ("9", ALL, PRINTED, "npu-smi lists no NPU 9"),
])
def test_no_plan_says_why(
    tmp_path: Path, visible: str, allowed: Collection[int], printed: dict[tuple[str, ...], str], why: str
) -> None:
    plan = make_plan(on(tmp_path, visible, printed), allowed)
    assert isinstance(plan, str)
    assert why in plan


def test_threads_are_bound_by_their_names(tmp_path: Path) -> None:
    bound: dict[int, Collection[int]] = {}

    def set_affinity(thread: int, numbers: Collection[int]) -> None:
        if thread == 15:
            raise ProcessLookupError
        bound[thread] = numbers

    threads = {10: "python", 11: "acl_thread", 12: "release_thread", 13: "python", 14: "pt_autograd", 15: "python"}
    said = bind(on(tmp_path, "2", threads=threads), 13, set_affinity, ALL, "aarch64")
    main = (*range(26, 36), *range(40, 45))
    assert bound == {10: main, 11: (46,), 12: (47,), 13: (45,), 14: main}
    assert said == "threads are bound to processors: main 26-35,40-44, lengths 45, launches 46, release 47"


def test_threads_that_cannot_be_bound_are_reported(tmp_path: Path) -> None:
    def refused(thread: int, numbers: Collection[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    found = on(tmp_path, threads={10: "python"})
    assert bind(found, 0, refused, ALL, "aarch64") == "threads are not bound to processors: Operation not permitted"
    assert "not bound to processors: this process may" in bind(found, 0, refused, range(3), "aarch64")
    assert bind(found, 0, refused, ALL, "x86_64") == "threads are not bound to processors: only on ARM hosts"


def test_newer_products_without_logical_numbers_have_npu_ids() -> None:
    mapping = "NPU ID    Chip ID    Chip Name\n0    0    Ascend950\n4    0    Ascend950\n"
    assert processors.logical_npus(mapping) == [0, 4]
    assert processors.logical_npus("error") == []
