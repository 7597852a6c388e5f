"""Slots of fixed state: their owners, and checkpoints by which prefix hits and samples continue a state.

A model with layers of fixed state (npu/model/layers) keeps one state per request in a slot. A row reads the state of a
slot and writes that of another, or of the same one:

    in place            slot ──row──► slot           the usual case
    from a checkpoint   checkpoint ──row──► slot     the first row after a prefix hit, and after a checkpoint was taken
    retractable         slot ──row──► spare          a constrained row, or one with drafts: if its result or a draft is
                                                     discarded, the state before it is still in `slot`, and the tokens
                                                     of the row that are valid are computed again

So a state is never advanced twice over a token, and nothing is copied but at these rows. A state that a retractable row
leaves is kept as a checkpoint when the next row is planned: that row is not retracted any more. A constrained request
keeps a spare slot; a row with drafts borrows one until its result is applied.

A checkpoint is the state at a block boundary, under the digest of the block that ends there (block_manager.py). Where
they are taken: checkpoints.py. It is useful as long as that block is cached. All states have the same size, so a
checkpoint is worth the tokens that must be computed again without it: its distance from the nearest one before it. If
slots run out, a checkpoint without its block is evicted first, then the one of the lowest priority: the clock at its
last use plus its worth, where the clock is the priority of the last victim (GreedyDual, Young 1994). A checkpoint that
was taken on suspicion is worth nothing until its first use.

An evicted checkpoint goes to host memory, if there is any for it (host_tier.py). With a store it goes there once it is
taken, the one of an answer once the request has ended. One on suspicion does not, nor does one that a later state of
the same answer replaces. A load that brings a state back holds a slot, whose state is a checkpoint when the load has
ended.

Steps run in the order of their plans, so a slot may be given away at once, as a block may (step_plan.py).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from npuserve.npu.step import STATE_SLOTS_PER_REQUEST
from npuserve.service.scheduling.block_manager import BlockManager, IntegrityError
from npuserve.service.scheduling.checkpoints import DEFAULT_SPACING, Spacing

NO_SLOT = -1
_STATE = b"state"


def state_key(digest: bytes) -> bytes:
    """Return the key of the fixed state after a block. The key of the block is its digest."""
    return _STATE + digest


def slots_of_request(*, has_spare: bool) -> int:
    """Return the number of slots with which a request can continue a checkpoint. has_spare: see StateSlots.allocate."""
    return STATE_SLOTS_PER_REQUEST + has_spare


@dataclass(slots=True)
class TakenState:
    """State that becomes a checkpoint once its row is applied.

    is_expected: other requests are likely to continue it.
    """

    position: int
    slot: int
    is_expected: bool


class _BeforeRow(NamedTuple):
    """Fields of a table before a retractable row was planned. start: first position of the row."""

    current: int
    spare: int
    source: int
    start: int


@dataclass(slots=True)
class SlotTable:
    """Slots of one request; without slots for a model without fixed state, and while the request has no blocks.

    current: slot that holds the state after the rows planned so far.
    spare: slot that a retractable row writes; NO_SLOT for none.
    is_spare_lent: `spare` goes back once the row in flight is applied.
    source: checkpoint that the next row reads instead of `current`; NO_SLOT for none.
    read: checkpoint that the row planned last reads; NO_SLOT for none.
    is_shared: its states may become checkpoints.
    taken: states that become checkpoints, in the order of their positions.
    continued: digest of the last checkpoint on the request's path; b"" for none.
    last_position: of that checkpoint, or of the last state that was taken; 0 for none.
    of_answer: digest of the checkpoint within the answer; the next one replaces it.
    """

    current: int = NO_SLOT
    spare: int = NO_SLOT
    is_spare_lent: bool = False
    source: int = NO_SLOT
    read: int = NO_SLOT
    is_shared: bool = False
    taken: list[TakenState] = field(default_factory=list)
    continued: bytes = b""
    last_position: int = 0
    of_answer: bytes = b""
    _before: _BeforeRow | None = field(default=None, repr=False)

    def __bool__(self) -> bool:
        return self.current != NO_SLOT

    @property
    def sources(self) -> set[int]:
        """Slots that the next row may read."""
        return {self.source, self._before.source if self._before else NO_SLOT}

    @property
    def owned(self) -> list[int]:
        """Slots that no checkpoint and no other request holds."""
        slots = [self.current, self.spare, *(state.slot for state in self.taken)]
        return [slot for slot in slots if slot != NO_SLOT]

    def plan_row(self, start: int, *, is_retractable: bool) -> tuple[int, int]:
        """Return the slots that a row from position `start` on reads and writes; NO_SLOT to read none or in place."""
        self._before = _BeforeRow(self.current, self.spare, self.source, start) if is_retractable else None
        source = self.source
        self.source = NO_SLOT
        self.read = source
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

    def settle(self) -> None:
        """Forget the state before the row that was planned last."""
        self._before = None

    def replace_source(self, slot: int, equal: int) -> None:
        """Let the next row read another slot of equal content, where it would read `slot`."""
        if self.source == slot:
            self.source = equal
        if self._before is not None and self._before.source == slot:
            self._before = self._before._replace(source=equal)


@dataclass(slots=True)
class _Checkpoint:
    """Findable state.

    position: number of tokens that the state has seen.
    before: digest of the nearest checkpoint before it on its path; b"" for none.
    used: the clock at its last use.
    is_expected: see TakenState; True after a use.
    """

    slot: int
    position: int
    before: bytes
    used: int
    is_expected: bool


class StateSlots:
    """Allocator of `num_slots` slots. A call takes constant time, unless it evicts: then it looks at all of them.

    blocks: a checkpoint whose block these no longer hold is evicted first; None to treat all alike.
    spacing: of checkpoints.
    """

    def __init__(
        self, num_slots: int, blocks: BlockManager | None = None, spacing: Spacing = DEFAULT_SPACING
    ) -> None:
        self.num_slots = num_slots
        self.spacing = spacing
        self._blocks = blocks
        self._free = list(range(num_slots - 1, -1, -1))
        self._checkpoints: dict[bytes, _Checkpoint] = {}
        self._loading: set[int] = set()  # slots of loads in progress
        self._clock = 0
        self._tables: dict[int, SlotTable] = {}  # tables with slots, by id()

    @staticmethod
    def of(num_slots: int, blocks: BlockManager) -> StateSlots | None:
        """Return an allocator, or None for a model without fixed state, which has 0 slots."""
        return StateSlots(num_slots, blocks) if num_slots else None

    @property
    def num_checkpoints(self) -> int:
        return len(self._checkpoints)

    @property
    def num_used(self) -> int:
        """Number of slots of requests and loads."""
        return self.num_slots - len(self._free) - len(self._checkpoints)

    def allocate(self, table: SlotTable, checkpoint: bytes, *, has_spare: bool, is_shared: bool = True) -> bool:
        """Give slots to an empty table. Return False, and change nothing, if there are too few.

        checkpoint: digest of the one that the request continues, from `find_and_touch`; b"" for none.
        has_spare: also give a slot for retractable rows.
        is_shared: other requests can find its blocks.
        """
        if checkpoint:
            table.source = self._checkpoints[checkpoint].slot
        self._tables[id(table)] = table
        if not self._provide(1 + has_spare):
            self._forget(table)
            return False
        table.is_shared = is_shared
        if checkpoint:
            table.continued = checkpoint
            table.last_position = self._checkpoints[checkpoint].position
        table.current = self._free.pop()
        if has_spare:
            table.spare = self._free.pop()
        return True

    def _provide(self, count: int, priority: float = math.inf, kept: Set[int] = frozenset()) -> bool:
        """Evict checkpoints until `count` slots are free. Return False, and change nothing, if that is impossible.

        priority: highest of a victim.
        kept: slots whose checkpoints are not evicted.
        """
        missing = count - len(self._free)
        if missing <= 0:
            return True
        victims = heapq.nsmallest(missing, self._evictable(kept), key=self._priority)
        if len(victims) < missing or self._priority(victims[-1]) > priority:
            return False
        for victim in victims:
            self._clock = max(self._clock, self._priority(victim))
            if self._blocks is not None and self._checkpoints[victim].is_expected:
                self._blocks.save_state(victim, self._checkpoints[victim].slot)
            self._evict(victim)
        return True

    def _evictable(self, kept: Set[int] = frozenset()) -> list[bytes]:
        """Return the digests of the checkpoints that no further row will read, without those in the slots `kept`."""
        read = set(kept).union(*(table.sources for table in self._tables.values()))
        return [digest for digest, checkpoint in self._checkpoints.items() if checkpoint.slot not in read]

    def _priority(self, digest: bytes) -> int:
        """Return the priority of a checkpoint. The lowest is evicted first; 0 without its block."""
        if self._blocks is not None and not self._blocks.holds(digest):
            return 0
        checkpoint = self._checkpoints[digest]
        if not checkpoint.is_expected:
            return checkpoint.used
        before = self._checkpoints.get(checkpoint.before)
        return checkpoint.used + checkpoint.position - (before.position if before else 0)

    def _evict(self, digest: bytes) -> None:
        """Free the slot of a checkpoint. The one before it takes its place on the path of others."""
        evicted = self._checkpoints.pop(digest)
        self._free.append(evicted.slot)
        for checkpoint in self._checkpoints.values():
            if checkpoint.before == digest:
                checkpoint.before = evicted.before
        for table in self._tables.values():
            if table.continued == digest:
                table.continued = evicted.before

    def _forget(self, table: SlotTable) -> None:
        self._tables.pop(id(table), None)
        table.current = table.spare = table.source = table.read = NO_SLOT
        table.is_spare_lent = False
        table.taken = []
        table._before = None
        table.continued = table.of_answer = b""
        table.last_position = 0

    def free(self, table: SlotTable) -> None:
        """Take back the slots of a table, which is empty afterwards."""
        self._offer(table.of_answer)
        self._free.extend(table.owned)
        self._forget(table)

    def lend_spare(self, table: SlotTable) -> bool:
        """Give a table a slot for one retractable row unless it has one. Return False if all slots are in use."""
        if table.spare != NO_SLOT:
            return True
        if not self._provide(1):
            return False
        table.spare = self._free.pop()
        table.is_spare_lent = True
        return True

    def settle(self, table: SlotTable) -> None:
        """Take back a lent slot: the retractable row was applied, or undone by `SlotTable.retract`."""
        table.settle()
        if table.is_spare_lent:
            self._free.append(table.spare)
            table.spare = NO_SLOT
            table.is_spare_lent = False

    def find(self, digests: Sequence[bytes], *, has_spare: bool = False) -> tuple[int, bytes]:
        """Return the number of leading blocks up to the last one with a checkpoint, and its digest; (0, b"") if none.

        digests: of a prefix's blocks, in order.
        has_spare: see `allocate`.
        """
        if not self.can_continue(has_spare=has_spare):
            return 0, b""
        for count in range(len(digests), 0, -1):
            digest = digests[count - 1]
            if digest in self._checkpoints:
                return count, digest
        return 0, b""

    def find_and_touch(self, digests: Sequence[bytes], *, has_spare: bool = False) -> tuple[int, bytes]:
        """Return what `find` does, and mark the checkpoint as used: a request will continue it."""
        count, digest = self.find(digests, has_spare=has_spare)
        if count:
            checkpoint = self._checkpoints.pop(digest)
            self._checkpoints[digest] = checkpoint  # the last: of equal priorities the least recently used is first
            checkpoint.used = self._clock
            if not checkpoint.is_expected:
                checkpoint.is_expected = True
                self._offer(digest)
        return count, digest

    def can_continue(self, *, has_spare: bool) -> bool:
        """Return whether a request can ever continue a checkpoint. Otherwise it would wait for ever."""
        return self.num_slots >= slots_of_request(has_spare=has_spare)

    @property
    def num_available(self) -> int:
        """Number of slots that are free, or have checkpoints that can be evicted."""
        return len(self._free) + len(self._evictable())

    def begin_load(self) -> int | None:
        """Return a slot for a state from host memory; None if all are in use.

        The load begins with the step that is planned now, before its rows. So it gets no slot that one of them reads.
        """
        if not self._provide(1, kept={table.read for table in self._tables.values()}):
            return None
        slot = self._free.pop()
        self._loading.add(slot)
        return slot

    def end_load(self, slot: int, digests: Sequence[bytes], position: int) -> None:
        """Make the state that a load brought a checkpoint.

        digests: of the blocks up to the state.
        position: number of tokens that the state has seen.
        """
        self._loading.remove(slot)
        digest = digests[-1]
        if digest in self._checkpoints:
            self._free.append(slot)
            return
        _, before = self.find(digests[:-1])
        self._checkpoints[digest] = _Checkpoint(slot, position, before, self._clock, is_expected=True)

    def cancel_load(self, slot: int) -> None:
        """Take back the slot of a load that brought no state."""
        self._loading.remove(slot)
        self._free.append(slot)

    def take(self, table: SlotTable, position: int, *, is_expected: bool = True) -> None:
        """Keep the state that the row planned last leaves at `position`; the next row continues it in another slot.

        Nothing if no other request can find it, or if it is worth less than the checkpoint that it would replace.
        is_expected: see TakenState.
        """
        worth = position - table.last_position if is_expected else 0
        if table.is_shared and table.source == NO_SLOT and self._provide(1, self._clock + worth):
            table.taken.append(TakenState(position, table.current, is_expected))
            table.last_position = position
            table.source = table.current
            table.current = self._free.pop()

    def register(self, table: SlotTable, digest: bytes, *, is_of_answer: bool = False) -> None:
        """Make the oldest state that was taken a checkpoint: its row is applied.

        is_of_answer: it lies within the answer, so that the one before it there is no longer needed.
        """
        taken = table.taken.pop(0)
        if (checkpoint := self._checkpoints.get(digest)) is None:
            self._checkpoints[digest] = _Checkpoint(
                taken.slot, taken.position, table.continued, self._clock, taken.is_expected)
        else:  # of another request, with the same state
            table.replace_source(taken.slot, checkpoint.slot)
            self._free.append(taken.slot)
        table.continued = digest
        if is_of_answer:
            replaced = self._checkpoints.get(table.of_answer)
            if replaced and not any(replaced.slot in other.sources for other in self._tables.values()):
                self._evict(table.of_answer)
            table.of_answer = digest
        else:
            self._offer(digest)

    def has(self, digest: bytes) -> bool:
        """Return whether the state after a block is a checkpoint."""
        return digest in self._checkpoints

    def expected_slot(self, digest: bytes) -> int | None:
        """Return the slot of the checkpoint after a block; None if there is none that other requests are likely to
        continue."""
        checkpoint = self._checkpoints.get(digest)
        return checkpoint.slot if checkpoint is not None and checkpoint.is_expected else None

    def _offer(self, digest: bytes) -> None:
        """Let a checkpoint that other requests are likely to continue be saved before its eviction."""
        if self._blocks is not None and self.expected_slot(digest) is not None:
            self._blocks.offer_state(digest)

    def clear(self) -> None:
        """Forget the checkpoints that no row will read."""
        for digest in self._evictable():
            self._evict(digest)

    def check_integrity(self, holders: Iterable[SlotTable]) -> None:
        """Raise IntegrityError unless each slot has exactly one holder: a table, a checkpoint, a load, or the free
        list."""
        checkpoints = (checkpoint.slot for checkpoint in self._checkpoints.values())
        slots = [*self._free, *self._loading, *checkpoints, *(slot for table in holders for slot in table.owned)]
        if sorted(slots) != list(range(self.num_slots)):
            raise IntegrityError(f"slots {sorted(slots)} have a holder, but there are {self.num_slots}")
