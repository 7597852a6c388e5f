"""Traces as received by an OTLP collector in this process, and their absence without --otlp-endpoint."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.frontend import process
from npuserve.service.frontend.process import Frontend, FrontendArgs
from npuserve.service.ipc.messages import Timing
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import prompt_pb2
from tests.support.collector import Collector
from tests.support.fake_engine import EOS, make_folder, until
from tests.support.front_end import ask, running
from tests.support.vllm_engine import engine_stub, vllm_request

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SERVER_SPAN = "npuserve.v1.InferenceService/StreamGenerate"


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        found[attribute.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


async def test_trace_of_stream_has_its_phases(folder: Path, collector: Collector) -> None:
    began = time.time_ns()
    metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
    async with running(folder, otlp_endpoint=collector.url) as server:
        server.engine.delay = 0.01
        call = server.inference.StreamGenerate(ask("ab", 5), metadata=metadata)
        finish = [part async for part in call][-1].finish
        await until(lambda: len(collector.spans) >= 4)
    ended = time.time_ns()
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    root = next(span for span in collector.spans if span.name == SERVER_SPAN)
    assert root.parent_span_id.hex() == PARENT
    children = sorted((s for s in collector.spans if s is not root), key=lambda s: s.start_time_unix_nano)
    # The fake engine's timing: no wait, one chunk, no decode.
    assert [child.name for child in children] == ["queue", "prefill chunk", "detokenize and send"]
    assert {child.parent_span_id for child in children} == {root.span_id}
    assert began <= root.start_time_unix_nano < root.end_time_unix_nano <= ended
    assert children[0].start_time_unix_nano >= root.start_time_unix_nano
    for child, following in itertools.pairwise(children):
        assert abs(child.end_time_unix_nano - following.start_time_unix_nano) <= 2
    assert children[-1].end_time_unix_nano == root.end_time_unix_nano
    assert children[1].end_time_unix_nano - children[1].start_time_unix_nano == pytest.approx(
        finish.timing.prefill_chunks[0].ToNanoseconds(), abs=2)
    root_attributes = attributes(root)
    assert root_attributes["rpc.method"] == "StreamGenerate"
    assert root_attributes["rpc.grpc.status_code"] == 0
    assert (root_attributes["gen_ai.usage.input_tokens"], root_attributes["gen_ai.usage.output_tokens"]) == (2, 5)
    assert root_attributes["gen_ai.request.model"] == "counting"
    assert root_attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert root_attributes["npuserve.cached_tokens"] == 3
    (first,) = root.events
    assert first.name == "first token"
    assert root.start_time_unix_nano < first.time_unix_nano < root.end_time_unix_nano
    assert collector.resources[0]["service.name"] == "npuserve"


def test_trace_has_the_engines_times() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from npuserve.service.rpc.tracing import Trace

    exporter, provider, end = InMemorySpanExporter(), sdk.TracerProvider(), time.monotonic()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    trace = Trace(provider.get_tracer("test"), {}, "Generate", "service", "", end)
    trace.finished(Timing(1.0, [2.0, 3.0], 4.0, 0.5, 0.25, end), "model", end - 4.5)
    trace.end("OK", {})
    *phases, root = exporter.get_finished_spans()
    last = phases[-1].start_time
    (first,) = root.events
    begins = [(span.name, round((last - span.start_time) / 1e9, 6)) for span in phases]
    assert begins == [
        ("queue", 10), ("prefill chunk", 9), ("prefill chunk", 7), ("decode", 4), ("detokenize and send", 0)]
    assert round((last - first.timestamp) / 1e9, 6) == 4.5


async def test_trace_of_vllm_engine_has_its_name_and_phases(folder: Path, collector: Collector) -> None:
    metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
    async with running(folder, otlp_endpoint=collector.url) as server:
        await engine_stub(server.channel).Generate(vllm_request("ab", 5), metadata=metadata).read()
        await until(lambda: len(collector.spans) >= 4)
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert {span.name for span in collector.spans} == {
        "vllm.grpc.engine.VllmEngine/Generate", "queue", "prefill chunk", "detokenize and send"}
    root = next(span for span in collector.spans if span.parent_span_id.hex() == PARENT)
    assert attributes(root)["rpc.service"] == "vllm.grpc.engine.VllmEngine"
    assert attributes(root)["gen_ai.usage.output_tokens"] == 5


async def test_trace_of_samples_has_all_finish_reasons(folder: Path, collector: Collector) -> None:
    async with running(folder, otlp_endpoint=collector.url) as server:
        server.engine.scripts = {1: [1, EOS]}
        await server.inference.Generate(ask("ab", 5, n=3))
        await until(lambda: len(collector.spans) >= 4)
    root = next(span for span in collector.spans if not span.parent_span_id)
    assert len(collector.spans) == 4  # the phases of one sample
    root_attributes = attributes(root)
    assert root_attributes["gen_ai.response.finish_reasons"] == ["length", "eos", "length"]
    assert (root_attributes["gen_ai.usage.input_tokens"], root_attributes["gen_ai.usage.output_tokens"]) == (2, 12)
    assert [event.name for event in root.events] == ["first token"]


async def test_trace_has_the_operation_of_its_prompt(tmp_path: Path, collector: Collector) -> None:
    chat = pb.GenerateRequest(chat=prompt_pb2.Chat(messages=[prompt_pb2.Message(role="user", content="ab")]))
    chat.stopping.max_tokens = 2
    async with running(make_folder(tmp_path / "chat", chat=True), otlp_endpoint=collector.url) as server:
        await server.inference.Generate(ask("ab", 2))
        await server.inference.Generate(chat)
        call = server.inference.StreamGenerate(chat)
        token = dict(await call.initial_metadata())["x-resume-token"]
        assert [part async for part in call]
        server.engine.records[token] = server.frontend._engine._records.find(token, "", time.monotonic())
        assert [part async for part in server.inference.ResumeStream(pb.ResumeStreamRequest(resume_token=token))]
        await until(lambda: len([span for span in collector.spans if not span.parent_span_id]) == 4)
    operations = {(span.name.rpartition("/")[2], attributes(span).get("gen_ai.operation.name"))
                  for span in collector.spans if not span.parent_span_id}
    assert operations == {
        ("Generate", "text_completion"), ("Generate", "chat"), ("StreamGenerate", "chat"), ("ResumeStream", None)}


async def test_trace_of_error_and_cancel_has_status(
    folder: Path, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "npuserve")
    async with running(folder, otlp_endpoint=collector.url) as server:
        with pytest.raises(grpc.aio.AioRpcError):
            await server.inference.Generate(ask("ab", 5, top_p=7.0))
        server.engine.hold.clear()
        call = server.inference.StreamGenerate(ask("ab", 5))
        await until(lambda: server.engine.live)
        call.cancel()
        await until(lambda: len(collector.spans) == 2)
        await server.engine.die()
        await until(lambda: server.frontend._engine.state == "down")
        with pytest.raises(grpc.aio.AioRpcError):
            await server.inference.Generate(ask("ab", 5))
        await until(lambda: len(collector.spans) == 3)
    codes = [(attributes(s)["rpc.method"], attributes(s)["rpc.grpc.status_code"]) for s in collector.spans]
    assert codes == [("Generate", 3), ("StreamGenerate", 1), ("Generate", 14)]
    # A span has status ERROR only for errors of the server.
    assert [span.status.code for span in collector.spans] == [0, 0, 2]
    assert collector.spans[2].status.message == "the engine is restarting"
    assert len({span.trace_id for span in collector.spans}) == 3
    lines = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
    assert [line["trace_id"] for line in lines] == [span.trace_id.hex() for span in collector.spans]


async def test_trace_unsampled_by_client_is_not_exported(folder: Path, collector: Collector) -> None:
    async with running(folder, otlp_endpoint=collector.url) as server:
        for flag in ("00", "01"):
            metadata = (("traceparent", f"00-{TRACE}-{PARENT}-{flag}"),)
            await server.inference.Generate(ask("ab", 2), metadata=metadata)
        await until(lambda: len(collector.spans) >= 4)
    assert len([span for span in collector.spans if span.name.endswith("/Generate")]) == 1


@pytest.mark.parametrize(("variables", "name"), [
    ({}, "npuserve"),
    ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=chat,team=a%20b"}, "chat"),
    ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=chat,team=a%20b", "OTEL_SERVICE_NAME": "llm"}, "llm"),
    ({"OTEL_RESOURCE_ATTRIBUTES": "team=a%20b", "OTEL_SERVICE_NAME": ""}, "npuserve"),
])
async def test_tracing_resource_is_of_the_environment(
    folder: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str
) -> None:
    for variable in ("OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    async with running(folder, otlp_endpoint=collector.url) as server:
        await server.inference.Generate(ask("ab", 2))
        await until(lambda: collector.resources)
    assert collector.resources[0]["service.name"] == name
    assert collector.resources[0].get("team") == ("a b" if variables else None)
    assert collector.resources[0]["service.version"]


async def test_tracing_exports_the_last_spans_at_the_end(
    folder: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    monkeypatch.setattr("npuserve.service.rpc.tracing.TRACES_SECONDS", 60.0)
    async with running(folder, otlp_endpoint=collector.url) as server:
        await server.inference.Generate(ask("ab", 2))
        assert not collector.spans
    assert len(collector.spans) == 4


async def test_tracing_unreachable_collector_delays_no_call(
    folder: Path, free_port: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracing = pytest.importorskip("npuserve.service.rpc.tracing")
    monkeypatch.setattr(tracing, "EXPORT_SECONDS", 0.1)  # the exporter gives up and logs within this test
    async with running(folder, otlp_endpoint=f"http://127.0.0.1:{free_port()}") as server:
        assert (await server.inference.Generate(ask("ab", 3))).text == "cde"
    await until(lambda: not any(thread.name.startswith("OtelBatch") for thread in threading.enumerate()))


def test_trace_phases_cover_whole_time() -> None:
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace import TracerProvider

    from npuserve.service.rpc.tracing import COMPLETION, Trace

    trace = Trace(TracerProvider().get_tracer(""), {}, "Generate", "npuserve.v1.InferenceService", COMPLETION, 9.0)
    trace.finished(Timing(1.0, [2.0, 3.0], 4.0, 0.0, 0.0, 20.0), "m", None)
    assert list(trace._phases(22.0)) == [
        ("queue", 10.0, 11.0), ("prefill chunk", 11.0, 13.0), ("prefill chunk", 13.0, 16.0), ("decode", 16.0, 20.0),
        ("detokenize and send", 20.0, 22.0)]


def test_tracing_without_endpoint_imports_nothing() -> None:
    script = (
        "import sys\nfrom npuserve.service.config import ServerConfig\n"
        "from npuserve.service.frontend import inference, process\nfrom npuserve.service.supervisor import supervisor\n"
        "assert process._open_tracing(ServerConfig()) is None\n"
        "print([name for name in sys.modules if 'opentelemetry' in name])")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_tracing_without_extra_names_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "npuserve.service.rpc.tracing", None)
    with pytest.raises(ConfigError, match=r"^otlp_endpoint: .*pip install 'npuserve\[otel\]'"):
        Frontend(FrontendArgs(ServerConfig(model=str(folder), otlp_endpoint="http://collector:4317"), 0, "", 0))


@pytest.mark.parametrize(("variable", "value", "message"), [
    ("OTEL_BSP_MAX_QUEUE_SIZE", "256", "max_export_batch_size must be less than or equal to max_queue_size"),
    ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip", 'Invalid value "zip" for compression'),
])
def test_tracing_refused_variable_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"^otlp_endpoint: OpenTelemetry refuses a variable OTEL_…: {message}"):
        process._open_tracing(ServerConfig(otlp_endpoint="http://collector:4317"))


def test_tracing_malformed_header_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization: Bearer secret")
    tracing = process._open_tracing(ServerConfig(otlp_endpoint="http://collector:4317"))
    assert tracing
    tracing.close()
    assert "Header format invalid" in caplog.text
    assert "secret" not in caplog.text


def test_tracing_close_without_a_further_thread_drops_the_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    tracing = process._open_tracing(ServerConfig(otlp_endpoint="http://collector:4317"))
    assert tracing
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        tracing.close()
    tracing.close()


@pytest.mark.parametrize("endpoint", ["collector:4317", "http://collector", "ftp://c:1", "http://a b:1"])
def test_otlp_endpoint_invalid_raises_config_error(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"^otlp_endpoint: .* must be like http://host:4317"):
        ServerConfig(otlp_endpoint=endpoint)
