"""A server on an emulated NPU in float32, alone and with prefill on the host's CPU: tokens equal the CPU's."""

from __future__ import annotations

import pytest

from tests.e2e.server import request, serving, streamed
from tests.e2e.test_emulated import tokens
from tests.npu.emulator.child import needs_npu

LIMITS = ("--dtype", "float32", "--max-num-batched-tokens", "8", "--max-num-seqs", "4")
NPU = ("--device", "npu", "--emulate", "--emulate-relax", "fp32", "--decode-buckets", "1,4", *LIMITS)


CPU = ("--device", "cpu", "--block-size", "128", *LIMITS)
ON_HOST = (*NPU, "--prefill-device", "cpu")


@needs_npu
@pytest.mark.full  # tests/npu/execution/test_host_prefill_ascend.py has steps
@pytest.mark.parametrize("servers", [
    pytest.param((CPU, ON_HOST), id="cpu"),
    pytest.param((NPU, ON_HOST), id="npu"),
])
def test_tokens_are_those_of_both_devices_alone(servers: tuple[tuple[str, ...], ...]) -> None:
    """Concurrent requests with chunked prefill between decode steps, and a second turn that continues a generated text
    and hits the prefix cache."""
    seen = []
    for arguments in servers:
        with serving(*arguments) as server:
            first = list(tokens(server))
            if arguments is not CPU:
                assert "emulated NPU: proves calls and numbers, not speed" in server.log
                assert "captured decode steps of 1, 4 rows" in server.log
                assert server.metric("npuserve_decode_tokens_total", mode="captured") > 60
            turn = "Once upon a time, there was a little girl named Lily. " * 8
            text, ids, opening = streamed(server.stub, request(turn, 24))
            _, more, finish = streamed(server.stub, request(turn + text + " The next day,", 12))
            assert finish.usage.cached_tokens >= 128 > opening.usage.prompt_tokens
            seen.append((first, ids, more))
            assert server.stop() == 0
    assert seen[0] == seen[1]


@pytest.mark.full
def test_it_is_refused_where_the_model_runs_on_the_cpu() -> None:
    """By default tests/npu/execution/test_prefill_device.py has the error, and test_hosts.py such exit codes."""
    with serving("--device", "cpu", "--prefill-device", "cpu", wait=False) as server:
        assert server.process.wait(60) == 2
        assert "npuserve: prefill_device: the whole model runs on cpu; leave prefill_device at same" in server.log
