"""Errors of the device as the processes of a model's ranks, the engine among them, report them and end."""

from __future__ import annotations

import logging
import sys

from npuserve.service import logs
from npuserve.service.processes import child

log = logging.getLogger(__name__)

CAPTURE_FAILED = "capture_failed"
"""Event by which a process reports that steps cannot be captured, with the fields `error` and `next_mode`."""

_held: list[Exception] = []
"""Errors whose frames must live until the exit: to destroy a graph whose replay waits forever would block."""


def start_code(error: Exception, may_drop_captures: bool) -> int:
    """Report an error of the start to the parent process and return the exit code. Raise a transient error again."""
    if child.is_transient(error):
        raise error
    return child.EXIT_DEVICE_FAULT if report_capture_error(may_drop_captures, error) else child.report_unusable(error)


def fault_code(error: Exception, may_drop_captures: bool) -> int:
    """Log an error of the device and return the exit code for it. Raise any other error again."""
    _held.append(error)
    from npuserve.npu.backends import explain, fault
    from npuserve.npu.backends.faults import Fault

    device_fault = fault(error)
    if device_fault is None:
        raise error
    advice = explain(error)
    logs.event(log, "device fault", level=logging.CRITICAL, fault=device_fault.value, error=str(error),
               **{"advice": advice} if advice else {})
    is_cured = report_capture_error(may_drop_captures, error) or device_fault is not Fault.NODE
    return child.EXIT_DEVICE_FAULT if is_cured else child.EXIT_NODE_FAULT


def report_capture_error(may_drop: bool, error: Exception) -> bool:
    """Report an error of captured steps to the parent process, so that the next engine captures less, or nothing.

    may_drop: the settings allow steps that are not captured, and this process captures steps.

    Return False, and report nothing, for other errors, and where `may_drop` is False.
    """
    if "torch" not in sys.modules:  # nothing was captured, and its import would take seconds
        return False
    from npuserve.npu.backends import explain, is_capture_error
    from npuserve.npu.backends.base import CaptureError

    if not may_drop or not (isinstance(error, CaptureError) or is_capture_error(error)):
        return False
    _held.append(error)
    next_mode = error.next_mode if isinstance(error, CaptureError) else "off"
    child.report(CAPTURE_FAILED, error=explain(error) or str(error), next_mode=next_mode)
    return True


def may_drop_captures(setting: str, capture: str) -> bool:
    """Return True if a process captures steps, and the next one may capture less.

    setting: the setting `capture`. capture: mode that replaces it after a failure; "" for none.
    """
    return setting in ("auto", "decoder") and capture != "off"
