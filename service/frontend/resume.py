"""What a front end needs of a request beside the engine's part, carried by it so that any front end can answer it."""

from __future__ import annotations

import msgspec

from npuserve.service.ipc.messages import Request
from npuserve.service.requests.validation import Ask


class _Own(msgspec.Struct, array_like=True):
    """Of an Ask."""

    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    return_token_ids: bool


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Own).decode


def pack(ask: Ask) -> bytes:
    """For Request.ask."""
    return _encode(_Own(ask.stop, ask.include_stop, ask.skip_special_tokens, ask.return_token_ids))


def unpack(request: Request) -> Ask:
    """The Ask that `pack` was given, with this request."""
    own = _decode(request.ask)
    return Ask(request, own.stop, own.include_stop, own.skip_special_tokens, own.return_token_ids)
