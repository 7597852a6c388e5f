"""Depthwise causal convolution over the tokens of each row, then SiLU (Qwen3-Next's gated delta net)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels import ascend, ascend_delta, native, triton
from npuserve.kernels.ascend import torch_npu
from npuserve.kernels.attention import AttentionMetadata
from npuserve.kernels.registry import Case, kernel, to_host


def _case(rows: list[tuple[int, int]], channels: int, taps: int = 4, benchmark: bool = False) -> Case:
    """Return a case. rows: (tokens, context) of each row. taps: length of the convolution."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
        x = torch.randn(sum(tokens for tokens, _ in rows), channels, generator=generator).to(dtype)
        weight = torch.randn(channels, taps, generator=generator).mul(0.5).to(dtype)
        state = torch.randn(len(rows) + 2, channels, taps - 1, generator=generator).to(dtype)
        return x, weight, state, *random_rows(rows, generator)

    return Case(f"{name_of(rows)} {channels}x{taps}", make, benchmark)


def name_of(rows: list[tuple[int, int]]) -> str:
    """Return the name of rows (tokens, context) for a case."""
    tokens, contexts = ("+".join(map(str, sorted(set(x)))) for x in zip(*rows, strict=True))
    return f"{len(rows)} rows {tokens} of {contexts}"


def random_rows(rows: list[tuple[int, int]], generator: torch.Generator) -> tuple[AttentionMetadata, Tensor]:
    """Return the metadata of rows (tokens, context), and a slot of each below the number of rows plus 2."""
    tables = torch.zeros(len(rows), 1, dtype=torch.int32)
    metadata = AttentionMetadata.from_lengths(tables, [c for _, c in rows], [n for n, _ in rows])
    return metadata, torch.randperm(len(rows) + 2, generator=generator)[: len(rows)]


@kernel(
    "causal_conv_silu",
    by_layer=True,
    cases=[
        _case([(1, 1)], 8),
        _case([(1, 9), (5, 5), (2, 20), (1, 1), (3, 3)], 48),
        _case([(2, 2), (7, 31), (0, 4), (1, 5)], 33),
        _case([(2, 7), (1, 3), (6, 6)], 40, taps=2),
        _case([(2, 7), (1, 3), (6, 6), (4, 9)], 35, taps=6),
        _case([(70, 70), (1, 300), (33, 290)], 600),
        *(_case([(1, 512)] * rows, 6144, benchmark=True) for rows in (1, 32)),
        _case([(512, 512)], 6144, benchmark=True),
    ],
)
def causal_conv_silu(
    x: Tensor, weight: Tensor, state: Tensor, metadata: AttentionMetadata, state_slots: Tensor
) -> Tensor:
    """Return silu of each channel's convolution with the row's last K inputs: [T, C], 0 for tokens of no row.

    x: [T, C].
    weight: [C, K], of the oldest input first.
    state: [slots, C, K - 1], the last inputs of each row, oldest first; written in place. A row whose context is this
        step's tokens begins with zeros.
    state_slots: [R] int64.

    Sums are in float32. The results of a row do not depend on the other rows.
    """
    out = torch.zeros_like(x)
    wide, taps = torch.promote_types(x.dtype, torch.float32), weight.shape[1]
    starts, slots = metadata.host_cu_seqlens_q, state_slots.tolist()
    for row, context in enumerate(metadata.host_context_lens):
        begin, end = starts[row], starts[row + 1]
        if begin == end:
            continue
        earlier = state[slots[row]].T
        if context == end - begin:
            earlier = torch.zeros_like(earlier)
        inputs = torch.cat([earlier, x[begin:end]])
        windows = inputs.unfold(0, taps, 1).to(wide)  # [tokens, C, K]
        out[begin:end] = F.silu((windows * weight.to(wide)).sum(-1)).to(x.dtype)
        state[slots[row]] = inputs[end - begin :].T
    return out


def rows_output(x: Tensor, width: int, metadata: AttentionMetadata) -> Tensor:
    """Return an output [T, width] of a native op for x [T, ...]; 0 for tokens of no row, if the host knows the rows."""
    out = native.empty(len(x), width, dtype=x.dtype)
    if metadata.host_cu_seqlens_q and metadata.host_cu_seqlens_q[-1] < len(x):
        out.zero_()
    return out


@native.implementation(causal_conv_silu)
def _(x: Tensor, weight: Tensor, state: Tensor, metadata: AttentionMetadata, state_slots: Tensor) -> Tensor:
    out = rows_output(x, x.shape[1], metadata)
    p = [x, weight, state, metadata.context_lens, metadata.cu_seqlens_q, state_slots, out]
    native.call("causal_conv_silu", ("causal_conv_silu", x.dtype, p, [len(x), len(state_slots), *weight.shape]))
    return out


def _by_token(args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, weight, state, *rest = args
    return ascend.to_device((x, weight, state.transpose(1, 2).contiguous().view(state.shape), *rest))


def _by_channel(args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, weight, state, *rest = to_host(args)
    return x, weight, state.view(len(state), -1, state.shape[1]).transpose(1, 2), *rest


@ascend.implementation(causal_conv_silu, adapt=_by_token, restore=_by_channel)
def _(x: Tensor, weight: Tensor, state: Tensor, metadata: AttentionMetadata, state_slots: Tensor) -> Tensor:
    """Multiply shifted inputs by the taps, since torch_npu has no such convolution.

    state: memory of [slots, C, K - 1], in which the channels of an input are consecutive: [slots, K - 1, C].
    """
    tokens, channels = x.shape
    taps = weight.shape[1]
    rows = ascend_delta.rows_of(metadata, state_slots, x.dtype)
    inputs_of_slots = state.view(-1, taps - 1, channels)
    earlier = inputs_of_slots.index_select(0, rows.slots) * rows.keep
    if ascend_delta.has_single_tokens(tokens, metadata):
        inputs = torch.cat([earlier, x.unsqueeze(1)], 1)
        last = inputs[:, 1:]
    else:
        windows = ascend_delta.windows_of(tokens, taps, metadata, state_slots, rows.lengths)
        source = torch.cat([earlier.flatten(0, 1), x])
        inputs = source.index_select(0, windows.inputs).view(tokens, taps, channels)
        last = source.index_select(0, windows.last).view(earlier.shape)
    torch_npu.npu_scatter_nd_update_(inputs_of_slots, rows.slots.unsqueeze(1), last)
    return F.silu((inputs * ascend_delta.taps_of(weight)).sum(1)).to(x.dtype)


@triton.implementation(causal_conv_silu)
def _(x: Tensor, weight: Tensor, state: Tensor, metadata: AttentionMetadata, state_slots: Tensor) -> Tensor:
    """Read all lengths on the device, as `paged_attention` does."""
    from npuserve.kernels.triton import launch_gated_delta

    return launch_gated_delta.causal_conv_silu(x, weight, state, metadata, state_slots)
