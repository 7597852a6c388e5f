"""The table of docs/gateway.md by runs: clients of the OpenAI API against one command, `npuserve serve --openai-port`.

Each row is one call, the same for OpenAI's client for Python and for Node, and for curl. Node's client is installed by
npm; tests without node, npm or curl are skipped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from npuserve.v1 import pooling_pb2, tokenize_pb2
from tests.e2e.gateway import smg
from tests.e2e.gateway.sdk import anthropic, openai
from tests.e2e.gateway.test_openai_port import OpenAIServer
from tests.e2e.gateway.worker import Worker
from tests.e2e.server import request, serving
from tests.support.models import random_model
from tests.support.pooling import saved_embedder
from tests.support.processes import free_port

pytestmark = pytest.mark.slow

NODE = Path(__file__).parent / "node"
MODEL = "storyteller"
START = "Once upon a time there was a little girl named Lily."
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": START}], "temperature": 0, "max_tokens": 30}
CITY = {
    "type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": CITY}}

Call = tuple[str, dict[str, Any]]
"""Kind of a call, and its body."""
Caller = Callable[[OpenAIServer, str, Call], Any]
"""Sends a call, given the server and its model. Returns the answer as JSON values, of a stream the list of chunks."""


def python_call(served: OpenAIServer, model: str, call: Call) -> Any:
    kind, body = call
    client = served.client()
    if kind == "models":
        return client.models.list().model_dump()
    create = {"chat": client.chat.completions.create, "completion": client.completions.create,
              "embedding": client.embeddings.create}[kind]
    answer = create(model=model, **body)
    return [part.model_dump() for part in answer] if body.get("stream") else answer.model_dump()


def curl_call(served: OpenAIServer, model: str, call: Call) -> Any:
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")
    kind, body = call
    paths = {"chat": "chat/completions", "completion": "completions", "embedding": "embeddings", "models": "models"}
    data = () if kind == "models" else ("-H", "content-type: application/json", "-d", "@-")
    done = subprocess.run(
        ["curl", "-sS", "--no-buffer", "--max-time", "60", f"{served.url}/v1/{paths[kind]}", *data],
        input=json.dumps({"model": model, **body}), capture_output=True, text=True, check=True)
    if not body.get("stream"):
        return json.loads(done.stdout)
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the program for Node and its packages."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node")
    for file in NODE.iterdir():
        shutil.copy(file, folder)
    install = subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"], cwd=folder,
                             capture_output=True, text=True, timeout=110)
    if install.returncode:
        pytest.skip(f"npm cannot install the client: {install.stderr[-200:]}")
    return folder


@pytest.fixture(params=["python", "node", "curl"])
def ask(request: pytest.FixtureRequest) -> Caller:
    """Send a call by one of the clients."""
    if request.param == "python":
        openai()
        return python_call
    if request.param == "curl":
        return curl_call
    folder: Path = request.getfixturevalue("node")

    def node_call(served: OpenAIServer, model: str, call: Call) -> Any:
        done = subprocess.run(
            ["node", "calls.js", f"{served.url}/v1", model], cwd=folder, text=True, capture_output=True, timeout=110,
            input=json.dumps([{"kind": call[0], "body": call[1]}]))
        assert done.returncode == 0, done.stderr
        (answer,) = json.loads(done.stdout)
        return answer

    return node_call


@pytest.fixture(scope="module")
def served(worker: Worker) -> OpenAIServer:
    running = OpenAIServer(worker.server, worker.openai_port)
    running.wait_until_ready()
    return running


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIServer]:
    """Server of a random embedding model."""
    smg.program()
    model = random_model("qwen3", vocab_size=768, max_position_embeddings=256)
    folder = saved_embedder(model, tmp_path_factory.mktemp("model") / "embedder")
    with serving(str(folder), "--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "32MiB", "--openai-port",
                 str(port := free_port())) as server:
        running = OpenAIServer(server, port)
        running.wait_until_ready()
        yield running


def expected(served: OpenAIServer, tokens: int, **fields: Any) -> str:
    """Return the text of the greedy answer by gRPC. smg adds no special tokens to a prompt."""
    ids = served.server.stub.Tokenize(tokenize_pb2.TokenizeRequest(text=START, add_special_tokens=False)).token_ids
    return served.server.stub.Generate(request(list(ids), tokens, **fields)).text.strip()


of_python = pytest.mark.parametrize("ask", [
    "python", *(pytest.param(client, marks=pytest.mark.full) for client in ("node", "curl"))], indirect=True)
"""By default the other clients are those of the calls whose answers have other forms: whole, streamed, with tools."""


def test_chat(served: OpenAIServer, ask: Caller) -> None:
    answer = ask(served, MODEL, ("chat", CHAT))
    assert answer["choices"][0]["message"]["content"].strip() == expected(served, 30)
    assert answer["usage"]["completion_tokens"] == 30


def test_streamed_chat(served: OpenAIServer, ask: Caller) -> None:
    parts = ask(served, MODEL, ("chat", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}))
    choices = [choice for part in parts for choice in part["choices"]]
    assert sum(bool(choice["delta"].get("content")) for choice in choices) > 1  # a message may have several tokens
    assert "".join(choice["delta"].get("content") or "" for choice in choices).strip() == expected(served, 30)
    assert choices[-1]["finish_reason"] == "length"
    assert parts[-1]["usage"]["completion_tokens"] == 30


@of_python
def test_streamed_completion(served: OpenAIServer, ask: Caller) -> None:
    body = {"prompt": START, "max_tokens": 30, "temperature": 0, "stream": True}
    parts = ask(served, MODEL, ("completion", body))
    assert "".join(choice["text"] for part in parts for choice in part["choices"]).strip() == expected(served, 30)


def test_tools(served: OpenAIServer, ask: Caller) -> None:
    """A whole answer of smg 1.13 may have a required call in its content, so the call is streamed."""
    body = {**CHAT, "max_tokens": 200, "tools": [TOOL], "tool_choice": "required", "stream": True}
    deltas = [choice["delta"] for part in ask(served, MODEL, ("chat", body)) for choice in part["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
    names = [call["function"]["name"] for call in calls if call["function"].get("name")]
    assert set(names) == {"get_weather"}
    first = "".join(call["function"].get("arguments") or "" for call in calls if call["index"] == 0)
    assert json.loads(first) == {"city": "Oslo"}


@of_python
def test_json_schema(served: OpenAIServer, ask: Caller) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    answer = ask(served, MODEL, ("chat", {**CHAT, "max_tokens": 60, "response_format": form}))
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"city": "Oslo"}


@of_python
def test_several_samples(served: OpenAIServer, ask: Caller) -> None:
    answer = ask(served, MODEL, ("chat", {**CHAT, "temperature": 1, "seed": 7, "n": 3, "max_tokens": 20}))
    texts = {choice["index"]: choice["message"]["content"] for choice in answer["choices"]}
    assert set(texts) == {0, 1, 2}
    assert len(set(texts.values())) > 1
    assert answer["usage"]["completion_tokens"] == 60


@of_python
def test_logprobs(served: OpenAIServer, ask: Caller) -> None:
    answer = ask(served, MODEL, ("chat", {**CHAT, "max_tokens": 10, "logprobs": True, "top_logprobs": 2}))
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 10
    for token in content:
        assert len(token["top_logprobs"]) == 2
        assert token["logprob"] == pytest.approx(token["top_logprobs"][0]["logprob"])  # greedy: the most likely one


@of_python
def test_stop(served: OpenAIServer, ask: Caller) -> None:
    answer = ask(served, MODEL, ("chat", {**CHAT, "max_tokens": 200, "stop": [". "]}))
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"].strip() == expected(served, 200, stop=[". "])


@of_python
def test_models(served: OpenAIServer, ask: Caller) -> None:
    assert [model["id"] for model in ask(served, MODEL, ("models", {}))["data"]] == [MODEL]


@pytest.mark.full
def test_embedding(embedder: OpenAIServer, ask: Caller) -> None:
    """By default without smg in tests/service/gateway/test_servicer.py.

    smg 1.13 sends floats whatever is asked for, and Node's client expects base64 unless it asks for floats.
    """
    answer = ask(embedder, "embedder", ("embedding", {"input": START, "encoding_format": "float"}))
    direct = embedder.server.stub.Embed(pooling_pb2.EmbedRequest(text=START))
    assert answer["data"][0]["embedding"] == pytest.approx(list(direct.values), abs=1e-6)
    assert answer["usage"]["prompt_tokens"] == direct.usage.prompt_tokens


@pytest.mark.full
def test_messages_of_anthropic(served: OpenAIServer) -> None:
    """By default test_anthropic.py, with a worker behind smg."""
    client = anthropic().Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=60)
    fields: dict[str, Any] = {"model": MODEL, "messages": CHAT["messages"], "extra_body": {"temperature": 0}}
    with client.messages.stream(**fields, max_tokens=30) as parts:
        streamed = parts.get_final_message()
    whole = client.messages.create(**fields, max_tokens=30)
    for found in (streamed, whole):
        assert "".join(block.text for block in found.content).strip() == expected(served, 30)
        assert found.stop_reason == "max_tokens"
    stopped = client.messages.create(**fields, max_tokens=200, stop_sequences=[". "])
    assert (stopped.stop_reason, "".join(block.text for block in stopped.content).strip()) == (
        "stop_sequence", expected(served, 200, stop=[". "]))
    tool = {"name": "get_weather", "description": "Weather", "input_schema": CITY}
    with client.messages.stream(**fields, max_tokens=200, tools=[tool], tool_choice={"type": "any"}) as parts:
        called = parts.get_final_message()
    assert [(block.name, block.input) for block in called.content if block.type == "tool_use"][:1] == [
        ("get_weather", {"city": "Oslo"})]
