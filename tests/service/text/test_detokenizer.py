"""Deltas and stop strings of one answer, for every kind of decoder."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from npuserve.service.text.byte_bpe import byte_characters
from npuserve.service.text.detokenizer import MAX_UNFINISHED_TOKENS, Delta, Detokenizer
from npuserve.service.text.fast_tokenizer import FastTokenizer
from npuserve.service.text.incremental_decoder import MAX_RUN_BYTES
from npuserve.service.text.tokenizer import Tokenizer
from tests.support.real_models import BUILT_IN, model_folder, published
from tests.support.tokenizers import load, texts, train, train_byte_fallback

KINDS = ["byte level", "byte fallback", "words", "word pieces"]
STOPS = [
    "\n", "ab", "bab", "a", " once", "你", "天气", "\ufffd", "<|im_end|>", "e up", "👩", "lily.", "aaaa", "there was",
]


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    if kind == "byte level":
        return Tokenizer(FastTokenizer(train()))
    if kind == "byte fallback":
        return Tokenizer(FastTokenizer(train_byte_fallback()))
    vocabulary = {word: i for i, word in enumerate(["once", "upon", "a", "time", "##s", "##ly", ".", "\ufffd", "[X]"])}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind == "word pieces":
        made.decoder = decoders.WordPiece()
    made.add_special_tokens(["[X]"])
    return Tokenizer(FastTokenizer(made))


class Answer(NamedTuple):
    text: str
    num_tokens: int
    matched_stop: str | None
    keep: int | None


def run(
    kind: str, chunks: Sequence[Sequence[int]], skip: bool = True, stop: Sequence[str] = (), include_stop: bool = False,
    min_tokens: int = 0, prompt_ids: Sequence[int] = (),
) -> Answer:
    """Return the answer for the chunks of ids. Check the invariants of each delta."""
    made = tokenizer(kind)
    detokenizer = Detokenizer(
        made, skip_special_tokens=skip, stop=stop, include_stop=include_stop, min_tokens=min_tokens,
        prompt_ids=prompt_ids)
    text, count, matched, keep, pushed = "", 0, None, None, 0
    for chunk in chunks:
        delta = detokenizer.push(chunk)
        pushed += len(chunk)
        if delta:
            assert matched is None, "nothing follows a stop string"
            assert delta.num_tokens > 0
            text, count = text + delta.text, count + delta.num_tokens
            assert count <= pushed
            matched, keep = delta.matched_stop, delta.keep
    last = detokenizer.finish()
    text, count = text + last.text, count + last.num_tokens
    if matched is None:
        matched, keep = last.matched_stop, last.keep
    else:
        assert last == Delta("", 0)
    assert count == (pushed if keep is None else keep)
    assert detokenizer.push([1, 2]) is None
    assert detokenizer.finish() == Delta("", 0)
    return Answer(text, count, matched, keep)


def split(ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    chunks, start = [], 0
    for size in sizes:
        chunks.append(ids[start : start + size])
        start += size
    return [*chunks, ids[start:]]


def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    """Generate ids of texts, mixed with random ids: truncated characters, stray bytes, unknown ids."""
    made = tokenizer(kind)
    anything = st.lists(st.integers(0, made.vocabulary_size + 3), max_size=30)
    text = texts.map(lambda t: made.encode(t, False))
    broken = text.map(lambda ids: [i for n, i in enumerate(ids) if n % 5])
    return st.lists(anything | text | broken, max_size=3).map(lambda chunks: [i for chunk in chunks for i in chunk])


sizes = st.lists(st.integers(0, 5), max_size=20)


def longest_byte_run(kind: str, ids: Sequence[int], skip: bool) -> int:
    """Return the length of the longest run of byte tokens. From MAX_RUN_BYTES on, the text of an invalid run differs
    from that of `tokenizers`."""
    made, longest, run = tokenizer(kind), 0, 0
    for i in ids:
        token = made._fast.token(i) or "<0x00>"
        silent = token == "<0x00>" or (skip and i in made.special_ids)
        run = run + 1 if silent or token.startswith("<0x") else 0
        longest = max(longest, run)
    return longest


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), sizes=sizes, skip=st.booleans())
def test_push_joined_deltas_equal_decode(kind: str, data: st.DataObject, sizes: list[int], skip: bool) -> None:
    ids = data.draw(ids_of(kind))
    answer = run(kind, split(ids, sizes), skip)
    assert answer == (answer.text, len(ids), None, None)
    if kind != "byte fallback" or longest_byte_run(kind, ids, skip) < MAX_RUN_BYTES:
        assert answer.text == tokenizer(kind).decode(ids, skip)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), sizes=sizes)
def test_push_after_a_prompt_equals_the_added_text(kind: str, data: st.DataObject, sizes: list[int]) -> None:
    """The answer's text is the decode of prompt and answer without the decode of the prompt."""
    made = tokenizer(kind)
    prompt = made.encode("once upon a time", False)
    ids = data.draw(texts.map(lambda t: made.encode(t, False)))
    expected = made.decode([*prompt, *ids], True).removeprefix(made.decode(prompt, True))
    assert run(kind, split(ids, sizes), prompt_ids=prompt).text == expected


def test_push_after_a_prompt_with_text_keeps_the_first_space() -> None:
    made = tokenizer("byte fallback")
    time = made.encode("time", False)
    assert made._fast.token(time[0]) in ("▁time", "▁tim", "▁ti", "▁t")
    assert run("byte fallback", [time], prompt_ids=made.encode("once upon a")).text == " time"
    assert run("byte fallback", [time], prompt_ids=[1]).text == "time"  # <s> is skipped
    assert run("byte fallback", [time], prompt_ids=[1], skip=False).text == " time"  # <s> counts as text
    assert run("byte fallback", [time, time]).text == "time time"


def reference(
    kind: str, ids: Sequence[int], skip: bool, stop: Sequence[str], include_stop: bool, min_tokens: int
) -> Answer:
    """Compute the answer from the whole text. A character belongs to the first token with which it is decoded."""
    made = tokenizer(kind)
    full = made.decode(ids, skip)
    prefixes = [made.decode(ids[: n + 1], skip) for n in range(len(ids))]
    owner = [next(n for n, p in enumerate(prefixes) if p.startswith(full[:end])) for end in range(1, len(full) + 1)]
    for end in range(1, len(full) + 1):
        found = [s for s in stop if full[:end].endswith(s)]
        if found and owner[end - 1] >= min_tokens:
            longest = max(found, key=len)
            keep = owner[end - 1] + 1
            return Answer(full[: end if include_stop else end - len(longest)], keep, longest, keep)
    return Answer(full, len(ids), None, None)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@given(
    data=st.data(), sizes=sizes, include_stop=st.booleans(), min_tokens=st.integers(0, 6), skip=st.booleans(),
    stop=st.lists(st.sampled_from(STOPS), min_size=1, max_size=4, unique=True),
)
def test_stop_strings_equal_the_reference_for_any_split_of_the_tokens(
    kind: str, data: st.DataObject, sizes: list[int], include_stop: bool, min_tokens: int, skip: bool, stop: list[str]
) -> None:
    made = tokenizer(kind)
    words = st.sampled_from([
        "ab", "a", "b", "aab", "once", " once upon", "\n", "你好", "天气", "👩‍👧", "<|im_end|>", "e", " ",
    ])
    ids = data.draw(st.lists(words, max_size=8).map(lambda chunks: made.encode("".join(chunks), False)))
    expected = reference(kind, ids, skip, stop, include_stop, min_tokens)
    for chunks in (split(ids, sizes), [ids], [[i] for i in ids]):
        assert run(kind, chunks, skip, stop, include_stop, min_tokens) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), sizes=sizes, min_tokens=st.integers(0, 6), stop=st.lists(st.sampled_from(STOPS), max_size=4))
def test_push_result_is_independent_of_the_split_of_the_tokens(
    kind: str, data: st.DataObject, sizes: list[int], min_tokens: int, stop: list[str]
) -> None:
    ids = data.draw(ids_of(kind))
    whole = run(kind, [ids], False, stop, False, min_tokens)
    assert run(kind, split(ids, sizes), False, stop, False, min_tokens) == whole
    assert run(kind, [[i] for i in ids], False, stop, False, min_tokens) == whole
    kept = run(kind, [ids], False, stop, True, min_tokens)
    assert kept == whole._replace(text=whole.text + (whole.matched_stop or ""))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans(), include_stop=st.booleans(), min_tokens=st.integers(0, 6),
       stop=st.lists(st.sampled_from(STOPS), min_size=1, max_size=4))
def test_stop_kept_tokens_alone_give_the_same_answer(
    kind: str, data: st.DataObject, skip: bool, include_stop: bool, min_tokens: int, stop: list[str]
) -> None:
    """A resumed stream replays the kept tokens."""
    ids = data.draw(ids_of(kind))
    whole = run(kind, [ids], skip, stop, include_stop, min_tokens)
    assert run(kind, [ids[: whole.keep]], skip, stop, include_stop, min_tokens) == whole


@pytest.mark.parametrize(("data", "stop", "expected"), [
    (b"AA\xff", "\ufffd\ufffd", ("", 3, "\ufffd\ufffd", 3)),
    (b"A\xffAA", "\ufffd\ufffd", ("", 4, "\ufffd\ufffd", 4)),  # the stop string ends within the run
    (b"ABAB", "B", ("A", 2, "B", 2)),  # the text of a valid run depends on no later token
    (b"AB" * 15 + b"A\xffB", "BA", ("A", MAX_RUN_BYTES, "BA", MAX_RUN_BYTES)),
    (b"AB" * 20 + b"\xff", "BA", ("A", 3, "BA", 3)),
    (b"A" * 40 + b"\xffBB", "\ufffdB", ("A" * 40, 42, "\ufffdB", 42)),
])
def test_stop_in_a_run_of_byte_tokens_keeps_the_tokens_that_its_text_depends_on(
    data: bytes, stop: str, expected: Answer
) -> None:
    ids = ids_of_bytes("byte fallback", data)
    for given_ids in (ids, ids[: expected[1]]):
        for chunks in ([given_ids], [[i] for i in given_ids]):
            assert run("byte fallback", chunks, stop=[stop]) == expected


def ids_of_bytes(kind: str, data: bytes) -> list[int]:
    """Return the ids of the single-byte tokens of `data`."""
    made = tokenizer(kind)
    if kind == "byte fallback":
        found = [made.id_of(f"<0x{b:02X}>") for b in data]
    else:
        characters = {t: i for i in range(300) if len(t := made._fast.token(i) or "") == 1}
        found = [characters[byte_characters()[b]] for b in data]
    assert None not in found
    return [i for i in found if i is not None]


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@pytest.mark.parametrize(
    "text", ["你好，世界", "👩‍👩‍👧‍👦🇩🇪🇯🇵👍🏽", "e\u0301n\u0303 ö", "a\ufffdb", "नमस्ते", "한국어", "x\ny"]
)
def test_push_returns_whole_characters(kind: str, text: str) -> None:
    """The text is pushed as single-byte tokens; no byte is lost."""
    detokenizer = Detokenizer(tokenizer(kind), skip_special_tokens=True, stop=[], include_stop=False, min_tokens=0)
    deltas = [d for i in ids_of_bytes(kind, text.encode()) if (d := detokenizer.push([i]))]
    if kind == "byte level":
        assert [d.text for d in deltas] == list(text)
        assert [d.num_tokens for d in deltas] == [len(c.encode()) for c in text]
    assert "".join(d.text for d in deltas) + detokenizer.finish().text == text


def test_finish_replaces_an_unfinished_character() -> None:
    """As in decode: one U+FFFD for the character in byte-level BPE, one for each byte in byte fallback."""
    for kind, expected in (("byte level", "a\ufffd"), ("byte fallback", "\ufffd\ufffd\ufffd")):
        ids = ids_of_bytes(kind, "a你".encode()[:-1])
        assert run(kind, [[i] for i in ids]).text == tokenizer(kind).decode(ids) == expected


def most_held_tokens(kind: str, ids: Sequence[int], stop: Sequence[str] = ()) -> int:
    detokenizer = Detokenizer(tokenizer(kind), skip_special_tokens=True, stop=stop, include_stop=False, min_tokens=0)
    longest = waiting = 0
    for i in ids:
        waiting += 1
        if delta := detokenizer.push([i]):
            waiting -= delta.num_tokens
        longest = max(longest, waiting)
    return longest


def test_push_of_invalid_utf8_holds_back_a_bounded_number_of_tokens() -> None:
    for data in (b"\xe4", b"\xbd", b"\xff", b"\xf0\x9f", b"\xe4\xbd", b"\xe4\xbda", "你".encode()):
        data *= 150
        assert most_held_tokens("byte level", ids_of_bytes("byte level", data)) < MAX_UNFINISHED_TOKENS
        held = most_held_tokens("byte fallback", ids_of_bytes("byte fallback", data))
        assert held < MAX_RUN_BYTES + MAX_UNFINISHED_TOKENS
    assert most_held_tokens("words", [7] * 300) <= 4


def test_push_sends_a_replacement_character_of_the_text_at_once() -> None:
    ids = ids_of_bytes("byte level", "a\ufffd".encode())
    assert most_held_tokens("byte level", ids) == 2
    detokenizer = Detokenizer(
        tokenizer("byte level"), skip_special_tokens=True, stop=[], include_stop=False, min_tokens=0)
    assert detokenizer.push(ids) == Delta("a\ufffd", 4, boundaries=((1, 1),))


def test_push_streams_a_long_run_of_byte_tokens() -> None:
    """An invalid byte after MAX_RUN_BYTES valid ones becomes U+FFFD alone."""
    text = "你好" * 20
    ids = ids_of_bytes("byte fallback", text.encode() + b"\xff\xe4\xbd!" + "天".encode())
    assert run("byte fallback", [[i] for i in ids]).text == text + "\ufffd\ufffd\ufffd!天"


def test_push_sends_text_that_cannot_begin_a_stop_string() -> None:
    made = tokenizer("byte level")
    detokenizer = Detokenizer(made, skip_special_tokens=True, stop=["abc"], include_stop=False, min_tokens=0)
    ids = ids_of_bytes("byte level", b"xabababcd")
    deltas = [detokenizer.push([i]) for i in ids]
    texts = [d and d.text for d in deltas]
    assert texts == ["x", None, None, "ab", None, "ab", None, "", None]
    assert deltas[7] == Delta("", 3, "abc", 8)


def test_stop_strings_with_several_matches_take_the_first_end_then_the_longest() -> None:
    """The stop string with the first end is matched; the longest one if several end there."""
    for stops, text, matched in [
        (["bcd", "bc"], "a", "bc"), (["cd", "abcd", "bcd"], "", "abcd"), (["d", "ab"], "", "ab"),
        (["abcx", "bc"], "a", "bc"), (["abcx", "bcd"], "a", "bcd"),
    ]:
        ids = ids_of_bytes("byte level", b"abcd")
        for chunks in ([ids], [[i] for i in ids]):
            answer = run("byte level", chunks, stop=stops)
            assert (answer.text, answer.matched_stop) == (text, matched)


def test_min_tokens_ignores_stop_strings_that_end_earlier() -> None:
    """A stop string may begin in the first min_tokens tokens, but not end there."""
    ids = ids_of_bytes("byte level", b"aXXbXXc")
    assert run("byte level", [ids], stop=["XX"], min_tokens=2) == ("a", 3, "XX", 3)
    assert run("byte level", [ids], stop=["XX"], min_tokens=3) == ("aXXb", 6, "XX", 6)
    assert run("byte level", [ids], stop=["XX"], min_tokens=6, include_stop=True) == ("aXXbXXc", 7, None, None)


def test_min_tokens_ignored_stop_string_may_begin_another() -> None:
    for chunks in ([ids := ids_of_bytes("byte level", b"abc")], [[i] for i in ids]):
        answer = run("byte level", chunks, stop=["ab", "bc"], min_tokens=2)
        assert (answer.text, answer.matched_stop) == ("a", "bc")


def test_stop_strings_do_not_match_skipped_special_tokens() -> None:
    made = tokenizer("byte level")
    ids = made.encode("a<|im_end|>b", False)
    assert run("byte level", [ids], stop=["<|im_end|>"]).text == "ab"
    assert run("byte level", [ids], skip=False, stop=["<|im_end|>"]) == ("a", 2, "<|im_end|>", 2)
    assert run("byte level", [ids], stop=["ab"]) == ("", 3, "ab", 3)  # across the special token


def test_finish_finds_a_stop_string_in_held_text() -> None:
    """The text of a byte-fallback run is final when the run ends, which may be in finish()."""
    newline = ids_of_bytes("byte fallback", b"\n")
    assert run("byte fallback", [[*newline]], stop=["\n"]) == ("", 1, "\n", 1)
    unfinished = ids_of_bytes("byte level", b"a\xe4")
    assert run("byte level", [unfinished], stop=["\ufffd"]) == ("a", 2, "\ufffd", 2)


def test_stop_strings_that_are_empty_are_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        Detokenizer(tokenizer("words"), skip_special_tokens=True, stop=["a", ""], include_stop=False, min_tokens=0)


def test_window_stream_keeps_the_space_after_many_unknown_ids() -> None:
    once, upon, unknown = 0, 1, 9
    assert run("word pieces", [[once, *[unknown] * 20, upon]]).text == "once upon"
    assert run("word pieces", [[upon]], prompt_ids=[once, *[unknown] * 20]).text == " upon"


def test_window_stream_decodes_a_bounded_window_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of ids decoded per token does not grow with the answer."""
    made, decoded = tokenizer("words"), []
    stream = made.text_stream()
    inner = stream._decode  # type: ignore[attr-defined]
    monkeypatch.setattr(stream, "_decode", lambda ids: decoded.append(len(ids)) or inner(ids))
    for _ in range(500):
        stream.feed(1)
    assert max(decoded) <= 16
    assert len(decoded) <= 2 * 500


@pytest.mark.parametrize("name", [
    BUILT_IN, *published("stories260K", "stories15M", "minimind2-small", "../tokenizers/qwen3")])
def test_push_with_real_tokenizers_equals_decode(name: str) -> None:
    made = load(model_folder(name))
    draw = random.Random(0)
    texts = ["Once upon a time, 你好👩‍👩‍👧 é\n\n end", "def f():\n\treturn '\ufffd'", "नमस्ते 한국어 <s> "]
    for case in range(60):
        ids = made.encode(draw.choice(texts), case % 2 == 0) + [draw.randrange(made.vocabulary_size) for _ in range(9)]
        draw.shuffle(ids) if case % 3 == 0 else None
        for skip in (True, False):
            detokenizer = Detokenizer(made, skip_special_tokens=skip, stop=["zq"], include_stop=False, min_tokens=0)
            deltas = [d for i in ids if (d := detokenizer.push([i]))] + [detokenizer.finish()]
            if not any(d.matched_stop for d in deltas):
                assert "".join(d.text for d in deltas) == made.decode(ids, skip)
                assert sum(d.num_tokens for d in deltas) == len(ids)
