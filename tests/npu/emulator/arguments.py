"""Arguments of operator calls that should be refused: tensors of zeros, and direct calls of operators."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

BF, FP, F32, I8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
NZ = 29
ACL = {F32: 0, FP: 1, I8: 2, torch.int32: 3, torch.int64: 9, torch.float64: 11, torch.bool: 12, BF: 27}


def on(*size: int, dtype: torch.dtype = BF) -> Tensor:
    return torch.zeros(*size, dtype=dtype).npu()


def whole(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype).npu()


def strided(*size: int, dtype: torch.dtype = BF) -> Tensor:
    return on(*size[:-1], 2 * size[-1], dtype=dtype)[..., ::2]


def ops() -> Any:
    import torch_npu

    torch.npu.config.allow_internal_format = True
    return torch_npu


def nz(*size: int, dtype: torch.dtype = BF) -> Tensor:
    cast: Tensor = ops().npu_format_cast(on(*size, dtype=dtype), NZ)
    return cast


def direct(name: str, *arguments: Any) -> None:
    """Call the operator's first phase with tensors, ints, floats, bools, bytes, lists of ints and None; numbers become
    int64 or double."""
    library = ctypes.CDLL(None)
    library.aclCreateTensor.restype = ctypes.c_void_p
    library.aclCreateIntArray.restype = ctypes.c_void_p
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p

    def given(value: Any) -> Any:
        if isinstance(value, list):
            return ctypes.c_void_p(
                library.aclCreateIntArray((ctypes.c_int64 * len(value))(*value), ctypes.c_uint64(len(value))))
        if isinstance(value, Tensor):
            sizes, strides = ((ctypes.c_int64 * value.dim())(*part) for part in (value.shape, value.stride()))
            return ctypes.c_void_p(
                library.aclCreateTensor(
                    sizes,
                    ctypes.c_uint64(value.dim()),
                    ACL[value.dtype],
                    strides,
                    ctypes.c_int64(0),
                    2,
                    sizes,
                    ctypes.c_uint64(value.dim()),
                    ctypes.c_void_p(value.data_ptr()),
                )
            )
        return (
            ctypes.c_double(value)
            if isinstance(value, float)
            else ctypes.c_char_p(value)
            if isinstance(value, bytes)
            else ctypes.c_void_p(value)
            if value is None
            else ctypes.c_int64(value)
        )

    size, executor = ctypes.c_uint64(), ctypes.c_void_p()
    if library[f"{name}GetWorkspaceSize"](*map(given, arguments), ctypes.byref(size), ctypes.byref(executor)):
        raise RuntimeError(library.aclGetRecentErrMsg().decode())
