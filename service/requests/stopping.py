"""Checks of `stopping`: stop strings, token ids that end the answer, and its length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from npuserve.service.errors import NoTokenizer, Violations
from npuserve.service.requests.fields import check_token_ids
from npuserve.service.text.model_folder import ModelFolder
from npuserve.v1 import generate_pb2 as pb

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

    @property
    def ending_ids(self) -> frozenset[int]:
        return self.token_ids | self.eos_token_ids


def check_stopping(
    stopping: pb.StoppingParams, folder: ModelFolder, vocabulary_size: int, bad: Violations
) -> Stopping:
    """Return what ends the answer; report bad fields. Raise NoTokenizer for stop strings without a tokenizer."""
    token_ids = check_token_ids(
        "stopping.stop_token_ids", stopping.stop_token_ids, vocabulary_size, bad, MAX_STOP_TOKEN_IDS)
    if stopping.stop and folder.tokenizer is None:
        raise NoTokenizer("stopping.stop: the served model has no tokenizer; use stop_token_ids")
    return Stopping(
        _check_stop_strings(stopping.stop, bad), token_ids,
        frozenset() if stopping.ignore_eos else folder.eos_token_ids)


def _check_stop_strings(strings: Sequence[str], bad: Violations) -> tuple[str, ...]:
    if len(strings) > MAX_STOP_STRINGS:
        bad.add("stopping.stop", f"must be at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
        return ()
    for index, string in enumerate(strings):
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            bad.add(f"stopping.stop[{index}]", f"must be 1 to {MAX_STOP_CHARACTERS} characters, got {len(string)}")
    return tuple(strings)


def check_lengths(
    stopping: pb.StoppingParams, prompt_tokens: int, max_model_len: int, bad: Violations
) -> tuple[int, int]:
    """Return max_tokens and min_tokens; report a bad one.

    prompt_tokens: 0 if the prompt is bad, so that its length is unknown.
    """
    largest = max_model_len - (prompt_tokens or 1)
    has = f"has {prompt_tokens} token{'s' * (prompt_tokens != 1)}" if prompt_tokens else "needs at least 1 token"
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else largest
    if not 1 <= max_tokens <= largest:
        bad.add("stopping.max_tokens", (
            f"must be in [1, {largest}], as max_model_len is {max_model_len} and the prompt {has}, got {max_tokens}"))
    elif stopping.min_tokens > max_tokens:
        bad.add("stopping.min_tokens", f"must be in [0, {max_tokens}], got {stopping.min_tokens}")
    return max_tokens, stopping.min_tokens
