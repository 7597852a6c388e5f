"""Readiness, limits and memory on the metrics page of a real server."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.request

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e import processes
from tests.e2e.brittle import COUNTING
from tests.e2e.server import Server, serving


def until(server: Server, ready: float) -> None:
    deadline = time.monotonic() + 90
    while server.metric("npuserve_ready") != ready:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.02)


@pytest.mark.slow
def test_metrics_readiness_limits_and_memory_of_a_real_server() -> None:
    with serving("--max-num-seqs", "4", "--max-queue", "6", **COUNTING) as server:
        until(server, 1)
        assert server.metric("npuserve_requests_limit", state="running") == 4
        assert server.metric("npuserve_requests_limit", state="waiting") == 6
        with urllib.request.urlopen(server.metrics_url) as page:
            named = set(re.findall(r'npuserve_resident_memory_bytes{process="([^"]+)"}', page.read().decode()))
        assert named == {"supervisor", "engine", "frontend-0"}
        assert all(server.metric("npuserve_resident_memory_bytes", process=name) > 1 << 20 for name in named)

        os.kill(processes.engine_of(server), signal.SIGKILL)
        until(server, 0)
        until(server, 1)
        health = health_pb2_grpc.HealthStub(server.channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
