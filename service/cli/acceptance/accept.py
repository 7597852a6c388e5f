"""`npuserve check --accept`: does a device compute what it should, as fast as its memory allows?

1. Kernels: each that the backend has, on its test cases, against the golden function in float64.
2. Tokens: the model answers prompts greedily, in chunks, in changing company, and the CPU in float32 judges every token
   and every position. In float32, where the device has it, all tokens must be the CPU's; otherwise the share of
   positions with the same likeliest token is judged, and that no answered token is unlikelier than rounding explains.
   Once with a step launched before the last one is collected, and once without.
3. Capture: each bucket's time and memory, and its dispatch beside the same kernels one by one.
4. Latencies beside the floor: what must be read by what the memory gives, as measured here. Judged with --least-share
   alone, and not where the device is emulated.

Each finding is a line; what failed is said once more at the end, each in a sentence that says what to do.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npuserve.service.arguments import number
from npuserve.service.cli.acceptance import tokens as accept_tokens
from npuserve.service.cli.bench.step import WARM_UP, Bench, spare
from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.text.model_folder import resolve

if TYPE_CHECKING:
    import torch

    from npuserve.kernels.registry import Case, Kernel
    from npuserve.npu.backends.base import Backend
    from npuserve.npu.diagnostics.acceptance import Loaded
    from npuserve.npu.execution.decoder import Model

LEAST_EQUAL = 0.995
"""Share of positions with the CPU's likeliest token in float32. A device may be below it, or below the share that the
CPU itself has in the judged dtype, by SIGMAS standard deviations of the measured number of positions."""

SIGMAS = 3
MOST_GAP = 3
"""Answered tokens that are not the CPU's likeliest may be below it by the largest difference of a logit, up here and
down there, and by half as much again, since other positions round otherwise."""

FORCED = 256
"""Tokens a step where sequences are only judged."""

LEAST_CAPTURED = 0.95
GRAPH_TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""Of a bucket's differences: what other tilings of the same kernels come to. Wrong lengths come to far more."""

LOST = ("engine", "node")
"""Faults after which this process can have nothing more of the device."""

WRONG_NUMBERS = ("the kernel gives other numbers than its golden function: compare the versions of driver, CANN and "
                 "torch_npu with those of docs/ascend.md, and send this report")

BATCHES, STEPS = (1, 16, 64), 32
OPERATIONS_PER_BYTE = 64
"""Kernel cases with more are not held against the memory: they multiply."""

JUDGED_SECONDS = 50e-6
"""Kernel calls with a lower floor are launches more than anything else, and not judged."""


@dataclass(frozen=True, slots=True)
class Finding:
    """passed: None where nothing is judged. advice: what to do if it failed, as the rest of a sentence."""

    part: str
    name: str
    said: str
    passed: bool | None
    figures: dict[str, Any] = field(default_factory=dict)
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("acceptance")
    group.add_argument("--accept", action="store_true", help="compute on the device, and judge what comes out")
    group.add_argument("--least-share", type=number(float, 0.0, 1.0), metavar="SHARE",
                       help="of a latency that the memory's floor must explain; without it latencies are not judged")


def findings(config: ServerConfig, least_share: float | None) -> Iterator[Finding]:
    """All of them, one after the other; prompts are computed on the device too. What fails is a finding, but for
    ConfigError, for no such model, and BackendError, for no such device."""
    from npuserve.npu.backends import select

    backend = select(config.device, config.relaxations if config.emulate else None)
    backend.set_threads(config.threads)
    backend.decode_buckets = config.buckets
    judged = None if config.emulate else least_share
    folder = resolve(config.model)
    gbs = Measured(config.emulate, judged)
    for part, found in (
        ("memory", gbs.bandwidth(backend)), ("kernels", kernels(backend)), ("kernels", gbs.kernels(backend)),
        ("model", model(folder, backend, config, gbs)),
    ):
        try:
            yield from found
        except ConfigError:
            raise
        except Exception as error:  # of a device and its software that we never saw
            yield (failed := _failure(part, error))
            if failed.figures["fault"] in LOST:
                return


def _failure(part: str, error: Exception) -> Finding:
    from npuserve.npu.backends import fault
    from npuserve.npu.backends.base import Fault

    found = fault(error)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    advice = {
        None: "do what it says; if that is no help, it is a fault of npuserve: send this report",
        Fault.RETRYABLE: "the device was short of something: end what else runs there, or take smaller decode_buckets "
                         "and kv_cache_memory, and check again",
        Fault.ENGINE: "the device refused the work or gave it up: check again, and if it fails at the same place send "
                      "this report with the log of CANN",
        Fault.NODE: "the device, its driver or its links are at fault: see npu-smi info, and repair that first",
    }[found]
    figures = {"fault": found and found.value, "traceback": "".join(traceback.format_exception(error))}
    return Finding(part, "error", f"{type(error).__name__}: {first}", False, figures, advice)


# Kernels


def dtypes_of(kernel: Kernel[..., Any], backend: Backend) -> list[torch.dtype]:
    """Those of the device that the kernel takes; its own first where there is none."""
    import torch

    own = [*kernel.dtypes, *([torch.float16] if torch.bfloat16 in kernel.dtypes else [])]
    return [dtype for dtype in own if takes(backend, str(dtype).removeprefix("torch."))] or [kernel.dtypes[0]]


def takes(backend: Backend, dtype: str) -> bool:
    """True if the device computes in it."""
    from npuserve.npu.backends.base import BackendError

    try:
        return backend.resolve_dtype(dtype, dtype) == dtype
    except BackendError:
        return False


def kernels(backend: Backend) -> Iterator[Finding]:
    """A finding for each kernel and dtype."""
    import npuserve.kernels  # noqa: F401  fills the registry
    from npuserve.kernels.registry import GOLDEN, KERNELS, KernelSet

    labels = KernelSet(backend.kernels).labels
    for kernel in KERNELS.values():
        if labels[kernel.name] == GOLDEN:
            yield Finding("kernels", kernel.name, "served by its golden function", None)
            continue
        for dtype in dtypes_of(kernel, backend):
            yield _kernel(kernel, dtype, backend)


def _cases(kernel: Kernel[..., Any], backend: Backend, *, benchmark: bool) -> Iterator[Case]:
    """Those that the device takes."""
    from npuserve.kernels.quantized import with_levels
    from npuserve.npu.diagnostics.machine import takes_case

    for case in kernel.cases:
        if case.benchmark == benchmark and takes_case(backend, case):
            yield with_levels(case, backend.int8_levels)


def _kernel(kernel: Kernel[..., Any], dtype: torch.dtype, backend: Backend) -> Finding:
    """Of the test cases."""
    from npuserve.kernels.bench.accuracy import Oracle
    from npuserve.kernels.registry import GOLDEN

    cases, error, others, golden_error, golden_others, wrong = 0, 0.0, 0, 0.0, 0, []
    name = f"{kernel.name} {str(dtype).removeprefix('torch.')}"
    for case in _cases(kernel, backend, benchmark=False):
        oracle = Oracle(kernel, case, dtype)
        golden = oracle.accuracy(GOLDEN)
        try:
            found = backend.enqueue(partial(oracle.accuracy, backend.kernels)).wait()
        except Exception as refused:  # by the device or its software
            failed = _failure("kernels", refused)
            return Finding("kernels", name, f"case {case.name}: {failed.said}", False, failed.figures, failed.advice)
        if found.excess > 1 or found.other_ids > golden.other_ids:
            wrong.append(case.name)
        cases += 1
        error, others = max(error, found.error), others + found.other_ids
        golden_error, golden_others = max(golden_error, golden.error), golden_others + golden.other_ids
    said = f"{cases} cases, error {error:.1e} (golden {golden_error:.1e})"
    said += f", {others} other ids (golden {golden_others})" if others or golden_others else ""
    return Finding(
        "kernels", name, said, bool(cases) and not wrong,
        {"cases": cases, "error": error, "golden_error": golden_error, "other_ids": others,
         "golden_other_ids": golden_others, "wrong": wrong},
        f"{f'case {wrong[0]}' if wrong else 'no case is for this device'}: {WRONG_NUMBERS}")


# Latencies


@dataclass
class Measured:
    """What is held against the memory's speed. judged: the least share, None where latencies are not judged. speed:
    bytes a second, once measured; without it nothing is timed."""

    emulated: bool
    judged: float | None
    speed: float = 0.0

    def bandwidth(self, backend: Backend) -> Iterator[Finding]:
        from npuserve.npu.diagnostics.acceptance import bandwidth

        self.speed = bandwidth(backend)
        yield Finding("memory", "bandwidth", f"{self.speed / 1e9:.1f} GB/s", None, {"gbs": self.speed / 1e9})

    def latency(self, name: str, seconds: float, nbytes: float, advice: str, judge: bool = True) -> Finding:
        floor = nbytes / self.speed
        share = floor / seconds
        passed = share >= self.judged if self.judged is not None and judge else None
        return Finding("latency", name, f"{seconds * 1e3:.3f} ms, floor {floor * 1e3:.3f} ms, share {share:.2f}",
                       passed, {"seconds": seconds, "floor_seconds": floor, "share": share}, advice)

    def kernels(self, backend: Backend) -> Iterator[Finding]:
        """The backend's own, at the benchmark cases of decode steps; one a kernel where it is emulated."""
        from npuserve.kernels.bench.measure import Bench as KernelBench
        from npuserve.kernels.registry import KERNELS

        for kernel in KERNELS.values():
            if not self.speed or backend.kernels not in kernel.implementations:
                continue
            dtype = dtypes_of(kernel, backend)[0]
            for case in _cases(kernel, backend, benchmark=True):
                bench = KernelBench(kernel, case, dtype)
                accuracy = bench.accuracy(backend.kernels)
                if accuracy.excess > 1:
                    yield Finding("kernels", f"{kernel.name} {case.name}", f"error {accuracy.error:.1e}", False,
                                  {"error": accuracy.error}, WRONG_NUMBERS)
                if bench.cost.operations > OPERATIONS_PER_BYTE * bench.cost.nbytes:
                    continue
                seconds = bench.seconds(backend.kernels, backend.synchronize)
                yield self.latency(
                    f"{kernel.name} {case.name}", seconds, bench.cost.nbytes,
                    "the kernel is slower than its reads: see that nothing else runs on this device, then send this "
                    "report",
                    bench.cost.nbytes >= JUDGED_SECONDS * self.speed)
                if self.emulated:
                    break

    def steps(self, loaded: Loaded, context: int, budget: int) -> Iterator[Finding]:
        """Decode steps, each launched before the one before it is collected."""
        steps = 2 if self.emulated else STEPS
        runner = loaded.runner
        blocks = BlockManager(runner.num_blocks, runner.block_size, prefix_cache=False)
        scheduler = Scheduler(blocks, max_num_seqs=BATCHES[-1], max_num_batched_tokens=budget, max_queue=0,
                              aging_seconds=1.0)
        bench = Bench(runner, scheduler, budget, 2, [])
        for rows in BATCHES if self.speed else ():
            name, length = f"decode step, batch {rows}", _length(rows, context, budget, steps)
            if length > runner.max_model_len or (-(-length // runner.block_size) + 1) * rows > runner.num_blocks:
                yield Finding("latency", name, f"no room for {rows} rows of {length} tokens", None)
                continue
            timed = bench.decode(rows, context, steps)
            yield self.latency(
                f"{name}, context {context}", statistics.median(step.seconds for step in timed),
                statistics.mean(bench.decode_bytes(step.context) for step in timed),
                "see which kernels above have a low share, whether npuserve_step_host_gap_seconds is above 0, and that "
                "nothing else runs on this device; then send this report")


def _length(rows: int, context: int, budget: int, steps: int) -> int:
    """Tokens that a row has at the end of a measurement."""
    return context + spare(rows, context, budget) + WARM_UP + steps


# The model


def model(folder: Path, backend: Backend, config: ServerConfig, measured: Measured) -> Iterator[Finding]:
    """In float32 where the device has it, then in the dtype that is served: its tokens, and in the latter the rest."""
    from npuserve.npu.diagnostics.acceptance import load, load_reference
    from npuserve.npu.model.config import ModelConfig

    facts = ModelConfig.from_folder(folder, config.lm_head_dtype)
    served = backend.resolve_dtype(config.dtype, facts.dtype)
    budget = max(config.max_num_batched_tokens, BATCHES[-1] + 1)
    context = min(64 if measured.emulated else 1024, facts.context_length // 4)
    # A block more than the longest row needs, since the scheduler admits only what may grow.
    length = min(facts.context_length, (config.block_size or backend.block_size) + max(
        4 * accept_tokens.BUDGET + accept_tokens.ANSWER, _length(BATCHES[-1], context, budget, STEPS)))
    answer = min(accept_tokens.ANSWER, length // 2)
    prompts = accept_tokens.prompts_of(folder, facts.vocab_size, length - answer)
    golden = load_reference(folder, backend, "float32", length, config.threads, config.lm_head_dtype)
    for dtype in dict.fromkeys([*(["float32"] if takes(backend, "float32") else []), served]):
        loaded = load(
            folder, backend, dtype, max_model_len=length, max_num_seqs=BATCHES[-1], max_num_batched_tokens=budget,
            block_size=config.block_size, kv_cache_dtype=config.kv_cache_dtype, kv_cache_memory=config.kv_cache_memory,
            lm_head_dtype=config.lm_head_dtype)
        yield from tokens(loaded, golden, prompts, answer, folder)
        if dtype == served:
            yield from captures(loaded)
            yield from measured.steps(loaded, context, budget)
        del loaded
        gc.collect()  # its memory is the next one's


def least_share(positions: int, own: float = 1.0) -> float:
    """Return the lowest share of equal likeliest tokens that rounding explains; continuous in both arguments.

    positions: number of positions that were compared.
    own: share that the CPU has in the judged dtype, over the same positions; 1: not measured.
    """
    expected = min(LEAST_EQUAL, own)
    return expected - SIGMAS * math.sqrt(expected * (1 - expected) / positions)


def tokens(
    loaded: Loaded, golden: tuple[Model, Backend], prompts: Sequence[list[int]], count: int, folder: Path
) -> Iterator[Finding]:
    """golden: of the CPU in float32."""
    from npuserve.npu.diagnostics.acceptance import load_reference
    from npuserve.npu.diagnostics.teacher_forced import forced_logits

    runner, dtype = loaded.runner, loaded.runner.dtype_name
    made, alone = (accept_tokens.answers(runner, prompts, count, depth) for depth in (2, 1))
    sequences = [prompt + answer for prompt, answer in zip(prompts, made.tokens, strict=True)]
    cached = runner.cache_dtype if runner.cache_dtype != loaded.model.weights.norm.dtype else None

    def compared(model: Model, backend: Backend) -> accept_tokens.Agreement:
        return accept_tokens.agreement(
            forced_logits(*golden, sequences, FORCED, cache_dtype=cached),
            forced_logits(model, backend, sequences, FORCED, cache_dtype=cached), prompts, made.tokens)

    found = compared(loaded.model, loaded.backend)
    figures = {"positions": found.positions, "equal_argmax": found.share, "tokens": found.tokens,
               "equal_tokens": found.likeliest / found.tokens, "largest_logit_difference": found.difference,
               "largest_gap": found.gap}
    said = (f"{found.likeliest} of {found.tokens} tokens as the CPU in float32, gap {found.gap:.1e}; {found.equal} of "
            f"{found.positions} positions ({found.share:.4f}), logits differ by {found.difference:.1e}")
    if dtype == "float32":
        passed = found.likeliest == found.tokens
    else:
        least = least_share(found.positions)
        if found.share < least and dtype in golden[1].dtypes:
            own = compared(*load_reference(
                folder, loaded.backend, dtype, runner.max_model_len, golden[1].threads,
                runner.config.lm_head_dtype)).share
            figures["equal_argmax_of_the_cpu"] = own
            said += f"; the CPU in {dtype}: {own:.4f}"
            least = least_share(found.positions, own)
        figures["least_equal_argmax"] = least
        passed = found.share >= least and found.gap <= MOST_GAP * found.difference
    where = "prompt {}, token {}: {} and not {}".format(*found.worst) if found.worst else "in its logits"
    yield Finding("tokens", f"beside the CPU, {dtype}", said, passed, figures,
                  f"the model goes astray at {where}: npuserve bench step MODEL --layers 1 names the first kernel that "
                  "is wrong in a step; send both reports")

    same, steps = made.tokens == alone.tokens, made.steps == alone.steps
    yield Finding(
        "tokens", f"overlapped and not, {dtype}",
        f"{'equal' if same else 'OTHER'} tokens in {len(made.steps)} {'equal' if steps else 'other'} steps",
        same if same or steps or runner.deterministic else None, {"steps": len(made.steps)},
        "steps in flight disturb each other: serve with --no-double-buffering until it is mended, and send this report")
    share = made.captured / max(made.decodes, 1)
    yield Finding(
        "tokens", f"captured decodes, {dtype}", f"{made.captured} of {made.decodes} decode tokens",
        None if not made.captured and runner.deterministic else share >= LEAST_CAPTURED, {"share": share},
        f"decode_buckets must reach {len(prompts)} rows or more, else larger batches run kernel by kernel")


def captures(loaded: Loaded) -> Iterator[Finding]:
    from npuserve.npu.diagnostics.acceptance import buckets

    most = GRAPH_TOLERANCE[loaded.runner.dtype_name]
    for bucket in buckets(loaded, BATCHES[-1]):
        same = "the same bits" if not bucket.difference else f"difference {bucket.difference:.1e}"
        yield Finding(
            "capture", f"{bucket.rows} rows",
            f"{bucket.seconds:.2f} s, {bucket.nbytes / 2**20:.1f} MiB; {same}, padded {bucket.padded_difference:.1e}; "
            f"{bucket.replay_seconds * 1e3:.3f} ms, kernel by kernel {bucket.single_seconds * 1e3:.3f} ms",
            max(bucket.difference, bucket.padded_difference) <= most,
            {name: getattr(bucket, name) for name in bucket.__slots__},
            "a captured step computes another thing than its kernels: serve with --decode-buckets without this size, "
            "and send this report")


# For people


def line(found: Finding) -> str:
    verdict = {True: "ok", False: "FAILED", None: "-"}[found.passed]
    return f"{found.part:9}{found.name:48}{verdict:8}{found.said}"


def ending(all_found: Sequence[Finding]) -> str:
    failed = [f for f in all_found if f.passed is False]
    lines = [f"FAILED {f.part}, {f.name}: {f.said}; {f.advice}." for f in failed]
    judged = sum(f.passed is not None for f in all_found)
    return "\n".join([*lines, f"{judged - len(failed)} of {judged} judged findings passed"])
