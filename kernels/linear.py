"""Matrix product with weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels import ascend, native
from npuserve.kernels.ascend import torch_npu
from npuserve.kernels.greedy import greedy
from npuserve.kernels.native.packed import PackedWeight, Weight, dense
from npuserve.kernels.registry import Case, kernel
from npuserve.kernels.swiglu import swiglu

# (K, N) of a Qwen3-0.6B: qkv, attention output, gate and up, down.
QWEN3_06B = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))


def _case(tokens: int, k: int, n: int, bias: bool = False, benchmark: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        x = torch.randn(tokens, k, generator=generator).to(dtype)
        weight = (torch.randn(n, k, generator=generator) * k**-0.5).to(dtype)
        return x, weight, torch.randn(n, generator=generator).to(dtype) if bias else None

    return Case(f"{tokens}x{k}x{n}{'+bias' if bias else ''}", make, benchmark)


@kernel(
    "linear",
    cases=[
        _case(1, 8, 3),
        _case(5, 33, 17, bias=True),
        _case(16, 64, 96),
        _case(47, 130, 200, bias=True),
        *(_case(t, k, n, benchmark=True) for t in (1, 8, 32, 512) for k, n in QWEN3_06B),
    ],
)
def linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] or None -> [T, N]."""
    return F.linear(x, dense(weight), bias)


def _swiglu_case(tokens: int, k: int, intermediate: int, bias: bool = False, benchmark: bool = False) -> Case:
    return Case(f"{tokens}x{k}x2x{intermediate}{'+bias' if bias else ''}",
                _case(tokens, k, 2 * intermediate, bias).make, benchmark)


@kernel(
    "linear_swiglu",
    cases=[
        _swiglu_case(1, 8, 3),
        _swiglu_case(5, 33, 16, bias=True),
        _swiglu_case(37, 64, 80),
        _swiglu_case(9, 20, 23, bias=True),
        *(_swiglu_case(t, 1024, 3072, benchmark=True) for t in (1, 8, 32, 512)),
    ],
)
def linear_swiglu(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x [T, K], weight [2 I, K] of gate and up, bias [2 I] or None -> [T, I]: `swiglu` of what `linear` makes."""
    return swiglu(linear(x, weight, bias))


def _argmax_case(rows: int, k: int, vocabulary: int, padding: int, benchmark: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None, int]:
        x, weight, _ = _case(rows, k, vocabulary + padding).make(generator, dtype)
        weight[vocabulary:] = 3 * weight[0]
        return x, weight, None, vocabulary

    return Case(f"{rows}x{k}x{vocabulary}+{padding}", make, benchmark)


@kernel(
    "linear_argmax",
    cases=[
        _argmax_case(1, 8, 7, 0),
        _argmax_case(5, 32, 101, 27),
        _argmax_case(40, 64, 300, 20),
        *(_argmax_case(rows, 1024, 151936, 0, benchmark=True) for rows in (1, 8, 32)),
    ],
)
def linear_argmax(x: Tensor, weight: Weight, bias: Tensor | None, vocabulary: int) -> Tensor:
    """x [R, K], weight [Vp, K], bias [Vp] or None -> ids [R, 1] int64, below `vocabulary`: what `greedy` chooses of
    the logits that `linear` makes, without them ever being in memory where the backend can."""
    return greedy(linear(x, weight, bias), vocabulary)


def _pack(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args[0], PackedWeight.pack(args[1]), *args[2:]


@native.implementation(linear, adapt=_pack)
def _(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    out = native.empty(len(x), weight.n, dtype=x.dtype)
    native.call("linear", ("linear", x.dtype, [x, weight.words, bias, out], [len(x), weight.k, weight.n]))
    return out


@native.implementation(linear_swiglu, adapt=_pack)
def _(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    sizes = [len(x), weight.k, weight.n]
    if weight.n // 2 % native.LANES:  # gate and up meet within a panel
        between = native.empty(len(x), weight.n, dtype=x.dtype)
        out = native.empty(len(x), weight.n // 2, dtype=x.dtype)
        native.call("linear_swiglu", ("linear", x.dtype, [x, weight.words, bias, between], sizes),
                    ("swiglu", x.dtype, [between, out], [len(x), weight.n // 2]))
        return out
    out = native.empty(len(x), weight.n // 2, dtype=x.dtype)
    native.call("linear_swiglu", ("linear_swiglu", x.dtype, [x, weight.words, bias, out], sizes))
    return out


@native.implementation(linear_argmax, adapt=_pack)
def _(x: Tensor, weight: PackedWeight, bias: Tensor | None, vocabulary: int) -> Tensor:
    ids = native.empty(len(x), 1, dtype=torch.int64)
    panels = -(-weight.n // native.LANES)
    best = native.empty(panels, len(x), dtype=torch.float32)
    places = native.empty(panels, len(x), dtype=torch.int32)
    sizes = [len(x), weight.k, weight.n]
    native.call(
        "linear_argmax",
        ("linear_argmax", x.dtype, [x, weight.words, bias, best, places], [*sizes, vocabulary]),
        ("argmax_of_units", x.dtype, [best, places, ids], sizes))
    return ids


@ascend.implementation(linear)
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


@ascend.implementation(linear_swiglu)
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch_npu.npu_swiglu(F.linear(x, weight, bias), dim=-1)
    return out


@ascend.implementation(linear_argmax)
def _(x: Tensor, weight: Tensor, bias: Tensor | None, vocabulary: int) -> Tensor:
    """The product runs over the padded rows too, whose number suits the cube unit; the choice does not."""
    return greedy.implementations[ascend.LABEL].function(F.linear(x, weight, bias), vocabulary)
