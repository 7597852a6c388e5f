"""Grammars that clients write: GBNF of llama.cpp, which is also vLLM's and xgrammar's EBNF, and Lark.

A grammar with `::=` is GBNF, any other one is Lark. GBNF begins with the rule `root`, Lark with `start`. The dialect of
Lark is llguidance's, with regular expressions of the Rust crate `regex`. Elements that change how an answer is produced
are refused: options, references to tokens by id, hidden stop texts. Lark
splits a text into terminals greedily, so a terminal that may take what another one needs makes a grammar that never
ends. GBNF has no terminals, and is converted without a change of its language (`gbnf_lark.py`).
"""

from __future__ import annotations

import re

from npuserve.service.structured_output.translation import gbnf_lark
from npuserve.service.structured_output.translation.errors import ConstraintError

CONVERTED = "// converted from GBNF\n"
"""First line of a converted grammar. Positions in it are not the client's."""
MAX_DEPTH = 100
"""Nesting of parentheses."""

_LARK_TOKEN = re.compile(
    r'"(?:\\.|[^"\\\n])*"|/(?!/|\*)(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+/|//[^\n]*|\#[^\n]*', re.DOTALL)
_OPTIONS = re.compile(r"(?m)^\s*[?!\w.-]+\s*\[(?!\s*lazy\s*\])[^\]]*\]\s*:")
"""Options of a rule, before its colon. Elsewhere brackets are an optional part."""
_GBNF = re.compile(r"(?m)^\s*[\w-]+\s*::=")
"""Beginning of a rule in GBNF."""
_REFUSED = (
    (re.compile(r"%(?!ignore\b|import\b)\w+"), "the directive"),
    (re.compile(r"@\w+"), "the reference to another grammar"),
    (re.compile(r"<[^>\n]*>"), "the token"),
    (_OPTIONS, "the option"),
    (re.compile(r"::"), "the parameter"),
)


def to_lark(text: str) -> str:
    """Return a client's grammar in Lark's syntax. Raise ConstraintError."""
    if not text.strip():
        raise ConstraintError("grammar: must not be empty")
    if _GBNF.search(text):
        return CONVERTED + gbnf_lark.to_lark(text)
    outside = _LARK_TOKEN.sub(lambda match: '""' if _is_terminal(match.group()) else " ", text)
    for pattern, name in _REFUSED:
        if match := pattern.search(outside):
            raise ConstraintError(f"grammar: {name} {match.group()[:60]!r} is not supported")
    _check_depth(outside)
    for match in _LARK_TOKEN.finditer(text):
        if _is_terminal(match.group()):
            _check_depth(match.group())
    return text


def is_regular(text: str) -> bool:
    """Return whether a client's grammar is GBNF without errors and recursion, so that it is a regular expression."""
    return bool(_GBNF.search(text)) and gbnf_lark.is_regular(text)


def _is_terminal(token: str) -> bool:
    return token[0] in '"/' and not token.startswith("//")


def _check_depth(text: str) -> None:
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth > MAX_DEPTH:
            raise ConstraintError(f"grammar: parentheses must be nested at most {MAX_DEPTH} deep")
