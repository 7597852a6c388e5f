"""OTLP collector in the test's process."""

from __future__ import annotations

from concurrent import futures
from typing import Any

import grpc
import pytest


class Collector:
    """OTLP collector.

    url: address of its gRPC server.
    spans: spans received so far.
    resources: attributes of the spans' resources.
    """

    def __init__(self) -> None:
        service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")
        pb = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        collector = self

        class Service(service.TraceServiceServicer):  # type: ignore[misc,name-defined]
            def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
                for group in request.resource_spans:
                    collector.resources.append({a.key: a.value.string_value for a in group.resource.attributes})
                    for scope in group.scope_spans:
                        collector.spans += scope.spans
                return pb.ExportTraceServiceResponse()

        self.server = grpc.server(futures.ThreadPoolExecutor(1))
        service.add_TraceServiceServicer_to_server(Service(), self.server)
        self.url = f"http://127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()
