"""smg, of the version in docker/requirements-gateway.txt, started with the chart's arguments and variables.

A Kubernetes API in this process grants what the chart's Role grants, and nothing more. No server runs here: see
tests/e2e/gateway for requests through smg.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from tests.helm.chart import ROOT, Object, find, needs_helm, render
from tests.helm.test_gateway import SERVER, arguments, gateway_pod, smg
from tests.support.processes import free_port

SMG = shutil.which("smg") or shutil.which("smg", path=str(Path(sys.executable).parent))
pytestmark = [needs_helm, pytest.mark.skipif(not SMG, reason="no program smg (pip install smg==1.13.0)")]

RESOURCE = re.compile(r"/api/v1/namespaces/(\w+)/(\w+)")


class Kubernetes(http.server.BaseHTTPRequestHandler):
    """API server. rules: of a Role in namespace llm. pods: all pods. seen: (verb, resource, selector) of each call.

    refused: calls that the Role does not allow.
    """

    protocol_version = "HTTP/1.1"
    rules: ClassVar[list[Object]] = []
    pods: ClassVar[list[Object]] = []
    seen: ClassVar[list[tuple[str, str, str]]] = []
    refused: ClassVar[list[tuple[str, str]]] = []

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        asked = parse_qs(url.query)
        found = RESOURCE.fullmatch(url.path)
        resource = found[2] if found and found[1] == "llm" else url.path
        verb = "watch" if "watch" in asked else "list"
        self.seen.append((verb, resource, asked.get("labelSelector", [""])[0]))
        allowed = any(resource in rule["resources"] and verb in rule["verbs"] for rule in self.rules)
        if not allowed:
            self.refused.append((verb, resource))
            self._send(403, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 403})
        elif verb == "list":
            self._send(200, {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"},
                             "items": self.pods})
        else:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            time.sleep(60)  # no changes; the process ends before

    def _send(self, code: int, answer: Object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def status(port: int, path: str) -> int:
    """Return the HTTP status; 0 while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def wait_for(condition: Any, log: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Serve the Kubernetes API with the chart's Role; yield its port."""
    monkeypatch.setattr(Kubernetes, "rules", find(render(smg()), "Role")["rules"])
    monkeypatch.setattr(Kubernetes, "pods", [])
    monkeypatch.setattr(Kubernetes, "seen", [])
    monkeypatch.setattr(Kubernetes, "refused", [])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Kubernetes)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


def launch(folder: Path, api: int, **values: Any) -> tuple[subprocess.Popen[bytes], dict[str, int], Path]:
    """Start smg as the chart does; return the process, its ports by name, and its log."""
    ports = {name: free_port() for name in ("http", "metrics", "health")}
    objects = render({**smg(ports=ports, **values), "host": "127.0.0.1", "ports": {"grpc": free_port()}})
    (container,) = gateway_pod(objects)["containers"]
    variables = {v["name"]: v.get("value", "secret") for v in container["env"]}
    config = folder / "kubeconfig.yaml"
    config.write_text(yaml.safe_dump({
        "apiVersion": "v1", "kind": "Config", "current-context": "t", "users": [{"name": "t", "user": {}}],
        "clusters": [{"name": "t", "cluster": {"server": f"http://127.0.0.1:{api}"}}],
        "contexts": [{"name": "t", "context": {"cluster": "t", "user": "t"}}]}))
    words = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word) for word in arguments(objects)]
    log = folder / "smg.log"
    assert SMG
    with log.open("w") as out:
        process = subprocess.Popen([SMG, *words], stdout=out, stderr=out, stdin=subprocess.DEVNULL, env={
            "PATH": os.environ["PATH"], **variables, "HOME": str(folder), "KUBECONFIG": str(config)})
    return process, ports, log


def pod_of(ip: str, ready: bool = True) -> Object:
    return {"kind": "Pod", "apiVersion": "v1", "spec": {"containers": []},
            "metadata": {"name": ip, "uid": ip, "namespace": "llm", "labels": SERVER, "resourceVersion": "1"},
            "status": {"phase": "Running", "podIP": ip,
                       "conditions": [{"type": "Ready", "status": "True" if ready else "False"}]}}


def test_smg_version_is_the_images():
    assert SMG
    said = subprocess.run([SMG, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    lock = (ROOT / "docker" / "requirements-gateway.txt").read_text()
    pinned = re.search(r"^smg==([\w.]+)", lock, re.MULTILINE)
    assert pinned
    assert pinned[1] in said


def test_smg_accepts_the_chart_and_needs_no_further_rights(tmp_path: Path, api: int):
    """It lists and watches the pods of the servers, answers the probes, and ends within its grace period."""
    Kubernetes.pods = [pod_of("127.0.0.7", ready=False)]
    process, ports, log = launch(tmp_path, api, toolCallParser="qwen", reasoningParser="qwen3")
    try:
        wait_for(lambda: status(ports["health"], "/liveness") == 200, log)
        wait_for(lambda: {verb for verb, *_ in Kubernetes.seen} == {"list", "watch"}, log)
        assert status(ports["health"], "/readiness") == 503, "no pod is ready"
        assert status(ports["metrics"], "/metrics") == 200
        assert status(ports["http"], "/workers") == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    for _, resource, selector in Kubernetes.seen:
        assert resource == "pods"
        assert dict(part.split("=") for part in selector.split(",")) == SERVER
    assert Kubernetes.refused == []


def test_smg_with_a_key_guards_its_administration(tmp_path: Path, api: int):
    process, ports, log = launch(tmp_path, api, apiKeys={"secretName": "keys"})
    try:
        wait_for(lambda: status(ports["http"], "/liveness") == 200, log)
        assert status(ports["http"], "/workers") == 401
        assert status(ports["health"], "/readiness") == 503
    finally:
        process.kill()
        process.wait()


def test_smg_tries_ready_pods_at_the_grpc_port(tmp_path: Path, api: int):
    """The ready one of two pods is registered. Nothing listens there, so it stays out of the rotation."""
    Kubernetes.pods = [pod_of("127.0.0.7", ready=False), pod_of("127.0.0.8")]
    process, ports, log = launch(tmp_path, api)
    try:
        wait_for(lambda: "127.0.0.8:" in log.read_text(), log)
        assert status(ports["health"], "/readiness") == 503
    finally:
        process.kill()
        process.wait()
    assert "127.0.0.7:" not in log.read_text()
