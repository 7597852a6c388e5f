"""Gated delta rule on CUDA, token by token for few tokens of a row, and in chunks for many. PDL: see dependent.py.

The chunk form is that of Yang et al. 2024 (arXiv:2406.06484 and 2412.06464), as in flash-linear-attention
(https://github.com/fla-org/flash-linear-attention/tree/main/fla/ops/gated_delta_rule). Let G be the sums of a chunk's
log decays up to each token, A[i, j] = beta_i exp(G_i - G_j) k_i k_j for j < i, and S the state before the chunk. The
chunk's corrected values are D = (I + A)^-1 diag(beta) (V - diag(exp(G)) K S), its results are
diag(exp(G)) Q S + (Q K^T decayed) D, and its state is exp(G_last) S + K^T diag(exp(G_last - G)) D. All factors are at
most 1. One launch computes what does not depend on S, for all chunks at once. A second one goes through the chunks of a
row in their order.

Norms of queries and keys are factors of the rows of these products, which take the queries and keys as they are. So
tensor cores multiply exact numbers, and round only S, D, the inverse and the decayed products. In a simulation with
bfloat16 the results then differ by 0.34 % from those in float64, where rounding the results alone makes 0.17 %, and the
states by at most 0.1 %.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npuserve.kernels.triton.causal_conv_silu import tile_of
from npuserve.kernels.triton.prefetch import to_l2

BLOCK_ROWS = tl.constexpr(16)
"""Rows of the blocks of A that are inverted row by row."""


@triton.jit
def _log_decay(a, a_log, dt_bias):
    """Return -exp(a_log) softplus(a + dt_bias) in float32."""
    x = a.to(tl.float32) + dt_bias
    small = tl.exp(tl.minimum(x, 20.0))
    shifted = 1.0 + small
    # log(1 + small) to the last bits (Kahan): the error of the sum is that of the division.
    exact = tl.where(shifted == 1.0, small, tl.log(shifted) * small / tl.where(shifted == 1.0, 1.0, shifted - 1.0))
    return -tl.exp(a_log) * tl.where(x > 20.0, x, exact)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x.to(tl.float32)))


@triton.jit
def _columns_to_l2(state, i, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr):
    """Prefetch BLOCK_V columns of a state [KEY_DIM, VALUE_DIM] of a head into the L2 cache, if blocks are whole."""
    if VALUE_DIM % BLOCK_V == 0:
        NBYTES: tl.constexpr = BLOCK_V * (state.dtype.element_ty.primitive_bitwidth // 8)
        to_l2(state + tl.minimum(i, KEY_DIM - 1) * VALUE_DIM, tl.full((), NBYTES, tl.int32))


@triton.jit
def _clear(out, first, tokens, step, WIDTH: tl.constexpr, inside):
    """Set every step-th row of `out` [tokens, WIDTH] to 0, from `first` on. out: pointers to columns of the row 0."""
    for token in range(first, tokens, step):
        zeros = tl.zeros(inside.shape, out.dtype.element_ty)
        tl.store(out + tl.cast(token, tl.int64) * WIDTH, zeros, mask=inside)


@triton.jit
def _advance(memory, q, k, v, beta, eps, KEY_DIM: tl.constexpr):
    """Return a decayed state [keys, values] after a token, and its product with the normalized query."""
    q *= tl.rsqrt(tl.sum(q * q, 0) + eps) * (1.0 / tl.sqrt(tl.cast(KEY_DIM, tl.float32)))
    k *= tl.rsqrt(tl.sum(k * k, 0) + eps)
    # The product with the new state is that with the old one plus that of the correction: both sums are of the old.
    delta = beta * (v - tl.sum(k[:, None] * memory, 0))
    result = tl.sum(q[:, None] * memory, 0) + tl.sum(q * k, 0) * delta
    return memory + k[:, None] * delta[None, :], result


@triton.jit(do_not_specialize=["tokens", "rows", "most"], do_not_specialize_on_alignment=[
    "context_lens", "cu_seqlens", "state_slots"])
def recurrent_kernel(
    qkv, a, b, a_log, dt_bias, state, context_lens, cu_seqlens, state_slots, out, tokens, rows, most, eps,
    qkv_stride: tl.int64, a_stride: tl.int64, b_stride: tl.int64,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ONE_EACH: tl.constexpr, PDL: tl.constexpr,
):
    """Advance rows of 1 to `most` tokens token by token.

    qkv: [tokens, 2 KEY_HEADS KEY_DIM + VALUE_HEADS VALUE_DIM], rows qkv_stride apart. a, b: [tokens, VALUE_HEADS].
    a_log, dt_bias: [VALUE_HEADS] float32. state: [slots, VALUE_HEADS, KEY_DIM, VALUE_DIM], rounded once a call.
    context_lens: [rows] int32. cu_seqlens: [rows + 1] int32. state_slots: [rows] int64.
    out: [tokens, VALUE_HEADS VALUE_DIM]; tokens of no row are set to 0.

    The grid is n * VALUE_HEADS * (blocks of BLOCK_V columns of a head's state); n is `rows`. A program has BLOCK_V
    columns of the state of one head in registers. BLOCK_K: a power of two, at least KEY_DIM.
    ONE_EACH: each row has one token and each token a row.
    """
    BLOCKS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    block = tl.program_id(0) % BLOCKS
    head = tl.program_id(0) // BLOCKS % VALUE_HEADS
    row = tl.program_id(0) // (BLOCKS * VALUE_HEADS)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    rate, bias = tl.load(a_log + head), tl.load(dt_bias + head)
    place = tl.load(state_slots + row)
    i, j = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    keys_inside, values_inside = i < KEY_DIM, j < VALUE_DIM
    inside = keys_inside[:, None] & values_inside[None, :]
    at = state + (place * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM) + i[:, None] * VALUE_DIM + j[None, :]
    if ONE_EACH:
        begin, count = row, 1
    else:
        begin = tl.load(cu_seqlens + row)
        count = tl.load(cu_seqlens + row + 1) - begin
    known_keys = tl.where(tl.load(context_lens + row) > count, KEY_DIM, 0)  # a row from its first token has no state
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if (known_keys > 0) & (count > 0) & (count <= most):  # the previous step wrote this state
            first = (place * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM) + block * BLOCK_V
            _columns_to_l2(state + first, i, KEY_DIM, VALUE_DIM, BLOCK_V)
        tl.extra.cuda.gdc_wait()
    if (count > 0) & (count <= most):
        memory = tl.load(at, mask=(i < known_keys)[:, None] & values_inside[None, :], other=0.0).to(tl.float32)
        for index in range(count):
            token = (begin + index).to(tl.int64)
            source = qkv + token * qkv_stride
            q = tl.load(source + key_head * KEY_DIM + i, mask=keys_inside, other=0.0).to(tl.float32)
            k = tl.load(source + KEYS + key_head * KEY_DIM + i, mask=keys_inside, other=0.0).to(tl.float32)
            v = tl.load(source + 2 * KEYS + head * VALUE_DIM + j, mask=values_inside, other=0.0).to(tl.float32)
            decay = tl.exp(_log_decay(tl.load(a + token * a_stride + head), rate, bias))
            beta = _sigmoid(tl.load(b + token * b_stride + head))
            memory, result = _advance(memory * decay, q, k, v, beta, eps, KEY_DIM)
            target = out + token * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + j
            tl.store(target, result.to(out.dtype.element_ty), mask=values_inside)
        tl.store(at, memory.to(state.dtype.element_ty), mask=inside)
    if not ONE_EACH:
        first = tl.load(cu_seqlens + rows) + row
        _clear(out + head * VALUE_DIM + j, first, tokens, rows, VALUE_HEADS * VALUE_DIM, values_inside)


@triton.jit(do_not_specialize=["rows", "least"], do_not_specialize_on_alignment=["cu_seqlens"])
def chunk_products_kernel(
    qkv, a, b, a_log, dt_bias, cu_seqlens, inverses, products, factors, rows, least, eps,
    qkv_stride: tl.int64, a_stride: tl.int64, b_stride: tl.int64,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):
    """Compute what does not depend on states, of each chunk of rows of at least `least` tokens.

    inverses, products: [chunks, VALUE_HEADS, CHUNK, CHUNK] in qkv's dtype, (I + A)^-1 diag(beta) and the decayed
        products of queries and keys.
    factors: [chunks, VALUE_HEADS, 3, CHUNK] float32: G, and the factors that normalize queries and keys.

    The grid is [n, VALUE_HEADS]; n is at least the number of chunks (`tile_of`). Other arguments as in
    `recurrent_kernel`. WIDE: as in `paged_attention_kernel`.
    """
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    item = tl.program_id(0)
    head = tl.program_id(1)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    rate, bias = tl.load(a_log + head), tl.load(dt_bias + head)
    row, first, tiles = tile_of(item, cu_seqlens, rows, least, ROWS, CHUNK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if item < tiles:
        begin = tl.load(cu_seqlens + row)
        count = tl.load(cu_seqlens + row + 1) - begin - first
        t, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
        there = t < count
        tokens = (begin + first + t).to(tl.int64)
        source = qkv + tokens[:, None] * qkv_stride + key_head * KEY_DIM + d[None, :]
        inside = there[:, None] & (d < KEY_DIM)[None, :]
        q = tl.load(source, mask=inside, other=0.0)
        k = tl.load(source + KEYS, mask=inside, other=0.0)
        log_decay = _log_decay(tl.load(a + tokens * a_stride + head, mask=there, other=0.0), rate, bias)
        decays = tl.cumsum(tl.where(there, log_decay, 0.0), 0)
        beta = tl.where(there, _sigmoid(tl.load(b + tokens * b_stride + head, mask=there, other=0.0)), 0.0)
        q_factor = _inverse_length(q, eps) * (1.0 / tl.sqrt(tl.cast(KEY_DIM, tl.float32)))
        k_factor = _inverse_length(k, eps)

        lower = t[:, None] >= t[None, :]
        decayed = tl.exp(tl.where(lower, decays[:, None] - decays[None, :], 0.0)) * k_factor[None, :]
        scores = _product(q, tl.trans(k), WIDE) * decayed * q_factor[:, None]
        matrix = (item * VALUE_HEADS + head).to(tl.int64) * (CHUNK * CHUNK) + t[:, None] * CHUNK + t[None, :]
        tl.store(products + matrix, tl.where(lower, scores, 0.0).to(products.dtype.element_ty))
        similar = _product(k, tl.trans(k), WIDE) * decayed * (k_factor * beta)[:, None]
        inverse = _inverse(tl.where(t[:, None] > t[None, :], similar, 0.0), CHUNK, WIDE) * beta[None, :]
        tl.store(inverses + matrix, inverse.to(inverses.dtype.element_ty))
        vector = factors + (item * VALUE_HEADS + head).to(tl.int64) * (3 * CHUNK) + t
        tl.store(vector, decays)
        tl.store(vector + CHUNK, q_factor)
        tl.store(vector + 2 * CHUNK, k_factor)


@triton.jit
def _inverse_length(x, eps):
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + eps)


@triton.jit
def _inverse(matrix, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Return the inverse of I + matrix in float32. matrix: [SIZE, SIZE], 0 on and above the diagonal.

    Powers of the whole matrix may be too large for float32 where keys repeat. So blocks on the diagonal are inverted by
    substitution, all at once: P. With N = P (matrix without these blocks), the inverse is (I + N)^-1 P, and N is 0 to
    the power of the number of blocks, 1, 2 or 4.
    """
    tl.static_assert(SIZE == BLOCK_ROWS or SIZE == 2 * BLOCK_ROWS or SIZE == 4 * BLOCK_ROWS)
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    near = (i // BLOCK_ROWS) == (j // BLOCK_ROWS)
    blocks = tl.where(near, matrix, 0.0)
    inverse = tl.where(i == j, 1.0, 0.0)
    for step in range(1, BLOCK_ROWS):
        chosen = i % BLOCK_ROWS == step
        # Row `step` of every block in one row: each column belongs to one block.
        factors = tl.sum(tl.where(chosen, blocks, 0.0), 0)
        known = tl.sum(tl.trans(tl.broadcast_to(factors[None, :], (SIZE, SIZE))) * inverse, 0)
        inverse = tl.where(chosen & near, inverse - known[None, :], inverse)
    if SIZE > BLOCK_ROWS:
        rest = _exact_product(inverse, tl.where(near, 0.0, matrix), WIDE)
        if SIZE > 2 * BLOCK_ROWS:
            inverse += _exact_product(rest, _exact_product(rest, inverse, WIDE), WIDE)
        inverse -= _exact_product(rest, inverse, WIDE)
    return inverse


@triton.jit
def _exact_product(a, b, WIDE: tl.constexpr):
    """Return a b of float32, on tensor cores by three products of TF32."""
    return tl.dot(a, b, input_precision="ieee" if WIDE else "tf32x3")


@triton.jit
def _product(a, b, WIDE: tl.constexpr):
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _advance_chunk(memory, q, k, v, inverse, scores, decays, q_factor, k_factor, last, WIDE: tl.constexpr):
    """Return the state after a chunk, and the chunk's results, both in float32. last: G of the last token."""
    decay = tl.exp(decays)
    rounded = memory.to(q.dtype)
    wrong = v.to(tl.float32) - _product(k, rounded, WIDE) * (decay * k_factor)[:, None]
    corrected = _product(inverse, wrong.to(q.dtype), WIDE)
    result = _product(q, rounded, WIDE) * (decay * q_factor)[:, None]
    result += _product(scores, corrected.to(q.dtype), WIDE)
    added = (corrected * (tl.exp(last - decays) * k_factor)[:, None]).to(q.dtype)
    return memory * tl.exp(last) + _product(tl.trans(k), added, WIDE), result


@triton.jit(do_not_specialize=["rows", "least"], do_not_specialize_on_alignment=[
    "context_lens", "cu_seqlens", "state_slots"])
def chunk_states_kernel(
    qkv, inverses, products, factors, state, context_lens, cu_seqlens, state_slots, out, rows, least,
    qkv_stride: tl.int64,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Advance rows of at least `least` tokens chunk by chunk.

    The grid is n * VALUE_HEADS * (blocks of BLOCK_V columns of a head's state); n is at least the number of such rows.
    Other arguments as in `recurrent_kernel` and `chunk_products_kernel`, which wrote inverses, products and factors.
    """
    BLOCKS: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    block = tl.program_id(0) % BLOCKS
    head = tl.program_id(0) // BLOCKS % VALUE_HEADS
    number = tl.program_id(0) // (BLOCKS * VALUE_HEADS)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    # The row `number` among those of at least `least` tokens, and its first chunk.
    r = tl.arange(0, ROWS)
    counts = tl.load(cu_seqlens + 1 + r, mask=r < rows, other=0) - tl.load(cu_seqlens + r, mask=r < rows, other=0)
    long = (counts >= least).to(tl.int32)
    row = tl.sum((tl.cumsum(long, 0) <= number).to(tl.int32), 0)
    item = tl.sum(tl.where((r < row) & (long > 0), (counts + CHUNK - 1) // CHUNK, 0), 0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if row < ROWS:
        begin = tl.load(cu_seqlens + row)
        count = tl.load(cu_seqlens + row + 1) - begin
        known_keys = tl.where(tl.load(context_lens + row) > count, KEY_DIM, 0)
        place = tl.load(state_slots + row)
        i, j = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
        t = tl.arange(0, CHUNK)
        keys_inside, values_inside = i < KEY_DIM, j < VALUE_DIM
        inside = keys_inside[:, None] & values_inside[None, :]
        at = state + (place * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM) + i[:, None] * VALUE_DIM + j[None, :]
        memory = tl.load(at, mask=(i < known_keys)[:, None] & values_inside[None, :], other=0.0).to(tl.float32)
        for first in range(0, count, CHUNK):
            there = first + t < count
            tokens = (begin + first + t).to(tl.int64)
            source = qkv + tokens[:, None] * qkv_stride
            of_keys = source + key_head * KEY_DIM + i[None, :]
            q = tl.load(of_keys, mask=there[:, None] & keys_inside[None, :], other=0.0)
            k = tl.load(of_keys + KEYS, mask=there[:, None] & keys_inside[None, :], other=0.0)
            v = tl.load(source + 2 * KEYS + head * VALUE_DIM + j[None, :],
                        mask=there[:, None] & values_inside[None, :], other=0.0)
            chunk = ((item + first // CHUNK) * VALUE_HEADS + head).to(tl.int64)
            matrix = chunk * (CHUNK * CHUNK) + t[:, None] * CHUNK + t[None, :]
            inverse, scores = tl.load(inverses + matrix), tl.load(products + matrix)
            vector = factors + chunk * (3 * CHUNK) + t
            decays, q_factor, k_factor = tl.load(vector), tl.load(vector + CHUNK), tl.load(vector + 2 * CHUNK)
            last = tl.load(factors + chunk * (3 * CHUNK) + CHUNK - 1)
            memory, result = _advance_chunk(memory, q, k, v, inverse, scores, decays, q_factor, k_factor, last, WIDE)
            target = out + tokens[:, None] * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + j[None, :]
            tl.store(target, result.to(out.dtype.element_ty), mask=there[:, None] & values_inside[None, :])
        tl.store(at, memory.to(state.dtype.element_ty), mask=inside)
