"""Requests to VllmEngine, and readers of its answers."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
import grpc.aio
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from npuserve.v1 import generate_pb2 as pb
from tests.support.fields import set_field

REQUEST_FIELDS = vllm.GenerateRequest.DESCRIPTOR.fields_by_name


def engine_stub(channel: grpc.Channel | grpc.aio.Channel) -> vllm_engine_pb2_grpc.VllmEngineStub:
    return vllm_engine_pb2_grpc.VllmEngineStub(channel)


def vllm_request(
    prompt: str | list[int] = "a", max_tokens: int | None = 5, **fields: object
) -> vllm.GenerateRequest:
    """Return a request. fields: fields of the request or of its sampling_params, by name."""
    made = vllm.GenerateRequest()
    if isinstance(prompt, str):
        made.text = prompt
    else:
        made.tokenized.input_ids.extend(prompt)
        made.tokenized.SetInParent()
    if max_tokens is not None:
        made.sampling_params.max_tokens = max_tokens
    for name, value in fields.items():
        part = made if name in REQUEST_FIELDS else made.sampling_params
        set_field(part, name, value)
    return made


def like_smg(ids: list[int], **fields: object) -> vllm.GenerateRequest:
    """Return a stream's request with the fields that smg always sets."""
    fields = {"stream": True, "top_p": 1.0, "repetition_penalty": 1.0, "n": 1, "skip_special_tokens": True,
              "spaces_between_special_tokens": True, **fields}
    return vllm_request(ids, **fields)  # type: ignore[arg-type]


class Answer:
    """Messages of one sample, joined.

    token_ids: tokens of the chunks; of the Complete without chunks.
    chunks: in order.
    complete: the last message.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.chunks: list[vllm.GenerateStreamChunk] = []
        self.complete: vllm.GenerateComplete | None = None

    @property
    def reason(self) -> str:
        assert self.complete
        return str(self.complete.finish_reason)


def join(messages: Iterable[vllm.GenerateResponse]) -> dict[int, Answer]:
    """Return the answers by index, and check their contract: one Complete each, and nothing after it."""
    found: dict[int, Answer] = {}
    for message in messages:
        kind = message.WhichOneof("response")
        part = getattr(message, kind)
        answer = found.setdefault(part.index, Answer())
        assert answer.complete is None, "a message after the Complete"
        if kind == "chunk":
            assert part.completion_tokens == len(part.token_ids) > 0
            answer.chunks.append(part)
            answer.token_ids += part.token_ids
        else:
            answer.complete = part
            assert not (answer.chunks and part.output_ids), "a stream's Complete has tokens"
            answer.token_ids += part.output_ids
            assert part.completion_tokens == len(answer.token_ids)
    assert all(answer.complete for answer in found.values()), "an answer without a Complete"
    return found


async def read_all(call: grpc.aio.UnaryStreamCall) -> list[vllm.GenerateResponse]:
    """Return the messages of a call that were not read yet. grpc.aio forbids iteration after a read."""
    found = []
    while message := await call.read():
        found.append(message)
    return found


def counterpart(message: pb.GenerateRequest) -> vllm.GenerateRequest | None:
    """Return VllmEngine's request of the same meaning; None if it cannot express it.

    Its plain scalars cannot be 0 where that means the default, and it lacks fields.
    """
    made = vllm.GenerateRequest()
    params = made.sampling_params
    for field, value in message.ListFields():
        match field.name:
            case "request_id" if value:
                made.request_id = value
            case "text":
                made.text = value
            case "token_ids":
                made.tokenized.input_ids.extend(value.ids)
                made.tokenized.SetInParent()
            case "choices":
                params.choice.choices.extend(value.choices)
                params.choice.SetInParent()
            case "json_schema" | "regex" | "grammar" | "json_object" | "structural_tag":
                setattr(params, field.name, value)
            case "n" if value:
                params.n = value
            case "sampling" | "stopping" | "output":
                if not _copy(value, params):
                    return None
            case _:
                return None
    return made


DEFAULT_IF_ZERO = ("top_p", "top_k", "min_p", "repetition_penalty")


def _copy(part: pb.SamplingParams | pb.StoppingParams | pb.OutputParams, params: vllm.SamplingParams) -> bool:
    """Copy the fields of a part to `params`. Return False if one cannot be expressed."""
    names = {"include_stop": "include_stop_str_in_output"}
    for field, value in part.ListFields():
        name = names.get(field.name, field.name)
        if field.name == "return_token_ids":
            continue
        if name not in params.DESCRIPTOR.fields_by_name or (name in DEFAULT_IF_ZERO and not value):
            return False
        if name in ("top_k", "n") and value < 0:
            return False
        if field.name == "logit_bias":
            params.logit_bias.update(value)
        elif field.is_repeated:
            getattr(params, name).extend(value)
        elif name == "seed":
            params.seed = value if value < 1 << 31 else value - (1 << 64)
        else:
            setattr(params, name, value)
    return True
