"""A server on an emulated NPU, as `npuserve serve --device npu --emulate` starts it."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

import npuserve.kernels  # noqa: F401  fills the registry
from npuserve.cli.main import main
from npuserve.kernels.registry import KERNELS
from npuserve.v1 import generate_pb2 as pb
from tests.cli.collect.test_collect import members
from tests.e2e.processes import until
from tests.e2e.server import Server, request, serving, streamed
from tests.npu.emulator.child import needs_npu

pytestmark = needs_npu
PROMPTS = ["Once upon a time", "One day, a little girl named Lily went to the park with", "Tim wanted a new toy. He"]


def tokens(server: Server) -> Iterator[list[int]]:
    """Yield the tokens of all prompts, sent concurrently; the last request samples."""
    asks = [request(prompt, 24) for prompt in PROMPTS] + [request(PROMPTS[0], 24, temperature=2.0, seed=7)]
    with ThreadPoolExecutor(len(asks)) as pool:
        for _, ids, finish in pool.map(lambda ask: streamed(server.stub, ask), asks):
            assert len(ids) == finish.usage.generated_tokens == 24
            yield ids


FLAGS = ("--device", "npu", "--emulate", "--max-num-seqs", "4", "--max-num-batched-tokens", "64",
         "--decode-buckets", "4", "--kernel-sampling", "2", "--log-prompts", "--log-format", "json")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Server without any relaxation, shared by the first tests."""
    with serving(*FLAGS) as running:
        yield running


NOT_BY_DEFAULT = {"greedy", "keep_rows", "linear_argmax", "logprobs", "mask_logits", "quantize", "swiglu",
                  "all_gather", "all_reduce", "embedding_shard", "linear_argmax_shard"}
"""Kernels of requests with temperature 0, log-probabilities or constraints, of W8A8 models, of EAGLE-3 heads, and of
groups of ranks."""


def test_every_kernel_of_a_default_request_has_its_latency(server: Server) -> None:
    """First request of the server. Steps are timed kernel by kernel: every second one. The others are replays, whose
    lengths are updated."""
    ask = pb.GenerateRequest(text="Once upon a time", stopping=pb.StoppingParams(max_tokens=9, ignore_eos=True))
    server.stub.Generate(ask, timeout=60)
    deadline = time.monotonic() + 60
    while not server.metric("npuserve_lengths_lag_seconds_count"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with urllib.request.urlopen(server.metrics_url) as page:
        timed = re.findall(r"npuserve_kernel_latency_seconds_count\{(.*)\} [1-9]", page.read().decode())
    labels = [dict(re.findall(r'(\w+)="(\w+)"', each)) for each in timed]
    needed = {name for name, kernel in KERNELS.items() if not (kernel.optional or kernel.by_layer)}
    assert {each["kernel"] for each in labels if each["phase"] == "decode"} == needed - NOT_BY_DEFAULT
    assert {each["backend"] for each in labels} == {"ascend"}
    assert 0 < server.metric("npuserve_lengths_lag_seconds_sum") < 60
    assert server.metric("npuserve_lengths_lag_seconds_count") >= server.metric(
        "npuserve_step_seconds_count", mode="captured") > 0


def test_collect_beside_a_server_that_logs_prompts_holds_no_prompt(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt, answer and chat are nowhere in the archive, compressed or not."""
    marker = "zebrafinch"
    monkeypatch.setenv("ASCEND_PROCESS_LOG_PATH", str(tmp_path))  # an empty folder
    answer = server.stub.Generate(request(f"Once there was a {marker}", 8), timeout=60)
    assert answer.text
    wrong = request(f"{marker} {marker}", 8)
    wrong.sampling.temperature = -1
    with pytest.raises(grpc.RpcError, match="temperature"):
        server.stub.Generate(wrong, timeout=60)
    until(lambda: marker in server.log, server)  # lines go through a queue
    log, path = tmp_path / "server.txt", tmp_path / "a.tar.gz"
    log.write_text(server.log)
    assert main(["collect", "--output", str(path), "--log", str(log), *FLAGS]) == 0
    found = members(path)
    lines = found["server.log"].decode().splitlines()
    assert len(lines) >= 5
    assert any("StreamGenerate" in line or '"Generate"' in line for line in lines)
    assert not [name for name, data in found.items() if marker.encode() in data or answer.text.encode() in data]


def test_it_serves_in_bfloat16_without_any_relaxation(server: Server) -> None:
    """Last test of the server."""
    assert len(set(map(tuple, tokens(server)))) == len(PROMPTS) + 1
    assert server.stop() == 0


@pytest.mark.full
def test_float32_without_the_relaxation_is_refused_at_the_start() -> None:
    with serving("--device", "npu", "--emulate", "--dtype", "float32", wait=False) as server:
        assert server.process.wait(60) == 2
        assert "npuserve: dtype: 'float32' is not one of auto, bfloat16, float16" in server.log
