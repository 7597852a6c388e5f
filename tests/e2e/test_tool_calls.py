"""Reasoning and tool calls of a real server whose engine generates the tokens of a script, with Qwen3's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from npuserve.cli import main as cli
from npuserve.client import Client, InvalidRequest
from npuserve.client.request_builder import build_request
from npuserve.common.answer import Answer
from npuserve.v1 import generate_pb2 as pb
from tests.e2e.gateway import scripted
from tests.e2e.gateway.test_tools import ANSWER, CALLS, QUESTION, THOUGHT, TOOL, call_text
from tests.e2e.server import Server, serving

pytestmark = pytest.mark.model

TOOLS = [{"type": "function", "function": TOOL}]
NESTED = {"a": {"b": [1, "</tool_call>", {}]}, "c": "👩‍👧 é\n"}
TEXTS = [
    ANSWER,
    "Hello.\n\nNo call.",
    f"<think>\n\n</think>\n\nLet me see.\n{call_text('f', NESTED)}\nSo.",  # type: ignore[arg-type]
    f"<think>\nI think\n{call_text(*CALLS[0])}",
    '<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {"x": [1',
    "<tool_call>\n<function=f>\n</tool_call>\n" + call_text(*CALLS[1]),
]


@pytest.fixture(scope="module")
def server(scripted_folder: Path) -> Iterator[Server]:
    with serving(str(scripted_folder), program=("-m", "tests.e2e.gateway.scripted", "serve")) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.target, timeout=60) as made:
        yield made


def parts(answer: pb.GenerateResponse | pb.Sample) -> tuple[str, str, list[tuple[str, str]]]:
    return answer.text, answer.reasoning, [(call.name, call.arguments) for call in answer.tool_calls]


def joined(messages: list[pb.StreamGenerateResponse], samples: int = 1) -> pb.GenerateResponse:
    answer = Answer(samples)
    for message in messages:
        answer.add(message)
    return answer.response()


def unary(server: Server, request: pb.GenerateRequest) -> pb.GenerateResponse:
    response: pb.GenerateResponse = server.stub.Generate(request, timeout=60)
    return response


def asked(**options: Any) -> pb.GenerateRequest:
    return build_request([QUESTION], {"tools": TOOLS, "parse_output": True, "return_token_ids": True, **options})  # type: ignore[typeddict-item]


def test_answer_has_reasoning_and_tool_calls(
    server: Server, client: Client, script: Callable[[str], list[int]]
) -> None:
    script(ANSWER)
    answer = client.generate([QUESTION], tools=TOOLS, parse_output=True)
    assert answer.reasoning == THOUGHT
    assert answer.text == ""
    assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == CALLS
    assert len({call.id for call in answer.tool_calls}) == 2
    raw = client.generate([QUESTION], tools=TOOLS)
    assert parts(raw) == (ANSWER, "", [])


def test_tool_results_are_part_of_the_next_prompt(client: Client, script: Callable[[str], list[int]]) -> None:
    script(ANSWER)
    answer = client.generate([QUESTION], tools=TOOLS, parse_output=True)
    messages = [QUESTION, {"role": "assistant", "content": answer.text, "reasoning_content": answer.reasoning,
                           "tool_calls": answer.tool_calls},
                *({"role": "tool", "content": "sunny", "tool_call_id": call.id} for call in answer.tool_calls)]
    tokenized = client.tokenize(messages)
    assert ANSWER in tokenized.text
    assert tokenized.text.count("<tool_response>\nsunny\n</tool_response>") == 2
    script("<think>\nGood.\n</think>\n\nIt is sunny.")
    last = client.generate(messages, tools=TOOLS, parse_output=True)
    assert parts(last) == ("It is sunny.", "Good.", [])
    assert len(client.tokenize(messages, tools=TOOLS).token_ids) == last.finish.usage.prompt_tokens


@pytest.mark.parametrize("text", TEXTS)
def test_stream_equals_the_unary_answer(
    server: Server, client: Client, script: Callable[[str], list[int]], text: str
) -> None:
    ids = script(text)
    request = asked(logprobs=0)
    whole, messages = unary(server, request), list(client.stream(request))
    streamed = joined(messages)
    assert parts(streamed) == parts(whole)
    assert list(whole.token_ids) == [*ids, scripted.CONFIG["eos_token_id"]]
    assert streamed.token_ids == whole.token_ids
    assert [position.chosen.token_id for position in streamed.logprobs] == list(whole.token_ids)
    at = 0
    for message in messages:
        assert message.offset == at
        assert message.num_tokens == len(message.token_ids) == len(message.logprobs)
        at += message.num_tokens


@pytest.mark.parametrize("text", TEXTS)
def test_stream_is_resumed_after_any_message(
    client: Client, script: Callable[[str], list[int]], text: str
) -> None:
    script(text)
    stream = client.stream(asked())
    messages = list(stream)
    whole, token = joined(messages), stream.attempts.resume_token
    for count, message in enumerate(messages):
        found = joined([*messages[:count], *client.resume(token, message.offset)])
        assert parts(found) == parts(whole), count
        assert found.token_ids == whole.token_ids
        assert [call.id for call in found.tool_calls] == [call.id for call in whole.tool_calls]


@pytest.mark.parametrize("text", TEXTS)
def test_every_sample_is_parsed(server: Server, client: Client, script: Callable[[str], list[int]], text: str) -> None:
    script(text)
    single = parts(unary(server, asked()))
    whole = unary(server, asked(n=2))
    streamed = joined(list(client.stream(asked(n=2))), 2)
    for answer in (whole, streamed):
        assert [parts(sample) for sample in answer.samples] == [single, single]
        ids = [call.id for sample in answer.samples for call in sample.tool_calls]
        assert len(set(ids)) == len(ids)


def test_stop_string_ends_the_text_that_the_model_wrote(client: Client, script: Callable[[str], list[int]]) -> None:
    script(ANSWER)
    answer = client.generate([QUESTION], tools=TOOLS, parse_output=True, stop=["</tool_call>"], return_token_ids=True)
    assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == CALLS[:1]
    assert answer.finish.matched_stop == "</tool_call>"
    cut = client.generate([QUESTION], tools=TOOLS, parse_output=True, stop=["Par"])
    assert parts(cut) == ("", THOUGHT, [("get_weather", '{"city": "')])


def test_max_tokens_cuts_arguments(client: Client, script: Callable[[str], list[int]]) -> None:
    ids = script(call_text(*CALLS[0]))
    answer = client.generate([QUESTION], tools=TOOLS, parse_output=True, max_tokens=len(ids) - 5)
    ((name, arguments),) = parts(answer)[2]
    assert name == CALLS[0][0]
    assert json.dumps(CALLS[0][1]).startswith(arguments)
    assert answer.finish.reason == pb.FINISH_REASON_LENGTH


def test_template_arguments_decide_whether_reasoning_may_begin(
    client: Client, script: Callable[[str], list[int]]
) -> None:
    script("<think>a</think>b")
    assert parts(client.generate([QUESTION], parse_output=True)) == ("b", "a", [])
    off = client.generate([QUESTION], parse_output=True, template_args={"enable_thinking": False})
    assert parts(off) == ("<think>a</think>b", "", [])


def test_tool_choice_none_leaves_calls_in_the_text(client: Client, script: Callable[[str], list[int]]) -> None:
    script(call_text(*CALLS[0]))
    answer = client.generate([QUESTION], tools=TOOLS, tool_choice="none", parse_output=True)
    assert parts(answer) == (call_text(*CALLS[0]), "", [])
    with pytest.raises(InvalidRequest, match=r"chat\.tool_choice\.name: must be the name of a tool"):
        client.generate([QUESTION], tools=TOOLS, tool_choice={"name": "f"})


@pytest.mark.parametrize(("parameters", "message"), [
    ({"properties": {"a": {"not": {}}}},
     r"chat\.tools\[1\]\.function\.parameters: keyword 'not' is not supported at /properties/a/not "),
    ({"properties": {"a": {"oneOf": [{}, {}]}}},
     r"chat\.tools\[1\]\.function\.parameters: keyword 'oneOf' .* at /properties/a/oneOf "),
    ({"required": ["a"], "properties": {"a": False}}, r"chat\.tools\[1\]\.function\.parameters: .* at /"),
])
def test_schema_of_a_tool_that_cannot_be_honoured_is_named(
    client: Client, script: Callable[[str], list[int]], parameters: Any, message: str
) -> None:
    bad = {"type": "function", "function": {"name": "bad", "parameters": parameters}}
    for choice in ("required", {"name": "bad"}):
        with pytest.raises(InvalidRequest, match=message):
            client.generate([QUESTION], tools=[*TOOLS, bad], tool_choice=choice)  # type: ignore[arg-type]
    script(ANSWER)
    assert client.generate([QUESTION], tools=[*TOOLS, bad]).text


def test_command_prints_reasoning_text_and_calls(
    server: Server, script: Callable[[str], list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script(f"<think>\n{THOUGHT}\n</think>\n\nLet me see.\n{call_text(*CALLS[0])}")
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(TOOLS))
    command = ["generate", "Weather?", "--target", server.target, "--tools", str(file)]
    assert cli.main([*command, "--chat", "--parse", "--tool-choice", "auto"]) == 0
    assert capsys.readouterr().out == f'{THOUGHT}\n\nLet me see.\nget_weather {{"city": "Paris"}}\n'
    assert cli.main([*command, "--chat", "--tool-choice", "other"]) == 1
    assert "chat.tool_choice.name: must be the name of a tool" in capsys.readouterr().err
    assert cli.main(command) == 2
    assert "--tools: is for --chat only" in capsys.readouterr().err
    file.write_text("{}")
    assert cli.main([*command, "--chat"]) == 2
    assert "must be a JSON list of objects" in capsys.readouterr().err
