"""Client for threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from npuserve.client import channel, request_builder
from npuserve.client.attempts import Attempts, Retries, add_message, check_limits, is_transient, missing_finish
from npuserve.client.request_builder import EmbedOptions, Options, Prompt, RankOptions, TokenizeOptions
from npuserve.client.rpc_errors import Cancelled, ClientError, from_rpc
from npuserve.common.answer import Answer, sample_count
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc, model_pb2, pooling_pb2, tokenize_pb2

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Stream(Iterator[pb.StreamGenerateResponse]):
    """Iterator over the messages of one answer. The last message has its finish. Iterating raises ClientError.

    A stream that has failed raises its error again.

    With n above 1, `index` of a message is its sample, and the last message of each sample has the sample's finish.

    `cancel` ends the stream early, from any thread; the end of its `with` does the same. The server then stops at once.

    attempts: state of the answer, with `tokens` (number received), `request_id` and `resume_token`.
    """

    def __init__(self, client: Client, attempts: Attempts):
        self.attempts = attempts
        self._client = client
        self._call: Any = None
        self._is_cancelled = False
        self._error: ClientError | None = None

    def __next__(self) -> pb.StreamGenerateResponse:
        if self.attempts.is_complete:
            raise StopIteration
        if self._error is not None:
            raise self._error
        try:
            return self._next_message()
        except ClientError as error:
            self._error = error
            raise

    def cancel(self) -> None:
        """End the stream early. The server keeps the answer for `resume_seconds`: see Client.resume."""
        self._is_cancelled = True
        call = self._call
        if call is not None:
            call.cancel()
        self._client.wake()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    def _is_ended(self) -> bool:
        return self._is_cancelled or self._client.closed

    def _next_message(self) -> pb.StreamGenerateResponse:
        """Return the next message of any call. Raise the final error of the stream."""
        while not self._is_ended():
            try:
                message = self._read()
            except ClientError as error:
                self._call = None
                if not self._is_ended():
                    self._client.wait(self.attempts.on_failure(error), self._is_ended)
                continue
            try:
                delta = self.attempts.accept(message)
            except ClientError:
                self.cancel()
                raise
            if self.attempts.is_complete:
                self._read_status()
            return delta
        raise Cancelled(grpc.StatusCode.CANCELLED, "cancelled here", resume_token=self.attempts.resume_token)

    def _read(self) -> pb.StreamGenerateResponse:
        try:
            call = self._call
            if call is None:
                name, message, timeout = self.attempts.next_call()
                call = self._call = self._client.call(name, message, timeout)
                if self._is_ended():  # `cancel` ran before the assignment and found no call
                    call.cancel()
            received: pb.StreamGenerateResponse | None = next(call, None)
            self.attempts.read_metadata(call.initial_metadata())
        except grpc.RpcError as error:
            self.attempts.read_metadata(error.initial_metadata())  # type: ignore[attr-defined]
            self.attempts.read_metadata(error.trailing_metadata())  # type: ignore[attr-defined]
            raise from_rpc(error) from None
        if received is None:
            raise missing_finish()
        return received

    def _read_status(self) -> None:
        """Read the status, so that the server does not see a cancel."""
        with contextlib.suppress(grpc.RpcError):  # the answer is complete
            next(self._call, None)
        self._call = None


class Client:
    """Client of the server at `target` (host:port). Threads can share one client.

    api_key: key to send with every call; None for no key.
    tls: TLS settings; None for plaintext.
    timeout: seconds for each answer, over all its calls; None or infinity for no limit. Just before the timeout the
        server ends the answer with FINISH_REASON_DEADLINE.
    patience: seconds of consecutive failures during which calls are retried; 0 disables retries.

    Raise OSError or ValueError for unusable files of `tls`, TypeError or ValueError for another unusable argument.
    """

    def __init__(
        self, target: str, *, api_key: str | None = None, tls: channel.Tls | None = None, timeout: float | None = None,
        patience: float = 60.0,
    ):
        check_limits(timeout, patience)
        self.closed = False
        self._changed = threading.Condition()
        self._timeout = timeout
        self._patience = patience
        self._metadata = channel.auth_metadata(api_key)
        self._channel = channel.open_channel(target, tls)
        self._stub = inference_service_pb2_grpc.InferenceServiceStub(self._channel)

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> pb.GenerateResponse:
        """Return the complete answer. It is streamed and joined, so that it survives the failures that a stream does.

        With n above 1, `samples` of the answer has the answers. Such a call cannot be resumed: a lost connection is
        StreamLost once a message was received.

        timeout: seconds for this answer; None for the client's timeout. Raise ClientError for a failure, TypeError or
        ValueError for an invalid prompt or option.
        """
        request = request_builder.build_request(prompt, options)
        answer = Answer(sample_count(request))
        with self.stream(request, timeout=timeout) as stream:
            for delta in stream:
                add_message(answer, delta)
        return answer.response()

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Stream:
        """Return an iterator over the answer's messages. Arguments: see generate.

        The request is sent when the first message is read.
        """
        return Stream(self, Attempts(request_builder.build_request(prompt, options), self._retries(timeout)))

    def resume(self, resume_token: str, token_offset: int = 0, *, timeout: float | None = None) -> Stream:
        """Continue a stream that this or another client began, after its first `token_offset` tokens.

        The server ends the call that received the stream until now with ABORTED. Reading raises NotFound if the server
        does not have the stream.
        """
        request = request_builder.build_resume(resume_token, token_offset)
        return Stream(self, Attempts(None, self._retries(timeout), request.resume_token, request.token_offset))

    def model_info(self, timeout: float | None = None) -> model_pb2.GetModelInfoResponse:
        """Return the served model's properties. Wait for a starting server as long as `patience` allows."""
        response: model_pb2.GetModelInfoResponse = self._unary("GetModelInfo", model_pb2.GetModelInfoRequest(), timeout)
        return response

    def tokenize(
        self, prompt: str | Sequence[Mapping[str, Any]], timeout: float | None = None,
        **options: Unpack[TokenizeOptions],
    ) -> tokenize_pb2.TokenizeResponse:
        """Return the token ids of a text or a chat, as `generate` with the same options would encode it.

        add_special_tokens: see tokenize.proto; None for the same as `generate`.
        """
        request = request_builder.build_tokenize(prompt, options)
        response: tokenize_pb2.TokenizeResponse = self._unary("Tokenize", request, timeout)
        return response

    def embed(
        self, content: str | Sequence[int], timeout: float | None = None, **options: Unpack[EmbedOptions]
    ) -> pooling_pb2.EmbedResponse:
        """Return the embedding of a text or of token ids, in `values`. Many threads may call it at a time."""
        response: pooling_pb2.EmbedResponse = self._unary(
            "Embed", request_builder.build_embed(content, options), timeout)
        return response

    def rank(
        self, query: str, documents: Sequence[str], timeout: float | None = None, **options: Unpack[RankOptions]
    ) -> pooling_pb2.RankResponse:
        """Return the relevance of each document to a query, in `scores`, in the order of the documents."""
        response: pooling_pb2.RankResponse = self._unary(
            "Rank", request_builder.build_rank(query, documents, options), timeout)
        return response

    def detokenize(self, token_ids: Sequence[int], timeout: float | None = None) -> str:
        """Return the text of token ids."""
        text: str = self._unary("Detokenize", request_builder.build_detokenize(token_ids), timeout).text
        return text

    def close(self) -> None:
        """Cancel all calls and waits."""
        self.closed = True
        self.wake()
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def call(self, name: str, message: Any, timeout: float | None) -> Any:
        """Begin one call of an RPC. Raise Cancelled if the client is closed."""
        try:
            return getattr(self._stub, name)(message, timeout=timeout, metadata=self._metadata)
        except ValueError:
            if self.closed:  # gRPC raises it for a closed channel
                raise Cancelled(grpc.StatusCode.CANCELLED, "the client is closed") from None
            raise

    def wait(self, seconds: float, is_ended: Callable[[], bool]) -> None:
        """Wait for `seconds`, or until `is_ended()`, which is checked after each `wake`."""
        with self._changed:
            self._changed.wait_for(is_ended, seconds)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _retries(self, timeout: float | None) -> Retries:
        return Retries(self._timeout if timeout is None else timeout, self._patience)

    def _unary(self, name: str, message: Any, timeout: float | None) -> Any:
        retries = self._retries(timeout)
        while True:
            try:
                return self.call(name, message, retries.remaining())
            except grpc.RpcError as failed:
                error = from_rpc(failed)
            if not (self.closed or is_transient(error)):
                raise error
            if not self.closed:
                self.wait(retries.backoff(error), lambda: self.closed)
            if self.closed:
                raise Cancelled(grpc.StatusCode.CANCELLED, "the client is closed")
