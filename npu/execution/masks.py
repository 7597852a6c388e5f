"""Bit masks of a step's constrained rows, and their copy to the device.

The masks of a step and the number of each row's mask are written to a host buffer, which is copied to the device in one
copy. The copy may be queued behind the previous step's, so there are two host buffers; the device has one. All are
allocated when a step first has masks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from npuserve.npu.backends.base import Backend

Array = np.ndarray[Any, Any]

BITS = 32
"""Ids of a word."""

_ALIGNMENT = 16
"""The masks begin at a multiple of as many words."""


class RowMasks(NamedTuple):
    """Masks of R rows on the device, as the kernel `mask_logits` takes them.

    bits: [M, ceil(vocabulary / 32)] int32.
    mask_of_row: [R] int32; -1 for a row without a mask.
    """

    bits: Tensor
    mask_of_row: Tensor


@dataclass(frozen=True, slots=True)
class ConstrainedRow:
    """Row whose token is sampled under a mask.

    index: index of its token among the tokens that the step samples.
    position: position of the token in prompt + output.
    """

    index: int
    request_id: int
    position: int


@dataclass(frozen=True, slots=True)
class StagedMasks:
    """Masks of a step on the host, to be copied to the device.

    to, source: destination and source of the copy.
    masks: masks of all tokens that the step samples; valid after the copy.
    """

    to: Tensor
    source: Tensor
    masks: RowMasks

    def upload(self) -> None:
        """Queue the copy to the device. Call it within enqueued work."""
        self.to.copy_(self.source, non_blocking=True)

    def of(self, first: int, count: int) -> RowMasks:
        """Return the masks of `count` tokens from the step's `first` on."""
        return RowMasks(self.masks.bits, self.masks.mask_of_row[first : first + count])


class MaskBuffers:
    """Memory of the masks of up to `rows` rows over `vocabulary` ids."""

    def __init__(self, rows: int, vocabulary: int, backend: Backend):
        self._rows = rows
        self._vocabulary = vocabulary
        self._backend = backend
        self._words = -(-vocabulary // BITS)
        self._first = -(-rows // _ALIGNMENT) * _ALIGNMENT  # the masks follow the number of each row's mask
        self._last_word = np.uint32(0xFFFFFFFF >> self._words * BITS - vocabulary).astype(np.int32)
        self._hosts: list[Tensor] = []
        self._device: Tensor | None = None
        self._current = 0

    def fill(
        self, rows: Sequence[ConstrainedRow], masks: Mapping[int, Array], restrict: Callable[[int, int, Array], None]
    ) -> StagedMasks | None:
        """Write the masks of a step to the next host buffer; return None if no row has one.

        masks: request -> [n, ceil(vocabulary / 32)] int32 for its first n rows, or without the first dimension for one.
            Further rows have the last of them. Ids at or beyond the vocabulary's size are removed.
        restrict: removes ids from the mask of (request, position) in place, not all of them.

        The masks of the step before the previous one must have reached the device. Raises ValueError for a mask of
        another shape or dtype, and for one that allows no id.
        """
        masked: list[tuple[ConstrainedRow, Array]] = []
        for request_id, of_request in groupby(rows, attrgetter("request_id")):
            if (mask := masks.get(request_id)) is not None:
                each = [mask] if mask.ndim == 1 else list(mask)
                drafted = list(of_request)
                masked += zip(drafted, each + each[-1:] * (len(drafted) - len(each)), strict=True)
        if not masked:
            return None
        if self._device is None:
            size = self._first + self._rows * self._words
            self._hosts = [self._backend.host_buffer(size, dtype=torch.int32) for _ in range(2)]
            self._device = self._backend.empty((size,), torch.int32)
        source = self._hosts[1 - self._current]
        array = source.numpy()
        mask_of_row = array[: self._first]
        bits = array[self._first :].reshape(-1, self._words)
        self._write(masked, bits[: len(masked)])
        mask_of_row.fill(-1)
        mask_of_row[[row.index for row, _ in masked]] = np.arange(len(masked))
        for number, (row, _) in enumerate(masked):
            restrict(row.request_id, row.position, bits[number])
        self._current = 1 - self._current
        used = self._first + len(masked) * self._words
        to = self._device[:used]
        return StagedMasks(to, source[:used], RowMasks(to[self._first :].view(-1, self._words), to[: self._first]))

    def _write(self, masked: list[tuple[ConstrainedRow, Array]], to: Array) -> None:
        """Write the masks of rows to `to` [rows, words]. All at once: a call costs more than the copy of a mask."""
        for row, mask in masked:
            if mask.shape != to.shape[1:] or mask.dtype != to.dtype:
                raise ValueError(f"masks: request {row.request_id}: {list(mask.shape)} {mask.dtype}, "
                                 f"where a mask is [{self._words}] int32")
        np.stack([mask for _, mask in masked], out=to)
        to[:, -1] &= self._last_word
        if not (allows := to.any(axis=1)).all():
            row = masked[int(allows.argmin())][0]
            raise ValueError(
                f"masks: request {row.request_id}: no id from 0 to {self._vocabulary - 1} is allowed")


def num_valid(mask: Array | None) -> int:
    """Return the number of samples for which a request has a mask of its own."""
    if mask is None:
        return 0
    return 1 if mask.ndim == 1 else len(mask)


def mask_of(ids: Collection[int], words: int) -> Array:
    """Return a mask [words] int32 that allows these ids, all below 32 * words."""
    allowed = np.zeros(words * BITS, np.bool_)
    allowed[list(ids)] = True
    return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)


def restrict(mask: Array, allowed: Array) -> None:
    """Remove in place the ids that `allowed` lacks, unless none would remain."""
    common = mask & allowed
    if common.any():
        mask[:] = common
