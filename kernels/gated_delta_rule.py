"""Gated delta rule, the recurrence of linear attention in Qwen3-Next (Yang et al. 2024, arXiv:2412.06464)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels import ascend, ascend_delta, native, triton
from npuserve.kernels.ascend import torch_npu
from npuserve.kernels.attention import AttentionMetadata
from npuserve.kernels.causal_conv_silu import name_of, random_rows, rows_output
from npuserve.kernels.registry import Case, kernel, to_host

NORM_EPS = 1e-6
"""Epsilon of the l2 norm of queries and keys."""


def _case(
    rows: list[tuple[int, int]], key_heads: int, value_heads: int, key_dim: int, value_dim: int,
    benchmark: bool = False,
) -> Case:
    """Return a case. rows: (tokens, context) of each row."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
        tokens, width = sum(n for n, _ in rows), 2 * key_heads * key_dim + value_heads * value_dim
        qkv = F.silu(torch.randn(tokens, width, generator=generator)).to(dtype)
        a, b = (torch.randn(2, tokens, value_heads, generator=generator)).to(dtype)
        a_log = torch.rand(value_heads, generator=generator).mul(16).add(0.01).log()
        dt_bias = torch.randn(value_heads, generator=generator).sub(2)
        state = torch.randn(len(rows) + 2, value_heads, key_dim, value_dim, generator=generator).mul(0.3)
        return qkv, a, b, a_log, dt_bias, state, *random_rows(rows, generator), key_heads

    return Case(f"{name_of(rows)} {key_heads}/{value_heads}x{key_dim}x{value_dim}", make, benchmark)


@kernel(
    "gated_delta_rule",
    by_layer=True,
    cases=[
        _case([(1, 1)], 1, 1, 8, 8),
        _case([(1, 9), (5, 5), (2, 20), (1, 1), (3, 3)], 2, 4, 16, 16),
        _case([(2, 2), (7, 31), (0, 4), (1, 5)], 1, 3, 24, 40),
        _case([(70, 70), (1, 300), (33, 290)], 2, 2, 32, 48),
        _case([(9, 9), (1, 300), (40, 290)], 2, 4, 128, 128),
        *(_case([(1, 512)] * rows, 16, 16, 128, 128, benchmark=True) for rows in (1, 8, 32)),
        _case([(512, 512)], 16, 16, 128, 128, benchmark=True),
    ],
)
def gated_delta_rule(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    metadata: AttentionMetadata,
    state_slots: Tensor,
    key_heads: int,
) -> Tensor:
    """Advance the state of each row token by token, and return its products with the queries: [T, Hv Dv].

    qkv: [T, 2 Hk Dk + Hv Dv], queries, keys and values. Queries and keys are l2-normalized. Value head h uses query
        and key h // (Hv / Hk).
    a, b: [T, Hv], inputs of the decay and of the learning rate.
    a_log, dt_bias: [Hv] float32.
    state: [slots, Hv, Dk, Dv] float32, written in place. A row whose context is this step's tokens begins with zeros.
    state_slots: [R] int64.

    A token's decay is d = exp(-exp(a_log) softplus(a + dt_bias)). The state S' before the token becomes
    S = d S' + k (sigmoid(b) (v - d S'^T k))^T. The token's result is S^T q / sqrt(Dk), 0 for tokens of no row. All is
    in float32, and the result is rounded. The results of a row do not depend on the other rows.
    """
    value_heads, key_dim, value_dim = state.shape[1:]
    wide = torch.promote_types(qkv.dtype, torch.float32)
    sizes = [key_heads * key_dim, key_heads * key_dim, value_heads * value_dim]
    queries, keys, values = qkv.to(wide).split(sizes, dim=1)
    group = value_heads // key_heads
    q = _normalized(queries, key_heads).mul(key_dim**-0.5).repeat_interleave(group, dim=1)
    k = _normalized(keys, key_heads).repeat_interleave(group, dim=1)
    v = values.unflatten(1, (value_heads, value_dim))
    decay = (-a_log.exp() * F.softplus(a.to(wide) + dt_bias)).exp()[..., None, None]
    beta = b.to(wide).sigmoid()[..., None]

    out = torch.zeros_like(v)
    starts = metadata.host_cu_seqlens_q
    slots = state_slots.tolist()
    for row, context in enumerate(metadata.host_context_lens):
        begin, end = starts[row], starts[row + 1]
        if begin == end:
            continue
        memory = state[slots[row]]
        if context == end - begin:
            memory = torch.zeros_like(memory)
        for t in range(begin, end):
            memory = memory * decay[t]
            delta = beta[t] * (v[t] - (k[t, :, :, None] * memory).sum(1))
            memory = memory + k[t, :, :, None] * delta[:, None]
            out[t] = (q[t, :, :, None] * memory).sum(1)
        state[slots[row]] = memory
    result: Tensor = out.flatten(1).to(qkv.dtype)
    return result


def _normalized(x: Tensor, heads: int) -> Tensor:
    """Return the heads of x [T, heads D], each divided by its length: [T, heads, D]."""
    split: Tensor = x.unflatten(1, (heads, -1))
    return split * torch.rsqrt(split.square().sum(-1, keepdim=True) + NORM_EPS)


@native.implementation(gated_delta_rule)
def _(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    metadata: AttentionMetadata,
    state_slots: Tensor,
    key_heads: int,
) -> Tensor:
    value_heads, key_dim, value_dim = state.shape[1:]
    out = rows_output(qkv, value_heads * value_dim, metadata)
    p = [qkv, a, b, a_log, dt_bias, state, metadata.context_lens, metadata.cu_seqlens_q, state_slots, out]
    n = [len(qkv), len(state_slots), key_heads, value_heads, key_dim, value_dim]
    native.call("gated_delta_rule", ("gated_delta_rule", qkv.dtype, p, n, [NORM_EPS]))
    return out


def _by_value(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Lay states out as [slots, Hv, Dv, Dk], in the dtype of bfloat16 activations."""
    *others, state, metadata, slots, key_heads = args
    dtype = torch.bfloat16 if args[0].dtype == torch.bfloat16 else state.dtype
    laid_out = state.transpose(2, 3).contiguous().view(state.shape).to(dtype)
    return ascend.to_device((*others, laid_out, metadata, slots, key_heads))


def _by_key(args: tuple[Any, ...]) -> tuple[Any, ...]:
    *others, state, metadata, slots, key_heads = to_host(args)
    count, heads, key_dim, value_dim = state.shape
    return *others, state.view(count, heads, value_dim, key_dim).transpose(2, 3), metadata, slots, key_heads


@ascend.implementation(gated_delta_rule, adapt=_by_value, restore=_by_key)
def by_operators(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    metadata: AttentionMetadata,
    state_slots: Tensor,
    key_heads: int,
    operators: ascend_delta.DeltaOperators = ascend_delta.ALL,
    rule: Callable[..., Tensor] | None = None,
    gates: Callable[..., tuple[Tensor, Tensor]] = ascend_delta.gates,
) -> Tensor:
    """Call the operator for rows of one token, or the one for chunks. Without it in `operators` call `rule`, if there
    is one, else torch's operators.

    The operator for chunks takes and returns the states of the rows. A row without tokens keeps its state. The results
    of both operators are in bfloat16.

    state: memory of [slots, Hv, Dk, Dv], which holds [slots, Hv, Dv, Dk].
    rule, gates: of `DeltaLaunches`, or the same by operators of torch.
    """
    tokens = len(qkv)
    slots, value_heads, key_dim, value_dim = state.shape
    sizes = key_heads, value_heads, key_dim, value_dim
    is_single = ascend_delta.has_single_tokens(tokens, metadata)
    fits = qkv.dtype == state.dtype == operators.dtype
    calls_operator = fits and (operators.can_recur(*sizes) if is_single else operators.can_chunk(*sizes))
    if rule is not None and not calls_operator:
        return rule(qkv, a, b, a_log, dt_bias, state, metadata, state_slots, key_heads, NORM_EPS)
    memory = state.view(slots, value_heads, value_dim, key_dim)
    rows = ascend_delta.rows_of(metadata, state_slots, qkv.dtype)
    both = qkv[:, : 2 * key_heads * key_dim].unflatten(1, (2 * key_heads, key_dim))
    gamma = ascend_delta.unit_gamma(key_dim, qkv.dtype, qkv.device)
    q, k = torch_npu.npu_rms_norm(both, gamma, epsilon=NORM_EPS / key_dim)[0].split(key_heads, 1)
    v = qkv[:, 2 * key_heads * key_dim :].unflatten(1, (value_heads, value_dim))
    scale = key_dim**-0.5
    forget = rows.forget if is_single else None
    if calls_operator:
        decay, beta = gates(a, b, a_log, dt_bias, forget)
    else:  # torch's operators take beta in float32
        decay, beta = ascend_delta.gates(a, b.float(), a_log, dt_bias, forget)
    if is_single:
        recur = _recur if calls_operator else _recur_in_torch
        return recur(q, k, v, beta, decay, memory, rows.slots, scale).flatten(1).to(qkv.dtype)
    if not calls_operator:
        return _chunks_in_torch(q, k, v, beta, decay, memory, rows, metadata, scale).flatten(1)
    begin = memory.index_select(0, rows.slots) * rows.keep.unsqueeze(3)
    out, end = torch_npu.npu_chunk_gated_delta_rule(
        q, k, v, beta=beta, initial_state=begin, actual_seq_lengths=rows.lengths, scale=scale, g=decay)
    torch_npu.npu_scatter_nd_update_(memory, rows.slots.unsqueeze(1), end)
    return out.flatten(1).to(qkv.dtype)  # type: ignore[no-any-return]


def _recur(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, memory: Tensor, slots: Tensor, scale: float
) -> Tensor:
    """Advance the states of rows of one token; return [R, Hv, Dv]. A call takes no more rows than there are slots."""
    parts = []
    for part in torch.arange(len(q)).split(len(memory)):
        here = slice(int(part[0]), int(part[-1]) + 1)
        each = ascend_delta.ones(len(part), q.device)
        parts.append(torch_npu.npu_recurrent_gated_delta_rule(
            q[here], k[here], v[here], memory, beta=beta[here], scale=scale, actual_seq_lengths=each,
            ssm_state_indices=slots[here], num_accepted_tokens=each, g=decay[here]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _recur_in_torch(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, memory: Tensor, slots: Tensor, scale: float
) -> Tensor:
    out, states = _advanced(memory.index_select(0, slots).float(), q, k, v, beta, decay, scale)
    torch_npu.npu_scatter_nd_update_(memory, slots.unsqueeze(1), states.to(memory.dtype))
    return out


def _advanced(
    states: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the results [R, Hv, Dv] of one token for each of the states [R, Hv, Dv, Dk] in float32, and its next."""
    group = v.shape[1] // q.shape[1]
    query, key = (x.float().repeat_interleave(group, 1).unsqueeze(2) for x in (q, k))
    states = states * decay.exp().unsqueeze(2).unsqueeze(3)
    delta = beta.float().unsqueeze(2) * (v.float() - (states * key).sum(3))
    states = states + delta.unsqueeze(3) * key
    return ((states * query).sum(3) * scale).to(q.dtype), states


def _chunks_in_torch(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, memory: Tensor, rows: ascend_delta.StepRows,
    metadata: AttentionMetadata, scale: float,
) -> Tensor:
    """Advance the states of rows token by token, by lengths on the host: a step that calls it cannot be captured."""
    out = torch.zeros_like(v)
    for row, (begin, end) in enumerate(pairwise(metadata.host_cu_seqlens_q)):
        slot = rows.slots[row : row + 1]
        states = memory.index_select(0, slot).float() * rows.keep[row].float()
        for token in (slice(t, t + 1) for t in range(begin, end)):
            out[token], states = _advanced(
                states, q[token], k[token], v[token], beta[token], decay[token], scale)
        torch_npu.npu_scatter_nd_update_(memory, slot.unsqueeze(1), states.to(memory.dtype))
    return out


@triton.implementation(gated_delta_rule)
def _(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    metadata: AttentionMetadata,
    state_slots: Tensor,
    key_heads: int,
) -> Tensor:
    """Read all lengths on the device, as `paged_attention` does. Rows of many tokens are advanced in chunks."""
    from npuserve.kernels.triton import launch_gated_delta

    return launch_gated_delta.gated_delta_rule(
        qkv, a, b, a_log, dt_bias, state, metadata, state_slots, key_heads, NORM_EPS)
