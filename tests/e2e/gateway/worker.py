"""A server behind a gateway, which tells the token ids that it received."""

from __future__ import annotations

import json
import time
from typing import Any

from npuserve.v1 import generate_pb2 as pb
from tests.e2e.server import Server, request

LOGGING = ("--log-prompts", "--log-format", "json")


class Worker:
    """Server that was started with LOGGING. openai_port: port of its OpenAI API; 0 for none."""

    def __init__(self, server: Server, openai_port: int = 0):
        self.server = server
        self.openai_port = openai_port

    def requests(self) -> list[dict[str, Any]]:
        """Return the log lines of the ended calls of Generate, in order."""
        lines = [json.loads(line) for line in self.server.log.splitlines() if line.startswith("{")]
        return [line for line in lines if line.get("rpc") == "vllm.Generate"]

    def count(self) -> int:
        """Return the number of ended calls once no line of an earlier call has come for a quarter of a second."""
        count, since = len(self.requests()), time.monotonic()
        while time.monotonic() < since + 0.25:
            time.sleep(0.05)
            if (now := len(self.requests())) != count:
                count, since = now, time.monotonic()
        return count

    def wait_for(self, count: int) -> dict[str, Any]:
        """Wait until `count` calls have ended; return the line of the last one."""
        deadline = time.monotonic() + 60
        while len(lines := self.requests()) < count:
            assert time.monotonic() < deadline, self.server.log
            time.sleep(0.02)
        return lines[count - 1]

    def answer(self, line: dict[str, Any], max_tokens: int, **fields: object) -> pb.GenerateResponse:
        """Return InferenceService's answer to the token ids of a logged call."""
        ids = json.loads(line["prompt"])
        assert len(ids) == line["prompt_tokens"]
        return self.server.stub.Generate(request(ids, max_tokens, **fields), timeout=60)
