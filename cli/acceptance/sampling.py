"""Sampling part of the acceptance check: answers with each sampling parameter, judged by the CPU in float32.

ROWS requests run together, in steps of mixed parameters: those of CAPTURED in captured steps with LM head and sampler,
those of OUTSIDE with the sampler outside of them. The CPU gets prompt and answer, and samples each of the answer's
tokens with the same parameters, seed and position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from npuserve.cli.acceptance import tokens as accept_tokens
from npuserve.cli.acceptance.report import Finding
from npuserve.npu.step import NewRequest, Row, SamplingParams, Step, TokenLogprobs

if TYPE_CHECKING:
    from npuserve.cli.acceptance.reference import Loaded
    from npuserve.npu.backends.base import Backend
    from npuserve.npu.execution.decoder import Model
    from npuserve.npu.execution.runner import Runner

COUNT = 16
"""Tokens of each answer."""

ROWS = 8
"""Requests that run together: no more than the requests of the part tokens, which decode_buckets must reach."""

MAX_PROMPT = 24
MIN_CAPTURED_SHARE = 0.95
MIN_EQUAL = 0.9
"""Minimum share of tokens equal to the CPU's: now and then rounding moves a draw to the other side of a border. If the
CPU's own share in the dtype of `rounding_dtype`, less SIGMAS standard deviations, is lower, it takes its place. If a
parameter is ignored, at most three quarters of the tokens of a trained model are equal."""

SIGMAS = 3
LOGPROB_LIMIT = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""Dtype of `rounding_dtype` -> maximum difference of a reported log-probability of an equal token."""

CAPTURED: dict[str, SamplingParams] = {
    "temperature": SamplingParams(temperature=1.8),
    "top_k": SamplingParams(temperature=2.0, top_k=5),
    "top_p": SamplingParams(temperature=1.5, top_p=0.5),
    "min_p": SamplingParams(temperature=1.5, min_p=0.2),
    # Rewards for repetition, since few tokens of a short answer repeat by themselves; two of them are larger than a
    # client may send, so that they decide.
    "repetition_penalty": SamplingParams(temperature=0.0, repetition_penalty=0.5),
    "presence_penalty": SamplingParams(temperature=0.5, presence_penalty=-12.0),
    "frequency_penalty": SamplingParams(temperature=0.5, frequency_penalty=-12.0),
    "all of them": SamplingParams(temperature=2.0, top_k=8, top_p=0.9, min_p=0.05, repetition_penalty=0.9,
                                  presence_penalty=-0.5, frequency_penalty=-0.5),
}
OUTSIDE: dict[str, SamplingParams] = {
    "logprobs": SamplingParams(temperature=0.0, logprobs=5),
    "prompt_logprobs": SamplingParams(temperature=0.0, prompt_logprobs=2),
    "logit_bias": SamplingParams(temperature=2.0, logit_bias={3: 30.0, 5: 30.0, 7: 30.0}),
    "allowed_token_ids": SamplingParams(temperature=0.5, allowed_token_ids=tuple(range(2, 40, 3))),
}


@dataclass(frozen=True, slots=True)
class Expected:
    """Tokens that the CPU samples after each part of an answer, and its log-probabilities."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]


def check_sampling(
    loaded: Loaded, golden: tuple[Model, Backend], prompts: Sequence[list[int]], folder: Path
) -> Iterator[Finding]:
    """Yield a finding for each parameter. Where the device captures the sampler, yield one for the share of such steps.

    golden: the model on the CPU in float32.
    """
    from npuserve.cli.acceptance.reference import load_reference
    from npuserve.kernels.kv_cache import setting_of

    short = [prompt[:MAX_PROMPT] for prompt in prompts[1:3]]
    reference = _runner(loaded, golden)
    vocabulary = loaded.runner.config.vocab_size
    with_minimum = SamplingParams(min_tokens=COUNT, ending_ids=tuple(range(0, vocabulary, 2)), temperature=0.5)
    dtype = loaded.runner.dtype_name
    rounding = accept_tokens.rounding_dtype(loaded)
    others: list[Runner] = []

    def in_dtype() -> Runner | None:
        if not others and rounding != "float32" and rounding in golden[1].capabilities.dtypes:
            others.append(_runner(loaded, load_reference(
                folder, loaded.backend, rounding, loaded.runner.max_model_len, golden[1].threads,
                loaded.runner.config.lm_head_dtype, setting_of(loaded.runner.cache_dtype))))
        return others[0] if others else None

    alone = whole = 0
    for where, cases in (("captured", CAPTURED), ("outside", OUTSIDE | {"min_tokens": with_minimum})):
        each = ROWS // len(short)
        for names in (list(cases)[first : first + each] for first in range(0, len(cases), each)):
            asked = [msgspec.structs.replace(cases[name], seed=place)
                     for place, name in enumerate(name for name in names for _ in short)]
            answers = accept_tokens.answers(loaded.runner, short * len(names), COUNT, 2, asked)
            if where == "captured":
                alone += answers.alone
                whole += answers.whole
            for number, name in enumerate(names):
                mine = range(number * len(short), (number + 1) * len(short))
                yield _judge(f"{name}, {where}, {dtype}", answers, mine, short * len(names), asked, reference, in_dtype,
                             rounding)
    if loaded.backend.capabilities.sampler_filters and loaded.backend.settings.capture_mode != "off":
        share = whole / max(alone, 1)
        yield Finding(
            "sampling", f"captured steps, {dtype}", f"{whole} of {alone} tokens computed and sampled in one dispatch",
            share >= MIN_CAPTURED_SHARE, {"share": share},
            f"decode_buckets must reach {ROWS} rows or more, otherwise the sampler runs outside of captured steps")


def _judge(
    name: str, answers: accept_tokens.Answers, mine: Sequence[int], prompts: Sequence[list[int]],
    asked: Sequence[SamplingParams], reference: Runner, in_dtype: Callable[[], Runner | None], rounding: str,
) -> Finding:
    """Return the finding for the requests `mine`.

    rounding: `rounding_dtype` of the model.
    in_dtype: returns the CPU's runner in `rounding`, or None.
    """
    expected = [expected_tokens(reference, prompts[i], answers.tokens[i], asked[i]) for i in mine]
    positions = sum(len(answers.tokens[i]) for i in mine)
    equal = sum(_equal(answers.tokens[i], x.tokens) for i, x in zip(mine, expected, strict=True))
    gap = max((_logprob_gap(answers, i, x) for i, x in zip(mine, expected, strict=True)), default=0.0)
    min_share = MIN_EQUAL
    cpu_share = None
    if equal < min_share * positions and (runner := in_dtype()):
        again = [expected_tokens(runner, prompts[i], answers.tokens[i], asked[i]).tokens for i in mine]
        cpu_share = sum(_equal(x.tokens, y) for x, y in zip(expected, again, strict=True)) / positions
        min_share = min(min_share, cpu_share - SIGMAS * math.sqrt(cpu_share * (1 - cpu_share) / positions))
    limit = LOGPROB_LIMIT[rounding]
    first = next((f"answer {i}, token {place}: {a} and not {b}" for i, x in zip(mine, expected, strict=True)
                  for place, (a, b) in enumerate(zip(answers.tokens[i], x.tokens, strict=True)) if a != b), None)
    said = f"{equal} of {positions} tokens as the CPU in float32 (limit {min_share:.2f})"
    said += f"; the CPU in {rounding}: {cpu_share:.2f}" if cpu_share is not None else ""
    said += f"; log-probabilities differ by {gap:.1e} (limit {limit:g})" if gap else ""
    return Finding(
        "sampling", name, said, equal >= min_share * positions and gap <= limit,
        {"tokens": positions, "equal": equal, "least_share": min_share, "share_of_the_cpu": cpu_share,
         "logprob_gap": gap, "first_difference": first},
        f"the device samples other tokens with this parameter, first at {first or 'no token, in log-probabilities'}: "
        "send this report; if all parameters fail, compare the part tokens first")


def expected_tokens(runner: Runner, prompt: list[int], answer: list[int], sampling: SamplingParams) -> Expected:
    """Sample each token of an answer after the tokens before it, in one step with a request for each token."""
    width = -(-(len(prompt) + len(answer)) // runner.block_size)
    rows = []
    new = []
    for place in range(len(answer)):
        blocks = list(range(place * width, (place + 1) * width))
        rows.append(Row(place, prompt + answer[:place], 0, blocks, 1, state_slot=place))
        asked = sampling if place == 0 else msgspec.structs.replace(sampling, prompt_logprobs=None)
        new.append(NewRequest(place, prompt, answer[:place], asked))
    result = runner.collect(runner.launch(Step(rows, new)))
    runner.collect(runner.launch(Step([], ended=[row.request_id for row in rows])))
    reports = [] if sampling.logprobs is None else [result.logprobs[place][0] for place in range(len(answer))]
    return Expected([result.token_ids[place][0] for place in range(len(answer))], reports,
                    result.prompt_logprobs.get(0, []))


def _equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    return sum(a == b for a, b in zip(tokens, others, strict=True))


def _logprob_gap(answers: accept_tokens.Answers, place: int, expected: Expected) -> float:
    """Return the largest difference of a log-probability; infinite for NaN or missing reports."""
    pairs = [(answers.logprobs[place], expected.logprobs), (answers.prompt_logprobs[place], expected.prompt_logprobs)]
    if any(len(reports) != len(wanted) for reports, wanted in pairs):
        return math.inf
    gaps = [abs(a.logprob - b.logprob) for reports, wanted in pairs for a, b in zip(reports, wanted, strict=True)
            if a.token_id == b.token_id]
    return math.inf if any(map(math.isnan, gaps)) else max(gaps, default=0.0)


def _runner(loaded: Loaded, reference: tuple[Model, Backend]) -> Runner:
    from npuserve.cli.acceptance.reference import reference_runner
    from npuserve.kernels.kv_cache import setting_of

    return reference_runner(
        *reference, COUNT, COUNT * (MAX_PROMPT + COUNT), setting_of(loaded.runner.cache_dtype))
