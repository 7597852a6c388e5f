"""What must hold of the scheduler's state between any two of its calls. For tests and idle moments."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from itertools import pairwise

from npuserve.service.block_manager import BlockManager, IntegrityError
from npuserve.service.fair_share import FairQueue
from npuserve.service.sequence import Sequence


def check(
    living: dict[int, Sequence], queue: FairQueue, running: Ordered[Sequence], paused: dict[int, Sequence],
    blocks: BlockManager, watched: set[int],
) -> None:
    """Raise IntegrityError unless every sequence is in one place and the blocks are exactly those of the running and of
    the paused that still hold theirs. watched: whose deadlines are."""
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
    if sum(map(len, places.values())) != len(living):
        where = ", ".join(f"{len(there)} are {name}" for name, there in places.items())
        raise IntegrityError(f"{len(living)} sequences, but {where}")
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
    blocks.check_integrity(sequence.blocks for sequence in living.values() if not sequence.waits)
