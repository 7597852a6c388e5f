"""Invalid requests through VllmEngine get the statuses of InferenceService, with VllmEngine's names of the fields."""

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio
import msgspec
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from npuserve.service.gateway.fields import client_path
from npuserve.service.ipc.messages import Submit
from tests.service.requests.test_malformed import INVALID, OTHERS
from tests.support.fake_engine import make_folder, until
from tests.support.front_end import running
from tests.support.vllm_engine import counterpart, engine_stub, join, vllm_request

NO_PROMPT = "input: one of tokenized and text is needed"
OTHER_LIMIT = {"long id"}
"""Cases that VllmEngine accepts."""
MIN_CASES = 45


async def error_of(call: grpc.aio.Call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await (call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else call)
    return failed.value


def violations(error: grpc.aio.AioRpcError) -> list[tuple[str, str]]:
    status, bad = rpc_status.from_call(error), error_details_pb2.BadRequest()
    assert status
    return [(one.field, one.description) for detail in status.details if detail.Unpack(bad)
            for one in bad.field_violations]


@pytest.mark.slow
async def test_invalid_requests_get_the_same_status_as_through_ours(tmp_path: Path) -> None:
    cases: dict[str, Message] = {name: message for name, (message, *_) in (INVALID | OTHERS).items()}
    compared = 0
    async with running(make_folder(tmp_path / "m")) as server:
        stub = engine_stub(server.channel)
        for name, message in cases.items():
            request = counterpart(message)
            if request is None or name in OTHER_LIMIT:
                continue
            for request.stream in (True, False):
                ours = await error_of(server.inference.Generate(message))
                theirs = await error_of(stub.Generate(request))
                assert theirs.code() == ours.code(), name
                expected = [(client_path(field), text.replace("1 to 128 printable", "1 to 512 printable"))
                            for field, text in violations(ours)]
                if message.WhichOneof("prompt") is None:
                    assert theirs.details() == NO_PROMPT
                    continue
                assert violations(theirs) == expected, name
                if expected:
                    assert theirs.details() == "; ".join(f"{field}: {text}" for field, text in expected)
                else:
                    field, _, text = ours.details().partition(": ")
                    assert theirs.details() == f"{client_path(field)}: {text}"
            compared += 1
            good = await stub.Generate(vllm_request("ab", 3)).read()
            assert list(good.complete.output_ids) == [2, 3, 4]
        assert len(server.engine.got(Submit)) == compared
    assert compared >= MIN_CASES


async def test_request_id_may_have_512_characters(tmp_path: Path) -> None:
    async with running(make_folder(tmp_path / "m")) as server:
        stub = engine_stub(server.channel)
        longest = "x" * 512
        call = stub.Generate(vllm_request("ab", 3, request_id=longest, stream=True))
        assert dict(await call.initial_metadata())["x-request-id"] == longest
        assert join([message async for message in call])[0].token_ids == [2, 3, 4]
        for bad in (longest + "x", "a b", "né"):
            error = await error_of(stub.Generate(vllm_request("ab", 3, request_id=bad)))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.details().startswith("request_id: must be 1 to 512 printable ASCII characters")


async def test_several_bad_fields_are_all_named(tmp_path: Path) -> None:
    request = vllm_request([1] * 3, 0, request_id="a b", top_p=2.0, stop=[""], temperature=-1.0, stop_token_ids=[300])
    async with running(make_folder(tmp_path / "m")) as server:
        error = await error_of(engine_stub(server.channel).Generate(request))
    assert [field for field, _ in violations(error)] == [
        "request_id", "sampling_params.stop_token_ids[0]", "sampling_params.stop[0]", "sampling_params.temperature",
        "sampling_params.top_p", "sampling_params.max_tokens"]


async def test_malformed_bytes_are_refused_by_the_clients_field(tmp_path: Path) -> None:
    async with running(make_folder(tmp_path / "m")) as server:
        raw = server.channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")
        stop = vllm.GenerateRequest(text="a", sampling_params=vllm.SamplingParams(stop=["aa"])).SerializeToString()
        for data, details in (
            (b"\xff\xff\xff", "malformed protobuf"), (b"\x1a\x02\xc3\x28", "text: must be valid UTF-8"),
            (stop.replace(b"aa", b"\xc3\x28"), "sampling_params.stop[0]: must be valid UTF-8"),
        ):
            error = await error_of(raw(data))
            assert (error.code(), details in error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True)


@pytest.mark.slow
async def test_oversized_messages_are_refused(tmp_path: Path) -> None:
    async with running(make_folder(tmp_path / "m")) as server:
        stub = engine_stub(server.channel)
        request = vllm.GenerateRequest(text="a")
        request.mm_inputs.mm_placeholders.extend([vllm.PlaceholderRange()] * 100_001)
        for message, details in (
            (vllm_request("a" * (2 << 20)), "max_message_size is "), (request, "more than 100000 fields and items"),
            (vllm.AbortRequest(request_ids=["x" * 20_000]), "max_message_size is 16384 bytes"),
        ):
            method = stub.Abort if isinstance(message, vllm.AbortRequest) else stub.Generate
            error = await error_of(method(message))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert details in error.details()


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_logprobs_beyond_the_clients_limit_are_refused(tmp_path: Path, stream: bool) -> None:
    """The prompt has one message, also in a stream. Without a stream a sample has one."""
    most = (4 << 20) // (9 + 7 * 21)
    async with running(make_folder(tmp_path / "m"), start_engine=False) as server:
        server.engine.info = msgspec.structs.replace(server.engine.info, max_model_len=2 * most)
        server.engine.start()
        await until(lambda: server.frontend._engine.state == "ready")
        generate = engine_stub(server.channel).Generate
        messages = [message async for message in generate(
            vllm_request([299] * 9000, 1, prompt_logprobs=20, stream=stream))]
        assert 1_000_000 < max(message.ByteSize() for message in messages) < 4 << 20
        prompt = vllm_request([1] * (most + 1), 1, prompt_logprobs=20, stream=stream)
        output = vllm_request([1], n=2, logprobs=20, min_tokens=most + 1, max_tokens=most + 1)
        streamed = generate(vllm_request([1], stream=True, logprobs=20, min_tokens=most + 1, max_tokens=most + 1))
        assert (await streamed.read()).chunk.output_logprobs.token_ids
        streamed.cancel()
        for name, request in (("prompt_logprobs", prompt), ("logprobs", output)):
            error = await error_of(generate(request))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.details().startswith(f"sampling_params.{name}: the answer must fit 4 MiB")
            assert f"at most {most} tokens" in error.details()
            assert error.details().endswith(str(most + 1))


async def test_model_without_a_tokenizer_accepts_ids_only(tmp_path: Path) -> None:
    code = grpc.StatusCode.FAILED_PRECONDITION
    async with running(make_folder(tmp_path / "m", tokenizer=False)) as server:
        stub = engine_stub(server.channel)
        for request, details in (
            (vllm_request("a"), "text: the served model has no tokenizer; send tokenized"),
            (vllm_request([1], stop=["a"]), "sampling_params.stop: the served model has no tokenizer"),
        ):
            error = await error_of(stub.Generate(request))
            assert (error.code(), details in error.details()) == (code, True)
        assert list((await stub.Generate(vllm_request([1], 3)).read()).complete.output_ids) == [2, 3, 4]
