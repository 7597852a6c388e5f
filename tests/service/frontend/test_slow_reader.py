"""Slow readers over real gRPC: requests pause and continue, or are cancelled at the limit, without effect on others.

The client does not read, so that the server's writes stop at the flow-control window.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
import grpc.aio
import pytest

from npuserve.v1 import generate_pb2 as pb
from tests.support.fake_engine import until
from tests.support.front_end import ask
from tests.support.whole_server import whole_server

SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
TOKENS = 6000


def text(count: int) -> str:
    return "".join(chr(97 + (i + 1) % 26) for i in range(count))


async def read(call: grpc.aio.UnaryStreamCall) -> tuple[str, pb.Finish]:
    parts = [part async for part in call]
    return "".join(part.text for part in parts), parts[-1].finish


@pytest.mark.slow
async def test_slow_reader_pauses_and_loses_no_text(tmp_path: Path) -> None:
    async with whole_server(tmp_path, max_buffered_tokens=16) as server, server.client(*SMALL_WINDOW) as slow, \
            server.client() as quick:
        call = slow.StreamGenerate(ask("a", TOKENS))
        await until(lambda: server.scheduler.num_paused)
        for _ in range(3):
            answer, _ = await read(quick.StreamGenerate(ask("a", 500)))
            assert answer == text(500)
        assert server.scheduler.num_paused == 1
        stream = next(iter(server.frontend._engine._streams.values()))
        assert 16 < stream.buffered < 100
        assert len(stream.record.token_ids) < TOKENS
        answer, finish = await read(call)
        assert answer == text(TOKENS)
        assert finish.usage.generated_tokens == TOKENS


async def test_slow_reader_cancel_while_paused_ends_request(tmp_path: Path) -> None:
    async with whole_server(tmp_path, max_buffered_tokens=16) as server, server.client(*SMALL_WINDOW) as slow:
        call = slow.StreamGenerate(ask("a", TOKENS))
        await until(lambda: server.scheduler.num_paused)
        call.cancel()
        await until(lambda: not server.scheduler._sequences)


@pytest.mark.slow
async def test_slow_reader_at_limit_is_cancelled_and_resumable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "npuserve")
    async with whole_server(tmp_path, max_buffered_tokens=16, slow_reader_seconds=1.0) as server, \
            server.client(*SMALL_WINDOW) as slow, server.client() as quick:
        call = slow.StreamGenerate(ask("a", TOKENS))
        token = dict(await call.initial_metadata())["x-resume-token"]
        await until(lambda: server.scheduler.num_paused)
        await until(lambda: not server.scheduler._sequences)
        await until(lambda: codes(caplog))
        assert codes(caplog) == ["ABORTED"]
        assert server.frontend._engine._streams == {}
        parts: list[pb.StreamGenerateResponse] = []
        with pytest.raises(grpc.aio.AioRpcError) as ended:  # after the messages in flight
            await keep(call, parts)
        got, held = "".join(part.text for part in parts), sum(part.num_tokens for part in parts)
        assert ended.value.code() == grpc.StatusCode.ABORTED  # CANCELLED is the caller's
        assert ended.value.details() == "the client took nothing for 1 s (slow_reader_seconds)"
        assert got == text(held)
        rest, finish = await read(quick.ResumeStream(pb.ResumeStreamRequest(resume_token=token, token_offset=held)))
        assert got + rest == text(TOKENS)
        assert finish.usage.generated_tokens == TOKENS


@pytest.mark.slow
async def test_slow_readers_take_no_slots_or_blocks_from_others(tmp_path: Path) -> None:
    """There are as many slow readers as slots, and few more blocks than they hold."""
    async with whole_server(
        tmp_path, max_buffered_tokens=16, max_num_seqs=4, blocks=520
    ) as server, server.client(*SMALL_WINDOW) as slow, server.client() as quick:
        calls = [slow.StreamGenerate(ask("a", TOKENS)) for _ in range(4)]
        await until(lambda: server.scheduler.num_paused == 4)
        answers = await asyncio.gather(*(read(quick.StreamGenerate(ask("a", 600))) for _ in range(6)))
        assert [answer for answer, _ in answers] == [text(600)] * 6
        assert server.scheduler.num_paused == 4
        for call in calls[1:]:
            call.cancel()
        answer, _ = await read(calls[0])
        assert answer == text(TOKENS)


async def keep(call: grpc.aio.UnaryStreamCall, parts: list[pb.StreamGenerateResponse]) -> None:
    async for part in call:
        parts.append(part)


def codes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.fields["code"] for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]


@pytest.mark.slow
async def test_deadline_over_grpc_ends_answer_early(tmp_path: Path) -> None:
    """Steps are so long that an answer ends 0.4 s before its deadline: a stall of the machine cannot miss it."""
    async with whole_server(tmp_path, delay=0.2, max_num_seqs=1) as server, server.client() as stub:
        parts = [part async for part in stub.StreamGenerate(ask("a", TOKENS), timeout=3.0)]
        finish = parts[-1].finish
        assert finish.reason == pb.FINISH_REASON_DEADLINE
        assert finish.usage.generated_tokens > 5
        assert "".join(part.text for part in parts) == text(finish.usage.generated_tokens)
        unary = await stub.Generate(ask("a", TOKENS), timeout=1.5)
        assert unary.finish.reason == pb.FINISH_REASON_DEADLINE
        assert unary.text == text(unary.finish.usage.generated_tokens)
        long = stub.StreamGenerate(ask("a", TOKENS))
        await long.read()
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.Generate(ask("b", 5), timeout=0.3)
        assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        long.cancel()
        assert server.scheduler.deadlines.tokens_in_vain == 0


async def test_client_limit_over_grpc_is_resource_exhausted(tmp_path: Path) -> None:
    async with whole_server(tmp_path, delay=0.005, max_requests_per_client=2) as server, server.client() as stub:
        calls = [stub.StreamGenerate(ask("a", TOKENS)) for _ in range(2)]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(ask("b", 5))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_requests_per_client" in (refused.value.details() or "")
        for call in calls:
            call.cancel()
        await until(lambda: not server.scheduler._sequences)
        assert (await stub.Generate(ask("b", 5))).text == "cdefg"

