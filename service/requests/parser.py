"""Parser of request messages. A malformed message ends its call with INVALID_ARGUMENT, naming the field.

grpc.aio answers a failed deserializer with UNKNOWN and logs a traceback. Here every handler receives bytes and parses
them itself (intake.py). So a malformed message is handled like other errors: counted, logged in one line, with details.
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
from npuserve.service.rpc.call import (
    Context,
    DelayedRefusal,
    call,
    record_arrival,
    refuse_after_delay,
    rpc_name,
)

_LENGTH_DELIMITED = 2


Read = Callable[[Callable[[bytes], Message], Context], Awaitable["Message | None"]]
"""Returns the next message of a call, given its deserializer and context; None after the last message."""


class ParsingServer:
    """Stand-in for grpc.aio.Server in generated code, which adds servicers to it; wraps each handler in a parser.

    read: reads and parses a message, such as `Intake.message`.
    on_call: called with the context at the start of each call.
    """

    def __init__(self, server: grpc.aio.Server, read: Read, on_call: Callable[[Context], None] = lambda context: None):
        self._server = server
        self._read = read
        self._on_call = on_call

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        """Do nothing: generated code also passes these methods to `add_registered_method_handlers`."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Add the methods of a service, each with parsing."""
        parsing = {name: _parsing(rpc_name(service, name), handler, self._read, self._on_call)
                   for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, parsing),))
        self._server.add_registered_method_handlers(service, parsing)  # type: ignore[attr-defined]


def parse(deserializer: Callable[[bytes], Message], data: bytes) -> Message:
    """Return the message. Raise InvalidField for a text that is not UTF-8, MalformedRequest for other faults."""
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

    A path ends at a message of google.protobuf, such as a Struct: the keys in it are the client's text.
    """
    try:
        fields: Any = UnknownFieldSet(Empty.FromString(data))  # every field is unknown to Empty
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


def _parsing(rpc: str, handler: Any, read: Read, on_call: Callable[[Context], None]) -> Any:
    """Return a handler of unparsed requests, which reads and parses the request before it calls the method.

    Every method is registered with a request stream, so that gRPC reads a message only when the handler requests it.
    """
    deserializer = handler.request_deserializer
    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(
            _streaming(rpc, handler.stream_stream, deserializer, read, on_call), None, handler.response_serializer)
    method = handler.unary_stream if handler.response_streaming else handler.unary_unary

    async def parsed(messages: object, context: Context) -> Any:
        record_arrival()
        on_call(context)
        try:
            try:
                request = await read(deserializer, context)
                if request is None:
                    raise MalformedRequest("the call has no message")
            except (ServeError, MemoryError) as error:
                return await _refuse(rpc, context, error)
            return await method(request, context)
        except DelayedRefusal as error:
            refusal = error
        except grpc.aio.AbortError as error:
            # The traceback is in a reference cycle, which keeps the message in memory until a garbage collection.
            request = None
            for chained in (error, error.__context__):
                traceback.clear_frames(chained.__traceback__ if chained else None)
            raise
        request = None  # not kept in memory during the delay
        await refuse_after_delay(context, refusal)

    kind = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    return kind(parsed, None, handler.response_serializer)


def _streaming(
    rpc: str, method: Any, deserializer: Callable[[bytes], Message], read: Read, on_call: Callable[[Context], None]
) -> Any:
    async def parsed(messages: object, context: Context) -> AsyncIterator[Any]:
        record_arrival()
        on_call(context)

        async def requests() -> AsyncIterator[Message]:
            while (request := await read(deserializer, context)) is not None:
                yield request

        try:
            async for reply in method(requests(), context):
                yield reply
        except (ServeError, MemoryError) as error:
            await _refuse(rpc, context, error)

    return parsed


async def _refuse(rpc: str, context: Context, error: ServeError | MemoryError) -> None:
    async with call(context, rpc, logging.INFO) as fields:
        fields["client"] = get_caller(context).name
        raise error
