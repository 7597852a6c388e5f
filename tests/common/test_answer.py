"""Whole answers, joined from the messages of a stream."""

from __future__ import annotations

import pytest

from npuserve.common.answer import Answer
from npuserve.v1 import generate_pb2 as pb


def message(index: int, arguments: str) -> pb.StreamGenerateResponse:
    return pb.StreamGenerateResponse(tool_calls=[pb.ToolCallDelta(index=index, id=f"c{index}", arguments=arguments)])


def test_add_parts_of_tool_calls_are_joined() -> None:
    answer = Answer(1)
    for index, arguments in [(0, '{"a"'), (0, ": 1}"), (1, "{}")]:
        answer.add(message(index, arguments))
    assert [(call.id, call.arguments) for call in answer.response().tool_calls] == [("c0", '{"a": 1}'), ("c1", "{}")]


@pytest.mark.parametrize("samples", [1, 2])
def test_add_ids_logprobs_and_finish_belong_to_the_answer(samples: int) -> None:
    answer, position = Answer(samples), pb.PositionLogprobs(chosen=pb.TokenLogprob(token_id=7))
    end = pb.Finish(reason=pb.FINISH_REASON_LENGTH)
    answer.add(pb.StreamGenerateResponse(token_ids=[1], logprobs=[position], prompt_logprobs=[position]))
    answer.add(pb.StreamGenerateResponse(token_ids=[2], logprobs=[position], finish=end))
    response = answer.response()
    whole = response if samples == 1 else response.samples[0]
    assert list(whole.token_ids) == [1, 2]
    assert list(whole.logprobs) == [position] * 2
    assert list(response.prompt_logprobs) == [position]
    assert whole.finish == end


def test_add_gap_in_tool_calls_raises_value_error() -> None:
    answer = Answer(1)
    answer.add(message(0, "{}"))
    with pytest.raises(ValueError, match="a message of tool call 2 where 1 was next"):
        answer.add(message(2, "{}"))


def test_add_all_parts_of_each_sample_are_joined() -> None:
    answer = Answer(2)
    for index in (1, 0):
        answer.add(pb.StreamGenerateResponse(index=index, reasoning="a"))
        answer.add(pb.StreamGenerateResponse(index=index, reasoning="b", tool_calls=[
            pb.ToolCallDelta(index=0, id="0", name="f", arguments="{"), pb.ToolCallDelta(index=1, id="1", name="g")]))
        answer.add(pb.StreamGenerateResponse(
            index=index, text="c", tool_calls=[pb.ToolCallDelta(index=1, arguments=f"[{index}]")]))
    samples = answer.response().samples
    assert [sample.index for sample in samples] == [0, 1]
    for sample in samples:
        assert (sample.text, sample.reasoning) == ("c", "ab")
        assert list(sample.tool_calls) == [
            pb.ToolCall(id="0", name="f", arguments="{"), pb.ToolCall(id="1", name="g", arguments=f"[{sample.index}]")]
