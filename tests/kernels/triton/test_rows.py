"""Row-wise kernels on CUDA (norms, quantization, SwiGLU, lookups), beyond the cases of all kernels.

Interpreted, float16 rounds as on a device, and bfloat16 towards zero: bits are compared in float16.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from npuserve.kernels.embedding import embedding
from npuserve.kernels.last_ids import keep_ids, take_ids
from npuserve.kernels.norm import add_rms_norm
from npuserve.kernels.quantize import quantize
from npuserve.kernels.quantized import (
    DYNAMIC,
    FLOAT8,
    FLOAT8_DYNAMIC,
    FLOAT8_SCHEMES,
    SCHEMES,
    Quantized,
    Scheme,
    scheme_of,
)
from npuserve.kernels.quantized_weight import QuantizedWeight, weight_of
from npuserve.kernels.registry import KernelSet
from npuserve.kernels.swiglu import swiglu
from tests.kernels.comparison import generator
from tests.kernels.triton.hopper import Launch, compiled


@pytest.fixture
def rows(interpreted: ModuleType) -> ModuleType:
    from npuserve.kernels.triton import launch_rows

    return launch_rows


def same(got: Quantized, want: Quantized) -> None:
    assert got.values.dtype == want.values.dtype
    assert torch.equal(got.values.float(), want.values.float())
    assert torch.equal(got.scale, want.scale)
    assert (got.zero is None) == (want.zero is None)
    assert got.zero is None or want.zero is None or torch.equal(got.zero, want.zero)


def test_cuda_serves_every_kernel(interpreted: ModuleType) -> None:
    assert KernelSet("cuda").fallbacks == []


@pytest.mark.parametrize("scheme", ["", *SCHEMES, *FLOAT8_SCHEMES])
def test_norm_is_rounded_where_golden_rounds(rows: ModuleType, scheme: str) -> None:
    """At the width of Qwen3-14B, with rows apart. A rounding of the root may move a number to the next one."""
    x, residual = (3 * torch.randn(2, 3, 5200, generator=generator())).half()[:, :, 40:5160]
    gamma = torch.rand(5120, generator=generator(1)).add(0.5).half()
    by = scheme_of(scheme, generator(2))
    normed, total = rows.add_rms_norm(x, residual, gamma, 1e-6, by)
    expected, expected_total = add_rms_norm(x, residual, gamma, 1e-6, by)
    assert torch.equal(total, expected_total)
    if isinstance(expected, Quantized):
        torch.testing.assert_close(normed.scale, expected.scale, rtol=1e-3, atol=0)
        assert normed.scale.stride() == expected.scale.stride()
        normed, expected = normed.values, expected.values
    assert (normed != expected).sum() <= 10
    float8 = scheme in FLOAT8_SCHEMES
    torch.testing.assert_close(
        normed.float(), expected.float(), rtol=0.126 if float8 else 1e-3, atol=0 if float8 or scheme == "" else 1)


@pytest.mark.parametrize("levels", [127.5, 127.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantize_equals_golden_bit_for_bit(
    rows: ModuleType, scheme: str, dtype: torch.dtype, levels: float
) -> None:
    """At the width of Qwen3-14B's feed-forward layer: rows of one sign, of one number, of zeros, with halves, and too
    large for a static scale."""
    x = torch.randn(7, 17408, generator=generator()) * 3
    x[1], x[2], x[3], x[4], x[5] = x[1].abs() + 1, -x[2].abs() - 1, 0.7, 0.0, x[5].mul(4).round().add(0.5)
    x[5, 0], x[6, 5] = 127.5, -6e4
    by = scheme_of(scheme, generator(2))
    assert by is not None
    by = Scheme(by.scale if by.scale is None else torch.ones(1), by.zero, by.symmetric, levels)
    same(rows.quantize(x.to(dtype), by), quantize(x.to(dtype), by))


@pytest.mark.parametrize("scheme", FLOAT8_SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_quantize_to_float8_equals_golden(rows: ModuleType, scheme: str, dtype: torch.dtype) -> None:
    """Rows of all float8 numbers and of the middles between them, with the scale 1; of random numbers, of zeros, of
    small numbers, and too large for a static scale."""
    every = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float().nan_to_num(0)
    order = every.sort().values
    x = torch.zeros(6, 512)
    x[0, :256], x[0, 256:511] = every, (order[1:] + order[:-1]) / 2
    x[1] = torch.randn(512, generator=generator()) * 3
    x[2], x[3] = x[1] * 1e-4, x[1] * 448 / x[1].abs().max()
    x[4, 0], x[4, 1] = -6e4, 500.0
    by = scheme_of(scheme, generator(2))
    assert by is not None
    assert (by.dtype, by.levels) == (FLOAT8, 448)
    if by.scale is not None:
        by.scale.fill_(1)
    if by.grouped:
        x = x[:, :500]  # whose last group is not whole
    got = rows.quantize(x.to(dtype), by)
    same(got, quantize(x.to(dtype), by))
    assert got.scale.shape == by.scale_shape(*x.shape)
    assert torch.equal(got.values[0, :256].float(), every)


def test_quantize_largest_floats(rows: ModuleType) -> None:
    x = torch.tensor([[3.4e38, -3.4e38, 1e38, 0.0], [1e-45, 0.0, 0.0, 0.0]])
    for by in (DYNAMIC, FLOAT8_DYNAMIC, Scheme(symmetric=False)):
        same(rows.quantize(x[:1], by), quantize(x[:1], by))
    assert rows.quantize(x, DYNAMIC).scale[1] == quantize(x, DYNAMIC).scale[1]


def test_swiglu_extremes_and_rows_apart(rows: ModuleType) -> None:
    gate_up = (torch.randn(3, 4400, generator=generator()) * 4).half()[:, 100:4300]
    gate_up[0, :4] = torch.tensor([-100.0, 100.0, -torch.inf, torch.inf])
    gate_up[0, 2100:2104] = 2.0
    got, want = rows.swiglu(gate_up), swiglu(gate_up.double())
    assert got[0, :2].tolist() == [0.0, 200.0]
    assert got[0, 3] == torch.inf
    torch.testing.assert_close(got[1:].double(), want[1:], rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("int8", ["", "int8", "zeros"])
def test_embedding_over_several_blocks(rows: ModuleType, int8: str) -> None:
    table = torch.randn(60, 2100, generator=generator())
    ids = torch.tensor([59, 0, 59, 7])
    if not int8:
        apart = table.half()[::3, 50:]
        assert torch.equal(rows.embedding(ids.clamp(max=19), apart), apart[ids.clamp(max=19)])
        return
    weight = weight_of(table, generator(), torch.float16, Scheme(symmetric=int8 != "zeros"))
    assert torch.equal(rows.embedding(ids, weight), embedding(ids, weight))


def test_ids_over_several_blocks(rows: ModuleType) -> None:
    ids, last = torch.randint(-256, 1000, (2500,), generator=generator()), torch.randint(1000, (256,))
    assert torch.equal(rows.take_ids(ids, last), take_ids(ids, last))
    kept, expected = torch.zeros(2, 2500, dtype=torch.int64)
    apart = ids.repeat(5, 1).t().contiguous().add(torch.arange(5))[:, 1:]
    rows.keep_ids(apart, kept)
    keep_ids(apart, expected)
    assert torch.equal(kept, expected)


def test_no_rows(rows: ModuleType) -> None:
    nothing, none = torch.empty(0, 8), torch.empty(0, dtype=torch.int64)
    assert rows.rms_norm(nothing, torch.ones(8), 1e-6).shape == (0, 8)
    assert rows.quantize(nothing, DYNAMIC).scale.shape == (0,)
    assert rows.swiglu(nothing).shape == (0, 4)
    assert rows.embedding(none, torch.ones(3, 8)).shape == (0, 8)
    assert rows.take_ids(none, none).shape == (0,)
    rows.keep_ids(torch.empty(0, 1, dtype=torch.int64), none)


X, G = torch.zeros(2, 8), torch.ones(8)
IDS = torch.zeros(2, dtype=torch.int64)


def int8_table(scale: Tensor) -> QuantizedWeight:
    return QuantizedWeight.of(torch.ones(3, 8, dtype=torch.int8), scale, torch.float32)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda r: r.rms_norm(X.double(), G, 1e-6), "x: not a matrix"),
        (lambda r: r.rms_norm(X.t(), torch.ones(2), 1e-6), "x: not a matrix"),
        (lambda r: r.rms_norm(X, G.half(), 1e-6), "gamma: not a contiguous"),
        (lambda r: r.rms_norm(torch.zeros(1, 32769), torch.ones(32769), 1e-6), "columns of x: 32769 is not from 1 to"),
        (lambda r: r.add_rms_norm(X, X[:1], G, 1e-6), r"residual: \[1, 8\] torch.float32 is not \[2, 8\]"),
        (lambda r: r.add_rms_norm(X, X.half(), G, 1e-6), r"residual: .* torch.float16 is not"),
        (lambda r: r.quantize(X, Scheme(torch.ones(2))), "scale of scheme: not a contiguous"),
        (lambda r: r.quantize(X, Scheme(torch.ones(1), torch.ones(1))), "zero of scheme: not a contiguous"),
        (lambda r: r.swiglu(X[:, :7]), "gate_up: 7 columns"),
        (lambda r: r.embedding(IDS.int(), X), "ids: not a contiguous"),
        (lambda r: r.embedding(IDS, X.t()), "table: not a matrix"),
        (lambda r: r.embedding(IDS, X.to("meta")), "table: on meta"),
        (lambda r: r.embedding(IDS, int8_table(torch.ones(2))), "scale of table: not a contiguous"),
        (lambda r: r.take_ids(IDS, IDS.int()), "last: not a contiguous"),
        (lambda r: r.keep_ids(IDS, IDS), "ids: "),
        (lambda r: r.keep_ids(IDS[:, None], IDS[:1]), "last: not a contiguous"),
        (lambda r: r.rank_sum(X), r"parts: \[.*\] is not \[ranks, rows, columns\]"),
    ],
)
def test_invalid_argument_raises(rows: ModuleType, call: Callable[[ModuleType], object], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}"):
        call(rows)


NUMBERS = {"width": "i32/16", "eps": "fp32", "levels": "fp32"}
NONE = dict.fromkeys(("residual", "total", "out", "values", "scales", "zeros", "static_scale", "static_zero"))
WRITTEN = {"values": "*i8", "scales": "*fp32"}


def launched(kernel: str, signature: dict[str, str], block: int, none: tuple[str, ...] = (), group: int | None = None,
             **options: int) -> Launch:
    constants = {"BLOCK": block, "PDL": True, **dict.fromkeys(none), **({} if group is None else {"GROUP": group})}
    return Launch("rows", kernel, signature, constants, {**options, "launch_pdl": True})


def norm(signature: dict[str, str], group: int = 0) -> Launch:
    signature = {"x": "*bf16", "gamma": "*bf16", "x_stride": "i64/16", "residual_stride": "i64/16", **NUMBERS,
                 **signature}
    return launched("rms_norm_kernel", signature, 8192, tuple(NONE.keys() - signature), group, num_warps=16)


def quantizing(dtype: str, signature: dict[str, str], group: int = 0) -> Launch:
    signature = {"x": dtype, "x_stride": "i64/16", "width": "i32/16", "levels": "fp32", **WRITTEN, **signature}
    none = NONE.keys() - signature - {"residual", "total", "out"}
    return launched("quantize_kernel", signature, 32768, tuple(none), group, num_warps=16)


ZEROS = {"zeros": "*i32", "static_scale": "*fp32", "static_zero": "*i32"}
ADDED = {"residual": "*bf16", "total": "*bf16"}
COMPILED = [  # and the required number of loads of 16 bytes
    (norm({"out": "*bf16"}), 4),
    (norm({"out": "*bf16", **ADDED}), 6),
    (norm({**WRITTEN, **ADDED}), 6),
    (norm({**WRITTEN, **ADDED, "static_scale": "*fp32"}), 6),
    (quantizing("*bf16", {}), 8),
    (quantizing("*fp32", {}), 16),
    (quantizing("*bf16", {"values": "*fp8e4nv"}), 8),
    (quantizing("*bf16", {"values": "*fp8e4nv"}, 128), 8),
    (norm({**WRITTEN, **ADDED, "values": "*fp8e4nv"}, 128), 6),
    (quantizing("*bf16", ZEROS), 8),
    (launched("swiglu_kernel", {"gate_up": "*bf16", "out": "*bf16", "width": "i32/16", "stride": "i64/16"}, 1024), 2),
    (launched("embedding_kernel", {"ids": "*i64", "table": "*bf16", "out": "*bf16", "width": "i32/16",
                                   "table_stride": "i64/16"}, 1024, ("scales", "zeros")), 1),
    (launched("embedding_kernel", {"ids": "*i64", "table": "*i8", "scales": "*fp32", "zeros": "*i32", "out": "*bf16",
                                   "width": "i32/16", "table_stride": "i64/16"}, 1024), 0),
    (launched("take_ids_kernel", {"ids": "*i64", "last": "*i64", "out": "*i64", "count": "i32"}, 1024), 0),
    (launched("keep_ids_kernel", {"ids": "*i64", "last": "*i64", "count": "i32", "stride": "i64"}, 1024), 0),
]


def test_hopper_has_no_spills_and_loads_16_bytes(interpreted: ModuleType) -> None:
    """At the shapes of Qwen3-14B."""
    for (launch, wide), made in zip(COMPILED, compiled([x for x, _ in COMPILED]), strict=True):
        assert made.local == 0, launch
        assert made.ptx.count("griddepcontrol.wait") == 1, launch
        assert made.ptx.count("ld.global.v4.b32") == wide, launch


def test_hopper_sum_of_ranks_loads_16_bytes_of_each(interpreted: ModuleType) -> None:
    launch = Launch("rows", "rank_sum_kernel", {"parts": "*bf16", "out": "*bf16", "count": "i32/16"},
                    {"SIZE": 4, "BLOCK": 1024}, {})
    (made,) = compiled([launch])
    assert made.local == 0
    assert made.ptx.count("ld.global.v4.b32") == 4
    assert "griddepcontrol" not in made.ptx
