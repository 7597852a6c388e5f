"""Products with packed weights: the bits of a row do not depend on other rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from npuserve.kernels import native
from npuserve.kernels.int4_weight import int4_of
from npuserve.kernels.native.packed import PackedWeight
from npuserve.kernels.quantized import DYNAMIC, Scheme
from tests.kernels.variants import ISAS

BUILT = native.library().source.split()[1:] if native.available() else []
pytestmark = pytest.mark.skipif(not ISAS, reason="the native kernels are not built")

ROWS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 255, 257, 300)


def linear(x: Tensor, weight: Tensor, compact: bool = False) -> Tensor:
    """Return x [T, K] times weight [N, K], [T, N], both int8 or one float dtype; int8 gives exact sums as float32."""
    out, call = product(x, weight, compact)
    native.call("linear", call)
    return out


def product(x: Tensor, weight: Tensor, compact: bool = False) -> tuple[Tensor, native.Call]:
    """Return the output of `linear` and the call that writes it."""
    (rows, k), n = x.shape, len(weight)
    packed = PackedWeight.pack(weight, compact)
    if x.dtype is not torch.int8:
        out = torch.empty(rows, n, dtype=x.dtype)
        return out, (packed.op("linear"), x.dtype, [x, packed.words, None, out, None], [rows, k, n])
    out = torch.empty(rows, n)
    scales = torch.ones(rows), torch.ones(n), weight.sum(1, dtype=torch.int32)
    tensors = [x, packed.words, None, out, None, *scales, None, None, x.sum(1, dtype=torch.int32)]
    return out, ("linear_int8", torch.float32, tensors, [rows, k, n])


def operands(k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x [300, k] and a weight [n, k]."""
    generator = torch.Generator().manual_seed(k + n)

    def numbers(rows: int) -> Tensor:
        if dtype is torch.int8:
            return torch.randint(-128, 128, (rows, k), generator=generator).to(dtype)
        return torch.randn(rows, k, generator=generator).to(dtype)

    return numbers(max(ROWS)), numbers(n)


@pytest.mark.parametrize(("k", "n"), [(8, 5), (40, 33), (96, 48), (1096, 80), (2112, 49), (4168, 33)])
@pytest.mark.parametrize(("dtype", "compact"), [
    (torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True), (torch.int8, False)])
def test_linear_row_bits_are_independent_of_other_rows(
    isa: str, dtype: torch.dtype, compact: bool, k: int, n: int
) -> None:
    x, weight = operands(k, n, dtype)
    together = linear(x, weight, compact)
    exact = x.double() @ weight.double().T
    scale = exact.abs().max().item()
    precision = torch.finfo(together.dtype).eps * (k**0.5 if dtype is torch.float32 else 1)
    assert (together.double() - exact).abs().max().item() <= scale * precision
    for rows in ROWS:
        first = x[len(x) - rows :].contiguous()
        assert torch.equal(linear(first, weight, compact), together[len(x) - rows :]), rows


@pytest.mark.parametrize(("size", "zeros", "inputs"), [
    (32, False, None), (64, True, None), (128, False, None), (32, False, DYNAMIC), (128, False, DYNAMIC)])
@pytest.mark.parametrize(("k", "n"), [(40, 33), (1024, 48), (1112, 80)])
@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16])
def test_linear_int4_row_bits_are_independent_of_other_rows(
    isa: str, size: int, zeros: bool, inputs: Scheme | None, k: int, n: int, scales: torch.dtype
) -> None:
    x, weight = operands(k, n, torch.bfloat16)
    if scales is torch.float16:
        weight *= 1e-4  # most scales are denormal
    packed = replace(int4_of(weight.float(), size, scales, zeros=zeros, inputs=inputs).packed(), dtype=torch.bfloat16)

    def product_of(x: Tensor) -> Tensor:
        out = torch.empty(len(x), n, dtype=torch.bfloat16)
        native.call("linear", *packed.native_product("linear", x, [None, out, None], [], [len(x), k, n]))
        return out

    together = product_of(x)
    exact = packed.linear(x, None)
    assert (together.float() - exact.float()).abs().max() <= exact.float().abs().max() * 2**-7
    for rows in (*range(1, 14), *ROWS):
        first = x[len(x) - rows :].contiguous()
        assert torch.equal(product_of(first), together[len(x) - rows :]), rows


@pytest.mark.parametrize("rows", [1, 32, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_linear_consecutive_calls_copy_their_own_x(isa: str, dtype: torch.dtype, rows: int) -> None:
    """A thread copies x once for consecutive units of a call, but not for the units of the next call."""
    x, weight = operands(40, 400, dtype)
    x = x[:rows].contiguous()
    other = x.flip(1).contiguous()
    first, second = product(x, weight), product(other, weight)
    native.call("linear", first[1], second[1])
    assert torch.equal(first[0], linear(x, weight))
    assert torch.equal(second[0], linear(other, weight))
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize("rows", [12, 33, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_linear_argmax_equals_largest_output_for_many_rows(isa: str, dtype: torch.dtype, rows: int) -> None:
    x, weight = operands(40, 400, dtype)
    x, best, ids = x[:rows].contiguous(), torch.empty(25, rows), torch.empty(25, rows, dtype=torch.int32)
    out, (name, of, tensors, sizes) = product(x, weight)
    found = torch.empty(rows, dtype=torch.int64)
    native.call(
        "linear_argmax",
        (name, of, tensors, sizes),
        (name.replace("linear", "linear_argmax"), of, [*tensors[:3], best, ids, *tensors[5:]], [*sizes, 400, 0]),
        (name.replace("linear", "argmax_of_units"), of, [best, ids, found, None], [*sizes, 0]))
    assert torch.equal(found, out.argmax(1))


@pytest.mark.skipif("avx512_amx" not in ISAS, reason=(
    "this processor has no AMX" if "avx512_amx" in BUILT else "the compiler does not know AMX"))
@pytest.mark.parametrize("k", [32, 36, 40, 96, 200])
def test_linear_amx_order_of_additions(k: int) -> None:
    """In each 32 numbers of K, even and odd products are summed separately, then both are added to the sum."""
    generator = torch.Generator().manual_seed(k)
    x, weight = (torch.randn(rows, k // 2, generator=generator).bfloat16() for rows in (20, 18))
    # The exact sums are zero, so that the result shows how they were rounded.
    order = torch.randperm(k // 2, generator=generator)
    x, weight = torch.cat([x, x[:, order]], 1), torch.cat([weight, -weight[:, order]], 1)
    sums = torch.zeros(20, 18)
    for begin in range(0, k, 32):
        parts = [torch.zeros(20, 18), torch.zeros(20, 18)]
        for i in range(begin, min(begin + 32, k)):
            # A product of two bfloat16 is exact in float32, so its sum is rounded once, as by the instruction.
            parts[i % 2] += x[:, i : i + 1].float() * weight[:, i].float()
        sums += parts[0] + parts[1]
    assert (sums != 0).any()
    with native.using("avx512_amx"):
        assert torch.equal(linear(x, weight), sums.bfloat16())
        one = linear(x, weight, compact=k % 8 == 0)
    assert torch.equal(one, sums.bfloat16())
