"""Server of resumable streams with a known answer: the text of token n is TEXT[n].

An answer has len(TEXT) tokens, in messages of 1 to 4 tokens. `Proxy` breaks the server's connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable
from typing import TypeAlias

import grpc
import grpc.aio
from grpc_status import rpc_status

from npuserve.service import errors
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc, model_pb2

TEXT = ["one ", "two ", "三", "four ", "fünf ", "", "七", " eight", "nine", "\n", "🎉", "twelve ", "thirteen"]
WHOLE = "".join(TEXT)
SIZES = (1, 3, 2, 1, 4)
"""Tokens of successive messages; the sequence repeats."""

Failure: TypeAlias = "errors.ServeError | grpc.StatusCode"


def parts(begin: int = 0, sizes: Iterable[int] = SIZES) -> list[pb.StreamGenerateResponse]:
    """Return the answer's messages from token `begin` on."""
    messages, at = [], begin
    for size in itertools.cycle(sizes):
        tokens = TEXT[at : at + size]
        messages.append(pb.StreamGenerateResponse(text="".join(tokens), offset=at, num_tokens=len(tokens)))
        at += len(tokens)
        if at >= len(TEXT):
            break
    messages[-1].finish.reason = pb.FINISH_REASON_EOS
    messages[-1].finish.usage.generated_tokens = len(TEXT)
    return messages


def sample_parts(samples: int) -> list[pb.StreamGenerateResponse]:
    """Return the messages of several samples, interleaved. Each has the whole answer, index + 1 tokens a message."""
    messages = []
    for index in range(samples):
        for number, part in enumerate(parts(sizes=[index + 1])):
            part.index = index
            messages.append((number, -index, part))
    return [part for *_, part in sorted(messages, key=lambda message: message[:2])]


class Counting(inference_service_pb2_grpc.InferenceServiceServicer):
    """Servicer that records calls and fails on demand.

    fail: errors of the next calls, one a call; None for a call that succeeds. A stream fails after `fail_after`
        messages.
    asked: (name, message, metadata) of each call.
    tokens: resume tokens of the known streams.
    token_less: send no resume token.
    """

    def __init__(self) -> None:
        self.fail: list[Failure | None] = []
        self.fail_after = 0
        self.asked: list[tuple[str, object, dict[str, str]]] = []
        self.tokens: set[str] = set()
        self.token_less = False

    async def StreamGenerate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        token = f"token-{len(self.asked)}"
        error = self._note("StreamGenerate", request, context)
        if request.n > 1:
            await context.send_initial_metadata((("x-request-id", "r"),))
        elif not self.token_less:
            self.tokens.add(token)
            await context.send_initial_metadata((("x-request-id", "r"), ("x-resume-token", token)))
        await self._send(sample_parts(request.n) if request.n > 1 else parts(), error, context)

    async def ResumeStream(self, request: pb.ResumeStreamRequest, context: grpc.aio.ServicerContext) -> None:
        error = self._note("ResumeStream", request, context, request.resume_token in self.tokens)
        if request.resume_token not in self.tokens:
            await self._abort(errors.StreamNotFound("resume_token: is not known"), context)
        await self._send(parts(request.token_offset, (2, 1, 3)), error, context)

    async def GetModelInfo(
        self, request: model_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> model_pb2.GetModelInfoResponse:
        if error := self._note("GetModelInfo", request, context):
            await self._abort(error, context)
        return model_pb2.GetModelInfoResponse(name="counting")

    def _note(
        self, name: str, request: object, context: grpc.aio.ServicerContext, can_fail: bool = True
    ) -> Failure | None:
        """Record a call and return its error, if `can_fail`. A call that is recorded uses no error set later."""
        self.asked.append((name, request, dict(context.invocation_metadata() or ())))
        return self.fail.pop(0) if can_fail and self.fail else None

    async def _send(
        self, messages: list[pb.StreamGenerateResponse], error: Failure | None, context: grpc.aio.ServicerContext
    ) -> None:
        for message in messages[: self.fail_after] if error else messages:
            await context.write(message)
        if error:
            await self._abort(error, context)

    @staticmethod
    async def _abort(error: Failure, context: grpc.aio.ServicerContext) -> None:
        if isinstance(error, grpc.StatusCode):
            await context.abort(error, "from a proxy")
        else:
            await context.abort_with_status(rpc_status.to_status(errors.to_status(error)))


class Proxy:
    """TCP proxy between client and server that resets connections.

    cuts: bytes from the server after which the next connections are reset, one entry a connection. Further connections
        are not reset.
    passed: bytes that the server sent.
    port: port that the proxy listens on.
    source: address from which the proxy connects to the server; None for the system's choice.
    """

    def __init__(self, port: int, source: str | None = None):
        self.cuts: list[int] = []
        self.passed = 0
        self._target = port
        self._source = (source, 0) if source else None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    @contextlib.asynccontextmanager
    async def another(self) -> AsyncIterator[Proxy]:
        """Start another proxy to the same server."""
        proxy = Proxy(self._target)
        await proxy.start()
        try:
            yield proxy
        finally:
            proxy.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = self.cuts.pop(0) if self.cuts else None
        back, to = await asyncio.open_connection("127.0.0.1", self._target, local_addr=self._source)
        ours = {writer, to}
        self._writers |= ours

        async def forwards() -> None:
            while data := await reader.read(65536):
                to.write(data)

        async def backwards() -> None:
            nonlocal left
            while data := await back.read(65536):
                self.passed += len(data)
                writer.write(data if left is None else data[:left])
                if left is not None:
                    left -= len(data)
                    if left <= 0:
                        with contextlib.suppress(OSError):
                            await writer.drain()
                        return

        tasks = [asyncio.ensure_future(forwards()), asyncio.ensure_future(backwards())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the event loop stops
            pass
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._writers -= ours
            for end in ours:
                end.close()


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Counting, Proxy]]:
    """Start a server and a proxy in front of it."""
    server, counting = grpc.aio.server(), Counting()
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(counting, server)
    proxy = Proxy(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    await proxy.start()
    try:
        yield counting, proxy
    finally:
        proxy.close()
        await server.stop(None)
