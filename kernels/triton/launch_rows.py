"""Calls of the kernels in rows.py: checks of arguments, and division into blocks and programs.

One program normalizes a row, with 16 numbers per thread. A row of 5120 thus takes loads of 16 bytes by 320 threads and
no second pass. A program that quantizes a row has twice the warps, since arithmetic bounds it. Other kernels divide
rows into columns, with 8 numbers per thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npuserve.kernels.quantized import GROUP, Quantized, Scheme
from npuserve.kernels.triton.common import (
    FLOATS,
    INT32,
    check,
    check_beside,
    check_groups,
    check_matrix,
    power,
    within,
)
from npuserve.kernels.triton.dependent import dependent
from npuserve.kernels.triton.rows import (
    embedding_kernel,
    gated_rms_norm_kernel,
    keep_ids_kernel,
    quantize_kernel,
    rank_sum_kernel,
    rms_norm_kernel,
    sigmoid_gate_kernel,
    swiglu_kernel,
    take_ids_kernel,
)
from npuserve.kernels.weight import Weight, form_of

WIDTH = 32768
"""Maximum numbers of a row in one program."""

COLUMNS = 1024
"""Columns of a row, or ids, per program."""


def rms_norm(x: Tensor, gamma: Tensor, eps: float, scheme: Scheme | None = None) -> Tensor | Quantized:
    """Launch the kernel `rms_norm` for rows of at most `WIDTH`. Raises ValueError."""
    return _rms_norm(x, None, None, gamma, eps, scheme)


def add_rms_norm(
    x: Tensor, residual: Tensor, gamma: Tensor, eps: float, scheme: Scheme | None = None
) -> tuple[Tensor | Quantized, Tensor]:
    """Launch the kernel `add_rms_norm` for rows of at most `WIDTH`. Raises ValueError."""
    check_beside("residual", residual, x)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _rms_norm(x, residual, total, gamma, eps, scheme), total


def _rms_norm(
    x: Tensor, residual: Tensor | None, total: Tensor | None, gamma: Tensor, eps: float, scheme: Scheme | None
) -> Tensor | Quantized:
    check_matrix("x", x, x)
    rows, width = x.shape
    within("columns of x", width, 1, WIDTH)
    check("gamma", gamma, (width,), (x.dtype, torch.float32), x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if scheme is None else _int8(x, scheme)
    if rows:
        block, group = _blocks(width, scheme)
        rms_norm_kernel[(rows,)](
            x=x, residual=residual, gamma=gamma, out=out if isinstance(out, Tensor) else None, total=total,
            **_targets(out, scheme), width=width, x_stride=x.stride(0),
            residual_stride=0 if residual is None else residual.stride(0), eps=eps,
            levels=scheme.levels if scheme else 0.0, BLOCK=block, GROUP=group,
            num_warps=_warps(block, scheme is not None), **dependent(x))
    return out


def quantize(x: Tensor, scheme: Scheme) -> Quantized:
    """Launch the kernel `quantize` for rows of at most `WIDTH`. Raises ValueError."""
    check_matrix("x", x, x)
    rows, width = x.shape
    within("columns of x", width, 1, WIDTH)
    out = _int8(x, scheme)
    if rows:
        block, group = _blocks(width, scheme)
        quantize_kernel[(rows,)](
            x=x, **_targets(out, scheme), width=width, x_stride=x.stride(0), levels=scheme.levels, BLOCK=block,
            GROUP=group, num_warps=_warps(block, True), **dependent(x))
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """Launch the kernel `swiglu`. Raises ValueError."""
    check_matrix("gate_up", gate_up, gate_up)
    rows, both = gate_up.shape
    if both % 2:
        raise ValueError(f"gate_up: {both} columns are not those of a gate and of as many more")
    width = both // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        swiglu_kernel[(rows, -(-width // COLUMNS))](
            gate_up=gate_up, out=out, width=width, stride=gate_up.stride(0), BLOCK=COLUMNS, **dependent(gate_up))
    return out


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Launch the kernel `sigmoid_gate`. Raises ValueError."""
    check_matrix("x", x, x)
    check_beside("gate", gate, x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        rows, width = x.shape
        sigmoid_gate_kernel[(rows, -(-width // COLUMNS))](
            x=x, gate=gate, out=out, width=width, x_stride=x.stride(0), gate_stride=gate.stride(0), BLOCK=COLUMNS,
            **dependent(x))
    return out


def gated_rms_norm(x: Tensor, z: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Launch the kernel `gated_rms_norm` for groups of at most `WIDTH`. Raises ValueError."""
    groups = check_groups(x, z, gamma, WIDTH)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        rows, size = len(x), len(gamma)
        block = power(size)
        together = min(max(1, COLUMNS // block), power(groups))
        gated_rms_norm_kernel[(rows, -(-groups // together))](
            x=x, z=z, gamma=gamma, out=out, groups=groups, size=size, x_stride=x.stride(0), z_stride=z.stride(0),
            eps=eps, GROUPS=together, BLOCK=block, num_warps=min(max(together * block // 256, 1), 16), **dependent(x))
    return out


def embedding(ids: Tensor, table: Weight) -> Tensor:
    """Launch the kernel `embedding`; ids are not range-checked. Raises ValueError."""
    values, scale, zero = form_of(table).parts
    if values.dim() != 2 or (values.shape[1] > 1 and values.stride(1) != 1):
        raise ValueError("table: not a matrix whose rows are contiguous")
    if values.device != ids.device:
        raise ValueError(f"table: on {values.device}, and ids on {ids.device}")
    check("ids", ids, (ids.numel(),), (torch.int64,), values.device)
    for name, numbers, dtype in (("scale", scale, torch.float32), ("zero", zero, torch.int32)):
        if numbers is not None:
            check(f"{name} of table", numbers, (len(values),), (dtype,), values.device)
    rows, width = len(ids), values.shape[1]
    out = torch.empty(rows, width, dtype=table.dtype, device=ids.device)
    if out.numel():
        embedding_kernel[(rows, -(-width // COLUMNS))](
            ids=ids, table=values, scales=scale, zeros=zero, out=out, width=width, table_stride=values.stride(0),
            BLOCK=COLUMNS, **dependent(ids))
    return out


def take_ids(ids: Tensor, last: Tensor) -> Tensor:
    """Launch the kernel `take_ids`; ids below -R are not detected. Raises ValueError."""
    check("ids", ids, (ids.numel(),), (torch.int64,), ids.device)
    check("last", last, (last.numel(),), (torch.int64,), ids.device)
    out = torch.empty_like(ids)
    if count := len(ids):
        take_ids_kernel[(-(-count // COLUMNS),)](
            ids=ids, last=last, out=out, count=count, BLOCK=COLUMNS, **dependent(ids))
    return out


def keep_ids(ids: Tensor, last: Tensor) -> None:
    """Launch the kernel `keep_ids`. Raises ValueError."""
    if ids.dim() != 2 or ids.dtype != torch.int64 or not ids.shape[1]:
        raise ValueError(f"ids: {list(ids.shape)} {ids.dtype} is not [R, W] int64 with a first column")
    check("last", last, (len(ids),), (torch.int64,), ids.device)
    if count := len(ids):
        keep_ids_kernel[(-(-count // COLUMNS),)](
            ids=ids, last=last, count=count, stride=ids.stride(0), BLOCK=COLUMNS, **dependent(ids))


def rank_sum(parts: Tensor) -> Tensor:
    """Launch the sum of the kernel `all_reduce` over parts [N, T, H]: [T, H]. Raises ValueError."""
    if parts.dim() != 3:
        raise ValueError(f"parts: {list(parts.shape)} is not [ranks, rows, columns]")
    check("parts", parts, tuple(parts.shape), FLOATS, parts.device)
    size, rows, width = parts.shape
    out = torch.empty(rows, width, dtype=parts.dtype, device=parts.device)
    if count := out.numel():
        within("numbers of parts", parts.numel(), 1, INT32)
        rank_sum_kernel[(-(-count // COLUMNS),)](
            parts=parts, out=out, count=count, SIZE=size, BLOCK=COLUMNS)
    return out


def _int8(x: Tensor, scheme: Scheme) -> Quantized:
    """Return an uninitialized output for x [T, K]."""
    for name, static, dtype in (("scale", scheme.scale, torch.float32), ("zero", scheme.zero, torch.int32)):
        if static is not None:
            check(f"{name} of scheme", static, (1,), (dtype,), x.device)
    zero = torch.empty(len(x), dtype=torch.int32, device=x.device) if scheme.has_zero else None
    scale = torch.empty(scheme.scale_shape(*x.shape)[::-1], dtype=torch.float32, device=x.device).t()
    return Quantized(torch.empty(x.shape, dtype=scheme.dtype, device=x.device), scale, zero)


def _targets(out: Tensor | Quantized, scheme: Scheme | None) -> dict[str, Tensor | None]:
    if isinstance(out, Tensor) or scheme is None:
        return dict.fromkeys(("values", "scales", "zeros", "static_scale", "static_zero"))
    return {"values": out.values, "scales": out.scale, "zeros": out.zero, "static_scale": scheme.scale,
            "static_zero": scheme.zero if scheme.scale is not None else None}


def _blocks(width: int, scheme: Scheme | None) -> tuple[int, int]:
    """Return BLOCK and GROUP for rows of `width`."""
    if scheme and scheme.grouped:
        return max(power(width), GROUP), GROUP
    return power(width), 0


def _warps(block: int, quantizes: bool) -> int:
    """Return the warps of a program for a row of `block` numbers."""
    numbers_per_warp, max_warps = (256, 32) if quantizes else (512, 16)
    return min(max(block // numbers_per_warp, 1), max_warps)
