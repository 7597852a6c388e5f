"""Sampling parameters with the names of vLLM's offline API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_TOKENS = 16
"""Default of `max_tokens`, as in vLLM."""


@dataclass
class SamplingParams:
    """Parameters of one generation, named as in vLLM. generate.proto documents ranges.

    temperature, top_p, top_k, min_p, repetition_penalty: None for the value in the model's generation_config.json.
    n: number of samples of each prompt.
    seed: None for a random seed.
    stop, stop_token_ids: what ends the answer.
    max_tokens: None for the rest of the model's context.
    logprobs, prompt_logprobs: number of most likely tokens to report at each position; None for no log-probabilities.
    json_schema, regex, choices: constraint on the text, at most one of them.
    """

    n: int = 1
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    min_p: float | None = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = MAX_TOKENS
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    json_schema: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choices: Sequence[str] | None = None

    def options(self) -> dict[str, Any]:
        """Return the options of `Client.stream`."""
        options = dict(vars(self))
        options["include_stop"] = options.pop("include_stop_str_in_output")
        return options
