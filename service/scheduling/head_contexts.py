"""Where a model's head for drafts has keys and values, if some steps are computed without it.

The keys and values of the head lie in the blocks of the request. A step without the head leaves those of its positions
as they were: of another request, or of zeros. So a block is marked if a row without the head has written it, until a
row with the head writes it from its first position on. Slots of host memory have marks, too: a copy keeps that of its
source.

A row with the head reads keys of the head from a block boundary on (`Row.head_start`): those of the blocks without a
mark before its first token. It keeps this boundary as long as the head computes its rows. So a head that returns, or
that follows a cached prefix that was computed without it, has less context and drafts at once. Nothing is computed
again: that would take the model's hidden states of the missing positions, which nothing keeps. They are as large as the
head's keys and values.

If the row does not begin at a block boundary, up to a block of old keys is read. This makes drafts less probable, and
changes no answer.
"""

from __future__ import annotations

from collections.abc import Iterable

from npuserve.npu.step import HostCopy
from npuserve.service.scheduling.sequence import Sequence

NO_HEAD = -1
"""`Row.head_start` of a row that the head does not compute."""


class HeadContexts:
    """Marks of the blocks, and of the slots of host memory, without keys and values of the head."""

    def __init__(self, block_size: int) -> None:
        self._is_computed = True  # the rows that are planned now are computed with the head
        self._block_size = block_size
        self._marked: set[int] = set()
        self._marked_slots: set[int] = set()
        self._written: list[int] = []  # blocks whose marks the rows of the planned step change

    def begin_step(self, *, is_computed: bool) -> None:
        """Begin to plan the rows of a step, which is computed with the head or without it."""
        self._is_computed = is_computed

    def plan(self, sequence: Sequence, start: int, end: int) -> int:
        """Plan a row at positions [start, end). Return its `Row.head_start`."""
        size = self._block_size
        block_ids = sequence.block_ids
        first = start // size
        behind = (end - 1) // size + 1
        if not self._is_computed:
            self._written += block_ids[first:behind]
            sequence.head_start = NO_HEAD
            return NO_HEAD
        if self._marked:
            self._written += block_ids[-(-start // size) : behind]
        if sequence.head_start == NO_HEAD:
            sequence.head_start = size * self._first_block(block_ids, first, is_begun=start % size > 0)
        return sequence.head_start

    def end_step(self, saves: Iterable[HostCopy], loads: Iterable[HostCopy]) -> None:
        """Update the marks once a step is planned. It saves blocks before its rows write them."""
        for copy in saves:
            if copy.is_block:
                _set_mark(self._marked_slots, copy.slot, is_marked=copy.device_index in self._marked)
        if self._is_computed:
            self._marked.difference_update(self._written)
        else:
            self._marked.update(self._written)
        self._written.clear()
        for copy in loads:
            if copy.is_block:
                _set_mark(self._marked, copy.device_index, is_marked=copy.slot in self._marked_slots)

    def _first_block(self, block_ids: list[int], block: int, *, is_begun: bool) -> int:
        """Return the first of the blocks without a mark before `block`. is_begun: `block` has earlier positions."""
        if is_begun and block_ids[block] in self._marked:
            return block
        while block > 0 and block_ids[block - 1] not in self._marked:
            block -= 1
        return block


def _set_mark(marked: set[int], place: int, *, is_marked: bool) -> None:
    if is_marked:
        marked.add(place)
    else:
        marked.discard(place)
