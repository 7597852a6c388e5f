"""Resume tokens and error reasons over a real gRPC server and a fake engine that counts."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from pathlib import Path

import grpc
import grpc.aio
import msgspec
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from npuserve.service import errors
from npuserve.service.frontend import response_options
from npuserve.service.ipc.messages import Finish, Record, Resume, Submit, Timing
from npuserve.v1 import admin_service_pb2, inference_service_pb2_grpc
from npuserve.v1 import generate_pb2 as pb
from tests.client.counting import Proxy
from tests.service.frontend.test_response import joined
from tests.support.fake_engine import until
from tests.support.front_end import ask, running
from tests.support.whole_server import whole_server


async def test_resume_stream_continues_at_offset(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "npuserve")
    async with running(folder) as server:
        server.engine.delay = 0.002
        call = server.inference.StreamGenerate(ask("a", 60, request_id="mine", stop=["xy"], return_token_ids=True))
        metadata = dict(await call.initial_metadata())
        parts = [await call.read(), await call.read()]
        call.cancel()
        await until(lambda: server.engine.live == 0)
        (sent,) = server.engine.got(Submit)
        assert (sent.request.resume_token, len(metadata["x-resume-token"])) == (metadata["x-resume-token"], 32)
        kept = server.frontend._engine._records.find(metadata["x-resume-token"], "", time.monotonic())
        assert kept
        server.engine.records[metadata["x-resume-token"]] = kept
        held = parts[-1].offset + parts[-1].num_tokens
        again = server.inference.ResumeStream(
            pb.ResumeStreamRequest(resume_token=metadata["x-resume-token"], token_offset=held))
        assert dict(await again.initial_metadata()) == metadata
        text, ids, finish = joined(parts + [part async for part in again])
        assert (text, ids) == ("bcdefghijklmnopqrstuvw", list(range(1, 25)))
        assert (finish.reason, finish.matched_stop) == (pb.FINISH_REASON_STOP_STRING, "xy")
        (asked,) = server.engine.got(Resume)
        assert (asked.token, asked.token_offset) == (metadata["x-resume-token"], held)
        assert asked.owner == sent.request.owner == ""
        line = [record for record in caplog.records if record.message == "request"][-1].fields  # type: ignore[attr-defined]
        assert (line["rpc"], line["id"], line["prompt_tokens"], line["resumed_at"]) == ("ResumeStream", "mine", 1, held)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await server.inference.ResumeStream(pb.ResumeStreamRequest(resume_token="x")).read()
        assert failed.value.code() == grpc.StatusCode.NOT_FOUND


async def test_resume_beyond_the_stop_string(folder: Path) -> None:
    """The engine has computed more tokens than the answer has: it was not cut in time."""
    async with running(folder) as server:
        call = server.inference.StreamGenerate(ask("a", 60, stop=["xy"]))
        token = dict(await call.initial_metadata())["x-resume-token"]
        _, _, finish = joined([part async for part in call])
        assert (finish.matched_stop, finish.usage.generated_tokens) == ("xy", 24)
        (sent,) = server.engine.got(Submit)
        computed = Finish("length", 1, 0, 30, Timing(0.0, [], 0.0, 0.0, 0.0, 0.0))
        server.engine.records[token] = Record(sent.request, list(range(1, 31)), finish=computed)
        end = server.inference.ResumeStream(pb.ResumeStreamRequest(resume_token=token, token_offset=24))
        (last,) = [part async for part in end]
        assert (last.text, last.offset, last.finish.matched_stop) == ("", 24, "xy")
        for offset in (25, 30):
            beyond = server.inference.ResumeStream(pb.ResumeStreamRequest(resume_token=token, token_offset=offset))
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await beyond.read()
            assert failed.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert failed.value.details() == f"token_offset: must be in [0, 24], got {offset}"


async def test_resume_anonymous_stream_from_another_address(tmp_path: Path) -> None:
    """As after a change of networks, or behind a NAT with several addresses."""
    async with whole_server(tmp_path, delay=0.005) as server, server.client() as stub:
        call = stub.StreamGenerate(ask("a", 60))
        token = dict(await call.initial_metadata())["x-resume-token"]
        text = (await call.read()).text
        call.cancel()
        proxy = Proxy(int(server.target.rpartition(":")[2]), source="127.0.0.2")
        await proxy.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel:
            other = inference_service_pb2_grpc.InferenceServiceStub(channel)
            again = other.ResumeStream(pb.ResumeStreamRequest(resume_token=token, token_offset=len(text)))
            text += "".join([part.text async for part in again])
        proxy.close()
        assert text == "".join(chr(97 + (i + 1) % 26) for i in range(60))


async def test_resume_token_absent_without_resume_seconds(folder: Path) -> None:
    async with running(folder, resume_seconds=0) as server:
        call = server.inference.StreamGenerate(ask("a", 3))
        assert "x-resume-token" not in dict(await call.initial_metadata())
        assert len([part async for part in call]) >= 1
        unary = server.inference.Generate(ask("a", 3))
        assert "x-resume-token" not in dict(await unary.initial_metadata())
        assert [sent.request.resume_token for sent in server.engine.got(Submit)] == ["", ""]


async def test_resume_token_absent_if_the_record_may_be_too_large(folder: Path) -> None:
    async with running(folder, start_engine=False) as server:
        server.engine.info = msgspec.structs.replace(server.engine.info, max_model_len=30_000)
        server.engine.start()
        await until(lambda: server.frontend._engine.state == "ready")
        server.engine.hold.clear()
        for tokens, is_resumable in ((20_000, True), (29_000, False)):
            call = server.inference.StreamGenerate(ask("a", tokens, logprobs=20))
            assert ("x-resume-token" in dict(await call.initial_metadata())) == is_resumable
            call.cancel()


async def test_resume_that_fails_leaves_no_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with whole_server(tmp_path) as server, server.client() as stub:
        call = stub.StreamGenerate(ask("a", 5))
        token = dict(await call.initial_metadata())["x-resume-token"]
        assert "".join([part.text async for part in call]) == "bcdef"
        monkeypatch.setattr(response_options, "unpack", lambda request: 1 // 0)
        with pytest.raises(grpc.aio.AioRpcError, match="internal error"):
            await stub.ResumeStream(pb.ResumeStreamRequest(resume_token=token)).read()
        assert server.frontend._engine._streams == {}


def test_error_reasons_are_upper_snake_case_and_unique() -> None:
    kinds, found = [errors.ServeError], {}
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        assert re.fullmatch(r"[A-Z][A-Z0-9_]+[A-Z0-9]", kind.reason())
        found[kind.__name__] = kind.reason()
    assert len(set(found.values())) == len(found)
    assert found["InvalidField"] == "INVALID_FIELD"
    assert found["EngineKiller"] == "ENGINE_KILLER"


async def test_not_found_errors_have_distinct_reasons(folder: Path) -> None:
    async with running(folder, administrator=True) as server:
        stub = server.inference
        calls = {
            "MODEL_NOT_FOUND": stub.Generate(ask(model="typo")),
            "REQUEST_NOT_FOUND": server.admin.Abort(admin_service_pb2.AbortRequest(request_id="nobody")),
            "STREAM_NOT_FOUND": stub.ResumeStream(pb.ResumeStreamRequest(resume_token="x")).read(),
        }
        for reason, call in calls.items():
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call
            assert failed.value.code() == grpc.StatusCode.NOT_FOUND
            info = error_details_pb2.ErrorInfo()
            assert rpc_status.from_call(failed.value).details[0].Unpack(info)
            assert (info.reason, info.domain) == (reason, "npuserve.dev")


async def test_drain_that_cuts_off_several_streams_logs_each(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each stream has an error of its own: the frames of its call are cleared, which must end no other call."""
    caplog.set_level(logging.INFO)
    async with running(folder) as server:
        server.engine.hold.clear()
        calls = [server.inference.StreamGenerate(ask("a", 5)) for _ in range(3)]
        await until(lambda: server.engine.live == 3)
        await server.frontend.stop(0.0)
        server.frontend.stop = lambda *_: asyncio.sleep(0)  # type: ignore[method-assign,assignment,return-value]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                async for _ in call:
                    pass
            assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
    lines = [record for record in caplog.records if record.message == "request"]
    assert [line.fields["rpc"] for line in lines] == ["StreamGenerate"] * 3  # type: ignore[attr-defined]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
