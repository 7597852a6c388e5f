"""Replays of a captured graph beside copies to the host: products with a split K, and launches that depend on each
other.

A product whose K is split counts the programs of a tile that are done; a launch may begin before the previous one ends
(npuserve/kernels/triton/dependent.py). An error of their order shows as other bits, in few of many replays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gpu_parts.shapes import SHAPES
from gpu_parts.worker import Context, Units

COUNT = 100_000
"""Replays of each graph."""

LAYERS = 2
PIECE = 500
"""Replays between two checks of the copies."""


def units(context: Context) -> Units:
    if not context.gpu:
        return
    for rows in (1, 64):
        for depends in (True, False):
            yield f"{rows} rows, {'dependent' if depends else 'separate'} launches", lambda r=rows, d=depends: _unit(
                context, r, d)


def _unit(context: Context, rows: int, depends: bool) -> Iterator[dict[str, Any]]:
    from npuserve.kernels.triton import dependent

    own = dependent._has
    try:
        if not depends:
            dependent._has = lambda device: False  # type: ignore[assignment]
        yield _replayed(context, rows, depends)
    finally:
        dependent._has = own


@torch.inference_mode()
def _replayed(context: Context, rows: int, depends: bool) -> dict[str, Any]:
    count = COUNT // 20 if context.quick else COUNT
    work = _chain(context, rows)
    stream, copies = torch.cuda.Stream(), torch.cuda.Stream()
    bad = torch.zeros((), dtype=torch.int64, device=context.backend.device)
    number = torch.zeros(64, dtype=torch.int64, device=context.backend.device)
    with torch.cuda.stream(stream):
        expected = work().clone()
        work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            made = work()
            bad += (made.view(torch.int16) != expected.view(torch.int16)).any()
            number += 1
        bad.zero_()
        number.zero_()
        stream.synchronize()
        pinned = torch.zeros(64, dtype=torch.int64, pin_memory=True)
        wrong = 0
        began = time.perf_counter()
        for done in range(PIECE, count + 1, PIECE):
            for _ in range(PIECE):
                graph.replay()
            ready = stream.record_event()
            with torch.cuda.stream(copies):
                copies.wait_event(ready)
                pinned.copy_(number, non_blocking=True)
                arrived = copies.record_event()
            for _ in range(8):  # the copy runs beside replays
                graph.replay()
            arrived.synchronize()
            extra = 8 * (done // PIECE)
            # A copy that waited for its event has at least these replays, and no more than were queued.
            wrong += not all(done + extra - 8 <= value <= done + extra for value in pinned.tolist())
            if done // PIECE % 8 == 0:
                stream.synchronize()
        stream.synchronize()
        seconds = time.perf_counter() - began
    other = int(bad)
    return {"table": "Replays of a graph beside copies", "rows": rows,
            "launches": "dependent" if depends else "separate", "replays": int(number[0]),
            "with other bits": other, "wrong copies": wrong,
            "us a replay": seconds / int(number[0]) * 1e6, "ok": not other and not wrong}


def _chain(context: Context, rows: int) -> Callable[[], Tensor]:
    """Return the products and norms of LAYERS layers, with small weights so that replays are short."""
    from npuserve.kernels import norm
    from npuserve.kernels.triton import LABEL, launch_linear
    from npuserve.kernels.triton.linear_tiles import Tiles

    device = context.backend.device
    generator = torch.Generator(device).manual_seed(context.args.seed)
    hidden, inner = SHAPES["qwen3-0.6b"]["hidden_size"], SHAPES["qwen3-0.6b"]["intermediate_size"]

    def random(*shape: int) -> Tensor:
        numbers: Tensor = torch.randn(shape, device=device, generator=generator)
        return (numbers * shape[-1] ** -0.5).to(torch.bfloat16)

    x = random(rows, hidden) * hidden**0.5
    layers = [(random(hidden, hidden), random(2 * inner, hidden), random(hidden, inner)) for _ in range(LAYERS)]
    gamma = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    rms_norm = norm.rms_norm.implementations[LABEL].function
    m = 16 if rows <= 16 else 64

    def work() -> Tensor:
        now = x
        for first, gate_up, down in layers:
            now = launch_linear.linear(now, first, None, tiles=Tiles(64, m, 64, 8, 4, 3))
            wide = launch_linear.linear_swiglu(now, gate_up, None, tiles=Tiles(64, m, 64, 4, 4, 3))
            assert wide is not None
            now = launch_linear.linear(wide, down, None, tiles=Tiles(64, m, 64, 8, 4, 3))
            now = rms_norm(now, gamma, 1e-6)
        return now

    return work
