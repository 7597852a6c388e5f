"""Quantized KV cache: quantization of heads, and attention over the stored numbers, on every instruction set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from npuserve.kernels import native
from npuserve.kernels.attention import CACHE_TOLERANCE, AttentionMetadata, paged_attention
from npuserve.kernels.kv_cache import (
    LARGEST,
    pack_keys,
    pack_values,
    quantize_heads,
    read,
    unpack_keys,
    unpack_values,
    write,
)
from npuserve.kernels.native import layout
from npuserve.kernels.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from npuserve.kernels.quantized import Quantized
from tests.kernels.comparison import randn
from tests.kernels.variants import EACH_ISA

needs_native = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")


def dense(cache: Quantized) -> Tensor:
    return cache.values.double() * cache.scale.double().unsqueeze(-1)


@given(st.integers(0, 99), st.sampled_from([1e-20, 1e-3, 1.0, 300.0, 1e30]), st.sampled_from([2, 10, 64]),
       st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from(list(LARGEST)))
def test_quantize_heads_scale_is_minimal(
    seed: int, size: float, dim: int, dtype: torch.dtype, values: torch.dtype
) -> None:
    x = (randn(3, 5, dim, seed=seed) * size).to(dtype)
    made = quantize_heads(x, values=values)
    assert (made.values.dtype, made.scale.dtype, made.scale.shape) == (values, torch.bfloat16, (3, 5))
    largest = x.float().abs().amax(-1) / LARGEST[values]
    below = (made.scale.view(torch.int16) - 1).view(torch.bfloat16).float()
    assert (made.scale.float() >= largest).all()
    assert (below < largest).all()
    step, scale = torch.tensor(0.5), made.scale.double().unsqueeze(-1)
    if values != torch.int8:  # half of the distance of neighbours: three bits, and no less than 2**-9
        step = torch.exp2((x.double() / scale).abs().clamp(min=2**-6).log2().floor() - 4)
    assert ((dense(made) - x.double()).abs() <= scale * step * (1 + 2e-4)).all()


@given(st.integers(0, 99), st.sampled_from([1e-20, 1.0, 1e30]), st.sampled_from([2, 64]))
def test_quantize_heads_float_scales_are_exact(seed: int, size: float, dim: int) -> None:
    x = randn(3, 5, dim, seed=seed) * size
    made = quantize_heads(x, torch.float32)
    assert torch.equal(made.scale, x.abs().amax(-1) / 127)
    assert (made.values.abs().amax(-1) == 127).all()
    assert ((dense(made) - x.double()).abs() <= made.scale.double().unsqueeze(-1) * (0.5 + 1e-4)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantize_heads_zeros_have_scale_1(dtype: torch.dtype) -> None:
    made = quantize_heads(torch.zeros(2, 3, 8), dtype)
    assert not made.values.any()
    assert (made.scale == 1).all()


def test_quantize_heads_fp8_ties_go_to_even() -> None:
    x = torch.tensor([448.0, 17.0, 19.0, -17.0, 2**-9, 2**-10, 3 * 2**-10, -(2**-11)])
    made = quantize_heads(x, values=torch.float8_e4m3fn)
    assert made.scale == 1
    assert made.values.float().tolist() == [448.0, 16.0, 20.0, -16.0, 2**-9, 0.0, 2**-8, 0.0]


@pytest.mark.parametrize("values", list(LARGEST))
def test_read_returns_written_slots(values: torch.dtype) -> None:
    cache, heads = quantize_heads(torch.zeros(3, 16, 2, 8), values=values), randn(4, 2, 8)
    slots = torch.tensor([40, 3, 16, 15])
    write(cache, slots, heads)
    found = read(cache, torch.arange(3), torch.float32).flatten(0, 1)
    assert torch.equal(found[slots].double(), dense(quantize_heads(heads, values=values)))
    others = torch.ones(48, dtype=torch.bool).index_fill(0, slots, False)
    assert not found[others].any()


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend with queries of the last len(q) positions, in float64: q [n, Hq, D], k, v [context, Hkv, D]."""
    n, context, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    scores += torch.full((n, context), -torch.inf, dtype=torch.float64).triu(context - n + 1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


class Cached:
    """Rows of (queries, context) over a quantized cache; slots past the contexts hold arbitrary numbers."""

    def __init__(self, rows: list[tuple[int, int]], q_heads: int, kv_heads: int, dim: int, size: int, seed: int,
                 dtype: torch.dtype, values: torch.dtype = torch.int8):
        generator = torch.Generator().manual_seed(seed)
        width = -(-max(context for _, context in rows) // size)
        tables = torch.randperm(len(rows) * width, generator=generator).int().view(len(rows), width)
        self.k, self.v = (
            quantize_heads(randn(tables.numel(), size, kv_heads, dim, seed=seed + i), values=values) for i in (1, 2))
        self.q = randn(sum(n for n, _ in rows), q_heads, dim, seed=seed + 3, dtype=dtype)
        self.metadata = AttentionMetadata.from_lengths(tables, [c for _, c in rows], [n for n, _ in rows])
        expected = []
        for table, (_, context), q in zip(tables, rows, self.q.split([n for n, _ in rows]), strict=True):
            k, v = (dense(cache)[table].flatten(0, 1)[:context] for cache in (self.k, self.v))
            expected.append(attention(q, k, v, dim**-0.5))
            for cache in (self.k, self.v):
                if context % size:
                    cache.scale[table[context // size], context % size :] = torch.nan
                cache.scale[table[-(-context // size) :]] = torch.nan
        self.expected = torch.cat(expected).flatten(1)

    def check(self, *, natively: bool) -> None:
        args = self.q, self.k, self.v, self.metadata, self.q.shape[-1] ** -0.5
        made = paged_attention.implementations["cpu"]
        out = made.function(*made.adapt(args)) if natively else paged_attention(*args)
        assert out.dtype == self.q.dtype
        of_float32, of_bfloat16 = (CACHE_TOLERANCE, 1e-2) if natively else (1e-5, 2**-8)
        tolerance = of_float32 if out.dtype == torch.float32 else of_bfloat16
        torch.testing.assert_close(out.double(), self.expected, rtol=tolerance, atol=tolerance)


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", list(LARGEST))
def test_golden_attention_equals_attention_over_stored_numbers(dtype: torch.dtype, values: torch.dtype) -> None:
    Cached([(1, 9), (6, 6), (3, 12), (1, 1), (2, 15)], 6, 2, 8, 4, 0, dtype, values).check(natively=False)


@needs_native
@pytest.mark.parametrize("isa", EACH_ISA)
@given(st.data())
@settings(max_examples=15, deadline=None)
def test_native_attention_equals_attention_over_stored_numbers(isa: str, data: st.DataObject) -> None:
    """Blocks of 16 to 256, odd contexts and heads, decode rows and chunks of any length."""
    contexts = data.draw(st.lists(st.integers(1, 700), min_size=1, max_size=3))
    rows = [(data.draw(st.sampled_from([1, 1, 2, 7, 40])), context) for context in contexts]
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    dim, size = data.draw(st.sampled_from([2, 10, 16, 64, 96, 128])), data.draw(st.sampled_from([16, 32, 64, 128, 256]))
    made = Cached([(min(n, context), context) for n, context in rows], group * kv_heads, kv_heads, dim, size,
                  data.draw(st.integers(0, 9)), data.draw(st.sampled_from(DTYPES)))
    with native.using(isa):
        made.check(natively=True)


def cache_arguments(
    tokens: int, dim: int, dtype: torch.dtype, slots: Tensor
) -> tuple[Tensor, Quantized, Quantized, list[Any]]:
    """Return arguments without norms, with all positions 0, at which nothing is rotated."""
    qkv = randn(tokens, 4 * dim, dtype=dtype)
    cos_sin = torch.cat([torch.ones(1, dim // 2), torch.zeros(1, dim // 2)], dim=-1)
    k_cache, v_cache = (quantize_heads(randn(4, 16, 1, dim, seed=i)) for i in (1, 2))
    return qkv, k_cache, v_cache, [None, None, 1e-6, cos_sin, torch.zeros(tokens, dtype=torch.int64), slots]


@needs_native
@pytest.mark.parametrize("isa", EACH_ISA)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [10, 64, 128, 256])
def test_native_write_equals_golden_write(isa: str, dtype: torch.dtype, dim: int) -> None:
    """Bit for bit, without computation; neighbours of a slot are unchanged, also those in its words."""
    slots = torch.tensor([7, 40, 3, -1, 22, 8, 63])
    qkv, k_cache, v_cache, others = cache_arguments(len(slots), dim, dtype, slots)
    args = [qkv, *others, k_cache, v_cache, 2]
    made = qk_norm_rope_kv_write.implementations["cpu"]
    adapted = made.adapt(tuple(args))
    with native.using(isa):
        made.function(*adapted)
    qk_norm_rope_kv_write(*args)
    for got, want in zip(made.restore(adapted)[7:9], (k_cache, v_cache), strict=True):
        assert torch.equal(got.values, want.values)
        assert torch.equal(got.scale, want.scale)
    written = v_cache.values.flatten(0, 1)[slots[slots >= 0]]
    assert torch.equal(written, quantize_heads(qkv.view(-1, 4, dim)[slots >= 0, 3:]).values)


@needs_native
@pytest.mark.parametrize("isa", EACH_ISA)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("threads", [1, 4])
def test_native_write_of_adjacent_tokens(isa: str, dtype: torch.dtype, int8: bool, threads: int) -> None:
    """As for a prompt: from an odd slot over a block's end, a whole block, beside slots that are not written."""
    slots = torch.tensor([*range(5, 21), *range(32, 48), -1, 49, 50, 53])
    before = native.library().threads
    native.library().set_threads(threads)
    try:
        for dim in (10, 64, 96, 128):
            qkv = randn(len(slots), 8 * dim, dtype=dtype)
            *others, _ = cache_arguments(len(slots), dim, dtype, slots)[3]
            caches = [randn(4, 16, 2, dim, seed=i, dtype=dtype) for i in (1, 2)]
            args = [qkv, *others, slots, *(map(quantize_heads, caches) if int8 else caches), 4]
            made = qk_norm_rope_kv_write.implementations["cpu"]
            adapted = made.adapt(tuple(args))
            with native.using(isa):
                turned = made.function(*adapted)
            assert torch.equal(turned, qk_norm_rope_kv_write(*args))
            for got, want in zip(made.restore(adapted)[7:9], args[7:9], strict=True):
                for a, b in ((got.values, want.values), (got.scale, want.scale)) if int8 else ((got, want),):
                    assert torch.equal(a, b), dim
    finally:
        native.library().set_threads(before)


@needs_native
def test_int8_pack_and_unpack_are_inverses() -> None:
    plain = quantize_heads(randn(3, 32, 2, 10))
    keys, values = pack_keys(plain), pack_values(plain)
    assert isinstance(keys, Quantized)
    assert isinstance(values, Quantized)
    assert keys.values.shape == layout.key_shape(3, 32, 2, 10, torch.int8)
    assert values.values.shape == layout.value_shape(3, 32, 2, 10, torch.int8)
    assert keys.scale.shape == values.scale.shape == layout.scale_shape(3, 32, 2)
    for found in (unpack_keys(keys), unpack_values(values, 10)):
        assert torch.equal(found.values, plain.values)
        assert torch.equal(found.scale, plain.scale)
