"""A server with a rank on each of two emulated NPUs: its tokens, and what happens when a rank hangs or dies.

By default tests/npu/backends/ascend/test_ranks.py has steps of such ranks, tests/e2e/test_emulated_cuda.py a server of
ranks with captured steps, and tests/e2e/test_ranks.py deaths on CPUs.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.serving.server import ranks_of
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.layers.shard import Shard
from npuserve.npu.storyteller import FOLDER
from tests.e2e.processes import engine_of, until
from tests.e2e.server import Server, request, serving, streamed
from tests.e2e.test_ranks import is_alive
from tests.npu.emulator.child import needs_npu
from tests.support.benches import bench

pytestmark = [pytest.mark.full, needs_npu]

REQUESTS, ANSWER, BLOCKS, BLOCK = 6, 32, 6, 128
HANG_SECONDS = 6


def asked() -> list[list[int]]:
    """Return prompts of different lengths, which are computed in chunks, and of which some share a block."""
    vocabulary = ModelConfig.from_folder(FOLDER).vocab_size
    made: list[list[int]] = bench("quality.emulated").prompts(vocabulary, REQUESTS, ANSWER)
    return made


def tokens(server: Server) -> list[list[int]]:
    """Return the answers to concurrent requests, every other one of which samples."""

    def ask(number: int, prompt: list[int]) -> list[int]:
        time.sleep(0.05 * number)
        sampling = {"temperature": 1.0, "seed": number, "top_p": 0.9} if number % 2 else {}
        return streamed(server.stub, request(prompt, ANSWER, ignore_eos=True, **sampling))[1]

    with ThreadPoolExecutor(REQUESTS) as threads:
        return list(threads.map(ask, range(REQUESTS), asked()))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Server whose KV cache has too few blocks for all requests, shared by the tests."""
    config = ModelConfig.from_folder(FOLDER).sharded(Shard(0, 2))
    block = 2 * config.num_layers * config.attention.num_kv_heads * config.attention.head_dim * BLOCK * 4
    with serving("--device", "npu", "--emulate", "--emulate-relax", "fp32", "--dtype", "float32",
                 "--tensor-parallel-size", "2", "--max-num-seqs", "4", "--max-num-batched-tokens", "48",
                 "--max-model-len", "300", "--decode-buckets", "2,4", "--kv-cache-memory", str(BLOCKS * block),
                 "--kernel-sampling", "40", "--hang-seconds", str(HANG_SECONDS)) as running:
        yield running


def test_tokens_equal_those_of_the_cpu(server: Server) -> None:
    with serving("--dtype", "float32", "--max-model-len", "300", "--threads", "1") as cpu:
        expected = tokens(cpu)
    for _ in range(3):  # on a busy machine the requests may come too late to compete for blocks
        assert tokens(server) == expected
        if server.metric("npuserve_preemptions_total"):
            break
    assert server.metric("npuserve_preemptions_total") > 0
    assert server.metric("npuserve_step_seconds_count", phase="mixed") > 0
    captured, decoder, eager = (
        server.metric("npuserve_decode_tokens_total", mode=mode) for mode in ("captured", "decoder", "eager"))
    assert captured > 0
    assert captured + decoder >= 0.9 * (captured + decoder + eager)


def test_death_of_a_rank_ends_the_group_and_the_stream_continues(server: Server) -> None:
    ask = request("Once upon a time", 64, ignore_eos=True)
    alone, engine, (rank,) = streamed(server.stub, ask)[1], engine_of(server), ranks_of(server.process.pid)
    restarts = server.metric("npuserve_engine_restarts_total")
    with ThreadPoolExecutor(1) as threads:
        stream = server.stub.StreamGenerate(ask, timeout=100)
        ids = list(next(stream).token_ids)
        rest = threads.submit(lambda: [token for part in stream for token in part.token_ids])
        os.kill(rank, signal.SIGKILL)
        began = time.monotonic()
        until(lambda: not is_alive(engine) and not is_alive(rank), server)
        assert time.monotonic() - began < 3
        assert ids + rest.result() == alone
    assert server.metric("npuserve_engine_restarts_total") == restarts + 1


def test_stopped_rank_is_a_hang_that_the_watchdog_ends(server: Server) -> None:
    """The collectives of the other rank wait. HCCL itself would wait for half an hour."""
    alone = streamed(server.stub, request("Once upon a time", 24))[1]
    restarts = server.metric("npuserve_engine_restarts_total")
    os.kill(ranks_of(server.process.pid)[0], signal.SIGSTOP)
    assert streamed(server.stub, request("Once upon a time", 24))[1] == alone
    assert server.metric("npuserve_engine_restarts_total") == restarts + 1


def test_ranks_end_with_the_server(server: Server) -> None:
    ranks = ranks_of(server.process.pid)
    assert server.stop() == 0
    assert not any(map(is_alive, ranks))


def test_prompts_on_the_host_are_refused() -> None:
    """By the ranks: tests/npu/backends/ascend/test_ranks.py."""
    refused = Server("--device", "npu", "--emulate", "--tensor-parallel-size", "2", "--prefill-device", "cpu")
    try:
        assert refused.process.wait(60) == 2
        assert "prefill_device: cpu is not possible with a tensor_parallel_size above 1" in refused.log
        assert "Traceback" not in refused.log
    finally:
        refused.close()
