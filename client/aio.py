"""The client for asyncio: as `sync`, on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from npuserve.client import ask, channel
from npuserve.client.ask import Options, Prompt
from npuserve.client.attempts import Attempts, Retries, ended_early, is_passing
from npuserve.client.errors import Cancelled, ClientError, from_rpc
from npuserve.client.sync import put_together, tokenizing
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc, model_pb2, tokenize_pb2

if TYPE_CHECKING:
    from typing_extensions import Unpack

LOCALLY = "Locally cancelled by application!"
"""What grpc.aio says of a call that was cancelled on this side."""


class AsyncStream(AsyncIterator[pb.StreamGenerateResponse]):
    """As `Stream`; cancelling the task that reads it, or leaving its `async with`, cancels the request."""

    def __init__(self, client: AsyncClient, attempts: Attempts):
        self.attempts = attempts
        self._client = client
        self._call: Any = None
        self._cancelled = asyncio.Event()

    async def __anext__(self) -> pb.StreamGenerateResponse:
        if self.attempts.finish:
            raise StopAsyncIteration
        while not (self._cancelled.is_set() or self._client.closed):
            try:
                message = await self._read()
            except ClientError as error:
                self._call = None
                if not (self._cancelled.is_set() or self._client.closed):
                    await self._sleep(self.attempts.failed(error))
                continue
            try:
                taken = self.attempts.take(message)
            except ClientError:
                self.cancel()
                raise
            if self.attempts.finish:
                await self._end()
            return taken
        raise Cancelled(grpc.StatusCode.CANCELLED, "cancelled here", resume_token=self.attempts.resume_token)

    def cancel(self) -> None:
        """Nobody waits for the rest. The server keeps it for a while: see AsyncClient.resume."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.cancel()

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._cancelled.wait(), seconds)

    async def _read(self) -> pb.StreamGenerateResponse:
        try:
            if self._call is None:
                name, message, timeout = self.attempts.next()
                self._call = self._client.call(name, message, timeout)
            received = await self._call.read()
            self.attempts.began(await self._call.initial_metadata())
        except grpc.aio.AioRpcError as error:
            self.attempts.began(error.initial_metadata())
            raise from_rpc(error) from None
        except asyncio.CancelledError:
            # grpc.aio raises it for a status of CANCELLED too, whoever it is of.
            if not self._call.done() or await self._call.details() == LOCALLY:
                if self._cancelled.is_set():
                    raise ClientError(grpc.StatusCode.CANCELLED, "cancelled here") from None
                self.cancel()
                raise
            raise ClientError(grpc.StatusCode.CANCELLED, await self._call.details()) from None
        if received is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise ended_early()
        assert isinstance(received, pb.StreamGenerateResponse)
        return received

    async def _end(self) -> None:
        """Read the status too, so that the server does not see a cancel."""
        with contextlib.suppress(grpc.aio.AioRpcError):  # the answer is whole
            await self._call.read()
        self._call = None


class AsyncClient:
    """As `Client`, with the same arguments, for one event loop."""

    def __init__(
        self, target: str, *, api_key: str | None = None, tls: channel.Tls | None = None, timeout: float | None = None,
        patience: float = 60.0,
    ):
        self.closed = False
        self._timeout = timeout
        self._patience = patience
        self._metadata = channel.metadata(api_key)
        options = channel.settings(tls)
        self._channel = (grpc.aio.secure_channel(target, tls.credentials(), options) if tls
                         else grpc.aio.insecure_channel(target, options))
        self._stub = inference_service_pb2_grpc.InferenceServiceStub(self._channel)

    async def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> pb.GenerateResponse:
        """As Client.generate."""
        whole, texts = pb.GenerateResponse(), []
        async with self.stream(prompt, timeout=timeout, **options) as stream:
            async for delta in stream:
                texts.append(delta.text)
                put_together(whole, delta)
        whole.text = "".join(texts)
        return whole

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> AsyncStream:
        """As Client.stream."""
        return AsyncStream(self, Attempts(ask.build(prompt, options), self._retries(timeout)))

    def resume(self, resume_token: str, token_offset: int = 0, *, timeout: float | None = None) -> AsyncStream:
        """As Client.resume."""
        return AsyncStream(self, Attempts(None, self._retries(timeout), resume_token, token_offset))

    async def model_info(self, timeout: float | None = None) -> model_pb2.GetModelInfoResponse:
        """As Client.model_info."""
        request = model_pb2.GetModelInfoRequest()
        made: model_pb2.GetModelInfoResponse = await self._unary("GetModelInfo", request, timeout)
        return made

    async def tokenize(
        self, prompt: str | Sequence[Mapping[str, Any]], timeout: float | None = None
    ) -> tokenize_pb2.TokenizeResponse:
        """As Client.tokenize."""
        made: tokenize_pb2.TokenizeResponse = await self._unary("Tokenize", tokenizing(prompt), timeout)
        return made

    async def detokenize(self, token_ids: Sequence[int], timeout: float | None = None) -> str:
        """As Client.detokenize."""
        request = tokenize_pb2.DetokenizeRequest(token_ids=token_ids)
        text: str = (await self._unary("Detokenize", request, timeout)).text
        return text

    async def close(self) -> None:
        """Cancels what is under way."""
        self.closed = True
        await self._channel.close(None)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def call(self, name: str, message: Any, timeout: float | None) -> Any:
        """One call of a streaming RPC, once."""
        return getattr(self._stub, name)(message, timeout=timeout, metadata=self._metadata)

    def _retries(self, timeout: float | None) -> Retries:
        return Retries(self._timeout if timeout is None else timeout, self._patience)

    async def _unary(self, name: str, message: Any, timeout: float | None) -> Any:
        retries = self._retries(timeout)
        while True:
            try:
                return await getattr(self._stub, name)(message, timeout=retries.left(), metadata=self._metadata)
            except grpc.aio.AioRpcError as failed:
                error = from_rpc(failed)
            if self.closed or not is_passing(error):
                raise error
            await asyncio.sleep(retries.wait(error))
