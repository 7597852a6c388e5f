"""Table of a profile's kernels: calls, times, and the bytes of their floor."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from npuserve.npu.profile import KernelRow
from npuserve.npu.profiling.floor import LM_HEAD


def kernel_table(
    calls: Sequence[tuple[str, float]], floor: Mapping[str, float], names: Mapping[str, str] | None = None,
) -> list[KernelRow]:
    """Return one row for each name, the longest first; in the order of the first call if no call has a time.

    calls: (name, seconds) of each call, in order.
    floor: kernel -> bytes that all its calls have to move.
    names: see `DeviceProfiler.names`; None if the calls have the names of the registry's kernels. Rows that compute the
        same kernels share their floor in proportion to their time.
    """
    seconds_of: dict[str, list[float]] = defaultdict(list)
    for name, seconds in calls:
        seconds_of[name].append(seconds)
    left = dict(floor)
    if names is None and LM_HEAD not in seconds_of and "linear" in left:
        left["linear"] += left.pop(LM_HEAD, 0.0)
    groups = {name: name if names is None else _group(name, names) for name in seconds_of}
    has_times = any(seconds for _, seconds in calls)
    weights = {name: sum(times) if has_times else float(len(times)) for name, times in seconds_of.items()}
    totals: dict[str, float] = defaultdict(float)
    for name, group in groups.items():
        totals[group] += weights[name]
    rows = []
    for name, times in seconds_of.items():
        of_group = sum(left.get(kernel, 0.0) for kernel in groups[name].split(","))
        share = weights[name] / totals[groups[name]] if totals[groups[name]] else 0.0
        rows.append(KernelRow(name, len(times), sum(times), of_group * share))
    return sorted(rows, key=lambda row: -row.seconds)


def _group(name: str, names: Mapping[str, str]) -> str:
    """Return the kernels that a device's name computes; the name itself if they are unknown."""
    return next((kernels for pattern, kernels in names.items() if re.search(pattern, name, re.IGNORECASE)), name)
