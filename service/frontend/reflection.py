"""Server reflection, versions v1 and v1alpha, which differ only in the name of their package.

grpcio-reflection implements only v1alpha. New clients try v1 first, and some know no other version.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2

from npuserve.service.requests.parser import ParsingServer

V1ALPHA = reflection.SERVICE_NAME
V1 = V1ALPHA.replace("v1alpha", "v1")


def add_reflection(services: tuple[str, ...], server: ParsingServer) -> None:
    """Add both versions of reflection to the server, for the given services and for reflection itself."""
    _add_v1_descriptor()
    servicer = reflection.aio.ReflectionServicer((*services, V1, V1ALPHA))
    for name in (V1, V1ALPHA):
        handler: Any = grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo, reflection_pb2.ServerReflectionRequest.FromString,
            reflection_pb2.ServerReflectionResponse.SerializeToString)
        server.add_registered_method_handlers(name, {"ServerReflectionInfo": handler})


def _add_v1_descriptor() -> None:
    """Add grpc/reflection/v1/reflection.proto to the descriptor pool, derived from v1alpha's file."""
    pool = descriptor_pool.Default()
    alpha = descriptor_pb2.FileDescriptorProto()
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
    text_format.Parse(str(alpha).replace("v1alpha", "v1"), file)
    try:
        pool.FindFileByName(file.name)
    except KeyError:
        pool.AddSerializedFile(file.SerializeToString())
