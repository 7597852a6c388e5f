"""Classification of CANN errors: at start one sentence of advice, at run time a `Fault`.

acl/acl_base_rt.h, acl/error_codes/rt_error_codes.h and ge_error_codes.h define the codes. The first digit of a code is
its documented class: 1 an incorrect call, 2 an exhausted resource, 5 an internal error of the device or its software.
"""

from __future__ import annotations

import ctypes
import re

import torch

from npuserve.npu.backends.ascend.functions import runtime
from npuserve.npu.backends.faults import DeviceErrors, Fault, causes
from npuserve.npu.cann.codes import (
    CODES,
    MORE_MEMORY,
    OLD_DRIVER,
    TEXTS,
    UPDATE_DRIVER,
    VISIBLE,
    ErrorCode,
)

_CODE = re.compile(r"error code is (\d{6})|\b(?:errorCode|retCode|error code)[:= ]+(?:0x[0-9a-fA-F]+, )?(\d{6})")

_OPERATOR = re.compile(r"working operator name is (\w+)|\bcall (aclnn\w+) failed")
"""Names of failed operators in messages of torch_npu: of its own thread, and of the calling one."""

_CALL_FAILED = re.compile(r"\bERR\d\d100 \w+ call acl api failed|\bHCCL function error: ")
"""Messages of torch_npu without an ACL error code. A launch failed on torch_npu's own thread, after the call returned.
Its code is only on stderr: "The Inner error is reported as above". Or HCCL failed, which has codes of its own."""

FAULTS: tuple[tuple[int, int, Fault], ...] = (
    # A later range is contained in an earlier one. It takes precedence.
    (100000, 199999, Fault.ENGINE),  # parameters, contexts, streams, captures; refusals of operators (16xxxx)
    (107001, 107001, Fault.NODE),  # no such device
    (107019, 107020, Fault.RETRYABLE),  # a wait or a task timed out
    (200000, 299999, Fault.RETRYABLE),  # memory, streams, events, queues
    (200001, 200002, Fault.NODE),  # API not supported, no such device
    (207000, 207000, Fault.NODE),  # feature not supported: the driver is too old
    (207003, 207003, Fault.ENGINE),  # AI core overflow
    (207004, 207004, Fault.NODE),  # no device
    (207006, 207006, Fault.NODE),  # no permission
    (207016, 207017, Fault.ENGINE),  # overflow
    (207019, 207019, Fault.NODE),  # feature not supported: the driver is too old
    (300000, 399999, Fault.ENGINE),
    (500000, 599999, Fault.ENGINE),  # AI core and AI CPU exceptions and timeouts, memory errors that a restart repairs
    (500004, 500004, Fault.NODE),  # driver
    (507002, 507002, Fault.RETRYABLE),  # the stream is full
    (507008, 507008, Fault.NODE),  # wrong chip
    (507010, 507010, Fault.NODE),  # lost heartbeat of the device
    (507033, 507033, Fault.NODE),  # the device cannot be set up
    (507054, 507054, Fault.NODE),  # uncorrectable error of the device's memory in several bits
    (507056, 507056, Fault.NODE),  # link between devices
    (507899, 507899, Fault.NODE),  # driver
    (507901, 507901, Fault.NODE),  # no connection to the device
    (507914, 507914, Fault.NODE),  # port
)

INVALIDATED = 507903
"""Code of the end of a capture within which a launch failed. The failure may have another code."""
_CAPTURES = frozenset((*range(107024, 107035), *range(107036, 107042), 107045, INVALIDATED))
"""Codes that only captures, replays and updates of graphs raise."""
_BUSY = (207005, 207008, 507899)
"""Further codes of a device that cannot be opened: its streams are taken. During a capture they have other causes
(`CODES`)."""


class OperatorFailed(RuntimeError):
    """Failure of a call within a captured step.

    operator: name of the operator that was called, such as aten::sort; "" if torch_npu launched it on its own thread
        and has called others since.
    """

    def __init__(self, message: str, operator: str):
        super().__init__(message)
        self.operator = operator


class AclError(RuntimeError):
    """Failed call of CANN, with CANN's error code and text in the message."""


def check(code: int, name: str) -> None:
    """Raise AclError unless a call of CANN's function `name` returned 0."""
    if code:
        latest = runtime().aclGetRecentErrMsg
        latest.restype = ctypes.c_char_p
        text = latest() or b""
        raise AclError("\n".join((f"{name}: error code is {code}", text.decode(errors="replace"))))


def _messages(error: BaseException) -> list[str]:
    return [str(each) for each in causes(error)]


def code_of(error: BaseException) -> int | None:
    """Return the ACL error code in the message of an error or of one of its causes.

    For an invalidated capture it is the code of the launch that failed within, if the chain has it.
    """
    codes = [int(match[1] or match[2]) for match in map(_CODE.search, _messages(error)) if match]
    return next((code for code in codes if code != INVALIDATED), codes[0] if codes else None)


def sort(code: int) -> Fault | None:
    """Return the fault of an ACL error code; None if the code is outside all ranges."""
    return next((fault for first, last, fault in reversed(FAULTS) if first <= code <= last), None)


def fault_of(error: BaseException) -> Fault | None:
    """Return the fault of an error; None if the device did not cause it."""
    code = code_of(error)
    if code is not None:
        return sort(code)
    if isinstance(error, torch.OutOfMemoryError):
        return Fault.RETRYABLE
    # Whether the device is lost is found at the next start.
    return Fault.ENGINE if is_failed_launch(error) else None


def is_failed_launch(error: BaseException) -> bool:
    """Return True if a launch failed on torch_npu's own thread, and no message has its code."""
    return code_of(error) is None and any(map(_CALL_FAILED.search, _messages(error)))


def known(error: BaseException) -> ErrorCode | None:
    """Return the entry of `codes` for an error or one of its causes; None if it has none."""
    texts = "\n".join(_messages(error)).lower()
    by_text = next((entry for text, entry in TEXTS.items() if text.lower() in texts), None)
    code = code_of(error)
    return by_text or (CODES.get(code) if code is not None else None)


def explain(error: BaseException) -> str:
    """Return the meaning of an error of a running step with advice; "" if `codes` has none.

    `capture_advice` explains errors of captures, and `advice` errors of a device that does not start.
    """
    known_code = known(error)
    return known_code.explain() if known_code else ""


def explain_code(code: int) -> str:
    """Return name, meaning and advice of a code; "" for an unknown one."""
    known_code = CODES.get(code)
    if not known_code:
        return ""
    running = f". In a step after a successful start: {'; '.join(known_code.running)}" if known_code.running else ""
    return f"{known_code.name}: {known_code.meaning}; {known_code.advice}{running}"


def is_capture_error(error: BaseException) -> bool:
    """Return True for errors that only captured graphs raise."""
    known_code = known(error)
    code = code_of(error)
    return code in _CAPTURES or (known_code is not None and known_code.is_capture)


def capture_advice(error: BaseException) -> str | None:
    """Return why steps cannot be captured, with advice; None if the step itself raised the error."""
    known_code = known(error)
    code = code_of(error)
    operator = _operator_of(error)
    number = f" (error {code})" if code is not None else ""
    refused = f"steps cannot be captured with {operator}" if operator else "steps cannot be captured"
    if known_code is not None and known_code.advice in (OLD_DRIVER, UPDATE_DRIVER):
        return f"{refused}, {known_code.meaning}{number}: {OLD_DRIVER}"
    if fault_of(error) is Fault.RETRYABLE:
        return f"{refused}, the device is short of memory or of a resource{number}: {MORE_MEMORY}"
    if is_capture_error(error):
        return f"{refused}{number}: {known_code.advice if known_code else OLD_DRIVER}"
    if operator and fault_of(error) is not None:
        return f"{refused}{number}: send this line as a bug report"
    return None


def _operator_of(error: BaseException) -> str:
    """Return the name of the operator that failed; "" if it is unknown.

    torch_npu names it where its own thread launched it. Otherwise it is the one that was called last.
    """
    if named := next(filter(None, map(_OPERATOR.search, _messages(error))), None):
        return named[1] or named[2]
    return next((each.operator for each in causes(error) if isinstance(each, OperatorFailed)), "")


def advice(error: BaseException) -> str:
    """Return why the device cannot be started, with advice, in one sentence."""
    text = str(error)
    code = code_of(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if isinstance(error, ImportError):
        library = re.search(r"(lib\w+\.so[\w.]*): cannot open shared object file", text)
        if library:
            return (f"CANN is not found ({library[1]} cannot be loaded): install the CANN toolkit and source its "
                    "set_env.sh, or run in a CANN container")
        return f"torch_npu cannot be imported ({first}): its version must be that of torch and fit CANN"
    if isinstance(error, torch.OutOfMemoryError):
        return "the device has no memory left: end the processes that npu-smi info lists, or take another device"
    known_code = known(error)
    if code in _BUSY or (known_code is not None and known_code.advice == VISIBLE):
        return f"the NPU cannot be opened (error {code}): {VISIBLE}"
    if known_code is not None and known_code.advice in (OLD_DRIVER, UPDATE_DRIVER):
        return f"the NPU driver is too old for this CANN (error {code}): {UPDATE_DRIVER}"
    return f"the NPU cannot be started ({first[:200]}): npu-smi info shows its state, and CANN's logs say more"


class AscendErrors(DeviceErrors):
    """Errors of CANN and torch_npu."""

    def fault(self, error: BaseException) -> Fault | None:
        return fault_of(error)

    def explain(self, error: BaseException) -> str:
        return explain(error)

    def explain_code(self, code: int) -> str:
        return explain_code(code)

    def is_capture_error(self, error: BaseException) -> bool:
        return is_capture_error(error)
