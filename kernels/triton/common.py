"""Checks of arguments and facts of a device, shared by the modules that launch Triton kernels."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from npuserve.kernels.triton.linear_tiles import SHARED_BYTES

INT32 = 2**31 - 1
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def power(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def within(name: str, value: int, least: int, most: int) -> None:
    """Raise ValueError unless least <= value <= most. name: name of the value in the message."""
    if not least <= value <= most:
        raise ValueError(f"{name}: {value} is not from {least} to {most}")


def matrix(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise ValueError unless `tensor` is a matrix of floats on `device` whose rows are contiguous."""
    rows_apart = tensor.dim() == 2 and (tensor.shape[1] <= 1 or tensor.stride(1) == 1)
    if not rows_apart or tensor.dtype not in FLOATS or tensor.device != device:
        raise ValueError(f"{name}: not a matrix of {_names(FLOATS)} on {device} whose rows are contiguous: "
                         f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}, strides {tensor.stride()}")


def check(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Raise ValueError unless `tensor` is contiguous, on `device`, of this shape and one of these dtypes."""
    if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_contiguous() or tensor.device != device:
        raise ValueError(f"{name}: not a contiguous {list(shape)} of {_names(dtypes)} on {device}: "
                         f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}")


def rotary_dim(name: str, cos_sin: Tensor, head_dim: int, device: torch.device) -> int:
    """Return the columns of a table of cosines and sines.

    Raises ValueError unless it is contiguous in float32 on `device` and its columns are even, from 2 to `head_dim`.
    """
    columns = cos_sin.shape[-1]
    if cos_sin.dim() != 2 or columns % 2 or not 2 <= columns <= head_dim:
        raise ValueError(f"{name}: {list(cos_sin.shape)} is not [positions, an even number of at most {head_dim}]")
    check(name, cos_sin, tuple(cos_sin.shape), (torch.float32,), device)
    return columns


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may take; without a GPU those of Hopper."""
    if device.type != "cuda":
        return SHARED_BYTES
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED_BYTES))


@cache
def processors(device: torch.device) -> int:
    """Return the multiprocessors of a device; if Triton interprets, of the device of the tables."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
