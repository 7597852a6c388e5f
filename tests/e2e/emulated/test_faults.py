"""Faults of the device under load: effect on the requests, the engine and the server.

npu/backends/base.py (`Fault`) and docs/ascend.md have the table.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from npuserve.v1 import model_pb2
from tests.e2e.emulated import faulty
from tests.e2e.processes import children
from tests.e2e.server import Server, request, serving, streamed
from tests.e2e.test_lifecycle import NOT_SERVING, SERVING, health
from tests.npu.emulator.child import needs_npu

pytestmark = [pytest.mark.slow, needs_npu]

STREAMS = 3
LONG = 100
"""Tokens of an answer that is still running when the device fails."""

HANG_SECONDS = 15
"""Setting of servers with a hanging device: longer than the tests need to heal it."""

RETRYABLE, ENGINE, NODE = 207018, 507014, 507899
"""ACL_ERROR_RT_...: lack of a resource, timeout of the AI core, fault of the driver."""

SETTINGS = ("--device", "npu", "--emulate", "--emulate-relax", *faulty.RELAX, "--dtype", "float32", "--max-num-seqs",
            "4", "--decode-buckets", "2,4", "--kv-cache-memory", "24MiB", "--drain-seconds", "1", "--kernel-sampling",
            "0", "--no-capture-chunks")
"""A start without captured chunks takes three quarters of the time."""


@contextlib.contextmanager
def faulty_server(folder: Path, *more: str, wait: bool = True) -> Iterator[Server]:
    program = ("-m", "tests.e2e.emulated.faulty", "serve", str(folder))
    with serving(*SETTINGS, *more, wait=wait, program=program) as server:
        yield server


class Asked:
    """Running streams, each in a thread. ended: (tokens, error or None) of each."""

    def __init__(self, server: Server, prompts: list[list[int]], **fields: Any):
        self.ended: list[tuple[list[int], grpc.RpcError | None]] = []
        self.got = [threading.Event() for _ in prompts]
        self._threads = [threading.Thread(target=self._ask, args=(server, prompt, got, fields))
                         for prompt, got in zip(prompts, self.got, strict=True)]
        for thread in self._threads:
            thread.start()

    def _ask(self, server: Server, prompt: list[int], got: threading.Event, fields: dict[str, Any]) -> None:
        ids: list[int] = []
        try:
            for part in server.stub.StreamGenerate(request(prompt, **fields), timeout=200):
                ids += part.token_ids
                got.set()
            self.ended.append((ids, None))
        except grpc.RpcError as error:
            self.ended.append((ids, error))

    def running(self) -> None:
        """Wait until each stream has a token."""
        for got in self.got:
            assert got.wait(60)

    def join(self) -> list[tuple[list[int], grpc.RpcError | None]]:
        for thread in self._threads:
            thread.join(200)
        assert len(self.ended) == len(self._threads)
        return self.ended


def ready(server: Server) -> None:
    deadline = time.monotonic() + 60
    while health(server) != SERVING:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.05)


def lines(server: Server, pattern: str) -> list[str]:
    return [line for line in server.log.splitlines() if re.search(pattern, line)]


def ended_as_unavailable(asked: Asked) -> None:
    """Check that each stream ended with UNAVAILABLE and RetryInfo."""
    for _, error in asked.join():
        assert error is not None
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        details = {detail.TypeName(): detail for detail in rpc_status.from_call(error).details}
        retry = error_details_pb2.RetryInfo()
        assert details["google.rpc.RetryInfo"].Unpack(retry)
        assert retry.retry_delay.ToTimedelta().total_seconds() > 0


def nothing_leaked(server: Server, before: dict[str, int]) -> None:
    """Check that processes, blocks and gauges are as at the start."""
    gauges = ("requests_running", "requests_waiting", "kv_cache_usage_ratio", "stream_buffered_tokens")
    deadline = time.monotonic() + 60  # until the next heartbeat
    while any(server.metric(f"npuserve_{gauge}") for gauge in gauges):
        assert time.monotonic() < deadline, [server.metric(f"npuserve_{gauge}") for gauge in gauges]
        time.sleep(0.1)
    load = server.stub.GetLoad(model_pb2.GetLoadRequest())
    assert (load.running, load.waiting, load.free_kv_ratio) == (0, 0, 1.0)
    assert set(children(server)) == set(before) == {"frontend", "engine"}
    assert children(server)["frontend"] == before["frontend"]


PROMPTS = [[5, 6, 7 + n] for n in range(STREAMS)]
FAULTS = {"a kernel fails, told by a later wait": (("task", 507015), {}, "engine")}
MORE_FAULTS = {
    "out of memory in a step": (("malloc", 207001), {"times": -1}, "retryable"),
    "a copy fails": (("memcpy", 207008), {}, "retryable"),
    "a launch fails": (("launch", 107003), {}, "engine"),
    "a wait fails, retryable": (("synchronize", RETRYABLE), {}, "retryable"),
    "a wait fails, fatal for the engine": (("synchronize", ENGINE), {}, "engine"),
}
"""Other ways to a restart, for the full run: tests/npu/backends/ascend/test_fault_codes.py sorts their errors."""


@pytest.fixture(scope="module")
def survivor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """Server that gets one fault after the other, and its folder."""
    folder = tmp_path_factory.mktemp("faults")
    with faulty_server(folder, "--hang-seconds", str(HANG_SECONDS)) as server:
        yield server, folder


@pytest.mark.parametrize("name", [*FAULTS, *(pytest.param(name, marks=pytest.mark.full) for name in MORE_FAULTS)])
def test_the_engine_starts_again(survivor: tuple[Server, Path], name: str) -> None:
    server, folder = survivor
    (what, code), options, fault = (FAULTS | MORE_FAULTS)[name]
    ready(server)
    before, restarts = children(server), server.metric("npuserve_engine_restarts_total")
    seen = len(lines(server, "device fault")), len(lines(server, "starting it again"))
    expected = streamed(server.stub, request(PROMPTS[0], 8))[1]
    answers = [streamed(server.stub, request(prompt, LONG, ignore_eos=True))[1] for prompt in PROMPTS]
    asked = Asked(server, PROMPTS, max_tokens=LONG, ignore_eos=True)
    asked.running()
    faulty.tell(folder, "fail", what, code, **options)
    if what == "malloc":  # steps of a known size allocate no memory
        asked_more = Asked(server, [[9] * 400], max_tokens=1, prompt_logprobs=20, logprobs=20)
        assert [(len(ids), error) for ids, error in asked_more.join()] == [(1, None)]
    # The streams continue in the next engine, with the same tokens.
    got = asked.join()
    assert [error for _, error in got] == [None] * len(PROMPTS)
    assert sorted(ids for ids, _ in got) == sorted(answers)
    ready(server)
    told, died = lines(server, "device fault")[seen[0] :], lines(server, "starting it again")[seen[1] :]
    assert len(told) == len(died) == 1
    assert f'"fault": "{fault}"' in told[0]
    # A failed launch is reported later, perhaps without its code.
    assert str(code) in told[0] or what in ("malloc", "launch")
    assert ("no stream or queue left: end other processes" in told[0]) == (code == 207008)
    assert '"code": 3' in died[0]
    assert server.metric("npuserve_engine_restarts_total") == restarts + 1
    assert health(server, "npuserve.liveness") == SERVING
    nothing_leaked(server, before)
    assert streamed(server.stub, request(PROMPTS[0], 8))[1] == expected


@pytest.mark.full
def test_no_memory_at_start_is_reported_without_a_retry(tmp_path: Path) -> None:
    """Allocation fails for weights and KV cache."""
    faulty.at_start(tmp_path, ("fail", ("malloc", 207001), {"nth": 3, "times": -1}))
    with faulty_server(tmp_path, wait=False) as server:
        assert server.process.wait(60) == 2
        (said,) = lines(server, "^npuserve: ")
        assert re.search(r"device: no \d+ MiB of device memory are left of .*smaller kv_cache_memory", said)
        assert not lines(server, "starting it again|Traceback")


def serves_without_captures(server: Server, starts: int) -> None:
    assert len(streamed(server.stub, request(PROMPTS[0], 8, ignore_eos=True))[1]) == 8
    assert server.metric("npuserve_decode_tokens_total", mode="captured") == 0
    assert len(lines(server, "starting it again")) == starts - 1
    (said,) = lines(server, "run kernel by kernel, which is slower")
    assert "update the Ascend HDK driver and firmware to 25.5.1 or later, or serve with --capture off" in said


@pytest.fixture(scope="module")
def uncaptured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """Server whose captures fail, and its folder."""
    folder = tmp_path_factory.mktemp("uncaptured")
    faulty.at_start(folder, ("fail", ("aclmdlRICaptureBegin", 207005), {"times": -1}))
    with faulty_server(folder) as server:
        yield server, folder


@pytest.mark.full
def test_a_server_that_cannot_capture_serves_without(uncaptured: tuple[Server, Path]) -> None:
    """The capture fails before any replay, so the engine continues."""
    serves_without_captures(uncaptured[0], starts=1)


@pytest.mark.full
def test_a_server_whose_device_hangs_can_be_stopped(uncaptured: tuple[Server, Path]) -> None:
    """Its requests end, and the engine is killed after its patience: exit code 1. Last test of that server."""
    server, folder = uncaptured
    asked = Asked(server, PROMPTS, max_tokens=LONG, ignore_eos=True)
    asked.running()
    faulty.tell(folder, "hang")
    assert server.stop() == 1
    assert {error and error.code() for _, error in asked.join()} == {grpc.StatusCode.UNAVAILABLE}


@pytest.mark.full
def test_a_server_that_cannot_update_lengths_serves_without_captures(tmp_path: Path) -> None:
    """A replay waits forever for lengths, so the next engine continues."""
    faulty.at_start(tmp_path, ("fail", ("aclmdlRICaptureTaskUpdateBegin", 207000), {"times": -1}))
    with faulty_server(tmp_path) as server:
        serves_without_captures(server, starts=2)


@pytest.mark.full
def test_a_capture_that_must_not_fail_is_an_error_of_the_start(tmp_path: Path) -> None:
    faulty.at_start(tmp_path, ("fail", ("aclmdlRICaptureBegin", 207008), {}))
    with faulty_server(tmp_path, "--capture", "on", wait=False) as server:
        assert server.process.wait(60) == 2
        (said,) = lines(server, "^npuserve: ")
        assert re.search(r"device: steps cannot be captured, .*too old .error 207008.: update the Ascend HDK", said)
        assert not lines(server, "starting it again|Traceback")


def test_a_hang_ends_when_the_device_continues(survivor: tuple[Server, Path]) -> None:
    server, folder = survivor
    ready(server)
    before, expected = children(server), streamed(server.stub, request(PROMPTS[0], LONG, ignore_eos=True))[1]
    asked = Asked(server, PROMPTS[:1], max_tokens=LONG, ignore_eos=True)
    asked.running()
    faulty.tell(folder, "hang")
    deadline = time.monotonic() + 60
    while health(server) != NOT_SERVING:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.05)
    assert health(server, "npuserve.liveness") == SERVING
    with pytest.raises(grpc.RpcError, match="the engine does not answer") as refused:
        server.stub.Generate(request("Once", 4), timeout=60)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    faulty.tell(folder, "heal")
    assert asked.join() == [(expected, None)]
    ready(server)
    nothing_leaked(server, before)
    assert children(server) == before


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_hang_that_lasts_is_a_restart(survivor: tuple[Server, Path]) -> None:
    """A kernel never returns: the engine is not ready, is killed and restarted, and the streams continue."""
    server, folder = survivor
    ready(server)
    before, restarts = children(server), server.metric("npuserve_engine_restarts_total")
    expected = streamed(server.stub, request(PROMPTS[0], LONG, ignore_eos=True))[1]
    asked = Asked(server, PROMPTS[:1], max_tokens=LONG, ignore_eos=True)
    asked.running()
    faulty.tell(folder, "hang")
    deadline = time.monotonic() + 60
    while not lines(server, "engine hangs, killing it"):
        assert health(server, "npuserve.liveness") == SERVING
        assert time.monotonic() < deadline, server.log
        time.sleep(0.1)
    assert health(server) == NOT_SERVING
    assert asked.join() == [(expected, None)]
    ready(server)
    assert server.metric("npuserve_engine_restarts_total") == restarts + 1
    assert children(server)["engine"] != before["engine"]
    nothing_leaked(server, before)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_replay_that_fails_is_a_restart_without_captured_steps(survivor: tuple[Server, Path]) -> None:
    """An old driver refuses a replay: the streams continue, with the same tokens, in an engine without graphs.

    The shared server captures no more.
    """
    server, folder = survivor
    ready(server)

    def decoded(mode: str) -> float:
        return server.metric("npuserve_decode_tokens_total", mode=mode)

    faults, captured, eager = len(lines(server, "device fault")), decoded("captured"), decoded("eager")
    expected = [streamed(server.stub, request(prompt, LONG, ignore_eos=True))[1] for prompt in PROMPTS]
    assert decoded("captured") > captured
    assert decoded("eager") == eager
    asked = Asked(server, PROMPTS, max_tokens=LONG, ignore_eos=True)
    asked.running()
    faulty.at_start(folder, ("fail", ("aclmdlRI*", 107030), {"times": -1}))  # a capture would fail, too
    faulty.tell(folder, "fail", "aclmdlRIExecuteAsync", 107030, times=-1)
    got = asked.join()
    assert [error for _, error in got] == [None] * STREAMS
    assert sorted(ids for ids, _ in got) == sorted(expected)
    ready(server)
    (told,) = lines(server, "device fault")[faults:]
    assert "a captured graph cannot be replayed: the driver is too old: update the Ascend HDK driver" in told
    (said,) = lines(server, "steps are not captured but run kernel by kernel, which is slower")
    assert "cannot be replayed: the driver is too old" in said
    captured, eager = decoded("captured"), decoded("eager")
    assert streamed(server.stub, request(PROMPTS[0], LONG, ignore_eos=True))[1] == expected[0]
    assert decoded("captured") == captured
    assert decoded("eager") > eager
    # The choice is kept after further deaths of the engine.
    faulty.tell(folder, "fail", "synchronize", ENGINE)
    assert streamed(server.stub, request(PROMPTS[0], LONG, ignore_eos=True))[1] == expected[0]
    ready(server)
    assert len(lines(server, "steps are not captured but run")) == 2


def leaves(server: Server, folder: Path, name: str, *args: Any) -> None:
    """Fail the device for good under load, and check that the server ends with the exit code of a device at fault."""
    asked = Asked(server, PROMPTS, max_tokens=LONG, ignore_eos=True)
    asked.running()
    seen = len(lines(server, "device fault")), len(lines(server, "starting it again"))
    if name == "lose_device":
        faulty.at_start(folder, (name, (), {}))  # also for later engines
    faulty.tell(folder, name, *args)
    ended_as_unavailable(asked)
    assert server.process.wait(60) == 4
    told, died = lines(server, "device fault")[seen[0] :], lines(server, "starting it again")[seen[1] :]
    assert '"fault": "node"' in told[-1]
    # A launch that fails first has no code; the next start has one.
    assert len(died) == len(told) - 1 <= (name == "lose_device")
    assert children(server) == {}


@pytest.mark.full
def test_the_server_leaves_if_a_wait_fails_for_the_node(tmp_path: Path) -> None:
    with faulty_server(tmp_path) as server:
        leaves(server, tmp_path, "fail", "synchronize", NODE)


def test_the_server_leaves(survivor: tuple[Server, Path]) -> None:
    """The device is lost. Last test of the shared server."""
    leaves(*survivor, "lose_device")
