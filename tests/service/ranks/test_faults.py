"""Errors of the device, as a rank reports them to its parent."""

from __future__ import annotations

import errno
import json
import subprocess
import sys

import pytest

from npuserve.npu import backends
from npuserve.npu.backends.base import CaptureError
from npuserve.npu.backends.faults import Fault
from npuserve.service.config import ServerConfig
from npuserve.service.processes import child
from npuserve.service.ranks import faults, processes


def test_capture_error_is_reported_if_captures_may_be_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    error = CaptureError("device: no memory is left to capture steps")
    assert not faults.report_capture_error(False, error)
    assert not faults.report_capture_error(True, ValueError("another"))
    assert capsys.readouterr().out == ""
    assert faults.report_capture_error(True, error)
    assert json.loads(capsys.readouterr().out) == {"event": "capture_failed", "error": str(error), "next_mode": "off"}
    error.next_mode = "decoder"
    assert faults.report_capture_error(True, error)
    assert json.loads(capsys.readouterr().out)["next_mode"] == "decoder"


@pytest.mark.parametrize(("found", "may_drop", "error", "code"), [
    (Fault.RETRYABLE, False, RuntimeError("lost"), child.EXIT_DEVICE_FAULT),
    (Fault.ENGINE, False, RuntimeError("lost"), child.EXIT_DEVICE_FAULT),
    (Fault.NODE, True, RuntimeError("lost"), child.EXIT_NODE_FAULT),
    (Fault.NODE, False, CaptureError("no memory"), child.EXIT_NODE_FAULT),
    (Fault.NODE, True, CaptureError("no memory"), child.EXIT_DEVICE_FAULT),
])
def test_fault_code_is_that_of_the_device_unless_captures_are_dropped(
    found: Fault, may_drop: bool, error: Exception, code: int, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(backends, "fault", lambda error: found)
    assert faults.fault_code(error, may_drop) == code
    (record,) = caplog.records
    assert record.fields == {"fault": found.value, "error": str(error)}  # type: ignore[attr-defined]


def test_fault_code_raises_other_errors() -> None:
    with pytest.raises(ZeroDivisionError):
        faults.fault_code(ZeroDivisionError(), True)


def test_start_code_tells_captures_from_an_unusable_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert faults.start_code(CaptureError("no memory"), True) == child.EXIT_DEVICE_FAULT
    assert faults.start_code(CaptureError("no memory"), False) == child.UNUSABLE
    assert faults.start_code(OSError(errno.ENOENT, "no file"), True) == child.UNUSABLE
    assert [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()] == [
        "capture_failed", "unusable", "unusable"]
    with pytest.raises(OSError, match="too many"):  # it may succeed later
        faults.start_code(OSError(errno.EMFILE, "too many"), True)


def test_start_code_of_an_error_before_torch_is_needed_imports_no_torch() -> None:
    program = ("import sys; from npuserve.service.ranks.faults import start_code; "
               "code = start_code(ValueError('kv_events: the port is taken'), True); "
               "sys.exit(code if 'torch' not in sys.modules else 9)")
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == child.UNUSABLE


def ended(monkeypatch: pytest.MonkeyPatch, program: str) -> tuple[int, dict[str, str]]:
    """Run a program in place of a rank. Return its exit code, and the event with its error."""
    reading = f"import sys; sys.stdin.readline()\n{program}"
    monkeypatch.setattr(processes, "PROCESS", (sys.executable, "-c", reading))
    rank = processes.RankProcess(processes.RankArgs(ServerConfig(), ".", 1, "127.0.0.1:1", 2))
    return rank.run(), rank.error


@pytest.mark.parametrize("event", ["capture_failed", "unusable"])
def test_run_keeps_the_event_with_the_error(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = json.dumps({"event": event, "error": "why"})
    program = f"import sys; print('{{\"event\": \"heartbeat\"}}'); print('{said}'); sys.exit(3)"
    assert ended(monkeypatch, program) == (3, {"event": event, "error": "why"})


def test_run_logs_what_libraries_print(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    program = """print("Warning: a variable is not set"); print('{"event": "unusable", "error": "why"}')"""
    with caplog.at_level("INFO"):
        assert ended(monkeypatch, program) == (0, {"event": "unusable", "error": "why"})
    assert any("rank said" in record.getMessage() for record in caplog.records)
