"""npuserve.client during kills of the server's processes: its user receives the whole text and no error."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from npuserve.client import AsyncClient, AsyncStream, Client, InvalidRequest, NotFound, channel
from npuserve.npu.storyteller import FOLDER
from tests.e2e.brittle import COUNTING
from tests.e2e.processes import processes
from tests.e2e.server import Server, serving
from tests.service.frontend.test_slow_reader import SMALL_WINDOW
from tests.support.fake_engine import until

PROMPTS = ("Once upon a time", "One day", "The cat", "Tim wanted", "从前有", "😀 é")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Server whose engine counts: the answers are the same before and after a kill, which clients do not see."""
    with serving(str(FOLDER), "--frontends", "2", "--debuggable", **COUNTING) as running:
        yield running


def connections(server: Server, pid: int) -> int:
    """Return the number of TCP connections to the server's port that a process has accepted."""
    port = f":{int(server.target.rpartition(':')[2]):04X}"
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for lines in tables for line in lines]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(port) and row[3] == "01"}  # established
    return sum(os.readlink(entry) in sockets for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink())


def options(number: int) -> dict[str, float]:
    """Return options of an answer of about 75 KiB, far more than a client buffers without reading."""
    return {
        "max_tokens": 200, "ignore_eos": True, "temperature": 0.8 * (number % 2), "seed": number, "logprobs": 20}


async def begin(client: AsyncClient, number: int) -> tuple[AsyncStream, str]:
    """Return a running stream and its first text. On a loaded machine a stream may end with its first message."""
    while True:
        stream = client.stream(PROMPTS[number], **options(number))
        first = await anext(stream)
        if stream.attempts.finish is None:
            return stream, first.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["engine", "frontend"])
async def test_streams_outlive_what_serves_them(server: Server, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients' windows are small, so that no answer ends before its front end is killed."""
    monkeypatch.setattr(channel, "OPTIONS", [*channel.OPTIONS, *SMALL_WINDOW])

    def whole() -> list[str]:
        with Client(server.target) as client:
            return [client.generate(prompt, **options(n)).text for n, prompt in enumerate(PROMPTS)]

    alone = await asyncio.to_thread(whole)
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(server.target)) for _ in PROMPTS]
        begun = await asyncio.gather(*(begin(client, n) for n, client in enumerate(clients)))
        streams = [stream for stream, _ in begun]
        # The kernel distributes connections at random: the front end with most has at least half of them.
        victim = max(processes(server, kind), key=lambda pid: connections(server, pid))
        os.kill(victim, signal.SIGKILL)

        async def rest(stream: AsyncStream) -> str:
            return "".join([delta.text async for delta in stream])

        ends = await asyncio.gather(*map(rest, streams))
    assert [text + end for (_, text), end in zip(begun, ends, strict=True)] == alone
    if kind == "frontend":
        assert max(stream.attempts.calls for stream in streams) > 1  # streams of the other front end are not disturbed


def test_a_client_leaves_and_another_goes_on(server: Server) -> None:
    with Client(server.target) as one, Client(server.target) as other:
        whole = one.generate("Once upon a time", max_tokens=100, temperature=0, ignore_eos=True)
        with one.stream("Once upon a time", max_tokens=100, temperature=0, ignore_eos=True) as stream:
            text = next(stream).text  # the number of messages depends on the load
        token, tokens = stream.attempts.resume_token, stream.attempts.tokens
        deltas = list(other.resume(token, tokens))
        assert text + "".join(delta.text for delta in deltas) == whole.text
        assert deltas[-1].finish.usage.generated_tokens == 100
        with pytest.raises(InvalidRequest, match="token_offset") as raised:
            list(other.resume(token, 101))
        assert raised.value.field == "token_offset"
        with pytest.raises(NotFound) as unknown:
            next(other.resume("of nobody", 0))
        assert unknown.value.reason == "STREAM_NOT_FOUND"


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
async def test_unknown_model_is_raised_after_one_call(server: Server, kind: str) -> None:
    calls = unknown_models(server)

    def ask() -> object:
        with Client(server.target, timeout=60) as client:
            return client.generate("x", model="typo")

    async with AsyncClient(server.target, timeout=60) as client:
        with pytest.raises(NotFound, match="typo") as raised:
            await (client.generate("x", model="typo") if kind == "asyncio" else asyncio.to_thread(ask))
    assert (raised.value.reason, raised.value.resume_token) == ("MODEL_NOT_FOUND", "")
    await until(lambda: unknown_models(server) > calls)
    assert unknown_models(server) == calls + 1


def unknown_models(server: Server) -> float:
    """Return the number of new streams refused with NOT_FOUND; calls may be counted after their end."""
    return server.metric("npuserve_requests_total", rpc="StreamGenerate", code="NOT_FOUND")


def test_the_unary_calls(server: Server) -> None:
    with Client(server.target) as client:
        assert client.model_info().family == "Qwen3ForCausalLM"
        ids = client.tokenize("Once upon a time").token_ids
        assert client.detokenize(ids).endswith("Once upon a time")
        answer = client.generate(list(ids), max_tokens=3, temperature=0, return_token_ids=True)
        assert len(answer.token_ids) == 3
        with pytest.raises(InvalidRequest, match=r"sampling\.top_p") as raised:
            client.generate("x", top_p=7.0)
        assert raised.value.field == "sampling.top_p"


def test_a_cancel_ends_the_request(server: Server) -> None:
    with Client(server.target) as client:
        stream = client.stream("Once upon a time", max_tokens=400, ignore_eos=True)
        next(stream)
        threading.Timer(0.01, stream.cancel).start()
        with pytest.raises(Exception, match="cancelled here"):
            list(stream)
