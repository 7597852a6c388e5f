"""Tokens part of the acceptance check: the model's answers on the device, judged by the CPU in float32."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from npuserve.cli.acceptance import latency
from npuserve.cli.acceptance import tokens as accept_tokens
from npuserve.cli.acceptance.captures import check_captures
from npuserve.cli.acceptance.kernels import supports_dtype
from npuserve.cli.acceptance.replays import check_contexts, check_soak
from npuserve.cli.acceptance.report import Finding, guarded
from npuserve.cli.acceptance.sampling import check_sampling
from npuserve.service.config import ServerConfig

if TYPE_CHECKING:
    from npuserve.cli.acceptance.reference import Loaded
    from npuserve.npu.backends.base import Backend
    from npuserve.npu.execution.decoder import Model

MIN_EQUAL_SHARE = 0.995
"""Minimum share of positions whose argmax equals the CPU's in float32. A device can be SIGMAS standard deviations
below it, or below the CPU's own share in the dtype of `rounding_dtype`, for the number of positions compared."""

SIGMAS = 3
MAX_GAP = 3
"""Maximum gap between the CPU's argmax and an answered token, in largest differences of a logit. Rounding raises one
logit and lowers the other, each by at most that difference; half as much again allows for other positions."""

MAX_FOLLOWED_DIFFERENCE = 1e-2
"""Maximum difference of a logit in float32 from the CPU with the device's rounding of ties: sums in another order. The
built-in model has 2e-5."""

FORCED_BATCH_TOKENS = 256
"""Tokens of a step where sequences are only judged."""

MIN_CAPTURED_SHARE = 0.95


def check_model(
    folder: Path, backend: Backend, config: ServerConfig, latencies: latency.LatencyCheck, *, quick: bool,
    soak_minutes: float = 0.0,
) -> Iterator[Finding]:
    """Check tokens and sampling in float32, if the device has it, and in the served dtype.

    In the served dtype, captures, contexts, a soak and step latencies are checked, too.

    quick: reduce the contexts.
    soak_minutes: duration of the soak; 0 for none.
    """
    from npuserve.cli.acceptance.reference import load, load_reference
    from npuserve.npu.model.config import ModelConfig

    facts = ModelConfig.from_folder(folder, config.lm_head_dtype)
    served = backend.resolve_dtype(config.dtype, facts.dtype)
    rows = latency.BATCHES[-1]
    budget = max(config.max_num_batched_tokens, rows + 1)
    context = min(64 if latencies.emulated else 1024, facts.context_length // 4)
    # One block more than the longest row needs: the scheduler admits a request only if it can grow.
    length = min(facts.context_length, (config.block_size or backend.capabilities.block_size) + max(
        4 * accept_tokens.BUDGET + accept_tokens.ANSWER, latency.row_length(rows, context, budget, latency.STEPS)))
    answer = min(accept_tokens.ANSWER, length // 2)
    prompts = accept_tokens.prompts_of(folder, facts.vocab_size, length - answer)
    golden = load_reference(
        folder, backend, "float32", length, config.threads, config.lm_head_dtype, config.kv_cache_dtype)
    for dtype in dict.fromkeys([*exact_dtypes(backend, hybrid=facts.has_fixed_state), served]):
        loaded = load(
            folder, backend, dtype, max_model_len=length, max_num_seqs=rows, max_num_batched_tokens=budget,
            block_size=config.block_size, kv_cache_dtype=config.kv_cache_dtype, kv_cache_memory=config.kv_cache_memory,
            lm_head_dtype=config.lm_head_dtype)
        yield from guarded("tokens", dtype, check_tokens(loaded, golden, prompts, answer, folder))
        yield from guarded("sampling", dtype, check_sampling(loaded, golden, prompts, folder))
        if dtype == served:
            if backend.settings.capture_mode != "off":
                yield from guarded("capture", dtype, check_captures(loaded, rows))
                yield from guarded("contexts", dtype, check_contexts(loaded, quick=quick))
                yield from guarded("soak", dtype, check_soak(loaded, soak_minutes))
            elif soak_minutes:
                yield Finding("soak", "captured steps", "nothing is captured: capture is off", None)
            yield from guarded("latency", dtype, latencies.steps(loaded, context, budget))
        del loaded
        gc.collect()  # frees the memory for the next dtype


def exact_dtypes(backend: Backend, *, hybrid: bool) -> list[str]:
    """Return float32 if a device computes in it without rounding between.

    hybrid: the model has linear attention. Where its kernels are made for states in bfloat16, so are their results.
    """
    rounds = hybrid and backend.capabilities.state_dtypes[0] == "bfloat16"
    return ["float32"] if supports_dtype(backend, "float32") and not rounds else []


def check_tokens(
    loaded: Loaded, golden: tuple[Model, Backend], prompts: Sequence[list[int]], count: int, folder: Path
) -> Iterator[Finding]:
    """Answer each prompt with `count` tokens, with and without overlapped steps, and judge the tokens.

    golden: the model on the CPU in float32.
    """
    import torch

    overlapped, alone = (accept_tokens.answers(loaded.runner, prompts, count, depth) for depth in (2, 1))
    if loaded.runner.dtype_name == "float32" and loaded.model.weights.quantized_inputs == {torch.int8}:
        yield _follow_cpu(loaded, golden, prompts, overlapped)
    else:
        yield _compare_with_cpu(loaded, golden, prompts, overlapped.tokens, folder)
    yield _compare_overlap(loaded, overlapped, alone)
    share = overlapped.captured / max(overlapped.decodes, 1)
    captures = loaded.backend.settings.capture_mode != "off"
    judged = captures and (overlapped.captured > 0 or not loaded.runner.deterministic)
    yield Finding(
        "tokens", f"captured decodes, {loaded.runner.dtype_name}",
        f"{overlapped.captured} of {overlapped.decodes} decode tokens",
        share >= MIN_CAPTURED_SHARE if judged else None,
        {"share": share},
        f"decode_buckets must reach {len(prompts)} rows or more, otherwise larger batches run kernel by kernel")


def _compare_with_cpu(
    loaded: Loaded, golden: tuple[Model, Backend], prompts: Sequence[list[int]], tokens: list[list[int]], folder: Path
) -> Finding:
    """Return the finding for the agreement of logits and tokens with the CPU in float32."""
    from npuserve.cli.acceptance.reference import forced_logits, load_reference
    from npuserve.kernels.kv_cache import setting_of

    runner = loaded.runner
    rounding = accept_tokens.rounding_dtype(loaded)
    sequences = [prompt + answer for prompt, answer in zip(prompts, tokens, strict=True)]
    cached = runner.cache_dtype if runner.cache_dtype != loaded.model.weights.dtype else None

    def compared(model: Model, backend: Backend) -> accept_tokens.Agreement:
        return accept_tokens.agreement(
            forced_logits(*golden, sequences, FORCED_BATCH_TOKENS, cache_dtype=cached),
            forced_logits(model, backend, sequences, FORCED_BATCH_TOKENS, cache_dtype=cached), prompts, tokens)

    agreement = compared(loaded.model, loaded.backend)
    figures, said = _described(agreement)
    if rounding == "float32" and not cached:
        passed = agreement.likeliest == agreement.tokens
    else:  # a cache rounds keys and values, and sums in another order may round to the next number
        verdict = judge_rounded(agreement, lambda: compared(*load_reference(
            folder, loaded.backend, rounding, runner.max_model_len, golden[1].threads,
            runner.config.lm_head_dtype, setting_of(runner.cache_dtype))).share,
            rounding in golden[1].capabilities.dtypes)
        if verdict.rounded_share is not None:
            figures["equal_argmax_of_the_cpu"] = verdict.rounded_share
            said += f"; the CPU in {rounding}: {verdict.rounded_share:.4f}"
        figures["least_equal_argmax"] = verdict.min_share
        passed = verdict.passed
    return _judged(loaded, agreement, said, passed, figures)


def _follow_cpu(
    loaded: Loaded, golden: tuple[Model, Backend], prompts: Sequence[list[int]], answers: accept_tokens.Answers
) -> Finding:
    """Return the finding for the agreement with the CPU in float32 of a model whose quantized activations are int8.

    The answers' steps are computed again, kernel by kernel, and by the CPU with the device's rounding of ties.
    """
    from npuserve.cli.acceptance.reference import step_logits
    from npuserve.cli.acceptance.rounding import MAX_TIE_DISTANCE, FollowedRounding

    runner = loaded.runner
    model = loaded.model
    reference, cpu = golden
    cached = runner.cache_dtype if runner.cache_dtype != model.weights.dtype else None
    steps = accept_tokens.computed_steps(answers, prompts)
    rounding = FollowedRounding()
    blocks = 1 + max(block for rows in steps for row in rows for block in row.block_ids)
    device, followed = (
        step_logits(tapped, backend, steps, blocks, runner.block_size, cached)
        for tapped, backend in ((rounding.device(model), loaded.backend), (rounding.reference(reference), cpu)))
    agreement = accept_tokens.step_agreement(device, followed, steps, prompts, answers.tokens)
    figures, said = _described(agreement)
    said += f" (limit {MAX_FOLLOWED_DIFFERENCE:g})"
    said += (f"; {rounding.ties} of {rounding.numbers} int8 activations rounded as the device, at most "
             f"{rounding.distance:.1e} from a half (limit {MAX_TIE_DISTANCE:.1e})")
    said += f", {rounding.others} OTHERS differ" if rounding.others else ", no others differ"
    figures |= {"int8_numbers": rounding.numbers, "int8_ties": rounding.ties, "int8_others": rounding.others,
                "int8_tie_distance": rounding.distance}
    is_equal = agreement.likeliest == agreement.tokens
    passed = is_equal and agreement.difference <= MAX_FOLLOWED_DIFFERENCE and not rounding.others
    return _judged(loaded, agreement, said, passed, figures)


def _described(agreement: accept_tokens.Agreement) -> tuple[dict[str, Any], str]:
    """Return the agreement in figures and in words."""
    return {
        "positions": agreement.positions, "equal_argmax": agreement.share, "tokens": agreement.tokens,
        "equal_tokens": agreement.likeliest / agreement.tokens, "largest_logit_difference": agreement.difference,
        "largest_gap": agreement.gap,
    }, (f"{agreement.likeliest} of {agreement.tokens} tokens as the CPU in float32, gap {agreement.gap:.1e}; "
        f"{agreement.equal} of {agreement.positions} positions ({agreement.share:.4f}), logits differ by "
        f"{agreement.difference:.1e}")


def _judged(
    loaded: Loaded, agreement: accept_tokens.Agreement, said: str, passed: bool, figures: dict[str, Any]
) -> Finding:
    where = "prompt {}, token {}: {} and not {}".format(*agreement.worst) if agreement.worst else "in its logits"
    return Finding("tokens", f"beside the CPU, {loaded.runner.dtype_name}", said, passed, figures,
                   f"the model's result is wrong at {where}: npuserve bench step MODEL --layers 1 names the first "
                   "wrong kernel of a step; send both reports")


class RoundedVerdict(NamedTuple):
    """Verdict on an agreement with a reference that does not round.

    min_share: the lowest share of equal argmax that was required.
    rounded_share: the share of a reference that rounds as the judged model does; None if it was not needed.
    """

    passed: bool
    min_share: float
    rounded_share: float | None


def judge_rounded(
    agreement: accept_tokens.Agreement, rounded_share: Callable[[], float], can_round: bool
) -> RoundedVerdict:
    """Judge a model that rounds: by its share of equal argmax, and by the gap of its answered tokens.

    rounded_share: computes the share of a reference that rounds too. Called if the share is low without it.
    can_round: whether there is such a reference.
    """
    min_share = min_equal_share(agreement.positions)
    share = None
    if agreement.share < min_share and can_round:
        share = rounded_share()
        min_share = min_equal_share(agreement.positions, share)
    passed = agreement.share >= min_share and agreement.gap <= MAX_GAP * agreement.difference
    return RoundedVerdict(passed, min_share, share)


def min_equal_share(positions: int, cpu_share: float = 1.0) -> float:
    """Return the lowest share of equal argmax that rounding explains; continuous in both arguments.

    positions: number of positions compared.
    cpu_share: the CPU's share in the judged dtype, over the same positions; 1 if not measured.
    """
    expected = min(MIN_EQUAL_SHARE, cpu_share)
    return expected - SIGMAS * math.sqrt(expected * (1 - expected) / positions)


def _compare_overlap(loaded: Loaded, overlapped: accept_tokens.Answers, alone: accept_tokens.Answers) -> Finding:
    """Return the finding for the equality of tokens with two steps in flight and with one."""
    same = overlapped.tokens == alone.tokens
    steps = overlapped.steps == alone.steps
    first = next((f" from prompt {number}, token {place} on" for number, pair in enumerate(
        zip(overlapped.tokens, alone.tokens, strict=True)) for place, (a, b) in enumerate(zip(*pair, strict=False))
        if a != b), "")
    return Finding(
        "tokens", f"overlapped and not, {loaded.runner.dtype_name}",
        f"{'equal' if same else 'OTHER'} tokens{first} in {len(overlapped.steps)} {'equal' if steps else 'other'} "
        "steps",
        same if same or steps or loaded.runner.deterministic else None, {"steps": len(overlapped.steps)},
        "steps in flight corrupt each other: serve with --no-double-buffering until this is fixed, and send this "
        "report")
