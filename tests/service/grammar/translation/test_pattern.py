"""Regular expressions against Python's `re`."""

from __future__ import annotations

import json
import random
import re

import pytest

from npuserve.service.grammar.translation.errors import ConstraintError
from npuserve.service.grammar.translation.pattern import PatternError, translate
from npuserve.service.ipc.messages import Constraint
from tests.support.grammars import accepts, compilation, matcher, walk

PATTERNS = [
    r"^[\x00-\x1f]$", r"^[^\"]$", r"^[^\\]$", r"^[^\"\\]+$", r"^[\x08-\x0d]$", r"^\S$", r"^[^\s]$", r"^\s$", r"^.$",
    r"^\W$",
    r"^\w$", r"^\D$", r"^[\d-]$", r"^[a&&b]$", r"^[a~~b]$", r"^[+--b]$", r"^[[a]$", r"^[\]]$", r"^\/$", r"^a{2}$",
    "a{", r"^[Z-\]]$",
    r"^a|b$", "(^a)", "^$", r"^(?:\n|\")$", r"^(?P<x>a)b?$", r"^(?<x>a)b?$", r"^\u0041[\u00e9]$", r"^[^\n]$",
    r"^[\w.\-]$", "^a+?$", "b", "a{١}",
]
CHARACTERS = [chr(i) for i in range(128)] + ["é", "\x85", "\u00a0", "\u2028", "\ufeff", "日", "٣", "\U0001f600", "Aé",
                                             "ab", "aa", "xb", "ax", "a{", "a{,2}", ""]


def python(pattern: str) -> re.Pattern[str]:
    """Return the expression for Python, in which `$` also matches before a newline."""
    return re.compile(pattern.replace("$", r"\Z").replace("(?<x>", "(?P<x>"))


@pytest.mark.filterwarnings("ignore:Possible .* at position:FutureWarning")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern_of_json_strings_accepts_a_subset_of_python(pattern: str):
    expected = python(pattern)
    compiled = compilation(Constraint("json_schema", json.dumps({"type": "string", "pattern": pattern})))
    accepted = {c for c in CHARACTERS
                if any(accepts(compiled.matcher(), json.dumps(c, ensure_ascii=escaped)) for escaped in (True, False))}
    assert accepted <= {c for c in CHARACTERS if expected.search(c)}
    plain = {c for c in CHARACTERS if c.isascii() and c.isprintable()}
    assert accepted & plain == {c for c in plain if expected.search(c)}


@pytest.mark.parametrize("pattern", [r"a(b|c)*d?", r"\d{2,3}-[A-F]+", r"[^a-z\n]{1,4}", r"(yes|no|maybe)!?",
                                     r".{0,3}x", r"(\w+\s){1,2}z",
                                     r"[\p{L}]+", r"(ab|a)(bc|c)?"])
def test_walks_of_a_regex_match_it_whole(pattern: str):
    rng = random.Random(2)
    expected = re.compile(pattern.replace(r"\p{L}", r"^\W\d_"))
    ended = 0
    compiled = compilation(Constraint("regex", pattern))
    for _ in range(30):
        text = walk(compiled.matcher(), rng)
        if text is not None:
            ended += 1
            assert expected.fullmatch(text.decode())
    assert ended


@pytest.mark.parametrize(("pattern", "message"), [
    ("(?=a)b", "look-around is not supported at position 2"), ("(?i)a", "flags of groups are not supported"),
    (r"\bfoo", "word boundaries are not supported"), (r"(a)\1", "back references are not supported"), ("a++",
        "possessive"),
    ("a{,2}", "different ways"), ("[]a]", "empty class"), ("[b-a]", "wrong order"), ("(a", "unclosed '\\('"), ("a)",
        "unmatched '\\)'"), ("*a", "nothing to repeat"),
    ("a{3,2}", "wrong order"), ("a{999999}", "at most 100000"), ("^*", "an anchor cannot be repeated"), ("a\\",
        "the last character"),
    (r"\ud800", "must be a character"), (r"\p{Greek}", "general categories"), ("[a", "unclosed '\\['"), (r"[\d-z]",
        "range must begin"),
    ("a^b", r"'\^' is supported only at the beginning.* at position 1"), ("(a|x*(^b))", "at position 6"),
    ("x$y", r"'\$' is supported only at the end.* at position 1"), ("(a|b$)c", "at position 4"),
    ("x(a$)?", r"outside of repeated groups, at position 3"), ("(^a){2}", "at position 1"),
    ("$^", "at position 1"), ("(^|b)^a", "at position 5"),
    (r"\q", "the escape"), ("(" * 200 + ")" * 200, "at most 100 deep"),
])
def test_unsupported_pattern_is_refused_with_its_position(pattern: str, message: str):
    with pytest.raises(PatternError, match=message):
        translate(pattern, quoted=True)
    with pytest.raises(ConstraintError, match=r"^json_schema: regular expression .* at /properties/a/pattern$"):
        matcher("json_schema", {"properties": {"a": {"pattern": pattern}}})


@pytest.mark.parametrize(("pattern", "text"), [
    ("^^a$$", "a"), ("(^|x)a", "xa"), ("(a|^)b(c$|$)", "ab"), ("((^a))b", "ab"), ("(^a){1}$", "a"), ("(^b){0}a", "a"),
    ("()^a", "a"), ("a$(?:)", "a"), ("^(?:^a$|^$)$", ""),
])
def test_anchor_at_an_end_is_honoured(pattern: str, text: str):
    assert accepts(matcher("regex", pattern), text)
    assert accepts(matcher("json_schema", {"type": "string", "pattern": pattern}), f'"{text}"')


@pytest.mark.parametrize("pattern", [r"[^\s\S]", "a^b", "$a"])
def test_pattern_without_a_text_is_refused(pattern: str):
    with pytest.raises(ConstraintError):
        matcher("regex", pattern)
