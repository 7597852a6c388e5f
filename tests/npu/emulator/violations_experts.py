"""Calls that violate the documented constraints of the operators of mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.npu.emulator.arguments import BF, F32, FP, I8, direct, nz, on, ops, strided, whole

I64 = torch.int64
GROUPS = 2


def choose(**changed: Any) -> None:
    """Call the first phase for 5 tokens and 3 of 8 experts, with valid arguments except `changed`."""
    given: dict[str, Any] = {
        "x": on(5, 8, dtype=F32), "finished": None, "k": 3, "renorm": 1, "softmax": False, "y": on(5, 3, dtype=F32),
        "experts": on(5, 3, dtype=torch.int32), "softmax_out": on(0, dtype=F32)}
    assert changed.keys() <= given.keys()
    direct("aclnnMoeGatingTopKSoftmaxV2", *(given | changed).values())


def order(**changed: Any) -> Any:
    """Order the rows of 5 tokens by 3 of 8 experts, with valid arguments except `changed`."""
    given: dict[str, Any] = {
        "x": on(5, 32), "expert_idx": on(5, 3, dtype=torch.int32), "active_num": 15, "expert_num": 8,
        "expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "active_expert_range": [0, 8], **changed}
    return ops().npu_moe_init_routing_v2(given.pop("x"), given.pop("expert_idx"), **given)


def order_directly(**changed: Any) -> None:
    """Call the first phase for the same rows with outputs of its own."""
    given: dict[str, Any] = {
        "x": on(5, 32), "experts": on(5, 3, dtype=torch.int32), "scale": None, "offset": None, "active": 15,
        "capacity": -1, "count": 8, "drop": 0, "type": 1, "flag": True, "quant": -1, "range": [0, 8], "index": 0,
        "expanded": on(15, 32), "row_idx": on(15, dtype=torch.int32), "counts": on(8, dtype=I64),
        "expanded_scale": on(15, dtype=F32)}
    assert changed.keys() <= given.keys()
    direct("aclnnMoeInitRoutingV3", *(given | changed).values())


def total(**changed: Any) -> None:
    """Call the first phase of the sum for 5 tokens of 3 rows each, with valid arguments except `changed`."""
    given: dict[str, Any] = {
        "rows": on(15, 32), "places": on(15, dtype=torch.int32), "x1": None, "x2": None, "bias": None,
        "scales": on(5, 3, dtype=F32), "experts": None, "mode": 2, "out": on(5, 32)}
    assert changed.keys() <= given.keys()
    direct("aclnnMoeFinalizeRoutingV2", *(given | changed).values())


def place(*values: int, mode: int = 2) -> None:
    """Sum rows at places, and wait for the device."""
    rows = on(2, 32) if mode == 2 else on(1, 2, 32)
    scales = on(1, 2, dtype=F32)
    ops().npu_moe_finalize_routing(rows, None, None, None, scales, whole(*values), None, drop_pad_mode=mode)
    torch.npu.synchronize()


def lists(value: Any) -> Any:
    return None if value is None else [value]


def grouped(**changed: Any) -> Any:
    """Multiply 5 rows of 64 by two matrices [64, 32], with valid arguments except `changed`."""
    given: dict[str, Any] = {
        "group_list": whole(2, 3, dtype=I64), "split_item": 2, "group_type": 0, "group_list_type": 1, **changed}
    x, weight = given.pop("x", on(5, 64)), given.pop("weight", on(GROUPS, 64, 32))
    for name in ("scale", "per_token_scale", "antiquant_scale", "antiquant_offset", "offset", "bias"):
        if name in given:
            given[name] = lists(given[name])
    return ops().npu_grouped_matmul([x], [weight], **given)


def grouped_int8(**changed: Any) -> Any:
    given = {"x": on(5, 64, dtype=I8), "weight": nz(GROUPS, 64, 32, dtype=I8), "scale": on(GROUPS, 32),
             "per_token_scale": on(5, dtype=F32), "output_dtype": BF, **changed}
    return grouped(**given)


def grouped_int4(**changed: Any) -> Any:
    given = {"weight": on(GROUPS, 64, 4, dtype=torch.int32), "antiquant_scale": on(GROUPS, 2, 32),
             "antiquant_offset": on(GROUPS, 2, 32), **changed}
    return grouped(**given)


def fused(**changed: Any) -> Any:
    """Multiply 5 int8 rows by two matrices, with SwiGLU, with valid arguments except `changed`."""
    given: dict[str, Any] = {
        "x": on(5, 64, dtype=I8), "weight": nz(GROUPS, 64, 32, dtype=I8), "scale": on(GROUPS, 32, dtype=F32),
        "x_scale": on(5, dtype=F32), "groups": whole(2, 3, dtype=I64), "group_list_type": 1, **changed}
    x, weight, scale = given.pop("x"), given.pop("weight"), given.pop("scale")
    return ops().npu_grouped_matmul_swiglu_quant_v2(
        x, [weight], [scale], given.pop("x_scale"), given.pop("groups"), **given)


def cast(**changed: Any) -> None:
    """Call the first phase of the norm for four tokens, with valid arguments except `changed`."""
    given: dict[str, Any] = {
        "x1": on(4, 64), "x2": on(4, 64), "gamma": on(64), "epsilon": 1e-6, "wide": on(4, 64, dtype=F32),
        "y": on(4, 64), "rstd": on(4, 1, dtype=F32), "sum": on(4, 64)}
    assert changed.keys() <= given.keys()
    direct("aclnnAddRmsNormCast", *(given | changed).values())


def synchronized(call: Callable[[], Any]) -> Callable[[], None]:
    def both() -> None:
        call()
        torch.npu.synchronize()

    return both


EXPERTS: dict[str, list[Callable[[], Any]]] = {
    "addrmsnormcast.x": [
        lambda: cast(x1=on(4, 64, dtype=F32)), lambda: cast(wide=on(4, 64)), lambda: cast(y=on(4, 64, dtype=FP)),
    ],
    "gating.x": [lambda: choose(x=on(8, dtype=F32)), lambda: choose(x=on(5, 8, dtype=torch.int32))],
    "gating.k": [lambda: choose(k=0), lambda: choose(k=9), lambda: choose(x=on(5, 2000, dtype=F32), k=1025)],
    "gating.renorm": [lambda: choose(renorm=2)],
    "gating.y": [
        lambda: choose(y=on(5, 3)), lambda: choose(experts=on(5, 3, dtype=I64)), lambda: choose(y=on(5, 2, dtype=F32))],
    "gating.finished": [lambda: choose(finished=on(5, dtype=torch.bool)), lambda: choose(softmax=True)],
    "initrouting.x": [
        lambda: order(x=on(5, 32, dtype=torch.int32)), lambda: order(x=strided(5, 32)),
        lambda: order_directly(x=on(1, 5, 32))],
    "initrouting.expert_idx": [
        lambda: order(expert_idx=on(5, 3, dtype=I64)), lambda: order(expert_idx=on(4, 3, dtype=torch.int32)),
        lambda: order(expert_idx=strided(5, 3, dtype=torch.int32))],
    "initrouting.scale": [
        lambda: order(scale=on(5)), lambda: order(scale=on(1, 32, dtype=F32), quant_mode=1),
        lambda: order(scale=on(4, dtype=F32))],
    "initrouting.offset": [lambda: order(offset=on(1, dtype=F32))],
    "initrouting.active_num": [lambda: order(active_num=14), lambda: order(active_num=-1)],
    "initrouting.drop_pad_mode": [lambda: order(drop_pad_mode=1, expert_capacity=2)],
    "initrouting.expert_tokens_num_type": [
        lambda: order(expert_tokens_num_type=0), lambda: order(expert_tokens_num_flag=False)],
    "initrouting.quant_mode": [lambda: order(quant_mode=0), lambda: order(x=on(5, 32, dtype=I8), quant_mode=1)],
    "initrouting.active_expert_range": [
        lambda: order_directly(range=[3, 2]), lambda: order(active_expert_range=[0, 9]),
        lambda: order_directly(range=None), lambda: order_directly(range=[0]),
        lambda: order(expert_num=10241, active_expert_range=[0, 8])],
    "initrouting.row_idx_type": [lambda: order(row_idx_type=1)],
    "initrouting.outputs": [
        lambda: order_directly(expanded=on(15, 32, dtype=I8)), lambda: order_directly(counts=on(7, dtype=I64)),
        lambda: order_directly(row_idx=on(5, 3, dtype=torch.int32))],
    "initrouting.expert": [synchronized(lambda: order(expert_idx=on(5, 3, dtype=torch.int32) + 8))],
    "finalizerouting.expanded_x": [
        lambda: total(rows=on(15, 32, dtype=I8)), lambda: total(rows=on(3, 5, 32)), lambda: total(mode=3)],
    "finalizerouting.row_idx": [
        lambda: total(places=on(15, dtype=I64)), lambda: total(places=on(5, 3, dtype=torch.int32))],
    "finalizerouting.mode": [lambda: total(mode=4), lambda: total(mode=0)],
    "finalizerouting.skip": [
        lambda: total(x1=on(5, 32, dtype=F32)), lambda: total(x1=on(4, 32)), lambda: total(x2=on(5, 32))],
    "finalizerouting.scales": [
        lambda: total(scales=on(5, 3, dtype=FP)), lambda: total(scales=on(5, 2)),
        lambda: total(rows=on(15, 32, dtype=FP), out=on(5, 32, dtype=FP))],
    "finalizerouting.bias": [lambda: total(bias=on(8, 32)), lambda: total(experts=on(5, 3, dtype=torch.int32))],
    "finalizerouting.out": [lambda: total(out=on(5, 32, dtype=F32)), lambda: total(out=on(5, 16))],
    "finalizerouting.place": [lambda: place(0, -1)],
    "gmm.one": [
        lambda: ops().npu_grouped_matmul(
            [on(2, 64), on(3, 64)], [on(64, 32), on(64, 32)], split_item=2, group_type=0,
            group_list=whole(2, 3, dtype=I64), group_list_type=1)],
    "gmm.split": [lambda: grouped(x=on(64, 5).t(), weight=on(5, 32), group_type=2)],
    "gmm.act": [lambda: grouped(act_type=5), lambda: grouped(bias=on(GROUPS, 32, dtype=F32))],
    "gmm.shape": [
        lambda: grouped(x=strided(5, 64)), lambda: grouped(x=on(5, 32)), lambda: grouped(weight=on(64, 32))],
    "gmm.wide": [lambda: grouped(x=on(5, 65536), weight=on(GROUPS, 65536, 16))],
    "gmm.group_list": [
        lambda: grouped(group_list=whole(2, 3)), lambda: grouped(group_list=whole(1, 1, 3, dtype=I64)),
        lambda: grouped(group_list_type=2),
        lambda: grouped(weight=on(1025, 64, 16), group_list=on(1025, dtype=I64))],
    "gmm.one_group": [
        lambda: grouped_int8(weight=nz(1, 64, 32, dtype=I8), scale=on(1, 32), group_list=whole(5, dtype=I64))],
    "gmm.floats": [
        lambda: grouped(weight=on(GROUPS, 64, 32, dtype=FP)), lambda: grouped(output_dtype=FP),
        lambda: grouped(x=on(5, 64, dtype=F32), weight=nz(GROUPS, 64, 32, dtype=F32))],
    "gmm.transposed": [lambda: grouped(weight=strided(GROUPS, 64, 32))],
    "gmm.int8": [
        lambda: grouped_int8(weight=on(GROUPS, 64, 32)), lambda: grouped_int8(scale=on(GROUPS, 16)),
        lambda: grouped_int8(per_token_scale=on(5)), lambda: grouped_int8(per_token_scale=on(4, dtype=F32))],
    "gmm.scale": [
        lambda: grouped_int8(scale=on(GROUPS, 32, dtype=F32)), lambda: grouped_int8(output_dtype=FP)],
    "gmm.absent": [
        lambda: grouped(scale=on(GROUPS, 32)), lambda: grouped(antiquant_scale=on(GROUPS, 32)),
        lambda: grouped_int8(offset=on(GROUPS, 1, 32, dtype=F32))],
    "gmm.int4": [
        lambda: grouped_int4(weight=strided(GROUPS, 64, 4, dtype=torch.int32)),
        lambda: grouped_int4(x=on(5, 64, dtype=F32), antiquant_scale=on(GROUPS, 32, dtype=F32),
                             antiquant_offset=on(GROUPS, 32, dtype=F32))],
    "gmm.antiquant": [
        lambda: grouped_int4(antiquant_scale=on(GROUPS, 2, 32, dtype=FP)),
        lambda: grouped_int4(antiquant_scale=on(GROUPS, 3, 32), antiquant_offset=on(GROUPS, 3, 32)),
        lambda: grouped_int4(antiquant_offset=on(GROUPS, 32)), lambda: grouped_int4(antiquant_scale=None)],
    "gmm.antiquant_offset": [lambda: grouped_int4(antiquant_offset=None)],
    "gmm.counts": [synchronized(lambda: grouped(group_list=whole(3, 3, dtype=I64)))],
    "gmmswiglu.x": [lambda: fused(x=on(5, 64)), lambda: fused(x=on(5, 65536, dtype=I8))],
    "gmmswiglu.weight": [
        lambda: fused(weight=nz(GROUPS, 32, 32, dtype=I8)),
        lambda: fused(weight=nz(GROUPS, 64, 32, dtype=I8).transpose(1, 2))],
    "gmmswiglu.columns": [lambda: fused(weight=nz(1, 64, 10272, dtype=I8), scale=on(1, 10272, dtype=F32),
                                        groups=whole(5, dtype=I64))],
    "gmmswiglu.scales": [
        lambda: fused(scale=on(3, 32, dtype=F32)), lambda: fused(x_scale=on(5)),
        lambda: fused(x_scale=on(4, dtype=F32))],
    "gmmswiglu.group_list": [
        lambda: fused(groups=whole(2, 3)), lambda: fused(groups=whole(5, dtype=I64)), lambda: fused(group_list_type=2)],
    "gmmswiglu.absent": [
        lambda: fused(smooth_scale=on(GROUPS, 16, dtype=F32)), lambda: fused(dequant_mode=1),
        lambda: fused(tuning_config=[5]), lambda: fused(quant_mode=1)],
    "gmmswiglu.counts": [synchronized(lambda: fused(groups=whole(3, 3, dtype=I64)))],
}
