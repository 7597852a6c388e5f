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


def check_matrix(name: str, tensor: Tensor, beside: Tensor) -> None:
    """Raise ValueError unless `tensor` is a matrix as `matrix` requires, whose size fits the kernels of rows."""
    matrix(name, tensor, beside.device)
    within(f"rows of {name}", len(tensor), 0, INT32)
    within(f"columns of {name}", tensor.shape[1], 1, INT32 // 4)


def check_beside(name: str, tensor: Tensor, x: Tensor) -> None:
    """Raise ValueError unless `tensor` is a matrix of the shape and dtype of x."""
    check_matrix(name, tensor, x)
    if tensor.shape != x.shape or tensor.dtype != x.dtype:
        raise ValueError(f"{name}: {list(tensor.shape)} {tensor.dtype} is not {list(x.shape)} {x.dtype}")


def check_groups(x: Tensor, z: Tensor, gamma: Tensor, most: int) -> int:
    """Return the number of groups of a row of `gated_rms_norm`. Raises ValueError for groups of more than `most`."""
    check_matrix("x", x, x)
    check_beside("z", z, x)
    size = gamma.numel()
    check("gamma", gamma, (size,), (x.dtype, torch.float32), x.device)
    within("numbers of a group", size, 1, most)
    if x.shape[1] % size:
        raise ValueError(f"x: {x.shape[1]} columns are not groups of {size}")
    return x.shape[1] // size


def check_rule(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, key_heads: int
) -> None:
    """Raise ValueError unless the arguments of `gated_delta_rule` fit each other and the kernels."""
    matrix("qkv", qkv, qkv.device)
    if state.dim() != 4:
        raise ValueError(f"state: {list(state.shape)} is not [slots, value heads, key_dim, value_dim]")
    tokens, (value_heads, key_dim, value_dim) = len(qkv), state.shape[1:]
    check("state", state, tuple(state.shape), (torch.float32, torch.bfloat16), qkv.device)
    within("key_heads", key_heads, 1, value_heads)
    if value_heads % key_heads:
        raise ValueError(f"key_heads: {key_heads} does not divide {value_heads} value heads")
    within("key_dim", key_dim, 1, 256)
    width = 2 * key_heads * key_dim + value_heads * value_dim
    if qkv.shape[1] != width:
        raise ValueError(f"qkv: {qkv.shape[1]} columns are not the {width} of queries, keys and values")
    for name, tensor in (("a", a), ("b", b)):
        matrix(name, tensor, qkv.device)
        if tensor.shape != (tokens, value_heads) or tensor.dtype != qkv.dtype:
            raise ValueError(f"{name}: {list(tensor.shape)} {tensor.dtype} is not [{tokens}, {value_heads}] "
                             f"{qkv.dtype}")
    for name, tensor in (("a_log", a_log), ("dt_bias", dt_bias)):
        check(name, tensor, (value_heads,), (torch.float32,), qkv.device)


def check_rows(context_lens: Tensor, cu_seqlens: Tensor, state_slots: Tensor, device: torch.device) -> int:
    """Return the number of rows of a step. Raises ValueError."""
    rows = len(context_lens)
    within("rows", rows, 0, 1 << 14)
    check("context_lens", context_lens, (rows,), (torch.int32,), device)
    check("cu_seqlens_q", cu_seqlens, (rows + 1,), (torch.int32,), device)
    check("state_slots", state_slots, (rows,), (torch.int64,), device)
    return rows


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
