"""int8 weights from -8 to 7 packed in 4 bits: the same numbers, and bit-identical products, as packed in 8 bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from npuserve.kernels import native
from npuserve.kernels.linear import linear, linear_argmax, linear_swiglu
from npuserve.kernels.mask_logits import random_masks
from npuserve.kernels.native.packed import PackedWeight
from npuserve.kernels.quantize import quantize
from npuserve.kernels.quantized import DYNAMIC, Scheme
from npuserve.kernels.quantized_weight import QuantizedWeight

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")

SHAPES = ((16, 8), (3, 24), (160, 24), (48, 128), (64, 136), (200, 136), (96, 1024), (32, 8200))
ROWS = (1, 2, 3, 5, 8, 12, 13, 17, 33, 70, 130)


def numbers(n: int, k: int) -> torch.Tensor:
    """Return random numbers, all of -8 to 7 among them."""
    generator = torch.Generator().manual_seed(n * k)
    made = torch.randint(-8, 8, (n, k), generator=generator, dtype=torch.int8)
    made[0, :8] = torch.tensor([-8, 7, -1, 0, 1, -7, 6, -8])
    return made


def nibbles(values: torch.Tensor) -> PackedWeight:
    packed = PackedWeight.allocate_nibbles(*values.shape)
    packed.write(0, values)
    return packed


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_nibbles_rows_equal_numbers(isa, n, k):
    values = numbers(n, k)
    packed = nibbles(values)
    assert packed.nbytes == -(-n // 16) * 16 * k // 2
    assert torch.equal(packed.dense(), values)
    ids = torch.tensor([n - 1, 0, n // 2, 0])
    assert torch.equal(packed.rows(ids), values[ids])


@pytest.mark.parametrize("scheme", [DYNAMIC, Scheme(symmetric=False)])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_nibbles_products_equal_int8_products(isa, n, k, scheme):
    generator = torch.Generator().manual_seed(n + k)
    values, scale = numbers(n, k), torch.rand(n, generator=generator) + 0.01
    plain = QuantizedWeight.of(values, scale, torch.float32, inputs=scheme)
    eight, four = replace(plain, values=PackedWeight.pack(values)), replace(plain, values=nibbles(values))
    product, gated, chosen = (x.implementations["cpu"].function for x in (linear, linear_swiglu, linear_argmax))
    for dtype in (torch.float32, torch.bfloat16):
        eight, four = replace(eight, dtype=dtype), replace(four, dtype=dtype)
        bias = torch.randn(n, generator=generator).to(dtype) if n % 8 == 0 else None
        for rows in ROWS:
            x = quantize.implementations["cpu"].function(torch.randn(rows, k, generator=generator), scheme)
            assert torch.equal(product(x, four, bias), product(x, eight, bias)), rows
            assert torch.equal(chosen(x, four, None, n - 1), chosen(x, eight, None, n - 1)), rows
            masks = random_masks(generator, rows, n - 1)
            assert torch.equal(chosen(x, four, None, n - 1, *masks), chosen(x, eight, None, n - 1, *masks)), rows
            if n % 32 == 0:
                assert torch.equal(gated(x, four, bias), gated(x, eight, bias)), rows


def test_nibbles_write_into_middle_of_panels(isa):
    values = numbers(70, 264)
    packed = PackedWeight.allocate_nibbles(70, 264)
    for first, end in ((0, 5), (5, 33), (33, 34), (34, 70)):
        packed.write(first, values[first:end])
        assert torch.equal(packed.dense()[:end], values[:end])
    packed.write(20, values[:3])
    assert torch.equal(packed.rows(torch.arange(19, 24)), values[[19, 0, 1, 2, 23]])


@pytest.mark.parametrize("wrong", [-9, 8])
def test_nibbles_number_beyond_is_refused(wrong):
    with pytest.raises(ValueError, match="from -8 to 7"):
        PackedWeight.allocate_nibbles(4, 8).write(0, torch.full((1, 8), wrong, dtype=torch.int8))
