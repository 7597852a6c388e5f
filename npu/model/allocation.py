"""Allocation of a model's weights, and the targets that the checkpoint's tensors are written to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from npuserve.kernels.layer import Linear
from npuserve.kernels.native import LANES
from npuserve.kernels.quantized import FLOAT8, FLOAT8_DYNAMIC, FLOAT8_GROUPED, Scheme
from npuserve.kernels.quantized_weight import QuantizedWeight
from npuserve.kernels.weight import form_of
from npuserve.npu.backends.base import Backend
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.float8 import converted
from npuserve.npu.model.layers.shard import Rows, Span
from npuserve.npu.model.storage import StoredArray, StoredBlock, StoredMatrix, final_norm, stored_blocks, tables
from npuserve.npu.model.weights import LoadedBlock, ModelWeights
from npuserve.npu.quantization import BLOCK, W8A8

FLOATS = ("F32", "F16", "BF16", "F64")
INT8 = ("I8",)
INTEGERS = ("I8", "I16", "I32", "I64")
FLOAT8S = ("F8_E4M3",)
"""Names of dtypes in safetensors."""

STORED = {torch.int8: INT8, FLOAT8: FLOAT8S}
"""Dtype of a weight's numbers -> dtypes of the checkpoint; others are any of FLOATS."""


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of a tensor of the checkpoint.

    put: takes a row and the tensor's rows from there on; raises ValueError for invalid numbers.
    shapes: accepted shapes. The tensor is reshaped to the first.
    nbytes: size of the stored form.
    dtypes: accepted dtypes.
    required: the checkpoint must contain it.
    early: the tensor is put before those that are not, since they are put by its numbers.
    rows, columns: part of the tensor that is put, after the reshape; None for all.
    """

    put: Callable[[int, Tensor], None]
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int
    dtypes: tuple[str, ...] = FLOATS
    required: bool = True
    early: bool = False
    rows: Span | None = None
    columns: Span | None = None


Targets = dict[str, Target]
"""Tensor name of the checkpoint -> target."""


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """Static input scheme of a fused layer, and the checkpoint's values for its parts.

    scales: [parts] float32.
    zeros: [parts] int32; 0 without zero points.
    """

    scheme: Scheme
    scales: Tensor
    zeros: Tensor

    def merge(self) -> bool:
        """Set the scheme to the range of all parts, as vLLM does (compressed_tensors_w8a8_int8).

        Return True if the parts differ.
        """
        assert self.scheme.scale is not None
        agree = len(set(zip(self.scales.tolist(), self.zeros.tolist(), strict=True))) == 1
        scale = self.scales[:1]
        zero = self.zeros[:1]
        if not agree and self.scheme.zero is None:
            scale = self.scales.amax().reshape(1)
        elif not agree:
            lows, highs = ((self.scales * (edge - self.zeros)) for edge in (-128, 127))
            scale = ((highs.amax() - lows.amin()) / 255).reshape(1)
            zero = (-128 - lows.amin() / scale).round().int()
        self.scheme.scale.copy_(scale)
        if self.scheme.zero is not None:
            self.scheme.zero.copy_(zero)
        return not agree


@dataclass(slots=True)
class Allocation:
    """Uninitialized weights of a model, and the targets that fill them.

    After the targets are filled, merge the static inputs and call `ModelWeights.finish`.
    """

    weights: ModelWeights
    targets: Targets
    static: list[StaticInputs] = field(default_factory=list)


def allocate(config: ModelConfig, dtype: torch.dtype, backend: Backend) -> Allocation:
    """Allocate the weights of a model. Raises ModelError for a quantization that is not supported."""
    allocator = _Allocator(config, dtype, backend)
    return Allocation(allocator.model(), allocator.targets, allocator.static)


def allocate_meta(
    config: ModelConfig, dtype: torch.dtype, *, vocabulary_tile: int = 1, int8_levels: float = 127.5
) -> Allocation:
    """Return the weights as tensors without memory, and their targets, which must not be filled.

    vocabulary_tile, int8_levels: see `Backend`.
    """
    device = torch.device("meta")
    backend: Any = SimpleNamespace(
        vocabulary_tile=vocabulary_tile, int8_levels=int8_levels,
        weight=lambda n, k, dtype: torch.empty(n, k, dtype=dtype, device=device),
        empty=lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device))
    return allocate(config, dtype, backend)


class _Allocator:
    def __init__(self, config: ModelConfig, dtype: torch.dtype, backend: Backend):
        self._config = config
        self._dtype = dtype
        self._backend = backend
        self.targets: Targets = {}
        self.static: list[StaticInputs] = []

    def model(self) -> ModelWeights:
        c = self._config
        embedding, *head = map(self._linear, tables(c, self._backend.vocabulary_tile))
        layers = tuple(tuple(map(self._block, stored_blocks(c, index))) for index in range(c.num_layers))
        return ModelWeights(
            form_of(embedding.weight), layers, self._array(final_norm(c)), head[0] if head else embedding, self._dtype)

    def _block(self, stored: StoredBlock) -> LoadedBlock:
        norm = self._array(stored.norm)
        weights = {field: self._linear(parameter) if isinstance(parameter, StoredMatrix) else self._array(parameter)
                   for field, parameter in stored.parameters.items()}
        return LoadedBlock(norm, stored.layer, stored.layer.weights(**weights))

    def _empty(self, size: int, dtype: torch.dtype) -> Tensor:
        return self._backend.empty((size,), dtype)

    def _array(self, stored: StoredArray) -> Tensor:
        array = stored.array
        values = self._backend.empty(array.shape, stored.dtype(self._dtype))
        put = partial(_put_array, values, array.offset)
        self._add(stored.name, _of_rows(put, array.rows, (array.whole,), values.nbytes))
        return values

    def _add(self, name: str, target: Target) -> None:
        """Add a target. Several may take different rows of one tensor."""
        if (other := self.targets.get(name)) is not None:
            assert other.shapes == target.shapes
            assert other.rows is target.rows is None
            target = replace(target, put=partial(_put_both, other.put, target.put),
                             nbytes=other.nbytes + target.nbytes)
        self.targets[name] = target

    def _linear(self, stored: StoredMatrix) -> Linear:
        dtype = self._dtype
        form = self._quantized(stored, stored.scheme) if stored.scheme else form_of(
            self._backend.weight(stored.rows, stored.inputs, dtype))
        bias = self._empty(stored.rows, dtype) if stored.adds_bias else None
        write = form.write_rounded if stored.rounded else form.write
        dtypes = FLOATS if stored.rounded else STORED.get(form.number_dtype, FLOATS)
        itemsize = form.number_dtype.itemsize
        first = 0
        columns = stored.columns
        for name, rows in stored.parts.items():
            target = _of_rows(
                partial(_put_rows, write, first), rows, ((rows.whole, columns.whole),),
                rows.size * columns.size * itemsize, dtypes, columns=columns)
            if name in stored.float8:
                target = self._of_float8(name, stored.float8[name], target)
            self._add(f"{name}.weight", target)
            if stored.biased:
                put_bias = _ignore if bias is None else partial(_put, bias, first)
                self._add(f"{name}.bias", _of_rows(put_bias, rows, ((rows.whole,),), rows.size * dtype.itemsize))
            first += rows.size
        return Linear(form, bias)

    def _of_float8(self, name: str, scheme: W8A8, target: Target) -> Target:
        """Return the target of a float8 weight that is put as floats, and add the targets of its scales."""
        ((rows, inputs),) = target.shapes
        if scheme.blocks:
            shapes: tuple[tuple[int, ...], ...] = ((-(-rows // BLOCK), -(-inputs // BLOCK)),)
        else:
            shapes = ((rows,), (rows, 1)) if scheme.per_channel else _ONE
        scale = torch.empty(shapes[0])
        self._add(f"{name}.{scheme.scale_name}", Target(partial(_put_scales, scale), shapes, scale.nbytes, early=True))
        self._add(f"{name}.weight_zero_point", _zero_target(None, shapes))
        if not scheme.dynamic:
            self._add(f"{name}.input_scale", Target(_ignore, _ONE, 0))
            self._add(f"{name}.input_zero_point", _zero_target(None, _ONE))
        first = target.rows.first if target.rows else 0
        column = target.columns.first if target.columns else 0
        put = partial(_put_converted, target.put, scheme, scale, self._dtype, first, column)
        return replace(target, put=put, dtypes=FLOAT8S)

    def _quantized(self, stored: StoredMatrix, scheme: W8A8) -> QuantizedWeight:
        of_float8 = FLOAT8_GROUPED if scheme.blocks else FLOAT8_DYNAMIC
        inputs = of_float8 if scheme.float8 else Scheme(
            symmetric=scheme.symmetric_inputs, levels=self._backend.int8_levels)
        if not scheme.dynamic:
            zero = None if scheme.symmetric_inputs else self._empty(1, torch.int32)
            inputs = replace(inputs, scale=self._empty(1, torch.float32), zero=zero)
        n = stored.rows
        of_rows = inputs.scale_shape(n, stored.inputs)
        weight = QuantizedWeight(
            self._backend.weight(n, stored.inputs, inputs.dtype),
            self._empty(math.prod(of_rows), torch.float32).view(of_rows[::-1]).t(),
            None if scheme.symmetric else self._empty(n, torch.int32),
            None if scheme.float8 else self._empty(n, torch.int32), inputs, self._dtype)
        if not stored.rounded:
            for name, target in (_block_scale_targets(stored, scheme, weight) if scheme.blocks else
                                 _scale_targets(stored.parts, scheme, weight)).items():
                self._add(name, target)
        if not scheme.dynamic:
            of_parts = StaticInputs(inputs, torch.empty(len(stored.parts)), torch.zeros(len(stored.parts)).int())
            for name, target in _input_targets(stored.parts, of_parts).items():
                self._add(name, target)
            self.static.append(of_parts)
        return weight


_ONE = ((1,), (), (1, 1))
"""Shapes of a single number."""


def _of_rows(
    put: Callable[[int, Tensor], None], rows: Span | Rows | None, shapes: tuple[tuple[int, ...], ...], nbytes: int,
    dtypes: tuple[str, ...] = FLOATS, *, columns: Span | None = None,
) -> Target:
    """Return the target of some rows of a tensor; None for all of them."""
    if isinstance(rows, Rows):
        return Target(partial(_put_ranges, put, rows.ranges), shapes, nbytes, dtypes, columns=columns)
    return Target(put, shapes, nbytes, dtypes, rows=rows, columns=columns)


def _put_ranges(
    put: Callable[[int, Tensor], None], ranges: tuple[tuple[int, int], ...], row: int, piece: Tensor
) -> None:
    """Put the rows of a piece that lie in `ranges`, which are stacked at the target."""
    begin = 0
    for first, size in ranges:
        low = max(first, row)
        high = min(first + size, row + len(piece))
        if low < high:
            put(begin + low - first, piece[low - row : high - row])
        begin += size


def _put_both(
    first: Callable[[int, Tensor], None], second: Callable[[int, Tensor], None], row: int, piece: Tensor
) -> None:
    first(row, piece)
    second(row, piece)


def _put_array(values: Tensor, offset: float, row: int, piece: Tensor) -> None:
    rows = values[row : row + len(piece)]
    rows.copy_(piece.float().add(offset).view(rows.shape) if offset else piece.view(rows.shape))


def _scale_targets(parts: Mapping[str, Span | Rows], scheme: W8A8, weight: QuantizedWeight) -> Targets:
    targets: Targets = {}
    first = 0
    for name, rows in parts.items():
        part = slice(first, first + rows.size)
        n = rows.whole
        shapes, taken = (((n,), (n, 1)), rows) if scheme.per_channel else (_ONE, None)

        def into(numbers: Tensor, part: slice = part) -> Tensor:
            return numbers[part] if scheme.per_channel else numbers[part].unsqueeze(0)

        targets[f"{name}.{scheme.scale_name}"] = _of_rows(
            partial(_put_scales, into(weight.scale)), taken, shapes, 4 * rows.size)
        targets[f"{name}.weight_zero_point"] = _zero_target(
            None if weight.zero is None else into(weight.zero), shapes, taken)
        first += rows.size
    return targets


def _block_scale_targets(stored: StoredMatrix, scheme: W8A8, weight: QuantizedWeight) -> Targets:
    targets: Targets = {}
    first = 0
    columns = stored.columns
    for name, rows in stored.parts.items():
        into = weight.scale[first : first + rows.size]
        ranges = rows.ranges if isinstance(rows, Rows) else ((rows.first, rows.size),)
        shape = -(-rows.whole // BLOCK), -(-columns.whole // BLOCK)
        targets[f"{name}.{scheme.scale_name}"] = Target(
            partial(_put_block_scales, into, ranges, columns.first // BLOCK), (shape,), into.nbytes)
        first += rows.size
    return targets


def _input_targets(parts: Mapping[str, Span | Rows], static: StaticInputs) -> Targets:
    targets: Targets = {}
    for index, name in enumerate(parts):
        scale, zero = (numbers[index : index + 1] for numbers in (static.scales, static.zeros))
        targets[f"{name}.input_scale"] = Target(partial(_put_scales, scale), _ONE, scale.nbytes)
        targets[f"{name}.input_zero_point"] = _zero_target(None if static.scheme.zero is None else zero, _ONE)
    return targets


def _zero_target(into: Tensor | None, shapes: tuple[tuple[int, ...], ...], rows: Span | Rows | None = None) -> Target:
    """Return the target of zero points. into: None for a symmetric scheme; some checkpoints contain zeros even then."""
    if into is None:
        return Target(_put_no_zeros, shapes, 0, INTEGERS + FLOAT8S, required=False)
    return _of_rows(partial(_put_zeros, into), rows, shapes, into.nbytes, INTEGERS)


def _ignore(row: int, piece: Tensor) -> None:
    """Ignore a bias that another rank adds, and scales of inputs that are not quantized."""


CONVERTED_AT_ONCE = 1 << 20
"""Numbers converted from float8 to floats at a time."""


def _put_converted(
    put: Callable[[int, Tensor], None], scheme: W8A8, scale: Tensor, dtype: torch.dtype, first: int, column: int,
    row: int, piece: Tensor,
) -> None:
    """Put rows of a float8 weight as floats. scale: of the whole weight; first, column: begin of the part in it."""
    for rows in piece.split(max(LANES, CONVERTED_AT_ONCE // piece.shape[1] // LANES * LANES)):
        floats = converted(rows, scheme, scale, first + row, column)
        if not bool(floats.to(dtype).isfinite().all()):
            raise ValueError(f"has numbers that are not finite in {str(dtype).removeprefix('torch.')}")
        put(row, floats)
        row += len(rows)


def _put(into: Tensor, first: int, row: int, piece: Tensor) -> None:
    into[first + row : first + row + len(piece)] = piece


def _put_rows(write: Callable[[int, Tensor], None], first: int, row: int, piece: Tensor) -> None:
    write(first + row, piece)


def _put_scales(into: Tensor, row: int, piece: Tensor) -> None:
    if not bool((piece.isfinite() & (piece > 0)).all()):
        raise ValueError("scales must be numbers above 0")
    into[row : row + len(piece)] = piece


def _put_block_scales(
    into: Tensor, ranges: tuple[tuple[int, int], ...], column: int, row: int, piece: Tensor
) -> None:
    """Write scales of blocks to the scales of rows.

    into: [rows, groups] of this shard: the rows of `ranges`, from the block of columns `column` on.
    row: first row of blocks in `piece`.
    """
    each = piece.repeat_interleave(BLOCK, dim=0)[:, column : column + into.shape[1]]
    _put_ranges(partial(_put_scales, into), ranges, row * BLOCK, each)


def _put_zeros(into: Tensor, row: int, piece: Tensor) -> None:
    if bool(((piece < -128) | (piece > 127)).any()):
        raise ValueError("zero points must be in [-128, 127]")
    into[row : row + len(piece)] = piece


def _put_no_zeros(row: int, piece: Tensor) -> None:
    if bool(piece.any()):
        raise ValueError("is not 0, though config.json says that the quantization is symmetric")
