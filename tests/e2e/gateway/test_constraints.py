"""Structured output through smg: `response_format`, forced `tool_choice`, and smg's own fields of completions.

An answer of a finite schema ends within MAX_TOKENS, since a token has at least one byte. Any other one may be cut.
"""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.e2e.gateway.sdk import openai
from tests.e2e.gateway.worker import Worker

MODEL = "storyteller"
QUESTION = "Once upon a time there was a little girl named Lily. She asked about the weather."
MAX_TOKENS = 240
SMALL = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
LARGE = {
    "type": "object", "additionalProperties": False, "required": ["city", "days"],
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "array", "maxItems": 3, "items": {"type": "integer", "minimum": 1, "maximum": 31}}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", "parameters": LARGE}},
    {"type": "function", "function": {"name": "confirm", "description": "Yes or no", "parameters": SMALL}},
]
PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}  # type: ignore[index]
SAMPLINGS = [
    {"temperature": 0}, {"temperature": 1.0, "seed": 0},
    *(pytest.param({"temperature": 1.0, "seed": seed}, marks=pytest.mark.full) for seed in range(1, 3))]


def chat(client: Any, **fields: Any) -> Any:
    messages = [{"role": "user", "content": QUESTION}]
    return client.chat.completions.create(
        model=MODEL, messages=messages, **{"max_completion_tokens": MAX_TOKENS, **fields})


class Streamed:
    """Answer of a stream: text, calls as (name, arguments), and finish reason."""

    def __init__(self, stream: Any):
        self.text, self.reason = "", ""
        names: dict[int, str] = {}
        arguments: dict[int, str] = {}
        for chunk in stream:
            for choice in chunk.choices:
                self.text += choice.delta.content or ""
                self.reason = choice.finish_reason or self.reason
                for call in choice.delta.tool_calls or ():
                    names[call.index] = names.get(call.index, "") + (call.function.name or "")
                    arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
        self.calls = [(names[index], arguments.get(index, "")) for index in sorted(names)]


def calls_of(message: Any) -> list[tuple[str, Any]]:
    """Return the calls of a message, whose arguments are checked by the schemas of the tools."""
    found = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    for name, arguments in found:
        jsonschema.validate(arguments, PARAMETERS[name])
    return found


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("schema", [SMALL, LARGE], ids=["small", "large"])
def test_response_format_json_schema(client: Any, schema: dict[str, Any], sampling: dict[str, Any]) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    (choice,) = chat(client, response_format=wanted, **sampling).choices
    assert choice.finish_reason in (("stop",) if schema is SMALL else ("stop", "length"))
    if choice.finish_reason == "stop":
        jsonschema.validate(json.loads(choice.message.content), schema)
    streamed = Streamed(chat(client, response_format=wanted, stream=True, **sampling))
    assert (streamed.text, streamed.reason) == (choice.message.content, choice.finish_reason)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_response_format_json_object(client: Any, sampling: dict[str, Any]) -> None:
    wanted = {"type": "json_object"}
    (choice,) = chat(client, response_format=wanted, **sampling).choices
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    streamed = Streamed(chat(client, response_format=wanted, stream=True, **sampling))
    assert (streamed.text, streamed.reason) == (choice.message.content, choice.finish_reason)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_named_tool_is_called(client: Any, sampling: dict[str, Any]) -> None:
    wanted = {"type": "function", "function": {"name": "confirm"}}
    message = chat(client, tools=TOOLS, tool_choice=wanted, **sampling).choices[0].message
    calls = calls_of(message)
    assert [name for name, _ in calls] == ["confirm"]
    streamed = Streamed(chat(client, tools=TOOLS, tool_choice=wanted, stream=True, **sampling))
    assert [(name, json.loads(arguments)) for name, arguments in streamed.calls] == calls


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_required_tool_is_called(worker: Worker, client: Any, sampling: dict[str, Any]) -> None:
    count = worker.count()
    (choice,) = chat(client, tools=TOOLS, tool_choice="required", **sampling).choices
    line = worker.wait_for(count + 1)
    assert line["constraint"] == "json_schema"
    if line["reason"] == "length":  # the list of calls may be long
        assert choice.message.content.startswith("[")
        return
    calls = calls_of(choice.message)
    assert calls
    streamed = Streamed(chat(client, tools=TOOLS, tool_choice="required", stream=True, **sampling))
    assert [(name, json.loads(arguments)) for name, arguments in streamed.calls] == calls


def test_completions_have_constraints(client: Any) -> None:
    def text(**fields: Any) -> str:
        found = client.completions.create(
            model=MODEL, prompt=QUESTION, max_tokens=MAX_TOKENS, temperature=1.0, seed=4, extra_body=fields)
        assert found.choices[0].finish_reason == "stop"
        content: str = found.choices[0].text
        return content

    assert re.fullmatch("[a-c]{5}", text(regex="[a-c]{5}"))
    assert text(ebnf='root ::= "yes" | "no"') in ("yes", "no")
    jsonschema.validate(json.loads(text(json_schema=json.dumps(SMALL))), SMALL)


def wanting(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


@pytest.mark.parametrize(("fields", "message"), [
    (wanting({"type": "array", "uniqueItems": True}), r"sampling_params\.json_schema: .*uniqueItems"),
    (wanting({"description": "a" * 70_000}), r"sampling_params\.json_schema: must be at most 65536 bytes"),
    ({"extra_body": {"regex": "a(b"}}, r"sampling_params\.regex: "),
    ({"extra_body": {"ebnf": "root ::= other"}}, r"sampling_params\.grammar: .*other"),
])
def test_constraint_that_cannot_be_honoured_is_400(client: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai().BadRequestError, match=message):
        chat(client, **fields)
