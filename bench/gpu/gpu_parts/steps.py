"""The engine's step at a model's shape, with weights of several forms: runner and kernels, no scheduler, no gRPC."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import torch

from gpu_parts import profile
from gpu_parts.driver import BenchRequest, Driver, again, blocks_of, reopened, runner_of, slots_of
from gpu_parts.shapes import config_of, random_weights
from gpu_parts.worker import Context, Units
from npuserve.npu.backends.base import Backend
from npuserve.npu.execution.runner import Runner
from npuserve.npu.execution.state_store import block_bytes, slot_bytes
from npuserve.npu.model.config import HeadDtype, ModelConfig
from npuserve.npu.model.layers.attention import Attention
from npuserve.npu.model.layers.gated_delta_net import GatedDeltaNet
from npuserve.npu.model.weights import ModelWeights
from npuserve.npu.quantization.scheme import WeightScheme
from npuserve.npu.quantization.w4a16 import W4A16
from npuserve.npu.quantization.w8a8 import W8A8
from npuserve.npu.step import NewRequest, Row, SamplingParams, Step, StepResult

KINDS: dict[str, tuple[WeightScheme | None, HeadDtype]] = {
    "bf16": (None, "auto"), "FP8": (W8A8(float8=True), "auto"),
    "FP8 blocks": (W8A8(per_channel=False, float8=True, blocks=True), "auto"), "W8A8": (W8A8(), "auto"),
    "W8A8 and head": (W8A8(), "int8"), "4 bits": (W4A16(group=128), "auto")}
"""Name -> (scheme of the layers, dtype of the LM head), where the device supports the scheme. The prefill of FP8 is
compared with the peak of int8, which Hopper's tensor cores share."""

DEFAULT_KINDS = tuple(kind for kind in KINDS if kind != "4 bits")
"""Kinds that are measured unless others are named."""

BRIEF = "FP8", "FP8 blocks", "W8A8 and head", "4 bits"
"""Kinds without profiles and comparisons, unless kinds are named."""

EAGER_ROWS = 64
WARM_UP = 5
PROFILED = 10
"""Steps of a profile; the toy shape has 3."""
DRAFT_DEPTHS = 1, 3
"""Drafts of a row."""
ACCEPTANCE = 0.8
"""Probability that a draft is right, of the predicted speed."""


@dataclass
class Loaded:
    """Loaded model, without its head for drafts.

    with_head: the model with the head; None if it has none.
    requests: requests whose prompts are in the cache once `filled`.
    budget: tokens per step.
    seconds: duration of the load.
    """

    runner: Runner
    config: ModelConfig
    weights: ModelWeights
    backend: Backend
    requests: list[BenchRequest]
    budget: int
    seconds: float
    with_head: tuple[ModelConfig, ModelWeights] | None = None
    filled: bool = False

    def fill(self) -> None:
        if self.filled:
            return
        # The last token of a prompt is computed by a timed run: it must not advance a state twice.
        first = [BenchRequest(request.prompt[:-1], 1, request.blocks, number=request.number)
                 for request in self.requests]
        for _ in Driver(self.runner, first, self.budget).run():
            pass
        self.requests, self.filled = again(self.requests, 1), True


@dataclass(frozen=True)
class Decoded:
    """Steps in which all rows decode. seconds: mean and median from one collected step to the next. device: mean
    seconds of the device. tokens: of each row. captured: some are captured."""

    mean: float
    median: float
    device: float
    tokens: list[list[int]]
    captured: bool


def sizes(context: Context) -> tuple[tuple[int, ...], int, tuple[int, ...], int]:
    """Return (batches, context, prompts, decode steps)."""
    if context.toy:
        return (1, 2), 10, (12,), 3
    if context.quick:
        return (1, 16), 512, (512, 2048), 16
    return (1, 8, 32, 64, 256), 512, (512, 4096, 32768), 40


def units(context: Context) -> Units:
    batches, length, prompts, steps = sizes(context)
    named = context.args.kinds
    for kind in named or DEFAULT_KINDS:
        scheme, _ = KINDS[kind]
        if isinstance(scheme, W8A8) and scheme.float8 > context.backend.capabilities.float8:
            continue
        if kind == "W8A8 and head":
            batches = batches[:1]
        if kind != "W8A8 and head":
            yield f"{kind} prefill", _unit(context, kind, lambda load: _prefill(context, load(), prompts))
        yield f"{kind} decode", _unit(context, kind, lambda load, b=batches: _decode(context, load(), b, length, steps))
        if config_of(context.args.shape, scheme).mtp:
            yield f"{kind} drafts", _unit(context, kind, lambda load, b=batches: _drafts(load(), b, length, steps))
        if kind in BRIEF and not named:
            continue
        yield f"{kind} overlap", _unit(context, kind, lambda load, b=batches: _overlap(load(), b, steps))
        yield f"{kind} profile", _unit(context, kind, lambda load, k=kind, b=batches: _profile(context, load(), k, b))
        yield f"{kind} eager", _unit(context, kind, lambda load, b=batches: _eager(load(), b, length, steps))


Load = Callable[[], Loaded]


def _unit(context: Context, kind: str, part: Callable[[Load], Iterator[dict[str, Any]]]
          ) -> Callable[[], Iterator[dict[str, Any]]]:
    def run() -> Iterator[dict[str, Any]]:
        for row in part(lambda: context.only(("steps", kind), lambda: load(context, kind))):
            yield {"table": row.pop("table"), "numbers": kind, **row}

    return run


def load(context: Context, kind: str, most: int = 0) -> Loaded:
    """Load a model for `most` requests; 0: the largest batch that fits the memory."""
    batches, length, prompts, steps = sizes(context)
    backend = context.backend
    began = time.perf_counter()
    config = config_of(context.args.shape, *KINDS[kind])
    dtype = torch.bfloat16
    weights = random_weights(config, dtype, backend, context.args.seed)
    longest, budget = max(prompts) + 1, min(8192, max(prompts))
    capacity = length + WARM_UP + max(steps, WARM_UP + PROFILED) + 2
    blocks_a_row = -(-capacity // backend.capabilities.block_size) + 1
    per_row = (block_bytes(config, backend.capabilities.block_size, dtype, backend) * blocks_a_row
               + config.slots_of(2) * slot_bytes(config, dtype, backend))
    fitting = [n for n in batches if n * per_row < 0.8 * backend.memory.available() - (8 << 30) * (not context.toy)]
    rows = most or max(fitting or batches[:1])
    opened = reopened(backend, decode_buckets=(*(n for n in batches if n < rows), rows))
    with_head = (config, weights) if config.mtp else None
    config = config.without_mtp()
    weights = replace(weights, mtp=None)
    runner = runner_of(opened, weights, config, rows, capacity, budget, longest)
    chance = random.Random(context.args.seed)
    blocks = blocks_of(rows, capacity, runner.block_size)
    requests = [BenchRequest([chance.randrange(config.vocab_size) for _ in range(length)], 1, own, number=number)
                for number, own in enumerate(blocks)]
    return Loaded(runner, config, weights, backend, requests, budget, time.perf_counter() - began, with_head)


def decode(loaded: Loaded, rows: int, steps: int, depth: int = 2) -> Decoded:
    """Decode `steps` steps of `rows` requests, always from the end of the same prompts."""
    loaded.fill()
    requests = again(loaded.requests[:rows], WARM_UP + steps)
    found = list(Driver(loaded.runner, requests, max(loaded.budget, rows), depth).run())[WARM_UP - 1 :]
    between = [after.at - before.at for before, after in pairwise(found)]
    return Decoded(statistics.mean(between), statistics.median(between),
                   statistics.mean(step.result.device_seconds for step in found[1:]),
                   [request.answer for request in requests], any(step.result.captured for step in found))


def _decode(context: Context, loaded: Loaded, batches: Sequence[int], length: int, steps: int
            ) -> Iterator[dict[str, Any]]:
    _, best = context.ceilings()
    for rows in batches:
        if rows > len(loaded.requests):
            continue
        made = decode(loaded, rows, steps)
        context_tokens = rows * (length + WARM_UP + steps / 2)
        states = 2 * rows * loaded.runner.slot_bytes  # read and written
        weights = loaded.runner.read_bytes - loaded.runner.unread_expert_bytes(rows)
        nbytes = weights + loaded.runner.token_bytes * context_tokens + states
        floor = nbytes / (best["read_gbs"] * 1e9)
        yield {"table": "Decode steps beside the floor by bytes", "batch": rows, "context": length,
               "TPOT ms": made.mean * 1e3, "median ms": made.median * 1e3, "tokens/s": rows / made.mean,
               "GB": nbytes / 1e9, "GB of weights": weights / 1e9, "GB of states": states / 1e9,
               "floor ms": floor * 1e3, "floor / TPOT": floor / made.mean,
               "idle between steps": max(0.0, 1 - made.device / made.mean), "made and filled in s": loaded.seconds}


def _prefill(context: Context, loaded: Loaded, prompts: Sequence[int]) -> Iterator[dict[str, Any]]:
    _, best = context.ceilings()
    peak = best["int8_gops" if loaded.config.quantization else "bf16_gflops"] * 1e9
    chance = random.Random(0)
    blocks = list(range(loaded.runner.num_blocks))
    for tokens in prompts:
        seconds = []
        for _ in range(2 if context.toy or tokens > 8192 else 5):
            request = BenchRequest([chance.randrange(loaded.config.vocab_size) for _ in range(tokens)], 1, blocks)
            began = time.perf_counter()
            *_, last = Driver(loaded.runner, [request], loaded.budget).run()
            seconds.append(last.at - began)
        taken = statistics.median(seconds[1:])
        operations = prefill_operations(loaded.config, tokens)
        yield {"table": "Prefill of one prompt", "prompt": tokens, "ms": taken * 1e3, "tokens/s": tokens / taken,
               "TFLOP/s": operations / taken / 1e12, "share of the matrix peak": operations / taken / peak}
    loaded.filled = False  # the prompts overwrote the requests' keys and values


def prefill_operations(config: ModelConfig, tokens: int) -> float:
    """Return the operations of the layers' GEMMs, of causal attention and of states, without the LM head's one row.

    A token takes three products with a state: of its key, of its query, and of its key and correction.
    """
    tables = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    mixers = [mixer.layer for mixer, _ in config.layers]
    attention = sum(4 * mixer.q_size * (tokens * (tokens + 1) // 2) for mixer in mixers if isinstance(mixer, Attention))
    states = sum(6 * mixer.key_dim * mixer.values * tokens for mixer in mixers if isinstance(mixer, GatedDeltaNet))
    return 2.0 * (config.active_parameters - tables) * tokens + attention + states


def _overlap(loaded: Loaded, batches: Sequence[int], steps: int) -> Iterator[dict[str, Any]]:
    for rows in batches:
        if rows > len(loaded.requests):
            continue
        pairs = [(decode(loaded, rows, steps, 1), decode(loaded, rows, steps, 2)) for _ in range(2)]
        one, two = min(a.mean for a, _ in pairs), min(b.mean for _, b in pairs)
        same = all(a.tokens == b.tokens for a, b in pairs)
        yield {"table": "Two steps in flight beside one", "batch": rows, "one, ms": one * 1e3, "two, ms": two * 1e3,
               "one / two": one / two, "same tokens": same, "ok": same}


def _eager(loaded: Loaded, batches: Sequence[int], length: int, steps: int) -> Iterator[dict[str, Any]]:
    """Decode without captures: a runner of the same weights on a backend that captures nothing.

    The backend is opened last. Its stream is then the current one, and an emulated GPU computes on no other.
    """
    rows = max([n for n in batches if n <= min(EAGER_ROWS, len(loaded.requests))])
    captured = {batch: decode(loaded, batch, steps) for batch in batches if batch <= rows}
    backend = reopened(loaded.backend, capture_mode="off")
    capacity = length + WARM_UP + steps + 2
    budget = max(rows, min(loaded.budget, 2048))
    runner = runner_of(backend, loaded.weights, loaded.config, rows, capacity, budget)
    requests = [BenchRequest(request.prompt, 1, own, number=request.number) for request, own in zip(
        loaded.requests[:rows], blocks_of(rows, capacity, runner.block_size), strict=True)]
    theirs = Loaded(runner, loaded.config, loaded.weights, backend, requests, budget, 0.0)
    for batch, replayed in captured.items():
        single = decode(theirs, batch, steps)
        if single.captured:
            raise RuntimeError("the steps to be computed kernel by kernel are captured")
        same = sum(a == b for a, b in zip(single.tokens, replayed.tokens, strict=True))
        yield {"table": "A captured step beside its kernels one by one", "batch": batch, "eager ms": single.mean * 1e3,
               "captured ms": replayed.mean * 1e3, "eager / captured": single.mean / replayed.mean,
               "rows with the same tokens": f"{same} of {batch}"}


def _drafts(loaded: Loaded, batches: Sequence[int], length: int, steps: int) -> Iterator[dict[str, Any]]:
    """Verify drafts of each row and draft by the head, with one step in flight, as if all drafts were right.

    `speed at 0.8` is relative to decode steps of the same runner, with two in flight and without the head, if each
    draft is right with this probability. It does not count the accepted tokens that a hybrid computes twice.
    """
    assert loaded.with_head
    config, weights = loaded.with_head
    most = max(DRAFT_DEPTHS)
    rows = max(n for n in batches if n <= min(EAGER_ROWS, len(loaded.requests)))
    capacity = length + (1 + most) * (WARM_UP + steps + 1)
    budget = max(rows * (1 + most), min(loaded.budget, 2048))
    runner = runner_of(
        loaded.runner.backend, weights, config, rows, capacity, budget, draft_depths=DRAFT_DEPTHS)
    requests = [BenchRequest(request.prompt, 1, own, number=request.number) for request, own in zip(
        loaded.requests[:rows], blocks_of(rows, capacity, runner.block_size), strict=True)]
    theirs = Loaded(runner, config, weights, loaded.backend, requests, budget, 0.0)
    for batch in [n for n in batches if n <= rows]:
        plain = decode(loaded, batch, steps)
        for depth in DRAFT_DEPTHS:
            found = _verify(theirs, batch, steps, depth)
            mean = statistics.mean(seconds for seconds, _ in found)
            device = statistics.mean(result.device_seconds for _, result in found)
            heads = [result.head_seconds for _, result in found if result.head_seconds is not None]
            expected = sum(ACCEPTANCE**number for number in range(1 + depth))
            yield {"table": "Steps that verify drafts and draft, all right", "batch": batch, "drafts": depth,
                   "ms a step": mean * 1e3, "ms of the head": statistics.mean(heads) * 1e3 if heads else None,
                   "captured": all(result.captured for _, result in found), "tokens/s": batch * (1 + depth) / mean,
                   "idle between steps": max(0.0, 1 - device / mean), "decode ms": plain.mean * 1e3,
                   f"speed at {ACCEPTANCE}": expected * plain.mean / mean}


def _verify(loaded: Loaded, rows: int, steps: int, depth: int) -> list[tuple[float, StepResult]]:
    """Return the seconds from one collected step to the next, and the results, of steps with `depth` drafts a row."""
    loaded.fill()
    requests = again(loaded.requests[:rows], 1)
    new = [NewRequest(request.id, request.prompt, [], SamplingParams(temperature=0.0)) for request in requests]
    found = []
    collected = time.perf_counter()
    for _ in range(WARM_UP + steps):
        step = Step([], new)
        new = []
        for request in requests:
            tokens = [request.tokens[-1]] * (1 + depth)
            slots = slots_of(request) if loaded.runner.num_slots else {}
            step.rows.append(Row(
                request.id, tokens, request.computed, request.blocks, 1 + depth, predicts=depth, **slots))
            request.computed += 1 + depth
            request.tokens += tokens
        result = loaded.runner.collect(loaded.runner.launch(step))
        found.append((time.perf_counter() - collected, result))
        collected = time.perf_counter()
    loaded.runner.collect(loaded.runner.launch(Step([], ended=[request.id for request in requests])))
    return found[WARM_UP:]


def _profile(context: Context, loaded: Loaded, kind: str, batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Profile ten steps. Only the host may wait, for its ids, and nothing may be allocated."""
    steps = 3 if context.toy else PROFILED
    for rows in [n for n in batches if n in (batches[0], 64) and n <= len(loaded.requests)] or batches[:1]:
        loaded.fill()
        requests = again(loaded.requests[:rows], 2 * WARM_UP + steps)
        run = Driver(loaded.runner, requests, max(loaded.budget, rows)).run()
        for _ in islice(run, WARM_UP):
            pass
        target = context.out / f"trace-{kind}-{rows}.json.gz" if context.args.profile else None
        trace = profile.traced(lambda: list(islice(run, steps)), context.gpu, target)  # noqa: B023
        for _ in run:
            pass
        if not context.gpu:
            yield {"table": "Profile", "batch": rows, "said": "there is no GPU to profile"}
            continue
        found = profile.read(trace)
        yield {"table": "Profile", "batch": rows, "steps": steps, "idle": found.idle,
               "idle in the longest gaps": found.idle_between(steps),
               "kernels a step": found.kernels / steps,
               "waits and allocations": ", ".join(found.forbidden) or "none", "ok": not found.forbidden}
        for name, count, seconds in found.table()[:15]:
            yield {"table": f"Kernels in a captured step, batch {rows}", "kernel": name[:60],
                   "calls a step": count / steps, "us a call": seconds / count * 1e6,
                   "us a step": seconds / steps * 1e6,
                   "share of the step": seconds / found.span}
