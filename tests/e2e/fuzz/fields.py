"""Hypothesis strategies of messages, made from descriptors: every field of every request of all services."""

from __future__ import annotations

from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2

from npuserve.v1 import admin_service_pb2, inference_service_pb2

DEEPEST = 4
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_UINT32: st.sampled_from([0, 1, 2, 5, 63, 64, 4096, 2**31, 2**32 - 1]) | st.integers(0, 40),
    FieldDescriptor.CPPTYPE_UINT64: st.sampled_from([0, 1, 2**32, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT32: st.sampled_from([0, -1, 1, 100, -100, 2**31 - 1, -2**31]) | st.integers(-40, 40),
    FieldDescriptor.CPPTYPE_INT64: st.sampled_from([0, 1, -1, 2**63 - 1, -2**63]) | st.integers(-100, 100),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32) | st.sampled_from([0.0, 0.5, 1.0, 1e-38, float("nan")]),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats() | st.sampled_from([0.0, 0.5, 1.0]),
    FieldDescriptor.CPPTYPE_STRING: st.sampled_from(["", "a", "Once upon a time", "user", "{}", "\0", "é\u0301😀"])
    | st.text(st.characters(codec="utf-8"), max_size=40) | st.text("a{%} 中", max_size=300),
}


def requests() -> dict[str, tuple[MethodDescriptor, st.SearchStrategy[Message]]]:
    """Return full method name, as /package.Service/Method, -> (descriptor, strategy of requests), without Drain, which
    ends the server."""
    services = (inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"],
                admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"],
                vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"])
    return {f"/{service.full_name}/{method.name}": (method, messages(method.input_type))
            for service in services for method in service.methods if method.name != "Drain"}


def messages(descriptor: Descriptor, depth: int = 0) -> st.SearchStrategy[Message]:
    """Return a strategy of any subset of fields, at most one of a oneof, with any value of the wire format."""
    kind = message_factory.GetMessageClass(descriptor)

    @st.composite
    def make(draw: st.DrawFn) -> Message:
        made = kind()
        fields = [field for field in descriptor.fields if depth < DEEPEST or field.message_type is None]
        if fields:
            for field in draw(st.lists(st.sampled_from(fields), max_size=min(5, len(fields)), unique=True)):
                _fill(draw, made, field, depth)
        return made

    return make()


def _fill(draw: st.DrawFn, made: Message, field: FieldDescriptor, depth: int) -> None:
    held = getattr(made, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name
        for key in draw(st.lists(_value(entry["key"], depth), max_size=3)):
            value = draw(_value(entry["value"], depth))
            if isinstance(value, Message):
                held[key].CopyFrom(value)
            else:
                held[key] = value
    elif isinstance(held, Message):
        held.CopyFrom(draw(_value(field, depth)))
        held.SetInParent()
    elif hasattr(held, "extend"):
        held.extend(draw(st.lists(_value(field, depth), max_size=4)))
    else:
        setattr(made, field.name, draw(_value(field, depth)))


def _value(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type, depth + 1)
    if field.enum_type is not None:
        return st.sampled_from([value.number for value in field.enum_type.values]) | st.just(77)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=40)
    return SCALARS[field.cpp_type]
