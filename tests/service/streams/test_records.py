"""Store of resumable streams: limits, expiry, owners, and the file across a restart."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.npu.step import SamplingParams, TokenLogprobs
from npuserve.service.ipc.messages import (
    MAX_RESTORE_BYTES,
    Constraint,
    EndedRecord,
    Finish,
    Output,
    Record,
    Request,
    Timing,
    decode_to_engine,
    encode,
)
from npuserve.service.streams.records import (
    Records,
    is_resumable,
    max_size,
    new_token,
    restore_messages,
)

TIMING = Timing(0.5, [1.0], 2.0, 1.5, 0.5, 4.0)


def record(token: str, tokens: int = 3, owner: str = "me", finish: bool = False) -> Record:
    made = Record(Request(f"name of {token}", [1, 2, 3], 50, 0.0, owner=owner, resume_token=token))
    made.add(Output(1, list(range(tokens)), Finish("length", 3, 0, tokens, TIMING) if finish else None))
    return made


def encoded(one: Record) -> EndedRecord:
    """Return the ended record of a front end whose stream lost its reader at second 0.5."""
    of_front_end = Records(1e9)
    of_front_end.end(one, 0.5)
    return of_front_end.ended(0.5)[0]


def test_new_token_is_long_random_and_fits_metadata() -> None:
    tokens = {new_token() for _ in range(1000)}
    assert len(tokens) == 1000
    assert all(len(token) >= 32 and token.replace("-", "a").replace("_", "a").isalnum() for token in tokens)


def test_records_find_only_for_owner_until_expiry() -> None:
    kept = Records(10.0)
    one = record("t")
    kept.begin(one)
    assert kept.find("t", "me", 1e9) is one  # live records do not expire
    assert kept.find("t", "other", 0.0) is None
    assert kept.find("t", "", 0.0) is None
    assert kept.find("", "me", 0.0) is None
    kept.end(one, 100.0)
    assert kept.find("t", "me", 109.9) == one
    assert kept.find("t", "me", 110.0) is None
    kept.check_integrity()


def test_records_find_without_owner_for_any_caller() -> None:
    kept = Records(10.0)
    kept.begin(one := record("t", owner=""))
    assert kept.find("t", "", 0.0) is one
    assert kept.find("t", "me", 0.0) is one
    assert kept.find("u", "", 0.0) is None


def test_records_zero_seconds_keeps_nothing() -> None:
    kept = Records(0.0)
    one = record("t")
    kept.begin(one)
    kept.end(one, 0.0)
    assert kept.find("t", "me", 0.0) is None
    assert kept.ended(0.0) == []


def test_records_without_token_keeps_nothing() -> None:
    kept = Records(10.0)
    kept.begin(record(""))
    kept.end(record(""), 0.0)
    assert (kept.live, kept.ended(0.0)) == ({}, [])


def test_records_too_many_drops_oldest() -> None:
    kept = Records(10.0, max_records=3)
    for number in range(5):
        kept.end(record(str(number)), float(number))
    assert [one.token for one in kept.ended(5.0)] == ["2", "3", "4"]
    kept.begin(record("3"))
    assert [one.token for one in kept.ended(5.0)] == ["2", "4"]
    kept.check_integrity()


def test_records_too_many_bytes_drops_ended_only() -> None:
    kept = Records(10.0, max_bytes=3 * 800)
    kept.begin(live := record("live", 10_000))
    for number in range(5):
        kept.end(record(str(number), 100), float(number))
    assert len(kept.ended(5.0)) == 3
    kept.end(record("big", 10_000), 6.0)
    assert kept.ended(6.0) == []
    assert kept.find("live", "me", 6.0) is live


REPORT = TokenLogprobs(1 << 31, -0.1, 1 << 31, [1 << 31] * 20, [-0.1] * 20)
IDS = st.lists(st.integers(0, (1 << 32) - 1), max_size=50)


@given(prompt=IDS, allowed=IDS, ending=IDS, stop=IDS, bias=IDS, made=IDS, reports=st.integers(0, 30),
       top=st.integers(0, 20), text=st.text(max_size=200))
def test_max_size_bounds_encoded_record(
    prompt: list[int], allowed: list[int], ending: list[int], stop: list[int], bias: list[int], made: list[int],
    reports: int, top: int, text: str,
) -> None:
    sampling = SamplingParams(
        logit_bias=dict.fromkeys(bias, 0.1), allowed_token_ids=tuple(allowed), ending_ids=tuple(ending), logprobs=top,
        prompt_logprobs=top)
    request = Request("r" * 128, prompt, 1 << 20, 1e6 / 3, sampling, frozenset(stop), frozenset(stop),
                      options=b"x" * 99, client="c" * 128, owner="o" * 128, cache_salt="s" * 128,
                      resume_token=new_token(), constraint=Constraint("structural_tag", text))
    report = msgspec.structs.replace(REPORT, top_ids=REPORT.top_ids[:top], top_logprobs=REPORT.top_logprobs[:top])
    finish = Finish("length", 9, 9, 9, TIMING)
    one = Record(request, made, [report] * reports, [report] * reports, finish, 1.5, 3, TIMING)
    assert len(msgspec.msgpack.encode(one)) <= max_size(request, len(made), reports, reports)


def large(token: str, ids: int = 4000) -> Record:
    """Return a record whose request has many token ids."""
    sampling = SamplingParams(
        logit_bias={1000 + i: 0.5 for i in range(1024)}, allowed_token_ids=tuple(range(1000, 1000 + ids)),
        ending_ids=tuple(range(2000, 2100)))
    return Record(Request(f"name of {token}", [1, 2, 3], 50, 0.0, sampling, owner="me", resume_token=token), [5, 6])


@pytest.mark.slow
def test_records_memory_is_counted() -> None:
    import tracemalloc

    kept, most = Records(1e9, max_records=100_000, max_bytes=2 << 20), 0
    tracemalloc.start()
    for number in range(300):
        kept.end(large(str(number)), 0.0)
        most = max(most, kept._bytes)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 50 < len(kept.ended(0.0)) < 300
    assert most <= (2 << 20) + len(kept.ended(0.0)[0].data) + 600
    assert taken < 3 << 20


@pytest.mark.parametrize(("change", "fits"), [
    ({}, True), ({"sampling": SamplingParams(allowed_token_ids=tuple(range(151_936)))}, True),
    ({"max_tokens": 32_768, "sampling": SamplingParams(logprobs=0)}, True),
    ({"max_tokens": 32_768, "sampling": SamplingParams(logprobs=20)}, False),
    ({"prompt_ids": [1] * 40_000, "sampling": SamplingParams(prompt_logprobs=20)}, False),
    ({"prompt_ids": [1] * 2_000_000}, False)])
def test_is_resumable_if_largest_record_fits(change: dict[str, Any], fits: bool) -> None:
    assert is_resumable(msgspec.structs.replace(record("t").request, **change)) is fits


def test_restore_messages_are_bounded_and_complete() -> None:
    live = [(key, large(f"live {key}", 100 * key)) for key in range(80)]
    ended = Records(1e9)
    for number in range(80):
        ended.end(large(f"ended {number}", 100 * number), 0.0)
    parts = list(restore_messages(iter(live), lambda: ended.ended(0.0)))
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert [pair for part in parts for pair in part.live] == live
    assert [one.token for part in parts for one in part.ended] == [f"ended {n}" for n in range(80)]
    largest = max_size(live[-1][1].request, 2, 0, 0)
    assert max(len(encode(part)) for part in parts) <= MAX_RESTORE_BYTES + largest
    assert len(parts) > 20
    for part in parts:
        assert decode_to_engine(encode(part)[4:]) == part


def test_restore_messages_omit_streams_that_end_meanwhile() -> None:
    gone: set[int] = set()
    live = ((key, large(str(key))) for key in range(50) if key not in gone)
    parts = restore_messages(live, lambda: [])
    first = [key for key, _ in next(parts).live]
    gone.add(first[-1] + 1)
    assert [key for part in parts for key, _ in part.live] == list(range(first[-1] + 2, 50))


@given(st.lists(st.tuples(st.sampled_from(["begin", "end", "drop", "restore", "find"]), st.sampled_from("abcd"),
                          st.integers(0, 5)), max_size=40))
def test_records_token_is_stored_once(doings: list[tuple[str, str, int]]) -> None:
    kept = Records(5.0, max_records=3, max_bytes=6000)
    for now, (what, token, tokens) in enumerate(doings):
        if what in ("begin", "end", "restore"):
            one = kept.live.get(token) if what == "end" else None
            one = one or record(token, tokens)
            if what == "restore":
                kept.restore([encoded(one)], float(now))
            else:
                kept.begin(one) if what == "begin" else kept.end(one, float(now))
        elif what == "drop":
            kept.drop(token)
        else:
            kept.find(token, "me", float(now))
        kept.check_integrity()
        assert len(kept.ended(float(now))) <= 3


def test_records_restore_keeps_more_complete_record() -> None:
    kept = Records(10.0)
    kept.restore([encoded(record("t", 5)), encoded(record("t", 3))], 1.0)
    kept.restore([encoded(record("u", 3, finish=True)), encoded(record("u", 5))], 1.0)
    kept.begin(live := record("v", 1))
    kept.restore([encoded(record("v", 9, finish=True))], 1.0)
    found = {token: kept.find(token, "me", 1.0) for token in "tuv"}
    assert [len(found[token].token_ids) for token in "tu"] == [5, 3]  # type: ignore[union-attr]
    assert found["v"] is live


def test_records_of_several_front_ends_expire_by_age() -> None:
    kept, limited = Records(60.0), Records(60.0, max_records=1)
    new, old = (msgspec.structs.replace(encoded(record(token, 1)), ended=ended)
                for token, ended in (("new", 995.0), ("old", 945.0)))
    for each in (kept, limited):
        each.restore([new], 1000.0)
        each.restore([old], 1000.0)
    assert [one.token for one in kept.ended(1000.0)] == ["old", "new"]
    assert [one.token for one in limited.ended(1000.0)] == ["new"]
    assert kept.find("old", "me", 1006.0) is None
    assert kept.find("new", "me", 1006.0)


def test_record_rest_of_request() -> None:
    report = TokenLogprobs(1, -1.0, 1, [], [])
    one = record("t", 4)
    one.request = msgspec.structs.replace(
        one.request, sampling=msgspec.structs.replace(one.request.sampling, prompt_logprobs=1))
    one.add(Output(1, prompt_logprobs=[report]))
    one.cached_tokens, one.timing = 2, TIMING
    rest = one.continuation(accepted=True)
    assert (rest.output_ids, rest.sampling.prompt_logprobs) == ([0, 1, 2, 3], 1)
    assert (rest.progress.num_reported, rest.progress.cached_tokens, rest.progress.timing) == (1, 2, TIMING)
    one.add(Output(1, prompt_logprobs=[report]))
    assert one.continuation(accepted=False).sampling.prompt_logprobs is None  # all positions were reported
    assert one.request.sampling.prompt_logprobs == 1
    one.add(Output(1, [9, 9], Finish("stop_string", 3, 0, 5, TIMING)))
    assert one.token_ids == [0, 1, 2, 3, 9]
