"""Translation of an answer's messages to VllmEngine's."""

from __future__ import annotations

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from npuserve.npu.step import SamplingParams
from npuserve.service.gateway.answer import FINISH_REASONS, AnswerTranslator
from npuserve.service.ipc.messages import Request
from npuserve.v1 import generate_pb2 as pb
from tests.support.vllm_engine import Answer, join


def request(logprobs: int | None = None, prompt_logprobs: int | None = None) -> Request:
    return Request("r", [1, 2, 3], 9, 0.0, SamplingParams(logprobs=logprobs, prompt_logprobs=prompt_logprobs))


def position(token: int, *top: int) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(
        chosen=pb.TokenLogprob(token_id=token, logprob=-token / 4, rank=1),
        top=[pb.TokenLogprob(token_id=one, logprob=-one / 8, rank=i) for i, one in enumerate(top, 1)])


def part(*ids: int, index: int = 0, **fields: object) -> pb.StreamGenerateResponse:
    return pb.StreamGenerateResponse(token_ids=ids, num_tokens=len(ids), index=index, **fields)  # type: ignore[arg-type]


def finish(reason: int, tokens: int = 3, **fields: object) -> pb.Finish:
    usage = pb.Usage(prompt_tokens=3, cached_tokens=2, generated_tokens=tokens)
    return pb.Finish(reason=reason, usage=usage, **fields)  # type: ignore[arg-type]


def translated(of: Request, stream: bool, *parts: pb.StreamGenerateResponse) -> dict[int, Answer]:
    translator = AnswerTranslator(of, stream)
    return join([message for one in parts for message in translator.translate(one)])


PARTS = (part(4, 5), part(), part(6, finish=finish(pb.FINISH_REASON_LENGTH)))


def test_translate_stream_sends_deltas_and_one_complete() -> None:
    (answer,) = translated(request(), True, *PARTS).values()
    assert [list(chunk.token_ids) for chunk in answer.chunks] == [[4, 5], [6]]
    assert {chunk.prompt_tokens for chunk in answer.chunks} == {3}
    assert not any(chunk.HasField("output_logprobs") or chunk.HasField("input_logprobs") for chunk in answer.chunks)
    assert answer.complete == vllm.GenerateComplete(
        finish_reason="length", prompt_tokens=3, completion_tokens=3, cached_tokens=2)


def test_translate_unary_sends_one_complete_with_all_tokens() -> None:
    (answer,) = translated(request(), False, *PARTS).values()
    assert answer.complete == vllm.GenerateComplete(
        output_ids=[4, 5, 6], finish_reason="length", prompt_tokens=3, completion_tokens=3, cached_tokens=2)


@pytest.mark.parametrize("stream", [True, False])
def test_translate_of_several_samples_keeps_them_apart(stream: bool) -> None:
    answers = translated(
        request(), stream, part(4, index=1), part(5, index=0), part(6, index=1), part(7, index=2),
        part(8, index=1, finish=finish(pb.FINISH_REASON_EOS)), part(index=0, finish=finish(pb.FINISH_REASON_LENGTH, 1)),
        part(9, index=2, finish=finish(pb.FINISH_REASON_ABORTED, 2)))
    assert {index: (answer.token_ids, answer.reason) for index, answer in answers.items()} == {
        0: ([5], "length"), 1: ([4, 6, 8], "stop"), 2: ([7, 9], "abort")}


def test_every_finish_reason_has_a_name() -> None:
    assert set(FINISH_REASONS) == set(pb.FinishReason.values()) - {pb.FINISH_REASON_UNSPECIFIED}
    assert set(FINISH_REASONS.values()) == {"stop", "length", "abort"}


@pytest.mark.parametrize(("end", "matched"), [
    (finish(pb.FINISH_REASON_EOS, matched_stop_token_id=6, matched_stop="<eos>"), None),
    (finish(pb.FINISH_REASON_STOP_TOKEN, matched_stop_token_id=0, matched_stop="!"), 0),
    (finish(pb.FINISH_REASON_STOP_STRING, matched_stop="xyz"), "xyz"),
    (finish(pb.FINISH_REASON_LENGTH), None),
], ids=["eos", "stop token", "stop string", "length"])
def test_translate_reports_what_stopped_the_answer(end: pb.Finish, matched: object) -> None:
    """An end-of-text token is none of the client's stops."""
    (answer,) = translated(request(), True, part(4, 5, 6, finish=end)).values()
    assert answer.complete
    kind = answer.complete.WhichOneof("matched_stop")
    assert (getattr(answer.complete, kind) if kind else None) == matched


def test_translate_counts_drafts() -> None:
    end = finish(pb.FINISH_REASON_LENGTH)
    end.usage.drafted_tokens = 7
    end.usage.accepted_draft_tokens = 4
    (answer,) = translated(request(), True, part(4, 5, 6, finish=end)).values()
    assert answer.complete
    assert (answer.complete.spec_draft_tokens, answer.complete.spec_accepted_tokens) == (7, 4)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("top", [0, 2])
def test_translate_logprobs_belong_to_the_tokens(stream: bool, top: int) -> None:
    parts = [part(token, logprobs=[position(token, *range(top))]) for token in (4, 5)]
    parts.append(part(6, logprobs=[position(6, *range(top))], finish=finish(pb.FINISH_REASON_LENGTH)))
    (answer,) = translated(request(top), stream, *parts).values()
    assert answer.complete
    found = [chunk.output_logprobs for chunk in answer.chunks] or [answer.complete.output_logprobs]
    assert [token for one in found for token in one.token_ids] == answer.token_ids == [4, 5, 6]
    assert [value for one in found for value in one.token_logprobs] == [-1.0, -1.25, -1.5]
    tops = [(list(each.token_ids), list(each.values)) for one in found for each in one.top_logprobs]
    assert tops == ([([0, 1], [0.0, -0.125])] * 3 if top else [])
    assert answer.complete.HasField("output_logprobs") == (not stream)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("top", [0, 1])
def test_translate_prompt_logprobs_are_in_the_first_chunk_or_the_complete(stream: bool, top: int) -> None:
    """The prompt's first token has no probability. They may arrive in several parts, before the first token."""
    parts = [
        part(prompt_logprobs=[pb.PositionLogprobs(chosen=pb.TokenLogprob(token_id=1)), position(2, *range(top))]),
        part(4, prompt_logprobs=[position(3, *range(top))]), part(5, finish=finish(pb.FINISH_REASON_LENGTH, 2))]
    (answer,) = translated(request(None, top), stream, *parts).values()
    assert answer.complete
    found = answer.chunks[0].input_logprobs if stream else answer.complete.input_logprobs
    assert list(found.token_ids) == [1, 2, 3]
    values = [one.value if one.HasField("value") else None for one in found.token_logprobs]
    assert values == [None, -0.5, -0.75]
    assert [list(each.token_ids) for each in found.top_logprobs] == ([[], [0], [0]] if top else [])
    assert not any(chunk.HasField("input_logprobs") for chunk in answer.chunks[1:])
    assert answer.complete.HasField("input_logprobs") == (not stream)


def test_translate_prompt_logprobs_of_an_answer_without_tokens_are_in_the_complete() -> None:
    first = pb.PositionLogprobs(chosen=pb.TokenLogprob(token_id=1))
    parts = [part(prompt_logprobs=[first]), part(finish=finish(pb.FINISH_REASON_ABORTED, 0))]
    (answer,) = translated(request(None, 0), True, *parts).values()
    assert answer.complete
    assert list(answer.complete.input_logprobs.token_ids) == [1]
