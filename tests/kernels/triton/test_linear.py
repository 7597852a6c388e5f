"""Products with weights at the borders of their tiles, interpreted, against torch in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels.linear import linear_swiglu
from npuserve.kernels.quantized import FLOAT8, FLOAT8_DYNAMIC, FLOAT8_GROUPED, Quantized
from npuserve.kernels.quantized_weight import QuantizedWeight
from npuserve.kernels.triton.linear_tiles import (
    BUCKETS,
    MEASURED,
    SHARED_BYTES,
    Kind,
    Tiles,
    calculated,
    candidates,
    choose,
    fitted,
    key,
)

QWEN3_14B: tuple[tuple[Kind, int, int], ...] = (
    ("linear", 7168, 5120), ("linear", 5120, 5120), ("linear_swiglu", 34816, 5120), ("linear", 5120, 17408),
    ("linear_argmax", 151936, 5120))
SMALL = Tiles(n=16, m=16, k=32, split=1, warps=4, stages=2)
TALL = Tiles(n=32, m=64, k=16, split=3, warps=4, stages=2)


@pytest.fixture(scope="module")
def calls(interpreted: ModuleType) -> Iterator[ModuleType]:
    """`launch_linear`, whose counters are all 0 again at the end."""
    from npuserve.kernels.triton import launch_linear

    yield launch_linear
    assert not launch_linear.arrived_of(torch.device("cpu")).any()


def floats(rows: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 10007 + n * 101 + k)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((rows, k), (n, k), (n,)))
    return x.to(dtype), (weight * k**-0.5).to(dtype), bias.to(dtype)


def int8(rows: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> tuple[Quantized, QuantizedWeight, Tensor]:
    generator = torch.Generator().manual_seed(rows * 10007 + n * 101 + k)
    x, weight = (torch.randint(-128, 128, (count, k), generator=generator, dtype=torch.int8) for count in (rows, n))
    scales = [torch.rand(count, generator=generator) / 100 + 0.001 for count in (rows, n)]
    bias = torch.randn(n, generator=generator).to(dtype)
    return Quantized(x, scales[0]), QuantizedWeight.of(weight, scales[1], dtype), bias


def float8(rows: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> tuple[Quantized, QuantizedWeight, Tensor]:
    """Return operands of float8 numbers of all magnitudes up to 30."""
    x, weight, bias = int8(rows, n, k, dtype)
    assert isinstance(weight.values, Tensor)
    bits = (x.values % 96 | x.values & -128, weight.values % 96 | weight.values & -128)
    left, right = (numbers.view(FLOAT8) for numbers in bits)
    return Quantized(left, x.scale), QuantizedWeight.of(right, weight.scale, dtype, inputs=FLOAT8_DYNAMIC), bias


def grouped(rows: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> tuple[Quantized, QuantizedWeight, Tensor]:
    """Return operands of float8 with a scale for each 128 columns."""
    x, weight, bias = float8(rows, n, k, dtype)
    generator = torch.Generator().manual_seed(k)
    left, right = (torch.rand(-(-k // 128), count, generator=generator).t() / 100 + 0.001 for count in (rows, n))
    return replace(x, scale=left), replace(weight, scale=right, inputs=FLOAT8_GROUPED), bias


def expected(x: Tensor | Quantized, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Return the product in float64."""
    if isinstance(x, Quantized):
        assert isinstance(weight, QuantizedWeight)
        (left, by), (right, of_weight) = ((y.values.double(), y.scale.double()) for y in (x, weight))
        if weight.is_grouped:
            out = sum(F.linear(left[:, 128 * i :][:, :128], right[:, 128 * i :][:, :128]) * by[:, i : i + 1]
                      * of_weight[:, i] for i in range(by.shape[1])) + torch.zeros(len(left), len(right))
        else:
            out = F.linear(left, right) * by[:, None] * of_weight
        return out if bias is None else out + bias.double()
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def gated(product: Tensor) -> Tensor:
    gate, up = product.chunk(2, dim=-1)
    return F.silu(gate) * up


def close(got: Tensor, want: Tensor) -> None:
    rtol = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("rows", [
    1, 16, 17, 32, 33, 64, 65, 70, *(pytest.param(rows, marks=pytest.mark.full) for rows in range(7, 71, 6))])
@pytest.mark.parametrize("make", [floats, int8, float8, grouped])
def test_any_number_of_rows(calls: ModuleType, make: type, rows: int) -> None:
    """With the tiles of the table."""
    x, weight, bias = make(rows, 40, 100)
    close(calls.linear(x, weight, bias), expected(x, weight, bias))


@pytest.mark.parametrize("tiles", [SMALL, TALL], ids=["small", "tall"])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 1, 1), (3, 17, 31), (16, 16, 32), (33, 34, 33), (65, 70, 49)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [floats, int8, float8])
def test_borders_of_tiles(
    calls: ModuleType, make: type, dtype: torch.dtype, rows: int, n: int, k: int, tiles: Tiles
) -> None:
    x, weight, bias = make(rows, n, k, dtype)
    close(calls.linear(x, weight, None, tiles), expected(x, weight, None))
    if n % 2 == 0:
        close(calls.linear_swiglu(x, weight, bias, tiles), gated(expected(x, weight, bias)))


@pytest.mark.parametrize(("split", "k"), [
    (2, 65), (3, 160), (8, 1), (8, 64), *(
        pytest.param(split, k, marks=pytest.mark.full) for split, k in (
            (2, 1), (2, 64), (2, 160), (3, 1), (3, 64), (3, 65), (8, 65), (8, 160)))])
def test_parts_of_k(calls: ModuleType, split: int, k: int) -> None:
    """Also parts without a block, which exist if K has fewer blocks than parts."""
    tiles = Tiles(n=16, m=16, k=32, split=split, warps=4, stages=2)
    x, weight, bias = floats(5, 20, k)
    close(calls.linear(x, weight, bias, tiles), expected(x, weight, bias))
    close(calls.linear_swiglu(x, weight, bias, tiles), gated(expected(x, weight, bias)))
    x8, weight8, _ = int8(5, 20, k)
    assert torch.equal(calls.linear(x8, weight8, None, tiles), calls.linear(x8, weight8, None, SMALL))
    of_floats, weight_of_floats, _ = float8(5, 20, k)
    close(calls.linear(of_floats, weight_of_floats, bias, tiles), expected(of_floats, weight_of_floats, bias))


def test_groups_of_tokens_cover_all(calls: ModuleType) -> None:
    """19 tiles of tokens: two groups of eight, and one of three."""
    x, weight, bias = floats(300, 40, 20)
    close(calls.linear(x, weight, bias, SMALL), expected(x, weight, bias))


def test_rows_apart(calls: ModuleType) -> None:
    x, weight, _ = floats(5, 24, 64)
    close(calls.linear(x[:, :48], weight[:, :48].contiguous(), None, SMALL), expected(x[:, :48], weight[:, :48], None))


def test_sums_of_int8_are_exact(calls: ModuleType) -> None:
    """At the largest K and magnitudes, where float32 would have rounded: only the scales round."""
    k = 1 << 15
    x = Quantized(torch.full((2, k), -128, dtype=torch.int8), torch.ones(2))
    x.values[1, ::2] = 127
    weight = QuantizedWeight.of(torch.full((3, k), -128, dtype=torch.int8), torch.ones(3), torch.float32)
    weight.values[1, -1] = -127
    sums = F.linear(x.values.long(), weight.values.long())
    for split in (1, 4):
        tiles = Tiles(n=16, m=16, k=2048, split=split, warps=4, stages=2)
        assert torch.equal(calls.linear(x, weight, None, tiles), sums.float())


def test_float8_rows_may_be_longer_than_those_of_int8(calls: ModuleType) -> None:
    k = (1 << 15) + 64
    x, weight = torch.full((2, k), 0.5).to(FLOAT8), torch.full((3, k), 2.0).to(FLOAT8)
    tiles = Tiles(n=16, m=16, k=2048, split=2, warps=4, stages=2)
    given = QuantizedWeight.of(weight, torch.ones(3), torch.float32)
    made = calls.linear(Quantized(x, torch.ones(2)), given, None, tiles)
    assert torch.equal(made, torch.full((2, 3), float(k)))
    with pytest.raises(ValueError, match="columns of weight: 32832 is not from 1 to 32768"):
        calls.linear(*int8(2, 3, k))


def test_library_of_float8_gets_rows_and_columns(calls: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 65 rows on. `torch._scaled_mm` takes x by rows, the weight by columns, a scale of each row, and sizes that
    16 divides. It exists for GPUs alone."""
    taken: list[int] = []

    def scaled_mm(
        x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, *, out_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> Tensor:
        assert x.dtype == weight.dtype == FLOAT8
        assert (x.stride(1), weight.stride(0)) == (1, 1)
        assert (x_scale.shape, weight_scale.shape) == ((len(x), 1), (1, weight.shape[1]))
        taken.append(len(x))
        return ((x.double() @ weight.double()) * x_scale * weight_scale).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(calls, "_on_gpu", lambda tensor: True)
    serve = linear_swiglu.implementations["cuda"].function
    x, weight, bias = float8(70, 64, 48, torch.bfloat16)
    close(calls.linear(x, weight, None), expected(x, weight, None))
    close(calls.library("linear", x, weight, None), expected(x, weight, None))
    close(serve(x, weight, None), gated(expected(x, weight, None)))
    assert taken == [70, 70, 70]
    close(calls.linear(x, weight, bias), expected(x, weight, bias))
    for other in (float8(64, 64, 48, torch.bfloat16), float8(70, 64, 48, torch.float16), float8(70, 60, 48)):
        close(calls.linear(*other[:2], None), expected(*other[:2], None))
    assert taken == [70, 70, 70], "a bias, few rows, another dtype and odd sizes are not for the library"
    for wrong in (("linear", x, weight, bias), ("linear_swiglu", x, weight, None)):
        with pytest.raises(ValueError, match="are no product of the library's"):
            calls.library(*wrong)


@pytest.mark.parametrize("k", [1, 127, 128, 129, 300, 640])
@pytest.mark.parametrize(("block", "split"), [(128, 1), (128, 3), (64, 1), (32, 2)])
def test_grouped_float8_has_a_scale_for_each_group(calls: ModuleType, k: int, block: int, split: int) -> None:
    tiles = Tiles(n=16, m=16, k=block, split=split, warps=4, stages=2)
    x, weight, bias = grouped(5, 34, k)
    assert weight.scale.shape == (34, -(-k // 128))
    close(calls.linear(x, weight, bias, tiles), expected(x, weight, bias))
    close(calls.linear_swiglu(x, weight, bias, tiles), gated(expected(x, weight, bias)))


def test_grouped_float8_arguments_are_checked(calls: ModuleType) -> None:
    x, weight, _ = grouped(5, 16, 300)
    with pytest.raises(ValueError, match="tiles: blocks of 256 numbers, and 128 share a scale"):
        calls.linear(x, weight, None, Tiles(n=16, m=16, k=256, split=1, warps=4, stages=2))
    with pytest.raises(ValueError, match=r"scale of x: not a contiguous \[3, 5\]"):
        calls.linear(replace(x, scale=torch.ones(5)), weight, None)
    with pytest.raises(ValueError, match=r"scale of weight: not a contiguous \[3, 16\]"):
        calls.linear(x, replace(weight, scale=weight.scale.contiguous()), None)


def test_library_int8_equals_own_tiles(calls: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_FINISHED", 16)
    x, weight, bias = int8(19, 2 * 24, 40, torch.bfloat16)
    for kind in ("linear", "linear_swiglu"):
        own = getattr(calls, kind)(x, weight, bias, SMALL)
        assert torch.equal(calls.library(kind, x, weight, bias), own)
    with pytest.raises(ValueError, match=r"x: \[16, 40\]"):
        calls.library("linear", *int8(16, 8, 40))


@pytest.mark.parametrize("make", [floats, int8, float8, grouped])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_of_rounded_numbers(calls: ModuleType, make: type, dtype: torch.dtype) -> None:
    """Equal numbers within a tile and across tiles: the smallest id below the vocabulary is returned."""
    x, weight, bias = make(20, 90, 33, dtype)
    product = calls.linear(x, weight, bias, SMALL)
    for vocabulary in (1, 16, 50, 90):
        ids = calls.linear_argmax(x, weight, bias, vocabulary, SMALL)
        assert ids.shape == (20, 1)
        assert ids.dtype == torch.int64
        assert torch.equal(ids, product[:, :vocabulary].double().argmax(dim=1, keepdim=True))


@pytest.mark.slow
def test_argmax_of_int8_at_the_vocabulary_of_qwen35(calls: ModuleType) -> None:
    """248,320 ids: in the first tile, the last one, and two equal ones. The tiles are wide, for the interpreter."""
    vocabulary, k = 248320, 32
    x, weight, _ = int8(3, vocabulary, k)
    numbers, scale, _ = weight.parts
    ids = torch.tensor([[5], [vocabulary - 1], [130_000]])
    for row, (place,) in enumerate(ids.tolist()):
        numbers[place] = torch.where(x.values[row] > 0, 127, -128)
        scale[place] = 0.02
    numbers[vocabulary - 2], scale[vocabulary - 2] = numbers[130_000], scale[130_000]
    wide = Tiles(n=512, m=16, k=32, split=1, warps=4, stages=2)
    found = calls.linear_argmax(x, QuantizedWeight.of(numbers, scale, torch.float32), None, vocabulary, wide)
    assert torch.equal(found, ids)
    product = F.linear(x.values.double(), numbers.double()) * x.scale.double().unsqueeze(1) * scale.double()
    assert torch.equal(product.argmax(dim=1, keepdim=True), ids)


def test_argmax_of_ties_nan_and_infinities(calls: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """x selects columns of the weight, so that logits are known; the merge processes two tiles at a time."""
    monkeypatch.setattr(calls, "_MERGED", 2)
    inf, nan = torch.inf, torch.nan
    logits = torch.full((6, 100), -1.0)
    logits[0, [17, 40, 99]] = 3.0  # ties in several tiles
    logits[1, [5, 6]] = inf
    logits[2] = -inf
    logits[3, [20, 70]] = torch.tensor([nan, 2.0])
    logits[4] = nan
    logits[5, 95] = 9.0  # in the padding
    bias_rows = [calls.linear_argmax(torch.zeros(1, 4), torch.zeros(100, 4), row, 90, SMALL).item() for row in logits]
    assert bias_rows == [17, 5, 0, 70, 0, 0]


def test_invalid_argument_raises_with_name(calls: ModuleType) -> None:
    x, weight, bias = floats(3, 8, 16)
    x8, weight8, _ = int8(3, 8, 16)
    with pytest.raises(TypeError, match="one is quantized"):
        calls.linear(x8, weight, None)
    with pytest.raises(ValueError, match=r"values of x: not a contiguous \[3, 16\] of float8_e4m3fn"):
        calls.linear(x8, float8(3, 8, 16)[1], None)
    with pytest.raises(ValueError, match=r"x: \[3, 16\] is not \[rows, 9\]"):
        calls.linear(x, weight[:, :9].contiguous(), None)
    with pytest.raises(ValueError, match="weight: not a contiguous"):
        calls.linear(x[:, :9], weight[:, :9], None)
    with pytest.raises(ValueError, match="bias"):
        calls.linear(x, weight, bias[:7])
    with pytest.raises(ValueError, match="vocabulary: 9 is not from 1 to 8"):
        calls.linear_argmax(x, weight, None, 9)
    with pytest.raises(ValueError, match="not as many of gate and up"):
        calls.linear_swiglu(x, weight[:7], None)
    with pytest.raises(ValueError, match="2 parts of K"):
        calls.linear_argmax(x, weight, None, 8, Tiles(16, 16, 16, 2, 4, 2))
    with pytest.raises(ValueError, match="zero: on CUDA"):
        calls.linear(Quantized(x8.values, x8.scale, torch.zeros(3, dtype=torch.int32)), weight8, None)


def test_no_rows(calls: ModuleType) -> None:
    x, weight, _ = floats(0, 8, 16)
    assert calls.linear(x, weight, None).shape == (0, 8)
    assert calls.linear_swiglu(x, weight, None).shape == (0, 4)
    assert calls.linear_argmax(x, weight, None, 8).shape == (0, 1)


@pytest.mark.parametrize("rows", [3, 70])
def test_gated_numbers_are_quantized(calls: ModuleType, rows: int) -> None:
    """By own tiles, and by the library where it serves floats."""
    serve = linear_swiglu.implementations["cuda"].function
    for make in (floats, int8, float8, grouped):
        x, weight, bias = make(rows, 48, 40)
        want = gated(expected(x, weight, bias))
        made = serve(x, weight, bias, weight.inputs if isinstance(weight, QuantizedWeight) else int8(1, 1, 1)[1].inputs)
        assert isinstance(made, Quantized)
        if made.scale.dim() == 2:
            made = replace(made, scale=made.scale[:, 0])  # 24 columns are one group
        off = made.values.double() * made.scale.double()[:, None] - want
        half = 0.51 * made.scale.double()[:, None]  # of a step
        assert (off.abs() <= (half if made.values.dtype == torch.int8 else want.abs() / 15.9 + half / 512)).all()


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize(("kind", "n", "k"), QWEN3_14B)
def test_tiles_of_a_decode_step_fill_the_device(kind: Kind, n: int, k: int, itemsize: int) -> None:
    """At least 27 KB of the weight are in flight on the multiprocessor with the fewest programs, and there is no second
    wave of few programs."""
    for rows in (1, 16, 17, 64):
        if key(kind, itemsize, rows, n, k) in MEASURED:
            continue
        tiles = choose(kind, itemsize, rows, n, k, 132)
        assert tiles is not None
        outputs = n // (1 + (kind == "linear_swiglu"))
        programs = -(-outputs // tiles.n) * -(-rows // tiles.m) * tiles.split
        weight_bytes = tiles.shared_bytes(kind, itemsize) - tiles.stages * tiles.m * tiles.k * itemsize
        at_once = SHARED_BYTES // (tiles.shared_bytes(kind, itemsize) + 1024)
        least = min(programs // 132, at_once)
        assert least * weight_bytes * (tiles.stages - 1) // tiles.stages >= (27_000 if itemsize < 4 else 16_000)
        assert programs <= at_once * 132 or programs > 4 * 132


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, SHARED_BYTES])
@pytest.mark.parametrize(("kind", "n", "k"), QWEN3_14B)
def test_tiles_fit_the_shared_memory_of_other_devices(kind: Kind, n: int, k: int, shared: int) -> None:
    for itemsize, rows in itertools.product([1, 2, 4], BUCKETS):
        tiles = calculated(kind, itemsize, rows, n, k, 132)
        made = fitted(tiles, kind, itemsize, shared)
        assert made.shared_bytes(kind, itemsize) <= shared - 1024
        assert min(made.m, made.n) >= 16
        assert made.stages >= 2
        assert made == tiles or tiles.shared_bytes(kind, itemsize) > shared - 1024


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize(("kind", "n", "k"), [*QWEN3_14B, ("linear", 24, 40)])
def test_candidates_fit_and_begin_with_the_choice(kind: Kind, n: int, k: int, itemsize: int) -> None:
    for rows in (*BUCKETS, 4096):
        made = candidates(kind, itemsize, rows, n, k, 132)
        assert len(set(made)) == len(made) <= 16
        fitting = [tiles for tiles in made if tiles is not None]
        assert all(tiles.shared_bytes(kind, itemsize) < SHARED_BYTES for tiles in fitting)
        chosen = choose(kind, itemsize, rows, n, k, 132)
        assert chosen in made
        assert candidates(kind, itemsize, rows, n, k, 132, fitting[-1])[0] == fitting[-1]
    assert (None in candidates(kind, itemsize, 16, n, k, 132)) == (itemsize > 1)
    assert (None in candidates(kind, 1, 16, n, k, 132, form="float8")) == (k % 16 == 0)
    grouped = candidates(kind, 1, 4096, n, k, 132, form="grouped float8")
    assert all(tiles is not None and 128 % tiles.k == 0 for tiles in grouped)


def test_choose_takes_measured_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MEASURED, ("linear", 2, 16, 48, 64), TALL)
    monkeypatch.setitem(MEASURED, ("linear", 1, 32, 36, 64), None)
    monkeypatch.setitem(MEASURED, ("linear", "float8", 16, 48, 64), None)
    monkeypatch.setitem(MEASURED, ("linear", "float8", 16, 40, 64), None)
    assert choose("linear", 1, 9, 48, 64, 132, form="float8") is None
    assert choose("linear", 1, 9, 48, 64, 132) is not None
    assert choose("linear", 1, 65, 48, 64, 132, form="float8") is None
    assert choose("linear", 1, 9, 40, 64, 132, form="float8") is not None, "16 does not divide 40"
    assert choose("linear", 2, 9, 48, 64, 132) == TALL
    assert choose("linear", 2, 17, 48, 64, 132) != TALL
    assert choose("linear", 1, 20, 36, 64, 132) is not None, "the library takes no such columns"


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize(("kind", "n", "k"), [*QWEN3_14B, ("linear", 1024, 3072)])
def test_choose_is_equal_within_a_bucket(kind: Kind, n: int, k: int, itemsize: int) -> None:
    """Otherwise a kernel would be compiled while requests wait."""
    choices = {choose(kind, itemsize, rows, n, k, 132) for rows in range(257, 513)}
    assert len(choices) == 1
    assert len({choose(kind, itemsize, rows, n, k, 132) for rows in range(513, 9000, 97)}) == 1
