"""Every implementation against its golden function in float64, and golden functions against independent ones."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor
from transformers.models.qwen3 import modeling_qwen3

from npuserve.kernels.attention import AttentionMetadata, paged_attention
from npuserve.kernels.embedding import embedding
from npuserve.kernels.greedy import greedy
from npuserve.kernels.kv_cache import QUANTIZED
from npuserve.kernels.linear import linear
from npuserve.kernels.logprobs import logprobs
from npuserve.kernels.mask_logits import mask_logits
from npuserve.kernels.norm import add_rms_norm, rms_norm
from npuserve.kernels.penalize import penalize
from npuserve.kernels.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from npuserve.kernels.registry import GOLDEN, KERNELS, Case, Kernel
from npuserve.kernels.swiglu import swiglu
from tests.kernels.comparison import compare, generator, randn
from tests.kernels.variants import implementation, marks_of, variants

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def cases() -> Iterator[Any]:
    for k in KERNELS.values():
        for variant in variants(k):
            for case in k.cases:
                if variant == "cuda" and case.zeros and k.name.startswith(("linear", "experts")):
                    continue  # zero points are not supported: see tests/kernels/triton/test_linear.py
                if case.float8 and variant not in (GOLDEN, "cuda"):
                    continue
                if case.int4 and variant.partition("/")[0] not in (GOLDEN, "cpu", *(() if case.w4a8 else ("cuda",))):
                    continue
                caches = {GOLDEN: QUANTIZED.values(), "cpu": (torch.int8,), "cuda": QUANTIZED.values()}.get(
                    variant.partition("/")[0], ())
                for dtype in k.dtypes:
                    if not case.benchmark and (not case.cache or case.cache in caches):
                        name = f"{k.name}-{variant}-{case.name}-{str(dtype).removeprefix('torch.')}"
                        yield pytest.param(k, variant, case, dtype, id=name, marks=marks_of(variant.partition("/")[2]))


@pytest.mark.parametrize(("k", "variant", "case", "dtype"), list(cases()))
def test_implementation_against_golden_in_float64(
    k: Kernel[..., Any], variant: str, case: Case, dtype: torch.dtype
) -> None:
    with implementation(k, variant) as made:
        compare(k, made, case, dtype)


# Golden functions against independent implementations


def test_embedding_takes_rows() -> None:
    table = randn(9, 5)
    np.testing.assert_array_equal(embedding(torch.tensor([3, 0, 8, 3]), table).numpy(), table.numpy()[[3, 0, 8, 3]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_equal_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    x, residual = randn(2, 5, 48, seed=1, dtype=dtype)
    theirs = modeling_qwen3.Qwen3RMSNorm(48, eps=1e-5).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(randn(48, seed=2))
        gamma = theirs.weight.detach()
        if dtype == torch.float64:  # transformers rounds float64 to float32
            torch.testing.assert_close(rms_norm(x, gamma, 1e-5), theirs(x), rtol=1e-6, atol=1e-6)
            return
        assert torch.equal(rms_norm(x, gamma, 1e-5), theirs(x))
        normed, total = add_rms_norm(x, residual, gamma, 1e-5)
        assert torch.equal(total, x + residual)
        assert torch.equal(normed, theirs(x + residual))


@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_a_matrix_product(bias: bool) -> None:
    x, weight, b = randn(3, 20), randn(7, 20, seed=1), randn(7, seed=2)
    expected = x.double().numpy() @ weight.double().numpy().T + (b.double().numpy() if bias else 0)
    np.testing.assert_allclose(linear(x, weight, b if bias else None).numpy(), expected, rtol=1e-5, atol=1e-5)


def test_swiglu_formula() -> None:
    x = randn(4, 30).double()
    gate, up = np.split(x.numpy(), 2, axis=1)
    np.testing.assert_allclose(swiglu(x).numpy(), gate / (1 + np.exp(-gate)) * up, rtol=1e-12)


@pytest.mark.parametrize("norm", [True, False])
def test_qk_norm_rope_kv_write_against_transformers(norm: bool) -> None:
    tokens, q_heads, kv_heads, dim, block_size = 11, 6, 2, 16, 4
    qkv = randn(tokens, (q_heads + 2 * kv_heads) * dim)
    positions = torch.randint(100, (tokens,), generator=generator())
    config = Qwen3Config(head_dim=dim, hidden_size=q_heads * dim, num_attention_heads=q_heads)
    cos, sin = modeling_qwen3.Qwen3RotaryEmbedding(config)(qkv, torch.arange(100)[None])
    cos_sin = torch.cat([cos[0, :, : dim // 2], sin[0, :, : dim // 2]], dim=-1)
    gammas = [randn(dim, seed=s) if norm else None for s in (3, 4)]
    caches = randn(2, 5, block_size, kv_heads, dim, seed=5)
    before = caches.clone()
    slots = torch.tensor([7, 19, -1, 0, 3, 8, 11, -1, 5, 1, 2])
    q = qk_norm_rope_kv_write(
        qkv, gammas[0], gammas[1], 1e-6, cos_sin, positions, slots, caches[0], caches[1], q_heads
    )

    their_q, their_k, their_v = qkv.view(tokens, -1, dim).split([q_heads, kv_heads, kv_heads], dim=1)
    if norm:
        norms = [modeling_qwen3.Qwen3RMSNorm(dim) for _ in gammas]
        for module, gamma in zip(norms, gammas, strict=True):
            module.weight.data = gamma
        their_q, their_k = norms[0](their_q), norms[1](their_k)
    their_q, their_k = modeling_qwen3.apply_rotary_pos_emb(
        their_q[None], their_k[None], cos[:, positions], sin[:, positions], unsqueeze_dim=2
    )
    torch.testing.assert_close(q, their_q[0], rtol=1e-6, atol=1e-6)
    flat, untouched = caches.view(2, -1, kv_heads, dim), before.view(2, -1, kv_heads, dim)
    for slot in range(flat.shape[1]):
        if slot in slots:
            (token,) = (slots == slot).nonzero()
            torch.testing.assert_close(flat[0, slot], their_k[0, token[0]], rtol=1e-6, atol=1e-6)
            assert torch.equal(flat[1, slot], their_v[token[0]])
        else:
            assert torch.equal(flat[:, slot], untouched[:, slot])


def contiguous_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute attention of one row with transformers: q [n, Hq, D], k, v [context, Hkv, D] -> [n, Hq, D]."""
    n, context = len(q), len(k)
    mask = torch.full((n, context), -torch.inf, dtype=q.dtype).triu(context - n + 1)
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, _ = modeling_qwen3.eager_attention_forward(module, q, k, v, mask[None, None], scaling=scale)
    return out[0]


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_paged_attention_against_transformers(heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Decode rows, whole prompts and chunks in one call, over blocks in any order. No other blocks are read."""
    (q_heads, kv_heads), dim, block_size = heads, 8, 4
    queries, contexts = [1, 6, 3, 1, 2], [9, 6, 12, 1, 15]
    q = randn(sum(queries), q_heads, dim, dtype=dtype)
    rows = [randn(2, c, kv_heads, dim, seed=c, dtype=dtype) for c in contexts]
    block_tables = torch.randperm(20, generator=generator(1)).int().view(5, 4)
    caches = torch.full((2, 20, block_size, kv_heads, dim), torch.nan, dtype=dtype)
    for table, row in zip(block_tables.tolist(), rows, strict=True):
        for place in range(row.shape[1]):
            caches[:, table[place // block_size], place % block_size] = row[:, place]
    for table, context in zip(block_tables, contexts, strict=True):
        table[-(-context // block_size) :] = 2**30
    metadata = AttentionMetadata.from_lengths(block_tables, contexts, queries)
    assert metadata.cu_seqlens_q.tolist() == metadata.host_cu_seqlens_q == [0, 1, 7, 10, 11, 13]
    assert metadata.context_lens.tolist() == metadata.host_context_lens == contexts

    out = paged_attention(q, caches[0], caches[1], metadata, 0.3)
    expected = torch.cat(
        [contiguous_attention(x, *row, 0.3) for x, row in zip(q.split(queries), rows, strict=True)]
    )
    torch.testing.assert_close(out, expected.flatten(1), rtol=1e-5, atol=1e-6)


def test_paged_attention_row_is_independent_of_other_rows() -> None:
    case = paged_attention.cases[1]
    q, k_cache, v_cache, metadata, scale = case.make(generator(), torch.bfloat16)
    together = paged_attention(q, k_cache, v_cache, metadata, scale)
    starts = metadata.host_cu_seqlens_q
    for row, context in enumerate(metadata.host_context_lens):
        own = slice(starts[row], starts[row + 1])
        alone = AttentionMetadata.from_lengths(metadata.block_tables[row : row + 1], [context], [own.stop - own.start])
        assert torch.equal(together[own], paged_attention(q[own], k_cache, v_cache, alone, scale))


def test_paged_attention_padding_is_zero() -> None:
    q, k_cache, v_cache, metadata, scale = paged_attention.cases[1].make(generator(), torch.float32)
    padded = paged_attention(torch.cat([q, q[:3]]), k_cache, v_cache, metadata, scale)
    assert torch.equal(padded[: len(q)], paged_attention(q, k_cache, v_cache, metadata, scale))
    assert not padded[len(q) :].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_ties_give_smallest_id(dtype: torch.dtype) -> None:
    logits = randn(40, 70, dtype=dtype).mul(2).round()
    logits[:, 60:] = 50
    ids = greedy(logits, 60)
    assert ids.shape == (40, 1)
    assert ids.dtype == torch.int64
    np.testing.assert_array_equal(ids[:, 0].numpy(), logits[:, :60].float().numpy().argmax(axis=1))


def test_greedy_nan_and_infinities() -> None:
    nan, inf = torch.nan, torch.inf
    rows = [[nan, 1, 2, 9], [nan, nan, nan, 9], [-inf, nan, -inf, 9], [0, inf, inf, 9], [-inf, -5, 0, nan]]
    logits = torch.tensor(rows)
    assert greedy(logits, 3).tolist() == [[2], [0], [0], [1], [2]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_mask_logits_bit_by_bit(dtype: torch.dtype) -> None:
    vocabulary = 70
    logits, masks = randn(4, 96, dtype=dtype), [list(range(0, 70, 3)), [31], [32, 69]]
    bits = np.zeros((3, 3), np.uint32)
    for row, ids in enumerate(masks):
        for i in ids:
            bits[row, i // 32] |= np.uint32(1 << i % 32)
    before = logits.clone()
    of_row = [1, -1, 0, 2]
    mask_logits(logits, vocabulary, torch.from_numpy(bits.view(np.int32)), torch.tensor(of_row, dtype=torch.int32))
    for row, mask in enumerate(of_row):
        for i in range(96):
            is_kept = mask < 0 or i >= vocabulary or i in masks[mask]
            assert logits[row, i] == (before[row, i] if is_kept else -torch.inf)


def test_penalize_against_transformers_and_the_formula() -> None:
    """Repetition against transformers; presence and frequency, which it lacks, token by token."""
    vocabulary, prompts, outputs = 30, [[1, 2, 2, 29], [5]], [[2, 7, 7, 7], [5, 5]]
    repetition, presence, frequency = [1.3, 0.8], [0.5, -1.0], [0.25, 1.5]
    logits = randn(2, vocabulary).mul(3)
    expected = logits.clone()
    for row in range(2):
        ids = torch.tensor([prompts[row] + outputs[row]])
        expected[row] = RepetitionPenaltyLogitsProcessor(repetition[row])(ids, logits[row : row + 1].clone())[0]
        for token in outputs[row]:
            expected[row, token] -= frequency[row]
        for token in set(outputs[row]):
            expected[row, token] -= presence[row]

    in_prompt, counts = (
        torch.stack([torch.bincount(torch.tensor(ids), minlength=vocabulary) for ids in x]) for x in (prompts, outputs)
    )
    penalize(logits, in_prompt > 0, counts.int(), *map(torch.tensor, (repetition, presence, frequency)))
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_against_numpy(dtype: torch.dtype) -> None:
    rows, vocabulary, n = 6, 50, 8
    logits = randn(rows, 64, dtype=dtype).mul(2).round()
    logits[:, vocabulary:] = 90
    ids = torch.randint(vocabulary, (rows,), generator=generator())
    logprob, rank, top_ids, top_logprobs = logprobs(logits, vocabulary, ids, n)
    x = logits[:, :vocabulary].double().numpy()
    logarithms = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(logprob.numpy(), logarithms[np.arange(rows), ids], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(rank.numpy(), (x > x[np.arange(rows), ids][:, None]).sum(axis=1) + 1)
    order = np.stack([np.lexsort((np.arange(vocabulary), -row))[:n] for row in x])
    np.testing.assert_array_equal(top_ids.numpy(), order)
    np.testing.assert_allclose(
        top_logprobs.numpy(), np.take_along_axis(logarithms, order, axis=1), rtol=1e-5, atol=1e-5
    )


def test_logprobs_no_rows_and_nan() -> None:
    shapes = [x.shape for x in logprobs(torch.empty(0, 9), 9, torch.empty(0, dtype=torch.int64), 3)]
    assert shapes == [(0,), (0,), (0, 3), (0, 3)]
    logprob, rank, top_ids, _ = logprobs(torch.tensor([[torch.nan, 0.0, 0.0]]), 3, torch.tensor([2]), 3)
    torch.testing.assert_close(logprob, torch.tensor([0.5]).log())
    assert rank.tolist() == [1]
    assert top_ids.tolist() == [[1, 2, 0]]
