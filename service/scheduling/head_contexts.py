"""Where a model's head for drafts has keys and values, if some steps are computed without it.

The keys and values of the head lie in the blocks of the request. A step without the head leaves those of its positions
as they were: of another request, or of zeros. So a block is marked if a row without the head has written it, until a
row with the head writes it from its first position on.

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

from npuserve.service.scheduling.sequence import Sequence

NO_HEAD = -1
"""`Row.head_start` of a row that the head does not compute."""


class HeadContexts:
    """Marks of the blocks without keys and values of the head.

    is_computed: the rows that are planned now are computed with the head.
    """

    def __init__(self, block_size: int) -> None:
        self.is_computed = True
        self._block_size = block_size
        self._marked: set[int] = set()
        self._was_stopped = False

    def plan(self, sequence: Sequence, start: int, end: int) -> int:
        """Plan a row at positions [start, end). Return its `Row.head_start`."""
        size = self._block_size
        block_ids = sequence.block_ids
        first = start // size
        behind = (end - 1) // size + 1
        if not self.is_computed:
            self._was_stopped = True
            self._marked.update(block_ids[first:behind])
            sequence.head_start = NO_HEAD
            return NO_HEAD
        if self._marked:
            self._marked.difference_update(block_ids[-(-start // size) : behind])
        if sequence.head_start == NO_HEAD:
            sequence.head_start = size * self._first_block(block_ids, first, is_begun=start % size > 0)
        return sequence.head_start

    def loaded(self, block_ids: Iterable[int]) -> None:
        """Mark blocks whose contents came back from host memory, if a row without the head may have written them."""
        if self._was_stopped:
            self._marked.update(block_ids)

    def _first_block(self, block_ids: list[int], block: int, *, is_begun: bool) -> int:
        """Return the first of the blocks without a mark before `block`. is_begun: `block` has earlier positions."""
        if is_begun and block_ids[block] in self._marked:
            return block
        while block > 0 and block_ids[block - 1] not in self._marked:
            block -= 1
        return block
