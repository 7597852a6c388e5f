"""Processors of an NPU's threads: which are near the NPU, and how the threads of an engine process share them.

The plan follows the rules of enable_cpu_binding of vllm-ascend (docs "CPU Binding",
https://github.com/vllm-project/vllm-ascend). A pool are the processors that this process may use and that
`npu-smi info -t topo` names for the NPU, divided among the NPUs that have the same ones. Without such a topology it is
a part of all by the NPU's number. The first two are left to the NPU's interrupts. Only ARM hosts are bound.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from npuserve.npu.cann.readings import Readings

INTERRUPTS = 2
"""Processors at the beginning of a pool that are left to interrupts."""
MIN_PROCESSORS = INTERRUPTS + 4
LAUNCH = "acl_thread"
RELEASE = "release_thread"
"""Names of torch_npu's threads that launch queued kernels and release memory."""

SetAffinity = Callable[[int, Collection[int]], None]


class Plan(NamedTuple):
    """Processors of each kind of thread. main: of the engine's loop and all threads that are not named."""

    main: tuple[int, ...]
    lengths: int
    launch: int
    release: int


def make_plan(host: Readings, allowed: Collection[int], index: int = 0) -> Plan | str:
    """Return the plan for a visible NPU, or why there is none.

    allowed: processors that this process may use.
    index: number of the NPU among the visible ones.
    """
    npu = visible_npu(host.environ.get("ASCEND_RT_VISIBLE_DEVICES", ""), index)
    near = topology(host.npu_smi("info", "-t", "topo"))
    npus = logical_npus(host.npu_smi("info", "-m")) or sorted(near)
    if npu not in npus:
        return f"npu-smi lists no NPU {npu}"
    if npu in near:
        pool = sorted(near[npu] & set(allowed))
        sharing = [each for each in npus if near.get(each, set()) & set(allowed) == set(pool)]
    else:
        pool = sorted(allowed)
        sharing = npus
    pool = _slice(pool, sharing.index(npu), len(sharing)) if pool else []
    if len(pool) < MIN_PROCESSORS:
        return (f"this process may use {len(pool)} of the processors that are near NPU {npu} and not another NPU's, "
                f"and {MIN_PROCESSORS} are needed")
    *rest, lengths, launch, release = pool
    return Plan(tuple(rest[INTERRUPTS:]), lengths, launch, release)


def bind(host: Readings, lengths: int, set_affinity: SetAffinity = os.sched_setaffinity,
         allowed: Collection[int] | None = None, machine: str = "", index: int = 0) -> str:
    """Bind the threads of this process, and return what was done, or why nothing was, as a sentence.

    lengths: id of the thread that updates lengths.
    set_affinity: as os.sched_setaffinity, for a thread id.
    allowed: processors that this process may use; None for its affinity mask.
    machine: architecture; "" for this machine's.
    index: number of the NPU among the visible ones.
    """
    if not (machine or platform.machine()).startswith(("aarch64", "arm")):
        return "threads are not bound to processors: only on ARM hosts"
    plan = make_plan(host, os.sched_getaffinity(0) if allowed is None else allowed, index)
    if isinstance(plan, str):
        return f"threads are not bound to processors: {plan}"
    for thread, name in threads(host):
        wanted: Iterable[int] = plan.main
        if thread == lengths:
            wanted = (plan.lengths,)
        elif name in (LAUNCH, RELEASE):
            wanted = (plan.launch if name == LAUNCH else plan.release,)
        try:
            set_affinity(thread, tuple(wanted))
        except ProcessLookupError:  # the thread has ended
            continue
        except OSError as error:
            return f"threads are not bound to processors: {error.strerror or error}"
    return (f"threads are bound to processors: main {_ranges(plan.main)}, lengths {plan.lengths}, launches "
            f"{plan.launch}, release {plan.release}")


def threads(host: Readings) -> list[tuple[int, str]]:
    """Return id and name of the threads of this process."""
    return [(int(path.split("/")[-2]), host.text(path).strip()) for path in host.glob("/proc/self/task/*/comm")]


def visible_npu(devices: str, index: int = 0) -> int:
    """Return the number of a visible NPU. devices: ASCEND_RT_VISIBLE_DEVICES."""
    numbers = re.match(r"\s*(\d+\s*(,\s*\d+\s*)*)", devices)
    visible = [int(number) for number in numbers[1].split(",")] if numbers else []
    return visible[index] if index < len(visible) else index


def logical_npus(mapping: str) -> list[int]:
    """Return the logical numbers of all NPUs from `npu-smi info -m`; the NPU ids of products without such numbers."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in mapping.splitlines() if line.strip()]
    if not lines or "NPU ID" not in lines[0]:
        return []
    head = lines[0]
    column = head.index("Chip Logic ID" if "Chip Logic ID" in head else "NPU ID")
    return sorted({int(line[column]) for line in lines[1:] if len(line) > column and line[column].isdecimal()})


def topology(text: str) -> dict[int, set[int]]:
    """Return the processors near each NPU from `npu-smi info -t topo`: the last column of its rows."""
    rows = re.findall(r"^\s*NPU(\d+)\s.*?(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\s*$", text, re.MULTILINE)
    return {int(npu): _numbers(processors) for npu, processors in rows}


def _numbers(ranges: str) -> set[int]:
    """Return the numbers of a list such as 0-3,8."""
    numbers: set[int] = set()
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def _ranges(numbers: Collection[int]) -> str:
    """Return numbers as 0-3,8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _slice(pool: list[int], index: int, count: int) -> list[int]:
    """Return one of `count` parts of the pool; the last one has the rest."""
    size = len(pool) // count
    return pool[index * size : (index + 1) * size if index < count - 1 else len(pool)]
