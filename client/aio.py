"""Client for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio

from npuserve.client import channel, request_builder
from npuserve.client.attempts import (
    Attempts,
    Retries,
    add_message,
    check_limits,
    is_transient,
    malformed_message,
    missing_finish,
)
from npuserve.client.request_builder import EmbedOptions, Options, Prompt, RankOptions, TokenizeOptions
from npuserve.client.rpc_errors import Cancelled, ClientError, from_rpc
from npuserve.common.answer import Answer, sample_count
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc, model_pb2, pooling_pb2, tokenize_pb2

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")


class AsyncStream(AsyncIterator[pb.StreamGenerateResponse]):
    """Asyncio version of `Stream`.

    The request is cancelled if the task that reads the stream is cancelled, and at the end of `async with`.
    """

    def __init__(self, client: AsyncClient, attempts: Attempts):
        self.attempts = attempts
        self._client = client
        self._call: Any = None
        self._is_cancelled = False
        self._error: ClientError | None = None

    async def __anext__(self) -> pb.StreamGenerateResponse:
        if self.attempts.is_complete:
            raise StopAsyncIteration
        if self._error is not None:
            raise self._error
        try:
            return await self._next_message()
        except ClientError as error:
            self._error = error
            raise

    def cancel(self) -> None:
        """End the stream early. The server keeps the answer for `resume_seconds`: see AsyncClient.resume."""
        self._is_cancelled = True
        if self._call is not None:
            self._call.cancel()
        self._client.wake()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.cancel()

    def _is_ended(self) -> bool:
        return self._is_cancelled or self._client.closed

    async def _next_message(self) -> pb.StreamGenerateResponse:
        """Return the next message of any call. Raise the final error of the stream."""
        while not self._is_ended():
            try:
                message = await self._read()
            except ClientError as error:
                self._call = None
                if not self._is_ended():
                    await self._client.wait(self.attempts.on_failure(error), self._is_ended)
                continue
            try:
                delta = self.attempts.accept(message)
            except ClientError:
                self.cancel()
                raise
            if self.attempts.is_complete:
                await self._read_status()
            return delta
        raise Cancelled(grpc.StatusCode.CANCELLED, "cancelled here", resume_token=self.attempts.resume_token)

    async def _read(self) -> pb.StreamGenerateResponse:
        if self._call is None:
            name, message, timeout = self.attempts.next_call()
            self._call = self._client.call(name, message, timeout)
        received = await _uncancelled(self._receive(self._call), self.cancel)
        if isinstance(received, ClientError):
            raise received
        return received

    async def _receive(self, call: Any) -> pb.StreamGenerateResponse | ClientError:
        """Return the next message, or the error of the call."""
        try:
            received = await call.read()
            self.attempts.read_metadata(await call.initial_metadata())
        except grpc.aio.AioRpcError as error:
            self.attempts.read_metadata(error.initial_metadata())
            self.attempts.read_metadata(error.trailing_metadata())
            return from_rpc(error)
        except asyncio.CancelledError:
            return await _cancelled(call)
        if received is grpc.aio.EOF:  # type: ignore[attr-defined]
            return missing_finish()
        if received is None:  # grpc.aio has logged why, and the call goes on
            call.cancel()
            return malformed_message()
        assert isinstance(received, pb.StreamGenerateResponse)
        return received

    async def _read_status(self) -> None:
        """Read the status, so that the server does not see a cancel."""
        await _uncancelled(self._receive(self._call), self.cancel)  # the answer is complete, whatever the status
        self._call = None


class AsyncClient:
    """Asyncio version of `Client`, with the same arguments, for one event loop: that of its first call."""

    def __init__(
        self, target: str, *, api_key: str | None = None, tls: channel.Tls | None = None, timeout: float | None = None,
        patience: float = 60.0,
    ):
        check_limits(timeout, patience)
        self.closed = False
        self._changed: asyncio.Future[None] | None = None
        self._timeout = timeout
        self._patience = patience
        self._metadata = channel.auth_metadata(api_key)
        self._open_channel = channel.aio_channel_opener(target, tls)
        self._channel: grpc.aio.Channel | None = None  # grpc.aio binds a channel to the event loop that opens it
        self._stub: Any = None

    async def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> pb.GenerateResponse:
        """Return the complete answer; see Client.generate."""
        request = request_builder.build_request(prompt, options)
        answer = Answer(sample_count(request))
        async with self.stream(request, timeout=timeout) as stream:
            async for delta in stream:
                add_message(answer, delta)
        return answer.response()

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> AsyncStream:
        """Return an asynchronous iterator over the answer's messages; see Client.stream."""
        return AsyncStream(self, Attempts(request_builder.build_request(prompt, options), self._retries(timeout)))

    def resume(self, resume_token: str, token_offset: int = 0, *, timeout: float | None = None) -> AsyncStream:
        """Continue a stream; see Client.resume."""
        request = request_builder.build_resume(resume_token, token_offset)
        return AsyncStream(self, Attempts(None, self._retries(timeout), request.resume_token, request.token_offset))

    async def model_info(self, timeout: float | None = None) -> model_pb2.GetModelInfoResponse:
        """Return the served model's properties; see Client.model_info."""
        request = model_pb2.GetModelInfoRequest()
        response: model_pb2.GetModelInfoResponse = await self._unary("GetModelInfo", request, timeout)
        return response

    async def tokenize(
        self, prompt: str | Sequence[Mapping[str, Any]], timeout: float | None = None,
        **options: Unpack[TokenizeOptions],
    ) -> tokenize_pb2.TokenizeResponse:
        """Return the token ids of a text or a chat; see Client.tokenize."""
        request = request_builder.build_tokenize(prompt, options)
        response: tokenize_pb2.TokenizeResponse = await self._unary("Tokenize", request, timeout)
        return response

    async def embed(
        self, content: str | Sequence[int], timeout: float | None = None, **options: Unpack[EmbedOptions]
    ) -> pooling_pb2.EmbedResponse:
        """Return the embedding of a text or of token ids; see Client.embed."""
        response: pooling_pb2.EmbedResponse = await self._unary(
            "Embed", request_builder.build_embed(content, options), timeout)
        return response

    async def rank(
        self, query: str, documents: Sequence[str], timeout: float | None = None, **options: Unpack[RankOptions]
    ) -> pooling_pb2.RankResponse:
        """Return the relevance of each document to a query; see Client.rank."""
        response: pooling_pb2.RankResponse = await self._unary(
            "Rank", request_builder.build_rank(query, documents, options), timeout)
        return response

    async def detokenize(self, token_ids: Sequence[int], timeout: float | None = None) -> str:
        """Return the text of token ids; see Client.detokenize."""
        request = request_builder.build_detokenize(token_ids)
        text: str = (await self._unary("Detokenize", request, timeout)).text
        return text

    async def close(self) -> None:
        """Cancel all calls and waits."""
        self.closed = True
        self.wake()
        if self._channel is not None:
            await self._channel.close(None)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def call(self, name: str, message: Any, timeout: float | None) -> Any:
        """Begin one call of an RPC. Raise Cancelled if the client is closed."""
        if self.closed:
            raise Cancelled(grpc.StatusCode.CANCELLED, "the client is closed")
        if self._channel is None:
            self._channel = self._open_channel()
            self._stub = inference_service_pb2_grpc.InferenceServiceStub(self._channel)
        return getattr(self._stub, name)(message, timeout=timeout, metadata=self._metadata)

    async def wait(self, seconds: float, is_ended: Callable[[], bool]) -> None:
        """Wait for `seconds`, or until `is_ended()`, which is checked after each `wake`."""
        end = time.monotonic() + seconds
        while not is_ended() and (left := end - time.monotonic()) > 0:
            if self._changed is None or self._changed.done():
                self._changed = asyncio.get_running_loop().create_future()
            # asyncio.wait_for may lose a cancel of the task before Python 3.12.
            await asyncio.wait([self._changed], timeout=left)

    def wake(self) -> None:
        if self._changed and not self._changed.done():
            self._changed.set_result(None)

    def _retries(self, timeout: float | None) -> Retries:
        return Retries(self._timeout if timeout is None else timeout, self._patience)

    async def _unary(self, name: str, message: Any, timeout: float | None) -> Any:
        retries = self._retries(timeout)
        while True:
            call = self.call(name, message, retries.remaining())
            result = await _uncancelled(_result(call), call.cancel)
            if not isinstance(result, ClientError):
                return result
            if not (self.closed or is_transient(result)):
                raise result
            if not self.closed:
                await self.wait(retries.backoff(result), lambda: self.closed)


async def _result(call: Any) -> Any:
    """Return the message of a unary call, or its error."""
    try:
        response = await call
        return malformed_message() if response is None else response  # grpc.aio has logged why
    except grpc.aio.AioRpcError as error:
        return from_rpc(error)
    except asyncio.CancelledError:
        return await _cancelled(call)


async def _cancelled(call: Any) -> ClientError:
    return ClientError(grpc.StatusCode.CANCELLED, await call.details() or "no details")


async def _uncancelled(reading: Coroutine[Any, Any, T], cancel: Callable[[], object]) -> T:
    """Return the result of `reading`. If this task is cancelled, `cancel` the call, which ends `reading`.

    grpc.aio raises CancelledError for a cancelled call, too. Within one task, Python 3.10 cannot distinguish that from
    the task's own cancellation. `reading` therefore runs in another task: asyncio.wait raises CancelledError only if
    this task is cancelled.
    """
    task = asyncio.ensure_future(reading)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        cancel()
        raise
    return task.result()
