"""Requests that protobuf cannot parse, sent as bytes to every method: one status, one log line and no traceback."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf import message_factory, struct_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status

from npuserve.service import metrics
from npuserve.service.errors import InvalidField, MalformedRequest
from npuserve.service.requests import parser as request_parser
from npuserve.v1 import admin_service_pb2, inference_service_pb2
from npuserve.v1 import generate_pb2 as pb
from tests.support.fake_engine import make_folder, until
from tests.support.front_end import Running, ask, running

SURROGATE = b"\xed\xa0\x80"
"""U+D800 in the encoding of UTF-8, which excludes it; C++, Ruby and Node send it."""
PLACEHOLDER = "@@@"
METHODS: list[MethodDescriptor] = [
    method for module, service in (
        (inference_service_pb2, "InferenceService"), (admin_service_pb2, "AdminService"), (health_pb2, "Health"))
    for method in module.DESCRIPTOR.services_by_name[service].methods]


def texts(kind: Descriptor) -> Iterator[tuple[str, bytes]]:
    """Yield the path of each text field of a message type, with a serialized message that has a lone surrogate there.
    """
    for field in kind.fields:
        made = message_factory.GetMessageClass(kind)()
        path = f"{field.name}[0]" if field.is_repeated else field.name
        if field.message_type is struct_pb2.Struct.DESCRIPTOR:
            getattr(made, field.name)["key"] = {"deep": [PLACEHOLDER]}
            yield path, made.SerializeToString().replace(PLACEHOLDER.encode(), SURROGATE)
            made.Clear()
            getattr(made, field.name)[PLACEHOLDER] = True
            yield path, made.SerializeToString().replace(PLACEHOLDER.encode(), SURROGATE)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for rest, data in texts(field.message_type):
                tag = field.number << 3 | 2
                yield f"{path}.{rest}", bytes([tag, len(data)]) + data
        elif field.type == FieldDescriptor.TYPE_STRING:
            if field.is_repeated:
                getattr(made, field.name).append(PLACEHOLDER)
            else:
                setattr(made, field.name, PLACEHOLDER)
            yield path, made.SerializeToString().replace(PLACEHOLDER.encode(), SURROGATE)


async def error_of(server: Running, method: MethodDescriptor, data: bytes) -> grpc.aio.AioRpcError:
    name = f"/{method.containing_service.full_name}/{method.name}"
    kind = server.channel.unary_stream if method.server_streaming else server.channel.unary_unary
    call = kind(name)(data)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await (call.read() if method.server_streaming else call)
    return failed.value


def counted(rpc: str) -> float:
    return metrics.requests_total.labels(rpc, "INVALID_ARGUMENT")._value.get()


async def wait_for_count(rpc: str, expected: float) -> None:
    """Wait until a call is counted, which happens after its status is sent."""
    await until(lambda: counted(rpc) >= expected)
    assert counted(rpc) == expected


async def test_request_with_invalid_utf8_names_the_field(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tests every text field of every method."""
    caplog.set_level(logging.INFO)
    seen: set[str] = set()
    async with running(make_folder(tmp_path / "m"), administrator=True) as server:
        for method in METHODS:
            for path, data in texts(method.input_type):
                seen.add(path)
                before = counted(method.name)
                error = await error_of(server, method, data)
                assert (error.code(), error.details()) == (
                    grpc.StatusCode.INVALID_ARGUMENT, f"{path}: must be valid UTF-8")
                info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
                details = rpc_status.from_call(error).details
                assert details[0].Unpack(info)
                assert details[1].Unpack(bad)
                assert info.reason
                assert bad.field_violations[0].field == path
                await wait_for_count(method.name, before + 1)
        assert (await server.inference.Generate(ask("ab", 3))).text == "cde"
    assert seen >= {"text", "request_id", "model", "scheduling.cache_salt", "stopping.stop[0]", "chat.template_args",
                    "chat.tools[0]", "chat.messages[0].tool_calls[0]", "json_schema", "choices.choices[0]",
                    "resume_token", "service"}
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


async def test_request_with_malformed_protobuf_is_refused_by_every_method(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(make_folder(tmp_path / "m"), health_port=0, administrator=True) as server:
        for method in METHODS:
            before = counted(method.name)
            for data in (b"\xff\xff\xff", b"\x0a\xff\xff\xff\x7fabc", b"\x0b"):
                error = await error_of(server, method, data)
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert error.details() == (
                    f"the request is not a valid {method.input_type.full_name}: malformed protobuf")
                info = error_details_pb2.ErrorInfo()
                assert rpc_status.from_call(error).details[0].Unpack(info)
                assert info.reason
            await wait_for_count(method.name, before + 3)
        assert (await server.inference.Generate(ask("ab", 3))).text == "cde"
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_malformed_reflection_request_ends_only_its_stream(tmp_path: Path, version: str) -> None:
    async with running(make_folder(tmp_path / "m")) as server:
        call = server.channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services="*").SerializeToString())
        listed = reflection_pb2.ServerReflectionResponse.FromString(await call.read())
        assert "npuserve.v1.InferenceService" in [one.name for one in listed.list_services_response.service]
        await call.write(b"\x1a\x02\xc3\x28")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call.read()
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert failed.value.details() == "file_by_filename: must be valid UTF-8"


async def test_request_that_is_parsed_without_memory_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def parse(deserializer: object, data: bytes) -> None:
        raise MemoryError

    async with running(make_folder(tmp_path / "m")) as server:
        reflection = server.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")()
        with monkeypatch.context() as patch:
            patch.setattr(request_parser, "parse", parse)
            await reflection.write(b"")
            for call in (server.inference.Generate(ask()), reflection.read()):
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await call
                assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
                assert failed.value.details() == "the front end has no memory for the request"
        assert (await server.inference.Generate(ask("ab", 3))).text == "cde"
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


def test_parse_names_the_second_of_two_messages() -> None:
    good, bad = b"\x0a\x06\x0a\x04user", b"\x0a\x07\x0a\x02ok\x12\x01\xff"
    data = b"\x2a" + bytes([len(good + bad)]) + good + bad
    with pytest.raises(InvalidField, match=r"^chat\.messages\[1\]\.content: must be valid UTF-8$"):
        request_parser.parse(pb.GenerateRequest.FromString, data)


def test_parse_of_deep_nesting_is_malformed() -> None:
    value = b"\x11" + bytes(8)
    for _ in range(3000):
        for tag in (b"\x12", b"\x0a", b"\x32"):  # a Value of a field of a Struct
            size = len(value)
            length = b""
            while size >= 0x80:
                length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
            value = tag + length + bytes([size]) + value
    with pytest.raises((InvalidField, MalformedRequest)):
        request_parser.parse(struct_pb2.Value.FromString, value[1:])
