"""A real server in processes of its own, and helpers that send requests to it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc

from npuserve.npu.storyteller import FOLDER
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc as rpc
from tests.support.fields import set_field

KV_CACHE_MEMORY = "32MiB"
"""Setting of servers of the built-in model, unless a test has another. The default of 160 MiB takes a fifth of the
processor time of a start."""


READY_SECONDS, READY_SECONDS_EMULATED = 180.0, 270.0
"""Maximum time to readiness. A start on an emulated device takes 15 s of processor time, minutes on a busy machine."""


class Server:
    """Running `npuserve serve` on free ports; `close` kills it if it does not stop.

    program: arguments of Python in place of `npuserve serve`. before: prefix of the command line. process: options of
    Popen. port: of gRPC; 0: a free one.
    """

    def __init__(
        self, *arguments: str, program: Sequence[str] = ("-m", "npuserve.cli", "serve"),
        before: Sequence[str] = (), process: Mapping[str, Any] = MappingProxyType({}), port: int = 0,
    ):
        self.log_file = tempfile.NamedTemporaryFile("w+", prefix="npuserve-test-", suffix=".log")  # noqa: SIM115
        command = [*before, sys.executable, *program, *arguments, "--port", str(port), "--metrics-port", "0"]
        if not arguments or arguments[0].startswith("-") or arguments[0] == str(FOLDER):
            environment = {"NPUSERVE_KV_CACHE_MEMORY": KV_CACHE_MEMORY, **process.get("env", os.environ)}
            process = {**process, "env": environment}
        self._ready_seconds = READY_SECONDS_EMULATED if "--emulate" in arguments else READY_SECONDS
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self.log_file, stderr=subprocess.STDOUT, **process)

    def wait_until_listening(self) -> None:
        self.target = self._wait_for(r"listening on (\d\S+:\d+)")
        self.metrics_url = self._wait_for(r"(http://\S+/metrics)")
        self.channel = grpc.insecure_channel(self.target, options=[("grpc.max_receive_message_length", 64 << 20)])
        self.stub = rpc.InferenceServiceStub(self.channel)

    def wait_until_ready(self) -> None:
        self._wait_for(r"ready in ([\d.]+) s", self._ready_seconds)

    def _wait_for(self, pattern: str, seconds: float = READY_SECONDS) -> str:
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.log)):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no {pattern!r} in the server's log:\n{self.log}")
            time.sleep(0.02)
        return found.group(1)

    @property
    def log(self) -> str:
        return Path(self.log_file.name).read_text(errors="replace")

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels."""
        with urllib.request.urlopen(self.metrics_url) as page:
            samples = re.findall(rf"^{name}(\{{.*\}})? (\S+)$", page.read().decode(), re.MULTILINE)
        assert samples, f"no metric {name}"
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(value) for has, value in samples if all(label in has for label in wanted))

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.terminate()
        return self.process.wait(60)

    def close(self) -> None:
        if hasattr(self, "channel"):
            self.channel.close()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
            self.process.kill()
        self.process.wait()
        self.log_file.close()


@contextlib.contextmanager
def serving(*arguments: str, wait: bool = True, **options: Any) -> Iterator[Server]:
    """Run a server while the block runs. wait: until it is ready. options: of `Server`."""
    server = Server(*arguments, **options)
    try:
        server.wait_until_listening()
        if wait:
            server.wait_until_ready()
        yield server
    finally:
        server.close()


def request(prompt: str | list[int], max_tokens: int = 64, **fields: object) -> pb.GenerateRequest:
    """Return a greedy request that returns token ids. fields: name -> value of fields of its sub-messages."""
    made = pb.GenerateRequest()
    if isinstance(prompt, str):
        made.text = prompt
    else:
        made.token_ids.ids.extend(prompt)
    made.sampling.temperature = 0.0
    made.stopping.max_tokens = max_tokens
    made.output.return_token_ids = True
    for name, value in fields.items():
        for part in (made.sampling, made.stopping, made.output, made.scheduling):
            if name in part.DESCRIPTOR.fields_by_name:
                set_field(part, name, value)
                break
        else:
            setattr(made, name, value)
    return made


def streamed(stub: rpc.InferenceServiceStub, ask: pb.GenerateRequest) -> tuple[str, list[int], pb.Finish]:
    """Return text, ids and finish of a stream, and check its contract: offsets, and nothing after the finish."""
    text, ids, finish = "", [], None
    for part in stub.StreamGenerate(ask, timeout=100):
        assert finish is None, "a message after the finish"
        assert part.offset == len(ids)
        text += part.text
        ids += part.token_ids
        if part.HasField("finish"):
            finish = part.finish
    assert finish is not None, "a stream without a finish"
    assert finish.usage.generated_tokens == len(ids)
    return text, ids, finish
