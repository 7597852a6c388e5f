"""Rounding of weights to the numbers of a scheme, and the tensors that hold them in a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from npuserve.kernels.quantize import quantize
from npuserve.kernels.quantized import DYNAMIC
from npuserve.npu.model.config import ModelError
from npuserve.npu.quantization.assignment import LINEAR
from npuserve.npu.quantization.modelslim import ModelSlimW8A8
from npuserve.npu.quantization.scheme import WeightScheme
from npuserve.npu.quantization.w4a8 import W4A8
from npuserve.npu.quantization.w4a16 import GROUPS, W4A16
from npuserve.npu.quantization.w8a8 import W8A8
from npuserve.npu.quantize.source import TensorSpec

CODES = 8
"""Numbers of 4 bits in a word."""

DIVISORS = 7.0, 7.25, 7.5, 7.75, 8.0, 8.5, 9.0, 9.5, 10.0
"""Divisors of a group's largest magnitude that are tried for its scale. Those above 7.5 clip it, or it is negative."""


class Rounding(ABC):
    """Rounding to the numbers of a scheme.

    name: of the scheme on the command line.
    strengths: strengths of smoothing that are tried.
    is_modelslim: the tensors are those of ModelSlim.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def strengths(self) -> Sequence[float]: ...

    @property
    def is_modelslim(self) -> bool:
        return False

    @property
    @abstractmethod
    def scheme(self) -> WeightScheme:
        """Scheme by which layers that can be quantized are found."""

    @abstractmethod
    def groups(self, inputs: Mapping[str, int]) -> tuple[tuple[tuple[str, ...], WeightScheme], ...]:
        """Return the schemes of layers. inputs: number of inputs of each. Raises ModelError for one without scheme."""

    @abstractmethod
    def specs(self, spec: TensorSpec) -> dict[str, TensorSpec]:
        """Return the tensors of a layer by the ends of their names. spec: of its weight in floats."""

    @abstractmethod
    def tensors(self, weight: Tensor, dtype: torch.dtype, power: Tensor | None = None) -> dict[str, Tensor]:
        """Return the numbers of weight [N, K] float32, with scales of `dtype`, by the ends of their names.

        power: [K], the mean square of each input; None for equal ones.
        """

    @abstractmethod
    def dequantized(self, weight: Tensor, dtype: torch.dtype, power: Tensor | None = None) -> Tensor:
        """Return the weight in float32 after rounding."""

    def inputs(self, x: Tensor) -> Tensor:
        """Return the inputs [T, K] of a product as they are rounded."""
        return x


@dataclass(frozen=True, slots=True)
class Int8Rounding(Rounding):
    """int8 with a scale for each row, and inputs by token. modelslim: the tensors are those of ModelSlim."""

    modelslim: bool = False

    @property
    def is_modelslim(self) -> bool:
        return self.modelslim

    @property
    def name(self) -> str:
        return "w8a8"

    @property
    def strengths(self) -> Sequence[float]:
        return 0.4, 0.5, 0.6, 0.7, 0.8

    @property
    def scheme(self) -> W8A8:
        return ModelSlimW8A8() if self.modelslim else W8A8()

    def groups(self, inputs: Mapping[str, int]) -> tuple[tuple[tuple[str, ...], WeightScheme], ...]:
        return (((LINEAR,), self.scheme),)

    def specs(self, spec: TensorSpec) -> dict[str, TensorSpec]:
        rows = spec.shape[0], 1
        numbers = {"weight": replace(spec, dtype=torch.int8), "weight_scale": replace(spec, shape=rows)}
        if not self.modelslim:
            return numbers
        wide = replace(spec, shape=rows, dtype=torch.float32)
        return numbers | {"weight_scale": wide, "weight_offset": wide}

    def tensors(self, weight: Tensor, dtype: torch.dtype, power: Tensor | None = None) -> dict[str, Tensor]:
        values, scale = to_int8(weight, torch.float32 if self.modelslim else dtype)
        if not self.modelslim:
            return {"weight": values, "weight_scale": scale}
        return {"weight": values, "weight_scale": scale, "weight_offset": torch.zeros_like(scale)}

    def dequantized(self, weight: Tensor, dtype: torch.dtype, power: Tensor | None = None) -> Tensor:
        values, scale = to_int8(weight, torch.float32 if self.modelslim else dtype)
        return values.float() * scale.float()

    def inputs(self, x: Tensor) -> Tensor:
        return _int8_inputs(x)


@dataclass(frozen=True, slots=True)
class Int4Rounding(Rounding):
    """4 bits with a scale for each group of columns.

    group: columns of a group. A layer whose inputs are no multiple has smaller groups.
    """

    group: int = 128

    @property
    def name(self) -> str:
        return "w4a16"

    @property
    def strengths(self) -> Sequence[float]:
        return 0.2, 0.35, 0.5, 0.65, 0.8

    @property
    def scheme(self) -> WeightScheme:
        return self._scheme_of(min(GROUPS))

    def groups(self, inputs: Mapping[str, int]) -> tuple[tuple[tuple[str, ...], WeightScheme], ...]:
        of_size: dict[int, list[str]] = {}
        for name, columns in inputs.items():
            of_size.setdefault(self._group_of(columns, name), []).append(name)
        if len(of_size) == 1:
            return (((LINEAR,), self._scheme_of(next(iter(of_size)))),)
        return tuple((tuple(names), self._scheme_of(size)) for size, names in of_size.items())

    def specs(self, spec: TensorSpec) -> dict[str, TensorSpec]:
        n, k = spec.shape
        return {"weight_packed": replace(spec, shape=(n, k // CODES), dtype=torch.int32),
                "weight_scale": replace(spec, shape=(n, k // self._group_of(k))),
                "weight_shape": replace(spec, shape=(2,), dtype=torch.int64)}

    def tensors(self, weight: Tensor, dtype: torch.dtype, power: Tensor | None = None) -> dict[str, Tensor]:
        levels, scale = self._rounded(weight, dtype, power)
        codes = (levels.flatten(1) + 8).int().unflatten(1, (-1, CODES))
        packed = codes[..., 0].clone()
        for i in range(1, CODES):
            packed |= codes[..., i] << 4 * i
        return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}

    def dequantized(self, weight: Tensor, dtype: torch.dtype, power: Tensor | None = None) -> Tensor:
        levels, scale = self._rounded(weight, dtype, power)
        return (levels * scale.float().unsqueeze(2)).flatten(1)

    def _scheme_of(self, size: int) -> WeightScheme:
        return W4A16(size)

    def _group_of(self, columns: int, name: str = "") -> int:
        size = next((size for size in sorted(GROUPS, reverse=True) if size <= self.group and columns % size == 0), None)
        if size is None:
            raise ModelError(f"{name}: has {columns} inputs, which groups of {min(GROUPS)} do not divide; leave it in "
                             f"floats: --ignore {name}")
        return size

    def _rounded(self, weight: Tensor, dtype: torch.dtype, power: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return levels [N, groups, size] of -8 to 7, and scales [N, groups] of the least squared error.

        The error of a column counts by its `power`.
        """
        size = self._group_of(weight.shape[1])
        numbers = weight.unflatten(1, (-1, size))
        of_columns = torch.ones(1) if power is None else power.view(1, -1, size)
        largest = numbers.abs().amax(dim=2)
        best_error = torch.full_like(largest, torch.inf)
        best = torch.ones_like(largest, dtype=dtype)
        for divisor in DIVISORS:
            scale = (largest / divisor).to(dtype)
            scale = torch.where(scale > 0, scale, torch.ones_like(scale))
            rounded = self._levels(numbers, scale) * scale.float().unsqueeze(2)
            error = ((rounded - numbers).square() * of_columns).sum(2)
            is_better = error < best_error
            best_error = torch.where(is_better, error, best_error)
            best = torch.where(is_better, scale, best)
        return self._levels(numbers, best), best

    @staticmethod
    def _levels(numbers: Tensor, scale: Tensor) -> Tensor:
        return (numbers / scale.float().unsqueeze(2)).round_().clamp_(-8, 7)


@dataclass(frozen=True, slots=True)
class Int4Int8Rounding(Int4Rounding):
    """The same with int8 inputs by token. Each number takes a byte of the checkpoint."""

    @property
    def name(self) -> str:
        return "w4a8"

    def specs(self, spec: TensorSpec) -> dict[str, TensorSpec]:
        n, k = spec.shape
        return {"weight": replace(spec, dtype=torch.int8),
                "weight_scale": replace(spec, shape=(n, k // self._group_of(k)))}

    def tensors(self, weight: Tensor, dtype: torch.dtype, power: Tensor | None = None) -> dict[str, Tensor]:
        levels, scale = self._rounded(weight, dtype, power)
        return {"weight": levels.flatten(1).to(torch.int8), "weight_scale": scale}

    def inputs(self, x: Tensor) -> Tensor:
        return _int8_inputs(x)

    def _scheme_of(self, size: int) -> WeightScheme:
        return W4A8(W4A16(size))


def _int8_inputs(x: Tensor) -> Tensor:
    quantized = quantize(x, DYNAMIC)
    return quantized.values.float() * quantized.scale[:, None]


def to_int8(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize weight [N, K] float32 to values int8 [N, K] and scale [N, 1] of `dtype`.

    A row's scale is its maximum magnitude / 127, rounded up so that nothing is clipped; 1 for a row of zeros.
    """
    exact = weight.abs().amax(dim=1, keepdim=True) / 127
    scale = exact.to(dtype)
    scale = torch.where(scale < exact, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale)
    scale = torch.where(scale > 0, scale, 1.0)
    return (weight / scale).round().to(torch.int8), scale
