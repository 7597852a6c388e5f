"""Response messages: the same answer for any partition of the outputs, and the stream contract in each message."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.client.aio import AsyncClient
from npuserve.npu.step import TokenLogprobs
from npuserve.service.frontend.response import ResponseBuilder
from npuserve.service.ipc.messages import Finish, Output, Timing
from npuserve.service.requests import validation
from npuserve.service.text.model_folder import ModelFolder, open_folder
from npuserve.v1 import generate_pb2 as pb
from tests.support.fake_engine import EOS, INFO, make_folder
from tests.support.front_end import ask, running

TIMING = Timing(queue=0.5, prefill_chunks=[0.25, 0.125], decode=1.0, device=0.75, host=0.25, last_step_end=11.875)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    path = make_folder(tmp_path_factory.mktemp("model"))
    return open_folder(path, str(path), "counting")


def answer(
    folder: ModelFolder, message: pb.GenerateRequest, ids: list[int], reason: str, cuts: Sequence[int] = ()
) -> list[pb.StreamGenerateResponse]:
    """Return the messages of an answer of `ids`, with outputs that end at `cuts`, and one message taken after each."""
    checked = validation.check(message, folder, INFO, "r", 10.0)
    sampling = checked.request.sampling
    builder = ResponseBuilder(checked, folder.tokenizer)
    borders = [0, *sorted(set(cuts) & set(range(1, len(ids)))), len(ids)]
    parts = []
    for start, end in itertools.pairwise(borders):
        finish = Finish(reason, 2, 1, len(ids), TIMING) if end == len(ids) else None  # type: ignore[arg-type]
        reports = [TokenLogprobs(i, -1.0, 2, [0], [-0.5]) for i in ids[start:end]]
        logprobs = reports if sampling.logprobs is not None else None
        given = builder.add([Output(1, ids[start:end], finish, None, logprobs)])
        if builder.keep is not None or given:
            parts.append(builder.last_message(given or Finish("stop_string", 2, 1, builder.keep or 0, TIMING), 12.0))
            break
        part = builder.next_message(10.0)
        if part:
            parts.append(part)
    return parts


def joined(parts: list[pb.StreamGenerateResponse]) -> tuple[str, list[int], pb.Finish]:
    """Return text, ids and finish. Check the contract: offsets, logprobs with their tokens, one finish at the end."""
    ids: list[int] = []
    for part in parts:
        assert part.offset == len(ids)
        ids += part.token_ids
        assert not part.logprobs or [p.chosen.token_id for p in part.logprobs] == list(part.token_ids)
        assert part.HasField("finish") == (part is parts[-1])
    return "".join(part.text for part in parts), ids, parts[-1].finish


@given(data=st.data())
def test_response_any_partition_gives_same_answer(folder: ModelFolder, data: st.DataObject) -> None:
    tokenizer = folder.tokenizer
    assert tokenizer
    text = data.draw(st.text(alphabet="abcé中😀", min_size=1, max_size=20))
    stop = data.draw(st.lists(st.sampled_from(["ab", "abc", "中", "é😀", "c"]), unique=True, max_size=3))
    include = data.draw(st.booleans())
    ids = tokenizer.encode(text)[:60]
    cuts = data.draw(st.lists(st.integers(1, 60), max_size=30))
    message = ask("ab", 60, stop=stop, include_stop=include, return_token_ids=True, logprobs=1)
    got, got_ids, finish = joined(answer(folder, message, ids, "length", cuts))
    decoded = tokenizer.decode(ids)
    ends = [(decoded.index(s) + len(s), -len(s), s) for s in stop if s in decoded]
    if ends:
        end, length, matched = min(ends)
        assert got == decoded[: end if include else end + length]
        assert (finish.reason, finish.matched_stop) == (pb.FINISH_REASON_STOP_STRING, matched)
        assert got_ids == tokenizer.encode(decoded[:end])  # one token a byte
    else:
        assert (got, got_ids, finish.reason) == (decoded, ids, pb.FINISH_REASON_LENGTH)
    assert finish.usage.generated_tokens == len(got_ids)
    assert ids[: len(got_ids)] == got_ids


@pytest.mark.parametrize(("fields", "text"), [
    ({}, "bc"),
    ({"skip_special_tokens": False}, "bc"),
    ({"include_stop": True}, "bc"),
    ({"include_stop": True, "skip_special_tokens": False}, "bc<eos>"),
])
def test_response_eos_counts_and_adds_text_only_on_request(
    folder: ModelFolder, fields: dict[str, bool], text: str
) -> None:
    parts = answer(folder, ask("a", 9, return_token_ids=True, **fields), [1, 2, EOS], "eos", [1, 2])
    got, ids, finish = joined(parts)
    assert (got, ids) == (text, [1, 2, EOS])
    assert (finish.reason, finish.matched_stop, finish.matched_stop_token_id) == (pb.FINISH_REASON_EOS, "<eos>", EOS)
    assert finish.usage.generated_tokens == 3


@pytest.mark.parametrize(("include", "text"), [(False, "bc"), (True, "bcd")])
def test_response_stop_token_ends_answer(folder: ModelFolder, include: bool, text: str) -> None:
    message = ask("a", 9, stop_token_ids=[3], include_stop=include, return_token_ids=True)
    got, ids, finish = joined(answer(folder, message, [1, 2, 3], "stop_token"))
    assert (got, ids) == (text, [1, 2, 3])
    assert (finish.reason, finish.matched_stop) == (pb.FINISH_REASON_STOP_TOKEN, "d")
    assert (finish.matched_stop_token_id, finish.usage.generated_tokens) == (3, 3)


def test_response_text_held_for_stop_string_is_sent_last(folder: ModelFolder) -> None:
    message = ask("a", 9, stop=["bcx"], return_token_ids=True)
    got, ids, finish = joined(answer(folder, message, [1, 2, EOS], "eos", [1, 2]))
    assert (got, ids, finish.reason) == ("bc", [1, 2, EOS], pb.FINISH_REASON_EOS)


def test_response_ids_are_sent_with_their_text(folder: ModelFolder) -> None:
    assert folder.tokenizer
    ids = folder.tokenizer.encode("b😀c")
    assert len(ids) == 6
    parts = answer(folder, ask("a", 60, return_token_ids=True), ids, "length", list(range(6)))
    assert [(part.text, list(part.token_ids)) for part in parts] == [("b", ids[:1]), ("😀", ids[1:5]), ("c", ids[5:])]


def test_response_tokens_without_text_are_sent_on_request(folder: ModelFolder) -> None:
    ids = [298, 299, 1]
    asked = answer(folder, ask("a", 9, return_token_ids=True), ids, "length", [1, 2])
    assert [(part.text, list(part.token_ids), part.offset) for part in asked] == [
        ("", [298], 0), ("", [299], 1), ("b", [1], 2)]
    reported = answer(folder, ask("a", 9, logprobs=0), ids, "length", [1, 2])
    assert [[position.chosen.token_id for position in part.logprobs] for part in reported] == [[298], [299], [1]]
    plain = answer(folder, ask("a", 9), ids, "length", [1, 2])
    assert [(part.text, list(part.token_ids), part.offset) for part in plain] == [("b", [], 0)]


def progress(
    folder: ModelFolder, message: pb.GenerateRequest, ids: Sequence[int], seconds: float
) -> list[tuple[str, int, int]]:
    """Return (text, offset, num_tokens) of each message, with one token every `seconds`."""
    builder = ResponseBuilder(validation.check(message, folder, INFO, "r", 10.0), folder.tokenizer)
    parts = []
    for number, token in enumerate(ids):
        builder.add([Output(1, [token])])
        part = builder.next_message(100.0 + number * seconds)
        if part:
            assert not part.token_ids
            parts.append((part.text, part.offset, part.num_tokens))
    return parts


def test_response_progress_message_after_half_a_second(folder: ModelFolder) -> None:
    ids = [298] * 9
    assert progress(folder, ask("a", 60), ids, 0.25) == [("", 0, 3), ("", 3, 2), ("", 5, 2), ("", 7, 2)]
    assert progress(folder, ask("a", 60), ids, 0.05) == []
    assert progress(folder, ask("a", 60), [298, 1, 298, 298, 298], 0.25) == [("b", 0, 2), ("", 2, 2)]


def test_response_progress_message_excludes_tokens_with_pending_text(folder: ModelFolder) -> None:
    assert folder.tokenizer
    smile = folder.tokenizer.encode("😀")
    assert progress(folder, ask("a", 60), [298, *smile], 1.0) == [("", 0, 1), ("", 1, 0), ("", 1, 0), ("😀", 1, 4)]
    waiting = progress(folder, ask("a", 60, stop=["bcde"]), [298, 1, 2, 298, 9], 1.0)
    assert waiting == [("", 0, 1), ("", 1, 0), ("", 1, 0), ("bcj", 1, 4)]


def test_response_progress_message_has_prompt_logprobs_once(folder: ModelFolder) -> None:
    checked = validation.check(ask("ab", 60, prompt_logprobs=0), folder, INFO, "r", 10.0)
    builder = ResponseBuilder(checked, folder.tokenizer)
    parts = []
    for number in range(3):
        reports = [TokenLogprobs(1, -0.5, 1, [], [])] if not number else None
        builder.add([Output(1, [298], prompt_logprobs=reports)])
        parts.append(builder.next_message(float(number)))
    assert parts[0] is None
    assert [len(part.prompt_logprobs) for part in parts[1:] if part] == [2, 0]


@pytest.mark.slow
async def test_stream_of_special_tokens_sends_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over gRPC, with progress due at each token. The client joins such messages."""
    monkeypatch.setattr("npuserve.service.frontend.response.PROGRESS_SECONDS", 0.0)
    async with running(make_folder(tmp_path / "model"), resume_seconds=60.0) as server:
        server.engine.script, server.engine.delay = [298] * 9 + [1], 0.02  # a message may carry several tokens
        asked = ask("a", 20, ignore_eos=True)
        parts = [part async for part in server.inference.StreamGenerate(asked)]
        assert [part.offset for part in parts] == list(accumulate((p.num_tokens for p in parts[:-1]), initial=0))
        assert "".join(part.text for part in parts) == "bb"
        silent = [part.num_tokens for part in parts if not (part.text or part.HasField("finish"))]
        assert silent
        assert all(silent)
        async with AsyncClient(server.target) as client, client.stream("a", max_tokens=20) as stream:
            seen = [part async for part in stream]
            assert stream.attempts.tokens == 20
        assert "".join(part.text for part in seen) == "bb"
        assert any(not part.text for part in seen[:-1])


async def test_stream_whose_text_must_wait_sends_progress_without_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npuserve.service.frontend.response.PROGRESS_SECONDS", 0.0)
    async with running(make_folder(tmp_path / "model")) as server:
        server.engine.delay = 0.02
        call = server.inference.StreamGenerate(ask("a", 12, stop=["bcdefghijkx"]))
        parts = [(part.text, part.offset, part.num_tokens) async for part in call]
        assert len(parts) > 2
        assert set(parts[:-2]) == {("", 0, 0)}
        assert "".join(text for text, *_ in parts) == "bcdefghijklm"


def test_response_logprobs_without_ids_are_sent_per_token(folder: ModelFolder) -> None:
    parts = answer(folder, ask("a", 9, logprobs=1), [1, 2], "length", [1])
    assert [[p.chosen.token_id for p in part.logprobs] for part in parts] == [[1], [2]]
    position = parts[0].logprobs[0]
    assert (position.chosen.logprob, position.chosen.rank, position.chosen.text) == (-1.0, 2, "b")
    assert [(t.token_id, t.logprob, t.rank, t.text) for t in position.top] == [(0, -0.5, 1, "a")]


@pytest.mark.parametrize(("sampled", "rank", "logprobs", "ranks"), [
    (5, 2, [-0.5, -1.0, -1.0, -1.5], [1, 2, 2, 4]),  # tokens 3, 4, 5, 6
    (4, 1, [-1.0, -1.0, -1.0, -2.0], [1, 1, 1, 4]),
    (9, 7, [-1.0, -1.5, -1.5, -1.5], [1, 2, 2, 2]),
    (5, 3, [-0.5, -1.0, -1.0, -2.0], [1, 2, 3, 4]),  # different logits with equal logprobs
])
def test_response_ranks_of_equal_logprobs_are_equal(
    folder: ModelFolder, sampled: int, rank: int, logprobs: list[float], ranks: list[int]
) -> None:
    checked = validation.check(ask("abc", 9, logprobs=4, prompt_logprobs=4), folder, INFO, "r", 10.0)
    builder = ResponseBuilder(checked, folder.tokenizer)
    report = TokenLogprobs(sampled, -1.0, rank, [3, 4, 5, 6], logprobs)
    finish = Finish("length", 3, 0, 1, TIMING)
    builder.add([Output(1, [sampled], finish, None, [report], [report, report])])
    made = builder.last_message(finish, 12.0)
    for position in (*made.logprobs, *made.prompt_logprobs[1:]):
        assert position.chosen.rank == rank
        assert [token.rank for token in position.top] == ranks


def test_response_prompt_logprobs_of_chunks_are_in_first_message(folder: ModelFolder) -> None:
    checked = validation.check(ask("abc", 9, prompt_logprobs=1), folder, INFO, "r", 10.0)
    builder = ResponseBuilder(checked, folder.tokenizer)
    for token in (1, 2):
        report = TokenLogprobs(token, -0.5, 1, [token], [-0.5])
        assert builder.add([Output(1, prompt_logprobs=[report])]) is None
        assert builder.next_message(10.0 + token) is None  # chunks may take longer than PROGRESS_SECONDS
    builder.add([Output(1, [3])])
    first = builder.next_message(13.0)
    assert first
    assert [p.chosen.token_id for p in first.prompt_logprobs] == [0, 1, 2]
    assert [len(p.top) for p in first.prompt_logprobs] == [0, 1, 1]
    assert not first.prompt_logprobs[0].chosen.rank
    last = builder.last_message(Finish("aborted", 3, 0, 1, TIMING), 12.0)
    assert not last.prompt_logprobs


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 700, 3000])
def test_response_prompt_messages_are_small_and_precede_first_token(folder: ModelFolder, chunk: int) -> None:
    info = msgspec.structs.replace(INFO, max_model_len=4000)
    ids = [i % 26 for i in range(3001)]
    checked = validation.check(ask(ids, 9, prompt_logprobs=20), folder, info, "r", 10.0)
    builder, parts = ResponseBuilder(checked, folder.tokenizer), []
    reports = [TokenLogprobs(i, -0.5, 1, list(range(20)), [-0.5] * 20) for i in ids[1:]]
    for start in range(0, 3000, chunk):
        last = start + chunk >= 3000
        assert not builder.add([Output(1, [1] if last else [], prompt_logprobs=reports[start : start + chunk])])
        parts += builder.prompt_messages()
    first = builder.next_message(0.0)
    assert first
    assert (first.offset, first.num_tokens, first.text) == (0, 1, "b")
    assert len(parts) > 2
    assert all((part.offset, part.num_tokens, part.text) == (0, 0, "") for part in parts)
    assert all(part.ByteSize() < 1 << 20 for part in [*parts, first])
    positions = [position for part in [*parts, first] for position in part.prompt_logprobs]
    assert [position.chosen.token_id for position in positions] == ids
    assert not list(builder.prompt_messages())
    builder.add([Output(1, [2])])
    following = builder.next_message(0.0)
    assert following
    assert not following.prompt_logprobs


def test_response_aborted_before_first_token(folder: ModelFolder) -> None:
    checked = validation.check(ask("abc", 9, return_token_ids=True), folder, INFO, "r", 10.0)
    builder = ResponseBuilder(checked, folder.tokenizer)
    finish = builder.add([Output(1, finish=Finish("aborted", 3, 0, 0, TIMING))])
    assert finish
    last = builder.last_message(finish, 12.0)
    assert (last.text, list(last.token_ids), last.finish.reason) == ("", [], pb.FINISH_REASON_ABORTED)


def test_response_usage_and_timing(folder: ModelFolder) -> None:
    finish = answer(folder, ask("ab", 9), [1, 2], "length")[-1].finish
    assert (finish.usage.prompt_tokens, finish.usage.cached_tokens, finish.usage.generated_tokens) == (2, 1, 2)
    timing = finish.timing
    chunks = [c.ToNanoseconds() for c in timing.prefill_chunks]
    assert (timing.queue.ToNanoseconds(), chunks) == (5 * 10**8, [250_000_000, 125_000_000])
    assert timing.finish.ToNanoseconds() == 125_000_000
    assert timing.total.ToNanoseconds() == 2 * 10**9
    parts = timing.queue.ToNanoseconds() + sum(chunks) + timing.decode.ToNanoseconds() + timing.finish.ToNanoseconds()
    assert parts == timing.total.ToNanoseconds()
    assert (timing.of_which_device.ToNanoseconds(), timing.of_which_host.ToNanoseconds()) == (750_000_000, 250_000_000)


def test_response_without_tokenizer_has_ids_only(tmp_path: Path, folder: ModelFolder) -> None:
    bare = open_folder(make_folder(tmp_path / "m", tokenizer=False), "m", "")
    parts = answer(bare, ask([0], 9, return_token_ids=True), [1, 2, EOS], "eos", [1, 2])
    assert [list(part.token_ids) for part in parts] == [[1], [2], [EOS]]
    assert (parts[-1].finish.matched_stop, parts[-1].finish.matched_stop_token_id) == ("", EOS)
    assert not any(part.text for part in parts)


def test_response_reasons_cover_finish_reason_enum(folder: ModelFolder) -> None:
    reasons = {answer(folder, ask("a"), [1], reason)[-1].finish.reason
               for reason in msgspec.inspect.type_info(Finish).fields[0].type.values
               if reason != "pooled"}  # which ends a request without an answer
    assert reasons == set(pb.FinishReason.values()) - {pb.FINISH_REASON_UNSPECIFIED}
