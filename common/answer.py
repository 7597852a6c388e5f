"""Whole answers, joined from the messages of a stream: by the clients, and by the server for Generate."""

from __future__ import annotations

from typing import Any

from npuserve.v1 import generate_pb2 as pb


def value_name(enum: Any, value: int, prefix: str = "") -> str:
    """Return the name of an enum's value without the prefix; the number of a value that only newer servers have.

    enum: enum of the generated code, such as pb.FinishReason.
    """
    name: str = enum.Name(value) if value in enum.values() else str(value)
    return name.removeprefix(prefix)


def sample_count(request: pb.GenerateRequest | None) -> int:
    """Return the number of samples that a request asks for. None: 1, for a stream that is resumed."""
    return request.n if request is not None and request.n else 1


class Answer:
    """Answer that is received message by message.

    samples: number of samples of the request.
    """

    def __init__(self, samples: int):
        self._response = pb.GenerateResponse()
        self._answers: dict[int, pb.GenerateResponse | pb.Sample] = {0: self._response} if samples == 1 else {}
        self._texts: dict[int, list[str]] = {}
        self._reasoning: dict[int, list[str]] = {}
        self._arguments: dict[int, list[list[str]]] = {}  # by sample and call

    def add(self, delta: pb.StreamGenerateResponse) -> None:
        """Add a message of the stream. Raise ValueError if it skips a tool call."""
        answer = self._answers.setdefault(delta.index, pb.Sample(index=delta.index))
        self._texts.setdefault(delta.index, []).append(delta.text)
        self._reasoning.setdefault(delta.index, []).append(delta.reasoning)
        arguments = self._arguments.setdefault(delta.index, [])
        for call in delta.tool_calls:
            if call.index > len(arguments):
                raise ValueError(f"a message of tool call {call.index} where {len(arguments)} was next")
            if call.index == len(arguments):
                answer.tool_calls.add(id=call.id, name=call.name)
                arguments.append([])
            arguments[call.index].append(call.arguments)
        answer.token_ids.extend(delta.token_ids)
        answer.logprobs.extend(delta.logprobs)
        self._response.prompt_logprobs.extend(delta.prompt_logprobs)
        if delta.HasField("finish"):
            answer.finish.CopyFrom(delta.finish)

    def response(self) -> pb.GenerateResponse:
        """Return the answer: the fields of the response for one sample, otherwise its `samples`, in order of index."""
        for index in sorted(self._texts):
            answer = self._answers[index]
            answer.text = "".join(self._texts[index])
            answer.reasoning = "".join(self._reasoning[index])
            for call, arguments in zip(answer.tool_calls, self._arguments[index], strict=True):
                call.arguments = "".join(arguments)
            if isinstance(answer, pb.Sample):
                self._response.samples.append(answer)
        return self._response
