"""Rules for retrying and resuming, without I/O: the text is complete after any failures, or a typed error is raised."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.client import ClientError, Conflict, NotFound, Overloaded, ServerError, StreamLost, Unavailable
from npuserve.client.attempts import (
    MAX_BACKOFF_SECONDS,
    MIN_BACKOFF_SECONDS,
    MIN_JITTER,
    Attempts,
    Retries,
    add_message,
)
from npuserve.client.rpc_errors import KINDS
from npuserve.common.answer import Answer
from npuserve.v1 import generate_pb2 as pb
from tests.client.counting import TEXT, WHOLE, parts, sample_parts

S = grpc.StatusCode


def failure(code: S, **fields: Any) -> ClientError:
    return KINDS.get(code, ServerError)(code, "details", **fields)


TRANSIENT = st.one_of(
    st.sampled_from([S.UNAVAILABLE, S.INTERNAL, S.UNKNOWN, S.CANCELLED]).map(failure),
    st.sampled_from([S.UNAVAILABLE, S.RESOURCE_EXHAUSTED]).map(
        lambda code: failure(code, reason="QUEUE_FULL", retry_seconds=0.25)))
FINAL = st.one_of(
    st.sampled_from([S.INTERNAL, S.UNKNOWN, S.CANCELLED]).map(lambda code: failure(code, reason="INTERNAL_ERROR")),
    st.sampled_from([S.INVALID_ARGUMENT, S.DEADLINE_EXCEEDED, S.ABORTED, S.UNAUTHENTICATED, S.RESOURCE_EXHAUSTED,
                     S.UNIMPLEMENTED, S.DATA_LOSS]).map(failure))
CALL = st.tuples(
    st.booleans(),  # whether the initial metadata is received
    st.integers(0, 8),  # number of messages received
    st.lists(st.integers(1, 5), min_size=1, max_size=4),  # tokens of each message
    TRANSIENT,
)


def attempts() -> Attempts:
    return Attempts(pb.GenerateRequest(text="x"), Retries(None, 1e9))


def make_call(attempt: Attempts, server: dict[str, bool], metadata: bool, count: int, sizes: list[int]) -> str:
    """Make one call to a server that keeps its streams, and return the text received."""
    name, message, _ = attempt.next_call()
    if isinstance(message, pb.ResumeStreamRequest):
        assert (name, message.token_offset) == ("ResumeStream", attempt.tokens)
        if not server.get(message.resume_token):
            raise failure(S.NOT_FOUND, reason="STREAM_NOT_FOUND")
        begin = message.token_offset
    else:
        assert (name, attempt.tokens) == ("StreamGenerate", 0)
        begin, token = 0, f"token-{len(server)}"
        server[token] = True
        if metadata or count:
            attempt.read_metadata((("x-request-id", "r"), ("x-resume-token", token)))
    return "".join(attempt.accept(part).text for part in parts(begin, sizes)[:count])


@given(calls=st.lists(CALL, max_size=12))
def test_attempts_after_any_failures_have_complete_text(calls: list[tuple[bool, int, list[int], ClientError]]) -> None:
    attempt, text, server = attempts(), "", dict[str, bool]()
    for metadata, count, sizes, error in calls:
        text += make_call(attempt, server, metadata, count, sizes)
        assert text == "".join(TEXT[: attempt.tokens])
        if attempt.finish:
            break
        assert attempt.on_failure(error) >= (error.retry_seconds or 0.0)
    if not attempt.finish:
        text += make_call(attempt, server, True, 99, [1])
    assert text == WHOLE
    assert attempt.request_id == "r"


@given(calls=st.lists(CALL, max_size=3), error=FINAL)
def test_on_failure_final_error_is_raised_unchanged(
    calls: list[tuple[bool, int, list[int], ClientError]], error: ClientError
) -> None:
    attempt, server = attempts(), dict[str, bool]()
    for metadata, _, sizes, transient in calls:
        make_call(attempt, server, metadata, 1, sizes)
        if attempt.finish:
            return
        attempt.on_failure(transient)
    with pytest.raises(type(error)) as raised:
        attempt.on_failure(error)
    assert raised.value is error
    assert error.resume_token == attempt.resume_token


@pytest.mark.parametrize("messages", [0, 2])
def test_resume_unknown_stream_is_sent_again_or_lost(messages: int) -> None:
    """The request is sent again if no message was received; otherwise the stream is lost."""
    attempt, server = attempts(), dict[str, bool]()
    make_call(attempt, server, True, messages, [1])
    attempt.on_failure(failure(S.UNAVAILABLE))
    server.clear()
    with pytest.raises(NotFound) as gone:
        make_call(attempt, server, True, 1, [1])
    if messages:
        with pytest.raises(StreamLost, match="lost after 2 tokens") as lost:
            attempt.on_failure(gone.value)
        assert lost.value.resume_token == "token-0"
    else:
        attempt.on_failure(gone.value)
        assert attempt.next_call()[0] == "StreamGenerate"


@pytest.mark.parametrize("tokens", [0, 3])
def test_resume_by_token_of_an_unknown_stream_is_not_found(tokens: int) -> None:
    attempt = Attempts(None, Retries(None, 1e9), "t", tokens)
    unknown = failure(S.NOT_FOUND, reason="STREAM_NOT_FOUND")
    attempt.next_call()
    with pytest.raises(NotFound) as raised:
        attempt.on_failure(unknown)
    assert raised.value is unknown
    attempt.accept(pb.StreamGenerateResponse(offset=tokens, num_tokens=1))
    with pytest.raises(StreamLost, match=f"lost after {tokens + 1} tokens"):
        attempt.on_failure(unknown)


def test_resume_with_empty_token_is_retried() -> None:
    attempt = Attempts(None, Retries(None, 1e9))
    attempt.on_failure(failure(S.UNAVAILABLE))
    assert attempt.next_call()[0] == "ResumeStream"


def test_on_failure_not_found_of_other_reasons_is_final() -> None:
    """With and without a resume token, for StreamGenerate and ResumeStream."""
    for reason in ("MODEL_NOT_FOUND", "REQUEST_NOT_FOUND", ""):
        attempt, server = attempts(), dict[str, bool]()
        make_call(attempt, server, True, 0, [1])
        error = failure(S.NOT_FOUND, reason=reason)
        with pytest.raises(NotFound) as raised:
            attempt.on_failure(error)
        assert raised.value is error
        make_call(attempt, server, True, 2, [1])
        attempt.on_failure(failure(S.UNAVAILABLE))
        assert attempt.next_call()[0] == "ResumeStream"
        with pytest.raises(NotFound) as raised:
            attempt.on_failure(error)
        assert raised.value is error


def test_on_failure_stream_not_found_of_stream_generate_is_final() -> None:
    attempt = attempts()
    attempt.next_call()
    attempt.read_metadata((("x-resume-token", "t"),))
    with pytest.raises(NotFound):
        attempt.on_failure(failure(S.NOT_FOUND, reason="STREAM_NOT_FOUND"))


ANY = st.builds(
    lambda code, reason, retry: failure(code, reason=reason, retry_seconds=retry),
    st.sampled_from([S.NOT_FOUND, S.UNAVAILABLE, S.UNKNOWN, S.ALREADY_EXISTS, S.RESOURCE_EXHAUSTED, S.ABORTED]),
    st.sampled_from(["", "STREAM_NOT_FOUND", "MODEL_NOT_FOUND", "DUPLICATE_REQUEST", "UNAVAILABLE"]),
    st.none() | st.floats(-1.0, 1.0))


@given(calls=st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 1), ANY), max_size=12))
def test_on_failure_waits_at_least_the_minimum_back_off(calls: list[tuple[bool, int, int, ClientError]]) -> None:
    attempt = attempts()
    for has_token, messages, tokens, error in calls:
        attempt.next_call()
        if has_token:
            attempt.read_metadata((("x-resume-token", "t"),))
        for _ in range(messages):
            attempt.accept(pb.StreamGenerateResponse(offset=attempt.tokens, num_tokens=tokens))
        try:
            assert attempt.on_failure(error) >= MIN_BACKOFF_SECONDS * MIN_JITTER
        except ClientError:
            return


def test_on_failure_server_without_streams_ends_after_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, names = [0.0], []
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    attempt = Attempts(pb.GenerateRequest(text="x"), Retries(None, 3.0))

    def call() -> None:
        names.append(attempt.next_call()[0])
        attempt.read_metadata((("x-resume-token", f"token-{len(names)}"),))
        unknown = failure(S.NOT_FOUND, reason="STREAM_NOT_FOUND")
        clock[0] += attempt.on_failure(unknown if names[-1] == "ResumeStream" else failure(S.UNAVAILABLE))

    with pytest.raises((NotFound, Unavailable)):
        repeat(call)
    assert set(names) == {"StreamGenerate", "ResumeStream"}
    assert len(names) < 20
    assert clock[0] <= 3.0


@pytest.mark.parametrize("tokens", [0, 1])
def test_accept_message_with_tokens_ends_consecutive_failures(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    attempt = Attempts(pb.GenerateRequest(text="x"), Retries(None, 3.0))

    def call() -> None:
        attempt.next_call()
        attempt.read_metadata((("x-resume-token", "t"),))
        attempt.accept(pb.StreamGenerateResponse(offset=attempt.tokens, num_tokens=tokens))
        clock[0] += attempt.on_failure(failure(S.UNAVAILABLE))

    with contextlib.nullcontext() if tokens else pytest.raises(Unavailable):
        repeat(call)
    assert (clock[0] > 3.0) == bool(tokens)


def repeat(call: Callable[[], None]) -> None:
    for _ in range(1000):
        call()


def test_read_metadata_takes_request_id_of_an_error() -> None:
    attempt = attempts()
    attempt.read_metadata(None)
    attempt.read_metadata((("x-request-id", "r"),))
    assert (attempt.request_id, attempt.resume_token) == ("r", "")


def test_on_failure_partial_answer_without_resume_token_is_lost() -> None:
    attempt = attempts()
    attempt.read_metadata(())
    attempt.on_failure(failure(S.UNAVAILABLE))
    attempt.accept(parts()[0])
    with pytest.raises(StreamLost, match="lost after 1 tokens"):
        attempt.on_failure(failure(S.UNAVAILABLE))


@pytest.mark.parametrize(("code", "reason"), [(S.RESOURCE_EXHAUSTED, "QUEUE_FULL"), (S.UNAVAILABLE, "UNAVAILABLE")])
def test_on_failure_refused_request_is_sent_again(code: S, reason: str) -> None:
    attempt = attempts()
    attempt.read_metadata((("x-resume-token", "t"),))
    attempt.on_failure(failure(S.UNAVAILABLE))
    assert attempt.next_call()[0] == "ResumeStream"
    attempt.on_failure(failure(code, reason=reason, retry_seconds=0.1))
    assert attempt.next_call()[0] == "StreamGenerate"
    attempt.read_metadata((("x-resume-token", "u"),))
    attempt.accept(parts()[0])
    attempt.on_failure(failure(code, reason=reason, retry_seconds=0.1))
    assert attempt.next_call()[1] == pb.ResumeStreamRequest(resume_token="u", token_offset=1)


def test_on_failure_duplicate_of_own_request_id_is_transient() -> None:
    attempt = attempts()
    attempt.next_call()
    with pytest.raises(Conflict):
        attempt.on_failure(failure(S.ALREADY_EXISTS, reason="DUPLICATE_REQUEST"))
    attempt.next_call()
    attempt.on_failure(failure(S.ALREADY_EXISTS, reason="DUPLICATE_REQUEST"))
    with pytest.raises(Conflict):
        attempt.on_failure(failure(S.ALREADY_EXISTS))


@pytest.mark.parametrize("offset", [0, 2, 7])
def test_accept_wrong_offset_raises_server_error(offset: int) -> None:
    attempt = attempts()
    attempt.accept(parts()[0])
    with pytest.raises(ServerError, match=f"a message at token {offset} where 1 was next"):
        attempt.accept(pb.StreamGenerateResponse(text="x", offset=offset, num_tokens=1))


def samples(count: int) -> Attempts:
    return Attempts(pb.GenerateRequest(text="x", n=count), Retries(None, 1e9))


def test_accept_samples_until_each_has_its_finish() -> None:
    attempt, texts = samples(3), ["", "", ""]
    messages = sample_parts(3)
    for message in messages:
        assert not attempt.is_complete
        texts[message.index] += attempt.accept(message).text
    assert texts == [WHOLE] * 3
    assert attempt.is_complete
    assert attempt.tokens == 3 * len(TEXT)
    assert sorted(attempt.finishes) == [0, 1, 2]
    assert attempt.finish == messages[-1].finish


@pytest.mark.parametrize(("message", "error"), [
    (pb.StreamGenerateResponse(index=2), "a message of sample 2, which has ended or was not requested"),
    (pb.StreamGenerateResponse(index=0, offset=13), "a message of sample 0, which has ended"),
    (pb.StreamGenerateResponse(index=1, offset=13), "a message at token 13 where 0 was next"),
])
def test_accept_message_of_a_wrong_sample_raises_server_error(message: pb.StreamGenerateResponse, error: str) -> None:
    attempt = samples(2)
    for part in parts():
        attempt.accept(part)
    with pytest.raises(ServerError, match=error):
        attempt.accept(message)


def test_add_message_that_skips_a_tool_call_raises_server_error() -> None:
    message = pb.StreamGenerateResponse(tool_calls=[pb.ToolCallDelta(index=1)])
    with pytest.raises(ServerError, match="a message of tool call 1 where 0 was next"):
        add_message(Answer(1), message)


def test_on_failure_samples_are_sent_again_only_before_a_message() -> None:
    attempt = samples(2)
    for _ in range(2):
        assert attempt.next_call()[0] == "StreamGenerate"
        attempt.read_metadata((("x-request-id", "r"),))
        attempt.on_failure(failure(S.UNAVAILABLE))
    attempt.next_call()
    attempt.accept(sample_parts(2)[0])
    with pytest.raises(StreamLost, match="lost after 2 tokens"):
        attempt.on_failure(failure(S.UNAVAILABLE))


@given(sizes=st.lists(st.lists(st.integers(1, 4), max_size=6), max_size=4))
def test_accept_prompt_logprobs_of_resumed_streams_are_not_repeated(sizes: list[list[int]]) -> None:
    """Each call sends all positions from the first, in messages of any size. All calls but the last fail."""
    attempt, received = attempts(), []
    for call in [*sizes, [30]]:
        attempt.next_call()
        sent = 0
        for size in call:
            message = pb.StreamGenerateResponse()
            for position in range(sent, sent + size):
                message.prompt_logprobs.add().chosen.token_id = position
            sent += size
            received += [position.chosen.token_id for position in attempt.accept(message).prompt_logprobs]
    assert received == list(range(30))


@given(retry=st.none() | st.floats(0, 3), failures=st.integers(1, 30))
def test_backoff_is_at_least_the_retry_time_and_bounded(retry: float | None, failures: int) -> None:
    retries = Retries(None, 1e9)
    error = failure(S.UNAVAILABLE, retry_seconds=retry)
    waits = [retries.backoff(error) for _ in range(failures)]
    assert all((retry or 0.0) <= wait <= max(5.0, 1.25 * (retry or 0.0)) for wait in waits)
    assert waits[0] <= max(0.05, 1.25 * (retry or 0.0))


@pytest.mark.parametrize(("timeout", "patience", "retry"), [
    (None, 0.0, None), (None, 5.0, 10.0), (3.0, 60.0, 4.0), (1e-6, 60.0, None)])
def test_backoff_beyond_patience_or_deadline_raises_at_once(
    timeout: float | None, patience: float, retry: float | None
) -> None:
    error = failure(S.RESOURCE_EXHAUSTED, retry_seconds=retry)
    with pytest.raises(Overloaded) as raised:
        Retries(timeout, patience).backoff(error)
    assert raised.value is error


def test_backoff_before_the_deadline_with_endless_patience_never_ends() -> None:
    retries, error = Retries(1e8, math.inf), failure(S.UNAVAILABLE)
    assert all(retries.backoff(error) <= MAX_BACKOFF_SECONDS for _ in range(2000))


def test_backoff_patience_counts_consecutive_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 0.9)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    retries, error = Retries(None, 1.5), failure(S.UNAVAILABLE)
    for _ in range(5):
        retries.backoff(error)
        retries.reset()
    retries.backoff(error)
    retries.backoff(error)
    with pytest.raises(Unavailable):
        retries.backoff(error)


@pytest.mark.parametrize(("timeout", "expected"), [
    (None, None), (math.inf, None), (1e9, 1e9), (1e10, 1e9), (10**400, 1e9), (5, 5.0)])
def test_remaining_of_a_long_timeout_is_one_that_grpc_can_hold(
    monkeypatch: pytest.MonkeyPatch, timeout: float | None, expected: float | None
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 1000.0)
    assert Retries(timeout, 1.0).remaining() == expected


def test_backoff_of_a_huge_retry_time_is_one_that_threads_can_wait() -> None:
    error = failure(S.UNAVAILABLE, retry_seconds=1e18)
    assert Retries(None, math.inf).backoff(error) <= threading.TIMEOUT_MAX


@pytest.mark.parametrize(("timeout", "patience", "message"), [
    (0.0, 1.0, "timeout: must be above 0"), (-1.0, 1.0, "timeout"), (float("nan"), 1.0, "timeout"),
    (None, -1.0, "patience: must be at least 0"), (None, float("nan"), "patience")])
def test_retries_argument_out_of_range_raises(timeout: float | None, patience: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Retries(timeout, patience)


@pytest.mark.parametrize(("timeout", "patience", "message"), [
    ("5", 1.0, "timeout: must be a number of seconds, got str"),
    (None, "a", "patience: must be a number of seconds, got str"),
    (None, None, "patience: must be a number of seconds, got NoneType")])
def test_retries_argument_of_another_type_raises(timeout: Any, patience: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}"):
        Retries(timeout, patience)
