"""Conversations that the templates of real models render, and whose last turn the parser reads back.

The models are Qwen3 and a small model with its own tokenizer. Renderings are compared with transformers. The ids of the
turn arrive as the engine sends them, so that characters and tags are split as the tokenizers split them.

Qwen3.5 and later models have another template and more added tokens. A template of the same form takes its place, with
Qwen3's tokenizer and with a small one.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from npuserve.npu.step import SamplingParams
from npuserve.service.frontend.response import ResponseBuilder
from npuserve.service.ipc.messages import Finish, Output, Request, Timing
from npuserve.service.parsing.parameter_types import read_types
from npuserve.service.parsing.parsed_stream import reasoning_state
from npuserve.service.requests.validation import CheckedRequest
from npuserve.service.schema_types import json_type
from npuserve.service.text.answer_format import AnswerFormat
from npuserve.service.text.tokenizer import Tokenizer
from npuserve.service.text.tokenizer_loader import load_tokenizer
from npuserve.v1 import generate_pb2 as pb
from tests.support.real_models import model_folder
from tests.support.tagged_template import TAGGED_TEMPLATE
from tests.support.tokenizers import train, transformers_tokenizer

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


def tools_of(turn: dict[str, Any]) -> list[dict[str, Any]]:
    """Return tools whose parameters have the types of the arguments of a turn's calls."""
    properties: dict[str, dict[str, Any]] = {"f": {}}
    for name, arguments in turn.get("tool_calls", ()):
        kinds = properties.setdefault(name, {})
        for key, value in arguments.items():
            kinds[key] = {"type": sorted({json_type(value), *kinds.get(key, {"type": []})["type"]})}
    return [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": kinds}}}
            for name, kinds in properties.items()]


def rendered(tokenizer: Tokenizer, theirs: Any, turn: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt, and of the turn with its end. Check both renderings."""
    assert tokenizer.chat
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}
             for name, arguments in turn.get("tool_calls", ())]
    asked = [{"role": "system", "content": "Help."}, {"role": "user", "content": "Go on."}]
    said = {"role": "assistant", **turn} | ({"tool_calls": calls} if calls else {})
    tools = tools_of(turn)
    prompt = tokenizer.chat.render(asked, {}, tools)
    whole = tokenizer.chat.render([*asked, said], {"add_generation_prompt": False}, tools)
    assert whole == theirs.apply_chat_template([*asked, said], tools=tools, tokenize=False)
    assert whole.startswith(prompt)
    answer = whole.removeprefix(prompt).removesuffix("<|im_end|>\n")
    return tokenizer.encode(prompt, False), tokenizer.encode(answer, False)


def parsed(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], sizes: random.Random, tools: list[dict[str, Any]]
) -> pb.GenerateResponse:
    """Return the joined messages of the ids, which arrive in parts of some tokens."""
    assert tokenizer.chat
    checked = CheckedRequest(
        Request("r", prompt, len(ids) + 1, 0.0, SamplingParams()), (), False, False, True,
        answer_format=tokenizer.chat.format, call_id="x", call_types=read_types(tools))
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


@pytest.mark.model
@pytest.mark.parametrize("name", NAMES)
def test_turns_that_the_template_renders_are_parsed_back(name: str) -> None:
    folder = model_folder(name)
    tokenizer, theirs = load_tokenizer(folder), transformers_tokenizer(folder)
    assert tokenizer
    calls = 0
    for index in range(CONVERSATIONS):
        turn = conversation(index)
        prompt, ids = rendered(tokenizer, theirs, turn)
        found = parsed(tokenizer, prompt, ids, random.Random(index), tools_of(turn))
        has_reasoning = "reasoning_content" in turn and name == NAMES[0]  # the other template leaves it out
        assert found.reasoning == (turn["reasoning_content"] if has_reasoning else ""), index
        assert found.text == turn["content"], index
        expected = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in turn.get("tool_calls", ())]
        assert [(call.name, call.arguments) for call in found.tool_calls] == expected, index
        calls += len(expected)
    assert calls > CONVERSATIONS // 2


@pytest.fixture(params=["trained", pytest.param(NAMES[0], marks=pytest.mark.model)])
def tagged_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Folder of a tokenizer and of the template with tagged arguments."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if request.param == "trained":
        train().save(str(tmp_path / "tokenizer.json"))
    else:
        for file in model_folder(request.param).iterdir():
            shutil.copy(file, tmp_path)
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TAGGED_TEMPLATE}))
    return tmp_path


def test_turns_with_tagged_arguments_are_parsed_back(tagged_folder: Path) -> None:
    tokenizer, theirs = load_tokenizer(tagged_folder), transformers_tokenizer(tagged_folder)
    assert tokenizer
    assert tokenizer.chat
    assert tokenizer.chat.format == AnswerFormat(True, True, True, True)
    calls = 0
    for index in range(CONVERSATIONS):
        turn = conversation(index)
        turn["content"] = turn["content"].strip()
        prompt, ids = rendered(tokenizer, theirs, turn)
        whole = parsed(tokenizer, prompt, ids, random.Random(index), tools_of(turn))
        assert whole.reasoning == turn.get("reasoning_content", ""), index
        assert whole.text == turn["content"], index
        assert [(call.name, json.loads(call.arguments)) for call in whole.tool_calls] == list(
            turn.get("tool_calls", ())), index
        calls += len(whole.tool_calls)
    assert calls > CONVERSATIONS // 2


def test_template_arguments_decide_where_reasoning_begins_and_stays(tagged_folder: Path) -> None:
    tokenizer = load_tokenizer(tagged_folder)
    assert tokenizer
    assert tokenizer.chat
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "thought"},
            {"role": "user", "content": "c"}]
    states = []
    for arguments in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        ids = tokenizer.encode(tokenizer.chat.render(chat, arguments), False)
        states.append(reasoning_state(tokenizer, ids))
    assert states == ["begun", "begun", "ended"]
    assert "thought" not in tokenizer.chat.render(chat)
    assert "<think>\nthought\n</think>\n\nb" in tokenizer.chat.render(chat, {"preserve_thinking": True})
