"""How a call goes on after a failure. No I/O: the sync and the asyncio client both drive it.

1. A failure is passing if the server gave a time (RetryInfo), if it is UNAVAILABLE, or if nobody at the server said it:
   INTERNAL, UNKNOWN or CANCELLED without an ErrorInfo is a connection or a proxy that broke. All else is final.
2. Every further call waits first: at least the server's time, and at least a back-off that doubles with each failure
   in a row; both jittered. If the wait would end beyond the deadline, or more than `patience` seconds after the first
   failure in a row, the failure is raised at once. A message with tokens ends the row.
3. Then the stream is resumed from the tokens received, if its resume token is known. If nothing has come yet, it is
   asked for anew without a token, where the server itself ended it, and where ResumeStream does not know the token:
   its reason is STREAM_NOT_FOUND. NOT_FOUND with any other reason is final.
4. What came and cannot be continued is StreamLost. Each message must begin where the last one ended, so that nothing is
   repeated and nothing is missed: otherwise ServerError.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from typing import Any

import grpc

from npuserve.client.errors import RESUME_TOKEN, ClientError, ServerError, StreamLost
from npuserve.v1 import generate_pb2 as pb

FIRST_WAIT = 0.05
LONGEST_WAIT = 5.0
MIN_JITTER = 0.5
"""A back-off is at least this share of its nominal length, so FIRST_WAIT * MIN_JITTER is the minimum between calls."""
STREAM_NOT_FOUND = "STREAM_NOT_FOUND"
DUPLICATE_REQUEST = "DUPLICATE_REQUEST"
BROKEN = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)


def is_passing(error: ClientError) -> bool:
    if error.retry_seconds is not None or error.code is grpc.StatusCode.UNAVAILABLE:
        return True
    return error.code in BROKEN and not error.reason


class Retries:
    """When to try again. timeout: seconds from now for the whole, None: no limit. patience: seconds of failures in a
    row, 0: never try again."""

    def __init__(self, timeout: float | None, patience: float):
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout: must be above 0 seconds, got {timeout:g}")
        if not patience >= 0:
            raise ValueError(f"patience: must be at least 0 seconds, got {patience:g}")
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._patience = patience
        self._failures = 0
        self._failing_since = 0.0

    def left(self) -> float | None:
        """Seconds of the timeout, for gRPC."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def progress(self) -> None:
        self._failures = 0

    def wait(self, error: ClientError) -> float:
        """Return the seconds to wait after a failure. Raise the failure if that is too long."""
        now = time.monotonic()
        if not self._failures:
            self._failing_since = now
        backoff = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(self._failures, 16)) * random.uniform(MIN_JITTER, 1.0)
        wait = max(backoff, (error.retry_seconds or 0.0) * random.uniform(1.0, 1.25))
        self._failures += 1
        if now + wait - self._failing_since > self._patience:
            raise error
        if self._deadline is not None and now + wait >= self._deadline:
            raise error
        return wait


class Attempts:
    """One answer over as many calls as it takes: `next` says which to make, and `began`, `take`, `failed` are told what
    became of it. request: None to take up a stream by its token.

    tokens: of the answer received. calls: made so far. request_id, resume_token: "" until the server has told. finish:
    once it has come.
    """

    def __init__(
        self, request: pb.GenerateRequest | None, retries: Retries, resume_token: str = "", tokens: int = 0
    ):
        self.request_id = ""
        self.resume_token = resume_token
        self.tokens = tokens
        self.calls = 0
        self.finish: pb.Finish | None = None
        self._request = request
        self._retries = retries
        self._received = request is None
        self._prompt_positions = 0  # received of prompt_logprobs, by all calls and by this one
        self._call_positions = 0
        self._asked = 0
        self._resuming = False

    def next(self) -> tuple[str, pb.GenerateRequest | pb.ResumeStreamRequest, float | None]:
        """(name of the RPC, its message, its timeout)."""
        self.calls += 1
        self._call_positions = 0
        self._resuming = self._request is None or bool(self.resume_token)
        if self._resuming:
            resume = pb.ResumeStreamRequest(resume_token=self.resume_token, token_offset=self.tokens)
            return "ResumeStream", resume, self._retries.left()
        assert self._request
        self._asked += 1
        return "StreamGenerate", self._request, self._retries.left()

    def began(self, metadata: Iterable[Any] | None) -> None:
        """Take the request's id and resume token from a call's initial metadata, or from an error's trailing ones."""
        told: dict[str, Any] = dict(metadata or ())
        self.request_id = told.get("x-request-id", self.request_id)
        self.resume_token = told.get(RESUME_TOKEN, self.resume_token)

    def take(self, message: pb.StreamGenerateResponse) -> pb.StreamGenerateResponse:
        """A message that came; what the user is given of it. ServerError where it does not follow the last one."""
        if message.offset != self.tokens:
            raise ServerError(
                grpc.StatusCode.DATA_LOSS, f"a message at token {message.offset} where {self.tokens} was next",
                resume_token=self.resume_token)
        if message.num_tokens:
            self._retries.progress()
        self._received = True
        self.tokens += message.num_tokens
        if message.prompt_logprobs:  # a stream that is resumed at token 0 repeats them from the first position
            repeated = max(0, self._prompt_positions - self._call_positions)
            self._call_positions += len(message.prompt_logprobs)
            self._prompt_positions = max(self._prompt_positions, self._call_positions)
            del message.prompt_logprobs[:repeated]
        if message.HasField("finish"):
            self.finish = message.finish
        return message

    def failed(self, error: ClientError) -> float:
        """Return the seconds to wait until the next call: never less than the minimum back-off. Raise a final error."""
        self.resume_token = error.resume_token = error.resume_token or self.resume_token
        fresh = not self._received and self._request is not None
        is_unknown = self._resuming and error.reason == STREAM_NOT_FOUND
        if is_unknown and not fresh:
            raise self._lost(error)
        # The server holds our request_id until it detects the lost connection.
        is_ours = error.reason == DUPLICATE_REQUEST and self._asked > 1
        if not (is_unknown or is_ours or is_passing(error)):
            raise error
        if fresh and error.reason:
            self.resume_token = ""  # the server itself did not take it, and another may
        elif not fresh and not self.resume_token:
            raise self._lost(error)
        return self._retries.wait(error)

    def _lost(self, error: ClientError) -> StreamLost:
        return StreamLost(
            error.code, f"the stream is lost after {self.tokens} tokens: {error.message}", reason=error.reason,
            resume_token=self.resume_token)


def ended_early() -> ClientError:
    """A stream that ended well but without a finish: some proxy's doing."""
    return ClientError(grpc.StatusCode.UNKNOWN, "the stream ended without a finish")
