"""Whole answers, joined from the messages of a stream."""

from __future__ import annotations

from npuserve.v1 import generate_pb2 as pb


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

    def add(self, delta: pb.StreamGenerateResponse) -> None:
        """Add a message, which `Attempts.accept` has checked."""
        answer = self._answers.setdefault(delta.index, pb.Sample(index=delta.index))
        self._texts.setdefault(delta.index, []).append(delta.text)
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
            if isinstance(answer, pb.Sample):
                self._response.samples.append(answer)
        return self._response
