"""Size limits of request messages, derived from the model, and a check of their structure before they are parsed.

protobuf allocates some 130 bytes for each submessage, which takes as little as two bytes on the wire. So a large
message is scanned first: its fields and items are counted in the wire format, without allocating objects.
"""

from __future__ import annotations

from functools import cache

from google.protobuf.descriptor import Descriptor

from npuserve.service.config import MAX_MESSAGE_BYTES
from npuserve.service.errors import InvalidField, MalformedRequest, MessageTooLarge

MAX_TOKEN_BYTES = 256
"""Assumed bytes of text of the longest token, until the tokenizer is loaded."""
MAX_VOCABULARY_SIZE = 1 << 18
"""Assumed size of the vocabulary, until the model is known."""
MAX_STRUCTURE_BYTES = 1 << 20
"""Allowance for everything but the prompt and the lists of token ids. 10,000 messages of a chat take some 320 KiB, a
constraint of any kind 64 KiB, stop strings 64 KiB and `logit_bias` 16 KiB. The rest is for template arguments."""
MAX_ID_BYTES = 6
"""Bytes of a token id on the wire: a 32-bit number, with its tag if the list is not packed."""
SMALL_BYTES = 16 << 10
"""Messages up to this size are parsed without a scan, in about a millisecond for any content."""
MAX_ELEMENTS = 100_000
"""Fields and items of one message, at all depths. A packed list of token ids counts as one."""
MAX_CHAT_MESSAGES = 10_000
MAX_TOOLS = 1024
MAX_DOCUMENTS = 1024
MAX_DEPTH = 100
"""Nesting depth that protobuf parses; deeper messages are malformed."""
_MAX_ITEMS = {
    "npuserve.v1.Chat.messages": MAX_CHAT_MESSAGES, "npuserve.v1.Chat.tools": MAX_TOOLS,
    "npuserve.v1.RankRequest.documents": MAX_DOCUMENTS,
}


def max_message_bytes(
    context: int, token_bytes: int = MAX_TOKEN_BYTES, vocabulary_size: int = MAX_VOCABULARY_SIZE
) -> int:
    """Return the size limit of a request message: the largest request that a model can serve, in bytes.

    context: max_model_len, in tokens.
    token_bytes: bytes of text of the longest token.
    vocabulary_size: number of token ids; `allowed_token_ids` may list all of them.
    """
    id_bytes = -(-max(1, (vocabulary_size - 1).bit_length()) // 7)
    prompt = context * max(token_bytes, id_bytes)
    return min(MAX_MESSAGE_BYTES, prompt + vocabulary_size * id_bytes + MAX_STRUCTURE_BYTES)


def limit_of(kind: Descriptor, context: int, token_bytes: int, vocabulary_size: int) -> int:
    """Return the size limit of a message type, in bytes. See `max_message_bytes` for the other arguments."""
    match kind.full_name:
        case ("npuserve.v1.GenerateRequest" | "npuserve.v1.TokenizeRequest" | "npuserve.v1.EmbedRequest"
              | "npuserve.v1.RankRequest"):
            return max_message_bytes(context, token_bytes, vocabulary_size)
        # Their TokenizedInput has the prompt's ids and the prompt's text.
        case "vllm.grpc.engine.GenerateRequest" | "vllm.grpc.engine.EmbedRequest":
            return max_message_bytes(context, token_bytes + MAX_ID_BYTES, vocabulary_size)
        case "npuserve.v1.DetokenizeRequest":
            return min(MAX_MESSAGE_BYTES, context * MAX_ID_BYTES + SMALL_BYTES)
    return SMALL_BYTES


def check_size(size: int, limit: int) -> None:
    """Raise MessageTooLarge for a message of more than `limit` bytes."""
    if size > limit:
        raise MessageTooLarge(f"the request's message has {size} bytes; max_message_size is {limit} bytes")


def check_structure(kind: Descriptor, data: bytes) -> None:
    """Count the fields and items of a serialized message of this type, in time linear in their number.

    Raises MessageTooLarge for more than MAX_ELEMENTS, InvalidField for a repeated field above its own limit, and
    MalformedRequest for a group, which proto3 does not have. The parser finds all other faults.
    """
    _Scan(data).message(kind, 0, len(data), "", 0)


@cache
def _fields(kind: Descriptor) -> dict[int, tuple[str, Descriptor | None, int]]:
    """Return, by field number: name, message type (None for other fields), and limit of items (0 for no own limit)."""
    return {field.number: (field.name, field.message_type, _MAX_ITEMS.get(field.full_name, 0)) for field in kind.fields}


class _Scan:
    """Scan of one serialized message, which counts its fields and items."""

    def __init__(self, data: bytes):
        self._data = data
        self._left = MAX_ELEMENTS

    def message(self, kind: Descriptor, position: int, end: int, path: str, depth: int) -> None:
        """Count the message in data[position:end]. Stop early if it is malformed."""
        fields = _fields(kind)
        counts: dict[int, int] = {}
        while position < end:
            self._left -= 1
            if self._left < 0:
                raise MessageTooLarge(f"the request has more than {MAX_ELEMENTS} fields and items, a fixed limit")
            tag, position = self._varint(position, end)
            wire = tag & 7
            if wire == 0:
                _, position = self._varint(position, end)
            elif wire == 2:
                size, position = self._varint(position, end)
                if position + size > end:
                    return
                name, inner, max_items = fields.get(tag >> 3, ("", None, 0))
                if max_items:
                    counts[tag] = count = counts.get(tag, 0) + 1
                    if count > max_items:
                        raise InvalidField(f"{path}{name}", f"must be at most {max_items}, got more")
                if inner is not None and depth < MAX_DEPTH:
                    self.message(inner, position, position + size, f"{path}{name}.", depth + 1)
                position += size
            elif wire in (1, 5):
                position += 8 if wire == 1 else 4
            else:
                raise MalformedRequest("the request has a protobuf group: malformed protobuf")

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        """Return the number at `position` and the position after it.

        `end` for a number that is truncated or too long.
        """
        data = self._data
        value = 0
        for shift in range(0, 70, 7):
            if position >= end:
                break
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, position
        return 0, end
