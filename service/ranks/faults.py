"""Errors of the device as the processes of a model's ranks, the engine among them, report them and end."""

from __future__ import annotations

import logging

from npuserve.service import logs
from npuserve.service.ipc import child

log = logging.getLogger(__name__)

CAPTURE_FAILED = "capture_failed"
"""Event by which a process reports that steps cannot be captured, with the field `error`."""

_held: list[Exception] = []
"""Errors whose frames must live until the exit: to destroy a graph whose replay waits forever would block."""


def fault_code(error: Exception) -> int | None:
    """Log an error of the device and return the exit code for it; None for any other error."""
    _held.append(error)
    from npuserve.npu.backends import explain, fault
    from npuserve.npu.backends.base import Fault

    found = fault(error)
    if found is None:
        return None
    advice = explain(error)
    logs.event(log, "device fault", level=logging.CRITICAL, fault=found.value, error=str(error),
               **{"advice": advice} if advice else {})
    return child.EXIT_NODE_FAULT if found is Fault.NODE else child.EXIT_DEVICE_FAULT


def report_capture_error(may_drop: bool, error: Exception) -> bool:
    """Report an error of captured steps to the parent process, so that the next engine captures none.

    may_drop: the settings allow steps that are not captured, and this process captures steps.

    Return False, and report nothing, for other errors, and where `may_drop` is False.
    """
    from npuserve.npu.backends import explain, is_capture_error
    from npuserve.npu.backends.base import CaptureError

    if not may_drop or not (isinstance(error, CaptureError) or is_capture_error(error)):
        return False
    _held.append(error)
    child.report(CAPTURE_FAILED, error=explain(error) or str(error))
    return True
