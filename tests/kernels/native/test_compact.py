"""bfloat16 weights packed in 12 bits: the same numbers, and bit-identical products, as in 16 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from npuserve.kernels import native
from npuserve.kernels.embedding import embedding
from npuserve.kernels.greedy import greedy
from npuserve.kernels.linear import linear, linear_argmax, linear_swiglu
from npuserve.kernels.mask_logits import mask_logits, random_masks
from npuserve.kernels.native.packed import PackedWeight, compacts, packed_words

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")

SHAPES = ((16, 8), (3, 24), (160, 24), (48, 128), (64, 136), (200, 136), (96, 1024))
ROWS = (*range(1, 16), 17, 24, 33, 64, 70, 130)


def numbers(n: int, k: int, rare: float = 0.0) -> Tensor:
    """Return normal numbers, of which a fraction `rare` is too small for a table of 16 upper bytes."""
    generator = torch.Generator().manual_seed(n * k)
    made = (torch.randn(n, k, generator=generator) / 50).bfloat16()
    made[torch.rand(n, k, generator=generator) < rare] *= 2.0**-30
    return made


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("rare", [0.0, 0.001])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_compact_rows_equal_numbers_bit_for_bit(isa, n, k, rare):
    weight = numbers(n, k, rare)
    weight[0, :3] = torch.tensor([0.0, -0.0, torch.inf])
    packed = PackedWeight.pack(weight, compact=True)
    assert (packed.compact, packed.refused) == (True, False)
    assert same(packed.dense(), weight)
    ids = torch.tensor([n - 1, 0, n // 2, 0])
    assert same(embedding.implementations["cpu"].function(ids, packed), weight[ids])


@pytest.mark.parametrize("rare", [0.0, 0.001])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_compact_products_equal_plain_products(isa, n, k, rare):
    weight = numbers(n, k, rare)
    plain, compact = (PackedWeight.pack(weight, compact=form) for form in (False, True))
    assert (plain.compact, compact.compact) == (False, True)
    product, gated, chosen = (x.implementations["cpu"].function for x in (linear, linear_swiglu, linear_argmax))
    bias = numbers(1, n)[0] if n % 8 == 0 else None
    for rows in ROWS:
        x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)).bfloat16()
        assert same(product(x, compact, bias), product(x, plain, bias)), rows
        assert torch.equal(chosen(x, compact, None, n - 1), chosen(x, plain, None, n - 1)), rows
        masks = random_masks(torch.Generator().manual_seed(rows), rows, n - 1)
        allowed = chosen(x, plain, None, n - 1, *masks)
        assert torch.equal(chosen(x, compact, None, n - 1, *masks), allowed), rows
        logits = product(x, plain, None)
        mask_logits(logits, n - 1, *masks)
        assert torch.equal(allowed, greedy(logits, n - 1)), rows
        if n % 32 == 0:
            assert same(gated(x, compact, bias), gated(x, plain, bias)), rows


@pytest.mark.parametrize("rare", [0.0, 0.001])
@pytest.mark.parametrize(("n", "k", "rows"), [
    (1024, 64, (8, 13, 24, 32, 36, 37, 64, 70)),  # units of several tiles
    (160, 4096, (13, 36, 37, 70)),  # K in more than one block
])
def test_compact_argmax_finds_the_last_column_of_many(isa, n, k, rows, rare):
    weight = numbers(n, k, rare)
    weight[-1] = 1.0
    plain, compact = (PackedWeight.pack(weight, compact=form) for form in (False, True))
    product, chosen = (x.implementations["cpu"].function for x in (linear, linear_argmax))
    for count in rows:
        x = torch.rand(count, k, generator=torch.Generator().manual_seed(count)).bfloat16()
        assert chosen(x, compact, None, n).tolist() == [[n - 1]] * count, count
        assert same(product(x, compact, None), product(x, plain, None)), count


def test_compact_write_into_middle_of_panels(isa):
    weight = numbers(70, 264, 0.001)
    packed = PackedWeight.allocate(70, 264, torch.bfloat16, compact=True)
    assert same(packed.dense(), torch.zeros(70, 264).bfloat16())
    for first, end in ((0, 5), (5, 33), (33, 34), (34, 70)):
        packed.write(first, weight[first:end].float())
        assert packed.compact
        assert same(packed.dense()[:end], weight[:end])
    packed.write(20, weight[:3])
    assert same(packed.rows(torch.arange(19, 24)), weight[[19, 0, 1, 2, 23]])


def test_compact_incompressible_numbers_are_plain(isa, caplog):
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(-(2**15), 2**15, (70, 264), generator=generator, dtype=torch.int16).view(torch.bfloat16)
    weight = numbers(70, 264)
    packed = PackedWeight.pack(weight, compact=True)
    packed.write(30, anything[30:50])
    weight[30:50] = anything[30:50]
    assert (packed.compact, packed.refused) == (False, True)
    assert same(packed.dense(), weight)
    assert "70 x 264 takes 16 bits" in caplog.text
    x = torch.randn(9, 264, generator=generator).bfloat16()
    product = linear.implementations["cpu"].function
    finite = weight.nan_to_num(0, 0, 0)
    packed.write(0, finite)
    assert same(product(x, packed, None), product(x, PackedWeight.pack(finite, compact=False), None))


def test_compacts_and_packed_words():
    assert not compacts(1024, torch.float32)
    assert not compacts(1020, torch.bfloat16)
    assert compacts(1024, torch.bfloat16) == native.library().compact
    for n, k in SHAPES:
        plain, compact = (4 * packed_words(n, k, torch.bfloat16, compact=form) for form in (False, True))
        assert plain == -(-n // 16) * 16 * k * 2
        blocks = -(-n // 16) * -(-k // 128)
        assert compact == plain * 3 // 4 + 64 * blocks
