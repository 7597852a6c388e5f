"""Faults of the emulated NPU and its call log, through torch_npu."""

from __future__ import annotations

import ctypes
import json
import threading
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from npuserve.npu import emulator
from tests.npu.emulator import child
from tests.npu.emulator.child import emulated, needs_npu, run

ACL_ERROR_RT_AICORE_TIMEOUT, ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR, ACL_ERROR_RT_LOST_HEARTBEAT = 507014, 507054, 507010


def work() -> float:
    value = torch.ones(4, device="npu")
    return (value + 1).sum().item()


@emulated()
def test_a_synchronization_can_fail_once():
    assert work() == 8
    emulator.fail("synchronize", 507046, nth=2)
    torch.npu.synchronize()
    with pytest.raises(RuntimeError, match=r"507046(.|\n)*a fault was injected"):
        torch.npu.synchronize()
    torch.npu.synchronize()
    assert work() == 8


@emulated()
def test_a_copy_can_fail():
    work()
    emulator.fail("memcpy", 507899)
    with pytest.raises(RuntimeError, match="507899"):
        torch.ones(4).to("npu")
    assert work() == 8


@emulated()
def test_faults_end_with_their_block():
    with emulator.faults():
        emulator.fail("synchronize", 507899, times=-1)
        with pytest.raises(RuntimeError, match="507899"):
            torch.npu.synchronize()
    torch.npu.synchronize()


@emulated()
def test_a_fault_may_name_functions():
    value = torch.ones(4, device="npu")
    torch.npu.synchronize()
    emulator.fail("aclnnExpGetWorkspaceSize", 561003)
    with pytest.raises(RuntimeError, match="561003"):
        value.exp()
    assert (value + 1).sum().item() == 8


@emulated(fresh=True)
def test_failed_launch_is_reported_by_next_synchronization():
    value = torch.ones(4, device="npu")
    torch.npu.synchronize()
    emulator.fail("launch", 507899)
    with pytest.raises(RuntimeError, match="aclnnAdds"):
        (value + 1).sum().item()


@emulated(fresh=True)
def test_failed_kernel_stops_its_stream_and_waiting_streams():
    value, other = torch.ones(4, device="npu"), torch.ones(4, device="npu")
    side, waiting, alone = torch.npu.Stream(), torch.npu.Stream(), torch.npu.Stream()
    torch.npu.synchronize()
    emulator.fail("task", ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR)
    with torch.npu.stream(side):
        value.add_(1)
        made = torch.npu.Event()
        made.record()
    made.wait(waiting)
    with torch.npu.stream(alone):
        other.add_(1)
    with pytest.raises(RuntimeError, match="507054"):
        waiting.synchronize()
    with pytest.raises(RuntimeError, match=r"aclnnInplaceAdds: a fault was injected(.|\n)*507054"):
        side.synchronize()
    alone.synchronize()
    with torch.npu.stream(alone):
        assert other.tolist() == [2] * 4


@emulated(fresh=True)
def test_failed_operator_reports_name_and_reason():
    table, index = torch.zeros(4, 4, device="npu"), torch.tensor([9], device="npu")
    torch.npu.synchronize()
    with pytest.raises(RuntimeError, match="507015"):
        table.index_select(0, index).cpu()


@emulated()
def test_hanging_stream_continues_after_heal():
    value = torch.zeros(4, device="npu")
    side = torch.npu.Stream()
    torch.npu.synchronize()
    emulator.hang()
    value.add_(1)
    done = torch.npu.Event()
    done.record()
    released = threading.Timer(0.1, emulator.heal)
    released.start()
    with torch.npu.stream(side):
        assert torch.ones(4, device="npu").sum().item() == 4  # other streams continue
    assert not done.query()
    done.synchronize()
    assert value.tolist() == [1] * 4
    released.join()


@emulated()
def test_synchronization_timeout():
    lib = ctypes.CDLL("libascendcl.so")
    stream = ctypes.c_void_p()
    assert lib.aclrtCreateStream(ctypes.byref(stream)) == 0
    address = ctypes.c_void_p()
    assert lib.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(4096), 0) == 0
    emulator.hang()
    assert lib.aclrtMemsetAsync(address, ctypes.c_size_t(8), 1, ctypes.c_size_t(8), stream) == 0
    assert lib.aclrtSynchronizeStreamWithTimeout(stream, 20) == 507046
    emulator.heal()
    assert lib.aclrtSynchronizeStreamWithTimeout(stream, -1) == 0
    assert lib.aclrtDestroyStream(stream) == 0
    assert lib.aclrtFree(address) == 0
    assert lib.aclrtSynchronizeStream(stream) == 107003


@emulated(fresh=True)
def test_lost_device_fails_all_device_calls():
    value = torch.ones(4, device="npu")
    torch.npu.synchronize()
    emulator.lose_device()
    for call in (torch.npu.synchronize, lambda: torch.ones(4).to("npu"), lambda: value.cpu()):
        with pytest.raises(RuntimeError, match=str(ACL_ERROR_RT_LOST_HEARTBEAT)):
            call()


@emulated()
def test_calls_are_logged_by_name_and_thread_with_marks():
    value = torch.ones(4, device="npu")
    torch.npu.synchronize()
    emulator.clear_calls()
    emulator.mark("one")
    value.add_(1)
    torch.npu.synchronize()
    emulator.mark("two")
    calls = emulator.calls()
    names = [call.name for call in calls]
    assert names[0] == "# one"
    assert names[-1] == "# two"
    assert names.count("aclnnInplaceAdds") == 1
    assert names[-2] == "aclrtSynchronizeDeviceWithTimeout"
    threads = {call.name: call.thread for call in calls}
    assert threads["aclnnInplaceAddsGetWorkspaceSize"] == threading.get_native_id()
    assert threads["aclnnInplaceAdds"] != threading.get_native_id()  # the plugin's launching thread
    emulator.clear_calls()
    assert emulator.calls() == []


@emulated()
def test_the_log_keeps_the_latest_calls():
    emulator.clear_calls()
    for number in range(262_144 + 10):
        emulator._lib().emu_mark(b"x" if number < 262_144 else b"y")
    calls = emulator.calls()
    assert len(calls) == 262_144
    assert [call.name for call in calls].count("y") == 10


@emulated()
def test_profiler_records_host_and_refuses_device(tmp_path: Path):
    import torch_npu

    work()
    with torch_npu.profiler.profile(on_trace_ready=torch_npu.profiler.tensorboard_trace_handler(str(tmp_path))):
        work()
    (trace,) = tmp_path.rglob("trace_view.json")
    assert "aten::add" in {event["name"] for event in json.loads(trace.read_text())}
    lib = ctypes.CDLL("libascendcl.so")
    assert lib.aclprofInit(b"folder", ctypes.c_size_t(6)) == 200006
    lib.aclGetRecentErrMsg.restype = ctypes.c_char_p
    assert b"no profile of the device" in lib.aclGetRecentErrMsg()


@emulated()
def test_invalid_argument_raises():
    with pytest.raises(ValueError, match="nth must be 1 or more"):
        emulator.fail("malloc", 1, nth=0)
    with pytest.raises(emulator.EmulatorError, match="active with other options"):
        emulator.activate(order="eager")
    emulator.activate()  # again with equal options


def wait_without_end() -> None:
    threading.Event().wait()


@needs_npu
def test_time_limit_of_a_test_ends_the_process_with_its_answer(monkeypatch: pytest.MonkeyPatch):
    def ends(stream: BinaryIO) -> None:
        raise TimeoutError

    assert run(work, {}, {}) == 8
    monkeypatch.setattr(child, "_read", ends)
    with pytest.raises(TimeoutError):
        run(wait_without_end, {}, {})
    monkeypatch.undo()
    assert run(work, {}, {}) == 8
