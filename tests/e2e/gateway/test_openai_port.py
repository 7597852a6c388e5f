"""`--openai-port`: the OpenAI API of one server in one command, its death, and who else may use its way in."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from npuserve.cli import main as cli
from npuserve.npu.storyteller import FOLDER
from tests.e2e.brittle import COUNTING, SLOW
from tests.e2e.gateway import smg
from tests.e2e.gateway.sdk import openai
from tests.e2e.gateway.smg import CHAT_TEMPLATE
from tests.e2e.processes import engine_of, processes, until
from tests.e2e.server import Server, request, serving, streamed
from tests.support.certificates import Authority
from tests.support.processes import free_port

pytestmark = pytest.mark.slow

STREAMS = 6
TOKENS = 100
"""Length of a stream."""
STEP_SECONDS = "0.015"
THINKING_NAME = "qwen3-0.6b"
"""Name for which smg would take every answer for reasoning."""


class OpenAIServer:
    """Server with an OpenAI API on `port`, whose model has a chat template."""

    def __init__(self, server: Server, port: int, scheme: str = "http"):
        self.server = server
        self.url = f"{scheme}://127.0.0.1:{port}"
        self._clients: dict[str, Any] = {}

    def wait_until_ready(self, times: int = 1) -> None:
        """Wait until smg has been ready `times` times."""
        until(lambda: self.server.log.count("OpenAI API on") >= times, self.server)

    def client(self, key: str = "none") -> Any:
        """Return the client of a key. A new one reads all certificates of authorities."""
        if key not in self._clients:
            self._clients[key] = openai().OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)
        return self._clients[key]

    def status(self, path: str, body: object = None, **headers: str) -> int:
        """Return the status of a GET, or of a POST with a body."""
        data = None if body is None else json.dumps(body).encode()
        call = urllib.request.Request(self.url + path, data, {"content-type": "application/json", **headers})
        context = ssl._create_unverified_context() if self.url.startswith("https") else None
        try:
            with urllib.request.urlopen(call, timeout=60, context=context) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code

    def processes(self) -> list[int]:
        """Return the ids of the running smg processes."""
        children = Path(f"/proc/{self.server.process.pid}/task/{self.server.process.pid}/children").read_text()
        names = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children.split()}
        return [pid for pid, name in names.items() if b"smg" in name]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the built-in model with a chat template."""
    smg.program()
    folder = Path(shutil.copytree(FOLDER, tmp_path_factory.mktemp("model") / "storyteller"))
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**settings, "chat_template": CHAT_TEMPLATE}))
    return str(folder)


@pytest.fixture(scope="module")
def served(chat_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIServer]:
    """Server whose engine counts slowly, so that streams outlive a disturbance."""
    port, slow = free_port(), tmp_path_factory.mktemp("slow") / "slow"
    slow.write_text(STEP_SECONDS)
    with serving(chat_model, "--served-name", THINKING_NAME, "--frontends", "2", "--openai-port", str(port),
                 process={"env": {**os.environ, SLOW: str(slow)}}, **COUNTING) as server:
        running = OpenAIServer(server, port)
        running.wait_until_ready()
        yield running


def test_chat_is_content_whatever_the_model_is_called(served: OpenAIServer) -> None:
    answer = served.client().chat.completions.create(
        model=THINKING_NAME, messages=[{"role": "user", "content": "Once upon a time"}], max_tokens=20, temperature=0)
    message = answer.choices[0].message
    expected = served.server.stub.Generate(request("Once upon a time", 20)).text
    assert message.content.strip() == expected.strip()
    assert not getattr(message, "reasoning_content", None)


def test_streams_and_constraints_of_completions(served: OpenAIServer) -> None:
    client = served.client()
    parts = client.completions.create(
        model=THINKING_NAME, prompt="Once upon a time", max_tokens=30, temperature=0, stream=True)
    text = "".join(part.choices[0].text for part in parts if part.choices)
    assert text.strip() == served.server.stub.Generate(request("Once upon a time", 30)).text.strip()
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    answer = client.chat.completions.create(
        model=THINKING_NAME, messages=[{"role": "user", "content": "Once"}], max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})
    assert json.loads(answer.choices[0].message.content)["a"] in (1, 2)


def listening_ports(pid: int) -> set[int]:
    """Return the TCP ports on which a process listens."""
    names = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    inodes = {match[1] for name in names if (match := re.fullmatch(r"socket:\[(\d+)\]", name))}
    tables = (Path(f"/proc/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def test_no_other_process_may_use_the_way_of_smg(served: OpenAIServer) -> None:
    """Also not with the id of a request that smg runs, and not on a connection that is open before."""
    public = int(served.server.target.rpartition(":")[2])
    for pid in processes(served.server, "frontend"):
        (port,) = listening_ports(pid) - {public}
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            for call, message in ((stub.GetModelInfo, vllm.GetModelInfoRequest()),
                                  (stub.HealthCheck, vllm.HealthCheckRequest()),
                                  (stub.Abort, vllm.AbortRequest(request_ids=["a"]))):
                with pytest.raises(grpc.RpcError) as error:
                    call(message, timeout=60)
                assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
                assert "port of gRPC" in error.value.details()
            with pytest.raises(grpc.RpcError) as error:
                list(stub.Generate(vllm.GenerateRequest(request_id="a"), timeout=60))
            assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_administration_of_smg_is_closed(served: OpenAIServer) -> None:
    assert served.status("/workers") == 401
    assert served.status("/workers", {"url": "grpc://127.0.0.1:9"}) == 401
    assert served.status("/flush_cache", {}) == 401
    assert served.status("/v1/models") == 200


def test_metrics_page_has_those_of_smg(served: OpenAIServer) -> None:
    assert served.server.metric("smg_http_requests_total") > 0
    assert served.server.metric("npuserve_resident_memory_bytes", process="openai") > 1 << 20


def read_stream(served: OpenAIServer, prompt: str, tokens: int, begun: set[str] | None = None) -> tuple[str, str]:
    """Return the text of a streamed completion, and the error that ended it; "" if it is whole.

    begun: gets the prompt with the first text.
    """
    text = ""
    try:
        for part in served.client().completions.create(
                model=THINKING_NAME, prompt=prompt, max_tokens=tokens, temperature=0, stream=True,
                extra_body={"ignore_eos": True}):
            text += part.choices[0].text if part.choices else ""
            if begun is not None and part.choices:
                begun.add(prompt)
    except Exception as error:
        return text, f"{type(error).__name__}: {error}"
    return text, ""


PROMPTS = [f"{number} little dogs" for number in range(STREAMS)]


@pytest.fixture(scope="module")
def whole(served: OpenAIServer) -> list[str]:
    """Texts of the undisturbed streams."""
    streams = under_streams(served, lambda: None)
    assert not any(error for _, error in streams)
    return [text for text, _ in streams]


def under_streams(served: OpenAIServer, disturb: Any) -> list[tuple[str, str]]:
    """Return text and error of STREAMS streams. `disturb` is called once, when each has begun."""
    begun: set[str] = set()
    with ThreadPoolExecutor(STREAMS) as threads:
        streams = [threads.submit(read_stream, served, prompt, TOKENS, begun) for prompt in PROMPTS]
        until(lambda: all(prompt in begun or stream.done()
                          for prompt, stream in zip(PROMPTS, streams, strict=True)), served.server)
        disturb()
        return [stream.result() for stream in streams]


def test_death_of_the_engine_shows_in_no_stream(served: OpenAIServer, whole: list[str]) -> None:
    restarts = served.server.metric("npuserve_engine_restarts_total")
    streams = under_streams(served, lambda: os.kill(engine_of(served.server), signal.SIGKILL))
    assert streams == [(text, "") for text in whole]
    until(lambda: served.server.metric("npuserve_engine_restarts_total") == restarts + 1, served.server)


def test_death_of_smg_ends_http_streams_alone(served: OpenAIServer, whole: list[str]) -> None:
    ask = request("Once upon a time", 300, ignore_eos=True)
    alone = streamed(served.server.stub, ask)
    (old,) = served.processes()
    starts = served.server.log.count("OpenAI API on")
    with ThreadPoolExecutor(1) as threads:
        direct = threads.submit(streamed, served.server.stub, ask)
        streams = under_streams(served, lambda: os.kill(old, signal.SIGKILL))
        assert direct.result()[:2] == alone[:2]
    for (text, error), expected in zip(streams, whole, strict=True):
        assert expected.startswith(text)
        assert error or text == expected
    served.wait_until_ready(starts + 1)
    assert served.processes() != [old]
    assert read_stream(served, PROMPTS[0], TOKENS) == (whole[0], "")
    assert served.server.metric("npuserve_process_failures_total", process="openai", why="died") == 1
    until(lambda: served.server.metric("npuserve_kv_cache_usage_ratio") == 0, served.server)


def test_death_of_a_front_end_ends_its_streams_alone(served: OpenAIServer, whole: list[str]) -> None:
    """smg balances its calls over the front ends, and uses the next process on the same port."""
    victim = processes(served.server, "frontend")[0]
    streams = under_streams(served, lambda: os.kill(victim, signal.SIGKILL))
    for (text, error), expected in zip(streams, whole, strict=True):
        assert expected.startswith(text)
        assert error or text == expected
    assert any(not error for _, error in streams)
    until(lambda: len(processes(served.server, "frontend")) == 2, served.server)
    end = time.monotonic() + 60
    while any(read_stream(served, prompt, 20)[1] for prompt in PROMPTS[:4]):
        assert time.monotonic() < end, served.server.log


def test_drain_completes_http_streams(served: OpenAIServer, whole: list[str]) -> None:
    """Last test of the shared server."""
    streams = under_streams(served, served.server.process.terminate)
    assert streams == [(text, "") for text in whole]
    assert served.server.process.wait(60) == 0


def test_http_clients_need_keys_and_tls_where_grpc_clients_do(
    chat_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    keys = tmp_path / "openai-keys"
    keys.write_text("# of the web page\nweb:secret-of-web\nphone:secret-of-phone\n")
    pair = Authority(tmp_path).issue("server")
    file = str(tmp_path / "keys.toml")
    assert cli.main(["keys", "add", file, "alice"]) == 0
    key = capsys.readouterr().out.strip()
    with serving(
        chat_model, "--kv-cache-memory", "32MiB", "--api-keys", file, "--tls-cert", str(pair.cert), "--tls-key",
        str(pair.key), "--openai-port", str(port), "--openai-api-keys", str(keys), **COUNTING,
    ) as server:
        served = OpenAIServer(server, port, "https")
        served.wait_until_ready()
        body = {"model": "storyteller", "prompt": "Once", "max_tokens": 3}
        assert served.status("/v1/completions", body) == 401
        assert served.status("/v1/completions", body, authorization="Bearer wrong-secret") == 401
        assert served.status("/v1/completions", body, authorization=f"Bearer {key}") == 401
        for name in ("web", "phone"):
            assert served.status("/v1/completions", body, authorization=f"Bearer secret-of-{name}") == 200
        assert served.status("/workers", authorization="Bearer secret-of-web") in (401, 403)
        (pid,) = served.processes()
        assert b"secret-of-web" not in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.full
def test_demo_shows_a_call_that_works(tmp_path: Path) -> None:
    """By default test_openai_clients.py has such calls."""
    smg.program()
    port = free_port()
    shown = tmp_path / "shown"
    with shown.open("w") as output, subprocess.Popen(
            [sys.executable, "-m", "npuserve.cli", "demo", "--max-tokens", "4", "--openai", str(port)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=output) as demo:
        try:
            until(lambda: demo.poll() is not None or "curl" in shown.read_text(), seconds=90)
            command = shown.read_text().partition("    curl")[2]
            answer = subprocess.run(f"curl -sS {command}", shell=True, capture_output=True, text=True, check=True)
            assert answer.stdout.strip().endswith("data: [DONE]")
            assert '"text":' in answer.stdout
        finally:
            demo.send_signal(signal.SIGINT)
        assert demo.wait(60) in (0, 130)
