"""Reflection in both versions lists the services and describes each."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tests.support.fake_engine import make_folder
from tests.support.front_end import running

SERVICES = {
    "vllm.grpc.engine.VllmEngine", "npuserve.v1.InferenceService", "npuserve.v1.AdminService", "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection",
}


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_each_version_describes_every_service(tmp_path: Path, version: str) -> None:
    async with running(make_folder(tmp_path / "m")) as server:
        call = server.channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString)()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services="*"))
        listed = await call.read()
        assert {one.name for one in listed.list_services_response.service} == SERVICES
        for name in SERVICES:
            await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
            found = (await call.read()).file_descriptor_response.file_descriptor_proto
            files = [descriptor_pb2.FileDescriptorProto.FromString(data) for data in found]
            assert name in {f"{file.package}.{service.name}" for file in files for service in file.service}
        await call.done_writing()
