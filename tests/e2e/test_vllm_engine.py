"""VllmEngine of a real server beside InferenceService: equal answers, aborts, drain, keys, tokenizer."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import tokenizers
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from npuserve.cli import main as cli
from npuserve.npu import storyteller
from npuserve.service.gateway.answer import FINISH_REASONS
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import model_pb2
from tests.e2e.brittle import COUNTING
from tests.e2e.processes import engine_of, until
from tests.e2e.server import Server, request, serving
from tests.support.vllm_engine import Answer, counterpart, engine_stub, join, vllm_request

LONG = "Once upon a time there was a little girl named Lily who liked to play with her red ball in the park. " * 3
ASKS = {
    "greedy": request("Once upon a time", 40),
    "greedy to the end": request("The end of the story is", 200),
    "seeded": request("Once upon a time", 40, temperature=0.9, seed=7, top_p=0.9, top_k=40),
    "ids": request([5, 6, 7, 8], 20, temperature=1.5, seed=1 << 30, min_p=0.01),
    "penalties": request(
        "Tom and", 40, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25,
        logit_bias={300: -50.0, 301: 5.0}),
    "stop string": request("Once upon a time", 200, stop=["zebra", ". "]),
    "stop string in a token": request("Once upon a time", 200, stop=["nce", "ll"], include_stop=True),
    "stop token": request("Once upon a time", 60, temperature=1.0, seed=3, stop_token_ids=list(range(200, 328))),
    "ignore_eos": request("The end", 300, ignore_eos=True, min_tokens=20),
    "logprobs": request("Once upon a time", 12, logprobs=3, prompt_logprobs=2),
    "logprobs of the tokens alone": request(
        "Once upon a time", 12, temperature=1.0, seed=5, logprobs=0, prompt_logprobs=0),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--dtype", "float32", "--frontends", "2", "--block-size", "16", "--max-num-seqs", "8") as running:
        yield running


@pytest.fixture(scope="module")
def ours(server: Server) -> dict[str, pb.GenerateResponse]:
    """Name -> answer of InferenceService to each of ASKS."""
    return {name: server.stub.Generate(ask, timeout=100) for name, ask in ASKS.items()}


@contextlib.contextmanager
def connection(target: str) -> Iterator[grpc.Channel]:
    """Yield a channel with a connection of its own, which any front end may have accepted."""
    with grpc.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


def answer(server: Server, ask: vllm.GenerateRequest) -> Answer:
    (found,) = join(engine_stub(server.channel).Generate(ask, timeout=100)).values()
    return found


def logprobs(positions: list[pb.PositionLogprobs], has_top: bool) -> tuple[object, ...]:
    """Return log-probabilities as VllmEngine has them: values, ids, and the most likely tokens of each position."""
    tops = [([one.logprob for one in p.top], [one.token_id for one in p.top]) for p in positions] if has_top else []
    return [p.chosen.logprob for p in positions], [p.chosen.token_id for p in positions], tops


def joined(parts: list[vllm.OutputLogProbs]) -> tuple[object, ...]:
    tops = [(list(top.values), list(top.token_ids)) for part in parts for top in part.top_logprobs]
    return ([value for part in parts for value in part.token_logprobs],
            [token for part in parts for token in part.token_ids], tops)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", ASKS)
def test_answers_equal_those_of_inference_service(
    server: Server, ours: dict[str, pb.GenerateResponse], name: str, stream: bool
) -> None:
    ask, expected = ASKS[name], ours[name]
    converted = counterpart(ask)
    assert converted is not None
    converted.stream = stream
    theirs = answer(server, converted)
    assert theirs.token_ids == list(expected.token_ids)
    assert theirs.complete
    assert theirs.reason == FINISH_REASONS[expected.finish.reason]
    assert theirs.complete.prompt_tokens == expected.finish.usage.prompt_tokens
    if expected.finish.reason == pb.FINISH_REASON_STOP_STRING:
        assert theirs.complete.matched_stop_str == expected.finish.matched_stop
    if expected.finish.reason == pb.FINISH_REASON_STOP_TOKEN:
        assert theirs.complete.matched_token_id == expected.finish.matched_stop_token_id
    if ask.output.HasField("logprobs"):
        parts = [chunk.output_logprobs for chunk in theirs.chunks] or [theirs.complete.output_logprobs]
        assert joined(parts) == logprobs(list(expected.logprobs), bool(ask.output.logprobs))
        prompt = theirs.chunks[0].input_logprobs if stream else theirs.complete.input_logprobs
        assert [one.value for one in prompt.token_logprobs] == [p.chosen.logprob for p in expected.prompt_logprobs]
        assert not prompt.token_logprobs[0].HasField("value")
        tops = [list(top.token_ids) for top in prompt.top_logprobs]
        most = [[one.token_id for one in p.top] for p in expected.prompt_logprobs]
        assert tops == (most if ask.output.prompt_logprobs else [])


def test_asks_cover_the_reasons(ours: dict[str, pb.GenerateResponse]) -> None:
    """The comparison above covers several finish reasons."""
    reasons = {answer.finish.reason for answer in ours.values()}
    assert reasons >= {pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP_STRING, pb.FINISH_REASON_STOP_TOKEN}


def test_cached_tokens_and_load_of_reusable_prefixes(server: Server) -> None:
    """Cached prefixes without a reader are no load."""
    first = answer(server, vllm_request(LONG, 4, temperature=0.0))
    second = answer(server, vllm_request(LONG, 4, temperature=0.0, stream=True))
    ours = server.stub.Generate(request(LONG, 4))
    assert first.token_ids == second.token_ids == list(ours.token_ids)
    assert second.complete
    assert second.complete.cached_tokens == ours.finish.usage.cached_tokens >= 16
    stub = engine_stub(server.channel)

    def usage() -> float:
        return float(stub.GetLoads(vllm.GetLoadsRequest()).loads[0].token_usage)

    until(lambda: usage() == 0, server)
    assert server.metric("npuserve_kv_cache_blocks", state="cached") > 0


def test_samples_equal_requests_with_their_seeds(server: Server) -> None:
    ask = vllm_request("Once upon a time", 30, temperature=1.0, seed=7, n=3, stream=True)
    found = join(engine_stub(server.channel).Generate(ask, timeout=100))
    alone = [answer(server, vllm_request("Once upon a time", 30, temperature=1.0, seed=7 + i)) for i in range(3)]
    assert [found[i].token_ids for i in range(3)] == [one.token_ids for one in alone]
    ask.stream = False
    whole = join(engine_stub(server.channel).Generate(ask, timeout=100))
    assert [whole[i].token_ids for i in range(3)] == [one.token_ids for one in alone]


def test_abort_in_mid_stream_through_any_connection(server: Server) -> None:
    """Both front ends accept connections; a request id may have 512 characters."""
    for number in range(6):
        name = f"{number}-" + "x" * 510
        call = engine_stub(server.channel).Generate(
            vllm_request("Once", 480, ignore_eos=True, stream=True, request_id=name), timeout=100)
        messages = [next(call)]
        with connection(server.target) as channel:
            engine_stub(channel).Abort(vllm.AbortRequest(request_ids=[name, "unknown"]), timeout=60)
        messages += call
        (found,) = join(messages).values()
        assert found.reason == "abort"
        assert len(found.token_ids) < 480


def test_client_that_leaves_ends_its_request(server: Server) -> None:
    stub = engine_stub(server.channel)
    call = stub.Generate(vllm_request("Once", 480, ignore_eos=True, stream=True), timeout=100)
    next(call)
    call.cancel()
    until(lambda: stub.GetServerInfo(vllm.GetServerInfoRequest()).active_requests == 0, server)
    assert server.metric("npuserve_requests_total", rpc="vllm.Generate", code="CANCELLED") >= 1


def test_get_model_info_describes_the_model_in_both_services(server: Server) -> None:
    theirs = engine_stub(server.channel).GetModelInfo(vllm.GetModelInfoRequest())
    starts = []
    for _ in range(6):
        with connection(server.target) as channel:
            info = type(server.stub)(channel).GetModelInfo(model_pb2.GetModelInfoRequest())
            starts.append(info.start_time.ToMilliseconds())
    assert (theirs.served_model_name, theirs.vocab_size) == (info.name, info.vocabulary_size)
    assert (theirs.max_context_length, list(theirs.eos_token_ids)) == (info.max_model_len, list(info.eos_token_ids))
    assert (theirs.model_path, theirs.model_type) == (str(storyteller.FOLDER), "qwen3")
    assert json.loads(theirs.default_sampling_params_json) == {"temperature": 1.0}
    assert info.deterministic
    assert (info.data_type, info.kv_cache_data_type) == (model_pb2.DATA_TYPE_FLOAT32, model_pb2.DATA_TYPE_FLOAT32)
    assert info.quantization_scheme == model_pb2.QUANTIZATION_SCHEME_NONE
    assert info.device_backend == model_pb2.DEVICE_BACKEND_CPU
    assert len(set(starts)) == 1, "the front ends do not agree"
    assert 0 < time.time() - starts[0] / 1000 < 600


def test_get_tokenizer_is_the_folder_and_loads(server: Server, tmp_path: Path) -> None:
    chunks = list(engine_stub(server.channel).GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=60))
    assert len(chunks) >= 1
    with zipfile.ZipFile(io.BytesIO(b"".join(chunk.data for chunk in chunks))) as archive:
        archive.extractall(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (storyteller.FOLDER / file.name).read_bytes()
    loaded = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = server.stub.Generate(request("Once upon a time", 30))
    assert loaded.decode(list(text.token_ids)) == text.text


@pytest.mark.full
def test_drain_answers_unavailable_at_once_and_ends_running_streams() -> None:
    with serving("--drain-seconds", "60", **COUNTING) as server:
        stub = engine_stub(server.channel)
        call = stub.Generate(vllm_request("Once", 400, ignore_eos=True, stream=True), timeout=100)
        messages = [next(call)]
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "draining" in server.log, server)
        for refuse in (lambda: stub.HealthCheck(vllm.HealthCheckRequest(), timeout=60),
                       lambda: next(stub.Generate(vllm_request("Once", 4), timeout=60))):
            with pytest.raises(grpc.RpcError, match="draining") as refused:
                refuse()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        messages += call
        (found,) = join(messages).values()
        assert (found.reason, len(found.token_ids)) == ("length", 400)
        assert server.process.wait(60) == 0


@pytest.mark.full
def test_queue_full_is_resource_exhausted_before_any_metadata() -> None:
    with serving("--max-num-seqs", "1", "--max-queue", "1", **COUNTING) as server:
        stub, held = engine_stub(server.channel), []
        for _ in range(2):
            held.append(stub.Generate(vllm_request("Once", 500, ignore_eos=True, stream=True), timeout=100))
            held[-1].initial_metadata()
        with pytest.raises(grpc.RpcError) as refused:
            next(stub.Generate(vllm_request("Once", 4, stream=True), timeout=60))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "x-request-id" not in dict(refused.value.initial_metadata())
        for call in held:
            call.cancel()


@pytest.mark.full
def test_keys_are_needed_by_every_method(tmp_path: Path) -> None:
    file, keys = tmp_path / "keys", {}
    for name, options in {"user": (), "root": ("--admin",)}.items():
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert cli.main(["keys", "add", str(file), name, *options]) == 0
        keys[name] = (("authorization", f"Bearer {out.getvalue().strip()}"),)
    with serving("--api-keys", str(file), **COUNTING) as server:
        stub = engine_stub(server.channel)

        def codes(metadata: tuple[tuple[str, str], ...] | None) -> dict[str, str]:
            calls = {
                "health": lambda: stub.HealthCheck(vllm.HealthCheckRequest(), metadata=metadata),
                "generate": lambda: next(stub.Generate(vllm_request("a", 1), metadata=metadata)),
                "flush": lambda: stub.FlushCache(common_pb2.FlushCacheRequest(), metadata=metadata)}
            found = {}
            for name, call in calls.items():
                try:
                    call()
                    found[name] = "OK"
                except grpc.RpcError as error:
                    found[name] = error.code().name
            return found

        assert set(codes(None).values()) == {"UNAUTHENTICATED"}
        assert codes(keys["user"]) == {"health": "OK", "generate": "OK", "flush": "PERMISSION_DENIED"}
        assert set(codes(keys["root"]).values()) == {"OK"}


@pytest.mark.full
def test_answers_survive_a_killed_engine(server: Server) -> None:
    """A gateway sees a pause, and the ids of an undisturbed run. By default through a gateway: gateway/test_workers.py.
    """
    ask = vllm_request("Once upon a time", 300, temperature=0.9, seed=11, ignore_eos=True, stream=True)
    undisturbed = answer(server, ask).token_ids
    messages = []
    for message in engine_stub(server.channel).Generate(ask, timeout=100):
        messages.append(message)
        if len(messages) == 20:
            os.kill(engine_of(server), signal.SIGKILL)
    (found,) = join(messages).values()
    assert found.token_ids == undisturbed
