"""Errors of the device, as a rank reports them to its parent."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from npuserve.npu.backends.base import CaptureError
from npuserve.service.ranks import faults
from npuserve.service.ranks.processes import wait


def test_capture_error_is_reported_if_captures_may_be_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    error = CaptureError("device: no memory is left to capture steps")
    assert not faults.report_capture_error(False, error)
    assert not faults.report_capture_error(True, ValueError("another"))
    assert capsys.readouterr().out == ""
    assert faults.report_capture_error(True, error)
    assert json.loads(capsys.readouterr().out) == {"event": "capture_failed", "error": str(error)}


@pytest.mark.parametrize("event", ["capture_failed", "unusable"])
def test_wait_returns_the_event_with_the_error(event: str) -> None:
    said = json.dumps({"event": event, "error": "why"})
    program = f"import sys; print('{{\"event\": \"heartbeat\"}}'); print('{said}'); sys.exit(3)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert wait(process) == (3, {"event": event, "error": "why"})


def test_wait_logs_what_libraries_print(caplog: pytest.LogCaptureFixture) -> None:
    program = """print("Warning: a variable is not set"); print('{"event": "unusable", "error": "why"}')"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    with caplog.at_level("INFO"):
        assert wait(process) == (0, {"event": "unusable", "error": "why"})
    assert any("rank said" in record.getMessage() for record in caplog.records)
