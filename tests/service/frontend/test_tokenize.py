"""Tokenize, Detokenize and the preparation of requests, over a real gRPC server and a fake engine that counts."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
from prometheus_client import REGISTRY

from npuserve.service.ipc.messages import Submit
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import model_pb2, prompt_pb2, tokenize_pb2
from tests.support.fake_engine import EOS, INFO, until
from tests.support.front_end import running


def preparing() -> float:
    """Return the metric npuserve_requests_preparing."""
    return REGISTRY.get_sample_value("npuserve_requests_preparing") or 0.0


async def test_tokenize_and_detokenize(chat_folder: Path) -> None:
    async with running(chat_folder) as server:
        ids = (await server.inference.Tokenize(tokenize_pb2.TokenizeRequest(text="ab<eos>"))).token_ids
        assert list(ids) == [0, 1, EOS]
        for skip, text in ((False, "ab<eos>"), (True, "ab")):
            back = tokenize_pb2.DetokenizeRequest(token_ids=ids, skip_special_tokens=skip)
            assert (await server.inference.Detokenize(back)).text == text
        chat = prompt_pb2.Chat(messages=[prompt_pb2.Message(role="user", content="b")])
        seen = await server.inference.Tokenize(tokenize_pb2.TokenizeRequest(chat=chat))
        assert seen.text == "user:b\na"
        await server.inference.Generate(pb.GenerateRequest(chat=chat))
        assert server.engine.got(Submit)[-1].request.prompt_ids == list(seen.token_ids)


async def test_tokenize_and_detokenize_of_another_model_are_not_found(folder: Path) -> None:
    async with running(folder) as server:
        for call in (server.inference.Tokenize(tokenize_pb2.TokenizeRequest(text="a", model="typo")),
                     server.inference.Detokenize(tokenize_pb2.DetokenizeRequest(token_ids=[1], model="typo"))):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call
            assert failed.value.code() == grpc.StatusCode.NOT_FOUND


async def test_calls_without_the_engine_are_served_while_it_restarts(folder: Path) -> None:
    async with running(folder) as server:
        await server.engine.die()
        await until(lambda: server.frontend._engine.state == "down")
        ids = (await server.inference.Tokenize(tokenize_pb2.TokenizeRequest(text="ab"))).token_ids
        assert (await server.inference.Detokenize(tokenize_pb2.DetokenizeRequest(token_ids=ids))).text == "ab"
        info = await server.inference.GetModelInfo(model_pb2.GetModelInfoRequest())
        assert info.max_model_len == INFO.max_model_len


async def test_get_load_counts_requests_in_preparation(
    chat_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = prompt_pb2.Chat(messages=[prompt_pb2.Message(role="user", content="b")])
    async with running(chat_folder) as server:
        served = server.frontend._generation.folder
        assert served
        assert served.tokenizer
        assert served.tokenizer.chat
        release = threading.Event()
        render = served.tokenizer.chat.render

        def wait(*arguments: Any) -> str:
            release.wait(60)
            return render(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(served.tokenizer.chat, "render", wait)
            calls: list[grpc.aio.Call] = [
                server.inference.Generate(pb.GenerateRequest(chat=chat)),
                server.inference.StreamGenerate(pb.GenerateRequest(chat=chat)),
                server.inference.Tokenize(tokenize_pb2.TokenizeRequest(chat=chat))]
            asking = [asyncio.ensure_future(call.code()) for call in calls]
            await until(lambda: preparing() == 3)
            load = await server.inference.GetLoad(model_pb2.GetLoadRequest())
            assert (load.preparing, load.running, load.waiting) == (3, 0, 0)
            release.set()
            await calls[1].read()
            calls[1].cancel()
            await asyncio.gather(*asking)
        assert (await server.inference.GetLoad(model_pb2.GetLoadRequest())).preparing == 0
        assert preparing() == 0


async def test_long_text_does_not_delay_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tokenized in a thread, with the same ids as its parts."""
    async with running(folder) as server:
        served, is_in_loop = server.frontend._generation.folder, {}
        assert served
        assert served.tokenizer
        encode = served.tokenizer.encode

        def record(text: str, **options: Any) -> list[int]:
            is_in_loop[len(text)] = threading.current_thread() is threading.main_thread()
            return encode(text, **options)

        monkeypatch.setattr(served.tokenizer, "encode", record)
        server.frontend._engine.model_info = msgspec.structs.replace(INFO, max_model_len=150_000)
        text = "abcé" * 30_000
        long, short = await asyncio.gather(
            server.inference.Tokenize(tokenize_pb2.TokenizeRequest(text=text)),
            server.inference.Tokenize(tokenize_pb2.TokenizeRequest(text=text[:100])))
        assert len(long.token_ids) == len(text.encode())
        assert long.token_ids[:125] == short.token_ids
        assert is_in_loop == {len(text): False, 100: True}
