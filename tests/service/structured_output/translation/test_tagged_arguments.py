"""Structural tags of tool calls with tagged arguments: what they accept, and what is refused by name."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from npuserve.service.parsing.answer_parser import AnswerParser, Parts
from npuserve.service.parsing.parameter_types import read_types
from npuserve.service.parsing.tool_choice import structural_tag
from npuserve.service.structured_output.translation.errors import ConstraintError
from npuserve.service.text.answer_format import AnswerFormat
from npuserve.v1 import prompt_pb2
from tests.support.grammars import accepts, matcher, walk

FORM = AnswerFormat(True, True, True, True)
UNIT = {"$defs": {"Unit": {"enum": ["C", "F"], "type": "string"}}}
WEATHER = {"type": "object", **UNIT, "required": ["city", "days"], "properties": {
    "city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9},
    "unit": {"$ref": "#/$defs/Unit"}, "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}}}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


def tag(*tools: dict[str, Any], name: str = "", reasoning: Any = "ended") -> str:
    chat = prompt_pb2.Chat(tools=[json.dumps(item) for item in tools])
    if name:
        chat.tool_choice.name = name
    else:
        chat.tool_choice.mode = prompt_pb2.TOOL_CHOICE_MODE_REQUIRED
    return structural_tag(chat, FORM, reasoning)


def call(name: str, *parameters: tuple[str, str]) -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def test_required_accepts_calls_of_the_tools_only() -> None:
    tools = tool("weather", WEATHER), tool("now")
    whole = call("weather", ("city", 'New "York"\n<b>'), ("days", "3"), ("unit", "C"), ("tags", '["a"]'), ("note", "x"))
    good = [
        whole, call("now"), f"{whole}\n{call('now')}", call("weather", ("city", ""), ("days", "9")),
        call("weather", ("city", "\nnull\n"), ("days", "1"), ("note", "null"))]
    bad = [
        "", "Hello", "x" + whole, whole + "x", call("other"), whole.replace("\n</tool_call>", ""), f"{whole}{whole}",
        call("weather"), call("weather", ("days", "3"), ("city", "a")), call("weather", ("city", "a"), ("days", "30")),
        call("weather", ("city", "a"), ("days", '"3"')), call("weather", ("city", "a"), ("days", "3"), ("unit", "K")),
        call("weather", ("city", "a"), ("days", "3"), ("tags", '["a", "b", "c"]')),
        call("weather", ("city", "a"), ("days", "3"), ("other", "b")), call("now", ("city", "a")),
        call("weather", ("city", "a</parameter>"), ("days", "3")),
        call("weather", ("city", "a\n<parameter="), ("days", "3")),
        call("weather", ("city", "a</function>\n</tool_call>"), ("days", "3"))]
    for text in good:
        assert accepts(matcher("structural_tag", tag(*tools)), text), text
    for text in bad:
        assert not accepts(matcher("structural_tag", tag(*tools)), text), text


def test_a_name_accepts_one_call_and_reasoning_comes_first() -> None:
    tools = tool("weather", WEATHER), tool("now")
    named = tag(*tools, name="now")
    assert accepts(matcher("structural_tag", named), call("now"))
    assert not accepts(matcher("structural_tag", named), f"{call('now')}\n{call('now')}")
    assert not accepts(matcher("structural_tag", named), call("weather", ("city", "a"), ("days", "3")))
    begun = tag(*tools, reasoning="begun")
    assert accepts(matcher("structural_tag", begun), f"I think.\n</think>\n\n{call('now')}")
    assert not accepts(matcher("structural_tag", begun), call("now"))


@pytest.mark.parametrize(("value", "good", "bad"), [
    ({}, ["", "a\nb", "5"], []),
    ({"type": "string", "maxLength": 3}, ["", "abc", "\n\n"], ["abcd"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "a\n"], ["a", "abcd"]),
    ({"type": "string", "format": "date"}, ["2026-02-03"], ["2026-02-30", "x"]),
    ({"type": "string", "pattern": "^[a-z]+$"}, ["ab"], ["a1", ""]),
    ({"type": "string", "pattern": "b"}, ["abc", "b"], ["ac"]),
    ({"type": "string", "enum": ["ab", "abc", ""]}, ["ab", "abc", ""], ["a", "abcd"]),
    ({"const": "x"}, ["x"], ["y"]),
    ({"enum": ["a", 1, None]}, ["a", "1", "null"], ["b", "2"]),
    ({"enum": [1, 2]}, ["1"], ["3", "a"]),
    ({"type": "boolean"}, ["true", "false"], ["True", "1"]),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["5", "null"], ["a"]),
    ({"anyOf": [{"enum": ["C"]}, {"type": "null"}]}, ["C", "null"], ["D"]),
    ({"anyOf": [{"type": "string", "format": "date"}, {"type": "integer"}]}, ["2026-02-03", "5"], ["a"]),
    ({"type": ["string", "integer"]}, ["a", "5"], []),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, ['{"a": 1}'], ["{}", "a"]),
    ({"type": "array", "items": {"$ref": "#/$defs/Unit"}}, ['["C"]', "[]"], ['["K"]']),
])
def test_value_of_a_schema(value: Any, good: list[str], bad: list[str]) -> None:
    constraint = tag(tool("f", {**UNIT, "properties": {"a": value}, "required": ["a"]}))
    for text in good:
        assert accepts(matcher("structural_tag", constraint), call("f", ("a", text))), text
    for text in bad:
        assert not accepts(matcher("structural_tag", constraint), call("f", ("a", text))), text


@pytest.mark.parametrize(("parameters", "good", "bad"), [
    ({}, [(), (("a", "x"), ("b", "y"))], [(("<", "x"),)]),
    ({"additionalProperties": False}, [()], [(("a", "x"),)]),
    ({"additionalProperties": {"type": "integer"}}, [(), (("a", "1"),)], [(("a", "x"),)]),
    ({"required": ["a"]}, [(("a", "x"),)], [(), (("b", "x"),)]),
    ({"properties": {"a": False}}, [()], [(("a", "x"),)]),
])
def test_parameters_that_are_not_declared(parameters: Any, good: list[Any], bad: list[Any]) -> None:
    constraint = tag(tool("f", parameters))
    for arguments in good:
        assert accepts(matcher("structural_tag", constraint), call("f", *arguments)), arguments
    for arguments in bad:
        assert not accepts(matcher("structural_tag", constraint), call("f", *arguments)), arguments


@pytest.mark.parametrize(("parameters", "message"), [
    ({"anyOf": [{}]}, "keyword 'anyOf' is not supported for arguments between tags at /anyOf"),
    ({"properties": {"a": {"type": "object", "not": {}}}}, "keyword 'not' is not supported at /properties/a/not"),
    ({"properties": {"a": {"type": "string", "not": {}}}}, "keyword 'not' is not supported at /properties/a/not"),
    ({"properties": {"a<": {}}}, "the name of a parameter between tags must not be empty"),
    ({"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, "write ^(?:a|b)$ at /properties/a/pattern"),
    ({"properties": {"a": {"type": "string", "anyOf": [{}]}}}, "'anyOf' beside other keywords is not supported"),
    ({"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}}}, "may be any text"),
    ({"properties": {"a": {"enum": ["</parameter>"]}}}, "a value must not contain </parameter>"),
    ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "'$ref' must be a part of the schema"),
    ({"properties": {"a": {"type": "string", "minLength": -1}}}, "'minLength' must be an integer of at least 0"),
    ({"properties": {"a": False}, "required": ["a"]}, "the schema accepts nothing at /properties/a"),
])
def test_schema_that_cannot_be_honoured_is_refused(parameters: Any, message: str) -> None:
    with pytest.raises(ConstraintError) as error:
        matcher("structural_tag", tag(tool("f"), tool("g", parameters)))
    assert message in str(error.value)
    assert error.value.field == "chat.tools[1].function.parameters"


@pytest.mark.slow
def test_walks_are_calls_that_the_parser_reads_and_the_schema_accepts() -> None:
    tools = [tool("weather", WEATHER), tool("now")]
    schemas = {"weather": WEATHER, "now": {"additionalProperties": False}}
    calls = 0
    for seed in range(60):
        text = walk(matcher("structural_tag", tag(*tools)), random.Random(seed), 400)
        if text is None:
            continue
        parser, parts = AnswerParser(FORM, "ended", read_types(tools)), Parts()
        parser.feed(text.decode())
        parser.finish()
        parts.add(parser.take())
        assert parts.content == ""
        for part in parts.calls:
            jsonschema.validate(json.loads(part.arguments), schemas[part.name])
            calls += 1
    assert calls
