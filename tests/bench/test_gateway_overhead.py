"""bench/serving/gateway_overhead.py: its arguments and figures, and a short run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

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


def test_gateway_overhead_summary_divides_within_a_round(script: ModuleType) -> None:
    def figures(rate: float) -> dict[str, Any]:
        names = (*script.FIGURES, "prompt_tokens")
        return {**dict.fromkeys(names, 1.0), "tokens_per_second": rate, "cpu_us_per_token": {"client": rate}}

    rounds = {"grpc": [figures(100), figures(200), figures(400)], "vllm": [figures(100), figures(100), figures(400)],
              "smg": [figures(50), figures(100), figures(100)]}
    found = script.summary(rounds)
    assert found["routes"]["grpc"]["tokens_per_second"] == 200
    assert found["routes"]["smg"]["cpu_us_per_token"] == {"client": 100}
    assert {pair: ratio["tokens_per_second"] for pair, ratio in found["ratios"].items()} == {
        "vllm / grpc": [1, 0.5, 1], "smg / grpc": [0.5, 0.25, 0.5], "smg / vllm": [0.5, 0.25, 1]}


def test_gateway_overhead_pairs_of_other_servers_refer_to_their_own(script: ModuleType) -> None:
    names = ["grpc", "vllm", "smg", "vllm@a:1", "smg@a:1"]
    assert script.pairs(names) == [
        ("vllm", "grpc"), ("smg", "grpc"), ("vllm@a:1", "grpc"), ("smg@a:1", "grpc"), ("smg", "vllm"),
        ("smg@a:1", "vllm@a:1")]


def test_gateway_overhead_arguments(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    args = script.parser().parse_args(
        ["--worker-urls", "grpc://127.0.0.1:1", "grpc://[::1]:2", "--worker-pids", "7", "8"])
    assert (args.worker_urls, args.worker_pids) == (["127.0.0.1:1", "[::1]:2"], [7, 8])
    assert (args.model, args.streams, args.tokens, args.rounds) == ("", 8, 200, 16)
    for wrong, message in ((["--worker-urls", "http://a:1"], "grpc://"), (["--tokens", "1"], "at least 2")):
        with pytest.raises(SystemExit):
            script.parser().parse_args(wrong)
        assert message in capsys.readouterr().err


def test_gateway_overhead_descendants_include_grandchildren(script: ModuleType) -> None:
    command = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout
        assert child.stdout.readline() == b"1\n"
        found = script.descendants(os.getpid())
        assert found[0] == os.getpid()
        assert child.pid in found
        assert len(script.descendants(child.pid)) == 2
        child.communicate(b"\n")


@pytest.mark.slow
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
