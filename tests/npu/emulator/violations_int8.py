"""Calls that violate the documented constraints of the int8 operators; see `violations`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.npu.emulator.arguments import BF, F32, FP, I8, direct, nz, on, ops, whole


def quant(
    x: Tensor, gamma: Tensor | None = None, scales: Tensor | None = None, zeros: Tensor | None = None, **more: Any
) -> Any:
    return ops().npu_add_rms_norm_quant(
        x, more.pop("x2", x), on(64) if gamma is None else gamma, on(64) if scales is None else scales, zeros, **more
    )


def dynamic(x: Tensor, gamma: Tensor | None = None, **more: Any) -> Any:
    return ops().npu_add_rms_norm_dynamic_quant(x, x, on(64) if gamma is None else gamma, **more)


def product(x: Tensor | None = None, w: Tensor | None = None, scale: Tensor | None = None, **more: Any) -> Any:
    given = {"pertoken_scale": on(5, dtype=F32), "output_dtype": BF, **more}
    return ops().npu_quant_matmul(
        on(5, 64, dtype=I8) if x is None else x,
        on(64, 32, dtype=I8) if w is None else w,
        on(32, dtype=F32) if scale is None else scale,
        **given,
    )


def gated(**changed: Any) -> None:
    """Call the first phase for four tokens of 64 numbers directly, since the plugin fixes most arguments."""
    given: dict[str, Any] = {
        "x": on(4, 128, dtype=torch.int32), "weight_scale": on(1, 128, dtype=F32), "token_scale": on(4, 1, dtype=F32),
        "bias": None, "smooth": None, "offset": None, "groups": whole(4, dtype=torch.int64), "left": 1,
        "mode": b"dynamic", "type": 2, "rounding": b"rint", "axis": -1, "variant": 0, "limit": 7.0, "alpha": 1.7,
        "shift": 1.0, "out": on(4, 64, dtype=I8), "scale": on(4, dtype=F32),
    }
    assert changed.keys() <= given.keys()
    direct("aclnnDequantSwigluQuantV2", *(given | changed).values())


def swiglu_quant(count: int = 4, **more: Any) -> Any:
    return ops().npu_dequant_swiglu_quant(
        on(4, 128, dtype=torch.int32), weight_scale=on(1, 128, dtype=F32), activation_scale=on(4, 1, dtype=F32),
        group_index=whole(count, dtype=torch.int64), quant_mode=1, **more)


def by_scale(x: Tensor | None = None, scales: Tensor | None = None, zeros: Tensor | None = None, *, axis: int = -1,
             dtype: torch.dtype = torch.qint8) -> Any:
    return ops().npu_quantize(
        on(4, 64) if x is None else x, on(1) if scales is None else scales, zeros, dtype, axis)


def attend_int8(**changed: Any) -> Any:
    """Attend for two requests of one token each on a paged int8 cache, with valid arguments except `changed`."""
    scale = on(3, 2, 128, dtype=F32)
    given: dict[str, Any] = {
        "query": on(2, 8, 1, 128), "key": on(3, 2, 128, 128, dtype=I8), "key_antiquant_scale": scale,
        "value_antiquant_scale": scale, "key_antiquant_mode": 5, "value_antiquant_mode": 5,
        "block_table": whole(0, 1).view(2, 1), "actual_seq_lengths_kv": [1, 128], "num_heads": 8,
        "num_key_value_heads": 2, "input_layout": "BNSD", "block_size": 128, **changed,
    }
    key = given.pop("key")
    return ops().npu_fused_infer_attention_score(given.pop("query"), key, given.pop("value", key), **given)


def scatter_nd(cache: Tensor | None = None, places: Tensor | None = None, values: Tensor | None = None) -> Any:
    return ops().npu_scatter_nd_update_(
        on(6, 4, dtype=F32) if cache is None else cache, whole(0, 5).view(2, 1) if places is None else places,
        on(2, 4, dtype=F32) if values is None else values)


QUANTIZED: dict[str, list[Callable[[], Any]]] = {
    "fia.antiquant": [
        lambda: attend_int8(value_antiquant_scale=None), lambda: attend_int8(key=on(3, 2, 128, 128)),
    ],
    "fia.antiquant_scale": [
        lambda: attend_int8(key_antiquant_scale=on(3, 2, 128)),
        lambda: attend_int8(value_antiquant_scale=on(3, 128, 2, dtype=F32)),
        lambda: attend_int8(key_antiquant_scale=on(3, 128, 2, dtype=F32).transpose(1, 2)),
    ],
    "fia.antiquant_mode": [
        lambda: attend_int8(key_antiquant_mode=1), lambda: attend_int8(key_antiquant_mode=0, value_antiquant_mode=0),
        lambda: attend_int8(key=on(2, 2, 128, 128, dtype=I8), block_table=None),
    ],
    "fia.antiquant_queries": [
        lambda: attend_int8(query=on(2, 8, 2, 128)),
    ],
    "fia.antiquant_layout": [
        lambda: attend_int8(query=on(2, 8, 128), input_layout="TND", actual_seq_lengths=[1, 2], sparse_mode=3,
                            atten_mask=on(2048, 2048, dtype=I8)),
    ],
    "fia.antiquant_block": [
        lambda: attend_int8(key=on(24, 2, 16, 128, dtype=I8), key_antiquant_scale=on(24, 2, 16, dtype=F32),
                            value_antiquant_scale=on(24, 2, 16, dtype=F32), block_size=16,
                            block_table=whole(*range(16)).view(2, 8)),
    ],
    "fia.antiquant_head_dim": [
        lambda: attend_int8(query=on(2, 8, 1, 48), key=on(3, 2, 128, 48, dtype=I8)),
    ],
    "scatternd.dtype": [
        lambda: scatter_nd(values=on(2, 4)), lambda: scatter_nd(whole(0, 1), values=whole(0, 1)),
    ],
    "scatternd.indices": [
        lambda: scatter_nd(places=whole(0, 5)), lambda: scatter_nd(places=on(2, 1, dtype=F32)),
        lambda: scatter_nd(places=whole(0, 1, 2, 0, 1, 2).view(2, 3)),
    ],
    "scatternd.updates": [
        lambda: scatter_nd(values=on(3, 4, dtype=F32)), lambda: scatter_nd(values=on(2, dtype=F32)),
    ],
    "scatternd.range": [lambda: (scatter_nd(places=whole(0, 6).view(2, 1)), torch.npu.synchronize())],
    "addrmsnormquant.x": [
        lambda: quant(on(4, 64, dtype=F32), gamma=on(64, dtype=F32)),
        lambda: dynamic(on(4, 64, dtype=F32), gamma=on(64, dtype=F32)),
    ],
    "addrmsnormquant.scales": [
        lambda: quant(on(4, 64), scales=on(64, dtype=F32)), lambda: quant(on(4, 64), scales=on(32)),
    ],
    "addrmsnormquant.zero_points": [
        lambda: quant(on(4, 64), zeros=on(64, dtype=torch.int32)), lambda: quant(on(4, 64), zeros=on(1)),
    ],
    "addrmsnormquant.div_mode": [lambda: quant(on(4, 64), div_mode=False)],
    "addrmsnormquant.y": [lambda: dynamic(on(4, 64), y_dtype=torch.quint4x2)],
    "addrmsnormdynamicquant.gamma_shape": [
        lambda: dynamic(on(4, 64), gamma=on(4, 64)), lambda: dynamic(on(4, 64), gamma=on(32)),
    ],
    "addrmsnormdynamicquant.smooth": [
        lambda: dynamic(on(4, 64), smooth_scale1=on(32)), lambda: dynamic(on(4, 64), beta=on(64, dtype=FP)),
    ],
    "addrmsnormdynamicquant.smooth_mask": [
        lambda: dynamic(on(4, 64), smooth_scale2=on(64)),
        lambda: dynamic(on(4, 64), smooth_scale1=on(64), output_mask=[False, True]),
    ],
    "dequantswiglu.x": [
        lambda: gated(x=on(4, 128)), lambda: gated(x=on(2, 2, 128, dtype=torch.int32)),
    ],
    "dequantswiglu.width": [
        lambda: gated(x=on(4, 96, dtype=torch.int32)),
        lambda: gated(x=on(4, 7296, dtype=torch.int32), weight_scale=on(1, 7296, dtype=F32)),
    ],
    "dequantswiglu.group_index": [
        lambda: gated(groups=None), lambda: gated(groups=whole(4)),
        lambda: gated(groups=whole(2, 2, dtype=torch.int64)),
    ],
    "dequantswiglu.count": [lambda: (swiglu_quant(5), torch.npu.synchronize())],
    "dequantswiglu.weight_scale": [
        lambda: gated(weight_scale=None), lambda: gated(weight_scale=on(128)),
        lambda: gated(weight_scale=on(1, 64, dtype=F32)),
    ],
    "dequantswiglu.activation_scale": [
        lambda: gated(token_scale=None), lambda: gated(token_scale=on(3, dtype=F32)),
    ],
    "dequantswiglu.bias": [lambda: gated(bias=on(128, dtype=torch.int32))],
    "dequantswiglu.quant_scale": [lambda: gated(smooth=on(128, dtype=F32)), lambda: gated(smooth=on(1, 64))],
    "dequantswiglu.quant_offset": [lambda: gated(offset=on(1, 64, dtype=F32))],
    "dequantswiglu.mode": [lambda: gated(mode=b"static"), lambda: swiglu_quant(swiglu_mode=1)],
    "dequantswiglu.fixed": [
        lambda: gated(type=34), lambda: gated(rounding=b"floor"), lambda: gated(axis=0),
    ],
    "dequantswiglu.y": [lambda: gated(out=on(4, 128, dtype=I8)), lambda: gated(scale=on(4))],
    "quantize.x": [lambda: by_scale(on(4, 64, dtype=torch.int32))],
    "quantize.scales": [
        lambda: by_scale(scales=on(1, dtype=F32)), lambda: by_scale(scales=on(4)),
        lambda: by_scale(scales=on(1, 64)),
    ],
    "quantize.zero_points": [
        lambda: by_scale(zeros=on(1, dtype=torch.int64)), lambda: by_scale(zeros=whole(1, 1)),
        lambda: by_scale(on(4, 64, dtype=FP), on(1, dtype=FP), on(1)),
    ],
    "quantize.axis": [lambda: by_scale(axis=2), lambda: by_scale(axis=-3)],
    "quantize.dtype": [lambda: by_scale(dtype=torch.quint8)],
    "dynamicquant.x": [
        lambda: ops().npu_dynamic_quant(on(4, 64, dtype=F32)),
        lambda: direct("aclnnDynamicQuantV2", on(64), None, None, 2, on(64, dtype=I8), on(1, dtype=F32), None),
    ],
    "dynamicquant.smooth": [
        lambda: ops().npu_dynamic_quant(on(4, 64), smooth_scales=on(32)),
        lambda: ops().npu_dynamic_quant(on(4, 64), smooth_scales=on(64, dtype=FP)),
    ],
    "dynamicquant.y": [lambda: ops().npu_dynamic_quant(on(4, 64), dst_type=torch.quint4x2)],
    "dynamicquant.groups": [
        lambda: ops().npu_dynamic_quant(on(4, 64), smooth_scales=on(2, 64), group_index=whole(2, 4)),
    ],
    "quantmatmul.dtype": [
        lambda: direct("aclnnQuantMatmulV5", on(5, 64, dtype=FP), on(64, 32, dtype=I8), None, on(32, dtype=F32),
            *[None] * 5, 0, 0, 0, on(5, 32)),
    ],
    "quantmatmul.inner": [lambda: product(w=on(48, 32, dtype=I8)), lambda: product(w=nz(48, 32, dtype=I8))],
    "quantmatmul.width": [lambda: product(x=on(1, 65568, dtype=I8), w=on(65568, 32, dtype=I8), pertoken_scale=None)],
    "quantmatmul.scale": [
        lambda: product(scale=on(16, dtype=F32)),
        lambda: product(scale=on(32, dtype=torch.int64), pertoken_scale=None),
    ],
    "quantmatmul.pertoken_scale": [
        lambda: product(pertoken_scale=on(4, dtype=F32)), lambda: product(pertoken_scale=on(5)),
    ],
    "quantmatmul.out": [
        lambda: product(output_dtype=FP, scale=on(32)), lambda: product(output_dtype=torch.int32),
        lambda: product(output_dtype=F32),
    ],
    "quantmatmul.bias": [
        lambda: product(bias=on(16)), lambda: product(bias=on(32, dtype=FP)),
        lambda: product(bias=on(32), output_dtype=torch.int32, pertoken_scale=None),
    ],
    "quantmatmul.absent": [lambda: product(offset=on(32, dtype=F32))],
    "quantmatmul.nz_one": [lambda: product(w=nz(64, 1, dtype=I8), scale=on(1, dtype=F32))],
    "quantmatmul.nz_contiguous": [lambda: product(w=nz(32, 64, dtype=I8).t())],
}
