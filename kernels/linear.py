"""Products with weights (linear layers), plain or fused with SwiGLU or argmax."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.ascend import torch_npu
from npuserve.kernels.case_numbers import FLOATS, Numbers, int4, w4a8
from npuserve.kernels.greedy import greedy
from npuserve.kernels.int4 import PlainInt4
from npuserve.kernels.int4_weight import Int4Weight
from npuserve.kernels.mask_logits import mask_logits, random_masks
from npuserve.kernels.quantize import ascend_quantize, native_quantize, quantize
from npuserve.kernels.quantized import (
    DYNAMIC,
    FLOAT8_DYNAMIC,
    FLOAT8_GROUPED,
    FLOAT8_SCHEMES,
    ZEROS,
    Quantized,
    Scheme,
    scheme_of,
)
from npuserve.kernels.registry import Case, kernel
from npuserve.kernels.swiglu import swiglu
from npuserve.kernels.weight import Weight, WeightForm, form_of, from_ascend, packed, to_ascend

FLIPS = 3e-2
"""Tolerance of products whose x is quantized inside: last-bit differences of x flip int8 and float8 values."""

IMPRECISE = 1e-3, 2e-6
"""Tolerance of products of float8, and its growth for each number of K: tensor cores may sum them with some 14 bits
(`launch_linear.PRECISE_ROWS`). The largest of ten million errors is near it on an H200, for a K of 17408."""

# (K, N) of Qwen3-0.6B: qkv, attention output, gate and up, down.
QWEN3_06B = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))


INT8_GIVEN = Numbers("int8 given", DYNAMIC, is_given=True)
INT8_MADE = Numbers("int8 made", DYNAMIC)
INT8_ZEROS = Numbers("int8 zeros", Scheme(symmetric=False), is_given=True)
FLOAT8_GIVEN = Numbers("float8", FLOAT8_DYNAMIC, is_given=True)
FLOAT8_MADE = Numbers("float8 made", FLOAT8_DYNAMIC)
GROUPED_GIVEN = Numbers("grouped float8", FLOAT8_GROUPED, is_given=True)
GROUPED_MADE = Numbers("grouped float8 made", FLOAT8_GROUPED)


def _int4_given(size: int) -> Numbers:
    return w4a8("int4 given", size, is_given=True)


def _int4_made(size: int) -> Numbers:
    return w4a8("int4 made", size)


def _case(
    tokens: int, k: int, n: int, bias: bool = False, benchmark: bool = False, numbers: Numbers = FLOATS
) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor | Quantized, Weight, Tensor | None]:
        x = torch.randn(tokens, k, generator=generator)
        weight = torch.randn(n, k, generator=generator) * k**-0.5
        b = torch.randn(n, generator=generator).to(dtype) if bias else None
        quantized = numbers.weight(weight, generator, dtype)
        return numbers.x(x, generator, dtype), quantized, b

    tolerance = 0.0
    if numbers.quantizes:
        tolerance = FLIPS
    elif numbers.is_float8:
        tolerance = IMPRECISE[0] + IMPRECISE[1] * k
    return Case(f"{tokens}x{k}x{n}{'+bias' if bias else ''}{_suffix(numbers)}", make, benchmark,
                zeros=numbers.has_zeros, float8=numbers.is_float8, int4=numbers.rows_of_4_bits(n),
                w4a8=numbers.is_w4a8, tolerance=tolerance)


def _suffix(numbers: Numbers) -> str:
    """Return the part of a case's name for its numbers."""
    return f" {numbers.label}" if numbers.label else ""


@kernel(
    "linear",
    cases=[
        *(_case(t, k, n, bias, numbers=numbers)
          for numbers in (FLOATS, INT8_GIVEN, INT8_ZEROS, INT8_MADE, FLOAT8_GIVEN, FLOAT8_MADE)
          for t, k, n, bias in ((1, 8, 3, False), (5, 33, 17, True), (16, 64, 96, False), (47, 130, 200, True))),
        *(_case(t, 300, n, bias, numbers=numbers) for numbers in (GROUPED_GIVEN, GROUPED_MADE) for t, n, bias in (
            (1, 5, False), (40, 70, True))),
        *(_case(t, k, n, bias, numbers=numbers) for numbers, t, k, n, bias in (
            (int4(32), 1, 32, 3, False), (int4(32), 5, 72, 17, True), (int4(32, zeros=True), 3, 64, 49, True),
            (int4(64), 13, 104, 81, False), (int4(64, zeros=True), 70, 320, 130, True), (int4(128), 7, 200, 35, True),
            (int4(128, zeros=True), 29, 392, 90, False), (int4(32), 1, 32, 8, True),
            (int4(64, zeros=True), 9, 200, 72, True), (int4(128), 33, 256, 96, False),
            (_int4_given(32), 1, 32, 3, False), (_int4_made(32), 5, 72, 17, True),
            (_int4_given(64), 13, 104, 81, False), (_int4_given(128), 29, 392, 90, True),
            (_int4_given(32), 70, 320, 130, True),
            (_int4_made(128), 130, 8192, 19, False))),
        *(_case(t, k, n, benchmark=True, numbers=numbers) for numbers in (FLOATS, INT8_GIVEN, int4(32), _int4_given(32))
          for t in (1, 8, 32, 512) for k, n in QWEN3_06B),
    ],
)
def linear(x: Tensor | Quantized, weight: Weight, bias: Tensor | None) -> Tensor:
    """Multiply x [T, K] by weight [N, K] and add bias [N] or None: [T, N].

    With a quantized weight the result is the exact sum of products times both scales, plus bias, in the weight's
    `dtype`. If rows have scales for groups of columns, it is the sum of these results of the groups. An x of floats is
    first quantized by `weight.inputs`.

    Raises TypeError for a quantized x with a weight of floats.
    """
    return form_of(weight).linear(x, bias)


def _swiglu_case(
    tokens: int, k: int, intermediate: int, bias: bool = False, benchmark: bool = False, numbers: Numbers = FLOATS,
    scheme: str = "",
) -> Case:
    product = _case(tokens, k, 2 * intermediate, bias, numbers=numbers)

    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
        return *product.make(generator, dtype), scheme_of(scheme, generator)

    name = f"{tokens}x{k}x2x{intermediate}{'+bias' if bias else ''}{_suffix(numbers)}"
    return Case(name + (scheme and " to " + scheme), make, benchmark, zeros=product.zeros or scheme in ZEROS,
                float8=product.float8 or scheme in FLOAT8_SCHEMES, int4=product.int4, w4a8=product.w4a8,
                tolerance=product.tolerance)


@kernel(
    "linear_swiglu",
    cases=[
        *(_swiglu_case(t, k, i, bias, numbers=numbers, scheme=scheme)
          for numbers, scheme in ((FLOATS, ""), (INT8_GIVEN, "int8"), (INT8_MADE, ""), (INT8_ZEROS, "asymmetric"),
                                  (FLOATS, "static"), (FLOAT8_GIVEN, "float8"), (FLOATS, "static float8"))
          for t, k, i, bias in (
              (1, 8, 3, False), (5, 33, 16, True), (37, 64, 80, False), (6, 40, 96, False), (9, 20, 23, True))),
        _swiglu_case(7, 300, 150, True, numbers=GROUPED_GIVEN, scheme="grouped float8"),
        *(_swiglu_case(t, k, i, bias, numbers=numbers) for numbers, t, k, i, bias in (
            (int4(32), 1, 64, 48, False), (int4(128, zeros=True), 6, 136, 32, True), (int4(64), 40, 128, 23, True),
            (_int4_given(32), 1, 64, 48, False), (_int4_made(64), 40, 136, 23, True),
            (_int4_given(128), 14, 256, 64, True))),
        *(_swiglu_case(t, 1024, 3072, benchmark=True, numbers=numbers, scheme=scheme)
          for numbers, scheme in ((FLOATS, ""), (INT8_GIVEN, "int8"), (int4(32), "")) for t in (1, 8, 32, 512)),
    ],
)
def linear_swiglu(
    x: Tensor | Quantized, weight: Weight, bias: Tensor | None, scheme: Scheme | None = None
) -> Tensor | Quantized:
    """Apply `linear` and `swiglu`: x [T, K], weight [2 I, K] of gate and up, bias [2 I] or None -> [T, I].

    scheme: quantizes the result; None leaves it as it is.
    """
    gated = swiglu(linear(x, weight, bias))
    return gated if scheme is None else quantize(gated, scheme)


def _argmax_case(
    rows: int, k: int, vocabulary: int, padding: int, benchmark: bool = False, numbers: Numbers = FLOATS,
    masked: bool = False,
) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
        x, weight, _ = _case(rows, k, vocabulary + padding, numbers=numbers).make(generator, dtype)
        form = form_of(weight)
        form.repeat_first(vocabulary)
        if isinstance(form, Int4Weight):
            assert isinstance(form.numbers, PlainInt4)
            factors = form.numbers.scale
        else:
            values, scale, _ = form.parts
            factors = values if scale is None else scale
        factors[vocabulary:] *= 3
        return x, weight, None, vocabulary, *(random_masks(generator, rows, vocabulary) if masked else ())

    name = f"{rows}x{k}x{vocabulary}+{padding}{_argmax_suffix(numbers)}{' masked' if masked else ''}"
    return Case(name, make, benchmark, float8=numbers.is_float8, int4=numbers.rows_of_4_bits(vocabulary + padding),
                w4a8=numbers.is_w4a8)


def _argmax_suffix(numbers: Numbers) -> str:
    """Return the part of a case's name for its numbers, of which x is never given."""
    if numbers.group_size:
        return " w4a8" if numbers.is_w4a8 else " int4"
    if numbers.is_float8:
        return " float8"
    return " int8" if numbers.scheme else ""


@kernel(
    "linear_argmax",
    cases=[
        *(_argmax_case(*shape, numbers=numbers, masked=masked)
          for masked in (False, True) for numbers in (FLOATS, INT8_MADE)
          for shape in ((1, 8, 7, 0), (5, 32, 101, 27), (40, 64, 300, 20))),
        *(_argmax_case(*shape, numbers=int4(32), masked=masked) for masked in (False, True)
          for shape in ((1, 40, 101, 27), (14, 96, 70, 20), (20, 32, 33, 5))),
        *(_argmax_case(*shape, numbers=_int4_made(32), masked=masked) for masked in (False, True)
          for shape in ((1, 40, 101, 27), (14, 96, 70, 20))),
        *(_argmax_case(*shape, numbers=FLOAT8_MADE) for shape in ((1, 8, 7, 0), (6, 48, 90, 38))),
        *(_argmax_case(rows, 1024, 151936, 0, benchmark=True, numbers=numbers) for numbers in (FLOATS, INT8_MADE)
          for rows in (1, 8, 32)),
        _argmax_case(32, 1024, 151936, 0, benchmark=True, masked=True),
    ],
)
def linear_argmax(
    x: Tensor, weight: Weight, bias: Tensor | None, vocabulary: int, bits: Tensor | None = None,
    mask_of_row: Tensor | None = None,
) -> Tensor:
    """Return the argmax of `linear`: ids [R, 1] int64 below `vocabulary`; x [R, K], weight [Vp, K], bias [Vp] or None.

    bits, mask_of_row: as for `mask_logits`; None if no row has a mask.

    The result equals `greedy` over the logits of `linear`, after `mask_logits`. Some backends do not store the logits
    in memory.
    """
    logits = linear(x, weight, bias)
    if bits is not None and mask_of_row is not None:
        mask_logits(logits, vocabulary, bits, mask_of_row)
    return greedy(logits, vocabulary)


def _product(name: str, x: Tensor | Quantized, weight: Weight, bias: Tensor | None, out: list[Tensor], *sizes: int,
             more: Sequence[Tensor | None] = ()) -> list[native.Call]:
    """Return the calls of a native product whose results go to `out`.

    sizes: further sizes after T, K, N.
    more: further tensors after the product's.
    """
    form = form_of(weight)
    n, k = form.shape
    tensors = [bias, *out, *[None] * (2 - len(out))]
    return form.native_product(name, x, tensors, more, [len(x), k, n, *sizes])


@native.implementation(linear, adapt=packed)
def _(x: Tensor | Quantized, weight: Weight, bias: Tensor | None) -> Tensor:
    out = native.empty(len(x), weight.shape[0], dtype=weight.dtype)
    native.call("linear", *_product("linear", x, weight, bias, [out]))
    return out


@native.implementation(linear_swiglu, adapt=packed)
def _(x: Tensor | Quantized, weight: Weight, bias: Tensor | None, scheme: Scheme | None = None) -> Tensor | Quantized:
    n, half = weight.shape[0], weight.shape[0] // 2
    gated = native.empty(len(x), half, dtype=weight.dtype)
    if half % native.LANES:  # the halves share a panel
        between = native.empty(len(x), n, dtype=weight.dtype)
        calls = _product("linear", x, weight, bias, [between])
        calls.append(("swiglu", weight.dtype, [between, gated], [len(x), half]))
    else:
        calls = _product("linear_swiglu", x, weight, bias, [gated])
    if scheme is None:
        native.call("linear_swiglu", *calls)
        return gated
    out, call = native_quantize(gated, scheme)
    native.call("linear_swiglu", *calls, call)
    return out


@native.implementation(linear_argmax, adapt=packed)
def _(
    x: Tensor, weight: Weight, bias: Tensor | None, vocabulary: int, bits: Tensor | None = None,
    mask_of_row: Tensor | None = None,
) -> Tensor:
    ids = native.empty(len(x), 1, dtype=torch.int64)
    native.call("linear_argmax", *argmax_calls(x, weight, bias, vocabulary, ids, masks=(bits, mask_of_row)))
    return ids


def argmax_calls(
    x: Tensor, weight: Weight, bias: Tensor | None, vocabulary: int, ids: Tensor, *,
    masks: tuple[Tensor | None, Tensor | None] = (None, None), pairs: Tensor | None = None, first: int = 0,
) -> list[native.Call]:
    """Return the native calls that write the argmax of `linear` to ids [R, 1] int64.

    pairs: [R, 2] float32 for the largest value and its id, which is `first` plus its column; or None.
    """
    form = form_of(weight)
    n, k = form.shape
    panels = -(-n // native.LANES)
    best = native.empty(panels, len(x), dtype=torch.float32)
    places = native.empty(panels, len(x), dtype=torch.int32)
    words = 0 if masks[0] is None else masks[0].shape[1]
    return [
        *_product("linear_argmax", x, form, bias, [best, places], vocabulary, words, more=masks),
        (form.native_op("argmax_of_units"), form.dtype, [best, places, ids, pairs], [len(x), k, n, first])]


@ascend.implementation(linear, adapt=to_ascend, restore=from_ascend)
def _(x: Tensor | Quantized, weight: Weight, bias: Tensor | None) -> Tensor:
    return form_of(weight).ascend_linear(x, bias)


@ascend.implementation(linear_swiglu, adapt=to_ascend, restore=from_ascend)
def _(x: Tensor | Quantized, weight: Weight, bias: Tensor | None, scheme: Scheme | None = None) -> Tensor | Quantized:
    """Use three operators where the form of the weight has no fused ones."""
    form = form_of(weight)
    fused = form.ascend_swiglu(x, bias, scheme)
    if fused is not None:
        return fused
    gated: Tensor = torch_npu.npu_swiglu(form.ascend_linear(x, bias), dim=-1)
    return gated if scheme is None else ascend_quantize(gated, scheme)


@ascend.implementation(linear_argmax, adapt=to_ascend, restore=from_ascend)
def _(
    x: Tensor, weight: Weight, bias: Tensor | None, vocabulary: int, bits: Tensor | None = None,
    mask_of_row: Tensor | None = None,
) -> Tensor:
    """Multiply the padding rows of the weight too, since the padded size suits the cube unit; argmax ignores them."""
    return _argmax_of(ascend.LABEL, form_of(weight).ascend_linear(x, bias), vocabulary, bits, mask_of_row)


def _argmax_of(
    backend: str, logits: Tensor, vocabulary: int, bits: Tensor | None, mask_of_row: Tensor | None
) -> Tensor:
    """Call `mask_logits` and `greedy`."""
    if bits is not None and mask_of_row is not None:
        mask_logits.implementations[backend].function(logits, vocabulary, bits, mask_of_row)
    return greedy.implementations[backend].function(logits, vocabulary)


def _cuda_launches(form: WeightForm) -> ModuleType:
    """Return the module that launches products with weights of this form."""
    from npuserve.kernels.triton import launch_linear

    return form.cuda_launches or launch_linear


@triton.implementation(linear)
def _(x: Tensor | Quantized, weight: Weight, bias: Tensor | None) -> Tensor:
    """Multiply x by a weight whose quantized values are [N, K], without zero points."""
    form = form_of(weight)
    product: Tensor = _cuda_launches(form).linear(form.cuda_input(x), form, bias)
    return product


@triton.implementation(linear_swiglu)
def _(x: Tensor | Quantized, weight: Weight, bias: Tensor | None, scheme: Scheme | None = None) -> Tensor | Quantized:
    """Quantize the gated values in a second launch, since a dynamic scale needs the whole row."""
    form = form_of(weight)
    given = form.cuda_input(x)
    launches = _cuda_launches(form)
    gated = launches.linear_swiglu(given, form, bias)
    if gated is None:
        gated = swiglu.implementations[triton.LABEL].function(launches.linear(given, form, bias))
    return gated if scheme is None else quantize.implementations[triton.LABEL].function(gated, scheme)


@triton.implementation(linear_argmax)
def _(
    x: Tensor, weight: Weight, bias: Tensor | None, vocabulary: int, bits: Tensor | None = None,
    mask_of_row: Tensor | None = None,
) -> Tensor:
    """Store the logits if rows have masks: the fused epilogue applies none."""
    form = form_of(weight)
    given = form.cuda_input(x)
    launches = _cuda_launches(form)
    ids: Tensor | None = launches.linear_argmax(given, form, bias, vocabulary) if bits is None else None
    if ids is None:
        return _argmax_of(triton.LABEL, launches.linear(given, form, bias), vocabulary, bits, mask_of_row)
    return ids
