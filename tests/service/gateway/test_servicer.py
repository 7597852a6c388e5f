"""VllmEngine over a real gRPC server and a fake engine."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import sys
import time
import zipfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from tokenizers import Tokenizer, processors

import npuserve
from npuserve.npu.profile import ProfileSummary
from npuserve.service import metrics
from npuserve.service.ipc.messages import Cancel, FlushPrefixCache, Load, Submit
from npuserve.service.ipc.profile_messages import StartProfile
from tests.support.fake_engine import EOS, INFO, make_folder, until
from tests.support.front_end import Running, ask, running
from tests.support.pooling import embeds
from tests.support.vllm_engine import Answer, engine_stub, join, like_smg, vllm_request

NAME = "vllm.grpc.engine.VllmEngine"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "counting", temperature=0.5, top_k=7)


async def answer(server: Running, request: vllm.GenerateRequest) -> Answer:
    (found,) = join([message async for message in engine_stub(server.channel).Generate(request)]).values()
    return found


async def code_of(call: Any) -> grpc.StatusCode:
    """Return the status of a call; OK without an error."""
    try:
        await (call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else call)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def calls(server: Running) -> dict[str, Any]:
    """Start one call of each method; return them by name."""
    stub = engine_stub(server.channel)
    return {
        "Generate": stub.Generate(vllm_request("a", 1)), "Embed": stub.Embed(vllm.EmbedRequest()),
        "HealthCheck": stub.HealthCheck(vllm.HealthCheckRequest()), "Abort": stub.Abort(vllm.AbortRequest()),
        "GetModelInfo": stub.GetModelInfo(vllm.GetModelInfoRequest()),
        "GetServerInfo": stub.GetServerInfo(vllm.GetServerInfoRequest()),
        "GetLoads": stub.GetLoads(vllm.GetLoadsRequest()),
        "GetTokenizer": stub.GetTokenizer(common_pb2.GetTokenizerRequest()),
        "SubscribeKvEvents": stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()),
        "FlushCache": stub.FlushCache(common_pb2.FlushCacheRequest()),
        "StartProfile": stub.StartProfile(common_pb2.StartProfileRequest()),
        "StopProfile": stub.StopProfile(common_pb2.StopProfileRequest()),
    }


ADMINISTRATION = {"FlushCache", "StartProfile", "StopProfile"}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["ab", [0, 1]], ids=["text", "ids"])
async def test_generate_answers_text_and_ids(folder: Path, prompt: str | list[int], stream: bool) -> None:
    async with running(folder) as server:
        found = await answer(server, vllm_request(prompt, 4, stream=stream))
        assert found.token_ids == [2, 3, 4, 5]
        assert found.complete
        assert (found.reason, found.complete.prompt_tokens, found.complete.cached_tokens) == ("length", 2, 3)
        assert bool(found.chunks) == stream
        (submit,) = server.engine.got(Submit)
        assert (submit.request.service, submit.request.resume_token) == ("vllm", "")
        assert (submit.request.sampling.temperature, submit.request.sampling.top_k) == (0.5, 7)


async def test_generate_stops_at_a_stop_string_and_sends_it(folder: Path) -> None:
    async with running(folder) as server:
        server.engine.delay = 0.005
        for stream in (True, False):
            request = vllm_request("ab", 50, stop=["fg"], stream=stream, request_id=f"r{stream}")
            found = await answer(server, request)
            assert found.token_ids == [2, 3, 4, 5, 6]
            assert found.complete
            assert (found.reason, found.complete.matched_stop_str) == ("stop", "fg")
        assert [cancel.keep for cancel in server.engine.got(Cancel)] == [5, 5]


async def test_generate_sends_the_token_that_stopped_it(folder: Path) -> None:
    async with running(folder) as server:
        found = await answer(server, vllm_request("ab", 50, stop_token_ids=[6]))
        assert found.complete
        assert (found.token_ids, found.complete.matched_token_id) == ([2, 3, 4, 5, 6], 6)
        server.engine.script = [5, 297]
        found = await answer(server, like_smg([0, 1], max_tokens=50))
        assert found.complete
        assert (found.token_ids, found.reason) == ([5, 297], "stop")
        assert found.complete.WhichOneof("matched_stop") is None


async def test_generate_without_stop_strings_decodes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(folder) as server:
        found_folder = server.frontend._generation.folder
        assert found_folder
        assert found_folder.tokenizer
        for name in ("text_stream", "token_text"):
            monkeypatch.setattr(found_folder.tokenizer, name, None)
        found = await answer(server, vllm_request([0, 1], 4, stream=True, logprobs=2, prompt_logprobs=1))
        assert found.token_ids == [2, 3, 4, 5]
        assert [len(chunk.output_logprobs.top_logprobs) for chunk in found.chunks] == [
            len(chunk.token_ids) for chunk in found.chunks]
        assert list(found.chunks[0].input_logprobs.token_ids) == [0, 1]


async def test_generate_that_the_engine_refuses_has_no_initial_metadata(folder: Path) -> None:
    """Else smg neither sees the status nor retries."""
    async with running(folder) as server:
        server.engine.refuse = ("QueueFull", "queue full", 1.5)
        call = engine_stub(server.channel).Generate(vllm_request("a", stream=True))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "x-request-id" not in dict(await call.initial_metadata())
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in rpc_status.from_call(refused.value).details)
        assert retry.retry_delay.ToMilliseconds() == 1500


async def test_generate_initial_metadata_follow_the_acceptance(folder: Path) -> None:
    async with running(folder) as server:
        server.engine.hold.clear()
        call = engine_stub(server.channel).Generate(vllm_request("a", 2, request_id="mine"))
        assert dict(await call.initial_metadata()) == {"x-request-id": "mine"}
        server.engine.hold.set()
        assert list((await call.read()).complete.output_ids) == [1, 2]


async def test_generate_of_a_client_that_leaves_is_cancelled(folder: Path) -> None:
    async with running(folder) as server:
        server.engine.delay = 0.005
        call = engine_stub(server.channel).Generate(vllm_request("a", 60, stream=True))
        await call.read()
        call.cancel()
        await until(lambda: server.engine.live == 0)
        assert [cancel.keep for cancel in server.engine.got(Cancel)] == [None]


async def test_generate_with_a_live_id_is_refused_within_the_service(folder: Path) -> None:
    """InferenceService has ids of its own."""
    async with running(folder) as server:
        server.engine.delay = 0.01
        ours = server.inference.Generate(ask("a", 60, request_id="x"))
        theirs = engine_stub(server.channel).Generate(vllm_request("a", 60, request_id="x"))
        await until(lambda: server.engine.live == 2)
        assert {submit.request.service for submit in server.engine.got(Submit)} == {"", "vllm"}
        ours.cancel()
        theirs.cancel()
        await until(lambda: server.engine.live == 0)


async def test_generate_counts_with_names_of_its_own(folder: Path) -> None:
    def count(rpc: str, code: str) -> float:
        return metrics.requests_total.labels(rpc, code)._value.get()  # type: ignore[no-any-return]

    async with running(folder) as server:
        before = {rpc: count(rpc, "OK") for rpc in ("Generate", "vllm.Generate")}
        refused = count("vllm.Generate", "INVALID_ARGUMENT")
        await answer(server, vllm_request("a", 1))
        assert await code_of(engine_stub(server.channel).Generate(vllm_request("a", 0))) != grpc.StatusCode.OK
        assert await code_of(server.channel.unary_stream(f"/{NAME}/Generate")(b"\xff")) != grpc.StatusCode.OK
        assert {rpc: count(rpc, "OK") - before[rpc] for rpc in before} == {"Generate": 0, "vllm.Generate": 1}
        assert count("vllm.Generate", "INVALID_ARGUMENT") == refused + 2


async def test_refused_request_is_logged_with_its_id(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "npuserve")
    async with running(folder) as server:
        request = vllm_request("a", request_id="mine", logprobs=-1)
        assert await code_of(engine_stub(server.channel).Generate(request)) is grpc.StatusCode.INVALID_ARGUMENT
    (line,) = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
    assert (line["rpc"], line["id"], line["client"]) == ("vllm.Generate", "mine", "ipv4:127.0.0.1")
    assert line["error"] == "InvalidField: sampling_params.logprobs: must be in [0, 20], got -1"


async def test_every_method_needs_a_key_where_keys_are_set(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("")
    async with running(folder, api_keys=str(tmp_path / "keys")) as server:
        found = {name: await code_of(call) for name, call in calls(server).items()}
    assert found == dict.fromkeys(found, grpc.StatusCode.UNAUTHENTICATED)


async def test_administration_needs_the_admin_right(folder: Path) -> None:
    async with running(folder) as server:
        found = {name: await code_of(call) for name, call in calls(server).items()}
        with pytest.raises(grpc.aio.AioRpcError, match="FlushCache of VllmEngine needs an API key with the"):
            await engine_stub(server.channel).FlushCache(common_pb2.FlushCacheRequest())
        assert server.engine.got(FlushPrefixCache) == []
    denied = {name for name, code in found.items() if code is grpc.StatusCode.PERMISSION_DENIED}
    assert denied == ADMINISTRATION
    async with running(folder, administrator=True) as server:
        found = {name: await code_of(call) for name, call in calls(server).items()}
    assert found["Embed"] is grpc.StatusCode.INVALID_ARGUMENT  # it has no ids
    assert found["FlushCache"] is found["Generate"] is found["HealthCheck"] is grpc.StatusCode.OK


async def test_profile_calls_take_steps_and_a_name(folder: Path, tmp_path: Path) -> None:
    """Fields that would show shapes, stacks or a later start are refused, and paths too."""
    async with running(folder, administrator=True, profile_dir=str(tmp_path)) as server:
        stub = engine_stub(server.channel)
        for request in (common_pb2.StartProfileRequest(num_steps=5, output_dir="mine", activities=["CPU", "GPU"]),
                        common_pb2.StartProfileRequest()):
            assert (await stub.StartProfile(request)).success
        sent = [(message.name, message.steps) for message in server.engine.got(StartProfile)]
        assert sent == [("mine", 5), ("", 1000)]
        for field in ("start_step", "with_stack", "record_shapes", "profile_by_stage"):
            request = common_pb2.StartProfileRequest(**{field: 1})
            assert await code_of(stub.StartProfile(request)) is grpc.StatusCode.UNIMPLEMENTED
        for fields in ({"output_dir": "../x"}, {"num_steps": 0}, {"num_steps": 1001}, {"num_steps": -1}):
            request = common_pb2.StartProfileRequest(**fields)
            assert await code_of(stub.StartProfile(request)) is grpc.StatusCode.INVALID_ARGUMENT
        server.engine.profile = ProfileSummary("mine", "mine.trace.json", 7, 3, 2, 1.5, 0.5, "steps", True, "cpu", [])
        stopped = await stub.StopProfile(common_pb2.StopProfileRequest())
        assert (stopped.success, stopped.message) == (True, "mine.trace.json: 3 steps")
    async with running(folder, administrator=True) as server:
        stub = engine_stub(server.channel)
        assert await code_of(stub.StartProfile(common_pb2.StartProfileRequest())) is grpc.StatusCode.FAILED_PRECONDITION


async def test_flush_cache_waits_for_running_requests(folder: Path) -> None:
    async with running(folder, administrator=True) as server:
        stub = engine_stub(server.channel)
        flushed = await stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=600))
        assert (flushed.success, flushed.message) == (True, "11 blocks freed")
        client = server.frontend._engine
        client._last_load = Load(running=1, waiting=1, paused=1)
        flushed = await stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=0.1))
        assert (flushed.success, flushed.message) == (
            False, "11 blocks freed; the blocks of 3 requests in progress stay")
        call = asyncio.ensure_future(stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=60)))
        await asyncio.sleep(0.1)
        assert not call.done()
        client._last_load = Load()
        assert (await call).success
        for seconds in (-1.0, 601.0, float("nan")):
            with pytest.raises(grpc.aio.AioRpcError, match=r"timeout_s: must be in \[0, 600\] seconds"):
                await stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=seconds))


async def test_health_check_follows_the_state_of_the_server(folder: Path) -> None:
    """smg registers a worker that answers, for good as a model "unknown" if GetModelInfo is then UNAVAILABLE."""
    async with running(folder, start_engine=False) as server:
        stub = engine_stub(server.channel)

        async def health() -> tuple[Any, Any]:
            try:
                response = await stub.HealthCheck(vllm.HealthCheckRequest())
            except grpc.aio.AioRpcError as error:
                return error.code(), error.details()
            return response.healthy, response.message

        client, generation = server.frontend._engine, server.frontend._generation
        assert await health() == (grpc.StatusCode.UNAVAILABLE, "the model is loading")
        server.engine.start()
        await until(lambda: client.state == "ready")
        assert await health() == (True, "ready")
        client.state = "stalled"
        assert await health() == (False, "the engine does not answer")
        loaded, generation.folder = generation.folder, None
        assert await health() == (grpc.StatusCode.UNAVAILABLE, "the tokenizer is loading")
        generation.folder, generation.is_draining = loaded, True
        assert (await health())[0] == grpc.StatusCode.UNAVAILABLE


async def test_generate_in_a_drain_is_unavailable_at_once(folder: Path) -> None:
    async with running(folder) as server:
        server.frontend._generation.is_draining = True
        began = time.monotonic()
        for request in (vllm_request("a"), vllm_request("a", logprobs=-1), vllm.GenerateRequest()):
            assert await code_of(engine_stub(server.channel).Generate(request)) is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - began < 5
        assert server.engine.got(Submit) == []
        server.frontend._generation.is_draining = False


async def test_get_model_info(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(
        {**config, "model_type": "counting", "pad_token_id": 298, "bos_token_id": [299]}))
    async with running(folder, served_name="mine") as server:
        found = await engine_stub(server.channel).GetModelInfo(vllm.GetModelInfoRequest())
    assert found == vllm.GetModelInfoResponse(
        model_path=str(folder), tokenizer_path=str(folder), is_generation=True, max_context_length=64,
        max_req_input_len=63, vocab_size=300, served_model_name="mine", model_type="counting",
        architectures=["CountingForCausalLM"], eos_token_ids=[297], pad_token_id=298, bos_token_id=299,
        default_sampling_params_json='{"temperature":0.5,"top_k":7}')


async def test_get_model_info_without_defaults_and_tokenizer(tmp_path: Path) -> None:
    """smg takes the tokenizer from model_path then, which is never empty."""
    async with running(make_folder(tmp_path / "m", tokenizer=False)) as server:
        found = await engine_stub(server.channel).GetModelInfo(vllm.GetModelInfoRequest())
    assert (found.model_path, found.tokenizer_path) == (str(tmp_path / "m"), "")
    assert (found.default_sampling_params_json, found.pad_token_id, found.model_type) == ("", 0, "")


async def test_get_server_info(folder: Path) -> None:
    async with running(folder, block_size=32) as server:
        stub = engine_stub(server.channel)
        before = await stub.GetServerInfo(vllm.GetServerInfoRequest())
        assert (before.last_receive_timestamp, before.active_requests) == (0, 0)
        await answer(server, vllm_request("a", 1))
        server.frontend._engine._last_load = Load(running=2, waiting=3)
        found = await stub.GetServerInfo(vllm.GetServerInfoRequest())
    assert (found.active_requests, found.server_type, found.data_parallel_size) == (5, "npuserve", 1)
    assert found.block_size == 32
    assert (found.max_num_seqs, found.kv_cache_dtype, found.model_dtype) == (4, "float32", "torch.float32")
    assert found.constrained_decoding_start == "first_token"
    assert found.uptime_seconds > before.uptime_seconds > 0
    assert abs(found.last_receive_timestamp - time.time()) < 60


async def test_get_loads(folder: Path) -> None:
    """Blocks with reusable prefixes alone are free in free_kv_ratio, and in token_usage."""
    async with running(folder) as server:
        stub = engine_stub(server.channel)
        server.engine.hold.clear()
        call = stub.Generate(vllm_request([1, 2, 3], 2))
        await call.initial_metadata()
        server.frontend._engine._last_load = Load(running=1, waiting=2, free_kv_ratio=0.75, tokens_per_second=12.5)
        found = await stub.GetLoads(vllm.GetLoadsRequest(include=["core"]))
        assert abs((datetime.fromisoformat(found.timestamp) - datetime.now(timezone.utc)).total_seconds()) < 60
        assert (found.version, found.dp_rank_count) == (npuserve.__version__, 1)
        assert list(found.loads) == [vllm.SchedulerLoad(
            num_running_reqs=1, num_waiting_reqs=2, num_total_reqs=3, num_used_tokens=256, max_total_num_tokens=1024,
            token_usage=0.25, gen_throughput=12.5, utilization=0.25, max_running_requests=4,
            num_waiting_uncached_tokens=3)]
        assert len((await stub.GetLoads(vllm.GetLoadsRequest(dp_rank=0))).loads) == 1
        assert len((await stub.GetLoads(vllm.GetLoadsRequest(dp_rank=1))).loads) == 0
        server.engine.hold.set()
        await call.read()
        assert (await stub.GetLoads(vllm.GetLoadsRequest())).loads[0].num_waiting_uncached_tokens == 0
    assert INFO.max_num_seqs == 4


async def test_get_tokenizer_sends_the_archive(folder: Path) -> None:
    async with running(folder) as server:
        stub = engine_stub(server.channel)
        chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        with zipfile.ZipFile(io.BytesIO(b"".join(chunk.data for chunk in chunks))) as archive:
            assert archive.read("tokenizer.json") == (folder / "tokenizer.json").read_bytes()
        assert chunks[-1].sha256
        (folder / "x.jinja").symlink_to("/etc/passwd")
        assert await code_of(stub.GetTokenizer(common_pb2.GetTokenizerRequest())) is (
            grpc.StatusCode.FAILED_PRECONDITION)


async def test_get_tokenizer_of_a_model_without_one_is_refused(tmp_path: Path) -> None:
    async with running(make_folder(tmp_path / "m", tokenizer=False)) as server:
        call = engine_stub(server.channel).GetTokenizer(common_pb2.GetTokenizerRequest())
        assert await code_of(call) is grpc.StatusCode.FAILED_PRECONDITION


async def test_health_service_knows_the_service(folder: Path) -> None:
    async with running(folder) as server:
        request = health_pb2.HealthCheckRequest(service=NAME)
        found = await health_pb2_grpc.HealthStub(server.channel).Check(request)
        assert found.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("fault", ["absent", "unusable"])
async def test_without_usable_stubs_the_service_is_unknown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """Other services are served. Only unusable stubs are logged."""
    if fault == "absent":
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "smg_grpc_proto" else find(name))
    else:
        monkeypatch.setitem(sys.modules, "npuserve.service.gateway.servicer", None)
    async with running(folder) as server:
        found = {name: await code_of(call) for name, call in calls(server).items()}
        assert found == dict.fromkeys(found, grpc.StatusCode.UNIMPLEMENTED)
        assert (await server.inference.Generate(ask("ab", 3))).text == "cde"
        check = health_pb2_grpc.HealthStub(server.channel).Check(health_pb2.HealthCheckRequest(service=NAME))
        assert await code_of(check) is grpc.StatusCode.NOT_FOUND
    warned = [record for record in caplog.records if "VllmEngine is off" in record.getMessage()]
    assert len(warned) == (fault == "unusable")


async def test_embed_adds_the_special_tokens_that_a_gateway_leaves_out(tmp_path: Path) -> None:
    folder = embeds(make_folder(tmp_path / "embedder"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s1> $A <eos>", special_tokens=[("<s1>", 298), ("<eos>", EOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    async with running(folder) as server:
        server.engine.info = msgspec.structs.replace(INFO, task="embed", embedding_dimension=4)
        await server.engine.die()
        server.engine.start()
        await until(lambda: server.frontend._engine.model_info == server.engine.info)
        stub = engine_stub(server.channel)
        for ids in ([0, 1], [298, 0, 1], [298, 0, 1, EOS]):
            answer = await stub.Embed(vllm.EmbedRequest(request_id="r" * 300, tokenized={"input_ids": ids}))
            assert list(answer.embedding) == [298, 0, 1, EOS]  # the fake engine's embedding is the ids
            assert (answer.prompt_tokens, answer.embedding_dim) == (4, 4)
        with pytest.raises(grpc.aio.AioRpcError, match=r"tokenized.input_ids\[0\]: token id must be in \[0, 299\]"):
            await stub.Embed(vllm.EmbedRequest(tokenized={"input_ids": [300]}))
        with pytest.raises(grpc.aio.AioRpcError, match="the served model 'embedder' is an embedding model; call Embed"):
            await answer_of(stub.Generate(vllm_request("a", 1)))
        info = await stub.GetModelInfo(vllm.GetModelInfoRequest())
        assert (info.is_generation, info.max_req_input_len) == (False, 64)
        assert {submit.request.service for submit in server.engine.got(Submit)} == {"vllm"}


async def answer_of(call: Any) -> list[Any]:
    return [message async for message in call]
