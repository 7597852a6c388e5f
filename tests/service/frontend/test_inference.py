"""InferenceService over a real gRPC server and a fake engine that counts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from prometheus_client import REGISTRY

from npuserve.service.frontend import inference
from npuserve.service.ipc.messages import Cancel, Submit
from npuserve.service.requests.preparation import Kind, Preparation
from npuserve.v1 import admin_service_pb2, inference_service_pb2_grpc, model_pb2, prompt_pb2, tokenize_pb2
from npuserve.v1 import generate_pb2 as pb
from tests.service.frontend.test_response import joined
from tests.service.frontend.test_slow_reader import SMALL_WINDOW
from tests.support.collector import Collector
from tests.support.fake_engine import EOS, until
from tests.support.front_end import Running, ask, running
from tests.support.whole_server import whole_server


async def stream(server: Running, message: pb.GenerateRequest) -> list[pb.StreamGenerateResponse]:
    return [part async for part in server.inference.StreamGenerate(message)]


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"npuserve_{name}", labels) or 0.0


async def test_generate_equals_stream_generate(folder: Path) -> None:
    asks = [
        ask("ab", 20), ask("ab", 20, logprobs=2, prompt_logprobs=1), ask("y", 1), ask([25, 299], 3),
        ask("ab", 20, stop=["hi"]), ask("ab", 20, stop=["hi", "g"], include_stop=True),
        ask("ab", 20, stop=["hi"], min_tokens=12), ask("ab", 40, stop_token_ids=[9], min_tokens=15),
    ]
    async with running(folder) as server:
        server.engine.delay = 0.001
        for message in asks:
            message.output.return_token_ids = True
            text, ids, finish = joined(await stream(server, message))
            unary = await server.inference.Generate(message)
            assert (unary.text, list(unary.token_ids)) == (text, ids)
            for made in (finish, unary.finish):
                made.ClearField("timing")
            assert unary.finish == finish
        assert (await server.inference.Generate(asks[1])).text == "cdefghijklmnopqrstuv"
        assert (await server.inference.Generate(asks[4])).text == "cdefg"
        assert server.engine.live == 0


async def test_call_whose_message_arrives_late_counts_the_wait(
    folder: Path, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    """In the request's arrival, its timing, the log line, the time to the first token and the trace."""
    wait, sent = 0.3, list[float]()
    caplog.set_level(logging.INFO, "npuserve")
    async with running(folder, otlp_endpoint=collector.url) as server:
        generate = server.channel.stream_unary(
            "/npuserve.v1.InferenceService/Generate", pb.GenerateRequest.SerializeToString,
            pb.GenerateResponse.FromString)

        async def late() -> AsyncIterator[pb.GenerateRequest]:
            await until(lambda: bool(server.frontend._servers.connections._calls))
            await asyncio.sleep(wait)
            sent.append(time.monotonic())
            yield ask("ab", 3)

        answer = await generate(late())
        (submit,) = server.engine.got(Submit)
        await until(lambda: any(span.name.endswith("/Generate") for span in collector.spans))
    assert submit.request.arrival <= sent[0] - wait
    assert answer.finish.timing.total.ToNanoseconds() >= wait * 1e9
    (line,) = (record.fields for record in caplog.records if record.message == "request")  # type: ignore[attr-defined]
    assert min(line["seconds"], line["ttft"], line["e2e"]) >= wait
    (root,) = (span for span in collector.spans if span.name.endswith("/Generate"))
    assert root.end_time_unix_nano - root.start_time_unix_nano >= wait * 1e9


async def test_stop_string_ends_request_in_engine(folder: Path) -> None:
    async with running(folder) as server:
        server.engine.delay = 0.003
        answer = await server.inference.Generate(ask("a", 60, stop=["de"], return_token_ids=True))
        assert (answer.text, list(answer.token_ids)) == ("bc", [1, 2, 3, 4])
        assert answer.finish.reason == pb.FINISH_REASON_STOP_STRING
        assert (answer.finish.matched_stop, answer.finish.usage.generated_tokens) == ("de", 4)
        assert [c.keep for c in server.engine.got(Cancel)] == [4]
        assert server.engine.live == 0
        # The engine ends the request before the stop string is found.
        server.engine.delay, server.engine.batch = 0, 30
        answer = await server.inference.Generate(ask("a", 20, stop=["de"]))
        assert (answer.text, answer.finish.reason) == ("bc", pb.FINISH_REASON_STOP_STRING)
        assert answer.finish.usage.generated_tokens == 4
        assert len(server.engine.got(Cancel)) == 1


async def test_stream_never_splits_characters(folder: Path) -> None:
    async with running(folder) as server:
        tokenize = tokenize_pb2.TokenizeRequest(text="é中👩‍👧x")
        server.engine.script = list((await server.inference.Tokenize(tokenize)).token_ids)
        server.engine.delay = 0.001
        parts = await stream(server, ask("a", len(server.engine.script)))
        assert "".join(part.text for part in parts) == "é中👩‍👧x"
        assert not any("\ufffd" in part.text for part in parts)
        half = await server.inference.Generate(ask("a", 3))
        assert half.text == "é\ufffd"


async def test_stream_sends_tokens_as_generated(folder: Path) -> None:
    async with running(folder) as server:
        server.engine.hold.clear()
        call = server.inference.StreamGenerate(ask("a", 3, request_id="mine"))
        assert ("x-request-id", "mine") in tuple(await call.initial_metadata())
        server.engine.delay = 0.1
        server.engine.hold.set()
        texts = []
        async for part in call:
            texts.append(part.text)
            if not part.HasField("finish"):
                assert server.engine.live == 1  # the answer is not complete yet
        assert texts == ["b", "c", "d"]


@pytest.mark.slow
async def test_prompt_logprobs_above_4_mib_are_streamed_and_refused_by_generate(folder: Path) -> None:
    """With a client that accepts 4 MiB, gRPC's default."""
    ids = [i % 26 for i in range(20_000)]
    message = ask(ids, 3, prompt_logprobs=20, return_token_ids=True)
    async with running(folder, start_engine=False) as server:
        server.engine.info = msgspec.structs.replace(server.engine.info, max_model_len=30_000)
        server.engine.start()
        await until(lambda: server.frontend._engine.state == "ready")
        async with grpc.aio.insecure_channel(server.target) as channel:
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Generate(message)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert refused.value.details().startswith(
                "output.prompt_logprobs: the answer must fit 4 MiB, the largest message that clients take by default: "
                "at most 8322 tokens of prompt with 20 log-probabilities each, got 20000; StreamGenerate")
            assert not server.engine.got(Submit)
            parts = [part async for part in stub.StreamGenerate(message)]
            assert sum(part.ByteSize() for part in parts) > 4 << 20
            assert max(part.ByteSize() for part in parts) < 1 << 20
            assert [position.chosen.token_id for part in parts for position in part.prompt_logprobs] == ids
            assert joined(parts)[1] == [(ids[-1] + i) % 26 for i in (1, 2, 3)]
            message.output.prompt_logprobs = 0  # 24 bytes each
            assert len((await stub.Generate(message)).prompt_logprobs) == 20_000


async def test_generate_of_a_client_with_too_many_unread_answers_is_resource_exhausted(folder: Path) -> None:
    """The first client's window is smaller than its answer."""
    async with running(folder) as server:
        unread = server.frontend._servers._servicers.inference._unread_answers
        unread._shares.max_bytes = 64
        message = ask([1] * 60, 1, prompt_logprobs=20)
        async with grpc.aio.insecure_channel(
            server.target, [*SMALL_WINDOW, ("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            call = channel.stream_stream("/npuserve.v1.InferenceService/Generate")()
            await call.write(message.SerializeToString())
            await until(lambda: bool(unread._shares))
            with pytest.raises(grpc.aio.AioRpcError, match="replies to this client are unread") as refused:
                await server.inference.Generate(ask(request_id="mine"))
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert ("x-request-id", "mine") in tuple(refused.value.trailing_metadata())
            assert len(server.engine.got(Submit)) == 1  # nothing is generated in vain
        await until(lambda: not unread._shares)
        assert (await server.inference.Generate(ask("a", 1))).text == "b"


async def test_request_id_is_generated_if_absent(folder: Path) -> None:
    async with running(folder) as server:
        calls = [server.inference.Generate(ask()) for _ in range(2)]
        made = {dict(await call.initial_metadata())["x-request-id"] for call in calls}
        assert len(made) == 2
        assert made == {message.request.request_id for message in server.engine.got(Submit)}
        assert [list(await call.trailing_metadata()) for call in calls] == [[], []]


async def test_error_has_request_id(folder: Path) -> None:
    async with running(folder) as server:
        for given, sent in (("mine", "mine"), ("not mine", None), (None, None)):
            call = server.inference.Generate(ask("", **({"request_id": given} if given else {})))
            found = dict(await call.trailing_metadata())["x-request-id"]
            assert list(await call.initial_metadata()) == []
            assert found == sent or (sent is None and found != given and len(found) == 32)
            assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_client_cancel_cancels_request(folder: Path) -> None:
    async with running(folder) as server:
        server.engine.delay = 0.005
        before = metric("requests_total", rpc="StreamGenerate", code="CANCELLED")
        call = server.inference.StreamGenerate(ask("a", 60))
        await call.read()
        call.cancel()
        unary = server.inference.Generate(ask("a", 60))
        await until(lambda: len(server.engine.got(Submit)) == 2)
        unary.cancel()
        await until(lambda: server.engine.live == 0)
        assert [c.keep for c in server.engine.got(Cancel)] == [None, None]
        await until(lambda: metric("requests_total", rpc="StreamGenerate", code="CANCELLED") == before + 1)
        assert server.frontend._engine._streams == {}


async def test_closed_connection_cancels_request(folder: Path) -> None:
    async with running(folder) as server:
        server.engine.delay = 0.005
        call = server.inference.StreamGenerate(ask("a", 60))
        await call.read()
        await server.channel.close()
        await until(lambda: server.engine.live == 0)
        assert len(server.engine.got(Cancel)) == 1


@pytest.mark.slow
async def test_deadline_cancels_request(folder: Path) -> None:
    async with running(folder) as server:
        await server.inference.Generate(ask())  # connects
        server.engine.hold.clear()
        before = metric("requests_total", rpc="Generate", code="DEADLINE_EXCEEDED")
        call = server.inference.Generate(ask(), timeout=2)
        await until(lambda: server.engine.live == 1)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await call
        assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: server.engine.live == 0)
        assert len(server.engine.got(Cancel)) == 1
        await until(lambda: metric("requests_total", rpc="Generate", code="DEADLINE_EXCEEDED") == before + 1)


async def test_stream_unread_outputs_are_merged(folder: Path) -> None:
    """The engine does not wait for a reader. Outputs that arrive meanwhile become one message."""
    async with running(folder) as server:
        server.engine.batch = 1
        call = server.inference.StreamGenerate(ask("a", 60, return_token_ids=True))
        await until(lambda: server.engine.live == 0 and server.engine.got(Submit))
        text, ids, finish = joined([part async for part in call])
        assert len(ids) == finish.usage.generated_tokens == 60
        assert text == "".join(chr(97 + (i + 1) % 26) for i in range(60))


async def test_engine_refusal_has_retry_info(folder: Path) -> None:
    async with running(folder) as server:
        for name, code in (("QueueFull", grpc.StatusCode.RESOURCE_EXHAUSTED),
                           ("Unavailable", grpc.StatusCode.UNAVAILABLE),
                           ("DuplicateRequest", grpc.StatusCode.ALREADY_EXISTS)):
            server.engine.refuse = (name, f"said by the engine: {name}", 1.5)
            for call in (server.inference.Generate(ask()), server.inference.StreamGenerate(ask()).read()):
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await call
                assert (failed.value.code(), failed.value.details()) == (code, f"said by the engine: {name}")
                details = {d.TypeName() for d in rpc_status.from_call(failed.value).details}
                assert "google.rpc.ErrorInfo" in details
                assert ("google.rpc.RetryInfo" in details) == (name != "DuplicateRequest")


async def test_stream_refused_has_request_id_and_no_resume_token(folder: Path) -> None:
    async with running(folder) as server:
        refusals = {
            "MODEL_NOT_FOUND": ask(request_id="mine", model="typo"),
            "INVALID_FIELD": ask(request_id="mine", top_p=2),
            "QUEUE_FULL": ask(request_id="mine"),
            "UNAVAILABLE": ask(request_id="mine"),
        }
        for reason, message in refusals.items():
            server.engine.refuse = ("Unavailable" if reason == "UNAVAILABLE" else "QueueFull", "full", 1.5)
            call = server.inference.StreamGenerate(message)
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call.read()
            info = error_details_pb2.ErrorInfo()
            assert rpc_status.from_call(failed.value).details[0].Unpack(info)
            assert info.reason == reason
            assert list(await call.initial_metadata()) == []
            trailing = dict(await call.trailing_metadata())
            assert (trailing["x-request-id"], "x-resume-token" in trailing) == ("mine", False)


async def test_stream_queued_has_request_id_and_resume_token(tmp_path: Path) -> None:
    async with whole_server(tmp_path, delay=0.01, max_num_seqs=1) as server, server.client() as stub:
        first = stub.StreamGenerate(ask("a", 500))
        await first.read()
        second = stub.StreamGenerate(ask("b", 5, request_id="mine"))
        metadata = dict(await second.initial_metadata())
        assert (metadata["x-request-id"], len(metadata["x-resume-token"])) == ("mine", 32)
        assert server.scheduler.num_waiting == 1
        second.cancel()  # as if its connection were lost right after the acceptance
        first.cancel()
        resumed = stub.ResumeStream(pb.ResumeStreamRequest(resume_token=metadata["x-resume-token"]))
        assert "".join([part.text async for part in resumed]) == "cdefg"


async def test_engine_absent_is_unavailable_and_engine_death_is_a_pause(folder: Path) -> None:
    async with running(folder, start_engine=False, administrator=True) as server:
        calls = (lambda: server.inference.Generate(ask()), lambda: server.inference.GetLoad(model_pb2.GetLoadRequest()),
                 lambda: server.inference.GetModelInfo(model_pb2.GetModelInfoRequest()),
                 lambda: server.admin.FlushPrefixCache(admin_service_pb2.FlushPrefixCacheRequest()))
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as early:
                await call()
            assert (early.value.code(), early.value.details()) == (grpc.StatusCode.UNAVAILABLE, "the model is loading")
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in rpc_status.from_call(early.value).details)
        assert retry.retry_delay.ToMilliseconds() == 1000

        server.engine.start()
        await until(lambda: server.frontend._engine.state == "ready")
        server.engine.delay = 0.005
        call = server.inference.StreamGenerate(ask("a", 60, return_token_ids=True))
        first = await call.read()
        whole_call = server.inference.Generate(ask("a", 60))
        await until(lambda: server.engine.live == 2)
        await server.engine.die()
        with pytest.raises(grpc.aio.AioRpcError, match="restarting"):
            await server.inference.Generate(ask())
        server.engine.epoch = 2
        server.engine.start()
        parts = [first]
        while not parts[-1].HasField("finish"):
            parts.append(await call.read())
        text, _, finish = joined(parts)
        assert text == (await whole_call).text == ("bcdefghijklmnopqrstuvwxyza" * 3)[:60]
        assert finish.usage.generated_tokens == 60


async def test_prompt_whose_size_exceeds_the_context_is_refused_before_it_is_prepared(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds, original = set(), Preparation.run

    def run(self: Preparation, owner: str, kind: Kind, *args: Any) -> Any:
        kinds.add(kind)
        return original(self, owner, kind, *args)

    monkeypatch.setattr(Preparation, "run", run)
    async with running(folder) as server:
        context = server.engine.info.max_model_len
        text = "a" * (1 << 20)
        for call, message, error in [
            (server.inference.Generate, ask(text), "text: 1048576 bytes of text cannot fit"),
            (server.inference.Generate, ask([1] * 4000), "token_ids: 4000 tokens of prompt are too many; "
                                                         f"max_model_len {context} "),
            (server.inference.Tokenize, tokenize_pb2.TokenizeRequest(text=text),
             "text: 1048576 bytes of text cannot fit"),
        ]:
            with pytest.raises(grpc.aio.AioRpcError, match=error) as refused:
                await call(message)
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert kinds == {"parse"}


async def test_bug_is_internal_with_logged_id(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(folder) as server:
        server.frontend._generation.folder.tokenizer.encode = None  # type: ignore[union-attr, method-assign, assignment]
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await server.inference.Generate(ask("secret"))
        assert failed.value.code() == grpc.StatusCode.INTERNAL
        details = failed.value.details()
        assert details
        assert details.startswith("internal error, id ")
        record = next(r for r in caplog.records if r.message == "internal error")
        assert record.fields["error_id"] == details.rsplit(" ", 1)[1]  # type: ignore[attr-defined]
        assert record.fields["exception_type"] == "TypeError"  # type: ignore[attr-defined]
        assert "secret" not in caplog.text
        assert (await server.inference.Generate(ask([0], 1, return_token_ids=True))).token_ids == [1]


@pytest.mark.slow
@pytest.mark.parametrize("log_prompts", [False, True])
async def test_request_has_one_log_line(chat_folder: Path, caplog: pytest.LogCaptureFixture, log_prompts: bool) -> None:
    caplog.set_level(logging.INFO, "npuserve")
    async with running(chat_folder, log_prompts=log_prompts) as server:
        await server.inference.Generate(ask("secret", 4, request_id="one"))
        await stream(server, ask([0], 4, request_id="two", stop=["c"]))
        with pytest.raises(grpc.aio.AioRpcError):
            await server.inference.Generate(ask(request_id="three", top_p=2))
        chat = prompt_pb2.Chat(messages=[prompt_pb2.Message(role="user", content="hidden")])
        await server.inference.Generate(pb.GenerateRequest(request_id="four", chat=chat))
    lines = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
    assert [(line["id"], line["rpc"], line["code"]) for line in lines] == [
        ("one", "Generate", "OK"), ("two", "StreamGenerate", "OK"), ("three", "Generate", "INVALID_ARGUMENT"),
        ("four", "Generate", "OK")]
    assert (lines[0]["reason"], lines[0]["prompt_tokens"], lines[0]["cached_tokens"]) == ("length", 6, 3)
    assert (lines[1]["reason"], lines[1]["generated_tokens"]) == ("stop_string", 2)
    assert 0 < lines[0]["ttft"] <= lines[0]["e2e"] <= lines[0]["seconds"]
    assert "sampling.top_p" in lines[2]["error"]
    assert lines[0].get("prompt") == ("secret" if log_prompts else None)
    assert lines[1].get("prompt") == ("[0]" if log_prompts else None)
    assert ("hidden" in str(lines[3])) == log_prompts


async def test_request_updates_metrics(folder: Path) -> None:
    names = {name: {} for name in ("time_to_first_token_seconds_count", "inter_token_latency_seconds_count",
                                   "time_per_output_token_seconds_count", "e2e_request_latency_seconds_count")}
    names |= {"request_finish_total": {"reason": "length"}, "requests_total": {"rpc": "Generate", "code": "OK"}}
    before = {name: metric(name, **labels) for name, labels in names.items()}
    async with running(folder) as server:
        await server.inference.Generate(ask("a", 5))
        await server.inference.Generate(ask("a", 1))
    grown = {name: metric(name, **labels) - before[name] for name, labels in names.items()}
    assert list(grown.values()) == [2, 4, 1, 2, 2, 2]


async def test_get_model_info_and_get_load(chat_folder: Path) -> None:
    async with running(chat_folder) as server:
        info = await server.inference.GetModelInfo(model_pb2.GetModelInfoRequest())
        assert (info.name, info.family) == ("counting", "CountingForCausalLM")
        assert (info.vocabulary_size, info.max_model_len) == (300, 64)
        assert (info.has_tokenizer, info.has_chat_template, list(info.eos_token_ids)) == (True, True, [EOS])
        assert (info.max_num_seqs, info.max_queue, info.kv_cache_tokens, info.parameters) == (4, 4, 1024, 7)
        assert (info.dtype, info.kv_cache_dtype) == ("float32", "float32")
        assert (info.quantization, info.backend) == ("none", "cpu")
        assert (info.data_type, info.kv_cache_data_type) == (model_pb2.DATA_TYPE_FLOAT32, model_pb2.DATA_TYPE_FLOAT32)
        assert (info.quantization_scheme, info.device_backend) == (
            model_pb2.QUANTIZATION_SCHEME_NONE, model_pb2.DEVICE_BACKEND_CPU)
        assert info.deterministic
        assert abs(info.start_time.ToSeconds() - time.time()) < 600
        await server.inference.Generate(ask("a", 2))
        load = await server.inference.GetLoad(model_pb2.GetLoadRequest())
        assert (load.tokens_per_second, load.free_kv_ratio, load.max_num_seqs, load.max_queue) == (5.0, 1.0, 4, 4)
        for name in ("counting", str(chat_folder)):
            assert (await server.inference.Generate(ask("a", 1, model=name))).text == "b"


@pytest.mark.parametrize(("table", "kind"), [
    (inference.DATA_TYPES, model_pb2.DataType), (inference.QUANTIZATION_SCHEMES, model_pb2.QuantizationScheme),
    (inference.DEVICE_BACKENDS, model_pb2.DeviceBackend)])
def test_model_info_enums_have_the_names_of_the_strings(table: dict[str, Any], kind: Any) -> None:
    assert {*table.values(), 0} == set(kind.values())
    for text, value in table.items():
        assert kind.Name(value).endswith("_" + text.upper().replace("-", "_"))


async def test_get_model_info_with_unknown_names_has_unspecified_enums(folder: Path) -> None:
    """A newer engine's names stay in the strings."""
    async with running(folder, start_engine=False) as server:
        server.engine.info = msgspec.structs.replace(
            server.engine.info, dtype="fp8", kv_cache_dtype="fp4", quantization="w1a1", backend="tpu")
        server.engine.start()
        await until(lambda: server.frontend._engine.state == "ready")
        info = await server.inference.GetModelInfo(model_pb2.GetModelInfoRequest())
    assert (info.data_type, info.kv_cache_data_type, info.quantization_scheme, info.device_backend) == (0, 0, 0, 0)
    assert (info.dtype, info.kv_cache_dtype, info.quantization, info.backend) == ("fp8", "fp4", "w1a1", "tpu")
