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

from npuserve.service.text.detokenizer import UNFINISHED_LIMIT, Detokenizer
from npuserve.service.text.incremental_decoder import RUN_LIMIT
from npuserve.service.text.tokenizer import Tokenizer, _Fast, load_tokenizer
from tests.support.real_models import BUILT_IN, model_folder, published
from tests.support.tokenizers import texts, train, train_byte_fallback

KINDS = ["byte level", "byte fallback", "words", "word pieces"]
STOPS = [
    "\n", "ab", "bab", "a", " once", "你", "天气", "\ufffd", "<|im_end|>", "e up", "👩", "lily.", "aaaa", "there was",
]


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    if kind == "byte level":
        return Tokenizer(_Fast(train()))
    if kind == "byte fallback":
        return Tokenizer(_Fast(train_byte_fallback()))
    vocabulary = {word: i for i, word in enumerate(["once", "upon", "a", "time", "##s", "##ly", ".", "\ufffd", "[X]"])}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind == "word pieces":
        made.decoder = decoders.WordPiece()
    made.add_special_tokens(["[X]"])
    return Tokenizer(_Fast(made))


class Answer(NamedTuple):
    text: str
    num_tokens: int
    matched_stop: str | None
    keep: int | None


def run(
    kind: str, parts: Sequence[Sequence[int]], skip: bool = True, stop: Sequence[str] = (), include_stop: bool = False,
    min_tokens: int = 0, prompt_ids: Sequence[int] = (),
) -> Answer:
    """Pushes the parts and finishes; checks what holds of every delta."""
    made = tokenizer(kind)
    detokenizer = Detokenizer(
        made, skip_special_tokens=skip, stop=stop, include_stop=include_stop, min_tokens=min_tokens,
        prompt_ids=prompt_ids)
    text, count, matched, keep, pushed = "", 0, None, None, 0
    for part in parts:
        delta = detokenizer.push(part)
        pushed += len(part)
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
        assert last == ("", 0, None, None)
    assert count == (pushed if keep is None else keep)
    assert detokenizer.push([1, 2]) is None
    assert detokenizer.finish() == ("", 0, None, None)
    return Answer(text, count, matched, keep)


def cut(ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(ids[start : start + size])
        start += size
    return [*parts, ids[start:]]


def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    """Ids of texts, with any others in between: characters cut short, stray bytes, ids that are no token."""
    made = tokenizer(kind)
    anything = st.lists(st.integers(0, made.vocabulary_size + 3), max_size=30)
    text = texts.map(lambda t: made.encode(t, False))
    broken = text.map(lambda ids: [i for n, i in enumerate(ids) if n % 5])
    return st.lists(anything | text | broken, max_size=3).map(lambda parts: [i for part in parts for i in part])


sizes = st.lists(st.integers(0, 5), max_size=20)


def longest_byte_run(kind: str, ids: Sequence[int], skip: bool) -> int:
    """Of byte-fallback tokens: beyond RUN_LIMIT the text of a broken run is our own."""
    made, longest, run = tokenizer(kind), 0, 0
    for i in ids:
        token = made._backend.token(i) or "<0x00>"
        silent = token == "<0x00>" or (skip and i in made.special_ids)
        run = run + 1 if silent or token.startswith("<0x") else 0
        longest = max(longest, run)
    return longest


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), sizes=sizes, skip=st.booleans())
def test_deltas_joined_are_the_decode(kind: str, data: st.DataObject, sizes: list[int], skip: bool) -> None:
    ids = data.draw(ids_of(kind))
    answer = run(kind, cut(ids, sizes), skip)
    assert answer == (answer.text, len(ids), None, None)
    if kind != "byte fallback" or longest_byte_run(kind, ids, skip) < RUN_LIMIT:
        assert answer.text == tokenizer(kind).decode(ids, skip)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), sizes=sizes)
def test_after_a_prompt(kind: str, data: st.DataObject, sizes: list[int]) -> None:
    """With a prompt, the answer's text is what it adds to the prompt's."""
    made = tokenizer(kind)
    prompt = made.encode("once upon a time", False)
    ids = data.draw(texts.map(lambda t: made.encode(t, False)))
    expected = made.decode([*prompt, *ids], True).removeprefix(made.decode(prompt, True))
    assert run(kind, cut(ids, sizes), prompt_ids=prompt).text == expected


def test_the_first_space_is_kept_after_a_prompt_with_text() -> None:
    made = tokenizer("byte fallback")
    time = made.encode("time", False)
    assert made._backend.token(time[0]) in ("▁time", "▁tim", "▁ti", "▁t")
    assert run("byte fallback", [time], prompt_ids=made.encode("once upon a")).text == " time"
    assert run("byte fallback", [time], prompt_ids=[1]).text == "time"  # <s> is skipped
    assert run("byte fallback", [time], prompt_ids=[1], skip=False).text == " time"  # here it is text
    assert run("byte fallback", [time, time]).text == "time time"


def reference(
    kind: str, ids: Sequence[int], skip: bool, stop: Sequence[str], include_stop: bool, min_tokens: int
) -> Answer:
    """The same from the whole text: each character is of the first token with which it is decoded."""
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
def test_stop_strings_equal_the_reference_for_any_partition(
    kind: str, data: st.DataObject, sizes: list[int], include_stop: bool, min_tokens: int, skip: bool, stop: list[str]
) -> None:
    made = tokenizer(kind)
    words = st.sampled_from([
        "ab", "a", "b", "aab", "once", " once upon", "\n", "你好", "天气", "👩‍👧", "<|im_end|>", "e", " ",
    ])
    ids = data.draw(st.lists(words, max_size=8).map(lambda parts: made.encode("".join(parts), False)))
    expected = reference(kind, ids, skip, stop, include_stop, min_tokens)
    for parts in (cut(ids, sizes), [ids], [[i] for i in ids]):
        assert run(kind, parts, skip, stop, include_stop, min_tokens) == expected


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), sizes=sizes, min_tokens=st.integers(0, 6), stop=st.lists(st.sampled_from(STOPS), max_size=4))
def test_any_ids_give_the_same_for_any_partition(
    kind: str, data: st.DataObject, sizes: list[int], min_tokens: int, stop: list[str]
) -> None:
    ids = data.draw(ids_of(kind))
    whole = run(kind, [ids], False, stop, False, min_tokens)
    assert run(kind, cut(ids, sizes), False, stop, False, min_tokens) == whole
    assert run(kind, [[i] for i in ids], False, stop, False, min_tokens) == whole
    kept = run(kind, [ids], False, stop, True, min_tokens)
    assert kept == whole._replace(text=whole.text + (whole.matched_stop or ""))


def ids_by_byte(kind: str, data: bytes) -> list[int]:
    """One token per byte."""
    made = tokenizer(kind)
    if kind == "byte fallback":
        found = [made.id_of(f"<0x{b:02X}>") for b in data]
    else:
        characters = {t: i for i in range(300) if len(t := made._backend.token(i) or "") == 1}
        from npuserve.service.text.byte_bpe import byte_characters

        found = [characters[byte_characters()[b]] for b in data]
    assert None not in found
    return [i for i in found if i is not None]


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@pytest.mark.parametrize(
    "text", ["你好，世界", "👩‍👩‍👧‍👦🇩🇪🇯🇵👍🏽", "e\u0301n\u0303 ö", "a\ufffdb", "नमस्ते", "한국어", "x\ny"]
)
def test_characters_are_never_split(kind: str, text: str) -> None:
    """Each delta of a text in single-byte tokens is whole characters, and nothing is lost."""
    detokenizer = Detokenizer(tokenizer(kind), skip_special_tokens=True, stop=[], include_stop=False, min_tokens=0)
    deltas = [d for i in ids_by_byte(kind, text.encode()) if (d := detokenizer.push([i]))]
    if kind == "byte level":
        assert [d.text for d in deltas] == list(text)
        assert [d.num_tokens for d in deltas] == [len(c.encode()) for c in text]
    assert "".join(d.text for d in deltas) + detokenizer.finish().text == text


def test_an_unfinished_character_at_the_end_is_replaced() -> None:
    """One U+FFFD for the bytes of one character in byte-level BPE, one for each in byte fallback, as decode does."""
    for kind, expected in (("byte level", "a\ufffd"), ("byte fallback", "\ufffd\ufffd\ufffd")):
        ids = ids_by_byte(kind, "a你".encode()[:-1])
        assert run(kind, [[i] for i in ids]).text == tokenizer(kind).decode(ids) == expected


def longest_wait(kind: str, ids: Sequence[int], stop: Sequence[str] = ()) -> int:
    detokenizer = Detokenizer(tokenizer(kind), skip_special_tokens=True, stop=stop, include_stop=False, min_tokens=0)
    longest = waiting = 0
    for i in ids:
        waiting += 1
        if delta := detokenizer.push([i]):
            waiting -= delta.num_tokens
        longest = max(longest, waiting)
    return longest


def test_broken_bytes_are_not_held_for_ever() -> None:
    for data in (b"\xe4", b"\xbd", b"\xff", b"\xf0\x9f", b"\xe4\xbd", b"\xe4\xbda", "你".encode()):
        data *= 150
        assert longest_wait("byte level", ids_by_byte("byte level", data)) < UNFINISHED_LIMIT
        assert longest_wait("byte fallback", ids_by_byte("byte fallback", data)) < RUN_LIMIT + UNFINISHED_LIMIT
    assert longest_wait("words", [7] * 300) <= 4


def test_a_replacement_character_in_the_text_is_sent_at_once() -> None:
    ids = ids_by_byte("byte level", "a\ufffd".encode())
    assert longest_wait("byte level", ids) == 2
    detokenizer = Detokenizer(
        tokenizer("byte level"), skip_special_tokens=True, stop=[], include_stop=False, min_tokens=0)
    assert detokenizer.push(ids) == ("a\ufffd", 4, None, None)


def test_a_long_run_of_byte_tokens_is_streamed() -> None:
    """A broken byte after RUN_LIMIT of them takes only itself with it."""
    text = "你好" * 20
    ids = ids_by_byte("byte fallback", text.encode() + b"\xff\xe4\xbd!" + "天".encode())
    assert run("byte fallback", [[i] for i in ids]).text == text + "\ufffd\ufffd\ufffd!天"


def test_text_before_a_stop_string_is_not_held_longer_than_it_could_be_its_beginning() -> None:
    made = tokenizer("byte level")
    detokenizer = Detokenizer(made, skip_special_tokens=True, stop=["abc"], include_stop=False, min_tokens=0)
    ids = ids_by_byte("byte level", b"xabababcd")
    deltas = [detokenizer.push([i]) for i in ids]
    texts = [d and d.text for d in deltas]
    assert texts == ["x", None, None, "ab", None, "ab", None, "", None]
    assert deltas[7] == ("", 3, "abc", 8)


def test_ties() -> None:
    """The stop string that ends first, and of those that end together the longest."""
    for stops, text, matched in [
        (["bcd", "bc"], "a", "bc"), (["cd", "abcd", "bcd"], "", "abcd"), (["d", "ab"], "", "ab"),
    ]:
        ids = ids_by_byte("byte level", b"abcd")
        for parts in ([ids], [[i] for i in ids]):
            answer = run("byte level", parts, stop=stops)
            assert (answer.text, answer.matched_stop) == (text, matched)


def test_min_tokens() -> None:
    """A stop string may begin in the first min_tokens tokens, not end there."""
    ids = ids_by_byte("byte level", b"aXXbXXc")
    assert run("byte level", [ids], stop=["XX"], min_tokens=2) == ("a", 3, "XX", 3)
    assert run("byte level", [ids], stop=["XX"], min_tokens=3) == ("aXXb", 6, "XX", 6)
    assert run("byte level", [ids], stop=["XX"], min_tokens=6, include_stop=True) == ("aXXbXXc", 7, None, None)


def test_skipped_special_tokens_have_no_text_to_match() -> None:
    made = tokenizer("byte level")
    ids = made.encode("a<|im_end|>b", False)
    assert run("byte level", [ids], stop=["<|im_end|>"]).text == "ab"
    assert run("byte level", [ids], skip=False, stop=["<|im_end|>"]) == ("a", 2, "<|im_end|>", 2)
    assert run("byte level", [ids], stop=["ab"]) == ("", 3, "ab", 3)  # across it


def test_a_stop_string_that_becomes_certain_at_the_end() -> None:
    """A byte-fallback run is certain when it ends, which may be in finish()."""
    newline = ids_by_byte("byte fallback", b"\n")
    assert run("byte fallback", [[*newline]], stop=["\n"]) == ("", 1, "\n", 1)
    unfinished = ids_by_byte("byte level", b"a\xe4")
    assert run("byte level", [unfinished], stop=["\ufffd"]) == ("a", 2, "\ufffd", 2)


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        Detokenizer(tokenizer("words"), skip_special_tokens=True, stop=["a", ""], include_stop=False, min_tokens=0)


def test_long_answers_take_linear_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids that the generic stream decodes per token do not grow with the answer."""
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
def test_real_tokenizers(name: str) -> None:
    made = load_tokenizer(model_folder(name))
    assert made is not None
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
