"""A server on the emulated NPU whose prefixes return from host memory, also after its engine was killed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e.processes import ids_while_the_engine_is_killed, until
from tests.e2e.server import Server, request, serving, streamed
from tests.npu.emulator.child import needs_npu

pytestmark = [pytest.mark.full, needs_npu]  # test_store.py has such a server, whose engine is killed

PROMPTS = [random.Random(seed).choices(range(4, 100), k=3 * 128 + 5) for seed in range(4)]
"""3 full blocks each. The device's cache holds 4 blocks, so that the working set is three times as large."""


def answers(server: Server, **fields: object) -> list[tuple[list[int], int]]:
    """Return ids and cached tokens of the answer to each prompt."""
    found = []
    for prompt in PROMPTS:
        _, ids, finish = streamed(server.stub, request(prompt, 4, ignore_eos=True, **fields))
        found.append((ids, finish.usage.cached_tokens))
    return found


def test_prefixes_return_from_host_memory_until_the_engine_dies(tmp_path: Path) -> None:
    with serving("--device", "npu", "--emulate", "--emulate-relax", "fp32", "--dtype", "float32", "--max-num-seqs", "2",
                 "--max-num-batched-tokens", "256", "--max-model-len", "512", "--decode-buckets", "1",
                 "--no-capture-chunks",
                 "--kernel-sampling", "0", "--kv-cache-memory", "5MiB", "--kv-offload-memory", "256MiB") as server:
        expected = [ids for ids, _ in answers(server, bypass_prefix_cache=True)]
        assert [ids for ids, _ in answers(server)] == expected
        assert answers(server) == [(ids, 384) for ids in expected]
        loaded = server.metric("npuserve_kv_offload_hits_total")
        assert loaded >= (2 * len(PROMPTS) - 1) * 384  # a request that bypasses the cache leaves its blocks there
        assert server.metric("npuserve_kv_offload_queries_total") == 2 * len(PROMPTS) * 5 + loaded
        used = server.metric("npuserve_kv_offload_memory_bytes", state="used")
        assert used == server.metric("npuserve_kv_offload_bytes_total", direction="save") > 0
        block_bytes = used / (3 * len(PROMPTS))
        assert server.metric("npuserve_kv_offload_bytes_total", direction="load") == loaded / 128 * block_bytes
        assert server.metric("npuserve_kv_offload_corrupt_blocks_total") == 0
        again = ids_while_the_engine_is_killed(server, PROMPTS[:1], 4)
        assert again == expected[:1]
        until(lambda: server.metric("npuserve_kv_offload_memory_bytes", state="used") == 0, server)
        assert [ids for ids, _ in answers(server)] == expected
