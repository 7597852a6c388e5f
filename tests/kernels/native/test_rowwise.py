"""Native kernels beyond closeness to golden: its rounding, and rows that do not depend on other rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from npuserve.kernels import native
from npuserve.kernels.bench.tensors import tensors
from npuserve.kernels.embedding import embedding
from npuserve.kernels.greedy import greedy
from npuserve.kernels.native.packed import PackedWeight
from npuserve.kernels.norm import add_rms_norm, rms_norm
from npuserve.kernels.quantized import Quantized
from npuserve.kernels.registry import KERNELS, Case, Kernel
from npuserve.kernels.swiglu import swiglu
from tests.kernels.comparison import generator

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")
DTYPES = (torch.float32, torch.bfloat16)

# Positions of the arguments with a row for each token, and benchmark cases that are large enough for several units and
# small enough for a test. Rows of attention differ in form: test_attention.py, and so do
# rows with states: test_gated_delta.py. `keep_ids` and `keep_rows` only copy, and
# `mask_logits` writes bits.
ROWS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "take_ids": ((0,), ("512 of 256",)),
    "embedding": ((0,), ()),
    "embedding_shard": ((0,), ()),
    "all_reduce": ((0,), ("512x1024",)),
    "all_gather": ((0,), ("32x1024",)),
    "linear_argmax_shard": ((0,), ()),
    "rms_norm": ((0,), ("512x1024", "512x1024 int8")),
    "add_rms_norm": ((0, 1), ("512x1024", "512x1024 int8")),
    "linear": ((0,), ("32x2048x1024", "32x2048x1024 int8 given")),
    "linear_argmax": ((0, 5), ()),
    "linear_swiglu": ((0,), ("32x1024x2x3072", "32x1024x2x3072 int8 given to int8")),
    "quantize": ((0,), ("512x1024 int8",)),
    "qk_norm_rope_kv_write": ((0, 5, 6), ()),
    "swiglu": ((0,), ("32x3072",)),
    "gated_rms_norm": ((0, 1), ("32x16x128",)),
    "sigmoid_gate": ((0, 1), ("32x2048",)),
    "greedy": ((0,), ("8x151936+0",)),
    "sample": ((0, 2, 3, 4, 5, 6), ("8x151936+0 top_k 20 top_p 0.95 min_p 0",)),
}
OTHERS = {"paged_attention", "causal_conv_silu", "gated_delta_rule", "keep_ids", "keep_rows", "mask_logits", "penalize",
          "logprobs", "route_experts", "experts_swiglu", "experts_sum"}


def row_of(x: Tensor | Quantized, row: int) -> Tensor | Quantized:
    if isinstance(x, Tensor):
        return x[row : row + 1]
    parts = (part if part is None else part[row : row + 1] for part in (x.values, x.scale, x.zero, x.sums))
    return Quantized(*parts)


def function(kernel: Kernel[..., Any]) -> Any:
    return kernel.implementations["cpu"].function


def test_rows_cover_every_native_kernel() -> None:
    assert {name for name, k in KERNELS.items() if "cpu" in k.implementations} == ROWS.keys() | OTHERS


def cases() -> Iterator[Any]:
    for name, (_, large) in ROWS.items():
        found = {case.name: case for case in KERNELS[name].cases}
        assert found.keys() >= set(large), name
        for case in found.values():
            if case.float8 or case.cache not in (None, torch.int8):
                continue
            if not case.benchmark or case.name in large:
                for dtype in DTYPES:
                    yield pytest.param(name, case, dtype, id=f"{name}-{case.name}-{str(dtype).removeprefix('torch.')}")


@pytest.mark.parametrize(("name", "case", "dtype"), list(cases()))
def test_row_bits_are_independent_of_batch_and_threads(
    isa: str, name: str, case: Case, dtype: torch.dtype
) -> None:
    made, (by_row, _) = KERNELS[name].implementations["cpu"], ROWS[name]
    args = made.adapt(case.make(generator(), dtype))
    outputs = []
    for threads in (1, 2, 3):
        native.library().set_threads(threads)
        outputs.append(tensors(made.function(*args)))
    for other in outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outputs[0], other, strict=True))
    for row in range(0, len(args[by_row[0]]), 1 if not case.benchmark else 7):
        alone = made.function(*(row_of(x, row) if i in by_row else x for i, x in enumerate(args)))
        assert all(torch.equal(a[row : row + 1], b) for a, b in zip(outputs[0], tensors(alone), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1024, 77])
def test_norms_round_as_golden(isa: str, dtype: torch.dtype, hidden: int) -> None:
    """The sum is bit-identical. Normalized numbers may differ only where the last bit of the mean square decides a
    rounding."""
    x, residual = torch.randn(2, 40, hidden, generator=generator()).to(dtype)
    gamma = torch.rand(hidden, generator=generator(1)).add(0.5).to(dtype)
    normed, total = function(add_rms_norm)(x, residual, gamma, 1e-6)
    wanted, expected = add_rms_norm(x, residual, gamma, 1e-6)
    assert torch.equal(total, expected)
    if dtype == torch.bfloat16:
        assert (normed != wanted).float().mean() < 1e-3
    torch.testing.assert_close(normed, wanted, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=0)
    assert torch.equal(normed, function(rms_norm)(total, gamma, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_over_all_magnitudes(isa: str, dtype: torch.dtype) -> None:
    """Relative to torch in float64, for gates from -80 to 1e30; beyond that, silu ends in 0 as in torch."""
    gate = torch.cat([torch.linspace(-80, 80, 3001), torch.logspace(-30, 30, 200), torch.tensor([-1e3, -1e30, 0.0])])
    x = torch.cat([gate, torch.full_like(gate, 1.5)])[None].to(dtype)
    got, want = function(swiglu)(x).double(), swiglu(x.double())
    torch.testing.assert_close(got, want, rtol=2**-7 if dtype == torch.bfloat16 else 4e-6, atol=1e-35)
    for value in (torch.nan, torch.inf, -torch.inf):
        got = function(swiglu)(torch.tensor([[value, 1.0]], dtype=dtype))
        torch.testing.assert_close(got, swiglu(torch.tensor([[value, 1.0]], dtype=dtype)), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_of_a_packed_table(isa: str, dtype: torch.dtype) -> None:
    table = torch.randn(70, 33, generator=generator()).to(dtype)
    ids = torch.tensor([3, 69, 0, 3, 16, 15])
    packed = PackedWeight.pack(table)
    assert torch.equal(function(embedding)(ids, packed), table[ids])
    assert torch.equal(embedding(ids, packed), table[ids])
    output, calls = native.record(lambda: function(embedding)(ids, packed)).replay_timed(2)
    assert torch.equal(output, table[ids[:2]])
    assert [name for name, _ in calls] == ["embedding"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 15, 16, 17, 63, 65, 16384, 16385, 50001])
def test_greedy_over_parts(isa: str, dtype: torch.dtype, vocabulary: int) -> None:
    """Ties across parts and lanes, NaN, minus infinity, and columns beyond the vocabulary."""
    logits = torch.randn(9, vocabulary + 3, generator=generator(vocabulary)).mul(2).round().to(dtype)
    logits[1] = -torch.inf
    logits[2] = torch.nan
    logits[3, ::2] = torch.nan
    logits[4, vocabulary - 1] = 100
    logits[5] = -3
    logits[6] = -torch.inf
    logits[6, vocabulary // 2] = -3e38
    logits[7, : vocabulary // 2] = torch.nan
    logits[8, vocabulary // 3 :: 5] = torch.inf
    logits[:, vocabulary:] = torch.inf
    assert torch.equal(function(greedy)(logits, vocabulary), greedy(logits, vocabulary))
