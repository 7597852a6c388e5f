"""Allocation of a model's weights, and the targets that the checkpoint's tensors are written to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from npuserve.kernels.layer import Linear
from npuserve.kernels.weight import WeightForm, form_of
from npuserve.npu.backends.base import Backend
from npuserve.npu.backends.capabilities import Capabilities
from npuserve.npu.backends.weight_layout import WeightLayout
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.eagle import EagleHead
from npuserve.npu.model.forms.matrix import StoredMatrix
from npuserve.npu.model.forms.targets import (
    INT64,
    Target,
    Targets,
    ignore,
    put_both,
    put_columns,
    put_copy,
    target_of_rows,
)
from npuserve.npu.model.storage import (
    StoredArray,
    StoredBlock,
    draft_head,
    final_norm,
    stored_blocks,
    stored_features,
    stored_input,
    tables,
)
from npuserve.npu.model.weights import EagleWeights, LoadedBlock, ModelWeights, MtpWeights


@dataclass(slots=True)
class Allocation:
    """Uninitialized weights of a model, and the targets that fill them.

    merges: functions that set numbers of a fused layer from those of its parts (`AllocatedWeight.merge`).
    """

    weights: ModelWeights
    targets: Targets
    merges: list[Callable[[], bool]] = field(default_factory=list)

    def finish(self, vocabulary: int, backend: Backend) -> int:
        """Complete the weights once all targets are filled. Return the number of layers whose parts differed.

        vocabulary: number of ids that the checkpoint has rows for.
        """
        differing = sum([merge() for merge in self.merges])
        self.weights.finish(vocabulary, backend)
        return differing


def allocate(
    config: ModelConfig, dtype: torch.dtype, backend: Backend, embedding: WeightForm | None = None
) -> Allocation:
    """Allocate the weights of a model. Raises ModelError for a quantization that is not supported.

    embedding: of the served model, for an EAGLE-3 head without one.
    """
    allocator = _Allocator(config, dtype, backend, embedding)
    return Allocation(allocator.model(), allocator.targets, allocator.merges)


def allocate_meta(
    config: ModelConfig, dtype: torch.dtype, *, vocabulary_tile: int = 1, int8_levels: float = 127.5
) -> Allocation:
    """Return the weights as tensors without memory, and their targets, which must not be filled.

    vocabulary_tile, int8_levels: see `Capabilities`.
    """
    capabilities = Capabilities(dtypes=(), vocabulary_tile=vocabulary_tile, int8_levels=int8_levels, block_size=1)

    def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    backend: Any = SimpleNamespace(capabilities=capabilities, empty=empty, weights=WeightLayout(empty))
    return allocate(config, dtype, backend)


class _Allocator:
    def __init__(self, config: ModelConfig, dtype: torch.dtype, backend: Backend, embedding: WeightForm | None):
        self._config, self._dtype, self._backend = config, dtype, backend
        self._served_embedding = embedding
        self.targets: Targets = {}
        self.merges: list[Callable[[], bool]] = []

    def model(self) -> ModelWeights:
        c = self._config
        embedding, *head = map(self._linear, tables(c, self._backend.capabilities.vocabulary_tile))
        if c.eagle:
            return self._head(c, c.eagle, form_of(embedding.weight) if head else None, head[0] if head else embedding)
        layers = self._layers(c)
        return ModelWeights(
            form_of(embedding.weight), layers, self._array(final_norm(c)), head[0] if head else embedding, self._dtype,
            self._mtp(c.predictor) if c.predictor else None)

    def _layers(self, config: ModelConfig) -> tuple[tuple[LoadedBlock, ...], ...]:
        return tuple(tuple(map(self._block, stored_blocks(config, index))) for index in range(config.num_layers))

    def _head(self, config: ModelConfig, eagle: EagleHead, own: WeightForm | None, lm_head: Linear) -> ModelWeights:
        """Return the weights of an EAGLE-3 head. own: its embedding; None for that of the served model."""
        embedding = own or self._served_embedding
        assert embedding is not None
        stored = stored_features(config, eagle)
        served_ids = None
        if eagle.has_ids:
            served_ids = self._backend.empty((config.vocab_size,), torch.int64)
            put = partial(_put_served_ids, served_ids, eagle.vocabulary)
            self._add("d2t", Target(put, (tuple(served_ids.shape),), served_ids.nbytes, INT64))
        weights = EagleWeights(
            tuple(map(self._linear, stored.fc)), self._array(stored.embedding_norm), served_ids)
        return ModelWeights(embedding, self._layers(config), self._array(final_norm(config)), lm_head, self._dtype,
                            eagle=weights, owns_embedding=own is not None)

    def _mtp(self, predictor: ModelConfig) -> MtpWeights:
        stored = stored_input(predictor)
        head = draft_head(self._config, self._backend.capabilities.vocabulary_tile)
        return MtpWeights(
            self._linear(stored.fc), self._array(stored.embedding_norm), self._array(stored.hidden_norm),
            self._layers(predictor), self._array(final_norm(predictor)), self._linear(head) if head else None)

    def _block(self, stored: StoredBlock) -> LoadedBlock:
        norm = self._array(stored.norm)
        weights = {field: self._linear(parameter) if isinstance(parameter, StoredMatrix) else self._array(parameter)
                   for field, parameter in stored.parameters.items()}
        return LoadedBlock(norm, stored.layer, stored.layer.weights(**weights))

    def _array(self, stored: StoredArray) -> Tensor:
        array = stored.array
        values = self._backend.empty(array.shape, stored.dtype(self._dtype))
        put = partial(_put_array, values, array.offset)
        self._add(stored.name, target_of_rows(put, array.rows, (array.whole,), values.nbytes))
        return values

    def _add(self, name: str, target: Target) -> None:
        """Add a target. Several may take different rows of one tensor, or different columns."""
        if (other := self.targets.get(name)) is not None:
            assert (other.shapes, other.rows) == (target.shapes, target.rows)
            if other.columns != target.columns:
                other, target = (
                    replace(each, columns=None, put=partial(put_columns, each.put, each.columns)) if each.columns
                    else each for each in (other, target))
            target = replace(target, put=partial(put_both, other.put, target.put),
                             nbytes=other.nbytes + target.nbytes)
        self.targets[name] = target

    def _linear(self, stored: StoredMatrix) -> Linear:
        dtype = self._dtype
        allocated = stored.form.allocate(stored, dtype, self._backend)
        for name, target in allocated.targets.items():
            self._add(name, target)
        if allocated.merge is not None:
            self.merges.append(allocated.merge)
        bias = self._backend.empty((stored.rows,), dtype) if stored.adds_bias else None
        first = 0
        for name, rows in stored.parts.items() if stored.biased else ():
            put = ignore if bias is None else partial(put_copy, bias, first)
            self._add(f"{name}.bias", target_of_rows(put, rows, ((rows.whole,),), rows.size * dtype.itemsize))
            first += rows.size
        return Linear(allocated.weight, bias)


def _put_served_ids(served_ids: Tensor, vocabulary: int, row: int, piece: Tensor) -> None:
    """Write the ids of the served model. piece: these less the head's own ids, from `row` on."""
    ids = piece.to(torch.int64) + torch.arange(row, row + len(piece))
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ValueError(f"must lead to ids of the served model, in [0, {vocabulary - 1}], got "
                         f"[{int(ids.min())}, {int(ids.max())}]")
    served_ids[row : row + len(piece)] = ids


def _put_array(values: Tensor, offset: float, row: int, piece: Tensor) -> None:
    rows = values[row : row + len(piece)]
    rows.copy_(piece.float().add(offset).view(rows.shape) if offset else piece.view(rows.shape))
