"""bench/serving/gateway_routing.py: its workload and figures, and a short run."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tokenizers import Tokenizer

from npuserve.cli.bench.workload import TraceError
from npuserve.npu.storyteller import FOLDER
from tests.e2e.gateway.smg import program
from tests.support.benches import BENCH, bench

HASH_TOKENS = 512


@pytest.fixture(scope="module")
def script() -> ModuleType:
    pytest.importorskip("smg_grpc_proto")
    return bench("serving.gateway_routing")


@pytest.fixture(scope="module")
def words(script: ModuleType) -> list[str]:
    return script.single_token_words(Tokenizer.from_file(str(FOLDER / "tokenizer.json")))  # type: ignore[no-any-return]


def write_trace(file: Path, conversations: int, turns: int) -> Path:
    """Write a trace whose conversations begin with a common block and grow by two blocks a turn."""
    rows = [{"timestamp": 1000 * (turns * turn + number), "input_length": HASH_TOKENS * (3 + 2 * turn),
             "output_length": 128, "hash_ids": [0, *(1000 * number + block for block in range(1, 3 + 2 * turn))]}
            for turn in range(turns) for number in range(1, conversations + 1)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def options(trace: Path, **others: object) -> argparse.Namespace:
    return argparse.Namespace(**{
        "trace": trace, "requests": 100, "seconds": 10.0, "length_scale": 0.0, "seed": 0, **others})


def test_gateway_routing_workload_is_the_same_each_time(script: ModuleType, words: list[str], tmp_path: Path) -> None:
    args = options(write_trace(tmp_path / "trace.jsonl", 4, 3))
    asks, described = script.workload(args, words, 504, "storyteller")
    assert (asks, described) == script.workload(args, words, 504, "storyteller")
    assert (described["requests"], described["length_scale"], described["cut"]) == (12, 0.125, 0)
    assert 0.4 < described["endless_cache"] < 0.6
    bodies = [json.loads(ask.body) for ask in asks]
    assert {body["max_tokens"] for body in bodies} == {16}
    assert [len(body["prompt"].split()) for body in bodies] == [192] * 4 + [320] * 4 + [448] * 4
    assert all(bodies[4 + n]["prompt"].startswith(bodies[n]["prompt"]) for n in range(8))
    assert (asks[0].at, asks[-1].at) == (0, 10)


def test_gateway_routing_refuses_a_trace_without_hashes(script: ModuleType, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
    with pytest.raises(TraceError, match="hash_ids"):
        script.workload(options(file), words, 504, "storyteller")


@pytest.mark.full
@pytest.mark.timeout(180)
def test_gateway_routing_runs(tmp_path: Path) -> None:
    program()
    file, trace = tmp_path / "routing.json", write_trace(tmp_path / "trace.jsonl", 4, 3)
    done = subprocess.run(
        [sys.executable, BENCH / "serving" / "gateway_routing.py", "--trace", trace, "--servers", "2", "--seconds", "4",
         "--policies", "round_robin,cache_aware+events", "--json", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    for policy in found["policies"].values():
        assert (policy["ok"], policy["errors"]) == (12, {})
        assert sum(policy["requests_by_server"][0]) == 12
        assert policy["ttft_p50_ms"] > 0
    assert found["policies"]["cache_aware+events"]["hit_share"] > 0
    assert found["workload"]["requests"] == 12
