"""Answers of Qwen3 with reasoning and tool calls, parsed by smg and by the server from the same tokens.

Needs the tokenizer of Qwen3 beside NPUSERVE_TEST_MODELS. Where the two differ, KNOWN says how, and why the server's
answer is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from npuserve.client.request_builder import build_request
from npuserve.common.answer import Answer
from npuserve.v1 import generate_pb2 as pb
from tests.e2e.gateway.smg import Gateway, gateway
from tests.e2e.gateway.test_tools import CALLS, QUESTION, THOUGHT, TOOL, call_text, chat
from tests.e2e.server import Server, serving

pytestmark = pytest.mark.model

MODEL = "qwen3-0.6b"
"""smg takes the parsers of Qwen3 by this name."""
TOOLS = [{"type": "function", "function": TOOL}]
THINK = f"<think>\n{THOUGHT}\n</think>\n\n"
CALL = call_text(*CALLS[0])
BLOCKS = {
    "text": "Hello.\n\nNo call.",
    "one call": CALL,
    "two calls": "\n".join(call_text(*call) for call in CALLS),
    "text before a call": f"Let me see.\n{CALL}",
    "text after a call": f"{CALL}\nThat was it.",
    "text between calls": f"{CALL}\nAnd\n{call_text(*CALLS[1])}",
    "nested arguments": call_text("get_weather", {"city": {"a": [1, {}], "b": "é\n\"}"}}),  # type: ignore[dict-item]
    "arguments first": '<tool_call>\n{"arguments": {"city": "Rome"}, "name": "get_weather"}\n</tool_call>',
    "end tag in a string": call_text("get_weather", {"city": "a </tool_call> b"}),
    "call on one line": '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>',
    "no arguments": '<tool_call>\n{"name": "get_weather"}\n</tool_call>',
    "unknown function": call_text("other", {"city": "Rome"}),
    "two calls in one block": CALL.replace("\n</tool_call>", "\n" + json.dumps({"name": "g", "arguments": {}}))
                              + "\n</tool_call>",
    "not JSON": "<tool_call>\n<function=get_weather>\n</tool_call>",
    "not JSON, then a call": f"<tool_call>\nget_weather(Paris)\n</tool_call>\n{CALL}",
    "a brace too many": CALL.replace("\n</tool_call>", "}\n</tool_call>"),
    "a brace missing": CALL.replace("}\n</tool_call>", "\n</tool_call>"),
    "no end tag": CALL.removesuffix("\n</tool_call>"),
    "arguments cut": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
    "name cut": '<tool_call>\n{"name": "get_w',
    "begin tag only": "Let me see.\n<tool_call>",
    "part of a tag": "a < b and <tool",
}
"""Answers after the reasoning."""
CASES = {
    **{name: f"{THINK}{text}" for name, text in BLOCKS.items()},
    "text without reasoning": "Hello.",
    "call without reasoning": CALL,
    "reasoning without an end": f"<think>\n{THOUGHT}",
    "call within reasoning": f"<think>\n{CALL}\n</think>\n\nDone.",
    "reasoning twice": f"{THINK}{THINK}Done.",
    "empty reasoning": "<think>\n\n</think>\n\nDone.",
}


class Parsed(NamedTuple):
    """Parts of an answer. White space at the ends of text and reasoning is removed. calls: name and arguments, as
    compact JSON where they are JSON."""

    text: str
    reasoning: str
    calls: list[tuple[str, str]]


def parsed(text: str | None, reasoning: str | None, calls: list[tuple[str, str]]) -> Parsed:
    return Parsed((text or "").strip(), (reasoning or "").strip(), [(name, compact(value)) for name, value in calls])


def compact(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False, sort_keys=True)
    except ValueError:
        return arguments


def ours(server: Server) -> Parsed:
    """Return the server's answer. The streamed one is the same."""
    request = build_request([QUESTION], {"tools": TOOLS, "parse_output": True})  # type: ignore[typeddict-item]
    joined = Answer(1)
    for message in server.stub.StreamGenerate(request, timeout=60):
        joined.add(message)
    answers: list[pb.GenerateResponse] = [server.stub.Generate(request, timeout=60), joined.response()]
    whole, streamed = (
        parsed(answer.text, answer.reasoning, [(call.name, call.arguments) for call in answer.tool_calls])
        for answer in answers)
    assert whole == streamed
    return whole


def theirs(gate: Gateway) -> Parsed:
    message = chat(gate, model=MODEL, messages=[QUESTION], tools=TOOLS).choices[0].message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return parsed(message.content, getattr(message, "reasoning_content", None), calls)


def streamed_theirs(gate: Gateway) -> Parsed:
    text, reasoning, names, arguments = "", "", dict[int, str](), dict[int, str]()
    for chunk in chat(gate, model=MODEL, messages=[QUESTION], tools=TOOLS, stream=True):
        for delta in (choice.delta for choice in chunk.choices):
            text += delta.content or ""
            reasoning += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or ():
                names[call.index] = names.get(call.index, "") + (call.function.name or "")
                arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    reasoning = reasoning.removeprefix("<think>")  # smg leaves the tag in a stream, and removes it in a whole answer
    return parsed(text, reasoning, [(names[index], arguments[index]) for index in sorted(names)])


class Difference(NamedTuple):
    """smg's other answer. whole, streamed: its text, reasoning and calls; None where they are the server's."""

    reason: str
    whole: Parsed | None
    streamed: Parsed | None


def after_thought(text: str, *calls: tuple[str, str]) -> Parsed:
    return Parsed(text, THOUGHT, list(calls))


PARIS, TOKYO = ((name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in CALLS)
NO_TAG = "smg takes an answer without <think> as reasoning; the server knows from the prompt that it has not begun"
LOST = "smg drops text after a call"
KNOWN = {
    "text after a call": Difference(LOST, after_thought("", PARIS), after_thought("", PARIS)),
    "text between calls": Difference(LOST, after_thought("", PARIS, TOKYO), after_thought("", PARIS, TOKYO)),
    "call on one line": Difference(
        "smg needs a line feed after <tool_call>",
        *[after_thought('<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>')] * 2),
    "unknown function": Difference(
        "smg's stream takes a function that is not among the tools as text, its whole answer takes it as a call", None,
        after_thought(call_text("other", {"city": "Rome"}))),
    "two calls in one block": Difference(
        "whole, smg takes the block as text", after_thought(BLOCKS["two calls in one block"]), None),
    "not JSON, then a call": Difference(
        "whole, smg drops the block that is no call; streamed, it misses the call after it", after_thought("", PARIS),
        after_thought(BLOCKS["not JSON, then a call"])),
    "a brace too many": Difference(
        "whole, smg takes the block as text", after_thought(BLOCKS["a brace too many"]), None),
    "a brace missing": Difference(
        "whole, smg takes a block that is not complete as text", after_thought(BLOCKS["a brace missing"]), None),
    "no end tag": Difference(
        "whole, smg takes a block that is not complete as text", after_thought(BLOCKS["no end tag"]), None),
    "arguments cut": Difference(
        "whole, smg takes the block as text; streamed, it closes the JSON, although the arguments were cut",
        after_thought(BLOCKS["arguments cut"]), after_thought("", ("get_weather", '{"city": "Par"}'))),
    "text without reasoning": Difference(NO_TAG, *[Parsed("", CASES["text without reasoning"], [])] * 2),
    "call without reasoning": Difference(NO_TAG, *[Parsed("", CASES["call without reasoning"], [])] * 2),
    "reasoning twice": Difference(
        "whole, smg drops the second <think>", after_thought(f"{THOUGHT}\n</think>\n\nDone."), None),
}
"""Case -> smg's answer where it is not the server's."""
UNSTEADY = ("two calls in one block", "a brace too many")
"""Cases in which the rest of the block is in smg's streamed text or not, with its end tag, by how the tokens arrive."""


@pytest.fixture(scope="module")
def both(scripted_folder: Path) -> Iterator[tuple[Server, Gateway]]:
    program = ("-m", "tests.e2e.gateway.scripted", "serve")
    with (
        serving(str(scripted_folder), "--served-name", MODEL, program=program) as server,
        gateway([server.target]) as running,
    ):
        yield server, running


@pytest.mark.parametrize("name", CASES)
def test_smg_parses_as_the_server(
    both: tuple[Server, Gateway], script: Callable[[str], list[int]], name: str
) -> None:
    server, gate = both
    script(CASES[name])
    expected = ours(server)
    known = KNOWN.get(name, Difference("", None, None))
    assert theirs(gate) == (known.whole or expected)
    streamed = streamed_theirs(gate)
    if name in UNSTEADY:
        assert streamed.calls == expected.calls
    else:
        assert streamed == (known.streamed or expected)
    assert expected not in (known.whole, known.streamed)


@pytest.mark.parametrize("name", [name for name in BLOCKS if name not in KNOWN])
def test_server_parses_the_parts(both: tuple[Server, Gateway], script: Callable[[str], list[int]], name: str) -> None:
    """Where both parsers agree, the answers equal the script."""
    script(CASES[name])
    found = ours(both[0])
    assert found.reasoning == THOUGHT
    assert found.calls or found.text == BLOCKS[name]
