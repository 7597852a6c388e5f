"""Checks of the scheduler's state between any two of its calls. Used by tests and by the idle engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from itertools import pairwise

from npuserve.service.scheduling.block_manager import BlockManager, IntegrityError
from npuserve.service.scheduling.deadlines import Deadlines
from npuserve.service.scheduling.fair_queue import FairQueue
from npuserve.service.scheduling.sample_groups import SampleGroups
from npuserve.service.scheduling.sequence import Sequence, State

_STATES = {
    "waiting": {State.WAITING, State.PREEMPTED},
    "followers": {State.FOLLOWING},
    "compiling": {State.COMPILING},
    "running": {State.RUNNING},
    "paused": {State.PAUSED, State.PAUSED_WITHOUT_BLOCKS, State.RESUMED},
}
"""States of the sequences in each collection of the scheduler."""


def audit(
    sequences: dict[int, Sequence], queue: FairQueue, samples: SampleGroups, compiling: dict[int, Sequence],
    running: Ordered[Sequence], paused: dict[int, Sequence], blocks: BlockManager, deadlines: Deadlines,
    max_num_seqs: int,
) -> Iterator[None]:
    """Check the whole state in parts, with a yield after each. Nothing may change before its end.

    The first part compares counts, in constant time. Raises IntegrityError unless

    - every sequence that has not ended is in the one collection that its state names,
    - the compiling sequences have a constraint and no matcher, and no running or queued one lacks its matcher,
    - the clients' counts of running sequences are right,
    - samples that wait for a prompt have a leader that computes it,
    - deadlines are set for exactly the sequences that have one,
    - the used blocks belong to exactly the sequences whose state holds blocks.

    max_num_seqs: maximum length of `running`.
    """
    if len(running) > max_num_seqs:
        raise IntegrityError(f"{len(running)} sequences run, at most {max_num_seqs} may")
    if len(queue) + len(samples) + len(compiling) + len(running) + len(paused) != len(sequences):
        places = (f"{len(queue)} are waiting, {len(samples)} are followers, {len(compiling)} are compiling, "
                  f"{len(running)} are running, {len(paused)} are paused")
        raise IntegrityError(f"{len(sequences)} sequences, but {places}")
    if not sequences and blocks.counts.used:
        raise IntegrityError(f"{blocks.counts.used} blocks are used, but no sequence is left")
    yield
    if any(a.age_key >= b.age_key for a, b in pairwise(running)):
        raise IntegrityError(f"the running sequences are not in order of age: {[s.age_key for s in running]}")
    count = Counter(sequence.account for sequence in running)
    for account in {sequence.account for sequence in sequences.values()}:
        if account.running != count[account]:
            raise IntegrityError(f"a client has {account.running} running, but {count[account]} are among the running")
    for fault in (*queue.faults(), *samples.faults()):
        raise IntegrityError(fault)
    for name, members in (
        ("waiting", list(queue)), ("followers", list(samples)),
        ("compiling", list(compiling.values())), ("running", running), ("paused", list(paused.values()))
    ):
        for sequence in members:
            if sequences.get(sequence.id) is not sequence or sequence.state not in _STATES[name]:
                raise IntegrityError(f"sequence {sequence.id} is among the {name}, but is {sequence.state.value}")
    if {s.id for s in sequences.values() if s.deadline is not None} != deadlines.ids:
        raise IntegrityError(f"deadlines are set for the sequences {sorted(deadlines.ids)}, not for all that have one")
    for sequence in sequences.values():
        _check(sequence, blocks.block_size)
    yield
    yield from blocks.audit(sequence.blocks for sequence in sequences.values() if sequence.holds_blocks)


def _check(sequence: Sequence, block_size: int) -> None:
    """Check one sequence against its own state."""
    name = f"sequence {sequence.id} is {sequence.state.value}"
    if sequence.is_queued and sequence.was_admitted != (sequence.state is State.PREEMPTED):
        raise IntegrityError(f"{name}, and was_admitted is {sequence.was_admitted}")
    if not sequence.is_paused and sequence.needs_matcher != (sequence.state is State.COMPILING):
        raise IntegrityError(f"{name}, and its matcher is {'missing' if sequence.needs_matcher else 'there'}")
    if not sequence.holds_blocks:
        if sequence.block_ids or sequence.num_computed_tokens or sequence.num_steps_in_flight:
            raise IntegrityError(f"{name}, but holds blocks or has rows in flight")
        return
    held = len(sequence.block_ids) * block_size
    if not sequence.num_computed_tokens <= min(held, sequence.num_tokens):
        computed = f"{sequence.num_computed_tokens} tokens computed of {sequence.num_tokens}"
        raise IntegrityError(f"{name}: {computed}, with blocks for {held}")
