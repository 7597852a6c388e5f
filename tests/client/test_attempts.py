"""How a call goes on, without I/O: whatever fails where, the text is whole or an error of one kind says why not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.client import ClientError, Conflict, NotFound, Overloaded, ServerError, StreamLost, Unavailable
from npuserve.client.attempts import FIRST_WAIT, MIN_JITTER, Attempts, Retries
from npuserve.client.errors import KINDS
from npuserve.v1 import generate_pb2 as pb
from tests.client.counting import TEXT, WHOLE, parts

S = grpc.StatusCode


def failure(code: S, **fields: Any) -> ClientError:
    return KINDS.get(code, ServerError)(code, "said", **fields)


PASSING = st.one_of(
    st.sampled_from([S.UNAVAILABLE, S.INTERNAL, S.UNKNOWN, S.CANCELLED]).map(failure),
    st.sampled_from([S.UNAVAILABLE, S.RESOURCE_EXHAUSTED]).map(
        lambda code: failure(code, reason="QUEUE_FULL", retry_seconds=0.25)))
FINAL = st.one_of(
    st.sampled_from([S.INTERNAL, S.UNKNOWN, S.CANCELLED]).map(lambda code: failure(code, reason="INTERNAL_ERROR")),
    st.sampled_from([S.INVALID_ARGUMENT, S.DEADLINE_EXCEEDED, S.ABORTED, S.UNAUTHENTICATED, S.RESOURCE_EXHAUSTED,
                     S.UNIMPLEMENTED, S.DATA_LOSS]).map(failure))
CALL = st.tuples(
    st.booleans(),  # does its initial metadata come
    st.integers(0, 8),  # so many messages do
    st.lists(st.integers(1, 5), min_size=1, max_size=4),  # of so many tokens
    PASSING,
)


def attempts() -> Attempts:
    return Attempts(pb.GenerateRequest(text="x"), Retries(None, 1e9))


def answered(made: Attempts, server: dict[str, bool], metadata: bool, count: int, sizes: list[int]) -> str:
    """One call of a server that remembers its streams: what came of it."""
    name, message, _ = made.next()
    if isinstance(message, pb.ResumeStreamRequest):
        assert (name, message.token_offset) == ("ResumeStream", made.tokens)
        if not server.get(message.resume_token):
            raise failure(S.NOT_FOUND, reason="STREAM_NOT_FOUND")
        begin = message.token_offset
    else:
        assert (name, made.tokens) == ("StreamGenerate", 0)
        begin, token = 0, f"token-{len(server)}"
        server[token] = True
        if metadata or count:
            made.began((("x-request-id", "r"), ("x-resume-token", token)))
    return "".join(made.take(part).text for part in parts(begin, sizes)[:count])


@given(calls=st.lists(CALL, max_size=12))
def test_any_failures_leave_the_text_whole(calls: list[tuple[bool, int, list[int], ClientError]]) -> None:
    made, text, server = attempts(), "", dict[str, bool]()
    for metadata, count, sizes, error in calls:
        text += answered(made, server, metadata, count, sizes)
        assert text == "".join(TEXT[: made.tokens])
        if made.finish:
            break
        assert made.failed(error) >= (error.retry_seconds or 0.0)
    if not made.finish:
        text += answered(made, server, True, 99, [1])
    assert text == WHOLE
    assert made.request_id == "r"


@given(calls=st.lists(CALL, max_size=3), error=FINAL)
def test_a_final_failure_is_raised_as_it_is(
    calls: list[tuple[bool, int, list[int], ClientError]], error: ClientError
) -> None:
    made, server = attempts(), dict[str, bool]()
    for metadata, _, sizes, passing in calls:
        answered(made, server, metadata, 1, sizes)
        if made.finish:
            return
        made.failed(passing)
    with pytest.raises(type(error)) as raised:
        made.failed(error)
    assert raised.value is error
    assert error.resume_token == made.resume_token


@pytest.mark.parametrize("messages", [0, 2])
def test_a_stream_that_the_server_forgot(messages: int) -> None:
    """It is asked for anew if nothing had come, and lost otherwise."""
    made, server = attempts(), dict[str, bool]()
    answered(made, server, True, messages, [1])
    made.failed(failure(S.UNAVAILABLE))
    server.clear()
    with pytest.raises(NotFound) as gone:
        answered(made, server, True, 1, [1])
    if messages:
        with pytest.raises(StreamLost, match="lost after 2 tokens") as lost:
            made.failed(gone.value)
        assert lost.value.resume_token == "token-0"
    else:
        made.failed(gone.value)
        assert made.next()[0] == "StreamGenerate"


def test_not_found_of_anything_but_the_stream_is_final() -> None:
    """Whatever the initial metadata had, and whichever call it is the answer to."""
    for reason in ("MODEL_NOT_FOUND", "REQUEST_NOT_FOUND", ""):
        made, server = attempts(), dict[str, bool]()
        answered(made, server, True, 0, [1])
        error = failure(S.NOT_FOUND, reason=reason)
        with pytest.raises(NotFound) as raised:
            made.failed(error)
        assert raised.value is error
        answered(made, server, True, 2, [1])
        made.failed(failure(S.UNAVAILABLE))
        assert made.next()[0] == "ResumeStream"
        with pytest.raises(NotFound) as raised:
            made.failed(error)
        assert raised.value is error


def test_stream_not_found_is_final_for_a_call_that_does_not_resume() -> None:
    made = attempts()
    made.next()
    made.began((("x-resume-token", "t"),))
    with pytest.raises(NotFound):
        made.failed(failure(S.NOT_FOUND, reason="STREAM_NOT_FOUND"))


ANY = st.builds(
    lambda code, reason, retry: failure(code, reason=reason, retry_seconds=retry),
    st.sampled_from([S.NOT_FOUND, S.UNAVAILABLE, S.UNKNOWN, S.ALREADY_EXISTS, S.RESOURCE_EXHAUSTED, S.ABORTED]),
    st.sampled_from(["", "STREAM_NOT_FOUND", "MODEL_NOT_FOUND", "DUPLICATE_REQUEST", "UNAVAILABLE"]),
    st.none() | st.floats(-1.0, 1.0))


@given(calls=st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 1), ANY), max_size=12))
def test_no_two_calls_are_closer_than_the_minimum_back_off(calls: list[tuple[bool, int, int, ClientError]]) -> None:
    made = attempts()
    for has_token, messages, tokens, error in calls:
        made.next()
        if has_token:
            made.began((("x-resume-token", "t"),))
        for _ in range(messages):
            made.take(pb.StreamGenerateResponse(offset=made.tokens, num_tokens=tokens))
        try:
            assert made.failed(error) >= FIRST_WAIT * MIN_JITTER
        except ClientError:
            return


def test_patience_bounds_a_server_that_forgets_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, names = [0.0], []
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    made = Attempts(pb.GenerateRequest(text="x"), Retries(None, 3.0))

    def call() -> None:
        names.append(made.next()[0])
        made.began((("x-resume-token", f"token-{len(names)}"),))
        forgot = failure(S.NOT_FOUND, reason="STREAM_NOT_FOUND")
        clock[0] += made.failed(forgot if names[-1] == "ResumeStream" else failure(S.UNAVAILABLE))

    with pytest.raises((NotFound, Unavailable)):
        repeat(call)
    assert set(names) == {"StreamGenerate", "ResumeStream"}
    assert len(names) < 20
    assert clock[0] <= 3.0


def test_messages_without_tokens_do_not_end_a_row_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    made = Attempts(pb.GenerateRequest(text="x"), Retries(None, 3.0))

    def call() -> None:
        made.next()
        made.began((("x-resume-token", "t"),))
        made.take(pb.StreamGenerateResponse(offset=0))
        clock[0] += made.failed(failure(S.UNAVAILABLE))

    with pytest.raises(Unavailable):
        repeat(call)
    assert clock[0] <= 3.0


def repeat(call: Callable[[], None]) -> None:
    for _ in range(1000):
        call()


def test_the_request_id_of_an_error_is_in_its_trailing_metadata() -> None:
    made = attempts()
    made.began(None)
    made.began((("x-request-id", "r"),))
    assert (made.request_id, made.resume_token) == ("r", "")


def test_without_a_resume_token_what_came_cannot_be_continued() -> None:
    made = attempts()
    made.began(())
    made.failed(failure(S.UNAVAILABLE))
    made.take(parts()[0])
    with pytest.raises(StreamLost, match="lost after 1 tokens"):
        made.failed(failure(S.UNAVAILABLE))


@pytest.mark.parametrize(("code", "reason"), [(S.RESOURCE_EXHAUSTED, "QUEUE_FULL"), (S.UNAVAILABLE, "UNAVAILABLE")])
def test_what_the_server_did_not_take_is_asked_for_anew(code: S, reason: str) -> None:
    made = attempts()
    made.began((("x-resume-token", "t"),))
    made.failed(failure(S.UNAVAILABLE))
    assert made.next()[0] == "ResumeStream"
    made.failed(failure(code, reason=reason, retry_seconds=0.1))
    assert made.next()[0] == "StreamGenerate"
    made.began((("x-resume-token", "u"),))
    made.take(parts()[0])
    made.failed(failure(code, reason=reason, retry_seconds=0.1))
    assert made.next()[1] == pb.ResumeStreamRequest(resume_token="u", token_offset=1)


def test_a_request_id_of_our_own_is_live_until_the_server_sees_the_connection_gone() -> None:
    made = attempts()
    made.next()
    with pytest.raises(Conflict):
        made.failed(failure(S.ALREADY_EXISTS, reason="DUPLICATE_REQUEST"))
    made.next()
    made.failed(failure(S.ALREADY_EXISTS, reason="DUPLICATE_REQUEST"))


@pytest.mark.parametrize("offset", [0, 2, 7])
def test_a_gap_or_a_repetition_is_an_error(offset: int) -> None:
    made = attempts()
    made.take(parts()[0])
    with pytest.raises(ServerError, match=f"a message at token {offset} where 1 was next"):
        made.take(pb.StreamGenerateResponse(text="x", offset=offset, num_tokens=1))


@given(sizes=st.lists(st.lists(st.integers(1, 4), max_size=6), max_size=4))
def test_prompt_logprobs_of_streams_resumed_at_token_0_come_once(sizes: list[list[int]]) -> None:
    """Each call sends all positions from the first on, in messages of any size, and all but the last call break."""
    made, received = attempts(), []
    for call in [*sizes, [30]]:
        made.next()
        sent = 0
        for size in call:
            message = pb.StreamGenerateResponse()
            for position in range(sent, sent + size):
                message.prompt_logprobs.add().chosen.token_id = position
            sent += size
            received += [position.chosen.token_id for position in made.take(message).prompt_logprobs]
    assert received == list(range(30))


@given(retry=st.none() | st.floats(0, 3), failures=st.integers(1, 30))
def test_waits_are_at_least_the_servers_and_bounded(retry: float | None, failures: int) -> None:
    retries = Retries(None, 1e9)
    error = failure(S.UNAVAILABLE, retry_seconds=retry)
    waits = [retries.wait(error) for _ in range(failures)]
    assert all((retry or 0.0) <= wait <= max(5.0, 1.25 * (retry or 0.0)) for wait in waits)
    assert waits[0] <= max(0.05, 1.25 * (retry or 0.0))


@pytest.mark.parametrize(("timeout", "patience", "retry"), [
    (None, 0.0, None), (None, 5.0, 10.0), (3.0, 60.0, 4.0), (1e-6, 60.0, None)])
def test_what_would_wait_beyond_patience_or_deadline_is_raised_at_once(
    timeout: float | None, patience: float, retry: float | None
) -> None:
    error = failure(S.RESOURCE_EXHAUSTED, retry_seconds=retry)
    with pytest.raises(Overloaded) as raised:
        Retries(timeout, patience).wait(error)
    assert raised.value is error


def test_patience_is_of_failures_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 0.9)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    retries, error = Retries(None, 1.5), failure(S.UNAVAILABLE)
    for _ in range(5):
        retries.wait(error)
        retries.progress()
    retries.wait(error)
    retries.wait(error)
    with pytest.raises(Unavailable):
        retries.wait(error)


@pytest.mark.parametrize(("timeout", "patience", "said"), [
    (0.0, 1.0, "timeout: must be above 0"), (-1.0, 1.0, "timeout"), (float("nan"), 1.0, "timeout"),
    (None, -1.0, "patience: must be at least 0"), (None, float("nan"), "patience")])
def test_settings_out_of_range(timeout: float | None, patience: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Retries(timeout, patience)
