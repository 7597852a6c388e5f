"""Translation of an answer's messages to VllmEngine's: chunks of a stream, and one Complete for each sample.

VllmEngine sends token ids, and its client decodes them. A chunk counts its own tokens. A Complete counts all tokens of
its sample; in a stream it carries none of them, since the chunks did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from npuserve.service.ipc.messages import Request
from npuserve.v1 import generate_pb2 as pb

FINISH_REASONS = {
    pb.FINISH_REASON_EOS: "stop",
    pb.FINISH_REASON_STOP_TOKEN: "stop",
    pb.FINISH_REASON_STOP_STRING: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_DEADLINE: "abort",
    pb.FINISH_REASON_ABORTED: "abort",
}
"""A deadline is "abort", since its answer is cut although neither the model nor max_tokens ended it."""


@dataclass
class _Sample:
    """What is held back of one sample: all of it until its Complete, or of a stream the prompt's log-probabilities."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: vllm.OutputLogProbs = field(default_factory=vllm.OutputLogProbs)
    prompt_logprobs: vllm.InputLogProbs = field(default_factory=vllm.InputLogProbs)


class AnswerTranslator:
    """Translator of one call's messages. Pass each message to `translate`, in order.

    request: the request of the call.
    stream: send chunks; False: send a Complete alone.
    """

    def __init__(self, request: Request, stream: bool):
        self._stream = stream
        self._prompt_tokens = len(request.prompt_ids)
        self._has_top = bool(request.sampling.logprobs)
        self._prompt_has_top = bool(request.sampling.prompt_logprobs)
        self._samples: dict[int, _Sample] = {}

    def translate(self, part: pb.StreamGenerateResponse) -> Iterator[vllm.GenerateResponse]:
        """Yield the messages of a part of the answer; none for a part without tokens and without an end."""
        index = part.index
        sample = self._samples.get(index)
        if sample is None:
            sample = self._samples[index] = _Sample()
        _add_prompt_logprobs(sample.prompt_logprobs, part.prompt_logprobs, self._prompt_has_top)
        if not self._stream:
            sample.token_ids.extend(part.token_ids)
            _add_logprobs(sample.logprobs, part.logprobs, self._has_top)
        elif part.token_ids:
            yield vllm.GenerateResponse(chunk=self._chunk(part, index, sample))
        if part.HasField("finish"):
            yield vllm.GenerateResponse(complete=_complete(part.finish, index, self._samples.pop(index)))

    def _chunk(self, part: pb.StreamGenerateResponse, index: int, sample: _Sample) -> vllm.GenerateStreamChunk:
        """Return a chunk of the part's tokens; the first one of a sample has the prompt's log-probabilities."""
        chunk = vllm.GenerateStreamChunk(
            token_ids=part.token_ids, prompt_tokens=self._prompt_tokens, completion_tokens=len(part.token_ids),
            index=index)
        if part.logprobs:
            _add_logprobs(chunk.output_logprobs, part.logprobs, self._has_top)
        if sample.prompt_logprobs.token_ids:
            chunk.input_logprobs.CopyFrom(sample.prompt_logprobs)
            sample.prompt_logprobs.Clear()
        return chunk


def _complete(finish: pb.Finish, index: int, sample: _Sample) -> vllm.GenerateComplete:
    usage = finish.usage
    complete = vllm.GenerateComplete(
        output_ids=sample.token_ids, finish_reason=FINISH_REASONS[finish.reason], prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.generated_tokens, cached_tokens=usage.cached_tokens, index=index,
        spec_draft_tokens=usage.drafted_tokens, spec_accepted_tokens=usage.accepted_draft_tokens)
    if sample.logprobs.token_ids:
        complete.output_logprobs.CopyFrom(sample.logprobs)
    if sample.prompt_logprobs.token_ids:
        complete.input_logprobs.CopyFrom(sample.prompt_logprobs)
    match finish.reason:
        case pb.FINISH_REASON_STOP_TOKEN:
            complete.matched_token_id = finish.matched_stop_token_id
        case pb.FINISH_REASON_STOP_STRING:
            complete.matched_stop_str = finish.matched_stop
    return complete


def _add_logprobs(target: vllm.OutputLogProbs, positions: Sequence[pb.PositionLogprobs], has_top: bool) -> None:
    target.token_logprobs.extend(position.chosen.logprob for position in positions)
    target.token_ids.extend(position.chosen.token_id for position in positions)
    if has_top:
        target.top_logprobs.extend(map(_top, positions))


def _add_prompt_logprobs(target: vllm.InputLogProbs, positions: Sequence[pb.PositionLogprobs], has_top: bool) -> None:
    """Add positions of the prompt. The prompt's first token has no probability."""
    for position in positions:
        value = position.chosen.logprob if target.token_ids else None
        target.token_logprobs.append(vllm.InputTokenLogProb(value=value))
        target.token_ids.append(position.chosen.token_id)
    if has_top:
        target.top_logprobs.extend(map(_top, positions))


def _top(position: pb.PositionLogprobs) -> vllm.TopLogProbs:
    return vllm.TopLogProbs(
        values=[token.logprob for token in position.top], token_ids=[token.token_id for token in position.top])
