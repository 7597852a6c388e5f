"""Table of CANN's error codes that the operator of a server meets: name, meaning, advice.

Errors at the start, the log line `device fault`, `npuserve check --explain CODE` and docs/ascend.md use them. CANN's
headers acl/error_codes/rt_error_codes.h and acl/acl_base_rt.h have the names and numbers. Issues 2629, 8393, 6002 and
7227 and pull request 10555 of https://github.com/vllm-project/vllm-ascend name an old driver as the cause of 207005,
207008, 107030 and "Alloc sq cq fail" in a capture. After a successful start the cause is another: streams and their
queues belong to the device and not to a process. Another server takes them (issue 5213), or a virtual device has few
(issue 8585).
"""

from __future__ import annotations

from typing import NamedTuple

MIN_DRIVER = "25.5.1"
"""First Ascend HDK with which captured graphs are known to work."""

UPDATE_DRIVER = f"update the Ascend HDK driver and firmware to {MIN_DRIVER} or later"
OLD_DRIVER = f"{UPDATE_DRIVER}, or serve with --capture off"
TOO_OLD = f"the NPU driver is too old for captured graphs: {OLD_DRIVER}"
MORE_MEMORY = "end other processes on the device; fewer decode_buckets and a smaller kv_cache_memory take less"
FEWER_STREAMS = "end other processes on the device, or serve with fewer decode_buckets, which take fewer streams"
VISIBLE = ("check with npu-smi info that the device is healthy and free, that ASCEND_RT_VISIBLE_DEVICES names it, and "
           "that this user may open /dev/davinci*")
SEND_LOG = "the engine is restarted; if it repeats, run npuserve check --accept and send the file of npuserve collect"
REPAIR = "see npu-smi info: the device, its driver or its links need a repair"

MATCHING = "install the versions of torch_npu and CANN that docs/ascend.md pairs"

RANKS = "the group is restarted; the first error in the logs of its ranks names the cause"

_NO_FUNCTION = "the driver lacks a function of this CANN: it is too old"
_NO_LENGTHS = "a captured graph takes no new lengths: the driver is too old"
_NO_MEMORY = "the device has no memory left"
_NO_STREAMS = "the device has no stream or queue left"


class ErrorCode(NamedTuple):
    """Error of CANN.

    name: identifier in CANN's headers; for an error without a code the text in its log.
    is_capture: only graphs raise it, so that a server without captured steps avoids it.
    running: meaning and advice after a successful start, in a step; None if they are the same.
    """

    name: str
    meaning: str
    advice: str
    is_capture: bool = False
    running: tuple[str, str] | None = None

    def explain(self) -> str:
        """Return meaning and advice of the error in a step."""
        return ": ".join(self.running or (self.meaning, self.advice))


CODES: dict[int, ErrorCode] = {
    107001: ErrorCode("ACL_ERROR_RT_INVALID_DEVICEID", "there is no device of this number", VISIBLE),
    107020: ErrorCode("ACL_ERROR_RT_TASK_TIMEOUT", "a task took too long", SEND_LOG),
    107030: ErrorCode("ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT",
                      "a captured graph cannot be replayed: the driver is too old", OLD_DRIVER, True),
    107033: ErrorCode("ACL_ERROR_STREAM_TASK_GROUP_STATUS", _NO_LENGTHS, OLD_DRIVER, True),
    107040: ErrorCode("ACL_ERROR_RT_MODEL_UPDATE_FAILED", _NO_LENGTHS, OLD_DRIVER, True),
    200001: ErrorCode("ACL_ERROR_API_NOT_SUPPORT", _NO_FUNCTION, UPDATE_DRIVER),
    200002: ErrorCode("ACL_ERROR_INVALID_DEVICE", "the device cannot be used", VISIBLE),
    207000: ErrorCode("ACL_ERROR_RT_FEATURE_NOT_SUPPORT", _NO_FUNCTION, OLD_DRIVER),
    207001: ErrorCode("ACL_ERROR_RT_MEMORY_ALLOCATION", _NO_MEMORY, MORE_MEMORY),
    207004: ErrorCode("ACL_ERROR_RT_NO_DEVICE", "there is no device", VISIBLE),
    207005: ErrorCode("ACL_ERROR_RT_RESOURCE_ALLOC_FAIL",
                      "the driver cannot allocate a captured graph's resources: it is too old", OLD_DRIVER,
                      running=(_NO_STREAMS, FEWER_STREAMS)),
    207006: ErrorCode("ACL_ERROR_RT_NO_PERMISSION", "this user may not open the device", VISIBLE),
    207008: ErrorCode("ACL_ERROR_RT_NO_STREAM_RESOURCE",
                      "the driver has no stream for a captured graph: it is too old", OLD_DRIVER,
                      running=(_NO_STREAMS, FEWER_STREAMS)),
    207018: ErrorCode("ACL_ERROR_RT_DEVICE_OOM", _NO_MEMORY, MORE_MEMORY),
    207019: ErrorCode("ACL_ERROR_RT_FEATURE_NOT_SUPPORT_UPDATE_OP", _NO_LENGTHS, OLD_DRIVER, True),
    507009: ErrorCode("ACL_ERROR_RT_TASK_TYPE_NOT_SUPPORT", "a captured step contains a task that it cannot contain",
                      "unset HCCL_OP_EXPANSION_MODE, or serve with --capture off", True),
    507010: ErrorCode("ACL_ERROR_RT_LOST_HEARTBEAT", "the device does not respond", REPAIR),
    507014: ErrorCode("ACL_ERROR_RT_AICORE_TIMEOUT", "a kernel took too long", SEND_LOG),
    507015: ErrorCode("ACL_ERROR_RT_AICORE_EXCEPTION", "a kernel failed", SEND_LOG),
    507033: ErrorCode("ACL_ERROR_RT_DEV_SETUP_ERROR", "the device cannot be set up", VISIBLE),
    507048: ErrorCode("ACL_ERROR_RT_FFTS_PLUS_TIMEOUT", "a rank waited in a collective for another one (EI0002)",
                      RANKS),
    507054: ErrorCode("ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR", "the device's memory has an uncorrectable error", REPAIR),
    507899: ErrorCode("ACL_ERROR_RT_DRV_INTERNAL_ERROR", "the driver failed", REPAIR),
    507903: ErrorCode("ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED",
                      "a launch failed while a step was captured, see CANN's log", OLD_DRIVER, True),
}

TEXTS: dict[str, ErrorCode] = {
    "Alloc sq cq fail": ErrorCode(
        "Alloc sq cq fail", "the driver has no queue for a captured graph's stream: it is too old", OLD_DRIVER,
        running=(_NO_STREAMS, FEWER_STREAMS)),
    # torch_npu only warns of 207000, and finds later that no capture has begun or ended (NPUGraph.cpp).
    "CAPTURE_STATUS_ACTIVE INTERNAL ASSERT FAILED": ErrorCode(
        "CAPTURE_STATUS_ACTIVE INTERNAL ASSERT FAILED", _NO_FUNCTION, OLD_DRIVER, True),
    "Invalid end capture model id": ErrorCode("Invalid end capture model id", _NO_FUNCTION, OLD_DRIVER, True),
    "not in libopapi.so": ErrorCode(
        "not in libopapi.so", "CANN lacks an operator that this torch_npu calls", MATCHING),
    "HCCL function error": ErrorCode("HCCL function error", "HCCL refused a call of this rank", RANKS),
}
"""Texts in messages and in CANN's log that have no code."""
