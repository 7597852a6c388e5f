"""Servers on the emulated NPU that share prefixes by a real store of Mooncake."""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from npuserve.service.store.connector import FAILURES
from npuserve.v1 import admin_service_pb2, admin_service_pb2_grpc
from npuserve.v1 import inference_service_pb2_grpc as rpc
from tests.e2e.processes import engine_of, ids_while_the_engine_is_killed, until
from tests.e2e.server import Server, request, serving, streamed
from tests.npu.backends.hybrid import saved_hybrid
from tests.npu.emulator.child import needs_npu
from tests.support.connect import connect
from tests.support.mooncake import Master, exchanged, serving_master

pytestmark = [pytest.mark.slow, needs_npu]

LIMITS = ("--device", "npu", "--emulate", "--emulate-relax", "fp32", "--dtype", "float32", "--max-num-seqs", "2",
          "--max-num-batched-tokens", "256", "--max-model-len", "512", "--decode-buckets", "1",
          "--no-capture-chunks", "--kernel-sampling", "0", "--kv-cache-memory", "5MiB", "--kv-offload-memory", "64MiB")
"""The cache of the device holds 4 blocks."""
CONNECTED = "the store of prefixes is connected"
SECONDS = 10
"""Time limit of a call, on a machine that is busy with other tests."""


def prompt_of(seed: int) -> list[int]:
    """Return a prompt of 3 full blocks."""
    return random.Random(seed).choices(range(4, 100), k=3 * 128 + 5)


@pytest.fixture
def master() -> Iterator[Master]:
    with serving_master() as master:
        yield master


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text(secrets.token_hex(32))
    return file


def flags(master: Master, secret: Path, memory: str = "64MiB", seconds: float = SECONDS) -> tuple[str, ...]:
    return (*LIMITS, "--kv-store", master.address, "--kv-store-secret", str(secret), "--kv-store-memory", memory,
            "--kv-store-timeout-seconds", str(seconds))


def answer(server: Server, prompt: list[int], **fields: object) -> tuple[list[int], int]:
    """Return ids and cached tokens of an answer."""
    _, ids, finish = streamed(server.stub, request(prompt, 4, ignore_eos=True, **fields))
    return ids, finish.usage.cached_tokens


def add_key(file: str, *arguments: str) -> str:
    """Add an API key to a file, and return it."""
    command = [sys.executable, "-m", "npuserve.cli", "keys", "add", file, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def authenticate(server: Server, key: str) -> None:
    """Send further requests with an API key."""
    server.channel = connect(server.target, key)
    server.stub = rpc.InferenceServiceStub(server.channel)


def store_processes(server: Server) -> list[int]:
    """Return the process ids of the engine's clients of the store."""
    children = Path(f"/proc/{engine_of(server)}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    return [pid for pid in pids if b"store_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def flush(server: Server, master: Master) -> None:
    request = admin_service_pb2.FlushPrefixCacheRequest()
    admin_service_pb2_grpc.AdminServiceStub(server.channel).FlushPrefixCache(request)
    until(lambda: not master.keys(), server)


def bytes_of(server: Server, direction: str) -> float:
    return server.metric("npuserve_kv_store_bytes_total", direction=direction)


def wait_for_store(server: Server, is_available: bool = True) -> None:
    until(lambda: server.metric("npuserve_kv_store_available") == is_available, server, 90)


def failures(server: Server, reason: str) -> float:
    return server.metric("npuserve_kv_store_failures_total", reason=reason)


def test_prefix_is_computed_once_by_two_servers(master: Master, secret: Path, tmp_path: Path) -> None:
    file = str(tmp_path / "keys")
    keys = [add_key(file, "a", "--admin"), add_key(file, "b")]
    options = (*flags(master, secret), "--api-keys", file)
    with serving(*options) as first, serving(*options) as second:
        wait_for_store(first)
        wait_for_store(second)
        authenticate(first, keys[0])
        expected = [answer(first, prompt_of(seed), bypass_prefix_cache=True)[0] for seed in range(2)]
        assert answer(first, prompt_of(0), cache_salt="salt")[1] == 0
        until(lambda: len(master.keys()) == 3 * 3, first)
        until(lambda: bytes_of(first, "save") > 0, first)

        authenticate(second, keys[1])  # another tenant
        assert answer(second, prompt_of(1)) == (expected[1], 0)
        assert second.metric("npuserve_kv_store_hits_total") == 0
        authenticate(second, keys[0])
        for seed in range(2):
            assert answer(second, prompt_of(seed)) == (expected[seed], 384)
        assert second.metric("npuserve_kv_store_hits_total") == 2 * 384
        # The last save is counted after its key is in the store.
        until(lambda: bytes_of(second, "load") == 2 * bytes_of(first, "save") / 3, first)
        assert answer(second, prompt_of(0), cache_salt="other") == (expected[0], 0)
        assert answer(second, prompt_of(0), cache_salt="salt") == (expected[0], 384)

        assert second.metric("npuserve_kv_offload_hits_total") > 0  # blocks come from the store by the host's memory
        assert second.metric("npuserve_kv_offload_corrupt_blocks_total") == 0

        flush(second, master)
        assert answer(second, prompt_of(0)) == (expected[0], 0)
        assert not sum(failures(second, reason) for reason in ("timeout", "error", "corrupt", "full"))

        assert ids_while_the_engine_is_killed(first, [prompt_of(1)], 4) == [expected[1]]
        assert answer(first, prompt_of(0))[0] == expected[0]


@pytest.mark.full
def test_prefix_of_a_hybrid_is_computed_once_by_two_servers(master: Master, secret: Path, tmp_path: Path) -> None:
    """Each prompt and its answer have 3 blocks, and a state of two parts after the third. The caches of the device have
    fewer blocks and states than the prompts."""
    folder = str(saved_hybrid(tmp_path / "model", layers=6, full=(5,)))
    file = str(tmp_path / "keys")
    key = add_key(file, "a", "--admin")
    options = (folder, *flags(master, secret), "--kv-cache-memory", "8MiB", "--kv-offload-memory", "128MiB",
               "--api-keys", file)
    seeds = range(5)
    with serving(*options) as first, serving(*options) as second:
        for server in (first, second):
            wait_for_store(server)
            authenticate(server, key)
        expected = [answer(first, prompt_of(seed), bypass_prefix_cache=True)[0] for seed in seeds]
        until(lambda: len(master.keys()) == len(seeds) * (3 + 2), first)
        assert [answer(second, prompt_of(seed)) for seed in seeds[:4]] == [(ids, 384) for ids in expected[:4]]
        assert second.metric("npuserve_kv_store_hits_total") == 4 * 384
        assert bytes_of(second, "load") == 0.8 * bytes_of(first, "save")
        assert answer(second, prompt_of(0), cache_salt="other") == (expected[0], 0)
        for server in (first, second):
            assert {reason: failures(server, reason) for reason in FAILURES} == dict.fromkeys(FAILURES, 0)

        with exchanged(master, master.keys()):
            assert answer(second, prompt_of(4)) == (expected[4], 0)
            until(lambda: failures(second, "corrupt") == 1, second)
        flush(second, master)
        assert answer(second, prompt_of(0)) == (expected[0], 0)


@pytest.mark.full
def test_requests_complete_while_the_store_fails(master: Master, secret: Path) -> None:
    """The store's process is killed, values are wrong, the master is slow, and then dead."""
    # All values are in the memory of the first: those in the memory of a process that is killed are lost.
    with (serving(*flags(master, secret, seconds=2)) as first,
          serving(*flags(master, secret, memory="0", seconds=2)) as second):
        wait_for_store(first)
        wait_for_store(second)
        expected = [answer(first, prompt_of(seed))[0] for seed in range(8)]
        until(lambda: len(master.keys()) == 8 * 3, first)

        (pid,) = store_processes(second)
        os.kill(pid, signal.SIGKILL)
        assert answer(second, prompt_of(0))[0] == expected[0]
        until(lambda: failures(second, "error") >= 1, second)
        until(lambda: second.log.count(CONNECTED) == 2, second)
        assert answer(second, prompt_of(1)) == (expected[1], 384)

        with exchanged(master, master.keys()):
            assert answer(second, prompt_of(2)) == (expected[2], 0)
            until(lambda: failures(second, "corrupt") == 1, second)
            assert answer(second, prompt_of(3)) == (expected[3], 0)
        assert failures(second, "corrupt") == 2

        os.kill(master.process.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert answer(second, prompt_of(4))[0] == expected[4]
        until(lambda: failures(second, "timeout") >= 1, second)
        wait_for_store(second, is_available=False)
        assert answer(second, prompt_of(5))[0] == expected[5]  # without a wait
        assert time.monotonic() - began < 30
        os.kill(master.process.pid, signal.SIGCONT)
        until(lambda: second.log.count(CONNECTED) == 3, second, 120)

        master.close()
        assert answer(second, prompt_of(6)) == (expected[6], 0)
        assert answer(first, prompt_of(7))[0] == expected[7]
        wait_for_store(second, is_available=False)
        assert answer(second, prompt_of(7)) == (expected[7], 0)
        assert first.metric("npuserve_engine_restarts_total") == second.metric("npuserve_engine_restarts_total") == 0


@pytest.mark.full
def test_full_store_is_counted(master: Master, secret: Path) -> None:
    with serving(*flags(master, secret, memory="0")) as server:
        wait_for_store(server)
        expected = answer(server, prompt_of(0), bypass_prefix_cache=True)[0]
        until(lambda: failures(server, "full") >= 1, server)
        until(lambda: server.metric("npuserve_kv_store_retries_total") >= 1, server)
        assert answer(server, prompt_of(0))[0] == expected
        assert server.metric("npuserve_kv_store_available") == 1
        assert not bytes_of(server, "save")
