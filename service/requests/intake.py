"""Intake of request messages: read from the connection, checked for size and structure, and parsed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from npuserve.service import metrics
from npuserve.service.access.caller import get_caller
from npuserve.service.errors import CompressedMessage, MessageTooLarge, ServeError
from npuserve.service.requests import message_limits
from npuserve.service.requests import parser as request_parser
from npuserve.service.requests.preparation import Preparation
from npuserve.service.requests.reader import RequestReader
from npuserve.service.rpc.call import Context
from npuserve.service.rpc.refusal_throttle import add_work

READ_SECONDS_PER_BYTE = 2e-9
"""CPU time of the event loop's thread for the bytes of a message."""


class Intake:
    """Reader and parser of the messages of one or more services of a front end.

    reader: reader of these services only, so that they do not wait for the messages of other ones.
    preparation: thread pool of the front end, for the parsing of large messages.
    limit: returns the current size limit of a message type, in bytes. The channel has its own limit.
    """

    def __init__(self, reader: RequestReader, preparation: Preparation, limit: Callable[[Descriptor], int]):
        self._reader = reader
        self._preparation = preparation
        self._limit = limit

    async def message(self, deserializer: Any, context: Context) -> Message | None:
        """Return the call's next message, None if the client half-closed the call. Await it in the call's own task.

        Raises CompressedMessage, MessageTooLarge, QueueFull, InvalidField, MalformedRequest.
        """
        who = get_caller(context)
        data = await self._reader.read(context, who.name if who.is_authenticated else context.peer(), who.name)
        if data is None:
            return None
        size = len(data)
        add_work(size * READ_SECONDS_PER_BYTE)
        try:
            if _is_compressed(data):
                raise CompressedMessage("the request's message is compressed; send it without grpc-encoding")
            if size <= message_limits.SMALL_BYTES:  # no model's limit is less; the channel enforces max_message_size
                return request_parser.parse(deserializer, data)
            message_limits.check_size(size, self._limit(deserializer.__self__.DESCRIPTOR))
            return await self._preparation.run(who.name, "parse", size, _parse, deserializer, data)
        except ServeError as error:
            if isinstance(error, MessageTooLarge):
                metrics.preparation_rejections_total.labels("read", "too_large").inc()
            refusal = error.with_traceback(None)
        finally:
            self._reader.release(who.name, size)
        del data  # otherwise the error's traceback keeps the message in memory until the status is sent
        try:
            raise refusal
        finally:
            del refusal


def _is_compressed(data: bytes) -> bool:
    """Return whether a message is compressed with gzip or zlib.

    No protobuf field begins with the first byte of gzip. The first byte of zlib is the tag of the number with field
    number 15, GenerateRequest.n. Only a message without other fields begins with it.
    """
    if data[:2] == b"\x1f\x8b":
        return True
    return len(data) > 4 and data[0] == 0x78 and data[1] > 1 and (data[0] << 8 | data[1]) % 31 == 0


def _parse(deserializer: Any, data: bytes) -> Message:
    message_limits.check_structure(deserializer.__self__.DESCRIPTOR, data)
    return request_parser.parse(deserializer, data)
