"""bench/serving/completions.py: what it makes of a server's answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from types import ModuleType

import pytest

from tests.support.benches import bench

EVENTS = [
    {"choices": [{"text": "Once", "finish_reason": None}]},
    {"choices": [{"text": "", "finish_reason": None}]},
    {"choices": [{"text": " upon", "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3,
                              "prompt_tokens_details": {"cached_tokens": 4}}},
]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return bench("serving.completions")


def sse(*events: object) -> bytes:
    return b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"


def chunked(body: bytes, size: int) -> bytes:
    """Return a body in chunks of `size` bytes, whose ends are anywhere in its lines."""
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*parts, b""])


@contextlib.asynccontextmanager
async def answering(answer: bytes, seen: list[bytes]) -> AsyncIterator[str]:
    """Serve one answer to every request, and close the connection. seen: bodies of the requests."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        seen.append(await reader.readexactly(length))
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("answer", [
    HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(sse(*EVENTS), 7),
    HEAD + b"connection: close\r\n\r\n" + sse(*EVENTS),
], ids=["chunked", "until close"])
async def test_stream_reads_text_finish_and_usage(script: ModuleType, answer: bytes) -> None:
    seen: list[bytes] = []
    async with answering(answer, seen) as url:
        outcome = await script.stream(url, script.completion("m", "The dog", 3), time.perf_counter)
    assert json.loads(seen[0])["prompt"] == "The dog"
    assert (outcome.code, outcome.reason, outcome.detail) == ("OK", "length", "")
    assert (outcome.prompt_tokens, outcome.generated_tokens, outcome.cached_tokens) == (5, 3, 4)
    assert [count for _, count in outcome.arrivals] == [1, 1]
    assert outcome.due == outcome.sent <= outcome.arrivals[0][0] <= outcome.end


@pytest.mark.parametrize(("answer", "code", "detail"), [
    (b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nfull", "HTTP_429", "full"),
    (HEAD + b"\r\n" + sse({"error": {"message": "Stream error: gone"}}), "STREAM_ERROR", "Stream error: gone"),
    (HEAD + b"\r\n" + sse(*EVENTS[:2]), "NO_FINISH", ""),
    (HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(sse(*EVENTS), 50)[:-60], "CONNECTION", "IncompleteRead"),
    (b"", "CONNECTION", "IncompleteRead"),
], ids=["status", "error event", "no finish", "cut off", "no answer"])
async def test_stream_failure_is_the_code(script: ModuleType, answer: bytes, code: str, detail: str) -> None:
    async with answering(answer, []) as url:
        outcome = await script.stream(url, b"{}", time.perf_counter, due=0.0)
    assert outcome.code == code
    assert detail in outcome.detail
    assert outcome.due == 0.0


async def test_stream_without_server_is_a_connection_error(script: ModuleType) -> None:
    async with answering(b"", []) as url:
        pass
    assert (await script.stream(url, b"{}", time.perf_counter)).code == "CONNECTION"
