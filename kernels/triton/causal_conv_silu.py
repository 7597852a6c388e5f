"""Causal convolution on CUDA, for decode rows and chunks of one step. PDL: see dependent.py.

A tile is a run of a row's tokens. The program of a row's first tile reads the state, which no other program of the row
does, and writes the next state, so that states are replaced in place without a second launch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of(item, cu_seqlens, rows, least, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Return the row of a tile, the first token of the tile within the row, and the number of all tiles.

    Rows of at least `least` tokens have tiles of TILE tokens, numbered row by row. The row of a tile beyond them is
    ROWS.

    ROWS: a power of two, at least rows.
    """
    r = tl.arange(0, ROWS)
    counts = tl.load(cu_seqlens + 1 + r, mask=r < rows, other=0) - tl.load(cu_seqlens + r, mask=r < rows, other=0)
    tiles = tl.where(counts >= least, (counts + TILE - 1) // TILE, 0)
    row = tl.sum((tl.cumsum(tiles, 0) <= item).to(tl.int32), 0)
    before = tl.sum(tl.where(r < row, tiles, 0), 0)
    return row, (item - before) * TILE, tl.sum(tiles, 0)


@triton.jit(do_not_specialize=["tokens", "rows"], do_not_specialize_on_alignment=[
    "context_lens", "cu_seqlens", "state_slots"])
def causal_conv_silu_kernel(
    x, weight, state, context_lens, cu_seqlens, state_slots, out, tokens, rows, channels, x_stride: tl.int64,
    TAPS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """Run the kernel causal_conv_silu over x [tokens, channels]: out [tokens, channels].

    weight: [channels, TAPS]. state: [slots, channels, TAPS - 1]. context_lens: [rows] int32. cu_seqlens: [rows + 1]
    int32. state_slots: [rows] int64.

    The grid has programs of TILE tokens and BLOCK channels. ROWS 0: each row has one token and each token a row; the
    grid is [rows, ...], and TILE is 1. Otherwise the grid is [n, ...]; n is at least the number of tiles (`tile_of`),
    plus those of the tokens of no row, which are set to 0.
    """
    item = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < channels
    if ROWS == 0:
        row, first, tiles = item, 0, rows
    else:
        row, first, tiles = tile_of(item, cu_seqlens, rows, 1, ROWS, TILE)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.arange(0, TILE)
    if item < tiles:
        begin = row if ROWS == 0 else tl.load(cu_seqlens + row)
        count = 1 if ROWS == 0 else tl.load(cu_seqlens + row + 1) - begin
        continued = tl.load(context_lens + row) > count
        place = tl.load(state_slots + row)
        window = state + place * channels * (TAPS - 1) + columns * (TAPS - 1)
        own = first + t
        kept = (own < count)[:, None] & inside[None, :]
        source = x + (begin + own).to(tl.int64)[:, None] * x_stride + columns[None, :]
        total = tl.zeros((TILE, BLOCK), tl.float32)
        for tap in tl.static_range(TAPS):
            back = TAPS - 1 - tap
            taken = tl.load(source - back * x_stride, mask=kept & (own >= back)[:, None], other=0.0)
            if back > 0:  # noqa: SIM102  known to the compiler
                if (first < back) & continued:
                    earlier = kept & (own < back)[:, None]
                    taken += tl.load(window[None, :] + (own + tap)[:, None], mask=earlier, other=0.0)
            total += taken.to(tl.float32) * tl.load(weight + columns * TAPS + tap, mask=inside, other=0.0).to(
                tl.float32)[None, :]
        silu = total / (1.0 + tl.exp(-total))
        target = out + (begin + own).to(tl.int64)[:, None] * channels + columns[None, :]
        tl.store(target, silu.to(out.dtype.element_ty), mask=kept)
        if first == 0:
            tl.debug_barrier()  # other threads read the state of these channels above
            own_x = x + tl.cast(begin, tl.int64) * x_stride + columns
            _keep_inputs(own_x, window, columns, count, channels, continued, x_stride, TAPS)
    elif ROWS > 0:
        own = tl.load(cu_seqlens + rows) + (item - tiles) * TILE + t
        target = out + own.to(tl.int64)[:, None] * channels + columns[None, :]
        nothing = tl.zeros((TILE, BLOCK), out.dtype.element_ty)
        tl.store(target, nothing, mask=(own < tokens)[:, None] & inside[None, :])


@triton.jit
def _keep_inputs(x, window, columns, count, channels, continued, x_stride, TAPS: tl.constexpr):
    """Write the last TAPS - 1 inputs of a row to its state. Those of the state itself move to lower indices."""
    for index in tl.static_range(TAPS - 1):
        at = count + index - (TAPS - 1)  # in the row; negative for inputs of the state
        present = columns < tl.where(at >= 0, channels, 0)
        earlier = columns < tl.where((at < 0) & continued, channels, 0)
        value = tl.load(x + at * x_stride, mask=present, other=0.0)
        value += tl.load(window + count + index, mask=earlier, other=0.0)
        tl.store(window + index, value, mask=columns < channels)
