"""Calls of native ops are checked against their signatures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from npuserve.kernels import native
from npuserve.kernels.attention import AttentionMetadata, paged_attention
from npuserve.kernels.experts import route_experts
from npuserve.kernels.mask_logits import random_masks
from npuserve.kernels.native import layout
from npuserve.kernels.native.packed import PackedWeight
from npuserve.kernels.quantized import Scheme
from npuserve.kernels.quantized_weight import QuantizedWeight
from npuserve.kernels.registry import KERNELS
from npuserve.kernels.uniform import uniform

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")

if native.available():
    from npuserve.kernels.native.signatures import SIGNATURES
else:
    SIGNATURES = {}


@pytest.fixture(scope="module")
def calls() -> dict[str, native.Call]:
    """Return a call of each op."""
    found: dict[str, Any] = {}
    original = native.call

    def call(kernel: str, *ops: native.Call) -> None:
        for op in ops:
            found[op[0]] = op
        original(kernel, *ops)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "call", call)
        for kernel in KERNELS.values():
            if made := kernel.implementations.get("cpu"):
                for case in kernel.cases:
                    if not (case.benchmark or case.float8) and case.cache in (None, torch.int8):
                        made.function(*made.adapt(case.make(torch.Generator().manual_seed(0), torch.float32)))
        for compact in (False, True):
            for name in ("linear", "linear_swiglu", "linear_argmax"):
                weight = PackedWeight.pack(torch.ones(32, 16, dtype=torch.bfloat16), compact)
                KERNELS[name].implementations["cpu"].function(
                    torch.ones(2, 16, dtype=torch.bfloat16), weight, torch.ones(32, dtype=torch.bfloat16),
                    *([32, *random_masks(torch.Generator(), 2, 32)] if name == "linear_argmax" else []))
            weight.rows(torch.arange(3))
            rows = torch.ones(2, 16, dtype=torch.bfloat16)
            routing = route_experts(rows, torch.ones(2, 16, dtype=torch.bfloat16), 1, False, 0, 2)
            for name in ("experts_swiglu", "experts_sum"):
                weight = PackedWeight.pack(torch.ones(64, 16, dtype=torch.bfloat16), compact)
                KERNELS[name].implementations["cpu"].function(rows, weight, routing)
        call_with_nibbles()
        uniform(np.arange(3), np.arange(3))
        memory = torch.zeros(2, 512, dtype=torch.uint8)
        call("read", ("read", torch.int8, [memory, torch.zeros(2, dtype=torch.int32)], [2, 512]))
        call("peak", ("peak", torch.float32, [torch.zeros(2, dtype=torch.int64)], [2, 1]))
    return found


def call_with_nibbles() -> None:
    """Call the products of an int8 weight in 4 bits."""
    def weight(rows: int) -> QuantizedWeight:
        values = torch.ones(rows, 16, dtype=torch.int8)
        packed = PackedWeight.allocate_nibbles(rows, 16)
        packed.write(0, values)
        plain = QuantizedWeight.of(values, torch.ones(rows), torch.bfloat16, inputs=Scheme(symmetric=False))
        return replace(plain, values=packed)

    functions = {name: KERNELS[name].implementations["cpu"].function for name in (
        "quantize", "linear", "linear_swiglu", "linear_argmax", "route_experts", "experts_swiglu", "experts_sum")}
    floats = torch.ones(2, 16, dtype=torch.bfloat16)
    x = functions["quantize"](floats, Scheme(symmetric=False))
    bias = torch.ones(32, dtype=torch.bfloat16)
    for name in ("linear", "linear_swiglu"):
        functions[name](x, weight(32), bias)
    functions["linear_argmax"](x, weight(32), bias, 32, *random_masks(torch.Generator(), 2, 32))
    weight(32).values.rows(torch.arange(3))  # type: ignore[union-attr]
    routing = functions["route_experts"](floats, floats, 1, False, 0, 2)
    for name in ("experts_swiglu", "experts_sum"):
        functions[name](x, weight(64), routing)


def arguments() -> Iterator[Any]:
    for op, signature in SIGNATURES.items():
        for place, argument in enumerate(signature):
            if argument is not None:
                yield pytest.param(op, place, argument, id=f"{op}-{argument.name}")


def replaced(op: native.Call, place: int, tensor: Tensor | None) -> native.Call:
    name, dtype, p, *rest = op
    p = [*p, *[None] * (place - len(p))]
    return name, dtype, [*p[:place], tensor, *p[place + 1:]], *rest


def test_signatures_cover_called_ops(calls: dict[str, native.Call]) -> None:
    assert calls.keys() == SIGNATURES.keys()


@pytest.mark.parametrize(("op", "place", "argument"), list(arguments()))
def test_call_wrong_tensor_raises_with_argument_name(
    op: str, place: int, argument: Any, calls: dict[str, native.Call]
) -> None:
    call = calls[op]
    least = argument.least(call[3]) if argument.least else 1
    tensor = torch.zeros(least, dtype=argument.dtype or call[1])
    name = rf"{op}: {argument.name} "
    other = torch.float16 if tensor.dtype != torch.float16 else torch.float32
    with pytest.raises(TypeError, match=name + rf"is {other}, not {tensor.dtype}"):
        native.call("test", replaced(call, place, tensor.to(other)))
    with pytest.raises(ValueError, match=name + "is on meta"):
        native.call("test", replaced(call, place, tensor.to("meta")))
    apart = torch.zeros(tensor.numel() + 1, 2, dtype=tensor.dtype)[:, 0]
    with pytest.raises(ValueError, match=name + r"is not contiguous: shape .*, strides \(2,\)"):
        native.call("test", replaced(call, place, apart))
    if argument.least is not None:
        with pytest.raises(ValueError, match=name + f"has {least - 1} elements, fewer than the {least} needed"):
            native.call("test", replaced(call, place, torch.zeros(least - 1, dtype=tensor.dtype)))
    if not argument.optional:
        with pytest.raises(TypeError, match=name + "is None"):
            native.call("test", replaced(call, place, None))


def test_record_wrong_tensor_raises(calls: dict[str, native.Call]) -> None:
    call = replaced(calls["keep_ids"], 1, torch.zeros(calls["keep_ids"][3][0], dtype=torch.int32))

    def step() -> Tensor:
        native.call("keep_ids", call)
        return torch.empty(0)

    with pytest.raises(TypeError, match=r"keep_ids: last is torch\.int32"):
        native.record(step)


def test_call_wrong_number_of_tensors_raises() -> None:
    ids = torch.zeros(2, dtype=torch.int64)
    for tensors in ([ids], [ids] * 3):
        with pytest.raises(TypeError, match=f"keep_ids: {len(tensors)} tensors do not match its 2 arguments"):
            native.call("test", ("keep_ids", torch.int64, tensors, [2, 1]))
    scale = torch.ones(2)
    with pytest.raises(TypeError, match="rms_norm: tensor 1 must be None"):
        native.call("test", ("rms_norm", torch.float32, [scale, scale, scale, scale], [1, 2], [1e-6, 0.0]))


def test_attention_sliced_block_table_raises() -> None:
    """Its second row is at the stride of the whole table, from which the op does not read."""
    q, keys, values, _, scale = paged_attention.cases[1].make(torch.Generator().manual_seed(0), torch.float32)
    tables = torch.arange(8, dtype=torch.int32).view(2, 4) % len(keys)
    attend = paged_attention.implementations["cpu"].function
    packed = layout.pack_keys(keys), layout.pack_values(values)

    def attended(block_tables: Tensor) -> Tensor:
        return attend(q[:2], *packed, AttentionMetadata.from_lengths(block_tables, [17, 17], [1, 1]), scale)

    with pytest.raises(ValueError, match=r"block_tables is not contiguous: shape \(2, 2\), strides \(4, 1\)"):
        attended(tables[:, :2])
    torch.testing.assert_close(attended(tables[:, :2].contiguous()), attended(tables), rtol=0, atol=0)
