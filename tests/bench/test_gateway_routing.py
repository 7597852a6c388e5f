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

from npuserve.cli.bench.load_generator import Outcome
from npuserve.cli.bench.workload import TimedRequest, TraceError
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


def test_gateway_routing_words_are_one_token_each(words: list[str]) -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert len(words) > 500
    for step in (1, 7, 31):
        text = words[::step]
        assert len(tokenizer.encode("".join(text), add_special_tokens=False).ids) == len(text)


def test_gateway_routing_conversations_are_whole(script: ModuleType) -> None:
    requests = [TimedRequest(at, 10, 5, (0, at % 4, at)) for at in range(40)]
    found = script.conversations(requests, 15, 1)
    assert len(found) == 20
    assert found == sorted(found, key=lambda request: request.at)
    assert len({request.hashes[1] for request in found}) == 2
    assert script.conversations(requests, 15, 1) == found
    assert len(script.conversations(requests, 1000, 1)) == 40


@pytest.mark.parametrize(("context", "scale"), [(4096, 1), (1000, 1), (999, 0.5), (130, 0.125)])
def test_gateway_routing_scale_fits_nine_tenths(script: ModuleType, context: int, scale: float) -> None:
    requests = [TimedRequest(0, 900, 100)] * 19 + [TimedRequest(0, 100_000, 100)]
    assert script.fitting_scale(requests, context) == scale


def test_gateway_routing_times_last_the_given_seconds(script: ModuleType) -> None:
    requests = [TimedRequest(at, 1, 1) for at in (100, 150, 300)]
    assert [request.at for request in script.lasting(requests, 20)] == [0, 5, 20]
    assert [request.at for request in script.lasting(requests[:1], 20)] == [0]


def test_gateway_routing_endless_cache_counts_leading_whole_blocks(script: ModuleType) -> None:
    first, same, other = [1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 9], [7, 2, 3, 4]
    assert script.endless_cache([first], 2) == 0
    assert script.endless_cache([first, same, other], 2) == pytest.approx(4 / 15)
    assert script.endless_cache([[1, 1, 1, 1]], 2) == 0


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


def test_gateway_routing_figures_count_errors_and_all_servers(script: ModuleType) -> None:
    good = Outcome(1.0, 1.5, 4.0, "OK", "", [(2.0, 1), (3.0, 1)], "length", 10, 0, 8)
    bad = Outcome(1.0, 1.0, 2.0, "HTTP_429", "full")
    found = script.figures([good, bad], 4.0, [{"queries": 30, "hits": 0, "requests": 1},
                                              {"queries": 10, "hits": 10, "requests": 0}])
    assert (found["hit_share"], found["tokens_per_second"], found["ttft_p50_ms"]) == (0.25, 2, 1000)
    assert (found["ok"], found["errors"], found["details"]) == (1, {"HTTP_429": 1}, ["full"])
    assert found["requests_by_server"] == [1, 0]


def test_gateway_routing_summary_divides_by_the_first_policy(script: ModuleType) -> None:
    def figures(share: float, errors: dict[str, int]) -> dict[str, object]:
        return {**dict.fromkeys((*script.RATIOS, "lag_p99_ms"), 1.0), "hit_share": share, "errors": errors, "ok": 5,
                "requests_by_server": [2, 3], "details": []}

    found = script.summary({"round_robin": [figures(0.1, {"TIMEOUT": 1}), figures(0.2, {"TIMEOUT": 2})],
                            "cache_aware": [figures(0.3, {}), figures(0.2, {})]})
    assert found["policies"]["round_robin"]["errors"] == {"TIMEOUT": 3}
    assert found["policies"]["cache_aware"]["hit_share"] == 0.25
    assert found["ratios"]["cache_aware / round_robin"]["hit_share"] == [2, 1, 3]


def test_gateway_routing_arguments(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    args = script.parser().parse_args(["--trace", "x", "--policies", "cache_aware,round_robin"])
    assert (args.policies, args.servers, args.model) == (["cache_aware", "round_robin"], 3, "")
    for wrong, message in ((["--policies", "best"], "round_robin"), (["--servers", "0"], "at least 1")):
        with pytest.raises(SystemExit):
            script.parser().parse_args(["--trace", "x", *wrong])
        assert message in capsys.readouterr().err


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
