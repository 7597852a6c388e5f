"""Errors of devices at run time: the required reaction, and their meaning."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum


class Fault(Enum):
    """Required reaction to a device error at run time.

    In each case the engine process exits. After RETRYABLE and ENGINE the supervisor restarts it, and the front ends
    submit its requests again; after NODE the server exits. service/processes/child.py defines the exit codes. A failed
    step is never repeated in place, because part of it has already sampled, counted and written.
    """

    RETRYABLE = "retryable"
    """A resource was exhausted or an operation timed out; the same work may succeed on retry."""
    ENGINE = "engine"
    """The process's state on the device is lost."""
    NODE = "node"
    """The device, its driver or its interconnect is defective; a restart on this node does not help."""


class DeviceErrors:
    """Errors that a device's software raises. These are none."""

    def fault(self, error: BaseException) -> Fault | None:
        """Return the reaction to an error at run time; None if this device did not cause it."""
        return None

    def explain(self, error: BaseException) -> str:
        """Return the meaning of a device error and advice, for a log line; "" if there is none."""
        return ""

    def explain_code(self, code: int) -> str:
        """Return name, meaning and advice of an error code of the device's software; "" for an unknown one."""
        return ""

    def is_capture_error(self, error: BaseException) -> bool:
        """Return True for an error at run time that does not occur without captured steps."""
        return False


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, each once. An error that is raised again can cause itself."""
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in seen:
        yield each
        seen.append(each)
        each = each.__cause__ or each.__context__
