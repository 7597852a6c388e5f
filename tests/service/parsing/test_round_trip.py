"""Conversations that the templates of real models render, and whose last turn the parser reads back.

The models are Qwen3 and a small model with its own tokenizer. Renderings are compared with transformers. The ids of the
turn arrive as the engine sends them, so that characters and tags are split as the tokenizers split them.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from npuserve.npu.step import SamplingParams
from npuserve.service.frontend.response import ResponseBuilder
from npuserve.service.ipc.messages import Finish, Output, Request, Timing
from npuserve.service.requests.validation import CheckedRequest
from npuserve.service.text.tokenizer import Tokenizer
from npuserve.service.text.tokenizer_loader import load_tokenizer
from npuserve.v1 import generate_pb2 as pb
from tests.support.real_models import model_folder
from tests.support.tokenizers import transformers_tokenizer

pytestmark = pytest.mark.model
NAMES = ["../tokenizers/qwen3", "minimind2-small"]
CONVERSATIONS = 50
TIMING = Timing(0.0, [], 0.0, 0.0, 0.0, 0.0)
WORDS = ["Paris", "東京", "weather", "</tool_call>", "<tool_call>", "<think>", '"quoted"', "a\\b", "👩‍👧", "{", "}}",
         "1e3", "line\nfeed", "tab\t", "<|im_end|>", "é", "  two  "]
EDGES: list[dict[str, Any]] = [
    {"content": ""}, {"content": "Hello."}, {"content": "One.\n\nTwo.\n"}, {"content": "a < b > c <tool"},
    {"content": "", "tool_calls": [("f", {})]},
    {"content": "", "tool_calls": [("f", {"a": "</tool_call>\n<tool_call>"})]},
    {"content": "I see.", "tool_calls": [("f", {"a": {"b": [1, None, {"c": "}"}]}}), ("f", {"a": 1.5}), ("g", {})]},
    {"content": "I see.\n", "tool_calls": [("été", {"ключ": "значение"})]},
    {"content": "x", "reasoning_content": "First.\n\nThen <tool_call> maybe.", "tool_calls": [("f", {"a": True})]},
    {"content": "", "reasoning_content": "<think> again", "tool_calls": [("f", {"a": ""})]},
]


def conversation(index: int) -> dict[str, Any]:
    """Return the last turn of a conversation."""
    if index < len(EDGES):
        return EDGES[index]
    chance = random.Random(index)

    def words(least: int = 0) -> str:
        return " ".join(chance.choices(WORDS, k=chance.randrange(least, 8)))

    def value(depth: int) -> Any:
        match chance.randrange(6 if depth else 4):
            case 0:
                return chance.choice([None, True, False, -1, 2.5, 10**12])
            case 4:
                return [value(depth - 1) for _ in range(chance.randrange(3))]
            case 5:
                return {words(): value(depth - 1) for _ in range(chance.randrange(3))}
        return words()

    def plain(least: int = 0) -> str:
        """Return words without tags that begin a part, and without line feeds and spaces at the ends."""
        return words(least).replace("<tool_call>", "").replace("<think>", "").replace("</think>", "").strip()

    turn: dict[str, Any] = {"content": plain()}
    if chance.random() < 0.7:
        turn["reasoning_content"] = plain(1)
    if chance.random() < 0.8:
        turn["tool_calls"] = [(f"f{chance.randrange(9)}", {f"k{i}": value(2) for i in range(chance.randrange(4))})
                              for _ in range(chance.randrange(1, 4))]
    return turn


def rendered(tokenizer: Tokenizer, theirs: Any, turn: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt, and of the turn with its end. Check both renderings."""
    assert tokenizer.chat
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}
             for name, arguments in turn.get("tool_calls", ())]
    asked = [{"role": "system", "content": "Help."}, {"role": "user", "content": "Go on."}]
    said = {"role": "assistant", **turn} | ({"tool_calls": calls} if calls else {})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    prompt = tokenizer.chat.render(asked, {}, tools)
    whole = tokenizer.chat.render([*asked, said], {"add_generation_prompt": False}, tools)
    assert whole == theirs.apply_chat_template([*asked, said], tools=tools, tokenize=False)
    assert whole.startswith(prompt)
    answer = whole.removeprefix(prompt).removesuffix("<|im_end|>\n")
    return tokenizer.encode(prompt, False), tokenizer.encode(answer, False)


def parsed(tokenizer: Tokenizer, prompt: list[int], ids: list[int], sizes: random.Random) -> pb.GenerateResponse:
    """Return the joined messages of the ids, which arrive in parts of some tokens."""
    assert tokenizer.chat
    checked = CheckedRequest(
        Request("r", prompt, len(ids) + 1, 0.0, SamplingParams()), (), False, False, True,
        answer_format=tokenizer.chat.format, call_id="x")
    builder, found, arguments = ResponseBuilder(checked, tokenizer), pb.GenerateResponse(), list[str]()
    at = 0
    while not found.HasField("finish"):
        count = sizes.randrange(1, 5)
        end = at + count >= len(ids)
        finish = Finish("length", len(prompt), 0, len(ids), TIMING) if end else None
        builder.add([Output(1, ids[at : at + count], finish, None, None, None)])
        at += count
        message = builder.last_message(finish, 1.0) if finish else builder.next_message(0.0)
        if message is None:
            continue
        assert message.offset == len(found.token_ids)
        found.token_ids.extend(message.token_ids)
        found.text += message.text
        found.reasoning += message.reasoning
        for call in message.tool_calls:
            if call.name:
                assert call.id == f"call_x_0_{len(found.tool_calls)}"
                found.tool_calls.add(id=call.id, name=call.name)
                arguments.append("")
            assert call.index == len(found.tool_calls) - 1
            arguments[-1] += call.arguments
        if message.HasField("finish"):
            found.finish.CopyFrom(message.finish)
    for made, text in zip(found.tool_calls, arguments, strict=True):
        made.arguments = text
    assert list(found.token_ids) == ids
    return found


@pytest.mark.parametrize("name", NAMES)
def test_turns_that_the_template_renders_are_parsed_back(name: str) -> None:
    folder = model_folder(name)
    tokenizer, theirs = load_tokenizer(folder), transformers_tokenizer(folder)
    assert tokenizer
    calls = 0
    for index in range(CONVERSATIONS):
        turn = conversation(index)
        prompt, ids = rendered(tokenizer, theirs, turn)
        found = parsed(tokenizer, prompt, ids, random.Random(index))
        has_reasoning = "reasoning_content" in turn and name == NAMES[0]  # the other template leaves it out
        assert found.reasoning == (turn["reasoning_content"] if has_reasoning else ""), index
        assert found.text == turn["content"], index
        expected = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in turn.get("tool_calls", ())]
        assert [(call.name, call.arguments) for call in found.tool_calls] == expected, index
        calls += len(expected)
    assert calls > CONVERSATIONS // 2
