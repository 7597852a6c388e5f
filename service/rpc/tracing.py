"""OpenTelemetry spans of each call, exported over OTLP. Imported only if `--otlp-endpoint` is set.

A call's span continues the client's trace (`traceparent` of W3C Trace Context, in the gRPC metadata). The phases are
its child spans. They are created when the call ends, from times that the engine measures in any case, so that tracing
adds no cost to a token:

    StreamGenerate  arrival ├──────────────────────────────────────────────────────────┤ last message written
    queue                   ├──────┤
    prefill chunk                  ├──────┼──────┤                     one for each chunk
    decode                                       ├───────────────────┤
    detokenize and send                                              ├─────────────────┤ of the last step's tokens

A preempted request has all its waiting time in one `queue` span and its chunks in sequence, as in messages.Timing.
A call that the engine did not finish (refused, cancelled) has no phases.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import grpc.aio
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from npuserve.service.ipc import messages
from npuserve.service.processes.child import TRACES_SECONDS
from npuserve.v1 import inference_service_pb2

HEADERS_LOGGER = "opentelemetry.util.re"
"""Logger of OpenTelemetry whose warnings quote a malformed header, such as `authorization: Bearer KEY`."""
EXPORT_SECONDS = 5.0
SERVICE = inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
COMPLETION = "text_completion"
# gRPC codes that OpenTelemetry's conventions count as errors of a gRPC server.
SERVER_ERRORS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
# Field of the log line -> attribute of the span.
ATTRIBUTES = {
    "id": "gen_ai.response.id", "prompt_tokens": "gen_ai.usage.input_tokens",
    "generated_tokens": "gen_ai.usage.output_tokens", "cached_tokens": "npuserve.cached_tokens",
}


class Tracing:
    """Tracer of one front end. A thread exports its spans to `endpoint` until `close`.

    OpenTelemetry's own settings select the sampler and the service's name (OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME,
    OTEL_RESOURCE_ATTRIBUTES). By default the client's sampling decision applies, and a call without a parent span is
    sampled.
    """

    def __init__(self, endpoint: str):
        ours = Resource({"service.name": "npuserve", "service.version": version("npuserve")})
        environment = OTELResourceDetector().detect()  # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        resource = Resource.create(ours.merge(environment).attributes)
        logging.getLogger(HEADERS_LOGGER).addFilter(_hide_header)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS)))
        self._tracer = self._provider.get_tracer("npuserve", version("npuserve"))

    def begin(
        self, context: grpc.aio.ServicerContext[Any, Any], rpc: str, began: float, service: str = SERVICE,
        operation: str = COMPLETION,
    ) -> Trace:
        """Start the trace of a call.

        rpc, service: names of the method and of its service.
        began: see `Trace`.
        operation: gen_ai.operation.name; "" if it is not known.
        """
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        return Trace(self._tracer, metadata, rpc, service, operation, began)

    def close(self) -> None:
        """Export the remaining spans, for at most TRACES_SECONDS: a silent collector must not delay the exit."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        with contextlib.suppress(RuntimeError):  # the system has no further thread
            closing.start()
            closing.join(TRACES_SECONDS)


def _hide_header(record: logging.LogRecord) -> bool:
    """Remove the header from a warning of HEADERS_LOGGER."""
    record.args = ("not shown, since it may hold a key",)
    return True


class Trace:
    """Trace of one call. Call `finished` if the engine finished the request, and then `end` once in any case.

    began: arrival of the call, in time.monotonic() seconds.
    """

    def __init__(
        self, tracer: Tracer, metadata: dict[str, str], rpc: str, service: str, operation: str, began: float
    ):
        self._tracer = tracer
        self._operation = operation
        self._clock = time.time_ns() - time.monotonic_ns()
        self._span = tracer.start_span(
            f"{service}/{rpc}", TraceContextTextMapPropagator().extract(metadata), SpanKind.SERVER,
            {"rpc.system": "grpc", "rpc.service": service, "rpc.method": rpc}, start_time=self._at(began))
        self._timing: messages.Timing | None = None

    @property
    def id(self) -> str:
        """Trace id in hex."""
        return format(self._span.get_span_context().trace_id, "032x")

    def finished(self, timing: messages.Timing, model: str, first_token: float | None) -> None:
        """Record the engine's timing.

        timing: phases of the request, in seconds.
        model: name of the served model.
        first_token: time.monotonic() seconds; None: there was none.
        """
        self._timing = timing
        if self._operation:
            self._span.set_attribute("gen_ai.operation.name", self._operation)
        self._span.set_attributes({
            "gen_ai.request.model": model,
            "npuserve.device_seconds": timing.device, "npuserve.host_seconds": timing.host})
        if first_token is not None:
            self._span.add_event("first token", timestamp=self._at(first_token))

    def end(self, code: str, fields: dict[str, Any]) -> None:
        """End the span, and create its phases. code: name of the gRPC code. fields: fields of the call's log line."""
        now = time.monotonic()
        span = self._span
        if span.is_recording():
            span.set_attribute("rpc.grpc.status_code", grpc.StatusCode[code].value[0])
            span.set_attributes({name: fields[key] for key, name in ATTRIBUTES.items() if key in fields})
            if "reason" in fields:
                span.set_attribute("gen_ai.response.finish_reasons", fields["reason"].split(","))  # one a sample
            if code in SERVER_ERRORS:
                span.set_status(Status(StatusCode.ERROR, fields.get("error", code)))
            within = set_span_in_context(span)
            for name, begin, end in self._phases(now):
                self._tracer.start_span(name, within, start_time=self._at(begin)).end(self._at(end))
        span.end(self._at(now))

    def _phases(self, now: float) -> Iterator[tuple[str, float, float]]:
        """Yield (name, begin, end) of each phase in order, in time.monotonic() seconds."""
        timing = self._timing
        if timing is None:
            return
        begin = timing.last_step_end - timing.queue - sum(timing.prefill_chunks) - timing.decode
        phases = [("queue", timing.queue), *(("prefill chunk", chunk) for chunk in timing.prefill_chunks)]
        for name, seconds in [*phases, *([("decode", timing.decode)] if timing.decode else [])]:
            yield name, begin, begin + seconds
            begin += seconds
        yield "detokenize and send", timing.last_step_end, now

    def _at(self, seconds: float) -> int:
        """Convert time.monotonic() seconds to nanoseconds of Unix time."""
        return self._clock + round(seconds * 1e9)
