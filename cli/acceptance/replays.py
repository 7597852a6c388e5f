"""Contexts and soak of the acceptance check: captured decode steps whose contexts change from replay to replay.

A captured step was captured at contexts of one token. Devices split long contexts over their cores, so that another
program of attention serves them than the captured one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from npuserve.cli.acceptance.report import Finding, failure

if TYPE_CHECKING:
    from npuserve.npu.diagnostics.acceptance import Loaded
    from npuserve.npu.diagnostics.replays import Replays

CROSSINGS = ((1000, 1100), (12_000, 13_000))
"""Contexts that are crossed token by token: the first of each pair to the last."""

SPLITS = (1023, 1024, 1025)
"""Contexts that are always compared: from 1,024 keys on CANN may split a context (flash-decode in
fused_infer_attention_score_tiling.cpp)."""

BATCHES = (1, 2, 4)
QUICK_CONTEXTS = 5
"""Contexts of a crossing in a reduced check, besides SPLITS."""

LIMIT = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Maximum difference of the hidden states after two layers: rounding of sums in another order."""

SOAK_ROWS, SOAK_CONTEXT, SOAK_PATTERNS = 8, 2048, 16
MAX_GROWTH_BYTES = 64 << 20


def check_contexts(loaded: Loaded, *, quick: bool) -> Iterator[Finding]:
    """Yield a finding for each crossing and batch. quick: compare a few contexts of each crossing."""
    from npuserve.npu.diagnostics.replays import NothingCaptured, Replays

    for rows in BATCHES:
        try:
            replays = Replays(loaded, rows, max(last for _, last in CROSSINGS))
        except NothingCaptured as reason:
            yield Finding("contexts", "captured steps", str(reason), None)
            return
        for first, last in CROSSINGS:
            yield check_crossing(replays, rows, first, last, LIMIT[loaded.runner.dtype_name], quick=quick)
        del replays


def check_crossing(replays: Replays, rows: int, first: int, last: int, limit: float, *, quick: bool) -> Finding:
    """Return the finding for one crossing at one batch. It names the first wrong context, else that of the largest
    difference."""
    contexts = crossing(first, last, quick=quick)
    found: list[float] = []
    try:
        found += (replays.difference([context] * rows) for context in contexts)
    except Exception as error:  # raised by the device or its software
        return failure("contexts", error, f"batch {rows}, context {contexts[len(found)]:,}")
    worst = max(found)
    at = contexts[next((place for place, off in enumerate(found) if off > limit), found.index(worst))]
    reduced = f", reduced: {len(contexts)} of {last - first + 1} contexts" if quick else ""
    where = f"first wrong at {at:,}" if worst > limit else f"largest at {at:,}"
    return Finding(
        "contexts", f"{first:,} to {last:,}, batch {rows}",
        f"difference {worst:.1e}, {where} (limit {limit:.0e}), {len(contexts)} replays{reduced}",
        worst <= limit, {"difference": worst, "context": at, "limit": limit, "contexts": len(contexts),
                         "reduced": quick},
        "the captured step computes other numbers than its kernels from this context on: serve with "
        "--max-model-len below it until this is fixed, and send this report")


def crossing(first: int, last: int, *, quick: bool) -> list[int]:
    """Return the contexts of a crossing in ascending order."""
    if not quick:
        return list(range(first, last + 1))
    few = range(first, last + 1, (last - first) // (QUICK_CONTEXTS - 1))
    return sorted({*few, *(context for context in SPLITS if first <= context <= last)})


def check_soak(loaded: Loaded, minutes: float) -> Iterator[Finding]:
    """Replay a captured step for `minutes` with random contexts and compare every replay; nothing for 0 minutes."""
    from npuserve.npu.diagnostics.replays import NothingCaptured, Replays

    if not minutes:
        return
    limit = LIMIT[loaded.runner.dtype_name]
    try:
        found = Replays(loaded, SOAK_ROWS, SOAK_CONTEXT).soak(60 * minutes, limit, SOAK_PATTERNS, SOAK_CONTEXT)
    except NothingCaptured as reason:
        yield Finding("soak", "captured steps", str(reason), None)
        return
    first = f", first replay {found.first_wrong} with contexts {found.contexts}" if found.wrong else ""
    yield Finding(
        "soak", f"{minutes:g} minutes, batch {SOAK_ROWS}",
        f"{found.replays} replays, {found.wrong} wrong{first}, difference {found.worst:.1e} (limit {limit:.0e}); "
        f"{found.grown / 2**20:.1f} MiB more in use (limit {MAX_GROWTH_BYTES >> 20})",
        not found.wrong and found.grown <= MAX_GROWTH_BYTES,
        {"replays": found.replays, "wrong": found.wrong, "difference": found.worst, "limit": limit,
         "first_wrong": found.first_wrong, "contexts": list(found.contexts), "seconds": found.seconds,
         "grown_bytes": found.grown},
        "replays lose or mix up their contexts over time, or leak device memory: send this report with the archive of "
        "npuserve collect, which has the versions of the device's software")
