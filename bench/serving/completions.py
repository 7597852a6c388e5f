"""Streamed calls of /v1/completions and /v1/chat/completions. Each call has its own connection, and costs less CPU than
an HTTP library."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.parse
from collections.abc import AsyncIterator, Callable
from typing import Any

from npuserve.cli.bench.load_generator import NO_FINISH, Outcome

CONNECTION, STREAM_ERROR, TIMEOUT = "CONNECTION", "STREAM_ERROR", "TIMEOUT"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_DETAIL = 300
READ_BYTES = 1 << 16


def completion(model: str, prompt: str, max_tokens: int) -> bytes:
    """Return the body of a greedy, streamed request for exactly `max_tokens` tokens."""
    return json.dumps({
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}}).encode()


def chat(model: str, prompt: str, max_tokens: int, **fields: Any) -> bytes:
    """Return the body of a streamed chat for exactly `max_tokens` tokens. fields: further ones of the body."""
    return json.dumps({
        "model": model, "messages": [{"role": "user", "content": prompt}], "max_completion_tokens": max_tokens,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, **fields}).encode()


async def stream(
    url: str, body: bytes, now: Callable[[], float], due: float | None = None, timeout: float = 300.0,
    path: str = COMPLETIONS,
) -> Outcome:
    """Send a request and read its answer to the end. Network errors become the outcome's code.

    url: address of the server, http://HOST:PORT.
    now: clock of the outcome's times.
    due: scheduled time; None for the time of sending. The request is sent once the connection is made.
    timeout: seconds for the whole call.
    path: COMPLETIONS or CHAT.

    The outcome's arrivals are the events with text, reasoning or a part of a tool call. Each counts as one token, since
    an event has no number of tokens.
    `generated_tokens` is from the usage. Codes are OK, HTTP_<status>, NO_FINISH, STREAM_ERROR, CONNECTION, TIMEOUT.
    """
    outcome = Outcome(now() if due is None else due, now())
    try:
        await asyncio.wait_for(_call(url, path, body, now, outcome, due is None), timeout)
    except asyncio.TimeoutError:
        outcome.code = TIMEOUT
    except (OSError, EOFError, ValueError) as error:  # asyncio.IncompleteReadError is an EOFError
        outcome.code, outcome.detail = CONNECTION, f"{type(error).__name__}: {error}"[:MAX_DETAIL]
    outcome.end = now()
    return outcome


async def _call(
    url: str, path: str, body: bytes, now: Callable[[], float], outcome: Outcome, is_due: bool
) -> None:
    parts = urllib.parse.urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        outcome.sent = now()
        outcome.due = outcome.sent if is_due else outcome.due
        writer.write((
            f"POST {path} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n").encode() + body)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        if (status := int(head.split(None, 2)[1])) != 200:
            detail = b"".join([part async for part in _parts(reader, head)])
            outcome.code, outcome.detail = f"HTTP_{status}", detail.decode(errors="replace")[:MAX_DETAIL]
            return
        async for event in _events(reader, head):
            _apply(outcome, now(), event)
        outcome.code = outcome.code or ("OK" if outcome.reason else NO_FINISH)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _parts(reader: asyncio.StreamReader, head: bytes) -> AsyncIterator[bytes]:
    """Yield the parts of a response's body as they arrive."""
    if b"transfer-encoding: chunked" not in head.lower():
        while part := await reader.read(READ_BYTES):
            yield part
        return
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _events(reader: asyncio.StreamReader, head: bytes) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of the server-sent events."""
    left = b""
    async for part in _parts(reader, head):
        *lines, left = (left + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                yield json.loads(data)


def _apply(outcome: Outcome, now: float, event: dict[str, Any]) -> None:
    if error := event.get("error"):
        outcome.code, outcome.detail = STREAM_ERROR, str(error)[:MAX_DETAIL]
        return
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {}
        if choice.get("text") or any(delta.get(part) for part in ("content", "reasoning_content", "tool_calls")):
            outcome.arrivals.append((now, 1))
        outcome.reason = choice.get("finish_reason") or outcome.reason
    if usage := event.get("usage"):
        outcome.prompt_tokens, outcome.generated_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
