"""Whole answers, joined from the messages of a stream."""

from __future__ import annotations

import pytest

from npuserve.client import ServerError
from npuserve.client.answer import Answer
from npuserve.v1 import generate_pb2 as pb


def message(index: int, arguments: str) -> pb.StreamGenerateResponse:
    return pb.StreamGenerateResponse(tool_calls=[pb.ToolCallDelta(index=index, id=f"c{index}", arguments=arguments)])


def test_add_parts_of_tool_calls_are_joined() -> None:
    answer = Answer(1)
    for index, arguments in [(0, '{"a"'), (0, ": 1}"), (1, "{}")]:
        answer.add(message(index, arguments))
    assert [(call.id, call.arguments) for call in answer.response().tool_calls] == [("c0", '{"a": 1}'), ("c1", "{}")]


def test_add_gap_in_tool_calls_raises_server_error() -> None:
    answer = Answer(1)
    answer.add(message(0, "{}"))
    with pytest.raises(ServerError, match="a message of tool call 2 where 1 was next"):
        answer.add(message(2, "{}"))
