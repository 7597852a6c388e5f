"""Gated delta net on Ascend: convolution, gates and rule, for vector cores.

Channels of a convolution's inputs, and keys of a state's row, are consecutive in memory, as the vector cores read them.
A program processes every n-th item, so that the grid is at most what a launch takes. Lengths are read on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)) in float32, as accurate as torch's."""
    small = tl.exp(tl.minimum(x, 20.0))
    shifted = 1.0 + small
    # log(1 + small) to the last bits (Kahan): the error of the sum is that of the division.
    exact = tl.where(shifted == 1.0, small, tl.log(shifted) * small / tl.where(shifted == 1.0, 1.0, shifted - 1.0))
    return tl.where(x > 20.0, x, exact)


@triton.jit(do_not_specialize=["tokens", "rows"])
def conv_silu_kernel(
    x, taps, state, context_lens, cu_seqlens, state_slots, out, tokens, rows, x_stride: tl.int64,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, EARLIER: tl.constexpr,
):
    """Run the kernel causal_conv_silu over x [tokens, CHANNELS], rows x_stride apart: out [tokens, CHANNELS].

    taps: [TAPS, CHANNELS] float32. state: [slots, TAPS - 1, CHANNELS]. context_lens: [rows] int32.
    cu_seqlens: [rows + 1] int32. state_slots: [rows] int64.

    An item is BLOCK channels of a row, whose tokens it takes TILE at a time. So no other program reads or writes the
    state of these channels. EARLIER: a power of two, at least TAPS - 1. Tokens of no row are set to 0.
    """
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    KEPT: tl.constexpr = TAPS - 1
    for item in range(tl.program_id(0), rows * BLOCKS, tl.num_programs(0)):
        row = item // BLOCKS
        columns = (item % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < CHANNELS
        begin = tl.load(cu_seqlens + row)
        count = tl.load(cu_seqlens + row + 1) - begin
        window = state + tl.load(state_slots + row) * (KEPT * CHANNELS) + columns
        known = tl.where(tl.load(context_lens + row) > count, KEPT, 0)  # a row from its first token has no state
        own = x + begin.to(tl.int64) * x_stride + columns
        for first in range(0, count, TILE):
            t = first + tl.arange(0, TILE)
            total = tl.zeros((TILE, BLOCK), tl.float32)
            for tap in tl.static_range(TAPS):
                at = t + (tap - KEPT)  # in the row; negative for inputs of the state
                given = ((at >= 0) & (t < count))[:, None] & inside[None, :]
                taken = tl.load(own[None, :] + at[:, None] * x_stride, mask=given, other=0.0).to(tl.float32)
                if tap < KEPT:  # noqa: SIM102  known to the compiler
                    if first < KEPT:
                        before = ((at < 0) & (at + known >= 0) & (t < count))[:, None] & inside[None, :]
                        taken += tl.load(
                            window[None, :] + (at + KEPT)[:, None] * CHANNELS, mask=before, other=0.0).to(tl.float32)
                weight = tl.load(taps + tap * CHANNELS + columns, mask=inside, other=0.0)
                total += taken * weight[None, :]
            target = out + (begin + t).to(tl.int64)[:, None] * CHANNELS + columns[None, :]
            tl.store(target, _silu(total).to(out.dtype.element_ty), mask=(t < count)[:, None] & inside[None, :])
        if count > 0:
            # The last inputs, all of them read before one is written.
            i = tl.arange(0, EARLIER)
            at = count + i - KEPT
            given = ((at >= 0) & (i < KEPT))[:, None] & inside[None, :]
            new = tl.load(own[None, :] + at[:, None] * x_stride, mask=given, other=0.0)
            before = ((at < 0) & (at + known >= 0) & (i < KEPT))[:, None] & inside[None, :]
            old = tl.load(window[None, :] + (at + KEPT)[:, None] * CHANNELS, mask=before, other=0.0)
            tl.store(window[None, :] + i[:, None] * CHANNELS, tl.where(given, new, old),
                     mask=(i < KEPT)[:, None] & inside[None, :])
        for token in range(tl.load(cu_seqlens + rows) + row, tokens, rows):
            tl.store(out + tl.cast(token, tl.int64) * CHANNELS + columns, tl.zeros((BLOCK,), out.dtype.element_ty),
                     mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def delta_gates_kernel(
    a, b, a_log, dt_bias, forget, decay, beta, tokens, a_stride: tl.int64, b_stride: tl.int64,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):
    """Compute decay [tokens, HEADS] float32, -exp(a_log) softplus(a + dt_bias), and beta, sigmoid(b).

    a, b: [tokens, HEADS], rows a_stride and b_stride apart. a_log, dt_bias: [HEADS] float32.
    forget: [tokens] float32, added to a token's decays; None for none.
    BLOCK: a power of two, at least HEADS. An item is TILE tokens.
    """
    heads = tl.arange(0, BLOCK)
    inside = heads < HEADS
    rate = -tl.exp(tl.load(a_log + heads, mask=inside, other=0.0))
    bias = tl.load(dt_bias + heads, mask=inside, other=0.0)
    for first in range(tl.program_id(0) * TILE, tokens, tl.num_programs(0) * TILE):
        t = first + tl.arange(0, TILE)
        there = (t < tokens)[:, None] & inside[None, :]
        own_a = tl.load(a + t.to(tl.int64)[:, None] * a_stride + heads[None, :], mask=there, other=0.0).to(tl.float32)
        own_b = tl.load(b + t.to(tl.int64)[:, None] * b_stride + heads[None, :], mask=there, other=0.0).to(tl.float32)
        total = _softplus(own_a + bias[None, :]) * rate[None, :]
        if forget is not None:
            total += tl.load(forget + t, mask=t < tokens, other=0.0)[:, None]
        target = t.to(tl.int64)[:, None] * HEADS + heads[None, :]
        tl.store(decay + target, total, mask=there)
        tl.store(beta + target, (1.0 / (1.0 + tl.exp(-own_b))).to(beta.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["tokens", "rows"])
def delta_rule_kernel(
    qkv, a, b, a_log, dt_bias, state, context_lens, cu_seqlens, state_slots, out, tokens, rows, eps,
    qkv_stride: tl.int64, a_stride: tl.int64, b_stride: tl.int64,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Run the kernel gated_delta_rule token by token.

    qkv: [tokens, 2 KEY_HEADS KEY_DIM + VALUE_HEADS VALUE_DIM], rows qkv_stride apart. a, b: [tokens, VALUE_HEADS].
    a_log, dt_bias: [VALUE_HEADS] float32. state: [slots, VALUE_HEADS, VALUE_DIM, KEY_DIM], rounded once a call.
    context_lens: [rows] int32. cu_seqlens: [rows + 1] int32. state_slots: [rows] int64.
    out: [tokens, VALUE_HEADS VALUE_DIM]; tokens of no row are set to 0.

    An item is BLOCK_V rows of the state of one head. BLOCK_K: a power of two, at least KEY_DIM.
    """
    BLOCKS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    i = tl.arange(0, BLOCK_K)
    keys_inside = i < KEY_DIM
    for item in range(tl.program_id(0), rows * (VALUE_HEADS * BLOCKS), tl.num_programs(0)):
        head = item // BLOCKS % VALUE_HEADS
        row = item // (BLOCKS * VALUE_HEADS)
        j = (item % BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
        values_inside = j < VALUE_DIM
        inside = values_inside[:, None] & keys_inside[None, :]
        rate, bias = -tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
        begin = tl.load(cu_seqlens + row)
        count = tl.load(cu_seqlens + row + 1) - begin
        place = tl.load(state_slots + row)
        at = state + (place * VALUE_HEADS + head) * (VALUE_DIM * KEY_DIM) + j[:, None] * KEY_DIM + i[None, :]
        if count > 0:
            known = tl.where(tl.load(context_lens + row) > count, KEY_DIM, 0)  # a row from its first token has no state
            memory = tl.load(at, mask=values_inside[:, None] & (i < known)[None, :], other=0.0).to(tl.float32)
            for index in range(count):
                token = (begin + index).to(tl.int64)
                source = qkv + token * qkv_stride + (head // GROUP) * KEY_DIM + i
                q = tl.load(source, mask=keys_inside, other=0.0).to(tl.float32)
                k = tl.load(source + KEYS, mask=keys_inside, other=0.0).to(tl.float32)
                v = tl.load(qkv + token * qkv_stride + 2 * KEYS + head * VALUE_DIM + j, mask=values_inside, other=0.0)
                q *= tl.rsqrt(tl.sum(q * q, 0) + eps) * (1.0 / tl.sqrt(tl.cast(KEY_DIM, tl.float32)))
                k *= tl.rsqrt(tl.sum(k * k, 0) + eps)
                decay = tl.exp(_softplus(tl.load(a + token * a_stride + head).to(tl.float32) + bias) * rate)
                beta = 1.0 / (1.0 + tl.exp(-tl.load(b + token * b_stride + head).to(tl.float32)))
                memory *= decay
                delta = beta * (v.to(tl.float32) - tl.sum(memory * k[None, :], 1))
                memory += delta[:, None] * k[None, :]
                target = out + token * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + j
                tl.store(target, tl.sum(memory * q[None, :], 1).to(out.dtype.element_ty), mask=values_inside)
            tl.store(at, memory.to(state.dtype.element_ty), mask=inside)
        for token in range(tl.load(cu_seqlens + rows) + row, tokens, rows):
            target = out + tl.cast(token, tl.int64) * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + j
            tl.store(target, tl.zeros((BLOCK_V,), out.dtype.element_ty), mask=values_inside)
