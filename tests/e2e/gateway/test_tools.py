"""Tool calls and reasoning through smg's parsers, of a worker that generates scripted tokens of Qwen3.

Needs the tokenizer of Qwen3 beside NPUSERVE_TEST_MODELS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway.sdk import anthropic, openai
from tests.e2e.gateway.smg import Gateway, gateway
from tests.e2e.gateway.worker import LOGGING, Worker
from tests.e2e.server import serving

pytestmark = pytest.mark.model

CALLS = [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "東京"})]
THOUGHT = "I need the weather of two cities."
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "Weather of a city", "parameters": PARAMETERS}
QUESTION = {"role": "user", "content": "What is the weather in Paris and 東京?"}


def call_text(name: str, arguments: dict[str, str]) -> str:
    value = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{value}\n</tool_call>"


ANSWER = f"<think>\n{THOUGHT}\n</think>\n\n" + "\n".join(call_text(*call) for call in CALLS)


@pytest.fixture(scope="module", params=["qwen3-0.6b", "my-model"])
def served(request: pytest.FixtureRequest, scripted_folder: Path) -> Iterator[tuple[str, Worker, Gateway]]:
    """Name of the model, worker and gateway. smg takes the parsers from the name, else from its settings."""
    name = request.param
    parsers = () if name.startswith("qwen3") else ("--tool-call-parser", "qwen", "--reasoning-parser", "qwen3")
    with serving(
        str(scripted_folder), "--served-name", name, *LOGGING,
        program=("-m", "tests.e2e.gateway.scripted", "serve"),
    ) as server, gateway([server.target], *parsers) as running:
        yield name, Worker(server), running


def chat(gate: Gateway, **fields: Any) -> Any:
    client = openai().OpenAI(base_url=f"{gate.url}/v1", api_key="none", max_retries=0, timeout=60)
    return client.chat.completions.create(**fields)


def found_calls(calls: Any) -> list[tuple[str, dict[str, str]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def test_chat_has_parallel_tool_calls_and_reasoning(
    served: tuple[str, Worker, Gateway], script: Callable[[str], None]
) -> None:
    name, worker, gate = served
    script(ANSWER)
    count = worker.count()
    tools = [{"type": "function", "function": TOOL}]
    message = (answer := chat(gate, model=name, messages=[QUESTION], tools=tools)).choices[0].message
    assert found_calls(message.tool_calls) == CALLS
    assert message.reasoning_content.strip() == THOUGHT
    assert answer.choices[0].finish_reason == "tool_calls"
    line = worker.wait_for(count + 1)
    assert answer.usage.completion_tokens == line["generated_tokens"]
    assert line["reason"] == "eos"
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    said = {"role": "assistant", "content": "", "tool_calls": [call.model_dump() for call in message.tool_calls]}
    script(f"<think>\n{THOUGHT}\n</think>\n\nIt is sunny in both cities.")
    last = chat(gate, model=name, messages=[QUESTION, said, *results], tools=tools).choices[0]
    assert (last.message.content.strip(), last.finish_reason) == ("It is sunny in both cities.", "stop")


def test_chat_streams_tool_calls(served: tuple[str, Worker, Gateway], script: Callable[[str], None]) -> None:
    name, _, gate = served
    script(ANSWER)
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    reasons = []
    tools = [{"type": "function", "function": TOOL}]
    for chunk in chat(gate, model=name, messages=[QUESTION], tools=tools, stream=True):
        for choice in chunk.choices:
            reasons.append(choice.finish_reason)
            for call in choice.delta.tool_calls or ():
                names[call.index] = names.get(call.index, "") + (call.function.name or "")
                arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    assert [(names[i], json.loads(arguments[i])) for i in sorted(names)] == CALLS
    assert reasons[-1] == "tool_calls"


def test_messages_have_tool_use_blocks(served: tuple[str, Worker, Gateway], script: Callable[[str], None]) -> None:
    name, _, gate = served
    script(ANSWER)
    client = anthropic().Anthropic(base_url=gate.url, api_key="none", max_retries=0, timeout=60)
    tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": PARAMETERS}
    found = client.messages.create(model=name, max_tokens=500, messages=[QUESTION], tools=[tool])
    assert [(block.name, block.input) for block in found.content if block.type == "tool_use"] == CALLS
    assert found.stop_reason == "tool_use"


def test_responses_have_function_calls(served: tuple[str, Worker, Gateway], script: Callable[[str], None]) -> None:
    name, _, gate = served
    script(ANSWER)
    client = openai().OpenAI(base_url=f"{gate.url}/v1", api_key="none", max_retries=0, timeout=60)
    found = client.responses.create(model=name, input=QUESTION["content"], tools=[{"type": "function", **TOOL}])
    calls = [(item.name, json.loads(item.arguments)) for item in found.output if item.type == "function_call"]
    assert calls == CALLS


NAMED = {"type": "function", "function": {"name": "get_weather"}}
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}


def compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize(("choice", "text", "calls"), [
    ("required", compact([{"name": name, "parameters": arguments} for name, arguments in CALLS]), CALLS),
    (NAMED, compact(CALLS[0][1]), CALLS[:1]),
], ids=["required", "named"])
def test_forced_tool_choice_has_calls(
    served: tuple[str, Worker, Gateway], script: Callable[[str], None], choice: Any, text: str, calls: Any
) -> None:
    """smg sends a JSON schema, which the scripted answer satisfies.

    With thinking on, smg takes an answer without a thought as reasoning.
    """
    name, worker, gate = served
    script(text)
    tools = [{"type": "function", "function": TOOL}]
    fields = {"model": name, "messages": [QUESTION], "tools": tools, "tool_choice": choice, "extra_body": NO_THOUGHT}
    count = worker.count()
    (found,) = chat(gate, **fields).choices
    assert found_calls(found.message.tool_calls) == calls
    assert worker.wait_for(count + 1)["constraint"] == "json_schema"
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for chunk in chat(gate, **fields, stream=True):
        for call in (call for one in chunk.choices for call in one.delta.tool_calls or ()):
            names[call.index] = names.get(call.index, "") + (call.function.name or "")
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    assert [(names[i], json.loads(arguments[i])) for i in sorted(names)] == calls
