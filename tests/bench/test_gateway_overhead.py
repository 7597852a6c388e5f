"""bench/serving/gateway_overhead.py: its arguments and figures, and a short run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from npuserve.cli.bench.load_generator import Outcome
from tests.e2e.gateway.smg import program
from tests.support.benches import BENCH, bench


@pytest.fixture(scope="module")
def script() -> ModuleType:
    pytest.importorskip("smg_grpc_proto")
    return bench("serving.gateway_overhead")


def outcome(first: float, gap: float, messages: int, tokens: int) -> Outcome:
    """Return a stream that begins at 0, with a first message at `first` and the others `gap` seconds apart."""
    arrivals = [(first + gap * place, 1) for place in range(messages)]
    return Outcome(0.0, 0.0, arrivals[-1][0], "OK", "", arrivals, "length", 10, 0, tokens)


def test_gateway_overhead_figures_of_streams(script: ModuleType) -> None:
    found = script.figures([outcome(0.1, 0.01, 11, 11), outcome(0.3, 0.03, 11, 33)], 2.0, {"smg": 0.0044})
    assert found["tokens_per_second"] == 22
    assert found["tokens_per_message"] == 2
    assert (found["ttft_p50_ms"], found["itl_p50_ms"]) == (pytest.approx(200), pytest.approx(20))
    assert found["itl_p99_ms"] == pytest.approx(30)
    assert found["cpu_us_per_token"] == {"smg": pytest.approx(100)}


@pytest.mark.full
def test_gateway_overhead_runs(tmp_path: Path) -> None:
    program()
    file = tmp_path / "overhead.json"
    done = subprocess.run(
        [sys.executable, BENCH / "serving" / "gateway_overhead.py", "--streams", "2", "--tokens", "8", "--rounds", "1",
         "--json", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert {name: len(runs) for name, runs in found["rounds"].items()} == {"grpc": 1, "vllm": 1, "smg": 1}
    routes = found["routes"]
    assert len({route["prompt_tokens"] for route in routes.values()}) == 1
    assert all(route["tokens_per_second"] > 0 and route["itl_p50_ms"] > 0 for route in routes.values())
    assert routes["smg"]["cpu_us_per_token"].keys() == {"engine", "frontend", "smg", "client"}
    assert routes["grpc"]["cpu_us_per_token"].keys() == {"engine", "frontend", "client"}
