"""Masks, tokens and ends of matchers on a small vocabulary."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits

from npuserve.service.structured_output import compile_process
from npuserve.service.structured_output.errors import LexerExhausted, MatcherError
from npuserve.service.structured_output.matcher import MAX_FORCED_BYTES, Matcher
from tests.support.grammars import CALL, END, Kind, accepts, allowed, encode, matcher, vocabulary, walk

PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
          "required": ["name", "age"], "additionalProperties": False}
CONSTRAINTS: dict[str, tuple[Kind, Any]] = {
    "schema": ("json_schema", PERSON),
    "any object": ("json_object", ""),
    "pattern": ("json_schema", {"type": "string", "pattern": '^[^"a]{1,3}x$'}),
    "regex": ("regex", r"(ab|a)*c?"),
    "choices": ("choices", ["a", "ab", "abc", "é", ""]),
    "EBNF": ("grammar", 'root ::= "(" root ")" | "a"*'),
    "Lark": ("grammar", 'start: "[" (/[0-9]+/ ("," /[0-9]+/)*)? "]"'),
    "tag": ("structural_tag", {"format": {"type": "tag", "begin": "<call>", "content": {"type": "any_text"},
                                          "end": "</a>"}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_mask_equals_advance(name: str):
    """For every token of the vocabulary, along random walks."""
    kind, value = CONSTRAINTS[name]
    rng = random.Random(3)
    for _ in range(4):
        taken: list[int] = []
        state = matcher(kind, value)
        for _ in range(12):
            ids = allowed(state)
            for token in range(-1, vocabulary().size + 2):
                other = matcher_at(kind, value, taken) if token in ids else state
                assert other.advance(token) is (token in ids), (taken, token)
            token = rng.choice(ids)
            assert state.advance(token)
            taken.append(token)
            if token == END:
                break


_COPIES: dict[str, Matcher] = {}


def matcher_at(kind: Kind, value: Any, taken: list[int]) -> Matcher:
    """Return a matcher after some tokens."""
    key = json.dumps([kind, value])
    if key not in _COPIES:
        _COPIES[key] = matcher(kind, value)
    base = _COPIES[key]
    copy = Matcher(vocabulary(), base._library.deep_copy())
    assert all(copy.advance(i) for i in taken)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_walks_end_in_complete_texts(name: str):
    """So no allowed token leads to a dead end."""
    kind, value = CONSTRAINTS[name]
    rng = random.Random(1)
    ended = 0
    for _ in range(20):
        text = walk(matcher(kind, value), rng)
        ended += text is not None
        if text is not None and name != "tag":
            assert accepts(matcher(kind, value), text)
    assert ended > 5


def test_end_is_allowed_at_complete_texts_only():
    state = matcher("regex", "a{1,2}")
    assert not state.is_complete
    assert not state.is_stopped
    assert END not in allowed(state)
    assert state.advance(END) is False
    assert state.advance(ord("a"))
    assert state.is_complete
    assert not state.is_stopped
    assert END in allowed(state)
    assert state.advance(ord("a"))
    assert state.is_stopped
    assert allowed(state) == [END]


def test_advance_after_the_end_is_refused():
    state = matcher("choices", ["ab"])
    assert accepts(state, "ab")
    assert state.is_stopped
    assert state.advance(ord("a")) is False
    assert state.advance(END)
    assert state.is_complete
    assert state.advance(END) is False
    assert allowed(state) == [END]


def test_advance_of_a_refused_token_changes_nothing():
    state = matcher("json_schema", PERSON)
    for byte in b'{"na':
        before = allowed(state)
        for token in (ord("x"), END, CALL, 256, vocabulary().size - 1, vocabulary().size, -1):
            assert state.advance(token) is False
        assert allowed(state) == before
        assert state.advance(byte)


def test_padding_and_special_tokens_are_never_text():
    for ids in (allowed(matcher("regex", "(?:.|\\n)*")), allowed(matcher("json_object", ""))):
        assert not {256, CALL, vocabulary().size - 1, vocabulary().size - 2} & set(ids)


def test_duplicate_tokens_are_both_allowed():
    first, second = ord("a"), vocabulary().size - 3
    assert vocabulary().data.tokens[second] == b"a"
    assert {first, second} <= set(allowed(matcher("choices", ["a"])))
    assert accepts(matcher("choices", ["a"]), "", [second])


def test_fill_checks_the_buffer():
    state = matcher("choices", ["a"])
    words = -(-vocabulary().size // 32)
    for bits in (np.zeros(words - 1, np.int32), np.zeros(words, np.int64), np.zeros(2 * words, np.int32)[::2]):
        with pytest.raises(ValueError, match="bits: must be"):
            state.fill(bits)
    signed = np.zeros(words, np.int32)
    state.fill(signed)
    assert signed.view(np.uint32)[ord("a") // 32] >> np.uint32(ord("a") % 32) & 1


def test_forced_tokens_follow_from_the_grammar():
    state = matcher("choices", ["abc123 yes", "abc123 no"])
    forced = state.forced()
    assert forced == encode("abc123 ")[: len(forced)]
    assert len(forced) >= 1
    for token in forced:
        assert state.advance(token)
    assert matcher("choices", ["a", "b"]).forced() == []
    assert matcher("choices", [""]).forced() == []


def test_forced_after_a_token_that_is_not_allowed_is_unchanged():
    state = matcher("choices", ["abc123"])
    assert state.forced() == encode("abc123")
    assert not state.advance(ord("b"))
    assert state.forced() == encode("abc123")


def test_forced_without_a_matcher_of_bytes_is_empty():
    assert Matcher(vocabulary(), matcher("choices", ["abc123"])._library).forced() == []


def test_forced_leaves_out_what_a_longer_token_may_replace():
    """The text after "a" may begin with "b", and "ab" is one token."""
    assert matcher("choices", ["ab", "ac"]).forced() == []


@pytest.mark.parametrize("name", [*CONSTRAINTS, "long"])
def test_forced_tokens_are_allowed_and_begin_with_the_rest_after_each(name: str):
    """Along random walks, so that a run is the same wherever it is asked for, with the mask and without."""
    kind, value = CONSTRAINTS.get(name, ("choices", ["abc123 日本" * 40 + end for end in "xy"]))
    rng, runs, mask = random.Random(5), 0, np.zeros(-(-vocabulary().size // 32), np.int32)
    for _ in range(10):
        state = matcher(kind, value)
        for _ in range(60):
            state.fill(mask)
            ids, forced = allowed(state), state.forced(mask)
            assert state.forced() == forced
            runs += len(forced) > 1
            token = forced[0] if forced else rng.choice(ids)
            assert token in ids
            assert state.advance(token)
            assert state.forced()[: len(forced) - 1] == forced[1:] or not forced
            if token == END:
                break
    assert runs or name in ("regex", "EBNF", "Lark", "choices", "any object", "pattern")


def test_forced_tokens_of_a_long_text_are_bounded():
    state = matcher("choices", ["abc" * 300])
    assert 3 * len(state.forced()) == MAX_FORCED_BYTES + 2


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "value"), [
    ("json_schema", {"const": "abc1 " * 6000}), ("regex", "abc1 " * 6000), ("choices", ["abc1 " * 6000]),
    ("grammar", f'root ::= "{"abc1 " * 6000}"')])
def test_long_fixed_text_ends(kind: Kind, value: Any):
    """30,000 bytes, more than the states that a lexer has for other grammars."""
    state, text = matcher(kind, value), b""
    for step in range(30_000):
        run = state.forced()
        if step % 50 == 0 or not run:
            run = allowed(state)[:1]
        if run == [END]:
            break
        assert all(map(state.advance, run))
        text += b"".join(vocabulary().data.tokens[token] for token in run)
    assert text.decode().strip('"') == "abc1 " * 6000


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "value"), [
    ("regex", "((a{300}){300}){300}"), ("grammar", "root ::= a0\n" + "".join(
        f"a{i} ::= a{i + 1} a{i + 1}\n" for i in range(24)) + 'a24 ::= "a"')])
def test_endless_fixed_text_can_begin(kind: Kind, value: Any):
    """16 to 27 million bytes, which no answer reaches."""
    state = matcher(kind, value)
    for _ in range(40):
        run = state.forced()
        assert run == [ord("a")] * MAX_FORCED_BYTES
        assert all(map(state.advance, run[:50]))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_forced_text_is_the_librarys(name: str):
    """Along random walks, by tokens and by bytes, whether it is read after each token or not."""
    kind, value = CONSTRAINTS[name]
    rng, most, found = random.Random(11), 40, 0
    for _ in range(30):
        state = matcher(kind, value)
        assert state._forced
        for _ in range(40):
            token = rng.choice(allowed(state))
            assert state.advance(token)
            if state.is_stopped:
                break
            if rng.random() < 0.6:
                text = state._forced.next(most)
                assert text == state._library.deep_copy().compute_ff_bytes().partition(b"\xff")[0][:most]
                found += len(text)
    assert found or name in ("regex", "EBNF", "Lark", "choices", "any object", "pattern", "tag")


def test_special_tokens_are_not_forced():
    """The tag begins with the text or the id of <call>."""
    state = matcher("structural_tag", {"format": {
        "type": "tag", "begin": "<call>", "content": {"type": "const_string", "value": "abcabc1"}, "end": "</a>"}})
    assert allowed(state) == [ord("<"), CALL]
    assert state.forced() == []
    assert state.advance(CALL)
    assert state.forced() == encode("abcabc1</a>")


@pytest.mark.slow
def test_step_beyond_the_limits_is_a_matcher_error():
    text = "start: x\nx: x x | /[a-z]/"
    state = matcher("grammar", text)

    def step() -> None:
        for _ in range(3000):
            assert state.advance(ord("a"))
            allowed(state)

    with pytest.raises(MatcherError, match="exceeds its limits"):
        step()
    with pytest.raises(MatcherError):
        allowed(state)
    with pytest.raises(MatcherError):
        state.advance(ord("a"))
    assert not state.is_complete


def test_answer_whose_lexer_another_answer_has_exhausted_needs_another_lexer(monkeypatch: pytest.MonkeyPatch):
    """It does not fail by a token that its mask allowed, as if the answer violated its constraint."""
    monkeypatch.setattr(compile_process, "limits", lambda kind: LLParserLimits(
        max_lexer_states=20_000, max_items_in_row=2000, verbose_errors=True))
    first = matcher("json_schema", {"type": "string", "pattern": "(.*a.{30}b.*|.*b.{29}c.*)"})
    other = Matcher(vocabulary(), first._library.deep_copy())
    letters = [encode(letter)[0] for letter in "abc"]
    for token in encode('"abcabbac'):
        assert first.advance(token)
        assert other.advance(token)
    ids = allowed(other)
    rng = random.Random(1)

    def exhaust() -> None:
        for _ in range(3000):
            allowed(first)
            assert first.advance(rng.choice(letters))

    def advance_to_a_new_state() -> None:
        for token in ids:
            assert Matcher(vocabulary(), other._library.deep_copy()).advance(token)

    for work in (exhaust, advance_to_a_new_state):
        with pytest.raises(LexerExhausted):
            work()


@pytest.mark.slow
@pytest.mark.parametrize("is_careful", [False, True])
@pytest.mark.parametrize("name", [*CONSTRAINTS, "long"])
def test_replayed_matcher_equals_one_that_advanced(name: str, is_careful: bool):
    """Masks and forced tokens at each place of random walks."""
    kind, value = CONSTRAINTS.get(name, ("json_schema", {"type": "string", "minLength": 300}))
    rng = random.Random(9)
    for _ in range(3):
        state, taken = matcher(kind, value), list[int]()
        replayed = matcher(kind, value)
        for _ in range(60):
            assert replayed.replay(taken, is_careful=is_careful)
            assert (allowed(replayed), replayed.forced(), replayed.is_complete) == (
                allowed(state), state.forced(), state.is_complete)
            ids = [token for token in allowed(state) if token != END]
            if not ids:
                break
            taken.append(rng.choice(ids))
            assert state.advance(taken[-1])
            replayed = matcher(kind, value)


def test_replay_of_a_token_that_is_not_allowed_is_refused():
    assert not matcher("choices", ["abc"]).replay(encode("abd"))
    assert matcher("choices", ["abc"]).replay(encode("abc"))


def test_replay_of_a_long_text_exceeds_no_limit_of_one_step():
    """The library limits the work since the last mask."""
    state = matcher("json_schema", {"type": "string", "maxLength": 50_000})
    text = encode('"' + "ab 日本" * 8000)
    assert state.replay(text)
    assert state.advance(ord("x"))
    assert END not in allowed(state)
