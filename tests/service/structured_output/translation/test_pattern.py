"""Regular expressions against Python's `re`, and against ECMA-262's where Node is installed."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import shutil
import subprocess
from typing import Any

import jsonschema
import pytest

from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.structured_output.translation.errors import ConstraintError
from npuserve.service.structured_output.translation.pattern import PatternError, translate
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


NAME_PATTERNS = [
    r"^\w+$", r"^ab$", r"\w", r"^\d+$", r"\d", r"^\W$", r"\s", r"^\S+$", r"^.+$", r"^.*$", r".*", r"^[^a]$",
    r"^[^\s]+$", r"^a|b$", r"^x", r"^(ab|é)$", r"^[\w-]{1,3}$", r"^é\w", r"[^\w]$", r"^$", r"\D$", r"^a$|^b\s$",
    r"^[^\d]+$", r"^(a|1)?$",
]
NAME_PARTS = ["a", "b", "x", "1", "_", "-", "é", "٣", "\n", "\r", " ", "\u00a0", "\ufeff", "\x85", "\u2028", "\u1680"]
NAMES = ["", *(a + b for a, b in itertools.product(NAME_PARTS, ["", *NAME_PARTS])), "ab\n", "é1\n", "abc", "a\n\n"]
TRUE, TEXT = {"const": True}, {"const": "x"}


@functools.cache
def ecma_matches() -> dict[tuple[str, str], bool]:
    """Return for each pattern and name whether ECMA-262 finds the pattern in it."""
    program = ("const [patterns, names] = JSON.parse(require('fs').readFileSync(0));"
               "console.log(JSON.stringify(patterns.map(p => names.map(n => new RegExp(p, 'u').test(n)))))")
    done = subprocess.run(["node", "-e", program], input=json.dumps([NAME_PATTERNS, NAMES]), capture_output=True,
                          text=True, check=True)
    return {(pattern, name): is_match for pattern, row in zip(NAME_PATTERNS, json.loads(done.stdout), strict=True)
            for name, is_match in zip(NAMES, row, strict=True)}


def is_valid_by_ecma(schema: dict[str, Any], value: dict[str, Any]) -> bool:
    for name, member in value.items():
        schemas = [inner for source, inner in schema["patternProperties"].items() if ecma_matches()[source, name]]
        if name in schema["properties"]:
            schemas.append(schema["properties"][name])
        if not all(jsonschema.Draft202012Validator(inner).is_valid(member)
                   for inner in schemas or [schema["additionalProperties"]]):
            return False
    return True


def random_object_schema(rng: random.Random) -> dict[str, Any]:
    return {
        "type": "object", "properties": dict.fromkeys(rng.sample(NAMES, rng.randrange(3)), TEXT),
        "patternProperties": {source: rng.choice([TRUE, TRUE, {"enum": [True, "x"]}, False])
                              for source in rng.sample(NAME_PATTERNS, rng.choice([1, 1, 2]))},
        "additionalProperties": rng.choice([True, False, TEXT])}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 8))])
def test_pattern_properties_of_accepted_objects_are_valid_by_both_readings(seed: int):
    """Each name is written with three values. Names without a dispute are accepted exactly if they are valid."""
    rng, compiled_schemas = random.Random(seed), 0
    for _ in range(20):
        schema = random_object_schema(rng)
        try:
            compiled = compilation(Constraint("json_schema", json.dumps(schema)))
        except ConstraintError:
            continue
        compiled_schemas += 1
        judge = jsonschema.Draft202012Validator(schema)
        for name, member in itertools.product({*rng.sample(NAMES, 40), *schema["properties"]}, (True, "x", 1)):
            value = {name: member}
            is_accepted = accepts(compiled.matcher(), json.dumps(value, ensure_ascii=False))
            if is_accepted or (name.isascii() and name.isprintable()):
                assert is_accepted is judge.is_valid(value), (schema, value)
            if is_accepted and shutil.which("node"):
                assert is_valid_by_ecma(schema, value), (schema, value)
    assert compiled_schemas > 5


@pytest.mark.parametrize(("schema", "value"), [
    ({"patternProperties": {r"^\w+$": TRUE}}, {"é": 1}),
    ({"patternProperties": {"^ab$": TRUE}}, {"ab\n": 1}),
    ({"patternProperties": {"^(ab|cd)$": TRUE}, "properties": {"ab": {}, "cd": {}}}, {"ab\n": 1}),
    ({"patternProperties": {r"^\w+$": TRUE}, "properties": {"é": {"type": ["string", "boolean"]}}}, {"é": "x"}),
    ({"patternProperties": {r"^\w+$": TRUE}, "properties": {"é": {"type": ["string", "boolean"]}},
      "additionalProperties": False}, {"é": "x"}),
    ({"patternProperties": {"^ab$": TRUE}, "additionalProperties": {"type": "string"}}, {"ab\n": "x"}),
])
def test_pattern_property_whose_name_one_reading_matches_needs_a_valid_value(schema: dict[str, Any], value: Any):
    schema = {"type": "object", **schema}
    assert not jsonschema.Draft202012Validator(schema).is_valid(value)
    assert not accepts(matcher("json_schema", schema), json.dumps(value, ensure_ascii=False))


@pytest.mark.parametrize(("schema", "message"), [
    ({"patternProperties": {r"^\w+$": True, "^é$": True}, "additionalProperties": False}, "may match two"),
    ({"patternProperties": {r"\d": True}, "additionalProperties": TEXT}, r"write its characters out"),
])
def test_pattern_properties_that_readings_dispute_are_refused(schema: dict[str, Any], message: str):
    with pytest.raises(ConstraintError, match=rf"^json_schema: .*{message}.* at /patternProperties$"):
        matcher("json_schema", {"type": "object", **schema})
