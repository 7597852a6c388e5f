"""Memory of the records of ended streams, in a real server."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from npuserve.v1 import generate_pb2 as pb
from tests.e2e.brittle import COUNTING
from tests.e2e.processes import engine_of, processes
from tests.e2e.server import Server, request, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MIB = 1 << 20
IDS = list(range(3, 503))


def memory(pid: int) -> int:
    """Return the resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def streams(server: Server, count: int) -> list[str]:
    """Run streams of one token, each with 1000 token ids in its request; return their resume tokens."""
    ask = request("Once", 1, allowed_token_ids=IDS, logit_bias=dict.fromkeys(IDS, 0.5))

    def one(_: int) -> str:
        call = server.stub.StreamGenerate(ask, timeout=100)
        token: str = dict(call.initial_metadata())["x-resume-token"]
        assert list(call)[-1].HasField("finish")
        return token

    with ThreadPoolExecutor(32) as threads:
        return list(threads.map(one, range(count)))


@pytest.mark.full
def test_resume_store_of_requests_with_many_ids_stays_small() -> None:
    """350 records are 25 MiB as Python objects, and 3.5 MiB encoded."""
    with serving("--resume-seconds", "600", **COUNTING) as server:
        engine, (front_end,) = engine_of(server), processes(server, "frontend")
        tokens = streams(server, 200)
        before = memory(engine), memory(front_end)
        streams(server, 350)
        grown = [(memory(pid) - had) / MIB for pid, had in zip((engine, front_end), before, strict=True)]
        assert max(grown) < 15, f"MiB more in the engine and the front end: {grown}"
        os.kill(engine, signal.SIGKILL)
        ask, until = pb.ResumeStreamRequest(resume_token=tokens[0]), time.monotonic() + 60
        while True:
            try:
                parts = list(server.stub.ResumeStream(ask, timeout=60))
                break
            except grpc.RpcError as error:  # the engine restarts
                if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > until:
                    raise
                time.sleep(0.1)
        assert parts[-1].finish.usage.generated_tokens == 1
