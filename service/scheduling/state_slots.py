"""Slots of fixed state: their owners, and checkpoints by which prefix hits and samples continue a state.

A model with layers of fixed state (npu/model/layers) keeps one state per request in a slot. A row reads the state of a
slot and writes that of another, or of the same one:

    in place            slot ──row──► slot           the usual case
    from a checkpoint   checkpoint ──row──► slot     the first row after a prefix hit, and after a checkpoint was taken
    retractable         slot ──row──► spare          a constrained row: if its result is discarded, the state before it
                                                     is still in `slot`, and the row is computed again

So a state is never advanced twice over a token, and nothing is copied but at these rows. A row at position 0 reads no
state.

A checkpoint is the state at a block boundary, under the digest of the block that ends there (block_manager.py). It is
useful as long as that block is cached. The least recently used one is evicted when slots run out.

Steps run in the order of their plans, so a slot may be given away at once, as a block may (step_plan.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from npuserve.service.scheduling.block_manager import IntegrityError

NO_SLOT = -1


@dataclass(slots=True)
class SlotTable:
    """Slots of one request; without slots for a model without fixed state, and while the request has no blocks.

    current: slot that holds the state after the rows planned so far.
    spare: slot that a retractable row writes; NO_SLOT for a request without constraint.
    source: checkpoint that the next row reads instead of `current`; NO_SLOT for none.
    taken: (position, slot) of a state that becomes a checkpoint once its row is applied; None for none.
    of_answer: digest of the checkpoint within the answer; the next one replaces it.
    """

    current: int = NO_SLOT
    spare: int = NO_SLOT
    source: int = NO_SLOT
    taken: tuple[int, int] | None = None
    of_answer: bytes = b""
    _before: tuple[int, int, int, int] | None = field(default=None, repr=False)

    def __bool__(self) -> bool:
        return self.current != NO_SLOT

    @property
    def sources(self) -> set[int]:
        """Slots that the next row may read."""
        return {self.source, self._before[2] if self._before else NO_SLOT}

    @property
    def owned(self) -> list[int]:
        """Slots that no checkpoint and no other request holds."""
        slots = [self.current, self.spare, self.taken[1] if self.taken else NO_SLOT]
        return [slot for slot in slots if slot != NO_SLOT]

    def plan_row(self, start: int, *, is_retractable: bool) -> tuple[int, int]:
        """Return the slots that a row from position `start` on reads and writes; NO_SLOT to read none or in place."""
        self._before = (self.current, self.spare, self.source, start) if is_retractable else None
        source = self.source
        self.source = NO_SLOT
        if start == 0:
            return NO_SLOT, self.current
        if source != NO_SLOT:
            return source, self.current
        if is_retractable:
            self.current, self.spare = self.spare, self.current
            return self.spare, self.current
        return NO_SLOT, self.current

    def retract(self) -> int:
        """Undo the row that was planned last. Return the position from which it must be computed again."""
        assert self._before is not None
        self.current, self.spare, self.source, start = self._before
        self._before = None
        return start


class StateSlots:
    """Allocator of `num_slots` slots. A call takes constant time, unless it evicts: then it looks at all of them."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._checkpoints: OrderedDict[bytes, int] = OrderedDict()  # digest -> slot, least recently used first
        self._tables: dict[int, SlotTable] = {}  # tables with slots, by id()

    @staticmethod
    def of(num_slots: int) -> StateSlots | None:
        """Return an allocator, or None for a model without fixed state, which has 0 slots."""
        return StateSlots(num_slots) if num_slots else None

    @property
    def num_checkpoints(self) -> int:
        return len(self._checkpoints)

    @property
    def num_used(self) -> int:
        """Number of slots of requests."""
        return self.num_slots - len(self._free) - len(self._checkpoints)

    def allocate(self, table: SlotTable, source: int, *, has_spare: bool) -> bool:
        """Give slots to an empty table. Return False, and change nothing, if there are too few.

        source: slot of a checkpoint from which the request continues, from `longest`; NO_SLOT for none.
        has_spare: also give a slot for retractable rows.
        """
        table.source = source
        self._tables[id(table)] = table
        if not self._provide(1 + has_spare):
            self._forget(table)
            return False
        table.current = self._free.pop()
        if has_spare:
            table.spare = self._free.pop()
        return True

    def _provide(self, count: int) -> bool:
        """Evict checkpoints until `count` slots are free. Return False, and change nothing, if that is impossible."""
        missing = count - len(self._free)
        if missing <= 0:
            return True
        evictable = self._evictable()
        if len(evictable) < missing:
            return False
        self._evict(evictable[:missing])
        return True

    def _evictable(self) -> list[bytes]:
        """Return the digests of the checkpoints that no planned row will read, the least recently used first."""
        read = set().union(*(table.sources for table in self._tables.values()))
        return [digest for digest, slot in self._checkpoints.items() if slot not in read]

    def _evict(self, digests: Iterable[bytes]) -> None:
        self._free.extend(self._checkpoints.pop(digest) for digest in digests)

    def _forget(self, table: SlotTable) -> None:
        self._tables.pop(id(table), None)
        table.current = table.spare = table.source = NO_SLOT
        table.taken = table._before = None
        table.of_answer = b""

    def free(self, table: SlotTable) -> None:
        """Take back the slots of a table, which is empty afterwards."""
        self._free.extend(table.owned)
        self._forget(table)

    def longest(self, digests: Iterable[bytes]) -> tuple[int, int]:
        """Return the number of leading blocks up to the last one with a checkpoint, and its slot; (0, NO_SLOT) if none.

        digests: of a prefix's blocks, in order.
        """
        with_state = [(count, digest) for count, digest in enumerate(digests, 1) if digest in self._checkpoints]
        if not with_state:
            return 0, NO_SLOT
        count, digest = with_state[-1]
        self._checkpoints.move_to_end(digest)
        return count, self._checkpoints[digest]

    def take(self, table: SlotTable, position: int) -> None:
        """Keep the state that the row planned last leaves at `position`; the next row continues it in another slot.

        Nothing if no slot is free, nor one of a checkpoint.
        """
        if table.taken is None and table.source == NO_SLOT and self._provide(1):
            table.taken = position, table.current
            table.source = table.current
            table.current = self._free.pop()

    def register(self, table: SlotTable, digest: bytes, *, is_of_answer: bool = False) -> None:
        """Make the state that was taken a checkpoint: its row is applied.

        is_of_answer: it lies within the answer, so that the one before it there is no longer needed.
        """
        assert table.taken is not None
        if is_of_answer:
            if table.of_answer in self._checkpoints:
                self._checkpoints.move_to_end(table.of_answer, last=False)
            table.of_answer = digest
        slot = table.taken[1]
        table.taken = None
        if digest not in self._checkpoints:
            self._checkpoints[digest] = slot
            return
        # Another request took the same state. The next row of this one may read its own, which is evicted first.
        unfindable = digest + slot.to_bytes(4, "little")
        self._checkpoints[unfindable] = slot
        self._checkpoints.move_to_end(unfindable, last=False)

    def has(self, digest: bytes) -> bool:
        """Return whether the state after a block is a checkpoint."""
        return digest in self._checkpoints

    def clear(self) -> None:
        """Forget the checkpoints that no row will read."""
        self._evict(self._evictable())

    def check_integrity(self, holders: Iterable[SlotTable]) -> None:
        """Raise IntegrityError unless each slot has exactly one holder: a table, a checkpoint, or the free list."""
        slots = [*self._free, *self._checkpoints.values(), *(slot for table in holders for slot in table.owned)]
        if sorted(slots) != list(range(self.num_slots)):
            raise IntegrityError(f"slots {sorted(slots)} have a holder, but there are {self.num_slots}")
