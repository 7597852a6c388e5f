"""Small vocabularies, matchers of constraints without processes, and walks through masks."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from npuserve.service.ipc.messages import Request
from npuserve.service.structured_output.answer_matcher import AnswerMatcher
from npuserve.service.structured_output.compile_process import build_matchers
from npuserve.service.structured_output.compiler import Compilation
from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.structured_output.matcher import Matcher
from npuserve.service.structured_output.translation.translate import translate
from npuserve.service.structured_output.vocabulary import Vocabulary, VocabularyData

Kind = Literal["json_schema", "regex", "grammar", "choices", "json_object", "structural_tag"]
END, CALL = 257, 258
"""Ids of the end token and of the special token <call> of `vocabulary`."""
LONGER = ['"}', '": ', '", "', "true", "null", "ab", "abc", "123", "  ", "\n  ", "é", "日本", "<a>", "</a>", "{}",
           "[]", "}}",
           "\\n"]


@functools.cache
def vocabulary() -> Vocabulary:
    """Return all bytes, an unused id, the special tokens, some longer tokens, a duplicate of "a", and padding."""
    tokens = [bytes([i]) for i in range(256)] + [b"", b"", b""] + [text.encode() for text in LONGER] + [b"a", b"", b""]
    return Vocabulary(VocabularyData(tokens, {"<end>": END, "<call>": CALL}, [END]), encode)


def encode(text: str) -> list[int]:
    """Tokenize greedily, with the longer tokens."""
    ids, rest = list[int](), text
    while rest:
        found = max((t for t in LONGER if rest.startswith(t)), key=len, default="")
        ids += [259 + LONGER.index(found)] if found else rest[0].encode()
        rest = rest[len(found) or 1:]
    return ids


def matcher(kind: Kind, value: Any) -> Matcher:
    """Return a new matcher of a constraint, compiled in this process. value: text, or what JSON text is made from."""
    text = value if isinstance(value, str) else json.dumps(value)
    grammar = translate(kind, text, vocabulary().data.special, [END])
    return Matcher(vocabulary(), *build_matchers(vocabulary(), grammar, kind))


@functools.cache
def compilation(constraint: Constraint) -> Compilation:
    """Return the result of a constraint, compiled in this process."""
    grammar = translate(constraint.kind, constraint.text, vocabulary().data.special, [END])
    compiled = Compilation(vocabulary())
    compiled.build(functools.partial(build_matchers, vocabulary(), grammar, constraint.kind))
    compiled.finish()
    return compiled


def answer_matcher(request: Request) -> AnswerMatcher:
    """Return a new matcher of a request with a constraint, which has to replay its output."""
    assert request.constraint
    return AnswerMatcher(request, compilation(request.constraint), vocabulary().end_ids)


def allowed(state: Matcher) -> list[int]:
    """Return the ids of the mask."""
    bits = np.full(-(-vocabulary().size // 32), 0xFFFFFFFF, np.uint32)
    state.fill(bits)
    return [int(i) for i in np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))]


def accepts(state: Matcher, text: str | bytes, ids: Sequence[int] | None = None) -> bool:
    """Return whether a text, byte by byte, is a complete answer."""
    data = text.encode() if isinstance(text, str) else text
    return all(state.advance(i) for i in (data if ids is None else ids)) and state.is_complete


def walk(state: Matcher, rng: random.Random, max_tokens: int = 300) -> bytes | None:
    """Return the text of a random walk through the masks; None if it did not end."""
    text = b""
    for _ in range(max_tokens):
        ids = allowed(state)
        assert ids, f"no token is allowed after {text!r}"
        if END in ids and (len(ids) == 1 or rng.random() < 0.4):
            assert state.advance(END)
            return text
        short = [i for i in ids if i < 256 and chr(i) in '"}],:01']
        token = rng.choice(short if short and rng.random() < 0.5 else [i for i in ids if i != END])
        assert state.advance(token), (text, token)
        text += vocabulary().data.tokens[token]
    return None
