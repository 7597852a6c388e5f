"""Row-wise kernels on CUDA: norms, quantization, SwiGLU, gates, lookups. PDL: see dependent.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x, residual, gamma, out, total, values, scales, zeros, static_scale, static_zero,
    width, x_stride: tl.int64, residual_stride: tl.int64, eps, levels, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalize x [rows, width], or x + residual, and store the result in out [rows, width].

    The sum x + residual is stored in `total`. Without `out` the result is quantized, stored by `_quantize`. A program
    holds a row in registers. BLOCK: a power of two, at least width.
    """
    places = tl.arange(0, BLOCK)
    inside = places < width
    weight = tl.load(gamma + places, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(x + row * x_stride + places, mask=inside, other=0.0)
    if residual is not None:
        added = tl.load(residual + row * residual_stride + places, mask=inside, other=0.0)
        own = (own.to(tl.float32) + added.to(tl.float32)).to(own.dtype)
        tl.store(total + row * width + places, own, mask=inside)
    wide = own.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = wide * scale
    if gamma.dtype.element_ty == own.dtype:  # with a float32 gamma the result is rounded once
        normed = normed.to(own.dtype).to(tl.float32)
    normed = (normed * weight).to(own.dtype)
    if out is not None:
        tl.store(out + row * width + places, normed, mask=inside)
    else:
        _quantize(
            normed.to(tl.float32), row, width, values, scales, zeros, static_scale, static_zero, levels, BLOCK, GROUP)


@triton.jit
def quantize_kernel(
    x, values, scales, zeros, static_scale, static_zero,
    width, x_stride: tl.int64, levels, BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):
    """Quantize x [rows, width] as `_quantize` stores it. BLOCK: a power of two, at least width."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    own = tl.load(x + row * x_stride + places, mask=places < width, other=0.0).to(tl.float32)
    _quantize(own, row, width, values, scales, zeros, static_scale, static_zero, levels, BLOCK, GROUP)


@triton.jit
def _quantize(
    x, row, width, values, scales, zeros, static_scale, static_zero, levels, BLOCK: tl.constexpr, GROUP: tl.constexpr
):
    """Quantize x [BLOCK] float32, 0 from width on, as `quantize` does, and store it as row `row`.

    values, scales, zeros: [rows, width] int8 or float8, [rows] float32, and [rows] int32 or None for no zero points.
    static_scale: None computes the scale of the row.
    GROUP: columns of float8 that share a scale, which divide BLOCK; scales are then [groups, rows]. 0: a row.
    """
    places = tl.arange(0, BLOCK)
    if GROUP > 0:
        COUNT: tl.constexpr = BLOCK // GROUP
        groups = tl.arange(0, COUNT)
        near, of_group = quantize_groups(tl.reshape(x, (COUNT, GROUP)), levels, 1)
        tl.store(scales + groups * tl.num_programs(0) + row, of_group, mask=groups * GROUP < width)
        at = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        tl.store(values + row * width + at, near.to(values.dtype.element_ty), mask=at < width)
        return
    zero = 0.0
    if static_scale is not None:
        scale = tl.load(static_scale)
        if static_zero is not None:
            zero = tl.load(static_zero).to(tl.float32)
    elif zeros is None:
        scale = tl.div_rn(tl.max(tl.abs(x), 0), levels)
        scale = tl.where(scale > 0, scale, 1.0)
    else:
        low, high = tl.minimum(tl.min(x, 0), 0.0), tl.maximum(tl.max(x, 0), 0.0)
        scale = tl.div_rn(high, 255.0) - tl.div_rn(low, 255.0)
        scale = tl.where(scale > 0, scale, 1.0)
        zero = tl.minimum(tl.maximum(_rint(-128.0 - tl.div_rn(low, scale)), -128.0), 127.0)
    tl.store(scales + row, scale)
    if zeros is not None:
        tl.store(zeros + row, zero.to(tl.int32))
    near = _divided(x, scale)
    if values.dtype.element_ty == tl.int8:
        if zeros is not None:
            near = _rint(near) + zero
        near = tl.minimum(tl.maximum(near, -128.0), 127.0)
        # The last byte of the sum is the whole number: see `_rint`. A conversion would run at a quarter of the speed.
        whole = (near + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        whole = _e4m3(tl.minimum(tl.maximum(near, -448.0), 448.0)).to(values.dtype.element_ty)
    tl.store(values + row * width + places, whole, mask=places < width)


@triton.jit
def quantize_groups(x, levels, AXIS: tl.constexpr):
    """Return x [n, m] float32 as numbers of float8, in float32, and the scale of each group along AXIS."""
    scales = tl.div_rn(tl.max(tl.abs(x), AXIS), levels)
    scales = tl.where(scales > 0, scales, 1.0)
    near = tl.div_rn(x, tl.expand_dims(scales, AXIS))
    return _e4m3(tl.minimum(tl.maximum(near, -448.0), 448.0)), scales


@triton.jit
def _divided(x, scale):
    """Divide a row by its scale, rounded to nearest: one division for the row, and three operations for each number.

    The quotient by the reciprocal is corrected by its exact remainder (Markstein 1990, doi:10.1147/rd.341.0111).
    """
    if scale < 1e-30:
        quotient = tl.div_rn(x, scale)  # the reciprocal may be infinite
    else:
        inverse = tl.div_rn(1.0, scale)
        near = x * inverse
        quotient = tl.fma(tl.fma(-near, scale, x), inverse, near)
    return quotient


@triton.jit
def _rint(x):
    """Round float32 to the nearest whole numbers, ties to even; clamped to -512 .. 512."""
    # From 2**23 to 2**24 float32 has only whole numbers: the sum is rounded to one.
    return (tl.minimum(tl.maximum(x, -512.0), 512.0) + 12582912.0) - 12582912.0


@triton.jit
def _e4m3(x):
    """Round float32 to the nearest numbers of float8 (e4m3), ties to even; x is from -448 to 448.

    The conversion that follows is then exact, also in Triton's interpreter, which rounds differently from a GPU.
    """
    # The numbers of an octave are an eighth of its power of two apart, and at least 2**-9. As in `_rint`, float32 has
    # only these multiples near 1.5 * 2**23 times the distance.
    octave = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    large = tl.maximum(octave, 0.015625) * 1572864.0
    return (x + large) - large


@triton.jit
def swiglu_kernel(gate_up, out, width, stride: tl.int64, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Apply SwiGLU to gate_up [rows, 2 width], gate first: out [rows, width]. A program has BLOCK columns of a row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < width
    own = gate_up + row * stride + places
    gate = tl.load(own, mask=inside, other=0.0)
    up = tl.load(own + width, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    unit = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * width + places, (unit * up).to(gate.dtype), mask=inside)


@triton.jit
def sigmoid_gate_kernel(
    x, gate, out, width, x_stride: tl.int64, gate_stride: tl.int64, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Multiply x [rows, width] by the sigmoid of the gate: out [rows, width]. A program has BLOCK columns of a row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < width
    own = tl.load(x + row * x_stride + places, mask=inside, other=0.0)
    wide = tl.load(gate + row * gate_stride + places, mask=inside, other=0.0).to(tl.float32)
    factor = (1.0 / (1.0 + tl.exp(-wide))).to(own.dtype).to(tl.float32)
    tl.store(out + row * width + places, (own.to(tl.float32) * factor).to(own.dtype), mask=inside)


@triton.jit
def gated_rms_norm_kernel(
    x, z, gamma, out, groups, size, x_stride: tl.int64, z_stride: tl.int64, eps, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """Normalize each `size` numbers of x [rows, groups size], multiply by gamma [size] and silu(z): out as x.

    A program has GROUPS groups of a row. BLOCK: a power of two, at least size.
    """
    own_groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = tl.arange(0, BLOCK)
    weight = tl.load(gamma + columns, mask=columns < size, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    places = own_groups[:, None] * size + columns[None, :]
    inside = (own_groups < groups)[:, None] & (columns < size)[None, :]
    own = tl.load(x + row * x_stride + places, mask=inside, other=0.0)
    gate = tl.load(z + row * z_stride + places, mask=inside, other=0.0).to(tl.float32)
    wide = own.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / size + eps)
    normed = (wide * scale[:, None]).to(own.dtype).to(tl.float32) * weight[None, :]
    normed = normed.to(gamma.dtype.element_ty).to(tl.float32)
    gated = normed * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out + row * (groups * size) + places, gated.to(own.dtype), mask=inside)


@triton.jit
def embedding_kernel(
    ids, table, scales, zeros, out, width, table_stride: tl.int64, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Look up ids [rows] int64 in table [V, width]: out [rows, width].

    scales, zeros: [V] float32, and [V] int32 or None, of an int8 table. A program has BLOCK columns of a row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < width
    chosen = tl.load(ids + row)
    own = tl.load(table + chosen * table_stride + places, mask=inside)
    if scales is not None:
        own = own.to(tl.float32)
        if zeros is not None:
            own -= tl.load(zeros + chosen).to(tl.float32)
        own = (own * tl.load(scales + chosen)).to(out.dtype.element_ty)
    tl.store(out + row * width + places, own, mask=inside)


@triton.jit
def take_ids_kernel(ids, last, out, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Apply `take_ids` to ids [count] and last: out [count], all int64."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    given = tl.load(ids + places, mask=inside, other=0)
    sampled = tl.load(last - 1 - given, mask=inside & (given < 0), other=0)
    tl.store(out + places, tl.where(given < 0, sampled, given), mask=inside)


@triton.jit
def keep_ids_kernel(ids, last, count, stride: tl.int64, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copy the first column of ids [count, ...] int64, whose rows are `stride` apart, to last [count] int64."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    tl.store(last + places, tl.load(ids + places * stride, mask=inside), mask=inside)


@triton.jit
def rank_sum_kernel(parts, out, count, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Add parts [SIZE, count] in their order, in float32, and round the sums once: out [count].

    It has no PDL, since it follows a kernel of another library, which may run on another stream.
    """
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    total = tl.load(parts + places, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(1, SIZE):
        total += tl.load(parts + rank * count + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=inside)
