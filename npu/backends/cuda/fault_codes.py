"""Classification of CUDA errors at run time as `Fault`.

Codes and texts are from the CUDA runtime (driver_types.h, cudaGetErrorString). The messages of torch
and triton contain the text; torch.AcceleratorError also has the code.
"""

from __future__ import annotations

import torch

from npuserve.npu.backends.faults import DeviceErrors, Fault, causes

FAULTS: dict[int, tuple[str, Fault]] = {
    2: ("out of memory", Fault.RETRYABLE),
    3: ("initialization error", Fault.NODE),
    35: ("CUDA driver version is insufficient for CUDA runtime version", Fault.NODE),
    36: ("API call is not supported in the installed CUDA driver", Fault.NODE),
    46: ("CUDA-capable device(s) is/are busy or unavailable", Fault.NODE),
    53: ("unspecified launch failure in prior launch", Fault.ENGINE),
    100: ("no CUDA-capable device is detected", Fault.NODE),
    101: ("invalid device ordinal", Fault.NODE),
    102: ("device doesn't have valid Grid license", Fault.NODE),
    103: ("integrity checks failed", Fault.NODE),
    127: ("startup failure in cuda runtime", Fault.NODE),
    201: ("invalid device context", Fault.ENGINE),
    209: ("no kernel image is available for execution on the device", Fault.NODE),
    214: ("uncorrectable ECC error encountered", Fault.NODE),
    220: ("uncorrectable NVLink error detected during the execution", Fault.NODE),
    226: ("Invalid access of peer GPU memory over nvlink or a hardware error", Fault.NODE),
    304: ("OS call failed or operation not supported on this OS", Fault.NODE),
    700: ("an illegal memory access was encountered", Fault.ENGINE),
    701: ("too many resources requested for launch", Fault.ENGINE),
    702: ("the launch timed out and was terminated", Fault.ENGINE),
    709: ("context is destroyed", Fault.ENGINE),
    710: ("device-side assert triggered", Fault.ENGINE),
    714: ("hardware stack error", Fault.ENGINE),
    715: ("an illegal instruction was encountered", Fault.ENGINE),
    716: ("misaligned address", Fault.ENGINE),
    717: ("operation not supported on global/shared address space", Fault.ENGINE),
    718: ("invalid program counter", Fault.ENGINE),
    719: ("unspecified launch failure", Fault.ENGINE),
    802: ("system not yet initialized", Fault.NODE),
    803: ("system has unsupported display driver / cuda driver combination", Fault.NODE),
    804: ("forward compatibility was attempted on non supported HW", Fault.NODE),
    999: ("unknown error", Fault.NODE),
}
"""Error code -> its text and fault. Any other code is an error of a call: ENGINE."""

_TEXTS = sorted(((text, fault) for text, fault in FAULTS.values()), key=lambda entry: -len(entry[0]))
"""Longest first: a text may be part of another."""

_CAPTURES = range(900, 911)
_CAPTURE_TEXTS = ("operation not permitted when stream is capturing", "previous error during capture",
                  "operation would make the legacy stream depend on a capturing", "graph update was not performed")
"""Codes of cudaErrorStreamCaptureUnsupported to cudaErrorGraphExecUpdateFailure, and parts of their texts."""

_PREFIXES = ("CUDA error: ", "CUDA driver error: ", "Triton Error [CUDA]: ", "CUDA out of memory")
"""Beginnings of CUDA messages in errors of torch and triton. CUBLAS_STATUS_... may follow the first."""


def fault_of(error: BaseException) -> Fault | None:
    """Return the fault of an error; None if the device did not cause it."""
    return next((fault for each in causes(error) if (fault := _sort(each)) is not None), None)


def is_capture_error(error: BaseException) -> bool:
    """Return True for errors that only captures and graphs raise."""
    return any(getattr(each, "error_code", None) in _CAPTURES or any(text in str(each) for text in _CAPTURE_TEXTS)
               for each in causes(error))


def _sort(error: BaseException) -> Fault | None:
    if isinstance(error, torch.OutOfMemoryError):
        return Fault.RETRYABLE
    if (code := getattr(error, "error_code", None)) in FAULTS and isinstance(error, torch.AcceleratorError):
        return FAULTS[code][1]
    text = str(error)
    message = next((text[text.index(begin):] for begin in _PREFIXES if begin in text), None)
    if message is None or not isinstance(error, RuntimeError):
        return None
    if "CUBLAS_STATUS_ALLOC_FAILED" in message:
        return Fault.RETRYABLE
    return next((fault for known, fault in _TEXTS if known in message), Fault.ENGINE)


class CudaErrors(DeviceErrors):
    """Errors of CUDA, torch and Triton."""

    def fault(self, error: BaseException) -> Fault | None:
        return fault_of(error)

    def is_capture_error(self, error: BaseException) -> bool:
        return is_capture_error(error)
