"""Request builder: prompts and options become request messages."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from npuserve.client.request_builder import (
    Options,
    build_detokenize,
    build_embed,
    build_rank,
    build_request,
    build_resume,
    build_tokenize,
)
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import pooling_pb2, prompt_pb2, tokenize_pb2


def test_options_are_all_fields_of_the_request() -> None:
    parts = (pb.SamplingParams, pb.StoppingParams, pb.OutputParams, pb.SchedulingParams)
    names = {name for part in parts for name in part.DESCRIPTOR.fields_by_name} | {
        field.name for field in pb.GenerateRequest.DESCRIPTOR.fields if field.message_type is None
    } | {"choices"} | set(prompt_pb2.Chat.DESCRIPTOR.fields_by_name) - {"messages"}
    assert set(Options.__annotations__) == names - {"text"}


def test_build_request_takes_each_form_of_prompt() -> None:
    assert build_request("a", {}) == pb.GenerateRequest(text="a")
    assert build_request([1, 2], {}) == pb.GenerateRequest(token_ids=prompt_pb2.TokenIds(ids=[1, 2]))
    assert build_request([], {}).WhichOneof("prompt") == "token_ids"
    messages = [{"role": "user", "content": "hi"}, {"role": "tool", "content": "4", "tool_call_id": "c"}]
    chat = build_request(messages, {"template_args": {"enable_thinking": False}, "tools": ["{}"]})
    assert [(m.role, m.content) for m in chat.chat.messages] == [("user", "hi"), ("tool", "4")]
    assert chat.chat.template_args["enable_thinking"] is False
    given = pb.GenerateRequest(text="a")
    assert build_request(given, {"max_tokens": 3}) == pb.GenerateRequest(
        text="a", stopping=pb.StoppingParams(max_tokens=3))
    assert given == pb.GenerateRequest(text="a")


def test_build_request_converts_tools_and_tool_calls_to_json() -> None:
    tool = {"type": "function", "function": {"name": "é", "parameters": {}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [
        pb.ToolCall(id="1", name="f", arguments='{"b": 1, "a": 2}'), call, json.dumps(call)]}]
    chat = build_request(messages, {"tools": [tool, "{}"], "parse_output": True}).chat
    assert list(chat.tools) == ['{"type": "function", "function": {"name": "é", "parameters": {}}}', "{}"]
    assert list(chat.messages[0].tool_calls) == [json.dumps(call)] * 3


@pytest.mark.parametrize(("given", "expected"), [
    ("auto", prompt_pb2.ToolChoice(mode=prompt_pb2.TOOL_CHOICE_MODE_AUTO)),
    ("none", prompt_pb2.ToolChoice(mode=prompt_pb2.TOOL_CHOICE_MODE_NONE)),
    ("required", prompt_pb2.ToolChoice(mode=prompt_pb2.TOOL_CHOICE_MODE_REQUIRED)),
    ({"name": "f"}, prompt_pb2.ToolChoice(name="f")),
    ({"type": "function", "function": {"name": "f"}}, prompt_pb2.ToolChoice(name="f")),
    (prompt_pb2.ToolChoice(name="f"), prompt_pb2.ToolChoice(name="f")),
])
def test_build_request_reads_each_form_of_tool_choice(given: Any, expected: prompt_pb2.ToolChoice) -> None:
    assert build_request([{"role": "user", "content": "x"}], {"tool_choice": given}).chat.tool_choice == expected


@pytest.mark.parametrize("given", ["f", "", "unspecified!", {}, {"name": 1}, {"function": "f"}])
def test_build_request_refuses_other_tool_choices(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^tool_choice: must "):
        build_request([{"role": "user", "content": "x"}], {"tool_choice": given})


def test_build_request_sets_fields_of_options() -> None:
    request = build_request("a", {
        "request_id": "r", "n": 2, "temperature": 0.5, "logit_bias": {3: 1.5}, "allowed_token_ids": [3],
        "max_tokens": 9, "stop": "END", "stop_token_ids": (4, 5), "logprobs": 0, "priority": -1, "cache_salt": "s"})
    assert request == pb.GenerateRequest(
        request_id="r", text="a", n=2,
        sampling=pb.SamplingParams(temperature=0.5, logit_bias={3: 1.5}, allowed_token_ids=[3]),
        stopping=pb.StoppingParams(max_tokens=9, stop=["END"], stop_token_ids=[4, 5]),
        output=pb.OutputParams(logprobs=0), scheduling=pb.SchedulingParams(priority=-1, cache_salt="s"))
    assert build_request("a", {"stop": ["x", "y"]}).stopping.stop == ["x", "y"]


@pytest.mark.parametrize(("prompt", "options", "message"), [
    (b"x", {}, "prompt: must be a text, token ids, a chat or a request, got bytes"),
    (7, {}, "prompt: must be a text"),
    ("x", {"max_token": 3}, "max_token: unknown option; did you mean max_tokens?"),
    ("x", {"tools": ["{}"]}, "tools: needs a chat"),
    ("x", {"tool_choice": "none"}, "tool_choice: needs a chat"),
    ("x", {"text": "y"}, "text: unknown option"),
    ("x", {"max_tokens": -1}, "max_tokens: "),
    ("x", {"seed": 2**64}, "seed: "),
    ("x", {"temperature": "hot"}, "temperature: "),
    ("x", {"max_token": None}, "max_token: unknown option"),
])
def test_build_request_invalid_prompt_or_option_raises(prompt: Any, options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        build_request(prompt, options)


CHAT = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(("prompt", "options", "message"), [
    ("x", {"stop": 3}, "stop: must be a sequence, got int"),
    ("x", {"stop": b"x"}, "stop: must be a sequence, got bytes"),
    ("x", {"stop": {"a"}}, "stop: must be a sequence, got set"),
    ("x", {"stop": (text for text in "ab")}, "stop: must be a sequence, got generator"),
    ("x", {"stop": {"a": 1}}, "stop: must be a sequence, got dict"),
    ("x", {"stop": [3]}, "stop: "),
    ("x", {"stop_token_ids": 3}, "stop_token_ids: must be a sequence, got int"),
    ("x", {"stop_token_ids": bytearray(b"a")}, "stop_token_ids: must be a sequence, got bytearray"),
    ("x", {"allowed_token_ids": {1, 2}}, "allowed_token_ids: must be a sequence, got set"),
    ("x", {"logit_bias": [1, 2]}, "logit_bias: must be a mapping, got list"),
    ("x", {"logit_bias": 5}, "logit_bias: must be a mapping, got int"),
    ("x", {"logit_bias": {"1": 2.0}}, "logit_bias: "),
    ("x", {"max_tokens": {1: 2}}, "max_tokens: "),
    ("x", {"max_tokens": [1]}, "max_tokens: "),
    (CHAT, {"template_args": [1]}, "template_args: must be a mapping, got list"),
    (CHAT, {"template_args": "ab"}, "template_args: must be a mapping, got str"),
    (CHAT, {"tool_choice": 1}, "tool_choice: must be auto, none, required, or a mapping .*, got int"),
    (CHAT, {"tools": "ab"}, "tools: must be a sequence, got str"),
    (CHAT, {"tools": {"a": 1}}, "tools: must be a sequence, got dict"),
    ([{"role": "assistant", "tool_calls": "ab"}], {}, "prompt: must be a sequence, got str"),
    ([{"role": "user", "content": [1]}], {}, "prompt: content of a message must be a text, got list"),
    ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], {},
     "prompt: content of a message must be a text, got a list of parts: join the texts of the parts"),
    ([{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}], {},
     "prompt: content of a message must be a text, got a part of the type 'image_url': models are served for text"),
    ([{"role": "user", "content": [{"type": "video"}]}], {},
     "prompt: content of a message must be a text, got a part of the type 'video': .*send the text without it"),
    (bytearray(b"x"), {}, "prompt: must be a text, token ids, a chat or a request, got bytearray"),
    (memoryview(b"x"), {}, "prompt: must be a text, token ids, a chat or a request, got memoryview"),
    (None, {}, "prompt: must be a text"),
])
def test_build_request_value_of_another_type_raises_type_error(prompt: Any, options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}"):
        build_request(prompt, options)


def test_build_request_option_none_is_absent() -> None:
    options: Any = dict.fromkeys(Options.__annotations__)
    assert build_request("x", options) == build_request("x", {})
    assert build_request(CHAT, options) == build_request(CHAT, {})
    assert build_request("x", {**options, "regex": "a"}).regex == "a"


@pytest.mark.parametrize("token_ids", [None, 3, "ab", b"ab"])
def test_build_detokenize_value_of_another_type_raises_type_error(token_ids: Any) -> None:
    with pytest.raises(TypeError, match=r"^token_ids: must be a sequence"):
        build_detokenize(token_ids)


def test_build_tokenize_has_all_fields() -> None:
    shared: dict[str, Any] = {
        "model": "m", "parse_special_tokens": False, "template_args": {"enable_thinking": False},
        "tools": [{"name": "f"}], "tool_choice": "none"}
    found = build_tokenize(CHAT, {**shared, "add_special_tokens": True})
    assert found == tokenize_pb2.TokenizeRequest(
        model="m", parse_special_tokens=False, add_special_tokens=True, chat=build_request(CHAT, shared).chat)
    fields = {*tokenize_pb2.TokenizeRequest.DESCRIPTOR.fields_by_name, *prompt_pb2.Chat.DESCRIPTOR.fields_by_name}
    assert {*shared, "add_special_tokens"} == fields - {"text", "chat", "messages"}
    assert not build_tokenize("x", {}).HasField("add_special_tokens")


SCHEDULING: dict[str, Any] = {"priority": -1, "bypass_prefix_cache": True, "cache_salt": "s"}


def test_build_embed_has_all_fields() -> None:
    options: dict[str, Any] = {
        "request_id": "r", "model": "m", "prompt_name": "query", "dimensions": 8, "normalize": False, "truncate": True}
    found = build_embed("ab", {**options, **SCHEDULING})
    assert found == pooling_pb2.EmbedRequest(text="ab", scheduling=SCHEDULING, **options)
    assert {*options, "text", "token_ids", "scheduling"} == {*found.DESCRIPTOR.fields_by_name}
    assert build_embed([1, 2], {"dimensions": None}) == pooling_pb2.EmbedRequest(token_ids={"ids": [1, 2]})
    assert build_embed([], {}).WhichOneof("input") == "token_ids"


def test_build_rank_has_all_fields() -> None:
    options: dict[str, Any] = {"request_id": "r", "model": "m", "instruction": "i", "truncate": True}
    found = build_rank("q", ["a", "b"], {**options, **SCHEDULING})
    assert found == pooling_pb2.RankRequest(query="q", documents=["a", "b"], scheduling=SCHEDULING, **options)
    assert {*options, "query", "documents", "scheduling"} == {*found.DESCRIPTOR.fields_by_name}


@pytest.mark.parametrize(("build", "message"), [
    (lambda: build_embed(b"ab", {}), "content: must be a sequence"),
    (lambda: build_embed("ab", {"dimension": 3}), "dimension: unknown option; did you mean dimensions?"),
    (lambda: build_embed("ab", {"dimensions": "3"}), "dimensions: "),
    (lambda: build_rank(1, ["a"], {}), "query: "),
    (lambda: build_rank("q", "a", {}), "documents: must be a sequence"),
    (lambda: build_rank("q", [1], {}), "documents: "),
    (lambda: build_rank("q", ["a"], {"dimensions": 3}), "dimensions: unknown option"),
])
def test_build_pooled_unsuitable_argument_raises_type_error(build: Any, message: str) -> None:
    with pytest.raises(TypeError) as error:
        build()
    assert str(error.value).startswith(message)


def test_build_tokenize_text_may_be_empty() -> None:
    assert build_tokenize("", {"tools": None}).WhichOneof("prompt") == "text"  # type: ignore[typeddict-item]


@pytest.mark.parametrize(("prompt", "options", "message"), [
    ("x", {"max_tokens": 1}, "max_tokens: not an option of tokenize"),
    ("x", {"tools": []}, "tools: needs a chat"),
    ("x", {"add_special_tokens": "no"}, "add_special_tokens: .*"),
    ([1], {}, "prompt: must be a text or a chat"),
    (pb.GenerateRequest(text="x", n=2), {}, "prompt: must be a text or a chat"),
])
def test_build_tokenize_unsuitable_argument_raises_type_error(prompt: Any, options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}$"):
        build_tokenize(prompt, options)


LONE = "a\ud800b"


@pytest.mark.parametrize(("prompt", "options", "name"), [
    (LONE, {}, "prompt"),
    ([{"role": "user", "content": LONE}], {}, "prompt"),
    ("x", {"request_id": LONE}, "request_id"),
    ("x", {"model": LONE}, "model"),
    ("x", {"stop": LONE}, "stop"),
    ("x", {"stop": ["a", LONE]}, "stop"),
    ("x", {"cache_salt": LONE}, "cache_salt"),
    ([{"role": "user", "content": "x"}], {"tools": [LONE]}, "tools"),
    ([{"role": "user", "content": "x"}], {"template_args": {"a": LONE}}, "template_args"),
    ([{"role": "user", "content": "x"}], {"template_args": {LONE: 1}}, "template_args"),
    ([{"role": "user", "content": "x"}], {"template_args": {"a": [{"b": LONE}]}}, "template_args"),
])
def test_build_request_lone_surrogate_raises_value_error(prompt: Any, options: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: .*surrogates not allowed"):
        build_request(prompt, options)


@pytest.mark.parametrize(("make", "name"), [
    (lambda: build_resume(LONE, 0), "resume_token"),
    (lambda: build_resume("t", -1), "token_offset"),
    (lambda: build_resume("t", 2**32), "token_offset"),
    (lambda: build_detokenize([1, -1]), "token_ids"),
])
def test_build_argument_out_of_range_raises_value_error(make: Callable[[], object], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        make()


def test_build_resume_without_token_raises_type_error() -> None:
    with pytest.raises(TypeError, match=r"^resume_token: "):
        build_resume(None, 0)  # type: ignore[arg-type]


def test_client_imports_no_heavy_packages() -> None:
    code = "import sys, npuserve.client; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert {name for name in output.split() if name.startswith("npuserve.")} <= {
        "npuserve.client", *(f"npuserve.client.{name}" for name in (
            "aio", "attempts", "channel", "request_builder", "rpc_errors", "structured", "sync")),
        "npuserve.common", "npuserve.common.answer", "npuserve.common.certificate_keys",
        "npuserve.v1", *(name for name in output.split() if name.startswith("npuserve.v1."))}
    packages = {name.split(".")[0] for name in output.split()}
    assert "grpc" in packages
    assert not packages & {
        "torch", "tokenizers", "transformers", "numpy", "msgspec", "prometheus_client", "pydantic", "rich"}
