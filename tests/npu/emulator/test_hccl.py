"""HCCL of the emulated NPU, through torch.distributed and torch_npu's ProcessGroupHCCL: a process for each rank."""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from npuserve.npu import emulator
from tests.npu.emulator.child import emulated, needs_npu
from tests.npu.emulator.ranks import on_ranks

SMALL_BUFFER = {"HCCL_BUFFSIZE": "1"}
FP64, HIF8, FP32 = 10, 14, 4  # of HcclDataType


def on(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="npu")


def meet(rank: int, place: str) -> None:
    """Wait for the other ranks without the device."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{place}-{rank}", b"1")
    store.wait([f"{place}-{other}" for other in range(dist.get_world_size())])


def group() -> Any:
    return dist.group.WORLD._get_backend(torch.device("npu"))  # type: ignore[union-attr]


@on_ranks()
def test_all_reduce_adds_and_takes_the_least_in_every_dtype(rank: int) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8):
        values = on(1, -2, 3, dtype=dtype) * (rank + 1)
        dist.all_reduce(values)
        assert values.tolist() == [3, -6, 9], dtype
        values = on(1, -2, 3, dtype=dtype) * (rank + 1)
        dist.all_reduce(values, dist.ReduceOp.MIN)
        assert values.tolist() == [1, -4, 3], dtype


@on_ranks(3)
def test_all_reduce_adds_in_the_order_of_the_ranks_in_float32(rank: int) -> None:
    parts = torch.tensor([[1e8, 1.0], [1.0, 2.0**-8], [-1e8, 2.0**-8]])
    values = parts[rank].to("npu")
    dist.all_reduce(values)
    assert values.tolist() == ((parts[0] + parts[1]) + parts[2]).tolist() == [0, 1 + 2.0**-7]
    rounded = parts[rank].bfloat16().to("npu")
    dist.all_reduce(rounded)
    assert rounded[1].item() == 1 + 2.0**-7  # after each addition it would be 1


@on_ranks(4)
def test_all_gather_broadcast_and_barrier(rank: int) -> None:
    out = on(*[0.0] * 8, dtype=torch.bfloat16)
    dist.all_gather_into_tensor(out, on(rank, -rank, dtype=torch.bfloat16))
    assert out.tolist() == [0, 0, 1, -1, 2, -2, 3, -3]
    parts = [on(0.0) for _ in range(4)]
    dist.all_gather(parts, on(rank * 10.0))
    assert [part.item() for part in parts] == [0, 10, 20, 30]
    values = on(rank, rank, dtype=torch.int64)
    dist.broadcast(values, 2)
    assert values.tolist() == [2, 2]
    dist.barrier()
    names = [call.name for call in emulator.calls()]
    assert names.count("HcclCommInitRootInfoConfig") == 1
    assert (names.count("HcclAllGather"), names.count("HcclBroadcast"), names.count("HcclAllReduce")) == (2, 1, 1)


@on_ranks(environment=SMALL_BUFFER)
def test_data_beyond_the_buffer_are_sent_in_parts(rank: int) -> None:
    values = torch.arange(700_000, dtype=torch.float32, device="npu") * (rank + 1)
    dist.all_reduce(values)
    assert torch.equal(values.cpu(), torch.arange(700_000, dtype=torch.float32) * 3)
    out = torch.empty(2, 700_000, device="npu")
    dist.all_gather_into_tensor(out, values + rank)
    assert torch.equal(out[1].cpu(), out[0].cpu() + 1)


@on_ranks(environment=SMALL_BUFFER)
def test_a_communicator_takes_twice_the_buffer_until_it_is_destroyed(rank: int) -> None:
    values = on(1.0)
    before = emulator.memory().used
    dist.all_reduce(values)
    torch.npu.synchronize()
    assert emulator.memory().used - before == 2 << 20
    dist.destroy_process_group()
    assert emulator.memory().used == before


@on_ranks()
def test_a_rank_runs_its_part_when_another_one_waits(rank: int) -> None:
    values = on(1.0)
    dist.all_reduce(values)
    if rank == 0:
        assert values.item() == 2
    meet(rank, "read")  # the host of rank 1 has not waited for its device
    assert values.item() == 2


@on_ranks()
def test_a_missing_wait_for_a_collective_gives_its_old_input(rank: int) -> None:
    dist.barrier()
    values = on(1.0)
    torch.npu.synchronize()
    work = dist.all_reduce(values, async_op=True)
    early = values.clone()
    assert early.item() == 1
    meet(rank, "read")
    work.wait()
    assert values.item() == 2


@on_ranks()
def test_a_captured_collective_runs_at_each_replay(rank: int) -> None:
    values, one, out = on(0.0), on(1.0), on(0.0)
    dist.all_reduce(on(0.0))
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        total = values + one
        dist.all_reduce(total)
        out.copy_(total * 2)
    assert out.item() == 0
    emulator.clear_calls()
    emulator.log_tasks(True)
    for step in range(3):
        values.fill_(step + 10.0 * rank)
        graph.replay()
        assert out.item() == 2 * (2 * step + 10 + 2)
    assert "HcclAllReduce" not in [call.name for call in emulator.calls()]
    assert [task.name for task in emulator.tasks()].count("HcclAllReduce") == 3
    meet(rank, "replayed")


@on_ranks()
def test_replays_and_eager_collectives_keep_their_order(rank: int) -> None:
    values = on(1.0)
    dist.all_reduce(values)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        dist.all_reduce(values)
    for _ in range(4):
        graph.replay()
        dist.all_reduce(values)
    assert values.item() == 2.0**9
    meet(rank, "read")


# The rules. Each violation is refused with its rule, which names its source.


def fails(text: str, work: Callable[[], object]) -> None:
    """Check the error of `work`, which the call or the device reports. A thread of torch_npu may report it later."""

    def wait() -> None:
        held = work()  # without it torch_npu may report the error to a destructor, which drops it
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            torch.npu.synchronize()
            time.sleep(0.01)
        del held

    with pytest.raises(RuntimeError, match=text):
        wait()


def refused(rule: str, work: Callable[[], object]) -> None:
    fails(rf"\[{rule}; https", work)


def last_error() -> str:
    library = ctypes.CDLL(None)
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    return (library.aclGetRecentErrMsg() or b"").decode()


@on_ranks()
def violates_reduced_dtypes(rank: int) -> None:
    values = on(1.0, 2.0)
    dist.all_reduce(values)
    torch.npu.synchronize()
    address, comm = ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(group().get_hccl_comm(rank))
    code = ctypes.CDLL(None).HcclAllReduce(address, address, ctypes.c_uint64(1), FP64, 0, comm, None)
    assert (code, "[hccl.reduced_dtypes; https" in last_error()) == (5, True)


@on_ranks()
def violates_dtypes(rank: int) -> None:
    values = on(1.0, 2.0)
    dist.all_reduce(values)
    torch.npu.synchronize()
    address, comm = ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(group().get_hccl_comm(rank))
    code = ctypes.CDLL(None).HcclBroadcast(address, ctypes.c_uint64(1), HIF8, 0, comm, None)
    assert (code, "[hccl.dtypes; https" in last_error()) == (5, True)


@on_ranks()
def violates_same_calls(rank: int) -> None:
    dist.all_reduce(on(1.0))
    refused("hccl.same_calls", lambda: dist.all_reduce(on(*[1.0] * (rank + 1))))


@on_ranks()
def violates_same_calls_by_the_operation(rank: int) -> None:
    def call() -> None:
        if rank:
            dist.broadcast(on(1.0), 0)
        else:
            dist.all_reduce(on(1.0))

    refused("hccl.same_calls", call)


@on_ranks(environment={"HCCL_CONNECT_TIMEOUT": "120"})
def violates_same_group(rank: int) -> None:
    os.environ["HCCL_BUFFSIZE"] = str(rank + 1)
    refused("hccl.same_group", lambda: dist.all_reduce(on(1.0)))


@on_ranks(environment={"SET_DEVICE": "0"})
def violates_own_device(rank: int) -> None:
    torch.npu.set_device(0)
    refused("hccl.own_device", lambda: dist.all_reduce(on(1.0)))


@on_ranks()
def violates_capture(rank: int) -> None:
    values = on(1.0)
    torch.npu.synchronize()

    def capture() -> None:
        with torch.npu.graph(torch.npu.NPUGraph()):
            dist.all_reduce(values)

    refused("hccl.capture", capture)


@on_ranks(environment={"HCCL_OP_EXPANSION_MODE": "AIV"})
def violates_task_group(rank: int) -> None:
    values = on(1.0)
    dist.all_reduce(values)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):  # without task groups AIV is possible
        dist.all_reduce(values)
    torch.npu.synchronize()

    def capture() -> None:
        with torch.npu.graph(torch.npu.NPUGraph()):
            stream = torch.npu.current_stream()
            torch.npu.graph_task_group_begin(stream)
            values.add_(1)
            torch.npu.graph_task_group_end(stream)
            # Not by torch.distributed, whose queue of launches would report the end of the capture first.
            address, comm = ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(group().get_hccl_comm(rank))
            code = ctypes.CDLL(None).HcclAllReduce(
                address, address, ctypes.c_uint64(1), FP32, 0, comm, ctypes.c_void_p(stream.npu_stream))
            if code:
                raise RuntimeError(f"{code}: {last_error()}")

    refused("hccl.task_group", capture)


@on_ranks(environment={"HCCL_EXEC_TIMEOUT": "1"})
def violates_timeout(rank: int) -> None:
    dist.all_reduce(on(1.0))
    torch.npu.synchronize()
    if rank == 0:
        began = time.monotonic()
        fails(r"507048(.|\n)*waited 1 s in HcclAllReduce(.|\n)*\[hccl.timeout; https", lambda: dist.all_reduce(on(1.0)))
        assert 0.9 < time.monotonic() - began < 20


@on_ranks(environment={"HCCL_CONNECT_TIMEOUT": "1"})
def violates_connect(rank: int) -> None:
    if rank == 0:
        refused("hccl.connect", lambda: dist.all_reduce(on(1.0)))


VIOLATIONS = {
    "hccl.reduced_dtypes": (violates_reduced_dtypes,), "hccl.dtypes": (violates_dtypes,),
    "hccl.same_calls": (violates_same_calls, violates_same_calls_by_the_operation),
    "hccl.same_group": (violates_same_group,), "hccl.own_device": (violates_own_device,),
    "hccl.capture": (violates_capture,), "hccl.task_group": (violates_task_group,),
    "hccl.timeout": (violates_timeout,), "hccl.connect": (violates_connect,)}


@needs_npu
@pytest.mark.parametrize("rule", VIOLATIONS)
def test_each_violation_is_refused_by_its_rule(rule: str) -> None:
    for violation in VIOLATIONS[rule]:
        violation()


@emulated()
def test_every_rule_has_its_violation_and_its_source() -> None:
    library = ctypes.CDLL(None)
    library.emu_hccl_rules.restype = ctypes.c_char_p
    rules = json.loads(library.emu_hccl_rules())
    assert sorted(rule["id"] for rule in rules) == sorted(VIOLATIONS)
    assert all(rule["text"] and rule["source"].startswith("https://") for rule in rules)


@emulated(fresh=True)
def test_a_process_has_one_device_among_those_that_are_visible() -> None:
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "5,2"
    assert torch.npu.device_count() == 2
    torch.npu.set_device(1)
    assert on(1.0).device == torch.device("npu:1")
    with pytest.raises(RuntimeError, match="device 0, and the process uses device 1"):
        torch.npu.set_device(0)
    with pytest.raises(RuntimeError, match="device"):
        torch.npu.set_device(2)


@on_ranks()
def test_functions_that_are_not_emulated_are_refused_by_name(rank: int) -> None:
    dist.all_reduce(on(1.0))
    torch.npu.synchronize()
    fails("HcclReduceScatter is not emulated",
          lambda: dist.reduce_scatter_tensor(on(0.0), on(1.0, 2.0), async_op=True))
