"""Checks of the scheduler's state between any two of its calls. Used by tests and by the idle engine."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from itertools import pairwise

from npuserve.service.scheduling.block_manager import BlockManager, IntegrityError
from npuserve.service.scheduling.deadlines import Deadlines
from npuserve.service.scheduling.fair_queue import FairQueue
from npuserve.service.scheduling.sequence import Sequence


def audit(
    living: dict[int, Sequence], queue: FairQueue, running: Ordered[Sequence], paused: dict[int, Sequence],
    blocks: BlockManager, deadlines: Deadlines, seats: int,
) -> Iterator[None]:
    """Check the whole state in parts, with a yield after each. Nothing may change until it ends.

    The first part compares counts, in constant time. Raises IntegrityError unless every sequence is in one place, the
    deadlines are those of the sequences, and the blocks are exactly those of the running and of the paused that still
    hold theirs. seats: maximum length of `running`.
    """
    if len(running) > seats:
        raise IntegrityError(f"{len(running)} sequences run, {seats} may")
    if len(queue) + len(running) + len(paused) != len(living):
        where = f"{len(queue)} are waiting, {len(running)} are running, {len(paused)} are paused"
        raise IntegrityError(f"{len(living)} sequences, but {where}")
    if not living and blocks.counts.used:
        raise IntegrityError(f"{blocks.counts.used} blocks are used, but no sequence is left")
    yield
    if any(a.rank >= b.rank for a, b in pairwise(running)):
        raise IntegrityError(f"the running are not in order of rank: {[s.rank for s in running]}")
    for fault in queue.faults():
        raise IntegrityError(fault)
    places = {"waiting": list(queue), "running": running, "paused": list(paused.values())}
    for name, there in places.items():
        for sequence in there:
            # One that was paused and holds blocks stays among the paused until the next step is planned.
            fits = not (sequence.waits and not sequence.paused) if name == "paused" else (
                not sequence.paused and sequence.waits == (name == "waiting"))
            if living.get(sequence.id) is not sequence or not fits:
                raise IntegrityError(f"sequence {sequence.id} is among the {name}, but ended or elsewhere too")
    watched = deadlines.ids
    if {s.id for s in living.values() if s.request.deadline is not None} != watched:
        raise IntegrityError(f"the deadlines of {sorted(watched)} are watched, which are not all that have one")
    for sequence in living.values():
        if sequence.waits:
            if sequence.block_ids or sequence.num_computed_tokens or sequence.in_flight:
                raise IntegrityError(f"sequence {sequence.id} waits, but holds blocks or has rows in flight")
            continue
        held = len(sequence.block_ids) * blocks.block_size
        if not sequence.num_computed_tokens <= min(held, sequence.num_tokens):
            computed = f"{sequence.num_computed_tokens} tokens computed of {sequence.num_tokens}"
            raise IntegrityError(f"sequence {sequence.id}: {computed}, with blocks for {held}")
    yield
    yield from blocks.audit(sequence.blocks for sequence in living.values() if not sequence.waits)
