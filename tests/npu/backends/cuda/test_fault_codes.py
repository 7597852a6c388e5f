"""Faults by the messages of torch and triton."""

from __future__ import annotations

import ctypes
import ctypes.util

import pytest
import torch

from npuserve.npu import backends
from npuserve.npu.backends.cuda import fault_codes
from npuserve.npu.backends.cuda.backend import CudaBackend
from npuserve.npu.backends.faults import Fault

TORCH = ("CUDA error: {}\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
         "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1")
TRITON = "Triton Error [CUDA]: {}"
CUBLAS = "CUDA error: {} when calling `cublasGemmEx( handle, opa, opb, m, n, k)`"


@pytest.mark.parametrize(("text", "fault"), [
    ("out of memory", Fault.RETRYABLE),
    ("an illegal memory access was encountered", Fault.ENGINE),
    ("device-side assert triggered", Fault.ENGINE),
    ("unspecified launch failure", Fault.ENGINE),
    ("misaligned address", Fault.ENGINE),
    ("invalid argument", Fault.ENGINE),
    ("operation not permitted when stream is capturing", Fault.ENGINE),
    ("uncorrectable ECC error encountered", Fault.NODE),
    ("CUDA-capable device(s) is/are busy or unavailable", Fault.NODE),
    ("no CUDA-capable device is detected", Fault.NODE),
    ("CUDA driver version is insufficient for CUDA runtime version", Fault.NODE),
    ("Invalid access of peer GPU memory over nvlink or a hardware error", Fault.NODE),
    ("unknown error", Fault.NODE),
])
def test_fault_by_message(text: str, fault: Fault) -> None:
    for error in (RuntimeError(TORCH.format(text)), RuntimeError(TRITON.format(text)),
                  torch.AcceleratorError(TORCH.format(text))):
        assert CudaBackend.errors.fault(error) is backends.fault(error) is fault


@pytest.mark.parametrize(("status", "fault"), [
    ("CUBLAS_STATUS_ALLOC_FAILED", Fault.RETRYABLE), ("CUBLAS_STATUS_EXECUTION_FAILED", Fault.ENGINE)])
def test_fault_by_cublas_status(status: str, fault: Fault) -> None:
    assert backends.fault(RuntimeError(CUBLAS.format(status))) is fault


def test_fault_code_takes_precedence_over_message() -> None:
    error = torch.AcceleratorError("CUDA error: it is said otherwise")
    error.error_code = 214
    assert backends.fault(error) is Fault.NODE
    error.error_code = 1
    assert backends.fault(error) is Fault.ENGINE


def test_fault_of_cause() -> None:
    error = RuntimeError("the step failed")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB")
    assert backends.fault(error) is backends.fault(error.__cause__) is Fault.RETRYABLE


@pytest.mark.parametrize("error", [
    ValueError("CUDA error: out of memory"), RuntimeError("shape '[2]' is invalid for input of size 3"),
    RuntimeError("unknown error"), KeyError(700)])
def test_fault_of_other_error_is_none(error: Exception) -> None:
    assert backends.fault(error) is None


def test_faults_messages_equal_cuda_runtime() -> None:
    found = ctypes.util.find_library("cudart")
    if found is None:
        pytest.skip("libcudart is not installed")
    library = ctypes.CDLL(found)
    library.cudaGetErrorString.restype = ctypes.c_char_p
    for code, (text, _) in fault_codes.FAULTS.items():
        assert library.cudaGetErrorString(code).decode() == text
