"""Size limits derived from a model, and the check of a message's structure before it is parsed."""

from __future__ import annotations

import pytest
from google.protobuf import struct_pb2
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from npuserve.service.config import MAX_CONSTRAINT_BYTES
from npuserve.service.errors import InvalidField, MalformedRequest, MessageTooLarge
from npuserve.service.requests import message_limits
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import pooling_pb2, prompt_pb2, tokenize_pb2

GENERATE = pb.GenerateRequest.DESCRIPTOR


def largest_request(context: int, token: str, vocabulary: int) -> pb.GenerateRequest:
    """Return a request with the largest allowed value in every field."""
    made = pb.GenerateRequest(text=token * context, request_id="i" * 128)
    made.sampling.allowed_token_ids.extend(range(vocabulary))
    made.sampling.logit_bias.update({vocabulary - 1 - i: -100.0 for i in range(1024)})
    made.stopping.stop.extend(["\U0001f600" * 1024] * 16)
    made.stopping.stop_token_ids.extend([vocabulary - 1] * 128)
    made.scheduling.cache_salt = "\U0001f600" * 128
    made.structural_tag = "t" * MAX_CONSTRAINT_BYTES
    return made


@pytest.mark.parametrize(
    ("context", "token", "vocabulary"), [(64, "a", 1024), (8192, "a" * 13, 2048), (512, "\u20ac", 151_936)])
def test_max_message_bytes_allows_the_largest_request(context: int, token: str, vocabulary: int) -> None:
    limit = message_limits.max_message_bytes(context, len(token.encode()), vocabulary)
    message = largest_request(context, token, vocabulary)
    assert message.ByteSize() <= limit
    message.ClearField("text")
    message.token_ids.ids.extend([vocabulary - 1] * context)
    assert message.ByteSize() <= limit
    message.chat.messages.extend([prompt_pb2.Message(role="assistant", content="")] * message_limits.MAX_CHAT_MESSAGES)
    message.chat.messages[0].content = token * context
    assert message.ByteSize() <= limit
    message_limits.check_structure(GENERATE, message.SerializeToString())
    assert limit <= message_limits.max_message_bytes(context)


@pytest.mark.parametrize(("context", "vocabulary"), [(64, 1024), (262_144, 151_936)])
def test_limit_of_vllm_engine_allows_ids_beside_text(context: int, vocabulary: int) -> None:
    made = vllm.GenerateRequest(request_id="i" * 512)
    made.tokenized.original_text = "a" * 13 * context
    made.tokenized.input_ids.extend([vocabulary - 1] * context)
    params = made.sampling_params
    params.logit_bias.update({vocabulary - 1 - i: -100.0 for i in range(1024)})
    params.stop.extend(["\U0001f600" * 1024] * 16)
    params.stop_token_ids.extend([vocabulary - 1] * 128)
    params.structural_tag = "t" * MAX_CONSTRAINT_BYTES
    data = made.SerializeToString()
    assert len(data) <= message_limits.limit_of(vllm.GenerateRequest.DESCRIPTOR, context, 13, vocabulary)
    message_limits.check_structure(vllm.GenerateRequest.DESCRIPTOR, data)


def test_documents_of_a_call_are_bounded() -> None:
    kind = pooling_pb2.RankRequest
    message_limits.check_structure(kind.DESCRIPTOR, kind(documents=["a"] * 1024).SerializeToString())
    with pytest.raises(InvalidField, match="documents: must be at most 1024"):
        message_limits.check_structure(kind.DESCRIPTOR, kind(documents=["a"] * 1025).SerializeToString())


@pytest.mark.parametrize("kind", [vllm.AbortRequest, vllm.GetLoadsRequest])
def test_limit_of_other_messages_of_vllm_engine_is_small(kind: type[vllm.AbortRequest]) -> None:
    assert message_limits.limit_of(kind.DESCRIPTOR, 8192, 13, 151_936) == message_limits.SMALL_BYTES


def test_max_message_bytes_is_at_most_the_fixed_limit() -> None:
    assert message_limits.max_message_bytes(1 << 24) == 64 << 20


@pytest.mark.parametrize(("message", "elements"), [
    (pb.SamplingParams(temperature=0.5, top_k=3, top_p=0.25, seed=7), 4),
    (struct_pb2.Value(number_value=0.5), 1),
    (struct_pb2.Struct(fields={"a": struct_pb2.Value(number_value=0.5)}), 4),
])
def test_check_structure_counts_the_fields_after_numbers_of_each_width(
    message: Message, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = message.SerializeToString()
    monkeypatch.setattr(message_limits, "MAX_ELEMENTS", elements)
    message_limits.check_structure(message.DESCRIPTOR, data)
    monkeypatch.setattr(message_limits, "MAX_ELEMENTS", elements - 1)
    with pytest.raises(MessageTooLarge):
        message_limits.check_structure(message.DESCRIPTOR, data)


@pytest.mark.parametrize(("field", "max_items"), [("messages", 10_000), ("tools", 1024)])
def test_check_structure_of_too_many_items_is_refused(field: str, max_items: int) -> None:
    number = prompt_pb2.Chat.DESCRIPTOR.fields_by_name[field].number
    for count, refused in ((max_items, False), (max_items + 1, True)):
        data = pb.GenerateRequest(chat=prompt_pb2.Chat()).SerializeToString()
        inner = bytes([number << 3 | 2, 0]) * count
        size = bytes([len(inner) & 0x7F | 0x80, len(inner) >> 7 & 0x7F | 0x80, len(inner) >> 14])
        data = bytes([5 << 3 | 2]) + size + inner
        if refused:
            with pytest.raises(InvalidField, match=rf"^chat\.{field}: must be at most {max_items}, got more$"):
                message_limits.check_structure(GENERATE, data)
        else:
            message_limits.check_structure(GENERATE, data)


@pytest.mark.parametrize("data", [
    b"\x2a\x00" * 100_001, b"\x78\x01" * 100_001, b"\xa0\x06\x00" * 100_001, b"\x3a\x02\x1a\x00" * 50_001,
], ids=["a singular message again and again", "a number", "an unknown field", "a nested list"])
def test_check_structure_counts_fields_at_all_depths(data: bytes) -> None:
    with pytest.raises(MessageTooLarge, match="more than 100000 fields and items"):
        message_limits.check_structure(GENERATE, data)


def test_check_structure_stops_counting_at_the_limit() -> None:
    """The time of the scan does not grow with the message."""
    scan = message_limits._Scan(b"\x78\x01" * 10_000_000)
    with pytest.raises(MessageTooLarge):
        scan.message(GENERATE, 0, 20_000_000, "", 0)
    assert scan._left == -1


def test_check_structure_of_a_group_is_refused() -> None:
    with pytest.raises(MalformedRequest):
        message_limits.check_structure(GENERATE, b"\x0b" * 50_000)


def test_check_structure_counts_packed_ids_once() -> None:
    ids = tokenize_pb2.DetokenizeRequest(token_ids=[7] * 1_000_000)
    message_limits.check_structure(tokenize_pb2.DetokenizeRequest.DESCRIPTOR, ids.SerializeToString())
    deep = struct_pb2.Struct()
    deep["x"] = [[1, 2], {"y": [None] * 40_000}]
    message_limits.check_structure(struct_pb2.Struct.DESCRIPTOR, deep.SerializeToString())


@given(st.binary(max_size=200))
def test_check_structure_of_any_bytes_returns_or_raises_a_documented_error(data: bytes) -> None:
    """Other malformed messages are left to the parser."""
    try:
        message_limits.check_structure(GENERATE, data)
    except MalformedRequest:
        assert any(byte & 7 in (3, 4, 6, 7) for byte in data)
