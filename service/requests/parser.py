"""Parsing of request messages: a malformed one ends its call with INVALID_ARGUMENT and names the field.

grpc.aio answers a failed deserializer with UNKNOWN and logs a traceback. Here every handler reads bytes and parses them
itself (intake.py), so that a malformed message is an error like any other: counted, logged in one line, with details.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from npuserve.service.access.caller import get_caller
from npuserve.service.errors import InvalidField, MalformedRequest, ServeError
from npuserve.service.requests.message_limits import MAX_DEPTH
from npuserve.service.rpc.call import Context, call

_LENGTH_DELIMITED = 2


Read = Callable[[Callable[[bytes], Message], Context], Awaitable["Message | None"]]
"""Takes the deserializer and the call; returns its next message, None at the end of the client's messages."""


class ParsingServer:
    """The part of grpc.aio.Server that generated code calls to add a servicer; wraps each handler in a parser.

    read: how messages are read, `Intake.message`.
    begun: called with the context of each call.
    """

    def __init__(self, server: grpc.aio.Server, read: Read, begun: Callable[[Context], None] = lambda context: None):
        self._server = server
        self._read = read
        self._begun = begun

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        """Do nothing: generated code adds the same methods by `add_registered_method_handlers`."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        parsing = {name: _parsing(name, handler, self._read, self._begun) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, parsing),))
        self._server.add_registered_method_handlers(service, parsing)  # type: ignore[attr-defined]


def parse(deserializer: Callable[[bytes], Message], data: bytes) -> Message:
    """Return the message. Raise InvalidField for a text that is not UTF-8, MalformedRequest for any other fault."""
    try:
        return deserializer(data)
    except DecodeError:
        kind: Descriptor = deserializer.__self__.DESCRIPTOR  # type: ignore[attr-defined]
        field = _invalid_text(kind, data, 0)
    if field:
        raise InvalidField(field, "must be valid UTF-8")
    raise MalformedRequest(f"the request is not a valid {kind.full_name}: malformed protobuf")


def _invalid_text(kind: Descriptor, data: bytes, depth: int) -> str:
    """Return the path of the first text in a serialized message that is not UTF-8; "" if there is none.

    A path ends at a message of google.protobuf, such as a Struct, whose keys are the client's.
    """
    try:
        fields: Any = UnknownFieldSet(Empty.FromString(data))  # to Empty every field is unknown
    except DecodeError:
        return ""
    seen: dict[int, int] = {}
    for part in fields:
        field = kind.fields_by_number.get(part.field_number)
        if field is None or part.wire_type != _LENGTH_DELIMITED:
            continue
        index = seen[part.field_number] = seen.get(part.field_number, -1) + 1
        path = f"{field.name}[{index}]" if field.is_repeated else field.name
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(part.data):
            return path
        if field.message_type is not None and depth < MAX_DEPTH:
            rest = _invalid_text(field.message_type, part.data, depth + 1)
            if rest:
                return path if field.message_type.file.package == "google.protobuf" else f"{path}.{rest}"
    return ""


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _parsing(rpc: str, handler: Any, read: Read, begun: Callable[[Context], None]) -> Any:
    """Return the handler for unparsed requests. It reads and parses them before the method is called.

    To gRPC every request is a stream, so that a message is read when the handler asks for it, and not before.
    """
    deserializer = handler.request_deserializer
    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(
            _streaming(rpc, handler.stream_stream, deserializer, read, begun), None, handler.response_serializer)
    method = handler.unary_stream if handler.response_streaming else handler.unary_unary

    async def parsed(messages: object, context: Context) -> Any:
        begun(context)
        try:
            request = await read(deserializer, context)
            if request is None:
                raise MalformedRequest("the call has no message")
        except ServeError as error:
            return await _refuse(rpc, context, error)
        try:
            return await method(request, context)
        except grpc.aio.AbortError as error:
            # The error's traceback is in a cycle: without this it holds the message until it is garbage-collected.
            request = None
            for one in (error, error.__context__):
                traceback.clear_frames(one.__traceback__ if one else None)
            raise

    kind = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    return kind(parsed, None, handler.response_serializer)


def _streaming(
    rpc: str, method: Any, deserializer: Callable[[bytes], Message], read: Read, begun: Callable[[Context], None]
) -> Any:
    async def parsed(messages: object, context: Context) -> AsyncIterator[Any]:
        begun(context)

        async def requests() -> AsyncIterator[Message]:
            while (one := await read(deserializer, context)) is not None:
                yield one

        try:
            async for reply in method(requests(), context):
                yield reply
        except ServeError as error:
            await _refuse(rpc, context, error)

    return parsed


async def _refuse(rpc: str, context: Context, error: ServeError) -> None:
    async with call(context, rpc, logging.INFO) as fields:
        fields["client"] = get_caller(context).name
        raise error
