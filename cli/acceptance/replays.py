"""Contexts and soak of the acceptance check: captured decode steps whose contexts change from replay to replay.

A captured step was captured at contexts of one token. Devices split long contexts over their cores, so that another
program of attention serves them than the captured one. Each replay is compared with the same kernels one by one.

The cache holds random numbers, so that contexts of any length cost nothing to compute. The first layers of the model
serve: attention chooses its tiling by the number of rows and heads and by the lengths, in each layer alike.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from npuserve.cli.acceptance.reference import Loaded, SavedSlots
from npuserve.cli.acceptance.report import Finding, failure
from npuserve.cli.bench.differences import norm_of
from npuserve.kernels.quantized import Quantized
from npuserve.npu.backends.base import Captured, Event
from npuserve.npu.backends.machine import capture_bucket
from npuserve.npu.execution.batch import BatchBuffers
from npuserve.npu.execution.decoder import Model
from npuserve.npu.execution.staged import Part
from npuserve.npu.execution.state_store import StateStore
from npuserve.npu.model.layers.attention import Attention
from npuserve.npu.step import Row

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

SOAK_ROWS = 8
SOAK_CONTEXT = 2048
SOAK_PATTERNS = 16
MAX_GROWTH_BYTES = 64 << 20

LAYERS = 2
RANDOM_BLOCKS = 7
"""Different blocks of random numbers in the cache, in turn: fewer numbers to draw on the host."""

SETTLING = 3
"""Passes over the patterns of a soak after which the cache no longer changes: a token's keys of a layer depend on the
layers before it, and each pass settles one."""


def check_contexts(loaded: Loaded, *, quick: bool) -> Iterator[Finding]:
    """Yield a finding for each crossing and batch. quick: compare a few contexts of each crossing."""
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
    differences: list[float] = []
    try:
        differences += (replays.difference([context] * rows) for context in contexts)
    except Exception as error:  # raised by the device or its software
        return failure("contexts", error, f"batch {rows}, context {contexts[len(differences)]:,}")
    worst = max(differences)
    context = contexts[next((place for place, off in enumerate(differences) if off > limit), differences.index(worst))]
    reduced = f", reduced: {len(contexts)} of {last - first + 1} contexts" if quick else ""
    where = f"first wrong at {context:,}" if worst > limit else f"largest at {context:,}"
    return Finding(
        "contexts", f"{first:,} to {last:,}, batch {rows}",
        f"difference {worst:.1e}, {where} (limit {limit:.0e}), {len(contexts)} replays{reduced}",
        worst <= limit, {"difference": worst, "context": context, "limit": limit, "contexts": len(contexts),
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
    if not minutes:
        return
    limit = LIMIT[loaded.runner.dtype_name]
    try:
        soaked = Replays(loaded, SOAK_ROWS, SOAK_CONTEXT).soak(60 * minutes, limit, SOAK_PATTERNS, SOAK_CONTEXT)
    except NothingCaptured as reason:
        yield Finding("soak", "captured steps", str(reason), None)
        return
    first = f", first replay {soaked.first_wrong} with contexts {soaked.contexts}" if soaked.wrong else ""
    yield Finding(
        "soak", f"{minutes:g} minutes, batch {SOAK_ROWS}",
        f"{soaked.replays} replays, {soaked.wrong} wrong{first}, difference {soaked.worst:.1e} (limit {limit:.0e}); "
        f"{soaked.grown / 2**20:.1f} MiB more in use (limit {MAX_GROWTH_BYTES >> 20})",
        not soaked.wrong and soaked.grown <= MAX_GROWTH_BYTES,
        {"replays": soaked.replays, "wrong": soaked.wrong, "difference": soaked.worst, "limit": limit,
         "first_wrong": soaked.first_wrong, "contexts": list(soaked.contexts), "seconds": soaked.seconds,
         "grown_bytes": soaked.grown},
        "replays lose or mix up their contexts over time, or leak device memory: send this report with the archive of "
        "npuserve collect, which has the versions of the device's software")


class NothingCaptured(ValueError):
    """The backend captures no decode steps."""


@dataclass(frozen=True, slots=True)
class Soaked:
    """Result of a soak.

    replays: number of replays.
    wrong: number of replays whose difference exceeds the limit.
    worst: largest difference.
    first_wrong, contexts: number of the first wrong replay, from 0 on, and its contexts; -1 and () if none is wrong.
    seconds: duration.
    grown: device memory in bytes that is no longer free at the end.
    """

    replays: int
    wrong: int
    worst: float
    first_wrong: int
    contexts: tuple[int, ...]
    seconds: float
    grown: int


class Replays:
    """Captured decode step of a fixed number of rows, and the same kernels one by one.

    rows: number of rows.
    longest: largest context of a row.

    Raises BackendError as `Backend.capture` does, NothingCaptured if the backend captures no decode steps.
    """

    def __init__(self, loaded: Loaded, rows: int, longest: int):
        self._backend = loaded.backend
        self._rows = rows
        self._size = loaded.runner.block_size
        self._model = shortened(loaded, longest)
        self._per_row = -(-longest // self._size)
        blocks = rows * self._per_row
        slots = self._model.config.slots_of(rows)
        self._cache = StateStore.allocate(
            self._model.config, blocks, self._size, loaded.runner.cache_dtype, self._backend, slots,
            self._model.weights.dtype)
        self._backend.enqueue(partial(randomize, self._cache)).wait()
        self._slots = SavedSlots(self._cache)
        self._buffers = BatchBuffers(
            rows, rows, self._per_row, self._size, blocks if self._backend.capabilities.padding_blocks else None,
            self._backend, num_slots=slots)
        captured = capture_bucket(
            self._backend, lambda n: self._model.hidden(self._buffers.decode(n), self._cache), rows)
        if captured is None:
            raise NothingCaptured("the backend captures no decode steps")
        self._captured: Captured = captured

    def difference(self, contexts: Sequence[int]) -> float:
        """Return || replay - kernels || / || kernels || of the hidden states.

        contexts: context length of each row.
        """
        return self._backend.enqueue(partial(self._difference, contexts)).wait()

    def soak(self, seconds: float, limit: float, patterns: int, longest: int) -> Soaked:
        """Replay the step for `seconds` with random contexts, two replays in flight, and compare each replay.

        limit: difference above which a replay is wrong.
        patterns: number of sets of contexts.
        longest: largest context.
        """
        draw = random.Random(0)
        drawn = [[draw.randint(1, longest) for _ in range(self._rows)] for _ in range(patterns)]
        wanted: list[Tensor] = []
        for contexts in drawn * SETTLING:
            wanted.append(self._backend.enqueue(partial(self._kernels, contexts)).wait())
            self._backend.synchronize()  # the inputs of the step are on the device
        wanted = wanted[-patterns:]
        free = self._backend.memory.available()
        buffers = [self._backend.host_buffer(1, dtype=torch.float32) for _ in range(2)]
        flying: list[tuple[Event, Tensor, int, int]] = []
        began = time.perf_counter()
        replays = 0
        wrong = 0
        worst = 0.0
        first: tuple[int, tuple[int, ...]] = (-1, ())

        def collect() -> None:
            nonlocal wrong, worst, first
            event, buffer, number, pattern = flying.pop(0)
            event.wait()
            difference = float(buffer.nan_to_num(nan=torch.inf))
            if difference > limit and not wrong:
                first = number, tuple(drawn[pattern])
            wrong += (difference > limit)
            worst = max(worst, difference)

        while time.perf_counter() - began < seconds or not replays:
            if len(flying) == 2:
                collect()
            chosen = draw.randrange(patterns)
            buffer = buffers[replays % 2]
            event = self._backend.enqueue(partial(self._compared, drawn[chosen], wanted[chosen], buffer)).wait()
            flying.append((event, buffer, replays, chosen))
            replays += 1
        while flying:
            collect()
        self._backend.synchronize()
        return Soaked(replays, wrong, worst, *first, time.perf_counter() - began,
                      max(0, free - self._backend.memory.available()))

    def _fill(self, contexts: Sequence[int]) -> Part:
        """Stage the step, and queue its inputs and the states before it.

        A row's token depends on its context alone, so that equal steps write equal keys.
        """
        self._slots.restore()
        rows = []
        for row, context in enumerate(contexts):
            first = row * self._per_row
            token = (31 * row + context) % self._model.config.vocab_size
            blocks = list(range(first, first - (-context // self._size)))
            rows.append(Row(row, [token], context - 1, blocks, 1, state_slot=row))
        staged = self._buffers.fill([(rows, self._captured.size(len(rows)))])
        staged.upload()
        return staged.parts[0]

    def _replay(self, part: Part) -> Tensor:
        return self._captured.replay(part.tokens, part.context_lens, part.cu_seqlens)

    def _kernels(self, contexts: Sequence[int]) -> Tensor:
        part = self._fill(contexts)
        return self._model.hidden(self._buffers.batch(part), self._cache).clone()

    def _difference(self, contexts: Sequence[int]) -> float:
        part = self._fill(contexts)
        got = self._replay(part).to("cpu", copy=True)
        self._slots.restore()
        return norm_of(got, self._model.hidden(self._buffers.batch(part), self._cache))

    def _compared(self, contexts: Sequence[int], want: Tensor, buffer: Tensor) -> Event:
        part = self._fill(contexts)
        wide = want.float()
        off = self._replay(part).float() - wide
        return self._backend.fetch(((off * off).sum() / (wide * wide).sum()).sqrt().view(1), buffer)


def shortened(loaded: Loaded, longest: int) -> Model:
    """Return the first layers of a model, with rotary tables for `longest` positions, beyond its own context too.

    They are LAYERS layers, or as many as contain attention.
    """
    model = loaded.model
    attends = [any(isinstance(block.layer, Attention) for block in blocks) for blocks in model.config.layers]
    count = min(max(LAYERS, 1 + attends.index(True)), model.config.num_layers)
    config = model.config.first_layers(count)
    weights = replace(model.weights, layers=model.weights.layers[:count])
    return Model.of(config, weights, longest, model.kernels, loaded.backend)


def randomize(cache: StateStore) -> None:
    """Fill a KV cache with RANDOM_BLOCKS blocks of random numbers, in turn, and fixed state with small ones."""
    generator = torch.Generator().manual_seed(0)
    for tensor in cache.fixed:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) / 4)
    for keys_and_values in cache.paged:
        for part in keys_and_values:
            numbers = part.values if isinstance(part, Quantized) else part
            drawn = torch.randn(RANDOM_BLOCKS, *numbers.shape[1:], generator=generator)
            _spread(numbers, (drawn * 40).clamp(-127, 127).round() if isinstance(part, Quantized) else drawn)
            if isinstance(part, Quantized):
                scales = torch.rand(RANDOM_BLOCKS, *part.scale.shape[1:], generator=generator)
                _spread(part.scale, scales / 40 + 0.01)


def _spread(tensor: Tensor, blocks: Tensor) -> None:
    """Write `blocks` to the blocks of a tensor, in turn."""
    given = blocks.to(tensor.dtype).to(tensor.device)
    for first in range(0, len(tensor), len(given)):
        part = tensor[first : first + len(given)]
        part.copy_(given[: len(part)])
