"""Parser of answers: cases by hand, and joined parts for any split of the text."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.service.parsing.answer_parser import AnswerParser, CallDelta, Parts, Reasoning
from npuserve.service.text.answer_format import AnswerFormat

BOTH = AnswerFormat(True, True)
Found = tuple[str, str, list[tuple[str, str]]]
"""Content, reasoning, and (name, arguments) of the calls."""


def found(parts: Parts) -> Found:
    """Return what the parts say. Check that each call has its name once, in its first part."""
    calls: list[tuple[str, str]] = []
    for call in parts.calls:
        if call.index == len(calls):
            assert call.name
            calls.append((call.name, call.arguments))
        else:
            assert not call.name
            assert call.index == len(calls) - 1
            calls[-1] = calls[-1][0], calls[-1][1] + call.arguments
    return parts.content, parts.reasoning, calls


def parse(text: str, reasoning: Reasoning = "possible", form: AnswerFormat = BOTH, cuts: tuple[int, ...] = ()) -> Found:
    """Parse the text, split at the cuts."""
    parser, parts = AnswerParser(form, reasoning), Parts()
    for begin, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
        parser.feed(text[begin:end])
        parts.add(parser.take())
        if parser.is_clean:  # then the end of the answer adds nothing
            ended = copy.deepcopy(parser)
            ended.finish()
            assert ended.take() == Parts()
    parser.finish()
    parts.add(parser.take())
    return found(parts)


def call(name: str = "f", arguments: str = '{"a": 1}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CUT = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "x'
F = ("f", '{"a": 1}')
CASES: dict[str, tuple[str, Found]] = {
    "empty": ("", ("", "", [])),
    "content": ("Hello\n\nworld\n", ("Hello\n\nworld\n", "", [])),
    "white space": (" \n", (" \n", "", [])),
    "beginnings of tags": ("a <tool b <tool_cal\n<think", ("a <tool b <tool_cal\n<think", "", [])),
    "half a tag at the end": ("<thi", ("<thi", "", [])),
    "half a tag at the end after a call": (call() + "\n<tool", ("<tool", "", [F])),
    "white space in a tag": ("<thi nk>", ("<thi nk>", "", [])),
    "line feed in a tag after reasoning": ("<think>a</think>\n<tool\n_call>", ("<tool\n_call>", "a", [])),
    "white space in a tag after a call": (call() + "\n<tool _call>", ("<tool _call>", "", [F])),
    "end tags in content": ("a</think>b</tool_call>c", ("a</think>b</tool_call>c", "", [])),
    "reasoning": ("<think>\nI think\n\nso\n</think>\n\nYes\n\nno", ("Yes\n\nno", "I think\n\nso", [])),
    "reasoning after white space": ("\n<think>a</think>b", ("b", "a", [])),
    "no reasoning": ("<think>\n\n</think>\n\nYes", ("Yes", "", [])),
    "reasoning is cut": ("<think>\nI think\n</thi", ("", "I think\n</thi", [])),
    "tags in reasoning": ("<think>a <tool_call> <think> <</thinK></think>b", (
        "b", "a <tool_call> <think> <</thinK>", [])),
    "reasoning later in the text": ("a <think>b</think>", ("a <think>b</think>", "", [])),
    "call": (call(), ("", "", [F])),
    "call and line feeds": ("\n" + call() + "\n", ("", "", [F])),
    "reasoning and call": ("<think>\na\n</think>\n\n" + call(), ("", "a", [F])),
    "content and call": ("Let me see.\n" + call(), ("Let me see.", "", [F])),
    "content with a line feed and call": ("a\n\n" + call() + " \n ", ("a\n", "", [F])),
    "calls": (call("f") + "\n" + call("g") + call("h"), ("", "", [F, ("g", F[1]), ("h", F[1])])),
    "text between and after": (f"a\n{call()}\nb\n{call('g')}\nc", ("a\nb\nc", "", [F, ("g", F[1])])),
    "text after": (f"{call()}\n\nb", ("b", "", [F])),
    "arguments first": ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", "", [F])),
    "keys before and after": (
        '<tool_call>\n{"id": [{"name": "no"}], "name": "f", "x": 1.5, "arguments": {"a": 1}, "y": "}"}\n</tool_call>',
        ("", "", [F])),
    "keys twice": (call(arguments='{"a": 1}, "name": "g", "arguments": {}'), ("", "", [F])),
    "name twice": ('<tool_call>{"name": "f", "name": 1, "arguments": {"a": 1}}</tool_call>', ("", "", [F])),
    "tag and quote in a key": (
        '<tool_call>{"</tool_call>\\"": 1, "name": "f", "arguments": {"a": 1}}</tool_call>', ("", "", [F])),
    "comma at the end": ('<tool_call>{"name": "f",}</tool_call>', ("", "", [("f", "{}")])),
    "arguments are missing": (
        '<tool_call>{"name": "f", "arguments": }</tool_call>',
        ('<tool_call>{"name": "f", "arguments": }</tool_call>', "", [])),
    "other key than arguments": (
        '<tool_call>\n{"name": "f", "parameters": {"a": 1}}\n</tool_call>',
        ('<tool_call>\n{"name": "f", "parameters": {"a": 1}}\n</tool_call>', "", [])),
    "no arguments": ('<tool_call>\n{"name": "f"}\n</tool_call>', ("", "", [("f", "{}")])),
    "white space inside": ('<tool_call> { "name" :\t"f" ,\n"arguments" : { "a" : 1 } } </tool_call>', (
        "", "", [("f", '{ "a" : 1 }')])),
    "arguments as written": (call(arguments='{"b":  1e3,"ü":"\\u00fc\\"}"}'), (
        "", "", [("f", '{"b":  1e3,"ü":"\\u00fc\\"}"}')])),
    "arguments are a string": (call(arguments='"{\\"a\\": 1}"'), ("", "", [("f", '"{\\"a\\": 1}"')])),
    "arguments are null": (call(arguments="null"), ("", "", [("f", "null")])),
    "arguments are null and a space": (call(arguments="null "), ("", "", [("f", "null")])),
    "arguments in several lines": (call(arguments='{\n  "a": [\n    1\n  ]\n}'), (
        "", "", [("f", '{\n  "a": [\n    1\n  ]\n}')])),
    "line feed in a string": (call(arguments='{"a": "x\ny"}'), ("", "", [("f", '{"a": "x\ny"}')])),
    "tags in arguments": (call(arguments='{"a": "</tool_call><tool_call><think>"}'), (
        "", "", [("f", '{"a": "</tool_call><tool_call><think>"}')])),
    "escaped tag in arguments": (call(arguments='{"a": "\\</tool_call>"}'), (
        "", "", [("f", '{"a": "\\</tool_call>"}')])),
    "escaped name": (call('\\u0066\\"'), ("", "", [('f"', F[1])])),
    "arguments are cut": (CUT, ("", "", [("f", '{"a": [1, "x')])),
    "tag is cut": (call()[:-3], ("", "", [F])),
    "cut in a line of a string": (CUT + "\n</tool", ("", "", [("f", '{"a": [1, "x\n</tool')])),
    "cut in a line of another value": (
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}, "x": [1\n</tool', ("", "", [F])),
    "string is not closed before an empty line": (CUT + "\n\n</tool_call>b", ("b", "", [("f", '{"a": [1, "x\n')])),
    "string is not closed": (CUT + "\n</tool_call>\n" + call("g"), ("", "", [("f", '{"a": [1, "x'), ("g", F[1])])),
    "braces are not closed": (call(arguments='{"a": [1'), ("", "", [("f", '{"a": [1}')])),
    "braces are not closed in the line of the tag": (
        '<tool_call>{"name": "f", "arguments": {"a": [1</tool_call>b', ("b", "", [("f", '{"a": [1')])),
    "other tag after the object": (call()[:-len("</tool_call>")] + "<b>", ("<b>", "", [F])),
    "outer brace is missing": ('<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>b', ("b", "", [F])),
    "end tag is missing": (call()[:-len("\n</tool_call>")] + "\n" + call("g"), ("", "", [F, ("g", F[1])])),
    "arguments without quotes": (call(arguments="{a: 'b'}"), ("", "", [("f", "{a: 'b'}")])),
    "a brace too many": (call(arguments='{"a": 1}}') + "\nb", ("}\nb", "", [F])),
    "text in the call": (call(arguments='{"a": 1} so') + call("g"), ("so}", "", [F, ("g", F[1])])),
    "name is cut": ('a\n<tool_call>\n{"name": "f', ('a\n<tool_call>\n{"name": "f', "", [])),
    "name only is cut": ('<tool_call>\n{"name": "f", "argu', ('<tool_call>\n{"name": "f", "argu', "", [])),
    "name is no string": (call().replace('"f"', "1") + "b", (call().replace('"f"', "1") + "b", "", [])),
    "name is empty": (call(""), (call(""), "", [])),
    "name is empty after arguments": ('<tool_call>{"arguments": {"a": 1}, "name": ""}</tool_call>', (
        '<tool_call>{"arguments": {"a": 1}, "name": ""}</tool_call>', "", [])),
    "empty object": ("<tool_call>{}</tool_call>", ("<tool_call>{}</tool_call>", "", [])),
    "name is a surrogate": (call("\\ud800"), (call("\\ud800"), "", [])),
    "name is not closed": ('<tool_call>\n{"name": "f\n</tool_call>b', (
        '<tool_call>\n{"name": "f\n</tool_call>b', "", [])),
    "no name": ('<tool_call>\n{"arguments": {}}\n</tool_call>', (
        '<tool_call>\n{"arguments": {}}\n</tool_call>', "", [])),
    "empty call": ("<tool_call>\n</tool_call>\n" + call(), ("<tool_call>\n</tool_call>", "", [F])),
    "tag twice": ("<tool_call>\n" + call(), ("<tool_call>", "", [F])),
    "tag twice without a call": ("a\n<tool_call>\n<tool_call>\nb", ("a\n<tool_call>\n<tool_call>\nb", "", [])),
    "end tag is missing and no call follows": (
        call()[:-len("\n</tool_call>")] + "\n<tool_call>\nb", ("<tool_call>\nb", "", [F])),
    "XML": ("<tool_call>\n<function=f>\n</tool_call>", ("<tool_call>\n<function=f>\n</tool_call>", "", [])),
    "prose about tags": ("Use <tool_call> and </tool_call>.", ("Use <tool_call> and </tool_call>.", "", [])),
}


@pytest.mark.parametrize("case", CASES)
def test_parse_returns_the_parts(case: str) -> None:
    text, expected = CASES[case]
    assert parse(text) == expected
    assert parse(text, cuts=tuple(range(1, len(text)))) == expected


@pytest.mark.parametrize(("text", "expected"), [
    ("a\n</think>\n\nb", ("b", "a", [])),
    ("\na <think> b</think>" + call(), ("", "a <think> b", [F])),
    ("a\n", ("", "a\n", [])),
    ("<think>a</think>b", ("b", "<think>a", [])),
])
def test_parse_after_an_open_tag_begins_with_reasoning(text: str, expected: Found) -> None:
    assert parse(text, "begun") == expected


def test_parse_after_ended_reasoning_finds_none() -> None:
    assert parse("<think>a</think>b" + call(), "ended") == ("<think>a</think>b", "", [F])


def test_parse_without_tool_calls_keeps_their_text() -> None:
    assert parse("<think>a</think>\n\n" + call(), form=AnswerFormat(True, False)) == (call(), "a", [])


def test_parse_without_reasoning_keeps_its_text() -> None:
    assert parse("<think>a</think>" + call(), form=AnswerFormat(False, True)) == ("<think>a</think>", "", [F])
    assert parse("a</think>b", "begun", AnswerFormat(False, True)) == ("a</think>b", "", [])


pieces = st.sampled_from([
    "<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "{", "}", '"name": "f"', '"arguments": ', '"',
    "\\", ",", ":", "[", "]", "1", "a", "<", "</", "tool_call>", "é", call(), call("g", '{"b": "\\n"}'), CUT])


@given(st.lists(pieces, max_size=14).map("".join), st.data(), st.sampled_from(["possible", "begun", "ended"]))
def test_joined_parts_do_not_depend_on_the_split(text: str, data: st.DataObject, reasoning: Reasoning) -> None:
    whole = parse(text, reasoning)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    assert parse(text, reasoning, cuts=tuple(cuts)) == whole


@given(st.lists(pieces, max_size=14).map("".join))
def test_no_text_is_lost_outside_of_calls(text: str) -> None:
    """Each character of the answer is in one of the parts, except white space, tags and the frame of a call."""
    content, reasoning, calls = parse(text)
    if not calls:
        kept = (reasoning + content).replace("<think>", "").replace("</think>", "")
        assert "".join(kept.split()) == "".join(text.replace("<think>", "").replace("</think>", "").split())


@given(st.text(max_size=30), st.text(max_size=30), st.lists(st.tuples(
    st.text(min_size=1, max_size=9), st.dictionaries(st.text(max_size=4), st.text(max_size=9), max_size=3)),
    max_size=3))
def test_parse_of_written_parts_returns_them(
    reasoning: str, content: str, calls: list[tuple[str, dict[str, str]]]
) -> None:
    """The parts must not contain tags, and must not begin or end with line feeds."""
    reasoning, content = reasoning.replace("<", "").strip("\n"), content.replace("<", "").strip("\n")
    blocks = [f"<tool_call>\n{json.dumps({'name': name, 'arguments': value})}\n</tool_call>" for name, value in calls]
    text = f"<think>\n{reasoning}\n</think>\n\n" + "\n".join(filter(None, [content, *blocks]))
    assert parse(text) == (content, reasoning, [(name, json.dumps(value)) for name, value in calls])


def test_arguments_are_sent_as_they_arrive() -> None:
    parser = AnswerParser(BOTH, "possible")
    parser.feed('<tool_call>\n{"name": "f", "arguments"')
    assert not parser.is_clean
    assert parser.take() == Parts()
    parser.feed(': {"city": "Par')
    assert parser.is_clean
    assert parser.take().calls == [CallDelta(0, "f", '{"city": "Par')]
    parser.feed('is"}}')
    assert parser.take().calls == [CallDelta(0, "", 'is"}')]
    parser.feed("\n</tool_call>")
    assert parser.is_clean
    assert parser.take() == Parts()
