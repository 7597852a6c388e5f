"""What the host tells the device to do in one step, and what comes back: plain values, no tensor.

The scheduler fills a `Step`, the runner executes it. Nothing here imports torch, so that the front end and the
scheduler may use these types.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a request's tokens are chosen. Ranges are those of the proto; the servicer has checked them.

    seed: 64 bits; the front end draws one where the client gave none, so that a request can be continued.
    ending_ids: tokens that may not be chosen before `min_tokens` tokens were generated.
    logprobs, prompt_logprobs: how many likeliest tokens to report beside the chosen one; None for no report.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ending_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def penalized(self) -> bool:
        """True if the choice depends on which tokens there have been."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that the runner meets for the first time.

    prompt_ids: of the client's prompt. output_ids: generated before (by a dead engine), so that penalties and
    min_tokens go on from there.
    """

    request_id: int
    prompt_ids: list[int]
    output_ids: list[int]
    sampling: SamplingParams


PENDING = -1
"""In place of a token that the step before samples: the device has it, the host not yet."""


class Row(msgspec.Struct, frozen=True):
    """A request's place in a step: compute `token_ids` at positions [start, start + len(token_ids)).

    token_ids: or [PENDING] alone, the token that this request's row of the step launched just before samples.
    block_ids: the KV-cache blocks of positions [0, start + len(token_ids)), in order. The list may grow later.
    samples: these are the last tokens so far, so the step yields the next one.
    """

    request_id: int
    token_ids: list[int]
    start: int
    block_ids: list[int]
    samples: bool

    @property
    def is_decode(self) -> bool:
        return len(self.token_ids) == 1 and self.samples and self.start > 0


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration. `ended` requests are forgotten before `new` ones are met, both before the rows are computed.

    Steps are computed in the order of their launch, so that one may be launched while the one before it runs.
    """

    rows: list[Row]
    new: list[NewRequest] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """One position's report: the token that stands there, its log-probability and rank (1 is the likeliest), and
    the likeliest tokens, best first. Natural logarithms, of the model's own distribution: before penalties, bias
    and temperature."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step yields.

    token_ids: request_id -> the sampled token, for every row that samples.
    logprobs: request_id -> the sampled token's report, where asked for.
    prompt_logprobs: request_id -> reports of prompt tokens that this step's chunk predicted, in order: computing
        positions [a, b) yields those of prompt tokens [a + 1, min(b + 1, prompt length)).
    device_seconds: the device at work on this step.
    captured: something of it was computed in a captured dispatch; captured_decodes: so many decode rows.
    timed: its kernels were, one by one, and their latencies told.
    """

    token_ids: dict[int, int]
    logprobs: dict[int, TokenLogprobs]
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    device_seconds: float
    captured: bool = False
    captured_decodes: int = 0
    timed: bool = False
