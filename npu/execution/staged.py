"""Inputs of a step on the host: rows that are computed together, and the memory that is copied to the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from npuserve.npu.execution.masks import Array
from npuserve.npu.step import Row

_DTYPES = {
    torch.empty(0, dtype=dtype).numpy().dtype: dtype
    for dtype in (torch.bool, torch.int32, torch.int64, torch.float32, torch.float64)}

ALIGNMENT = 64
"""Each section and each array of a step begins at a multiple of so many bytes."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a step that are computed together, at row and token `first` of the buffers.

    tokens: number of tokens.
    decodes: number of decode rows.
    samples: (request_id, index of the sampled token in prompt + output) of each token to sample.
    cu_seqlens, context_lens: host values of `padded` rows. The padding rows follow the step's own.
    constrained: index in `samples` of each token that is sampled under a mask.
    """

    rows: Sequence[Row]
    first: int
    tokens: int
    decodes: int
    samples: list[tuple[int, int]]
    cu_seqlens: list[int]
    context_lens: list[int]
    constrained: list[int]

    @property
    def padded(self) -> int:
        return len(self.context_lens)

    @property
    def has_head(self) -> bool:
        """Whether the model's head for drafts computes the rows. It computes all rows of a step, or none."""
        return self.rows[0].head_start >= 0

    @property
    def head_context_lens(self) -> list[int]:
        """Lengths of the contexts of the `padded` rows in the layers of the model's head."""
        count = len(self.rows)
        return head_context_lens(self.context_lens[:count], self.rows) + self.context_lens[count:]


def head_context_lens(context_lens: Sequence[int], rows: Sequence[Row]) -> list[int]:
    """Return the lengths of the rows' contexts in the layers of the model's head, which begin at `Row.head_start`."""
    return [context - max(0, row.head_start) for context, row in zip(context_lens, rows, strict=True)]


class Staged:
    """Inputs of a step on the host. parts: in the order of their rows."""

    def __init__(self, host: Tensor, array: Array, device: Tensor, used: int) -> None:
        self.parts: list[Part] = []
        self._host = host
        self._array = array
        self._device = device
        self._used = used
        self._tables: tuple[Tensor, Tensor] | None = None
        self._copies: list[tuple[Tensor, Tensor]] = []

    def put(self, values: Array) -> Tensor:
        """Append values of any shape and dtype; return the tensor that will hold them on the device."""
        begin = self._used
        end = self._used + values.nbytes
        self._array[begin:end].view(values.dtype).reshape(values.shape)[...] = values
        self._used = aligned(end)
        return _view(self._device, begin, _DTYPES[values.dtype], values.shape)

    def put_tables(self, tables: Array, to: Tensor) -> None:
        """Append tables [N, R, W] int32, to be copied to to[:N, :R, :W]; columns beyond W are not transferred."""
        number, rows, width = tables.shape
        self._tables = to[:number, :rows, :width], self.put(tables)

    def seal(self) -> None:
        """Prepare the copies, so that this is done before the device waits for them. Nothing may be appended after."""
        self._copies = [(self._device[: self._used], self._host[: self._used])]
        if self._tables:
            self._copies.append(self._tables)

    def upload(self) -> None:
        """Queue the copies to the device. Call it within enqueued work."""
        if not self._copies:
            self.seal()
        for to, source in self._copies:
            to.copy_(source, non_blocking=True)


def aligned(nbytes: int) -> int:
    """Return the bytes that a section of `nbytes` bytes takes in the buffers."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _view(memory: Tensor, begin: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return a view of memory [n] uint8 from byte `begin` on."""
    return memory[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)


def divided(memory: Tensor, sections: Mapping[str, tuple[int, torch.dtype]]) -> dict[str, Tensor]:
    """Return the sections of memory [n] uint8, one after the other. sections: length and dtype of each."""
    result: dict[str, Tensor] = {}
    begin = 0
    for name, (length, dtype) in sections.items():
        result[name] = _view(memory, begin, dtype, (length,))
        begin += aligned(length * dtype.itemsize)
    return result
