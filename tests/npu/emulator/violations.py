"""Calls that violate the documented constraints of the operators, by the emulator's name of the constraint.

They are made through torch_npu. Where its own checks come first, the operator is called as by the plugin (`direct`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.npu.emulator.arguments import BF, F32, FP, I8, direct, nz, on, ops, strided, whole
from tests.npu.emulator.violations_delta import DELTA
from tests.npu.emulator.violations_experts import EXPERTS
from tests.npu.emulator.violations_int4 import INT4
from tests.npu.emulator.violations_int8 import QUANTIZED, quant


def attend(**changed: Any) -> Any:
    """Attend for two requests of one token each on a paged cache, with valid arguments except `changed`."""
    given: dict[str, Any] = {
        "query": on(2, 8, 128),
        "key": on(3, 128, 256),
        "atten_mask": on(2048, 2048, dtype=I8),
        "block_table": whole(0, 1).view(2, 1),
        "actual_seq_lengths": [1, 2],
        "actual_seq_lengths_kv": [1, 128],
        "num_heads": 8,
        "num_key_value_heads": 2,
        "input_layout": "TND",
        "block_size": 128,
        "sparse_mode": 3,
        **changed,
    }
    key = given.pop("key")
    return ops().npu_fused_infer_attention_score(given.pop("query"), key, given.pop("value", key), **given)


def unpaged(**changed: Any) -> Any:
    """Attend in (B, S, N, D) without a mask."""
    given: dict[str, Any] = {
        "query": on(1, 4, 2, 64),
        "key": on(1, 4, 2, 64),
        "num_heads": 2,
        "input_layout": "BSND",
        **changed,
    }
    key = given.pop("key")
    return ops().npu_fused_infer_attention_score(given.pop("query"), key, given.pop("value", key), **given)


def attend_into(lse: Tensor) -> Any:
    q, cache = on(1, 8, 128), on(3, 128, 256)
    return ops().npu_fused_infer_attention_score.out(
        q,
        cache,
        cache,
        atten_mask=on(2048, 2048, dtype=I8),
        block_table=whole(0).view(1, 1),
        actual_seq_lengths=[1],
        actual_seq_lengths_kv=[9],
        num_heads=8,
        num_key_value_heads=2,
        input_layout="TND",
        block_size=128,
        sparse_mode=3,
        softmax_lse_flag=True,
        out=[torch.empty_like(q), lse],
    )


def rotary(x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, **more: Any) -> Any:
    cos = on(1, x.shape[1], 1, x.shape[-1]) if cos is None else cos
    return ops().npu_rotary_mul(x, cos, cos if sin is None else sin, **more)


def both(q: Tensor, k: Tensor, cos: Tensor, **more: Any) -> Any:
    return ops().npu_apply_rotary_pos_emb(q, k, cos, cos, **more)


def scatter(**changed: Any) -> Any:
    given: dict[str, Any] = {
        "key": on(2, 2, 32),
        "cache": on(3, 16, 2, 32),
        "slots": whole(0, 1),
        "cache_mode": "Norm",
        **changed,
    }
    key, cache, slots = given.pop("key"), given.pop("cache"), given.pop("slots")
    return ops().npu_scatter_pa_kv_cache(
        key, given.pop("value", key), cache, given.pop("value_cache", cache), slots, **given
    )


def mrope(**changed: Any) -> Any:
    given: dict[str, Any] = {
        "positions": whole(0, 1),
        "query": on(2, 256),
        "key": on(2, 128),
        "table": on(9, 64),
        "head_size": 64,
        "mrope_section": [0, 0, 0],
        **changed,
    }
    return ops().npu_mrope(
        given.pop("positions"),
        given.pop("query"),
        given.pop("key"),
        given.pop("table"),
        given.pop("head_size"),
        **given,
    )


VIOLATIONS: dict[str, list[Callable[[], Any]]] = {
    **INT4,
    **QUANTIZED,
    **DELTA,
    **EXPERTS,
    "fia.dtype": [lambda: attend(query=on(2, 8, 128, dtype=F32)), lambda: attend(query=on(2, 8, 128, dtype=I8))],
    "fia.kv_dtype": [lambda: attend(key=on(3, 128, 256, dtype=FP)), lambda: attend(key=on(3, 128, 256, dtype=I8))],
    "fia.kv_shape": [lambda: attend(value=on(4, 128, 256))],
    "fia.contiguous": [
        lambda: attend(query=strided(2, 8, 128)), lambda: attend(key=strided(3, 128, 256)),
        lambda: attend(block_table=whole(0, 0, 1, 1).view(2, 2)[:, ::2]),
    ],
    "fia.layout": [
        lambda: ops().npu_fused_infer_attention_score(on(8, 2, 128), on(8, 2, 128), on(8, 2, 128), num_heads=8,
            num_key_value_heads=8, input_layout="NTD_TND", actual_seq_lengths=[2], actual_seq_lengths_kv=[2]),
    ],
    "fia.heads": [
        lambda: attend(num_heads=4),
        lambda: unpaged(query=on(1, 1, 512, 64), key=on(1, 1, 8, 64), num_heads=512, num_key_value_heads=8),
    ],
    "fia.group": [
        lambda: attend(num_key_value_heads=3),
        lambda: unpaged(query=on(1, 1, 128, 64), key=on(1, 1, 1, 64), num_heads=128, num_key_value_heads=1),
    ],
    "fia.kv_heads": [lambda: unpaged(key=on(1, 4, 1, 64)), lambda: unpaged(key=on(1, 4, 2, 32))],
    "fia.tnd_head_dim": [
        lambda: attend(query=on(2, 8, 64), key=on(3, 128, 128)),
        lambda: attend(query=on(2, 8, 96), key=on(3, 128, 192)),
        lambda: attend(query=on(2, 8, 272), key=on(3, 128, 544)),
        lambda: attend(query=on(2, 2, 256), key=on(3, 128, 512), num_heads=2),
        lambda: attend(query=on(2, 8, 256), key=on(3, 2, 128, 256)),
        lambda: attend(query=on(2, 8, 256), key=on(3, 128, 512), inner_precise=1),
    ],
    "fia.head_dim": [
        lambda: unpaged(query=on(1, 4, 2, 24), key=on(1, 4, 2, 24)),
        lambda: unpaged(query=on(1, 4, 2, 528), key=on(1, 4, 2, 528)),
    ],
    "fia.tokens": [
        lambda: attend(query=torch.empty(1048577, 1, 128, dtype=BF, device="npu"), num_heads=1, num_key_value_heads=1,
            key=on(3, 128, 128)),
    ],
    "fia.lengths": [lambda: attend(actual_seq_lengths=None), lambda: attend(actual_seq_lengths_kv=None)],
    "fia.batch": [
        lambda: attend(query=on(4097, 1, 128), num_heads=1, num_key_value_heads=1, key=on(3, 128, 128),
            block_table=on(4097, 1, dtype=torch.int32), actual_seq_lengths=list(range(1, 4098)),
            actual_seq_lengths_kv=[1] * 4097),
    ],
    "fia.cumulative": [
        lambda: attend(query=on(3, 8, 128), actual_seq_lengths=[2, 1]), lambda: attend(actual_seq_lengths=[-1, 2]),
    ],
    "fia.last": [lambda: attend(actual_seq_lengths=[1, 3]), lambda: attend(actual_seq_lengths=[1, 1])],
    "fia.kv_lengths": [
        lambda: attend(actual_seq_lengths_kv=[1]), lambda: attend(actual_seq_lengths_kv=[1, 129]),
        lambda: attend(actual_seq_lengths_kv=[1, -1]),
    ],
    "fia.causal_lengths": [
        lambda: attend(query=on(4, 8, 128), actual_seq_lengths=[1, 4], actual_seq_lengths_kv=[1, 2]),
    ],
    "fia.block_size": [
        lambda: attend(block_size=24), lambda: attend(block_size=256), lambda: attend(block_size=0),
        lambda: attend(query=on(3, 8, 128), actual_seq_lengths=[1, 3], block_size=16, key=on(24, 16, 256)),
    ],
    "fia.block_table": [
        lambda: attend(block_table=whole(0, 1, dtype=torch.int64).view(2, 1)),
        lambda: attend(block_table=whole(0).view(1, 1)),
    ],
    "fia.cache_shape": [lambda: attend(key=on(3, 128, 2, 128)), lambda: attend(key=on(3, 64, 256))],
    "fia.cache_width": [
        lambda: unpaged(query=on(1, 1, 65536), key=on(1, 16, 65536), num_heads=128, num_key_value_heads=128,
            input_layout="BSH", block_table=whole(0).view(1, 1), block_size=16, actual_seq_lengths_kv=[1]),
    ],
    "fia.sparse_mode": [
        lambda: attend(atten_mask=None), lambda: attend(sparse_mode=0), lambda: attend(sparse_mode=2),
        lambda: attend(sparse_mode=4),
    ],
    "fia.mask": [lambda: attend(atten_mask=on(128, 128, dtype=I8)), lambda: attend(atten_mask=on(2048, 2048))],
    "fia.inner_precise": [lambda: attend(inner_precise=4)],
    "fia.features": [
        lambda: attend(pse_shift=on(1, 8, 1, 128)), lambda: attend(query_rope=on(2, 8, 64), key_rope=on(3, 128, 128)),
    ],
    "fia.lse": [lambda: attend_into(on(1, dtype=F32)), lambda: attend_into(on(1, 8, 1, dtype=FP))],
    "rmsnorm.x": [
        lambda: ops().npu_rms_norm(on(4, 64, dtype=torch.int32), on(64, dtype=F32)),
        lambda: ops().npu_rms_norm(on(*[1] * 8, 64), on(64)),
    ],
    "rmsnorm.gamma_shape": [
        lambda: ops().npu_rms_norm(on(4, 64), on(32)), lambda: ops().npu_add_rms_norm(on(4, 64), on(4, 64), on(32)),
        lambda: quant(on(4, 64), gamma=on(32)),
    ],
    "rmsnorm.gamma_dtype": [
        lambda: ops().npu_rms_norm(on(4, 64), on(64, dtype=FP)),
        lambda: ops().npu_rms_norm(on(4, 64, dtype=F32), on(64)),
    ],
    "addrmsnorm.x2": [
        lambda: ops().npu_add_rms_norm(on(4, 64), on(4, 64, dtype=FP), on(64)),
        lambda: ops().npu_add_rms_norm(on(4, 64), on(64), on(64)),
    ],
    "addrmsnorm.gamma_dtype": [lambda: ops().npu_add_rms_norm(on(4, 64), on(4, 64), on(64, dtype=F32))],
    "swiglu.x": [lambda: ops().npu_swiglu(on(4, 64, dtype=torch.int32))],
    "swiglu.dim": [lambda: direct("aclnnSwiGlu", on(4, 64), 2, on(4, 32))],
    "swiglu.even": [lambda: direct("aclnnSwiGlu", on(4, 63), -1, on(4, 31))],
    "swiglu.contiguous": [lambda: ops().npu_swiglu(strided(4, 64))],
    "rotarymul.x": [
        lambda: rotary(on(9, 4, 128), on(9, 1, 128)),
        lambda: rotary(on(1, 9, 4, 128, dtype=torch.int32), on(1, 9, 1, 128, dtype=torch.int32)),
    ],
    "rotarymul.dtype": [
        lambda: direct("aclnnRotaryPositionEmbeddingV2", on(1, 9, 4, 128), on(1, 9, 1, 128, dtype=FP), on(1, 9, 1, 128,
            dtype=FP), 0, None, on(1, 9, 4, 128)),
    ],
    "rotarymul.head_dim": [
        lambda: rotary(on(1, 9, 4, 1024)), lambda: rotary(on(1, 9, 4, 63)),
        lambda: rotary(on(1, 9, 4, 128), on(1, 9, 1, 64)),
    ],
    "rotarymul.cos_shape": [
        lambda: rotary(on(1, 9, 4, 128), on(1, 8, 1, 128)),
        lambda: rotary(on(1, 9, 4, 128), on(1, 9, 1, 128), on(1, 1, 1, 128)),
    ],
    "rotarymul.batch": [
        lambda: rotary(on(1000, 9, 4, 32), on(1, 9, 1, 32)), lambda: rotary(on(1, 9, 1000, 32), on(1, 9, 1, 32)),
    ],
    "rotarymul.mode": [
        lambda: direct("aclnnRotaryPositionEmbeddingV2", on(1, 9, 4, 128), on(1, 9, 1, 128), on(1, 9, 1, 128), 2, None,
            on(1, 9, 4, 128)),
    ],
    "applyrope.dtype": [
        lambda: both(on(1, 9, 4, 128), on(1, 9, 2, 128, dtype=FP), on(1, 9, 1, 128)),
        lambda: both(on(1, 9, 4, 128), on(1, 9, 2, 128), on(1, 9, 1, 128, dtype=F32)),
    ],
    "applyrope.head_dim": [lambda: both(on(1, 9, 4, 64), on(1, 9, 2, 64), on(1, 9, 1, 64))],
    "applyrope.shape": [
        lambda: both(on(1, 9, 4, 128), on(1, 8, 2, 128), on(1, 9, 1, 128)),
        lambda: both(on(1, 9, 4, 128), on(1, 9, 2, 128), on(1, 9, 4, 128)),
    ],
    "applyrope.layout": [
        lambda: both(on(9, 4, 128), on(9, 2, 128), on(9, 1, 128)),
        lambda: both(on(1, 9, 4, 128), on(1, 9, 2, 128), on(1, 9, 1, 128), layout="TND"),
    ],
    "applyrope.mode": [lambda: both(on(1, 9, 4, 128), on(1, 9, 2, 128), on(1, 9, 1, 128), rotary_mode="quarter")],
    "ropecache.cache_mode": [lambda: mrope(cache_mode="interleave")],
    "ropecache.section": [lambda: mrope(mrope_section=[8, 12, 12], positions=whole(0, 1, 0, 1, 0, 1).view(3, 2))],
    "ropecache.positions": [lambda: mrope(positions=whole(0)), lambda: mrope(positions=on(2, dtype=F32))],
    "ropecache.dtype": [lambda: mrope(table=on(9, 64, dtype=F32)), lambda: mrope(key=on(2, 128, dtype=FP))],
    "ropecache.shape": [lambda: mrope(key=on(3, 128)), lambda: mrope(query=on(2, 250))],
    "ropecache.table": [lambda: mrope(table=on(9, 128))],
    "ropecache.rows": [lambda: mrope(query=on(256, 2).t()), lambda: mrope(key=on(128, 2).t())],
    "ropecache.gap": [
        lambda: mrope(query=on(2, 264)[:, :256]), lambda: mrope(key=on(2, 256)[:, 8:136]),
        lambda: mrope(key=on(1, 128).expand(2, 128)),
    ],
    "ropecache.empty": [lambda: mrope(positions=whole(), query=on(0, 256), key=on(0, 128))],
    "ropecache.head_size": [lambda: mrope(query=on(2, 192), key=on(2, 96), head_size=48, table=on(9, 48))],
    "ropecache.range": [lambda: (mrope(positions=whole(0, 9)), torch.npu.synchronize())],
    "topktopp.logits": [lambda: ops().npu_top_k_top_p(on(2, 3, 8), on(2), whole(1, 1))],
    "topktopp.p": [
        lambda: ops().npu_top_k_top_p(on(2, 8), on(2, dtype=F32), whole(1, 1)),
        lambda: ops().npu_top_k_top_p(on(2, 8), on(1), whole(1, 1)),
    ],
    "topktopp.k": [
        lambda: ops().npu_top_k_top_p(on(2, 8), on(2), whole(1, 1, dtype=torch.int64)),
        lambda: ops().npu_top_k_top_p(on(2, 8), on(2), whole(1)),
    ],
    "topktopp.given": [lambda: direct("aclnnApplyTopKTopP", on(2, 8), None, None, on(2, 8))],
    "topktopp.p_range": [lambda: (ops().npu_top_k_top_p(on(2, 8), on(2) + 2, whole(1, 1)), torch.npu.synchronize())],
    "topktopp.k_range": [lambda: (ops().npu_top_k_top_p(on(2, 8), on(2) * 0, whole(1, 9)), torch.npu.synchronize())],
    "scatter.dtype": [lambda: scatter(key=on(2, 2, 32, dtype=F32), cache=on(3, 16, 2, 32, dtype=F32))],
    "scatter.same_dtype": [
        lambda: scatter(value=on(2, 2, 32, dtype=FP)), lambda: scatter(cache=on(3, 16, 2, 32, dtype=FP)),
    ],
    "scatter.shape": [lambda: scatter(value=on(2, 1, 32)), lambda: scatter(key=on(1, 2, 2, 32))],
    "scatter.slots": [
        lambda: scatter(slots=whole(0)), lambda: scatter(slots=on(2, dtype=F32)),
        lambda: scatter(slots=whole(0, 1).view(2, 1)),
    ],
    "scatter.contiguous": [
        lambda: scatter(key=strided(2, 2, 32)), lambda: scatter(slots=whole(0, 0, 1, 1)[::2]),
        lambda: scatter(cache=strided(3, 16, 2, 32)),
    ],
    "scatter.cache_mode": [lambda: scatter(cache_mode="ND")],
    "scatter.norm_shape": [lambda: scatter(cache=on(3, 16, 64)), lambda: scatter(cache=on(3, 2, 16, 32))],
    "scatter.nz_shape": [
        lambda: scatter(cache_mode="PA_NZ"),
        lambda: scatter(cache_mode="PA_NZ", key=on(2, 1, 24), cache=on(3, 1, 16, 16)),
    ],
    "scatter.range": [lambda: (scatter(slots=whole(0, -1)), torch.npu.synchronize())],
    "scatter.distinct": [lambda: (scatter(slots=whole(1, 1)), torch.npu.synchronize())],
    "nz.rank": [lambda: direct("aclnnNpuFormatCast", on(64), on(64))],
    "nz.dtype": [lambda: direct("aclnnNpuFormatCast", on(4, 4, dtype=torch.bool), on(4, 4, dtype=torch.bool))],
    "nz.format": [lambda: direct("aclnnNpuFormatCast", on(4, 4), on(4, 4))],
    "nz.view": [lambda: torch.mm(on(5, 32), nz(64, 32)[:32]), lambda: torch.mm(on(5, 64), nz(64, 32)[:, :16])],
    "matmul.dtype": [lambda: torch.mm(on(4, 8, dtype=torch.int32), on(8, 4, dtype=torch.int32))],
    "matmul.same_dtype": [lambda: torch.mm(on(4, 8), on(8, 4, dtype=FP))],
    "matmul.inner": [lambda: direct("aclnnMm", on(4, 8), on(7, 4), on(4, 4), 0)],
    "matmul.cube_math_type": [
        lambda: direct("aclnnMm", on(4, 8), on(8, 4), on(4, 4), 2),
        lambda: direct("aclnnMm", on(4, 8), on(8, 4), on(4, 4), 5),
    ],
    "matmul.nz_one": [lambda: torch.mm(on(4, 64), nz(64, 1))],
    "embedding.indices": [lambda: direct("aclnnEmbedding", on(9, 8), on(3, dtype=F32), on(3, 8))],
    "embedding.weight": [lambda: direct("aclnnEmbedding", on(9, 8, 2), whole(0, 1), on(2, 8))],
    "cast.dtype": [lambda: direct("aclnnCast", on(4), 0, on(4))],
    "topk.k": [lambda: on(4, 8).topk(9)],
}
