"""Attention over a paged cache and cache writes, called through torch_npu, against softmax(q k) v in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.npu.emulator.child import emulated
from tests.npu.emulator.test_ops_fused import HALVES, drawn, near

BLOCK = 128


def mask() -> Tensor:
    return torch.triu(torch.ones(2048, 2048, dtype=torch.int8), 1).npu()


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attend with q (S, N, D) over k and v (L, kv_heads, D): (S, N, D), log-sum-exp (S, N). Queries are the last S
    tokens."""
    group = q.shape[1] // k.shape[1]
    keys, values = (t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("snd,lnd->nsl", q.double(), keys) * scale
    if causal:
        s, length = scores.shape[1:]
        scores = scores.masked_fill(torch.ones(s, length, dtype=torch.bool).triu(length - s + 1), float("-inf"))
    return torch.einsum("nsl,lnd->snd", scores.softmax(-1), values), scores.logsumexp(-1).T


def packed(
    q_lens: list[int],
    kv_lens: list[int],
    dtype: torch.dtype,
    heads: int = 8,
    kv_heads: int = 2,
    dim: int = 128,
    block: int = BLOCK,
) -> dict[str, Any]:
    """Return queries, a cache with blocks in scattered order, and each request's keys and values in it."""
    blocks = [-(-length // block) for length in kv_lens]
    cache = [drawn(sum(blocks) + 1, block, kv_heads, dim, dtype=dtype, seed=seed) for seed in (1, 2)]
    ids = torch.randperm(sum(blocks) + 1, generator=torch.Generator().manual_seed(3)).int()
    table = torch.zeros(len(q_lens), max(blocks), dtype=torch.int32)
    rows, start = [], 0
    for i, (count, length) in enumerate(zip(blocks, kv_lens, strict=True)):
        mine = ids[start : start + count]
        table[i, :count] = mine
        rows.append([c[mine.long()].reshape(-1, kv_heads, dim)[:length] for c in cache])
        start += count
    q = drawn(sum(q_lens), heads, dim, dtype=dtype)
    return {"q": q, "cache": cache, "table": table, "rows": rows, "ends": torch.tensor(q_lens).cumsum(0).tolist()}


def call(made: dict[str, Any], kv_lens: list[int], **changed: Any) -> tuple[Tensor, Tensor]:
    import torch_npu

    k, v = (c.flatten(2).npu() for c in made["cache"])
    heads, kv_heads = made["q"].shape[1], made["cache"][0].shape[2]
    given: dict[str, Any] = {
        "atten_mask": mask(),
        "block_table": made["table"].npu(),
        "input_layout": "TND",
        "block_size": made["cache"][0].shape[1],
        "actual_seq_lengths": made["ends"],
        "actual_seq_lengths_kv": kv_lens,
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "scale": 0.09,
        "sparse_mode": 3,
        **changed,
    }
    out, lse = torch_npu.npu_fused_infer_attention_score(made["q"].npu(), k, v, **given)
    return out, lse


@pytest.mark.parametrize("dtype", HALVES)
@emulated()
def test_decode_rows_and_chunks_in_one_call(dtype: torch.dtype) -> None:
    q_lens, kv_lens = [1, 1, 5, 130, 1], [1, 300, 5, 200, 128]
    made = packed(q_lens, kv_lens, dtype)
    out, _ = call(made, kv_lens)
    start = 0
    for i, count in enumerate(q_lens):
        want, _ = reference(made["q"][start : start + count], *made["rows"][i], 0.09, True)
        near(out[start : start + count], want)
        start += count


@emulated()
def test_decode_rows_with_blocks_of_sixteen() -> None:
    made = packed([1, 1], [40, 3], torch.bfloat16, block=16)
    out, _ = call(made, [40, 3])
    for i in range(2):
        near(out[i : i + 1], reference(made["q"][i : i + 1], *made["rows"][i], 0.09, True)[0])


@emulated()
def test_a_cache_by_heads_and_the_log_sum_exp() -> None:
    import torch_npu

    q_lens, kv_lens = [1, 4], [130, 70]
    made = packed(q_lens, kv_lens, torch.bfloat16)
    k, v = (c.transpose(1, 2).contiguous().npu() for c in made["cache"])
    out, lse = torch_npu.npu_fused_infer_attention_score_v2(
        made["q"].npu(),
        k,
        v,
        atten_mask=mask(),
        block_table=made["table"].npu(),
        input_layout="TND",
        block_size=BLOCK,
        actual_seq_qlen=made["ends"],
        actual_seq_kvlen=kv_lens,
        num_query_heads=8,
        num_key_value_heads=2,
        softmax_scale=0.09,
        sparse_mode=3,
        return_softmax_lse=True,
    )
    assert lse.shape == (5, 8, 1)
    for i, (start, count) in enumerate([(0, 1), (1, 4)]):
        want, want_lse = reference(made["q"][start : start + count], *made["rows"][i], 0.09, True)
        near(out[start : start + count], want)
        near(lse[start : start + count, :, 0], want_lse, roundings=4)


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
@emulated()
def test_unpaged_layouts(layout: str) -> None:
    import torch_npu

    b, s, n, kv, d = 2, 6, 4, 2, 64
    q, k, v = (drawn(b, s, heads, d, dtype=torch.float16, seed=i) for i, heads in enumerate((n, kv, kv)))
    shape = {"BSH": lambda t: t.flatten(2), "BSND": lambda t: t, "BNSD": lambda t: t.transpose(1, 2).contiguous()}[
        layout
    ]
    for causal in (False, True):
        given: dict[str, Any] = {"atten_mask": mask(), "sparse_mode": 3} if causal else {}
        out, _ = torch_npu.npu_fused_infer_attention_score(
            shape(q).npu(),
            shape(k).npu(),
            shape(v).npu(),
            num_heads=n,
            num_key_value_heads=kv,
            scale=0.125,
            input_layout=layout,
            **given,
        )
        got = out.transpose(1, 2) if layout == "BNSD" else out.view(b, s, n, d)
        for i in range(b):
            near(got[i], reference(q[i], k[i], v[i], 0.125, causal)[0])


@emulated()
def test_unpaged_packed_keys() -> None:
    import torch_npu

    lens = [3, 5]
    q, k, v = (drawn(8, heads, 128, dtype=torch.bfloat16, seed=i) for i, heads in enumerate((4, 4, 4)))
    out, _ = torch_npu.npu_fused_infer_attention_score(
        q.npu(),
        k.npu(),
        v.npu(),
        num_heads=4,
        num_key_value_heads=4,
        scale=0.09,
        input_layout="TND",
        actual_seq_lengths=[3, 8],
        actual_seq_lengths_kv=[3, 8],
        atten_mask=mask(),
        sparse_mode=3,
    )
    for start, count in zip((0, 3), lens, strict=True):
        here = slice(start, start + count)
        near(out[here], reference(q[here], k[here], v[here], 0.09, True)[0])


@emulated()
def test_a_full_mask() -> None:
    import torch_npu

    q, k, v = (drawn(1, 4, 3, 32, dtype=torch.float16, seed=i) for i in range(3))
    hidden = torch.zeros(1, 4, 4, dtype=torch.bool)
    hidden[0, :, 2] = True
    out, _ = torch_npu.npu_fused_infer_attention_score(
        q.npu(), k.npu(), v.npu(), num_heads=3, scale=0.2, input_layout="BSND", atten_mask=hidden.npu()
    )
    seen = [0, 1, 3]
    near(out[0], reference(q[0], k[0][seen], v[0][seen], 0.2, False)[0])


@emulated()
def test_a_wrong_mask_gives_wrong_numbers() -> None:
    made = packed([4], [4], torch.bfloat16)
    right = call(made, [4])[0].cpu()
    upside_down = call(made, [4], atten_mask=torch.tril(torch.ones(2048, 2048, dtype=torch.int8), -1).npu())[0].cpu()
    nothing = call(made, [4], atten_mask=torch.zeros(2048, 2048, dtype=torch.int8).npu())[0].cpu()
    assert not torch.allclose(right[:3], nothing[:3], atol=0.05)  # also attends to later keys
    torch.testing.assert_close(right[3], nothing[3])
    assert not torch.allclose(right, upside_down, atol=0.05)


@emulated()
def test_into_given_tensors_with_a_workspace_of_the_largest_size() -> None:
    import torch_npu

    made = packed([1, 1], [200, 90], torch.bfloat16)
    k, v = (c.flatten(2).npu() for c in made["cache"])
    given: dict[str, Any] = {
        "atten_mask": mask(),
        "block_table": made["table"].npu(),
        "input_layout": "TND",
        "block_size": BLOCK,
        "actual_seq_lengths": [1, 2],
        "actual_seq_lengths_kv": [200, 90],
        "num_heads": 8,
        "num_key_value_heads": 2,
        "scale": 0.09,
        "sparse_mode": 3,
    }
    q = made["q"].npu()
    workspace = torch_npu._npu_fused_infer_attention_score_get_max_workspace(q, k, v, **given)
    assert workspace.numel() > 0
    out, lse = torch.zeros_like(q), torch.ones(1, device="npu")
    torch_npu.npu_fused_infer_attention_score.out(q, k, v, workspace=workspace, out=[out, lse], **given)
    for i in range(2):
        near(out[i : i + 1], reference(made["q"][i : i + 1], *made["rows"][i], 0.09, True)[0])


@emulated(fresh=True)
def test_a_workspace_too_small_is_refused() -> None:
    import torch_npu

    made = packed([1], [20], torch.bfloat16)
    k, v = (c.flatten(2).npu() for c in made["cache"])
    q = made["q"].npu()
    torch_npu.npu_fused_infer_attention_score.out(
        q, k, v, atten_mask=mask(), block_table=made["table"].npu(), input_layout="TND", block_size=BLOCK,
        actual_seq_lengths=[1], actual_seq_lengths_kv=[20], num_heads=8, num_key_value_heads=2, sparse_mode=3,
        workspace=torch.empty(32, dtype=torch.uint8, device="npu"), out=[q.clone(), torch.ones(1, device="npu")])
    with pytest.raises(RuntimeError, match="aclnnFusedInferAttentionScoreV3"):  # the plugin's queue reports it later
        torch.npu.synchronize()


@emulated()
def test_captured_call_takes_lengths_of_update() -> None:
    import torch_npu

    made = packed([1, 1], [300, 300], torch.bfloat16)
    k, v = (c.flatten(2).npu() for c in made["cache"])
    q, table, triangle = made["q"].npu(), made["table"].npu(), mask()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        out, _ = torch_npu.npu_fused_infer_attention_score(
            q,
            k,
            v,
            atten_mask=triangle,
            block_table=table,
            input_layout="TND",
            block_size=BLOCK,
            actual_seq_lengths=[1, 2],
            actual_seq_lengths_kv=[300, 300],
            num_heads=8,
            num_key_value_heads=2,
            scale=0.09,
            sparse_mode=3,
        )
    for lengths in ([300, 300], [17, 129], [128, 1]):
        graph.replay()
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])
        torch.npu.synchronize()
        for i, length in enumerate(lengths):
            keys, values = (t[:length] for t in made["rows"][i])
            near(out[i : i + 1], reference(made["q"][i : i + 1], keys, values, 0.09, True)[0])


@pytest.mark.parametrize("slots", [torch.int32, torch.int64])
@pytest.mark.parametrize("mode", ["Norm", "PA_NZ"])
@emulated()
def test_scatter_to_a_paged_cache(mode: str, slots: torch.dtype) -> None:
    import torch_npu

    tokens, heads, dim, blocks, block = 7, 2, 32, 3, 16
    k, v = (drawn(tokens, heads, dim, dtype=torch.float16, seed=i) for i in range(2))
    places = torch.tensor([5, 0, 47, 16, 17, 31, 2])
    shape = (blocks, block, heads, dim) if mode == "Norm" else (blocks, heads * dim // 16, block, 16)
    caches = [torch.zeros(shape, dtype=torch.float16).npu() for _ in range(2)]
    torch_npu.npu_scatter_pa_kv_cache(k.npu(), v.npu(), *caches, places.to(slots).npu(), cache_mode=mode)
    for given, cache in zip((k, v), caches, strict=True):
        rows = cache.cpu()
        rows = rows.flatten(0, 1) if mode == "Norm" else rows.transpose(1, 2).reshape(blocks * block, heads, dim)
        assert torch.equal(rows[places], given)
        assert rows.abs().sum() == given.abs().sum()  # nothing is written elsewhere


@emulated(fresh=True)
def test_a_slot_beyond_the_cache_is_an_error_of_the_stream() -> None:
    import torch_npu

    k = drawn(1, 2, 32, dtype=torch.float16).npu()
    cache = torch.zeros(3, 16, 2, 32, dtype=torch.float16).npu()
    torch_npu.npu_scatter_pa_kv_cache(
        k, k, cache, cache.clone(), torch.tensor([48], dtype=torch.int32).npu(), cache_mode="Norm"
    )
    with pytest.raises(RuntimeError, match=r"48 of 48 \[scatter.range"):
        torch.npu.synchronize()


@emulated(relax=["fp32", "small_heads"])
def test_relaxed_small_float32_models_are_accepted() -> None:
    made = packed([1, 3], [20, 9], torch.float32, heads=4, kv_heads=2, dim=8)
    out, _ = call(made, [20, 9])
    assert out.dtype == torch.float32
    near(out[:1], reference(made["q"][:1], *made["rows"][0], 0.09, True)[0])
    near(out[1:], reference(made["q"][1:], *made["rows"][1], 0.09, True)[0])


@pytest.mark.parametrize("dtype", HALVES)
@emulated()
def test_int8_cache_scales_by_token_and_head(dtype: torch.dtype) -> None:
    """Antiquant mode 5: each token and head has a scale of its own, in blocks like the numbers."""
    import torch_npu

    lengths = [1, 130, 256]
    made = packed([1] * 3, lengths, dtype)
    numbers, scales, rows = [], [], []
    for index, cache in enumerate(made["cache"]):
        scale = torch.rand(cache.shape[:3], generator=torch.Generator().manual_seed(7 + index)) / 40 + 0.01
        number = (cache.float() / scale.unsqueeze(-1)).round().clamp(-127, 127)
        numbers.append(number.to(torch.int8).transpose(1, 2).contiguous().npu())
        scales.append(scale.transpose(1, 2).contiguous().npu())
        exact = number * scale.unsqueeze(-1)
        rows.append([exact[made["table"][i].long()].flatten(0, 1)[:n] for i, n in enumerate(lengths)])
    out, _ = torch_npu.npu_fused_infer_attention_score(
        made["q"].unsqueeze(2).npu(), *numbers, key_antiquant_scale=scales[0], value_antiquant_scale=scales[1],
        key_antiquant_mode=5, value_antiquant_mode=5, block_table=made["table"].npu(), input_layout="BNSD",
        block_size=BLOCK, actual_seq_lengths_kv=lengths, num_heads=8, num_key_value_heads=2, scale=0.09)
    for i, (keys, values) in enumerate(zip(*rows, strict=True)):
        near(out[i].transpose(0, 1), reference(made["q"][i : i + 1], keys, values, 0.09, False)[0])
