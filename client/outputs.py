"""Results of `LLM`, with vLLM's names of classes and fields."""

from __future__ import annotations

from dataclasses import dataclass, field

from npuserve.common.answer import value_name
from npuserve.v1 import generate_pb2 as pb

FINISH_REASONS = {"EOS": "stop", "STOP_TOKEN": "stop", "STOP_STRING": "stop", "LENGTH": "length"}
"""vLLM's names of finish reasons. Others are "abort"."""


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token. rank: 1 for the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of an answer.

    logprobs: by position, token id -> Logprob; None if they were not requested.
    stop_reason: stop string or stop token that ended the answer; None for another end.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: str | int | None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of the answer's tokens; None if they were not requested."""
        if self.logprobs is None:
            return None
        return sum(position[token].logprob for position, token in zip(self.logprobs, self.token_ids, strict=True))


@dataclass(frozen=True)
class RequestOutput:
    """Answer to one prompt.

    prompt: text of the prompt; None for token ids or a chat.
    prompt_token_ids: None for a chat, whose template the server applies.
    prompt_logprobs: by position, None for the first one; None if they were not requested.
    """

    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = field(default=True, init=False)


@dataclass(frozen=True)
class EmbeddingOutput:
    """Embedding of one prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """Answer to one prompt of `LLM.embed`. prompt, prompt_token_ids: as it was given, the other is None."""

    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: EmbeddingOutput
    num_cached_tokens: int = 0
    finished: bool = field(default=True, init=False)


@dataclass(frozen=True)
class ScoringOutput:
    """Relevance of one document, in [0, 1]."""

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """Answer to one pair of `LLM.score`."""

    outputs: ScoringOutput
    num_cached_tokens: int = 0
    finished: bool = field(default=True, init=False)


def completion(index: int, sample: pb.GenerateResponse | pb.Sample, has_logprobs: bool) -> CompletionOutput:
    finish = sample.finish
    stop_reason: str | int | None = None
    if finish.reason == pb.FINISH_REASON_STOP_STRING:
        stop_reason = finish.matched_stop
    elif finish.reason == pb.FINISH_REASON_STOP_TOKEN:
        stop_reason = finish.matched_stop_token_id
    reason = value_name(pb.FinishReason, finish.reason, "FINISH_REASON_")
    logprobs = [position_logprobs(position) for position in sample.logprobs] if has_logprobs else None
    return CompletionOutput(
        index, sample.text, list(sample.token_ids), logprobs, FINISH_REASONS.get(reason, "abort"), stop_reason)


def position_logprobs(position: pb.PositionLogprobs) -> dict[int, Logprob]:
    """Return the log-probabilities at one position: of its token, then of the most likely ones."""
    return {token.token_id: Logprob(token.logprob, token.rank, token.text)
            for token in (position.chosen, *position.top)}
