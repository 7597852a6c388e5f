"""Answers whose tool calls have tagged arguments: cases by hand, and joined parts for any split of the text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.service.parsing.answer_parser import AnswerParser, CallDelta, Parts, Reasoning
from npuserve.service.parsing.parameter_types import read_types
from npuserve.service.parsing.tagged_call import MAX_SPACE
from npuserve.service.text.answer_format import AnswerFormat
from tests.service.parsing.test_answer_parser import Found, found

FORM = AnswerFormat(True, True, True, True)
PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"}, "count": {"type": "integer"}, "ratio": {"type": "number"}, "flag": {"type": "boolean"},
    "list": {"type": "array"}, "map": {"type": "object"}, "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "either": {"type": ["string", "integer"]}}
TYPES = read_types([{"function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}}}])


def parse(text: str, reasoning: Reasoning = "ended", cuts: tuple[int, ...] = ()) -> Found:
    """Parse the text, split at the cuts. Check that nothing follows text whose meaning is known."""
    parser, parts = AnswerParser(FORM, reasoning, TYPES), Parts()
    for begin, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
        parser.feed(text[begin:end])
        parts.add(parser.take())
    parser.finish()
    parts.add(parser.take())
    return found(parts)


def parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


def call(*parameters: str, name: str = "f") -> str:
    return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"


A = call(parameter("text", "a"))
A_CALL = ("f", '{"text": "a"}')
UNCLOSED = "<tool_call>\n<function=f>\n<parameter=text>\na\n"
CASES: dict[str, tuple[str, Found]] = {
    "content": ("Hello\n\nworld\n\n", ("Hello\n\nworld\n\n", "", [])),
    "call": (A, ("", "", [A_CALL])),
    "content and call": ("Let me see.\n\n" + A, ("Let me see.", "", [A_CALL])),
    "content with a line feed and call": ("a\n\n\n" + A, ("a\n", "", [A_CALL])),
    "content beside a call": ("Sure." + A, ("Sure.", "", [A_CALL])),
    "calls": (f"{A}\n{call(name='g')}\n", ("", "", [A_CALL, ("g", "{}")])),
    "text between and after": (f"a\n\n{A}\nb\n\n{A}\nc", ("a\nb\nc", "", [A_CALL, A_CALL])),
    "no arguments": (call(), ("", "", [("f", "{}")])),
    "one line": ("<tool_call><function=f><parameter=text>a</parameter></function></tool_call>", ("", "", [A_CALL])),
    "several": (call(parameter("text", "a"), parameter("count", "3")), ("", "", [("f", '{"text": "a", "count": 3}')])),
    "lines": (call(parameter("text", "\n a\n\nb \n")), ("", "", [("f", '{"text": "\\n a\\n\\nb \\n"}')])),
    "empty": (call(parameter("text", "")), ("", "", [("f", '{"text": ""}')])),
    "empty without a line": (
        call("<parameter=text>\n</parameter>\n"), ("", "", [("f", '{"text": ""}')])),
    "quotes": (call(parameter("text", 'a "b" \\ \t é')), ("", "", [("f", json.dumps(
        {"text": 'a "b" \\ \t é'}, ensure_ascii=False))])),
    "unknown function": (call(parameter("count", "3"), name="h"), ("", "", [("h", '{"count": "3"}')])),
    "unknown parameter": (call(parameter("other", "3")), ("", "", [("f", '{"other": "3"}')])),
    "end tag of a parameter in a value": (
        call(parameter("text", "a</parameter> b\n</parameter>\nc")),
        ("", "", [("f", '{"text": "a</parameter> b\\n</parameter>\\nc"}')])),
    "tags in a value": (
        call(parameter("text", "<tool_call>\n<function=g>\n<parameter=x>\n</function> </tool_call> <think>")),
        ("", "", [("f", json.dumps({
            "text": "<tool_call>\n<function=g>\n<parameter=x>\n</function> </tool_call> <think>"}))])),
    "parameter without an end": (
        UNCLOSED + parameter("count", "3") + "</function>\n</tool_call>",
        ("", "", [("f", '{"text": "a", "count": 3}')])),
    "last parameter without an end": (UNCLOSED + "</function>\n</tool_call>b", ("b", "", [A_CALL])),
    "function without an end": (UNCLOSED + "</parameter>\n</tool_call>b", ("b", "", [A_CALL])),
    "call without an end": (A.removesuffix("\n</tool_call>"), ("", "", [A_CALL])),
    "call without an end before a call": (
        A.removesuffix("</tool_call>") + A, ("", "", [A_CALL, A_CALL])),
    "text in the call": (A.removesuffix("</tool_call>") + "so\n</tool_call>b", ("sob", "", [A_CALL])),
    "value is cut": (UNCLOSED, ("", "", [("f", '{"text": "a\\n')])),
    "value is cut in its end": (UNCLOSED + "</para", ("", "", [("f", '{"text": "a\\n</para')])),
    "cut after a value": (UNCLOSED + "</parameter>\n</fun", ("", "", [("f", '{"text": "a"')])),
    "number is cut": ("<tool_call>\n<function=f>\n<parameter=count>\n12", ("", "", [("f", '{"count": 12')])),
    "key is cut": (UNCLOSED + "</parameter>\n<parameter=cou", ("", "", [("f", '{"text": "a"')])),
    "bad key": (UNCLOSED + "</parameter>\n<parameter=a\nb", ("<parameter=a\nb", "", [("f", '{"text": "a"')])),
    "far from the next tag": (
        UNCLOSED + "</parameter>" + " " * (MAX_SPACE + 1) + "</function>x",
        ("", "", [("f", '{"text": "a\\n</parameter>' + " " * (MAX_SPACE + 1) + "</function>x")])),
    "tag twice": ("<tool_call>\n" + A, ("<tool_call>", "", [A_CALL])),
    "JSON": ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', (
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "", [])),
    "name is cut": ("a\n\n<tool_call>\n<function=f", ("a\n\n<tool_call>\n<function=f", "", [])),
    "name only": ("<tool_call>\n<function=f>\n</tool_call>", ("<tool_call>\n<function=f>\n</tool_call>", "", [])),
    "no name": (call(name=""), (call(name=""), "", [])),
    "text before parameters": (
        "<tool_call>\n<function=f>\nso\n</function>\n</tool_call>",
        ("<tool_call>\n<function=f>\nso\n</function>\n</tool_call>", "", [])),
    "no function": ("<tool_call>\nf\n</tool_call>", ("<tool_call>\nf\n</tool_call>", "", [])),
    "function without a call": ("<function=f>\n</function>", ("<function=f>\n</function>", "", [])),
    "prose about tags": ("Use <tool_call> and <function=f>.", ("Use <tool_call> and <function=f>.", "", [])),
}


@pytest.mark.parametrize("case", CASES)
def test_parse_returns_the_parts(case: str) -> None:
    text, expected = CASES[case]
    assert parse(text) == expected
    assert parse(text, cuts=tuple(range(1, len(text)))) == expected


def test_answer_after_an_open_tag_is_reasoning_first() -> None:
    assert parse(f"I think.\n</think>\n\n{A}", "begun") == ("", "I think.", [A_CALL])
    assert parse(f"{A}\n</think>\n\nb", "begun") == ("b", A, [])


VALUES: list[tuple[str, str, Any]] = [
    ("text", "5", "5"), ("text", "null", "null"), ("text", "True", "True"), ("text", '{"a": 1}', '{"a": 1}'),
    ("count", "42", 42), ("count", "-7", -7), ("count", "many", "many"), ("count", "null", None),
    ("ratio", "3.14", 3.14), ("ratio", "2", 2), ("ratio", "1e3", 1000.0), ("ratio", "NaN", "NaN"),
    ("flag", "true", True), ("flag", "False", False), ("flag", "1", True), ("flag", "maybe", "maybe"),
    ("list", '["a", 1]', ["a", 1]), ("list", "['a', True, None]", ["a", True, None]), ("list", "a, b", "a, b"),
    ("map", '{"w": 10, \n "h": 20}', {"w": 10, "h": 20}), ("map", "{'k': 'v'}", {"k": "v"}),
    ("map", '"{\'k\': \'v\'}"', {"k": "v"}), ("map", "None", None), ("map", "{'k': {1, 2}}", "{'k': {1, 2}}"),
    ("maybe", "null", None), ("maybe", "None", None), ("maybe", "nullable", "nullable"), ("maybe", "no", "no"),
    ("either", "5", 5), ("either", "a5", "a5"), ("either", "1.5", "1.5"),
]


@pytest.mark.parametrize(("name", "value", "expected"), VALUES)
def test_value_has_the_type_of_its_schema(name: str, value: str, expected: Any) -> None:
    _, _, [(_, arguments)] = parse(call(parameter(name, value), parameter("text", "a")))
    assert json.loads(arguments) == {name: expected, "text": "a"} if name != "text" else {"text": "a"}
    assert type(json.loads(parse(call(parameter(name, value)))[2][0][1])[name]) is type(expected)


@pytest.mark.parametrize("value", ["[" * 20_000, "{'a': " * 3_000, "9" * 5_000, "(" * 3_000 + ")" * 3_000])
def test_hostile_value_is_a_string(value: str) -> None:
    _, _, [(_, arguments)] = parse(call(parameter("list", value)))
    assert json.loads(arguments) == {"list": value}


pieces = st.sampled_from([
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=text>", "\n", " ",
    "<parameter=count>", "<parameter=maybe>", "<parameter=", "</parameter>", "</parameter>\n", "nul", "l", "12", "a",
    "<", "</", ">", "é", '"', "\\", A, UNCLOSED, parameter("count", "3"), parameter("map", '{"a": "<"}')])


@given(st.lists(pieces, max_size=16).map("".join), st.data(), st.sampled_from(["possible", "begun", "ended"]))
def test_joined_parts_do_not_depend_on_the_split(text: str, data: st.DataObject, reasoning: Reasoning) -> None:
    whole = parse(text, reasoning)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    assert parse(text, reasoning, tuple(cuts)) == whole
    assert parse(text, reasoning, tuple(range(1, len(text)))) == whole


@given(st.lists(pieces, max_size=16).map("".join), st.integers(0, 200))
def test_end_adds_nothing_where_all_is_known(text: str, cut: int) -> None:
    parser = AnswerParser(FORM, "possible", TYPES)
    parser.feed(text[:cut])
    parser.take()
    if parser.is_clean:
        parser.finish()
        assert parser.take() == Parts()


@given(st.dictionaries(st.sampled_from(sorted(PROPERTIES)), st.text(max_size=12), max_size=4), st.text(max_size=9))
def test_written_call_is_parsed_back(arguments: dict[str, str], content: str) -> None:
    content = content.replace("<", "").strip("\n")
    if not content.strip():
        content = ""  # white space alone is no content
    blocks = [parameter(name, value) for name, value in arguments.items()]
    text, _, [(name, written)] = parse(f"{content}\n\n{call(*blocks)}")
    assert (text, name, list(json.loads(written))) == (content, "f", list(arguments))
    assert not arguments.keys() & {"text"} or json.loads(written)["text"] == arguments["text"]


def test_text_is_sent_as_it_arrives_and_other_values_at_their_end() -> None:
    parser = AnswerParser(FORM, "ended", TYPES)
    parser.feed("<tool_call>\n<function=f>\n<parameter=text")
    assert not parser.is_clean
    assert parser.take() == Parts()
    parser.feed(">\nPar")
    assert parser.is_clean
    assert parser.take().calls == [CallDelta(0, "f", '{"text": "Par')]
    parser.feed("is\n</parameter>\n<parameter=count>\n1")
    assert not parser.is_clean
    assert parser.take().calls == [CallDelta(0, "", 'is", "count": ')]
    parser.feed("2\n</parameter>\n</function>")
    assert parser.take().calls == [CallDelta(0, "", "12}")]
    parser.feed("\n</tool_call>")
    assert parser.is_clean
    assert parser.take() == Parts()
