"""Structural tags in the formats of vLLM, xgrammar and gateways."""

from __future__ import annotations

import functools
import itertools
import json
import re
from typing import Any

import pytest

from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.structured_output.translation.errors import ConstraintError
from tests.support.grammars import CALL, END, accepts, allowed, compilation, encode, matcher

CALL_F = {"begin": '<tool>{"f": ', "content": {"type": "json_schema",
                                               "json_schema": {"type": "integer", "maximum": 9}}, "end": "}</tool>"}
CALL_G = {"type": "tag", "begin": '<tool>{"g": ', "content": {"type": "const_string", "value": "null"},
          "end": ["}</tool>", "}<|>"]}
F, G = '<tool>{"f": 3}</tool>', '<tool>{"g": null}<|>'
TAGS = {"type": "triggered_tags", "triggers": ["<tool>"], "tags": [CALL_F, CALL_G]}


def test_error_of_a_schema_names_its_path_or_its_own_field():
    content: dict[str, Any] = {"type": "json_schema"}
    for schema, message in (
        ({"properties": {"a": {"not": {}}}}, "keyword 'not' is not supported at /properties/a/not"),
        ({"properties": {"a": {"oneOf": [{}, {}]}}},
         "keyword 'oneOf' is supported only if its schemas exclude each other at /properties/a/oneOf"),
    ):
        content["json_schema"] = schema
        value = tag({"type": "tag", "begin": "<f>", "content": content, "end": "</f>"})
        content.pop("x-field", None)
        with pytest.raises(ConstraintError) as error:
            matcher("structural_tag", value)
        assert (str(error.value), error.value.field) == (
            f"structural_tag: /format/content/json_schema: {message}", "")
        content["x-field"] = "chat.tools[3].function.parameters"
        with pytest.raises(ConstraintError) as error:
            matcher("structural_tag", value)
        assert (str(error.value), error.value.field) == (message, "chat.tools[3].function.parameters")


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def pattern(text: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": text}


def ebnf(text: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": text}


def tag(value: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": value}


@pytest.mark.parametrize(("flags", "good", "bad"), [
    ({}, ["", "hi", F, "a" + F + "b" + G + "c", "<too"], ["<tool>", '<tool>{"f": 30}</tool>', '<tool>{"h": 1}</tool>',
        "a<tool>b", '<tool>{"g": null}</tool']),
    ({"at_least_one": True}, [F, F + "a" + G, F + "b"], ["", "hi", "a" + F]),
    ({"stop_after_first": True}, ["", "hi", "a" + F], [F + "a", F + G]),
    ({"at_least_one": True, "stop_after_first": True}, [F, G], ["", "a", "a" + F, F + "a", F + F]),
    ({"excludes": ["zz"]}, ["z" + F + "z"], ["zz", F + "zz"]),
])
def test_triggered_tags(flags: dict[str, Any], good: list[str], bad: list[str]):
    for text in good:
        assert accepts(matcher("structural_tag", tag({**TAGS, **flags})), text), text
    for text in bad:
        assert not accepts(matcher("structural_tag", tag({**TAGS, **flags})), text), text


ANY = {"type": "any_text"}
CONST = {"type": "const_string", "value": "ab"}
FORMATS: dict[str, tuple[Any, list[str], list[str]]] = {
    "legacy": ({"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]},
               ["x<f>3</f>y"], ["<f>a</f>", "<f"]),
    "legacy text": ({"structures": [{"begin": "<f>", "schema": '{"type": "null"}', "end": ""}], "triggers": ["<f>"]},
                    ["<f>nullx"], ["<f>3"]),
    "const": (tag(CONST), ["ab"], ["a", "abc"]),
    "or": (tag({"type": "or", "elements": [CONST, {"type": "regex", "pattern": "[0-9]+"}]}), ["ab", "12"], ["ab1", ""]),
    "regex before an end": (tag({"type": "tag", "begin": "[", "content": {"type": "regex", "pattern": "[a-z]*"},
                                 "end": "b"}), ["[b", "[ab", "[bb"], ["[", "[a"]),
    "sequence": (tag({"type": "sequence", "elements": [CONST, ANY]}), ["ab", "abxyz"], ["xab"]),
    "text before a const": (tag({"type": "sequence", "elements": [ANY, CONST,
        {"type": "json_schema", "json_schema": True}]}), ["xab3", "ab{}"], ["abab", "xab", "3"]),
    "thinking": (tag({"type": "sequence",
                      "elements": [{"type": "tag", "begin": "<think>", "content": ANY, "end": "</think>"},
                                                       {"type": "json_schema", "json_schema": {"type": "object"}}]}),
                 ["<think>a < b</think>{}", "<think></think>{}"], ["<think>a", "{}", "<think>a</think>b</think>{}"]),
    "excludes": (tag({"type": "any_text", "excludes": ["no", "x"]}), ["n o", ""], ["no", "ax"]),
    "max_chars": (tag({"type": "any_text", "max_chars": 2}), ["é日", ""], ["abc"]),
    "separator": (tag({"type": "tags_with_separator", "separator": ", ", "tags": [CALL_F, CALL_G]}), ["", F,
        F + ", " + G], [F + G, F + ", "]),
    "separator, one": (tag({"type": "tags_with_separator", "separator": ",", "tags": [CALL_F], "at_least_one": True,
                            "stop_after_first": True}), [F], ["", F + "," + F]),
    "optional": (tag({"type": "optional", "content": CONST}), ["", "ab"], ["abab"]),
    "plus": (tag({"type": "plus", "content": CONST}), ["ab", "abab"], [""]),
    "star": (tag({"type": "star", "content": CONST}), ["", "abab"], ["a"]),
    "repeat": (tag({"type": "repeat", "min": 1, "max": 2, "content": CONST}), ["ab", "abab"], ["", "ababab"]),
    "repeat 0 times": (tag({"type": "sequence", "elements": [
        {"type": "repeat", "min": 0, "max": 0, "content": CONST}, CONST]}), ["ab"], ["", "abab"]),
    "dispatch": (tag({"type": "dispatch", "rules": [["<f>", CONST]]}), ["x<f>aby<f>ab", "x"], ["<f>x"]),
    "dispatch once": (tag({"type": "dispatch", "rules": [["<f>", CONST]], "loop": False}), ["x<f>ab", "x"], ["<f>abx"]),
    "overlapping triggers": (tag({"type": "dispatch", "rules": [["ab", CONST], ["bc", ANY]], "loop": False}),
                             ["abab", "xabab", "bcx", "xbcx", "a"], ["abcx", "xabcx", "ab", "abb"]),
    "trigger that ends another one": (tag({"type": "dispatch", "rules": [["cab", CONST], ["ab", CONST]]}),
                                      ["cabab", "abab", "xababy"], ["cab", "ab", "abx"]),
    "grammar": (tag({"type": "grammar", "grammar": 'root ::= "(" root ")" | "a"'}), ["((a))"], ["(a"]),
    "tags in a tag": (tag({"type": "tag", "begin": "[", "content": TAGS, "end": "]"}), ["[]", "[x" + F + "y]"],
                      ["[x]y", "["]),
    "whitespace": (tag({"type": "json_schema", "json_schema": {"type": "array"}, "max_whitespace_cnt": 0}), ["[1,2]"],
                   ["[1, 2]"]),
}


@functools.cache
def texts(length: int) -> list[str]:
    return ["".join(c) for n in range(length + 1) for c in itertools.product("ab<", repeat=n)]


GREEDY = [
    ([pattern("[ab]+"), const("b")], "[ab]+b"), ([pattern(r"[\s\S]*"), const("b")], r"[\s\S]*b"),
    ([const("a"), pattern("[ab]*"), pattern("a*"), const("ab")], "a[ab]*a*ab"),
    ([{"type": "or", "elements": [pattern("a"), const("ab")]}, const("b"), pattern("<?")], "(a|ab)b<?"),
    ([ebnf('root ::= x+\nx ::= [ab]'), const("a")], "[ab]+a"),
    ([{"type": "tag", "begin": "<", "content": pattern(r"[\s\S]*"), "end": ["a", "<"]}, const("<")], r"<[\s\S]*[a<]<"),
    ([{"type": "tag", "begin": "<", "content": ebnf("root ::= [ab]+"), "end": "ab"}], "<[ab]+ab"),
    ([{"type": "tag", "begin": "", "content": {"type": "or", "elements": [
        pattern("[ab]+"), {"type": "json_schema", "json_schema": {"const": {}}}]}, "end": "b"}], "[ab]+b"),
    ([{"type": "tag", "begin": "<", "content": {"type": "sequence", "elements": [
        const("a"), pattern("[ab]*")]}, "end": ["b", "<"]}], "<a[ab]*[b<]"),
    ([{"type": "star", "content": pattern("a|ab")}, {"type": "optional", "content": pattern("b+")}, const("b<")],
     "(a|ab)*(b+)?b<"),
    ([{"type": "or", "elements": [{"type": "star", "content": pattern("a|ab<")}, const("aba")]}], "(a|ab<)*|aba"),
]


@pytest.mark.parametrize(("elements", "expected"), GREEDY)
def test_text_that_may_continue_an_expression_can_end_it(elements: list[Any], expected: str):
    compiled = compilation(Constraint("structural_tag", json.dumps(tag({"type": "sequence", "elements": elements}))))
    for text in texts(5):
        assert accepts(compiled.matcher(), text) is bool(re.fullmatch(expected, text)), text


@pytest.mark.parametrize("content", [pattern("[a-z<>]+"), ebnf("root ::= [a-z<>]+")])
def test_expression_may_end_by_a_special_token(content: dict[str, Any]):
    value = tag({"type": "tag", "begin": "(", "content": content, "end": "<call>"})
    assert accepts(matcher("structural_tag", value), "(ab<call>")
    assert accepts(matcher("structural_tag", value), "", [*encode("(ab"), CALL])
    assert not accepts(matcher("structural_tag", value), "", [*encode("("), CALL])


@pytest.mark.parametrize("name", FORMATS)
def test_format(name: str):
    value, good, bad = FORMATS[name]
    for text in good:
        assert accepts(matcher("structural_tag", value), text), text
    for text in bad:
        assert not accepts(matcher("structural_tag", value), text), text


def test_text_of_a_special_token_may_be_the_token():
    value = tag({"type": "tag", "begin": "<call>", "content": CONST, "end": ""})
    assert accepts(matcher("structural_tag", value), "<call>ab")
    assert accepts(matcher("structural_tag", value), "", [CALL, *encode("ab")])
    only = tag({"type": "sequence", "elements": [{"type": "token", "token": "<call>"},
                                                 {"type": "token", "token": CALL}]})
    assert accepts(matcher("structural_tag", only), "", [CALL, CALL])
    assert not accepts(matcher("structural_tag", only), "<call><call>")


def test_end_token_is_not_part_of_a_tag():
    """It would end the answer. Its text can be spelled out."""
    value = tag({"type": "tag", "begin": "<end>", "content": CONST, "end": "<end>"})
    assert accepts(matcher("structural_tag", value), "<end>ab<end>")
    assert allowed(matcher("structural_tag", value)) == [ord("<")]
    for token in (END, "<end>"):
        with pytest.raises(ConstraintError, match="a special token that does not end an answer at /format"):
            matcher("structural_tag", tag({"type": "token", "token": token}))


@pytest.mark.parametrize(("value", "message"), [
    ("{", "malformed JSON"), ({"type": "json_schema"}, "must be an object with"), ({}, "must have 'format'"),
    ({"structures": [{"begin": "a", "schema": "[" * 50_000, "end": "b"}], "triggers": ["a"]},
     "malformed JSON at /structures/0/schema"),
    (tag({"type": "foo"}), "'foo' is not supported; it must be one of"),
    (tag({"type": "json_schema", "json_schema": {"not": {}}}), "keyword 'not'"),
    (tag({"type": "json_schema", "json_schema": {}, "style": "glm_xml"}), "'style' must be 'json' or 'qwen_xml'"),
    (tag({"type": "any_text", "max_tokens": 3}), "max_tokens"), (tag({"type": "sequence", "elements": [ANY, ANY]}),
        "must be last"), (tag({"type": "or", "elements": []}), "elements"),
    (tag({**TAGS, "triggers": ["x"]}), "exactly one of the triggers at /format/tags/0"),
    (tag({**TAGS, "triggers": [""]}), "at least one character"), (tag({"type": "token", "token": "x"}),
        "special token"),
    (tag({"type": "token_triggered_tags"}), "not supported"), (tag({"type": "grammar", "grammar": "root ::= x"}),
        "unknown rule 'x'.* at /format/grammar"),
    (tag({"type": "regex", "pattern": "(?=a)"}), "look-around"),
    (tag({"type": "sequence", "elements": [pattern("a"), pattern("(?=a)")]}),
     "/format/elements/1/pattern: look-around"),
    (tag({"type": "sequence", "elements": [ebnf("root ::= x"), const("a")]}), "at /format/elements/0/grammar"),
    (tag({"type": "plus", "content": {"type": []}}), r"format \[\] is not supported.* at /format/content"),
    (tag({"type": "sequence", "elements": [{"type": {}}, ANY]}), "is not supported.* at /format/elements/0"),
    (tag({"type": "tags_with_separator", "separator": ",", "tags": ["a"]}),
     "a tag must be an object at /format/tags/0"),
    (tag({"type": "or", "elements": [pattern("a")] * 1100}), "be at most 1024 at /format/elements/1023"),
])
def test_malformed_tag_is_refused(value: Any, message: str):
    with pytest.raises(ConstraintError, match=f"structural_tag: .*{message}|{message}"):
        matcher("structural_tag", value)
