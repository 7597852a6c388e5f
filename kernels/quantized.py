"""int8 activations and weights, and quantization of activations (W8A8); `linear` multiplies them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.ascend import torch_npu
from npuserve.kernels.native.packed import Matrix, PackedWeight
from npuserve.kernels.registry import Case, kernel


@dataclass(frozen=True, slots=True)
class Scheme:
    """Scheme by which activations are quantized.

    scale: [1] float32 of a static scheme, for all tokens; None for a dynamic scheme, which computes each token's scale.
    zero: [1] int32 (-128 to 127), the zero point of a static scheme; None for 0. A dynamic scheme has zero points
        unless it is symmetric.
    levels: divisor of a token's largest magnitude in a dynamic symmetric scheme: 127.5 in compressed-tensors, 127 in
        Ascend's operators and vLLM's kernels.
    """

    scale: Tensor | None = None
    zero: Tensor | None = None
    symmetric: bool = True
    levels: float = 127.5

    @property
    def has_zero(self) -> bool:
        return not self.symmetric if self.scale is None else self.zero is not None


DYNAMIC = Scheme()


@dataclass(frozen=True, slots=True)
class Int8:
    """Quantized numbers (values - zero) * scale.

    values: int8 [..., K].
    scale: [...]; [T] float32 of activations [T, K].
    zero: int32 [...], or None for 0; -128 to 127 for activations.
    """

    values: Tensor
    scale: Tensor
    zero: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Quantized weight [N, K]: (values - zero) * scale by row. K is at most 32768, so that sums fit an int32.

    values: int8.
    scale: [N] float32.
    zero: [N] int32 (-128 to 127), or None for 0.
    sums: int32, at least [N], the sum of each row's values.
    inputs: scheme that quantizes the activations multiplied with it.
    dtype: of the products, and of its rows as an embedding table.
    """

    values: Matrix
    scale: Tensor
    zero: Tensor | None
    sums: Tensor
    inputs: Scheme
    dtype: torch.dtype

    @classmethod
    def of(cls, values: Tensor, scale: Tensor, dtype: torch.dtype, zero: Tensor | None = None,
           inputs: Scheme = DYNAMIC) -> Int8Weight:
        """Build a weight and its row sums from values [N, K] int8."""
        return cls(values, scale, zero, values.sum(dim=1, dtype=torch.int32), inputs, dtype)

    def packed(self) -> Int8Weight:
        """Pack the values for the native kernels. `values` must be a Tensor."""
        assert isinstance(self.values, Tensor)
        return replace(self, values=PackedWeight.pack(self.values))

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        n, k = self.values.shape
        return n, k

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids` [m] int64 as [m, K] of `dtype`, rounded once."""
        values = self.values.rows(ids) if isinstance(self.values, PackedWeight) else self.values[ids]
        whole = values.to(self.scale.dtype)
        if self.zero is not None:
            whole = whole - self.zero[ids].unsqueeze(1)
        return (whole * self.scale[ids].unsqueeze(1)).to(self.dtype)


Weight = Matrix | Int8Weight
"""Weight or embedding table as kernels take it."""


SCHEMES = ("int8", "asymmetric", "static", "static zero")
"""Names of schemes in the names of cases."""

ZEROS = ("asymmetric", "static zero")
"""Names of the schemes with zero points."""


def scheme_of(name: str, generator: torch.Generator) -> Scheme | None:
    """Return the scheme of a case, for values of about 1; None for ""."""
    scale = torch.rand(1, generator=generator) / 40 + 0.01
    zero = torch.randint(-128, 128, (1,), generator=generator, dtype=torch.int32)
    return {"": None, "int8": DYNAMIC, "asymmetric": Scheme(symmetric=False), "static": Scheme(scale),
            "static zero": Scheme(scale, zero)}[name]


def with_levels(case: Case, levels: float) -> Case:
    """Return the case with `levels` in all its schemes."""

    def changed(value: Any) -> Any:
        if isinstance(value, Int8Weight):
            return replace(value, inputs=changed(value.inputs))
        return replace(value, levels=levels) if isinstance(value, Scheme) else value

    return replace(case, make=lambda generator, dtype: tuple(map(changed, case.make(generator, dtype))))


def int8_of(x: Tensor, generator: torch.Generator, zeros: bool = False) -> Int8:
    """Quantize x [T, K] as a case's argument, with a scale for each row. zeros: with zero points too."""
    made = quantize(x.float(), Scheme(symmetric=not zeros))
    return Int8(made.values, made.scale * (torch.rand(len(x), generator=generator) + 0.5), made.zero)


def weight_of(weight: Tensor, generator: torch.Generator, dtype: torch.dtype, zeros: bool = False,
              inputs: Scheme = DYNAMIC) -> Int8Weight:
    """Quantize weight [N, K] as a case's argument."""
    made = int8_of(weight, generator, zeros)
    return Int8Weight.of(made.values, made.scale, dtype, made.zero, inputs)


def packed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a case's arguments with the weight (the second) packed for the native kernels."""
    weight = args[1]
    return args[0], weight.packed() if isinstance(weight, Int8Weight) else PackedWeight.pack(weight), *args[2:]


def _quantize_case(tokens: int, hidden: int, scheme: str = "int8", benchmark: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor, Scheme | None]:
        return torch.randn(tokens, hidden, generator=generator).to(dtype), scheme_of(scheme, generator)

    return Case(f"{tokens}x{hidden} {scheme}", make, benchmark, zeros=scheme in ZEROS)


@kernel(
    "quantize",
    cases=[
        *(_quantize_case(*shape, scheme) for scheme in SCHEMES for shape in ((1, 8), (3, 33), (7, 64))),
        *(_quantize_case(tokens, 1024, benchmark=True) for tokens in (1, 32, 512)),
    ],
)
def quantize(x: Tensor, scheme: Scheme) -> Int8:
    """Quantize x [T, K]: x / scale, rounded to nearest, ties to even, plus zero, clamped to -128 .. 127.

    A dynamic scale that would be 0 is 1. Symmetric: the largest magnitude divided by the scheme's levels. Asymmetric:
    scale = (largest - least) / 255 and zero = rint(-128 - least / scale) over a range that includes 0, as in
    compressed-tensors. vLLM's range does not include 0 where all numbers of a row have one sign.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    zero = scheme.zero
    if scheme.scale is not None:
        scale = scheme.scale.to(wide.dtype).repeat(len(x))
        zero = None if zero is None else zero.repeat(len(x))
    elif scheme.symmetric:
        scale = _above_zero(wide.abs().amax(dim=-1) / scheme.levels)
    else:
        low = wide.amin(dim=-1).clamp(max=0)
        scale = _above_zero(wide.amax(dim=-1).clamp(min=0) / 255 - low / 255)  # the largest float does not overflow
        zero = (-128 - low / scale).round().clamp(-128, 127).int()
    values = (wide / scale.unsqueeze(1)).round()
    if zero is not None:
        values = values + zero.unsqueeze(1)
    return Int8(values.clamp(-128, 127).to(torch.int8), scale.float(), zero)


def _above_zero(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, 1.0)


def native_int8(shape: Sequence[int], scheme: Scheme) -> tuple[Int8, list[Tensor | None]]:
    """Return an uninitialized output [T, K] of a native kernel, and the tensors that the kernel takes for it."""
    rows, columns = shape
    zero = native.empty(rows, dtype=torch.int32) if scheme.has_zero else None
    out = Int8(native.empty(rows, columns, dtype=torch.int8), native.empty(rows, dtype=torch.float32), zero)
    return out, [out.values, out.scale, out.zero, scheme.scale, scheme.zero]


def native_quantize(x: Tensor, scheme: Scheme) -> tuple[Int8, native.Call]:
    """Return the output of `quantize` for x [T, K] and the native call that fills it."""
    out, p = native_int8(x.shape, scheme)
    return out, ("quantize", x.dtype, [x, *p], [*x.shape], [scheme.levels])


@native.implementation(quantize)
def _(x: Tensor, scheme: Scheme) -> Int8:
    out, call = native_quantize(x, scheme)
    native.call("quantize", call)
    return out


@ascend.implementation(quantize)
def _(x: Tensor, scheme: Scheme) -> Int8:
    """Zero points are not supported; levels are `ascend.LEVELS`. A static scale is rounded to x's dtype, as the
    operator requires."""
    if ascend_fuses(scheme):
        values, scale = torch_npu.npu_dynamic_quant(x)
        return Int8(values, scale)
    if scheme.scale is None or scheme.zero is not None:
        raise ValueError("scheme: on Ascend activations in int8 have no zeros")
    by = ascend.table_as(scheme.scale, x.dtype)
    values = torch_npu.npu_quantize(x, by, None, torch.qint8, -1)
    return Int8(values, ascend.table_as(by, torch.float32).expand(len(x)).contiguous())


@triton.implementation(quantize)
def _(x: Tensor, scheme: Scheme) -> Int8:
    from npuserve.kernels.triton import launch_rows

    return launch_rows.quantize(x, scheme)


ascend_quantize = quantize.implementations[ascend.LABEL].function


def ascend_fuses(scheme: Scheme | None) -> bool:
    """Return True for schemes that Ascend's fused operators support: dynamic, without zero points.

    Raises ValueError if the levels differ from `ascend.LEVELS`.
    """
    if scheme is None or scheme.scale is not None or not scheme.symmetric:
        return False
    if scheme.levels != ascend.LEVELS:
        raise ValueError(f"levels: {scheme.levels}; on Ascend the largest magnitude is divided by {ascend.LEVELS}")
    return True


def to_nz(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a case's arguments as the Ascend implementations take them; the weight is the second."""
    x, weight, *rest = ascend.to_device(args)
    if isinstance(weight, Int8Weight):
        assert isinstance(weight.values, Tensor)
        weight = replace(weight, values=ascend.fractal_nz(weight.values))
    return x, weight, *rest


def from_nz(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Undo `to_nz`, also for a table that was left transposed."""
    x, weight, *rest = ascend.to_host(args)
    if isinstance(weight, Int8Weight):
        assert isinstance(weight.values, Tensor)
        weight = replace(weight, values=weight.values.t())
    return x, weight, *rest
