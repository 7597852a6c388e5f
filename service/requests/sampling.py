"""Checks of `sampling` and of the log-probabilities in `output`."""

from __future__ import annotations

import random
from typing import Any, Literal

from npuserve.service.errors import Violations
from npuserve.service.requests.fields import check_number, check_token_ids
from npuserve.service.text.model_folder import DEFAULT_RANGES, Range
from npuserve.v1 import generate_pb2 as pb

MIN_TEMPERATURE = 0.01
"""Lower temperatures above 0 are raised to this value, as in vLLM: they are as good as greedy and overflow."""
PENALTY = Range(-2, 2)
BIAS = Range(-100, 100)
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS_ENTRIES = 1024


def check_sampling(
    given: pb.SamplingParams, defaults: dict[str, float], vocabulary_size: int, bad: Violations
) -> dict[str, Any]:
    """Return keyword arguments of `step.SamplingParams`; report bad fields.

    defaults: the model's values of absent fields.

    A `top_k` that excludes no token becomes 0. A seed is drawn if there is none.
    """

    def number(name: str, default: float) -> Any:
        value = getattr(given, name) if given.HasField(name) else defaults.get(name, default)  # type: ignore[arg-type]
        return check_number(f"sampling.{name}", value, DEFAULT_RANGES.get(name, PENALTY), bad)

    _check_logit_bias(given, vocabulary_size, bad)
    temperature = number("temperature", 1.0)
    top_k = number("top_k", 0)
    return {
        "temperature": max(temperature, MIN_TEMPERATURE) if temperature else 0.0,
        "top_p": number("top_p", 1.0),
        "top_k": top_k if 0 < top_k < vocabulary_size else 0,
        "min_p": number("min_p", 0.0),
        "repetition_penalty": number("repetition_penalty", 1.0),
        "presence_penalty": number("presence_penalty", 0.0),
        "frequency_penalty": number("frequency_penalty", 0.0),
        "seed": given.seed if given.HasField("seed") else random.getrandbits(64),
        "logit_bias": dict(given.logit_bias),
        "allowed_token_ids": tuple(sorted(
            check_token_ids("sampling.allowed_token_ids", given.allowed_token_ids, vocabulary_size, bad))),
    }


def _check_logit_bias(given: pb.SamplingParams, vocabulary_size: int, bad: Violations) -> None:
    count = len(given.logit_bias)
    if count > MAX_LOGIT_BIAS_ENTRIES:
        bad.add("sampling.logit_bias", f"must have at most {MAX_LOGIT_BIAS_ENTRIES} entries, got {count}")
        return
    for token, bias in given.logit_bias.items():
        path = f"sampling.logit_bias[{token}]"
        if token >= vocabulary_size:
            bad.add(path, f"token id must be in [0, {vocabulary_size - 1}], got {token}")
        check_number(path, bias, BIAS, bad)


def check_logprobs(
    output: pb.OutputParams, name: Literal["logprobs", "prompt_logprobs"], vocabulary_size: int, bad: Violations
) -> int | None:
    """Return the number of log-probabilities for each token, None if the field is absent; report a bad one."""
    if not output.HasField(name):
        return None
    count: int = getattr(output, name)
    return check_number(f"output.{name}", count, Range(0, min(MAX_LOGPROBS, vocabulary_size)), bad)
