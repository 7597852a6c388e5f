from __future__ import annotations

import importlib.util
import re
import time
from pathlib import Path

import pytest
import torch

from npuserve.npu import backends, emulator
from npuserve.npu.backends.ascend import fault_codes, graphs
from npuserve.npu.backends.base import CaptureError
from npuserve.npu.backends.faults import Fault
from npuserve.npu.cann import codes
from npuserve.npu.step import LostStep, NewRequest, Row, Step
from tests.npu.backends.ascend.test_backend import load
from tests.npu.backends.small import GREEDY, saved
from tests.npu.emulator.child import emulated

# Messages of torch_npu (NPU_CHECK_ERROR and OPS_CHECK_ERROR in NPUException.h).
NPU = ("synchronize:build/csrc/core/npu/NPUStream.cpp:466 NPU function error: aclrtSynchronizeStreamWithTimeout, "
       "error code is {}\n[ERROR] 2026-11-20-12:00:00 (PID:1, Device:0, RankID:-1) ERR00100 PTA call acl api failed")
OPS = "build/op.cpp:8 OPS function error: aclnnMm, error code is {}\n[ERROR] ERR01100 OPS call acl api failed"


@pytest.mark.parametrize(("code", "fault"), [
    (100000, Fault.ENGINE), (107000, Fault.ENGINE), (107001, Fault.NODE), (107019, Fault.RETRYABLE),
    (107027, Fault.ENGINE), (161002, Fault.ENGINE), (361001, Fault.ENGINE), (561103, Fault.ENGINE),
    (200000, Fault.RETRYABLE), (207000, Fault.NODE), (207001, Fault.RETRYABLE), (207004, Fault.NODE),
    (207006, Fault.NODE), (207008, Fault.RETRYABLE), (207018, Fault.RETRYABLE), (245000, Fault.RETRYABLE),
    (507002, Fault.RETRYABLE), (507010, Fault.NODE), (507014, Fault.ENGINE), (507015, Fault.ENGINE),
    (507018, Fault.ENGINE), (507035, Fault.ENGINE), (507046, Fault.ENGINE), (507053, Fault.ENGINE),
    (507054, Fault.NODE), (507056, Fault.NODE), (507899, Fault.NODE), (507901, Fault.NODE),
])
def test_sort_code_returns_fault(code, fault):
    assert fault_codes.sort(code) is fault
    for text in (NPU, OPS):
        error = RuntimeError(text.format(code))
        assert fault_codes.code_of(error) == code
        assert backends.fault(error) is fault


def test_faults_ranges_are_ordered_and_nested():
    ranges = [(first, last) for first, last, _ in fault_codes.FAULTS]
    wide = [r for r in ranges if r[1] - r[0] > 1000]
    assert all(first <= last for first, last in ranges)
    assert ranges == sorted(ranges)
    for narrow in set(ranges) - set(wide):
        assert sum(first <= narrow[0] and narrow[1] <= last for first, last in wide) == 1
    assert fault_codes.sort(0) is fault_codes.sort(99999) is fault_codes.sort(400000) is None


def test_fault_of_other_error_is_none():
    for error in (ValueError("max_num_seqs: 0 is not in [1, 5]"), RuntimeError("shape [107001]"), KeyError(507015)):
        assert backends.fault(error) is None
    assert backends.fault(torch.OutOfMemoryError("NPU out of memory. Tried to allocate 2.00 GiB")) is Fault.RETRYABLE


def test_code_of_error_with_cause_is_found():
    error = RuntimeError("the step failed")
    error.__cause__ = RuntimeError(NPU.format(507015))
    assert fault_codes.code_of(error) == 507015
    assert backends.fault(error) is Fault.ENGINE


def test_fault_of_error_that_is_its_own_cause():
    first, second = RuntimeError("the capture failed"), RuntimeError("the device is blocked")
    first.__cause__, second.__context__ = second, first
    assert backends.fault(first) is None
    assert backends.explain(first) == ""


def test_fault_of_late_launch_failure_without_code():
    error = RuntimeError(
        "The Inner error is reported as above. The process exits for this inner error, and the current working "
        "operator name is aclnnInplaceCopy.\nSince the operator is called asynchronously, the stacktrace may be "
        "inaccurate.\n"
        "[ERROR] 2026-11-20-14:41:36 (PID:1, Device:0, RankID:-1) ERR00100 PTA call acl api failed.")
    assert fault_codes.code_of(error) is None
    assert backends.fault(error) is Fault.ENGINE
    wrong = RuntimeError("[ERROR] 2026-11-20-12:00:00 (PID:1, Device:0, RankID:-1) ERR01002 OPS invalid type")
    assert backends.fault(wrong) is None


def test_fault_of_a_failed_call_of_hccl():
    error = RuntimeError(
        "create_config:HCCLUtils.cpp:115 HCCL function error: hcclCommInitRootInfoConfig(...), error code is 1 [ERROR] "
        "2026-11-20-12:00:00 (PID:1, Device:0, RankID:0) ERR02200 DIST call hccl api failed.")
    assert fault_codes.code_of(error) is None
    assert backends.fault(error) is Fault.ENGINE
    assert backends.explain(error) == f"HCCL refused a call of this rank: {codes.RANKS}"


def test_capture_advice_names_the_expansion_mode_of_hccl():
    assert fault_codes.capture_advice(RuntimeError(NPU.format(507009))) == (
        "steps cannot be captured (error 507009): unset HCCL_OP_EXPANSION_MODE, or serve with --capture off")


@pytest.mark.parametrize(("error", "said", "to_do"), [
    (ImportError("libascendcl.so: cannot open shared object file: No such file"), "CANN is not found", "set_env.sh"),
    (ImportError("libhccl.so.1: cannot open shared object file"), "libhccl.so.1", "install the CANN toolkit"),
    (ImportError("libtorch_npu.so: undefined symbol: _ZN3c10"), "undefined symbol", "must be that of torch"),
    (RuntimeError(NPU.format(207000)), "driver is too old", "25.5.1 or later"),
    (RuntimeError(NPU.format(107001)), "cannot be opened (error 107001)", "ASCEND_RT_VISIBLE_DEVICES"),
    (RuntimeError(NPU.format(507033)), "cannot be opened (error 507033)", "/dev/davinci"),
    (torch.OutOfMemoryError("NPU out of memory"), "no memory left", "npu-smi info"),
    (RuntimeError("something new\nand more"), "cannot be started (something new)", "CANN's logs"),
])
def test_advice_for_device_that_does_not_start(error, said, to_do):
    sentence = fault_codes.advice(error)
    assert said in sentence
    assert to_do in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(("text", "said"), [
    (NPU.format(207005), "cannot allocate a captured graph's resources: it is too old (error 207005)"),
    (NPU.format(207008), "no stream for a captured graph: it is too old (error 207008)"),
    (NPU.format(107030), "cannot be replayed: the driver is too old (error 107030)"),
    (NPU.format(207000), "lacks a function of this CANN: it is too old (error 207000)"),
    (NPU.format(107029), "steps cannot be captured (error 107029)"),
    ("[ERROR] TsdOpen: alloc SQ CQ fail, device 0", "no queue for a captured graph's stream: it is too old"),
])
def test_capture_advice_blames_the_driver_and_not_the_buckets(text, said):
    sentence = fault_codes.capture_advice(RuntimeError(text))
    assert sentence is not None
    assert said in sentence
    assert sentence.endswith("driver and firmware to 25.5.1 or later, or serve with --capture off")
    assert "decode_buckets" not in sentence


def test_capture_advice_without_memory_names_settings():
    for error in (torch.OutOfMemoryError("NPU out of memory"), RuntimeError(NPU.format(207018))):
        assert "fewer decode_buckets and a smaller kv_cache_memory" in str(fault_codes.capture_advice(error))
    assert fault_codes.capture_advice(RuntimeError(NPU.format(507015))) is None
    assert fault_codes.capture_advice(RuntimeError("no such file")) is None


@pytest.mark.parametrize(("code", "is_capture"), [
    # Without graphs these cannot occur.
    (107030, True), (107033, True), (107024, True), (107041, True), (107045, True), (207019, True), (507903, True),
    (207005, False), (207008, False), (507015, False), (107003, False), (107035, False), (107042, False)])
def test_errors_at_run_time_that_only_graphs_raise(code, is_capture):
    assert backends.is_capture_error(RuntimeError(NPU.format(code))) is is_capture


@pytest.mark.parametrize(("cause", "code", "said"), [
    (NPU.format(207005), 207005, "a captured graph's resources: it is too old (error 207005)"),
    ("The Inner error is reported as above. ERR00100 PTA call acl api failed.", 507903, "CANN's log (error 507903)"),
])
def test_capture_advice_of_invalidated_capture_names_the_failed_launch(cause, code, said):
    """CANN ends a capture within which a launch failed by 507903, whatever the launch failed by."""
    error = RuntimeError(NPU.format(507903))
    error.__context__ = RuntimeError(cause)
    assert fault_codes.code_of(error) == code
    assert said in str(fault_codes.capture_advice(error))


@pytest.mark.parametrize("nth", ["first", "last"])
@emulated(fresh=True)
def test_ascend_launch_that_fails_within_a_capture_is_a_capture_error(tmp_path: Path, nth: str) -> None:
    """torch_npu then drops all launches, so that this process cannot continue without captures.

    Whether the message has the code of the launch depends on when torch_npu's thread reports it.
    """
    saved(tmp_path)
    capture, captures = graphs.capture, []

    def failing(step, rows, stream, pool):
        def launches(count):
            fails = torch.npu.is_current_stream_capturing() and len(captures) > 2  # after the test of new lengths
            if fails and nth == "first":
                emulator.fail("launch", 207005)
            out = step(count)
            if fails and nth == "last":
                torch.npu.current_stream().npu_stream  # noqa: B018 - empties torch_npu's queue
                emulator.fail("launch", 207005)
                out.add_(1)
            return out

        captures.append(rows)
        return capture(launches, rows, stream, pool)

    graphs.capture = failing
    said = r"steps cannot be captured with aclnn\w+, .*error (207005|507903).: update the Ascend"
    with pytest.raises(CaptureError, match=said):
        load(tmp_path, dtype="bfloat16")


def test_explain_gives_meaning_and_advice():
    assert backends.explain(RuntimeError(NPU.format(507054))) == (
        "the device's memory has an uncorrectable error: " + codes.REPAIR)
    assert backends.explain(RuntimeError(NPU.format(599999))) == backends.explain(ValueError("no")) == ""
    assert backends.explain_code(207005).startswith("ACL_ERROR_RT_RESOURCE_ALLOC_FAIL: the driver cannot allocate")
    assert backends.explain_code(1) == ""


@pytest.mark.parametrize("text", [NPU.format(207005), NPU.format(207008), "TsdOpen: Alloc SQ CQ fail, device 0"])
def test_streams_advice_depends_on_where_they_ran_out(text):
    """In a capture the driver is too old. After a successful start it is not, and streams are used up."""
    error = RuntimeError(text)
    assert "it is too old" in str(fault_codes.capture_advice(error))
    assert backends.explain(error) == (
        "the device has no stream or queue left: end other processes on the device, or serve with fewer "
        "decode_buckets, which take fewer streams")


@pytest.mark.parametrize("code", [207005, 207008])
def test_explain_code_has_both_cases_of_streams(code):
    said = backends.explain_code(code)
    assert said.index("it is too old") < said.index("In a step after a successful start: the device has no stream")
    assert "cannot be opened" in fault_codes.advice(RuntimeError(NPU.format(code)))


def test_codes_equal_headers_of_torch_npu():
    """Names and numbers, where the wheel of torch_npu with CANN's headers is installed."""
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        pytest.skip("torch_npu is not installed")
    headers = Path(spec.origin).parent / "include" / "third_party" / "acl" / "inc" / "acl"
    text = "".join(file.read_text() for file in sorted(headers.rglob("*.h")))
    for code, entry in codes.CODES.items():
        assert re.search(rf"\b{entry.name}\s*=?\s*{code}\b", text), (code, entry.name)


@pytest.mark.parametrize(("code", "fault"), [(507015, Fault.ENGINE), (507010, Fault.NODE), (507014, Fault.ENGINE)])
@emulated(fresh=True)
def test_ascend_device_error_is_raised_by_its_step(tmp_path: Path, code: int, fault: Fault) -> None:
    saved(tmp_path)
    runner = load(tmp_path, dtype="bfloat16")
    emulator.fail("task", code)
    launched = runner.launch(Step([Row(1, [1, 2], 0, [0], True)], [NewRequest(1, [1, 2], [], GREEDY)]))
    with pytest.raises(RuntimeError) as raised:
        runner.collect(launched)
    assert backends.fault(raised.value) is fault


@emulated(fresh=True)
def test_ascend_step_after_an_unreported_failure_is_lost(tmp_path: Path) -> None:
    """torch_npu reports a failed launch once, here to the destructor of an event, and then drops its queue's work."""
    saved(tmp_path)
    runner = load(tmp_path, dtype="bfloat16")
    runner.collect(runner.launch(Step([Row(1, [1, 2], 0, [0], True)], [NewRequest(1, [1, 2], [], GREEDY)])))
    event = torch.npu.Event()
    event.record()
    runner.backend.synchronize()
    emulator.clear_calls()
    emulator.fail("launch", 107003)
    torch.ones(3, device=runner.backend.device)
    while not any(call.name.startswith("aclnn") for call in emulator.calls()):
        time.sleep(0.01)
    time.sleep(0.2)  # torch_npu's thread takes the failure in
    del event
    with pytest.raises(LostStep) as raised:
        runner.collect(runner.launch(Step([Row(1, [3], 2, [0], True)])))
    assert backends.fault(raised.value) is Fault.ENGINE
