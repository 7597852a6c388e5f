"""Options of a response that the engine stores with the request, so that any front end can resume its stream."""

from __future__ import annotations

import msgspec

from npuserve.service.ipc.messages import Request
from npuserve.service.parsing.parameter_types import FunctionTypes
from npuserve.service.requests.validation import CheckedRequest
from npuserve.service.text.answer_format import AnswerFormat


class _Options(msgspec.Struct, array_like=True):
    """Fields of a CheckedRequest that the engine does not use."""

    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    return_token_ids: bool
    answer_format: AnswerFormat
    call_id: str
    call_types: dict[str, FunctionTypes]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Options).decode


def pack(checked: CheckedRequest) -> bytes:
    """Encode the options of a request, for Request.options."""
    return _encode(_Options(
        checked.stop, checked.include_stop, checked.skip_special_tokens, checked.return_token_ids,
        checked.answer_format, checked.call_id, checked.call_types))


def unpack(request: Request) -> CheckedRequest:
    """Return the CheckedRequest of a request whose options `pack` has encoded."""
    options = _decode(request.options)
    return CheckedRequest(
        request, options.stop, options.include_stop, options.skip_special_tokens, options.return_token_ids,
        answer_format=options.answer_format, call_id=options.call_id,
        call_types=options.call_types)
