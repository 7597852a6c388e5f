"""Worn, exhausted and full lexers, with the grammar library: the answers that use them continue, and are the same."""

from __future__ import annotations

import functools
import json
import random
import string
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits

from npuserve.service.errors import QueueFull
from npuserve.service.ipc.messages import Request
from npuserve.service.structured_output import answer_matcher as answers
from npuserve.service.structured_output import compile_process, lexer
from npuserve.service.structured_output.answer_matcher import AnswerMatcher
from npuserve.service.structured_output.compile_process import build_matchers
from npuserve.service.structured_output.compiler import Compilation
from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.structured_output.lexer import LexerPool
from npuserve.service.structured_output.translation.translate import translate
from tests.support.grammars import END, encode, vocabulary

SIZE = vocabulary().size
PAIRS = {"type": "array", "minItems": 50, "items": {
    "type": "object", "additionalProperties": False, "required": ["abc123", "n"],
    "properties": {"abc123": {"type": "string", "minLength": 20, "maxLength": 400}, "n": {"enum": ["bbbb", "bcab"]}}}}
EXPONENTIAL = "(.*a.{30}b.*|.*b.{29}c.*)"
"""Almost each character of an answer builds many states."""


def compiled(kind: Any, value: Any, pool: LexerPool | None = None) -> Compilation:
    """Return the result of a constraint, with lexers of its own."""
    constraint = Constraint(kind, value if isinstance(value, str) else json.dumps(value))
    grammar = translate(constraint.kind, constraint.text, vocabulary().data.special, [END])
    compilation = Compilation(vocabulary(), pool)
    compilation.build(functools.partial(build_matchers, vocabulary(), grammar, kind))
    compilation.finish()
    return compilation


def answer(compilation: Compilation, client: str = "", arrival: float = 0.0, output: list[int] | None = None,
           kind: Any = "json_schema") -> AnswerMatcher:
    request = Request("r", [1], 9, arrival, constraint=Constraint(kind, ""), client=client, output_ids=output or [])
    return AnswerMatcher(request, compilation, vocabulary().end_ids)


def prepared(matcher: AnswerMatcher, calls: int = 1000) -> tuple[bytes, list[int] | None]:
    """Return the mask of the next token, and the forced tokens."""
    for _ in range(calls):
        if not matcher.prepare(SIZE):
            break
    assert matcher.error is None, matcher.error.message
    run = matcher.forced_run
    mask = matcher.mask()
    return (b"" if mask is None else mask.tobytes()), run


def follow(matcher: AnswerMatcher, text: str) -> None:
    """Advance over a text, with a mask for each token."""
    for token in encode(text):
        mask, _ = prepared(matcher)
        assert np.frombuffer(mask, np.uint32)[token // 32] >> np.uint32(token % 32) & 1, token
        matcher.advance(token)


def complete(matcher: AnswerMatcher) -> bool:
    prepared(matcher)
    return matcher.is_complete


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lexers be worn with 64 KiB, and measure them after each mask."""
    monkeypatch.setattr(lexer, "MAX_LEXER_BYTES", 64 << 10)
    monkeypatch.setattr(lexer, "MAX_REPLAYED_RATIO", 1.25)
    monkeypatch.setattr(lexer, "MIN_UNMEASURED_SECONDS", 0.0)
    monkeypatch.setattr(lexer, "MAX_UNMEASURED_SECONDS", 0.0)


@pytest.mark.parametrize("length", [3000, pytest.param(6000, marks=pytest.mark.full)])
def test_string_ends_within_its_bounds(length: int) -> None:
    matcher = answer(compiled("json_schema", {"type": "string", "minLength": length, "maxLength": length + 1000}))
    text = "".join(random.Random(1).choices(string.ascii_letters + " 日é", k=length + 500))
    follow(matcher, f'"{text}"')
    assert complete(matcher)


@pytest.mark.slow
def test_answers_of_one_constraint_end_whatever_others_have_built() -> None:
    compilation = compiled("json_schema", {"type": "string", "minLength": 3000, "maxLength": 4000})
    for number in range(4):
        matcher = answer(compilation, f"client {number % 3}")
        follow(matcher, json.dumps("".join(random.Random(number).choices(string.ascii_letters, k=3500))))
        assert complete(matcher)


def random_walk(rng: random.Random, mask: bytes, run: list[int] | None) -> int:
    ids = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()
    quotes = [token for token in ids if token == ord('"')]
    return (run or quotes * (rng.random() < 0.02) or [rng.choice(ids)])[0]


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("kind", "value"), [
    pytest.param("json_schema", PAIRS, id="pairs", marks=pytest.mark.slow),
    pytest.param("json_schema", {"type": "string", "minLength": 900}, id="string", marks=pytest.mark.slow),
    pytest.param("regex", EXPONENTIAL, id="exponential", marks=pytest.mark.slow),
    pytest.param("regex", "(日|[a-z]{1,200}é)*", id="words")])
def test_masks_and_forced_tokens_do_not_depend_on_the_lexer(
    kind: Any, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each place, of answers that share worn lexers, and of one whose lexer is not worn."""
    pressed, free = compiled(kind, value), compiled(kind, value)
    only = free.lexer()
    monkeypatch.setattr(free, "lexer", lambda client: only)
    matchers = [answer(pressed, "a", kind=kind) for _ in range(3)]
    references = [answer(free, kind=kind) for _ in matchers]
    rng, lexers = random.Random(3), {id(matchers[0].lexer): matchers[0].lexer}
    for _ in range(200):
        for place, (matcher, reference) in enumerate(zip(matchers, references, strict=True)):
            references[place].lexer.is_full = False
            mask, run = prepared(matcher)
            assert (mask, run) == prepared(reference)
            if not mask:
                continue
            lexers[id(matcher.lexer)] = matcher.lexer
            token = random_walk(rng, mask, run)
            for one in (matcher, reference):
                one.advance(token)
            assert (matcher.is_complete, matcher.has_ended) == (reference.is_complete, reference.has_ended)
    assert len(lexers) > 3


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_answer_of_an_earlier_engine_equals_one_that_continued() -> None:
    matcher, rng, tokens = answer(compiled("json_schema", PAIRS)), random.Random(5), list[int]()
    for _ in range(600):
        mask, run = prepared(matcher)
        tokens.append(random_walk(rng, mask, run))
        matcher.advance(tokens[-1])
        if len(tokens) % 300 == 0:
            restored = answer(compiled("json_schema", PAIRS), output=tokens)
            assert restored.is_complete == matcher.is_complete
            assert prepared(restored) == prepared(answer(compiled("json_schema", PAIRS), output=tokens))
            assert prepared(restored) == prepared(matcher)


def test_replay_is_in_parts() -> None:
    output = encode('"' + "b" * 2000)
    matcher = answer(compiled("json_schema", {"type": "string"}), output=output)
    calls = 1
    while matcher.prepare(SIZE):
        calls += 1
    assert calls == 8
    assert not matcher.is_complete


def test_answer_of_an_earlier_engine_that_ended_is_complete() -> None:
    compilation = compiled("choices", ["a", "ab"])
    for output, state in (([], (False, False)), (encode("a"), (True, False)), ([*encode("a"), END], (True, True))):
        matcher = answer(compilation, output=output, kind="choices")
        assert (matcher.is_complete, matcher.has_ended) == state


@pytest.fixture
def weak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step do little work, so that a hostile answer exhausts its lexer."""
    monkeypatch.setattr(compile_process, "limits", lambda kind: LLParserLimits(
        step_lexer_fuel=5_000, max_items_in_row=2000, verbose_errors=True))


@pytest.mark.usefixtures("weak")
def test_answer_that_exhausts_lexers_ends_alone_and_may_be_retried() -> None:
    compilation = compiled("regex", EXPONENTIAL)
    others = [answer(compilation, client, kind="regex") for client in ("hostile", "other")]
    for matcher in others:
        follow(matcher, "aabb")
    hostile, rng = answer(compilation, "hostile", kind="regex"), random.Random(1)
    for _ in range(3000):
        while hostile.prepare(SIZE):
            pass
        if hostile.error:
            break
        hostile.advance(rng.choice([ord(letter) for letter in "abc"]))
        if hostile.error:
            break
    assert isinstance(hostile.error, QueueFull)
    assert "cannot be followed within limits" in hostile.error.message
    for matcher in others:
        follow(matcher, "a" * 20)
    assert others[0].lexer is not others[1].lexer


@pytest.mark.full
@pytest.mark.usefixtures("small")
def test_lexers_of_running_answers_stay_within_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six strings need more than all memory together. Each ends. A lexer grows beyond the limit by its largest size."""
    monkeypatch.setattr(lexer, "MAX_LEXER_BYTES", 1 << 40)
    monkeypatch.setattr(lexer, "MAX_FREE_BYTES", 64 << 10)
    monkeypatch.setattr(answers, "MEMORY_WAIT_SECONDS", 0.0)
    pool = LexerPool(3 << 19)
    matchers = {
        number: answer(compiled("json_schema", {"type": "string", "maxLength": 1500 + number}, pool), arrival=number)
        for number in range(6)}
    place, text, peak, waits = dict.fromkeys(matchers, 0), encode('"' + "b" * 1400), 0, 0
    for _ in range(100_000):
        if not matchers:
            break
        for number, matcher in list(matchers.items()):
            is_waiting = matcher.prepare(SIZE)
            waits += is_waiting
            peak = max(peak, pool.num_bytes)
            assert matcher.error is None
            if is_waiting:
                continue
            matcher.advance(text[place[number]])
            place[number] += 1
            if place[number] == len(text):
                matchers.pop(number).discard()
    assert not matchers
    assert waits
    assert peak < 3 << 20


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_answer_that_needs_more_than_all_memory_names_the_limit() -> None:
    pool = LexerPool(256 << 10)
    matcher = answer(compiled("json_schema", {"type": "string", "maxLength": 100_000}, pool))
    for token in encode('"' + "b" * 20_000):
        while matcher.prepare(SIZE):
            pass
        if matcher.error:
            break
        matcher.advance(token)
    assert isinstance(matcher.error, QueueFull)
    assert matcher.error.message.endswith("the states of its expressions need more than 0 MiB")


def test_worn_lexer_frees_the_matchers_of_answers_that_wait() -> None:
    compilation = compiled("json_schema", {"type": "string"})
    hold = [answer(compilation, "a"), answer(compilation, "b")]
    for matcher in hold:
        follow(matcher, '"abc')
    worn = hold[0].lexer
    worn.is_full = True
    mask = prepared(hold[0])
    assert worn.is_worn
    assert hold[1]._matcher is None
    assert not hold[1].is_prepared
    hold[1].advance(ord("x"))  # sampled before
    hold[0].advance(ord("x"))
    assert prepared(hold[1]) == prepared(hold[0])
    assert hold[0].lexer is not hold[1].lexer
    assert mask[0]
