"""Reader of checkpoints in safetensors files, one tensor or part of it at a time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from npuserve.npu.model.config import ModelError
from npuserve.npu.model.folder import weight_files
from npuserve.npu.model.forms.floats import converted
from npuserve.npu.model.layers.experts import STACKED_PARTS
from npuserve.npu.model.loader import MAX_PIECE_BYTES
from npuserve.npu.quantization.w8a8 import W8A8

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""safetensors' names of dtypes."""

FLOAT8_OTHERS = "input_scale", "weight_zero_point", "input_zero_point"
"""Tensors of a float8 module that are not read: inputs are quantized anew, and zero points are 0."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """File, dtype and shape of a tensor of a checkpoint."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StackedPart:
    """Matrix of one expert in a tensor that stacks them: `rows` rows from row `first` on of matrix `expert`."""

    tensor: str
    expert: int
    first: int
    rows: int


def stacked_parts(name: str, shape: Sequence[int]) -> Iterator[tuple[str, StackedPart]]:
    """Yield the names of the matrices of single experts in a stacked tensor; none for other tensors."""
    module, _, part = name.rpartition(".")
    if part not in STACKED_PARTS or len(shape) != 3:
        return
    parts = STACKED_PARTS[part]
    rows = shape[1] // len(parts)
    for expert in range(shape[0]):
        for index, each in enumerate(parts):
            yield f"{module}.{expert}.{each}.weight", StackedPart(name, expert, index * rows, rows)


class Source:
    """Reader of the tensors in a model's folder. Files are open only while read, so that their pages are released.

    Experts that a tensor stacks are read as tensors of single experts.

    names: tensors to read.
    float8: scheme of each module whose weight is float8. It is read as floats of `dtype`.
    specs: by tensor name.
    Raises ModelError for files that are missing or not safetensors, and for tensors of other dtypes.
    """

    def __init__(
        self, folder: Path, names: Collection[str], float8: Mapping[str, W8A8] | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ):
        self._folder = folder
        self._float8 = {f"{name}.weight": scheme for name, scheme in (float8 or {}).items()}
        self._scale_files: dict[str, str] = {}
        self._stacked: dict[str, StackedPart] = {}
        self.specs: dict[str, TensorSpec] = {}
        scales = {_scale_name(name, scheme) for name, scheme in self._float8.items()}
        others = {name.removesuffix("weight") + other for name in self._float8 for other in FLOAT8_OTHERS}
        for path in weight_files(folder):
            with self._open(path.name) as file:
                for name in filter(names.__contains__, file.offset_keys()):
                    header = file.get_slice(name)
                    if name in scales:
                        self._scale_files[name] = path.name
                        continue
                    if name in others:
                        continue
                    if name in self._float8:
                        self.specs[name] = TensorSpec(path.name, dtype, tuple(header.get_shape()))
                        continue
                    if (kind := header.get_dtype()) not in FLOATS:
                        raise ModelError(f"{path}: {name} is {kind}; supported are {', '.join(FLOATS)}")
                    spec = TensorSpec(path.name, FLOATS[kind], tuple(header.get_shape()))
                    parts = dict(stacked_parts(name, spec.shape))
                    self._stacked |= parts
                    self.specs |= {part: replace(spec, shape=(place.rows, spec.shape[2]))
                                   for part, place in parts.items()} or {name: spec}

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensors in the files, scales not counted."""
        return sum(math.prod(spec.shape) * (1 if name in self._float8 else spec.dtype.itemsize)
                   for name, spec in self.specs.items())

    def read(self, name: str) -> Tensor:
        """Return a float32 copy of a tensor. Raises ModelError if it has numbers that are not finite."""
        with self._open(self.specs[name].file) as file:
            if part := self._stacked.get(name):
                rows = slice(part.first, part.first + part.rows)
                numbers = file.get_slice(part.tensor)[part.expert : part.expert + 1, rows][0]
            else:
                numbers = self._floats(name, file.get_tensor(name), 0)
            return _finite(numbers.to(torch.float32, copy=True), name)

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Return float32 copies of the rows `ids` [n] int64 of a table."""
        with self._open(self.specs[name].file) as file:
            return _finite(file.get_tensor(name)[ids].to(torch.float32, copy=True), name)

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the tensor as (first row, rows), at most MAX_PIECE_BYTES bytes at a time, or one row."""
        spec = self.specs[name]
        step = max(1, MAX_PIECE_BYTES // max(1, spec.nbytes // max(1, spec.shape[0])))
        for first in range(0, spec.shape[0], step):
            with self._open(spec.file) as file:
                yield first, self._floats(name, file.get_slice(name)[first : first + step], first).to(spec.dtype)

    def _floats(self, name: str, rows: Tensor, first: int) -> Tensor:
        """Return rows of a tensor, from row `first` on, converted if they are float8."""
        if (scheme := self._float8.get(name)) is None:
            return rows
        scale = _scale_name(name, scheme)
        with self._open(self._scale_files[scale]) as file:
            return converted(rows, scheme, file.get_tensor(scale), first)

    @contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        path = self._folder / name
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: is not a complete safetensors file: {error}") from None


def _scale_name(weight: str, scheme: W8A8) -> str:
    """Return the name of the scales of a weight."""
    return weight.removesuffix("weight") + scheme.scale_name


def _finite(tensor: Tensor, name: str) -> Tensor:
    if not torch.isfinite(tensor).all():
        raise ModelError(f"{name}: has numbers that are not finite (NaN or infinity)")
    return tensor
