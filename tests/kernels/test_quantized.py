"""int8: quantized activations equal numpy's bit for bit, and products are exact except for the scales' roundings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from npuserve.kernels import native
from npuserve.kernels.embedding import embedding
from npuserve.kernels.greedy import greedy
from npuserve.kernels.linear import linear, linear_argmax, linear_swiglu
from npuserve.kernels.norm import add_rms_norm, rms_norm
from npuserve.kernels.quantize import quantize
from npuserve.kernels.quantized import (
    DYNAMIC,
    FLOAT8,
    FLOAT8_DYNAMIC,
    FLOAT8_GROUPED,
    GROUP,
    SCHEMES,
    Quantized,
    Scheme,
    scheme_of,
)
from npuserve.kernels.quantized_weight import QuantizedWeight
from npuserve.kernels.registry import KERNELS, Kernel
from npuserve.kernels.swiglu import swiglu
from npuserve.kernels.weight import packed
from tests.kernels.comparison import generator, randn
from tests.kernels.variants import ISAS, implementation, params, variants

DTYPES = (torch.float32, torch.bfloat16)
ASYMMETRIC = Scheme(symmetric=False)


def randint8(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-128, 128, shape, generator=generator(seed), dtype=torch.int8)


class Variant:
    """A kernel as one backend or golden function serves it; takes the golden function's arguments."""

    def __init__(self, variant: str):
        self._variant = variant

    def __call__(self, kernel: Kernel[..., Any], *args: Any) -> Any:
        with implementation(kernel, self._variant) as made:
            return made.function(*made.adapt(args))


@pytest.fixture(params=params(quantize))
def variant(request: pytest.FixtureRequest) -> Variant:
    return Variant(request.param)


def same(got: Quantized, want: Quantized) -> bool:
    zeros = (torch.zeros(0) if x.zero is None else x.zero for x in (got, want))
    return torch.equal(got.values, want.values) and torch.equal(got.scale, want.scale) and torch.equal(*zeros)


# quantize


@pytest.mark.parametrize("levels", [127.0, 127.5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 16, 45, 600])
def test_quantize_symmetric_formula(variant: Variant, dtype: torch.dtype, hidden: int, levels: float) -> None:
    """Against numpy, which also rounds halves to even."""
    x = randn(30, hidden).mul(torch.logspace(-20, 20, 30)[:, None]).to(dtype)
    x[3] = 0
    got = variant(quantize, x, Scheme(levels=levels))
    assert (got.values.dtype, got.scale.dtype, got.zero) == (torch.int8, torch.float32, None)
    wide = x.float().numpy()
    expected = np.abs(wide).max(axis=1) / np.float32(levels)
    expected[3] = 1
    np.testing.assert_array_equal(got.scale.numpy(), expected)
    np.testing.assert_array_equal(got.values.numpy(), np.rint(wide / expected[:, None]).clip(-128, 127).astype(np.int8))
    assert (got.values.int().abs().amax(dim=1) >= 127).tolist() == [row != 3 for row in range(30)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 16, 45, 600])
def test_quantize_asymmetric_formula(variant: Variant, dtype: torch.dtype, hidden: int) -> None:
    """Rows of both signs, of one sign, and of zeros: 0 stays 0, and the range ends at -128 and 127."""
    x = randn(30, hidden).mul(torch.logspace(-20, 20, 30)[:, None]).to(dtype)
    x[3], x[4], x[5] = 0, x[4].abs(), -x[5].abs()
    got = variant(quantize, x, ASYMMETRIC)
    assert got.zero.dtype == torch.int32
    wide = x.float().numpy()
    low, high = np.minimum(wide.min(axis=1), 0), np.maximum(wide.max(axis=1), 0)
    scale = high / np.float32(255) - low / np.float32(255)
    scale[3] = 1
    zero = np.rint(-128 - low / scale)
    np.testing.assert_array_equal(got.scale.numpy(), scale)
    np.testing.assert_array_equal(got.zero.numpy(), zero)
    values = np.clip(np.rint(wide / scale[:, None]) + zero[:, None], -128, 127)
    np.testing.assert_array_equal(got.values.numpy(), values)
    assert got.zero[3:6].tolist() == [-128, -128, 127]
    back = (got.values.int() - got.zero[:, None]).double() * got.scale.double()[:, None]
    assert ((back - x.double()).abs() <= 1.01 * got.scale.double()[:, None]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", [None, 0, -128, 127, 9])
def test_quantize_static_formula(variant: Variant, dtype: torch.dtype, zero: int | None) -> None:
    """Numbers outside the range are clamped, to -128 too."""
    x = randn(30, 45).mul(torch.logspace(-20, 20, 30)[:, None]).to(dtype)
    scale = torch.tensor([0.0123])
    got = variant(quantize, x, Scheme(scale, None if zero is None else torch.tensor([zero], dtype=torch.int32)))
    assert got.scale.tolist() == scale.tolist() * 30
    assert got.zero is None if zero is None else got.zero.tolist() == [zero] * 30
    values = np.clip(np.rint(x.float().numpy() / scale.numpy()) + (zero or 0), -128, 127)
    np.testing.assert_array_equal(got.values.numpy(), values)
    assert (got.values.min(), got.values.max()) == (-128, 127)


def nearest_float8(x: np.ndarray) -> np.ndarray:
    """Return the nearest float8 numbers, of two equally near ones that with an even last bit."""
    table = torch.arange(0x7F, dtype=torch.uint8).view(FLOAT8).double().numpy()  # in ascending order, NaN excluded
    places = np.abs(x).clip(max=448)
    above = np.searchsorted(table, places).clip(1)
    low, high = table[above - 1], table[above]
    up = (high - places < places - low) | ((high - places == places - low) & (above % 2 == 0))
    return np.where(up, high, low) * np.sign(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 16, 45, 600])
def test_quantize_to_float8_formula(dtype: torch.dtype, hidden: int) -> None:
    x = randn(30, hidden).mul(torch.logspace(-20, 20, 30)[:, None]).to(dtype)
    x[3] = 0
    got = quantize(x, FLOAT8_DYNAMIC)
    assert (got.values.dtype, got.scale.dtype, got.zero) == (FLOAT8, torch.float32, None)
    wide = x.float().numpy()
    scale = np.abs(wide).max(axis=1) / np.float32(448)
    scale[3] = 1
    np.testing.assert_array_equal(got.scale.numpy(), scale)
    np.testing.assert_array_equal(got.values.double().numpy(), nearest_float8(wide / scale[:, None]))
    static = quantize(x, replace(FLOAT8_DYNAMIC, scale=torch.tensor([0.0123])))
    np.testing.assert_array_equal(static.values.double().numpy(), nearest_float8(wide / np.float32(0.0123)))
    assert torch.equal(static.scale, torch.full((30,), 0.0123))


def test_quantize_to_float8_equals_compressed_tensors() -> None:
    package = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
    from compressed_tensors.quantization.lifecycle.forward import quantize as theirs
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    x = randn(30, 600).mul(torch.logspace(-3, 3, 30)[:, None])
    by = package.QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)
    scale, zero = compute_dynamic_scales_and_zp(x[None], by, torch.nn.Module())
    got = quantize(x, FLOAT8_DYNAMIC)
    assert torch.equal(got.scale, scale.reshape(-1))
    assert torch.equal(got.values.float(), theirs(x[None], scale, zero, by, dtype=FLOAT8)[0].float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 128, 300])
def test_quantize_groups_equals_quantize_of_each(dtype: torch.dtype, hidden: int) -> None:
    x = randn(5, hidden).mul(torch.logspace(-3, 3, hidden)).to(dtype)
    got, groups = quantize(x, FLOAT8_GROUPED), [quantize(part, FLOAT8_DYNAMIC) for part in x.split(GROUP, dim=1)]
    assert torch.equal(got.values.float(), torch.cat([group.values.float() for group in groups], dim=1))
    assert torch.equal(got.scale, torch.stack([group.scale for group in groups], dim=1))
    assert got.scale.stride(0) == 1


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", [FLOAT8_DYNAMIC, FLOAT8_GROUPED], ids=["rows", "groups"])
def test_linear_of_float8_is_exact_before_scales(scheme: Scheme, dtype: torch.dtype, bias: bool) -> None:
    x, weight = quantize(randn(9, 130), scheme), quantize(randn(70, 130, seed=1), scheme)
    b = randn(70, seed=3).to(dtype) if bias else None
    got = linear(x, QuantizedWeight.of(weight.values, weight.scale, dtype, inputs=scheme), b)
    columns = GROUP if scheme.grouped else 130
    scales = (y.scale.double().reshape(len(y), -1).numpy().repeat(columns, axis=1)[:, :130] for y in (x, weight))
    left, right = (y.values.double().numpy() * scale for y, scale in zip((x, weight), scales, strict=True))
    want = left @ right.T + (b.double().numpy() if b is not None else 0)
    np.testing.assert_allclose(got.double().numpy(), want, rtol=2**-8 if dtype == torch.bfloat16 else 2**-23)


def test_quantize_against_torch(variant: Variant) -> None:
    """torch multiplies by 1 / scale, so halves may round in the other direction."""
    x, scale, zero = randn(20, 77), 0.03, 5
    got = variant(quantize, x, Scheme(torch.tensor([scale]), torch.tensor([zero], dtype=torch.int32)))
    theirs = (torch.fake_quantize_per_tensor_affine(x, scale, zero, -128, 127) / scale).round().int() + zero
    assert (got.values.int() - theirs).abs().max() <= 1
    assert (got.values != theirs).float().mean() < 0.01


def test_quantize_rounds_halves_to_even_and_keeps_whole_numbers(variant: Variant) -> None:
    x = torch.arange(-127.0, 128)[None]
    halves = x.sign() * (x.abs() - 0.5).clamp(min=0)
    got = variant(quantize, torch.cat([x, halves], dim=1), Scheme(levels=127))
    assert got.scale.tolist() == [1.0]
    assert torch.equal(got.values[:, :255].float(), x)
    np.testing.assert_array_equal(got.values[:, 255:].numpy(), np.rint(halves.numpy()).astype(np.int8))


@pytest.mark.parametrize("scheme", [DYNAMIC, ASYMMETRIC])
def test_quantize_of_extremes(variant: Variant, scheme: Scheme) -> None:
    """Numbers too small for a scale become 0 or whole numbers; the largest float does not overflow."""
    x = torch.tensor([[1e-45, 0.0], [-3e-43, 1e-45], [3.4e38, -3.4e38], [0.0, -0.0]])
    got = variant(quantize, x, scheme)
    values = got.values.int() - (0 if got.zero is None else got.zero[:, None])
    assert values.tolist()[2:] == [[127, -128], [0, 0]]
    assert (got.scale > 0).all()
    assert got.scale.isfinite().all()


# Fused with the previous operation


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("hidden", [1, 16, 77, 1024])
def test_norms_with_scheme_equal_norm_and_quantize(
    variant: Variant, hidden: int, scheme: str, dtype: torch.dtype
) -> None:
    """Bit for bit."""
    x, residual = randn(2, 19, hidden).to(dtype)
    gamma, s = torch.rand(hidden, generator=generator(1)).add(0.5).to(dtype), scheme_of(scheme, generator(2))
    assert same(variant(rms_norm, x, gamma, 1e-6, s), quantize(variant(rms_norm, x, gamma, 1e-6), s))
    normed, total = variant(add_rms_norm, x, residual, gamma, 1e-6)
    narrow, also = variant(add_rms_norm, x, residual, gamma, 1e-6, s)
    assert torch.equal(total, also)
    assert same(narrow, quantize(normed, s))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("half", [3, 16, 80])
@pytest.mark.parametrize("of_floats", [False, True])
def test_linear_swiglu_equals_its_parts(
    variant: Variant, half: int, scheme: str, dtype: torch.dtype, of_floats: bool
) -> None:
    """Bit for bit, also with a weight of floats."""
    x, weight, bias = randn(9, 40).to(dtype), randn(2 * half, 40, seed=1) / 6, randn(2 * half, seed=2).to(dtype)
    s = scheme_of(scheme, generator(3))
    w = weight.to(dtype) if of_floats else int8_weight(weight, dtype)
    gated = variant(linear_swiglu, x, w, bias)
    assert torch.equal(gated, variant(swiglu, variant(linear, x, w, bias)))
    assert same(variant(linear_swiglu, x, w, bias, s), quantize(gated, s))


# Products


def int8_weight(weight: Tensor, dtype: torch.dtype, inputs: Scheme = DYNAMIC) -> QuantizedWeight:
    made = quantize(weight, DYNAMIC)
    return QuantizedWeight.of(made.values, made.scale, dtype, inputs=inputs)


def operands(
    tokens: int, k: int, n: int, dtype: torch.dtype, *, x_zeros: bool = False, w_zeros: bool = False, unit: bool = False
) -> tuple[Quantized, QuantizedWeight]:
    """Return operands of all int8 numbers: the first rows are the least, the last one the largest. unit: scales of
    1."""
    x, weight = randint8(tokens, k, seed=k), randint8(n, k, seed=k + 1)
    x[0], weight[0] = -128, -128
    weight[-1] = 127
    scales = (torch.ones(rows) if unit else torch.rand(rows, generator=generator(rows)) for rows in (tokens, n))
    zeros = [torch.randint(-128, 128, (rows,), generator=generator(rows), dtype=torch.int32) for rows in (tokens, n)]
    zeros[0][0], zeros[1][-1] = 127, -128
    return (Quantized(x, next(scales), zeros[0] if x_zeros else None),
            QuantizedWeight.of(weight, next(scales), dtype, zeros[1] if w_zeros else None))


def exact(x: Quantized, weight: QuantizedWeight) -> np.ndarray:
    """Return the exact sums by numpy."""
    left, right = x.values.numpy().astype(np.int64), weight.values.numpy().astype(np.int64)
    left = left if x.zero is None else left - x.zero.numpy()[:, None]
    right = right if weight.zero is None else right - weight.zero.numpy()[:, None]
    return left @ right.T


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("zeros", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "k", "n"), [(1, 1, 1), (3, 5, 18), (9, 7, 16), (40, 131, 70), (2, 4096, 33)])
def test_linear_sums_are_exact_before_scales(
    variant: Variant, tokens: int, k: int, n: int, dtype: torch.dtype, zeros: tuple[bool, bool], bias: bool
) -> None:
    """Against numpy's int64, within four roundings to float32 (of the sum and of three operations) and one to dtype."""
    x, weight = operands(tokens, k, n, dtype, x_zeros=zeros[0], w_zeros=zeros[1])
    b = randn(n, seed=3).mul(1000).to(dtype) if bias else None
    got = variant(linear, x, weight, b)
    assert got.dtype == dtype
    product = exact(x, weight) * x.scale.double().numpy()[:, None] * weight.scale.double().numpy()
    expected = product + (b.double().numpy() if b is not None else 0)
    error = np.abs(got.double().numpy() - expected)
    rounding = 2.0**-24 if dtype == torch.float32 else 2.0**-8 + 2.0**-24
    assert (error <= 4 * 2.0**-24 * np.abs(product) + 1.01 * rounding * np.abs(expected)).all()


@pytest.mark.parametrize("rows", [1, 7, 13, 40])
@pytest.mark.parametrize("k", [2, 3, 64, 1000])
def test_linear_of_whole_numbers_equals_torch(variant: Variant, rows: int, k: int) -> None:
    """All sums are below 2**24, which float32 holds exactly: no tolerance."""
    x, weight = operands(rows, k, 35, torch.float32, unit=True)
    sums = torch._int_mm(torch.cat([x.values, x.values.new_zeros(32, k)]), weight.values.T)[:rows]
    assert torch.equal(variant(linear, x, weight, None).int(), sums)
    x, weight = operands(rows, k, 35, torch.float32, x_zeros=True, w_zeros=True, unit=True)
    wide = (x.values.double() - x.zero[:, None]) @ (weight.values.double() - weight.zero[:, None]).T
    assert torch.equal(variant(linear, x, weight, None), wide.float())


@given(
    tokens=st.integers(1, 70), k=st.integers(1, 300), n=st.integers(1, 300), seed=st.integers(0, 99),
    x_zeros=st.booleans(), w_zeros=st.booleans(), dtype=st.sampled_from(DTYPES), name=st.sampled_from(variants(linear)))
def test_linear_any_shape_is_near_golden(
    tokens: int, k: int, n: int, seed: int, x_zeros: bool, w_zeros: bool, dtype: torch.dtype, name: str
) -> None:
    """Within the roundings of both orders of operations, one of them to dtype."""
    x, weight = operands(tokens, k, n, dtype, x_zeros=x_zeros, w_zeros=w_zeros)
    x = replace(x, values=x.values.roll(seed, 1))
    got, want = Variant(name)(linear, x, weight, None), linear(x, weight, None)
    torch.testing.assert_close(got, want, rtol=2**-7 if dtype == torch.bfloat16 else 2**-21, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_linear_quantizes_floats_by_weight_inputs(variant: Variant, dtype: torch.dtype, scheme: str) -> None:
    x, inputs = randn(9, 40).to(dtype), scheme_of(scheme, generator(1))
    weight = int8_weight(randn(35, 40, seed=1), dtype, inputs)
    assert torch.equal(variant(linear, x, weight, None), variant(linear, quantize(x, inputs), weight, None))


def test_linear_quantized_x_with_float_weight_raises(variant: Variant) -> None:
    x, _ = operands(3, 8, 5, torch.float32)
    with pytest.raises(TypeError, match="x is quantized, the weight is not"):
        variant(linear, x, randn(5, 8), None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 8, 7), (5, 33, 101), (40, 64, 300)])
def test_linear_argmax_equals_greedy_of_logits(
    variant: Variant, rows: int, k: int, n: int, dtype: torch.dtype, bias: bool
) -> None:
    x, weight = randn(rows, k).to(dtype), int8_weight(randn(n, k, seed=1), dtype)
    b = randn(n, seed=2).to(dtype) if bias else None
    logits = variant(linear, x, weight, b)
    assert torch.equal(variant(linear_argmax, x, weight, b, n - 3), greedy(logits, n - 3))


# Tables and packed weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("hidden", [1, 4, 33, 64])
def test_embedding_equals_rows_in_dtype(variant: Variant, hidden: int, zeros: bool, dtype: torch.dtype) -> None:
    _, table = operands(1, hidden, 70, dtype, w_zeros=zeros)
    ids = torch.tensor([3, 69, 0, 3, 16, 15])
    values = table.values[ids].float() - (table.zero[ids][:, None] if zeros else 0)
    assert torch.equal(variant(embedding, ids, table), (values * table.scale[ids][:, None]).to(dtype))


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built")
def test_golden_takes_packed_weights() -> None:
    x, weight = operands(4, 37, 21, torch.float32, w_zeros=True)
    narrow = weight.packed()
    assert narrow.shape == weight.shape == (21, 37)
    assert len(narrow) == 21
    assert torch.equal(linear(x, narrow, None), linear(x, weight, None))
    ids = torch.tensor([20, 0, 5])
    assert torch.equal(embedding(ids, narrow), embedding(ids, weight))


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built")
@pytest.mark.parametrize("zeros", [False, True])
def test_int8_chain_records_as_one_program(zeros: bool) -> None:
    """The operations of a layer between two norms, recorded as one program."""
    inputs = ASYMMETRIC if zeros else DYNAMIC
    up, down = (replace(operands(1, k, n, torch.bfloat16, w_zeros=zeros)[1], inputs=inputs) for k, n in
                ((48, 160), (80, 48)))
    up, down = (packed((None, replace(w, scale=w.scale / 500)))[1] for w in (up, down))
    gamma = torch.ones(48, dtype=torch.bfloat16)
    names = ("rms_norm", "linear_swiglu", "linear", "add_rms_norm", "linear_argmax")
    norm, gated, product, add, likeliest = (KERNELS[name].implementations["cpu"].function for name in names)

    def step(x: Tensor) -> Tensor:
        narrow = gated(norm(x, gamma, 1e-6, inputs), up, None, inputs)
        y, _ = add(product(narrow, down, None), x, gamma, 1e-6)
        return likeliest(y, up, None, 160)

    x = torch.zeros(40, 48, dtype=torch.bfloat16)
    program = native.record(lambda: step(x))
    for rows in (40, 1, 13):
        x[:rows] = randn(rows, 48, seed=rows)
        assert torch.equal(program.replay(rows), step(x[:rows]))
    assert [name for name, _ in program.replay_timed(5)[1]] == list(names)
