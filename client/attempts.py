"""Rules for retrying and resuming a request. No I/O: the sync and the asyncio client both drive this module.

1. A failure is transient if the server gave a retry time (RetryInfo), or if its status is UNAVAILABLE. INTERNAL,
   UNKNOWN and CANCELLED without an ErrorInfo are transient too: a connection or a proxy broke. All other failures are
   final.
2. Every further call waits first, for the longer of two times: the server's retry time, and a back-off that doubles
   with each consecutive failure. Both are jittered. The failure is raised at once if the wait would end after the
   deadline, or more than `patience` seconds after the first consecutive failure. A message with tokens ends the
   sequence of failures.
3. The next call resumes the stream after the tokens received, if its resume token is known. If no message was received,
   the request is sent again in three cases: no resume token is known, the server itself ended the call, or ResumeStream
   failed with the reason STREAM_NOT_FOUND. NOT_FOUND with any other reason is final.
4. A partial answer that cannot be continued is StreamLost. A stream that is resumed by its token is NotFound if the
   server does not know it and no message was received. A call with several samples has no resume token, so that any
   message makes it a partial answer. Each message must begin where the previous one of its sample ended, so that no
   token is repeated or missing; otherwise ServerError is raised.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable
from numbers import Real
from typing import Any

import grpc

from npuserve.client.rpc_errors import RESUME_TOKEN, ClientError, ServerError, StreamLost
from npuserve.common.answer import Answer, sample_count
from npuserve.v1 import generate_pb2 as pb

MIN_BACKOFF_SECONDS = 0.05
"""Nominal length of the first back-off."""
MAX_BACKOFF_SECONDS = 5.0
MIN_JITTER = 0.5
"""Minimum length of a back-off, as a share of its nominal length. MIN_BACKOFF_SECONDS * MIN_JITTER is the minimum time
between calls."""
MAX_WAIT_SECONDS = 1e9
"""Longest timeout and wait. gRPC counts nanoseconds in 64 bits since 1970, so that later deadlines overflow."""
STREAM_NOT_FOUND = "STREAM_NOT_FOUND"
DUPLICATE_REQUEST = "DUPLICATE_REQUEST"
TRANSIENT_WITHOUT_REASON = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)


def is_transient(error: ClientError) -> bool:
    if error.retry_seconds is not None or error.code is grpc.StatusCode.UNAVAILABLE:
        return True
    return error.code in TRANSIENT_WITHOUT_REASON and not error.reason


def check_limits(timeout: float | None, patience: float) -> None:
    """Raise TypeError or ValueError, with the argument's name, for an invalid timeout or patience."""
    for name, seconds in (("timeout", 1.0 if timeout is None else timeout), ("patience", patience)):
        if not isinstance(seconds, Real):
            raise TypeError(f"{name}: must be a number of seconds, got {type(seconds).__name__}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout: must be above 0 seconds, got {timeout}")
    if not patience >= 0:
        raise ValueError(f"patience: must be at least 0 seconds, got {patience}")


class Retries:
    """Deadline and back-off of one request.

    timeout: seconds from now for the whole request, at most MAX_WAIT_SECONDS; None or infinity for no limit.
    patience: seconds of consecutive failures before giving up; 0 disables retries.
    """

    def __init__(self, timeout: float | None, patience: float):
        check_limits(timeout, patience)
        self._deadline: float | None = None
        if timeout is not None and timeout != math.inf:
            self._deadline = time.monotonic() + min(timeout, MAX_WAIT_SECONDS)
        self._patience = patience
        self._failures = 0
        self._failing_since = 0.0

    def remaining(self) -> float | None:
        """Return the seconds until the deadline, at least 0; None without a deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def reset(self) -> None:
        """End the sequence of consecutive failures."""
        self._failures = 0

    def backoff(self, error: ClientError) -> float:
        """Return the seconds to wait after a failure. Raise the failure if that exceeds the deadline or patience."""
        now = time.monotonic()
        if not self._failures:
            self._failing_since = now
        nominal = min(MAX_BACKOFF_SECONDS, MIN_BACKOFF_SECONDS * 2.0 ** min(self._failures, 16))
        wait = max(nominal * random.uniform(MIN_JITTER, 1.0), (error.retry_seconds or 0.0) * random.uniform(1.0, 1.25))
        wait = min(wait, MAX_WAIT_SECONDS)
        self._failures += 1
        if now + wait - self._failing_since > self._patience:
            raise error
        if self._deadline is not None and now + wait >= self._deadline:
            raise error
        return wait


class Attempts:
    """State of one answer across all its calls.

    A client makes the calls that `next_call` returns. It reports their results to `read_metadata`, `accept` and
    `on_failure`.

    request: None to resume a stream by its token.
    tokens: number of tokens received, of all samples.
    calls: number of calls made.
    request_id, resume_token: "" until received.
    finish: the finish received last; None before the first. With one sample it is the answer's.
    finishes: by index of the sample.
    """

    def __init__(
        self, request: pb.GenerateRequest | None, retries: Retries, resume_token: str = "", tokens: int = 0
    ):
        self.request_id = ""
        self.resume_token = resume_token
        self.tokens = tokens
        self.calls = 0
        self.finish: pb.Finish | None = None
        self.finishes: dict[int, pb.Finish] = {}
        self._samples = sample_count(request)
        self._sample_tokens = {0: tokens}  # number received, by index
        self._request = request
        self._retries = retries
        self._has_received = False
        self._prompt_positions = 0  # positions of prompt_logprobs received, by all calls and by the current one
        self._call_positions = 0
        self._requests_sent = 0
        self._is_resuming = False

    @property
    def is_complete(self) -> bool:
        """Whether every sample has its finish."""
        return len(self.finishes) == self._samples

    def next_call(self) -> tuple[str, pb.GenerateRequest | pb.ResumeStreamRequest, float | None]:
        """Return the next call: the RPC's name, its message, and its timeout in seconds (None: no limit)."""
        self.calls += 1
        self._call_positions = 0
        self._is_resuming = self._request is None or bool(self.resume_token)
        if self._is_resuming:
            resume = pb.ResumeStreamRequest(resume_token=self.resume_token, token_offset=self.tokens)
            return "ResumeStream", resume, self._retries.remaining()
        assert self._request
        self._requests_sent += 1
        return "StreamGenerate", self._request, self._retries.remaining()

    def read_metadata(self, metadata: Iterable[Any] | None) -> None:
        """Read request_id and resume_token from a call's initial metadata, or from an error's trailing metadata."""
        received: dict[str, Any] = dict(metadata or ())
        self.request_id = received.get("x-request-id", self.request_id)
        self.resume_token = received.get(RESUME_TOKEN, self.resume_token)

    def accept(self, message: pb.StreamGenerateResponse) -> pb.StreamGenerateResponse:
        """Record a received message. Return it without repeated prompt log-probabilities.

        Raise ServerError if it does not begin where the previous message of its sample ended.
        """
        index = message.index
        received = self._sample_tokens.get(index, 0)
        if index >= self._samples or index in self.finishes:
            raise ServerError(
                grpc.StatusCode.DATA_LOSS, f"a message of sample {index}, which has ended or was not requested")
        if message.offset != received:
            raise ServerError(
                grpc.StatusCode.DATA_LOSS, f"a message at token {message.offset} where {received} was next",
                resume_token=self.resume_token)
        if message.num_tokens:
            self._retries.reset()
        self._has_received = True
        self.tokens += message.num_tokens
        self._sample_tokens[index] = received + message.num_tokens
        if message.prompt_logprobs:  # a stream that is resumed at token 0 repeats them from the first position
            repeated = max(0, self._prompt_positions - self._call_positions)
            self._call_positions += len(message.prompt_logprobs)
            self._prompt_positions = max(self._prompt_positions, self._call_positions)
            del message.prompt_logprobs[:repeated]
        if message.HasField("finish"):
            self.finish = self.finishes[index] = message.finish
        return message

    def on_failure(self, error: ClientError) -> float:
        """Return the seconds to wait until the next call: at least the minimum back-off. Raise a final error."""
        self.resume_token = error.resume_token = error.resume_token or self.resume_token
        can_resend = not self._has_received and self._request is not None
        is_unknown = self._is_resuming and error.reason == STREAM_NOT_FOUND
        if is_unknown and not can_resend:
            raise self._lost(error) if self._has_received else error
        # The server holds our request_id until it detects the lost connection.
        is_ours = error.reason == DUPLICATE_REQUEST and self._requests_sent > 1
        if not (is_unknown or is_ours or is_transient(error)):
            raise error
        if can_resend and error.reason:
            self.resume_token = ""  # this server refused the request; another server may accept it
        elif self._has_received and not self.resume_token:
            raise self._lost(error)
        return self._retries.backoff(error)

    def _lost(self, error: ClientError) -> StreamLost:
        return StreamLost(
            error.code, f"the stream is lost after {self.tokens} tokens: {error.message}", reason=error.reason,
            resume_token=self.resume_token)


def add_message(answer: Answer, message: pb.StreamGenerateResponse) -> None:
    """Add a message that `Attempts.accept` has checked. Raise ServerError if it skips a tool call."""
    try:
        answer.add(message)
    except ValueError as error:
        raise ServerError(grpc.StatusCode.DATA_LOSS, str(error)) from None


def missing_finish() -> ClientError:
    """Return the error for a stream that ended with status OK but without a finish, which only proxies cause."""
    return ServerError(grpc.StatusCode.UNKNOWN, "the stream ended without a finish")


def malformed_message() -> ClientError:
    """Return the error for a message that is not protobuf. The client for threads gets this error from gRPC."""
    return ServerError(grpc.StatusCode.INTERNAL, "a message of the server is malformed")
