"""Shepherd Model Gateway in a process of its own, in front of npuserve servers.

Its program is `smg` beside Python or on the path (pip install smg), or the file that NPUSERVE_TEST_SMG names. Tests are
skipped without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import free_port

PROGRAM = "NPUSERVE_TEST_SMG"
READY_SECONDS = 60
HEALTH_SECONDS = 5
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""Chat template for models without one: a chat is the text of its messages."""


def find_program() -> str | None:
    """Return the path of smg, None without it."""
    beside_python = str(Path(sys.executable).parent)
    return os.environ.get(PROGRAM) or shutil.which("smg", path=beside_python) or shutil.which("smg")


def program() -> str:
    """Return the path of smg; skip the test without it."""
    if not (found := find_program()):
        pytest.skip("smg is not installed: pip install smg")
    return found


class Gateway:
    """Running smg. url: of its HTTP API. before: prefix of the command line."""

    def __init__(
        self, workers: list[str], *arguments: str, policy: str = "round_robin", before: Sequence[str] = ()
    ):
        self.log_file = tempfile.NamedTemporaryFile("w+", prefix="npuserve-smg-", suffix=".log")  # noqa: SIM115
        self.workers = len(workers)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [
            *before, program(), "launch", "--host", "127.0.0.1", "--port", str(port),
            "--prometheus-port", str(free_port()), "--worker-urls", *(f"grpc://{worker}" for worker in workers),
            "--policy", policy, "--health-check-interval-secs", str(HEALTH_SECONDS), *arguments]
        # No tokenizer comes from a hub.
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "RUST_LOG": "info"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self.log_file, stderr=subprocess.STDOUT, env=environment)

    @property
    def log(self) -> str:
        return Path(self.log_file.name).read_text(errors="replace")

    def wait_until_ready(self) -> None:
        """Wait until all workers are healthy, and the model's tokenizer is loaded."""
        deadline = time.monotonic() + READY_SECONDS
        while not self.is_ready():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.1)

    def is_ready(self) -> bool:
        """Return whether the gateway has all workers and the model's tokenizer."""
        models = self.get("/v1/models")
        if not (models and models["data"]) or self.healthy_workers() != self.workers:
            return False
        return self.post("/v1/tokenize", {"model": models["data"][0]["id"], "prompt": "a"})[0] == 200

    def healthy_workers(self) -> int:
        found = self.get("/workers") or {"workers": []}
        return sum(bool(worker["is_healthy"]) for worker in found["workers"])

    def get(self, path: str) -> Any:
        """Return the JSON of a page; None if there is no answer yet."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=60) as page:
                return json.loads(page.read())
        except (urllib.error.URLError, ConnectionError, ValueError):
            return None

    def post(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
        """Return status and JSON of a call."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log_file.close()


@contextlib.contextmanager
def gateway(workers: list[str], *arguments: str, wait: bool = True, **options: Any) -> Iterator[Gateway]:
    """Run smg in front of workers, host:port each. arguments: of smg. options: of `Gateway`."""
    made = Gateway(workers, *arguments, **options)
    try:
        if wait:
            made.wait_until_ready()
        yield made
    finally:
        made.close()
