"""Checks of fields. A bad field is added to `Violations` with its path in the message and its allowed values."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from npuserve.npu.profile import MAX_PROFILE_SECONDS, MAX_PROFILE_STEPS, NAME
from npuserve.service.errors import InvalidField, NoTokenizer, Violations
from npuserve.service.text.model_folder import DEFAULT_RANGES, ModelFolder, Range
from npuserve.v1 import generate_pb2 as pb

Number = TypeVar("Number", int, float)

MIN_TEMPERATURE = 0.01
"""Lower temperatures above 0 are raised to this value, as in vLLM: they are as good as greedy and overflow."""
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS_ENTRIES = 1024
BIAS = Range(-100, 100)
PENALTY = Range(-2, 2)
NUMBERS: dict[str, tuple[Range, float]] = {
    "temperature": (DEFAULT_RANGES["temperature"], 1.0),
    "top_k": (DEFAULT_RANGES["top_k"], 0),
    "top_p": (DEFAULT_RANGES["top_p"], 1.0),
    "min_p": (DEFAULT_RANGES["min_p"], 0.0),
    "repetition_penalty": (DEFAULT_RANGES["repetition_penalty"], 1.0),
    "presence_penalty": (PENALTY, 0.0),
    "frequency_penalty": (PENALTY, 0.0),
}
"""Numbers of `sampling`: range, and value where neither the request nor the model has one."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 128


@dataclass(frozen=True, slots=True)
class Stopping:
    """What ends an answer.

    strings: stop strings.
    token_ids: ids of the request that end the answer.
    eos_token_ids: ids of the model that end the answer; empty with `ignore_eos`.
    """

    strings: tuple[str, ...]
    token_ids: frozenset[int]
    eos_token_ids: frozenset[int]


def check_number(path: str, value: Number, allowed: Range, bad: Violations) -> Number:
    """Return the value; report it if it is outside the range."""
    if value not in allowed:
        text = str(value) if isinstance(value, int) else format(value, "g")
        if float(text) in allowed:  # it is so near the range that rounding has moved it inside
            text = format(value, ".9g")
        bad.add(path, f"must be in {allowed}, got {text}")
    return value


def check_token_ids(
    path: str, ids: Sequence[int], vocabulary_size: int, bad: Violations, max_ids: int | None = None
) -> frozenset[int]:
    """Return the set of ids; report each id outside the vocabulary.

    max_ids: number of ids that are allowed, None for any. If there are more, report that and return an empty set.
    """
    if max_ids is not None and len(ids) > max_ids:
        bad.add(path, f"must be at most {max_ids} ids, got {len(ids)}")
        return frozenset()
    for index, token in enumerate(ids):
        if token >= vocabulary_size:
            bad.add(f"{path}[{index}]", f"token id must be in [0, {vocabulary_size - 1}], got {token}")
    return frozenset(ids)


def check_sampling(
    message: pb.GenerateRequest, defaults: dict[str, float], vocabulary_size: int, bad: Violations
) -> dict[str, Any]:
    """Return keyword arguments of `step.SamplingParams` from `sampling` and `output`; report bad fields.

    defaults: the model's values of absent fields.

    A `top_k` that excludes no token becomes 0. A seed is drawn if there is none. An absent number of log-probabilities
    is None.
    """
    given: Any = message.sampling
    output: Any = message.output
    values: dict[str, Any] = {"logit_bias": dict(given.logit_bias)}
    if len(given.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
        bad.add("sampling.logit_bias", (
            f"must have at most {MAX_LOGIT_BIAS_ENTRIES} entries, got {len(given.logit_bias)}"))
    else:
        for token, bias in given.logit_bias.items():
            path = f"sampling.logit_bias[{token}]"
            if token >= vocabulary_size:
                bad.add(path, f"token id must be in [0, {vocabulary_size - 1}], got {token}")
            check_number(path, bias, BIAS, bad)
    for name, (allowed, default) in NUMBERS.items():
        value = getattr(given, name) if given.HasField(name) else defaults.get(name, default)
        values[name] = check_number(f"sampling.{name}", value, allowed, bad)
    values["temperature"] = max(values["temperature"], MIN_TEMPERATURE) if values["temperature"] else 0.0
    if not 0 < values["top_k"] < vocabulary_size:
        values["top_k"] = 0
    values["seed"] = given.seed if given.HasField("seed") else random.getrandbits(64)
    values["allowed_token_ids"] = tuple(sorted(
        check_token_ids("sampling.allowed_token_ids", given.allowed_token_ids, vocabulary_size, bad)))
    counts = Range(0, min(MAX_LOGPROBS, vocabulary_size))
    for name in ("logprobs", "prompt_logprobs"):
        values[name] = None
        if output.HasField(name):
            values[name] = check_number(f"output.{name}", getattr(output, name), counts, bad)
    return values


def check_stopping(
    stopping: pb.StoppingParams, folder: ModelFolder, vocabulary_size: int, bad: Violations
) -> Stopping:
    """Return what ends the answer; report bad fields. Raise NoTokenizer for stop strings without a tokenizer."""
    token_ids = check_token_ids(
        "stopping.stop_token_ids", stopping.stop_token_ids, vocabulary_size, bad, MAX_STOP_TOKEN_IDS)
    if stopping.stop and folder.tokenizer is None:
        raise NoTokenizer("stopping.stop: the served model has no tokenizer; use stop_token_ids")
    if len(stopping.stop) > MAX_STOP_STRINGS:
        bad.add("stopping.stop", f"must be at most {MAX_STOP_STRINGS} strings, got {len(stopping.stop)}")
    else:
        for index, string in enumerate(stopping.stop):
            if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
                bad.add(f"stopping.stop[{index}]", f"must be 1 to {MAX_STOP_CHARACTERS} characters, got {len(string)}")
    return Stopping(tuple(stopping.stop), token_ids, frozenset() if stopping.ignore_eos else folder.eos_token_ids)


def check_lengths(
    stopping: pb.StoppingParams, prompt_tokens: int, max_model_len: int, bad: Violations
) -> tuple[int, int]:
    """Return max_tokens and min_tokens; report a bad one.

    prompt_tokens: 0 if the prompt is bad, so that its length is unknown.
    """
    largest = max_model_len - (prompt_tokens or 1)
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else largest
    if not 1 <= max_tokens <= largest:
        has = f"has {prompt_tokens} token{'s' * (prompt_tokens != 1)}" if prompt_tokens else "needs at least 1 token"
        bad.add("stopping.max_tokens", (
            f"must be in [1, {largest}], as max_model_len is {max_model_len} and the prompt {has}, got {max_tokens}"))
    elif stopping.min_tokens > max_tokens:
        bad.add("stopping.min_tokens", f"must be in [0, {max_tokens}], got {stopping.min_tokens}")
    return max_tokens, stopping.min_tokens


def check_profile_name(field: str, name: str) -> str:
    """Return the name of a profile. Raises InvalidField."""
    if not NAME.fullmatch(name):
        raise InvalidField(field, "must be up to 64 letters, digits, - and _, the first a letter or digit")
    return name


def check_profile_steps(field: str, steps: int) -> int:
    """Return the steps of a profile. Raises InvalidField."""
    if not 1 <= steps <= MAX_PROFILE_STEPS:
        raise InvalidField(field, f"must be in [1, {MAX_PROFILE_STEPS}], got {steps}")
    return steps


def check_profile_seconds(field: str, seconds: float) -> float:
    """Return the maximum duration of a profile. Raises InvalidField."""
    if not 0 < seconds <= MAX_PROFILE_SECONDS:
        raise InvalidField(field, f"must be in (0, {MAX_PROFILE_SECONDS:g}] seconds, got {seconds:.15g}")
    return seconds
