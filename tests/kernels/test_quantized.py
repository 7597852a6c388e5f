"""int8 products are exact: what is left are the scales' roundings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from npuserve.kernels.native.packed import PackedInt8Weight
from npuserve.kernels.quantized import linear_w8a8, quantize_per_token
from tests.kernels.ways import ISAS, implementation, ways

DTYPES = (torch.float32, torch.bfloat16)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=ways(quantize_per_token))
def quantize(request: pytest.FixtureRequest) -> Iterator[Callable[[Tensor], tuple[Tensor, Tensor]]]:
    with implementation(quantize_per_token, request.param) as made:
        yield made.function


@pytest.fixture(params=ways(linear_w8a8))
def linear(request: pytest.FixtureRequest) -> Iterator[Callable[..., Tensor]]:
    with implementation(linear_w8a8, request.param) as made:
        yield lambda *args: made.function(*made.adapt(args))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 16, 45, 600])
def test_quantize_formula(quantize: Any, dtype: torch.dtype, hidden: int) -> None:
    """With numpy, which rounds halves to even too."""
    x = torch.randn(30, hidden, generator=generator()).mul(torch.logspace(-20, 20, 30)[:, None]).to(dtype)
    x[3] = 0
    got, scale = quantize(x)
    assert (got.dtype, scale.dtype) == (torch.int8, torch.float32)
    wide = x.float().numpy()
    expected = np.abs(wide).max(axis=1) / np.float32(127)
    expected[3] = 1
    np.testing.assert_array_equal(scale.numpy(), expected)
    np.testing.assert_array_equal(got.numpy(), np.rint(wide / expected[:, None]).astype(np.int8))
    assert got.abs().amax(dim=1).tolist() == [0 if row == 3 else 127 for row in range(30)]


def test_quantize_rounds_halves_to_even_and_keeps_what_is_whole(quantize: Any) -> None:
    x = torch.arange(-127.0, 128)[None]
    got, scale = quantize(torch.cat([x, x.sign() * (x.abs() - 0.5).clamp(min=0)], dim=1))
    assert scale.tolist() == [1.0]
    assert torch.equal(got[:, :255].float(), x)
    halves = x.sign() * (x.abs() - 0.5).clamp(min=0)
    np.testing.assert_array_equal(got[:, 255:].numpy(), np.rint(halves.numpy()).astype(np.int8))


def test_quantize_of_extremes(quantize: Any) -> None:
    """Numbers too small for a scale are 0 or at most 127; the largest float is no overflow."""
    got, scale = quantize(torch.tensor([[1e-45, 0.0], [-3e-43, 1e-45], [3.4e38, -3.4e38], [0.0, -0.0]]))
    assert got.tolist()[2:] == [[127, -127], [0, 0]]
    assert (scale > 0).all()
    assert scale.isfinite().all()
    assert (got.int().abs() <= 127).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "k", "n"), [(1, 1, 1), (3, 5, 18), (9, 7, 16), (40, 131, 70), (2, 4096, 33)])
def test_linear_is_exact_but_for_the_scales(
    linear: Any, tokens: int, k: int, n: int, dtype: torch.dtype, bias: bool
) -> None:
    """With numpy's int64, within four roundings to float32 (of the sum and of three operations) and one to dtype."""
    x, weight = (torch.randint(-128, 128, (rows, k), generator=generator(k), dtype=torch.int8) for rows in (tokens, n))
    x[0], weight[0] = -128, -128
    weight[-1] = 127
    x_scale, w_scale = torch.rand(tokens, generator=generator(1)), torch.rand(n, generator=generator(2))
    b = torch.randn(n, generator=generator(3)).mul(1000).to(dtype) if bias else None
    got = linear(x, x_scale, weight, w_scale, b, dtype)
    assert got.dtype == dtype
    exact = x.numpy().astype(np.int64) @ weight.numpy().astype(np.int64).T
    product = exact * x_scale.double().numpy()[:, None] * w_scale.double().numpy()
    expected = product + (b.double().numpy() if b is not None else 0)
    error = np.abs(got.double().numpy() - expected)
    rounding = 2.0**-24 if dtype == torch.float32 else 2.0**-8 + 2.0**-24
    assert (error <= 4 * 2.0**-24 * np.abs(product) + 1.01 * rounding * np.abs(expected)).all()


def test_linear_of_ones_is_the_whole_number(linear: Any) -> None:
    """All sums are below 2**24, so that float32 holds them: no tolerance."""
    for k in (1, 3, 64, 1000):
        x, weight = (torch.randint(-128, 128, (rows, k), generator=generator(k), dtype=torch.int8) for rows in (7, 35))
        x[1], x[2], weight[5], weight[6] = -128, 127, -128, 127
        got = linear(x, torch.ones(7), weight, torch.ones(35), None, torch.float32)
        assert torch.equal(got.long(), x.long() @ weight.long().T)


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built")
def test_golden_takes_packed_weights() -> None:
    x, weight = (torch.randint(-128, 128, (rows, 37), generator=generator(), dtype=torch.int8) for rows in (4, 21))
    scales = torch.rand(4, generator=generator()), torch.rand(21, generator=generator())
    packed = PackedInt8Weight.pack(weight)
    assert packed.shape == (21, 37)
    assert torch.equal(packed.dense(), weight)
    dense = linear_w8a8(x, scales[0], weight, scales[1], None, torch.float32)
    assert torch.equal(linear_w8a8(x, scales[0], packed, scales[1], None, torch.float32), dense)
