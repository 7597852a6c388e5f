"""The client for threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from npuserve.client import ask, channel
from npuserve.client.ask import Options, Prompt
from npuserve.client.attempts import Attempts, Retries, ended_early, is_passing
from npuserve.client.errors import Cancelled, ClientError, from_rpc
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc, model_pb2, tokenize_pb2

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Stream(Iterator[pb.StreamGenerateResponse]):
    """An answer as it comes, one message each; the last one has its finish. Raises ClientError.

    `attempts` knows how far it is: its tokens, request_id and resume_token. Leave it early with `cancel`, from any
    thread, or by `with`: the server then stops at once.
    """

    def __init__(self, client: Client, attempts: Attempts):
        self.attempts = attempts
        self._client = client
        self._call: Any = None
        self._is_cancelled = False

    def __next__(self) -> pb.StreamGenerateResponse:
        if self.attempts.finish:
            raise StopIteration
        while not self._is_over():
            try:
                message = self._read()
            except ClientError as error:
                self._call = None
                if not self._is_over():
                    self._client.wait(self.attempts.failed(error), self._is_over)
                continue
            try:
                taken = self.attempts.take(message)
            except ClientError:
                self.cancel()
                raise
            if self.attempts.finish:
                self._end()
            return taken
        raise Cancelled(grpc.StatusCode.CANCELLED, "cancelled here", resume_token=self.attempts.resume_token)

    def cancel(self) -> None:
        """End the stream early. The server keeps the answer so far for a while: see Client.resume."""
        self._is_cancelled = True
        call = self._call
        if call is not None:
            call.cancel()
        self._client.wake()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    def _is_over(self) -> bool:
        return self._is_cancelled or self._client.closed

    def _read(self) -> pb.StreamGenerateResponse:
        try:
            call = self._call
            if call is None:
                name, message, timeout = self.attempts.next()
                call = self._call = self._client.call(name, message, timeout)
                if self._is_over():  # before the assignment, `cancel` found no call to cancel
                    call.cancel()
            received: pb.StreamGenerateResponse | None = next(call, None)
            self.attempts.began(call.initial_metadata())
        except grpc.RpcError as error:
            self.attempts.began(error.initial_metadata())  # type: ignore[attr-defined]
            self.attempts.began(error.trailing_metadata())  # type: ignore[attr-defined]
            raise from_rpc(error) from None
        if received is None:
            raise ended_early()
        return received

    def _end(self) -> None:
        """Read the status too, so that the server does not see a cancel."""
        with contextlib.suppress(grpc.RpcError):  # the answer is whole
            next(self._call, None)
        self._call = None


class Client:
    """A server at `target` (host:port). Threads may share one.

    api_key: sent with every call. tls: none is plaintext. timeout: seconds for each whole answer, None: no limit; the
    server ends an answer that would pass it just before, with FINISH_REASON_DEADLINE. patience: for how many seconds
    of failures in a row it tries again; 0: never.
    """

    def __init__(
        self, target: str, *, api_key: str | None = None, tls: channel.Tls | None = None, timeout: float | None = None,
        patience: float = 60.0,
    ):
        self.closed = False
        self._changed = threading.Condition()
        self._timeout = timeout
        self._patience = patience
        self._metadata = channel.metadata(api_key)
        options = channel.settings(tls)
        self._channel = (grpc.secure_channel(target, tls.credentials(), options) if tls
                         else grpc.insecure_channel(target, options))
        self._stub = inference_service_pb2_grpc.InferenceServiceStub(self._channel)

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> pb.GenerateResponse:
        """The whole answer. It is streamed and put together here, so that it survives what a stream survives.
        timeout: in place of the client's."""
        whole, texts = pb.GenerateResponse(), []
        for delta in self.stream(prompt, timeout=timeout, **options):
            texts.append(delta.text)
            put_together(whole, delta)
        whole.text = "".join(texts)
        return whole

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Stream:
        """The answer as it comes. Nothing is sent before the first message is asked for."""
        return Stream(self, Attempts(ask.build(prompt, options), self._retries(timeout)))

    def resume(self, resume_token: str, token_offset: int = 0, *, timeout: float | None = None) -> Stream:
        """A stream that this or another client began, from its `token_offset`-th token. Whoever read it until now is
        cut off."""
        held = ask.resuming(resume_token, token_offset)
        return Stream(self, Attempts(None, self._retries(timeout), held.resume_token, held.token_offset))

    def model_info(self, timeout: float | None = None) -> model_pb2.GetModelInfoResponse:
        """What is served; waits as long as patience allows for a server that is starting."""
        made: model_pb2.GetModelInfoResponse = self._unary("GetModelInfo", model_pb2.GetModelInfoRequest(), timeout)
        return made

    def tokenize(
        self, prompt: str | Sequence[Mapping[str, Any]], timeout: float | None = None
    ) -> tokenize_pb2.TokenizeResponse:
        """The ids of a text or a chat, as `generate` would read it."""
        made: tokenize_pb2.TokenizeResponse = self._unary("Tokenize", tokenizing(prompt), timeout)
        return made

    def detokenize(self, token_ids: Sequence[int], timeout: float | None = None) -> str:
        """The text of ids."""
        text: str = self._unary("Detokenize", ask.detokenizing(token_ids), timeout).text
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

    def wait(self, seconds: float, is_over: Callable[[], bool]) -> None:
        """Wait, at most until `is_over()`, which is checked after each `wake`."""
        with self._changed:
            self._changed.wait_for(is_over, seconds)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _retries(self, timeout: float | None) -> Retries:
        return Retries(self._timeout if timeout is None else timeout, self._patience)

    def _unary(self, name: str, message: Any, timeout: float | None) -> Any:
        retries = self._retries(timeout)
        while True:
            try:
                return self.call(name, message, retries.left())
            except grpc.RpcError as failed:
                error = from_rpc(failed)
            if not (self.closed or is_passing(error)):
                raise error
            if not self.closed:
                self.wait(retries.wait(error), lambda: self.closed)
            if self.closed:
                raise Cancelled(grpc.StatusCode.CANCELLED, "the client is closed")


def put_together(whole: pb.GenerateResponse, delta: pb.StreamGenerateResponse) -> None:
    """Add all of a message but its text, of which there may be many."""
    whole.token_ids.extend(delta.token_ids)
    whole.logprobs.extend(delta.logprobs)
    whole.prompt_logprobs.extend(delta.prompt_logprobs)
    if delta.HasField("finish"):
        whole.finish.CopyFrom(delta.finish)


def tokenizing(prompt: str | Sequence[Mapping[str, Any]]) -> tokenize_pb2.TokenizeRequest:
    made = ask.build(prompt, {})
    if made.HasField("token_ids"):
        raise TypeError("prompt: must be a text or a chat")
    return tokenize_pb2.TokenizeRequest(text=made.text) if isinstance(prompt, str) else tokenize_pb2.TokenizeRequest(
        chat=made.chat)
