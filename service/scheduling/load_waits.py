"""Requests that wait for a load from host memory or a fetch from the store, and the saves and loads of a step
(host_tier.py, store_tier.py)."""

from __future__ import annotations

from collections.abc import Iterator

from npuserve.npu.step import HostCopy, HostLoad
from npuserve.service.scheduling.deadlines import Deadlines
from npuserve.service.scheduling.fair_queue import FairQueue
from npuserve.service.scheduling.sequence import Sequence
from npuserve.service.scheduling.sequence_memory import SequenceMemory


class LoadWaits:
    """Collection of the LOADING sequences. Without host memory it stays empty.

    memory: finds prefixes in host memory, and begins their loads.
    queue: where the sequences come from, and return to.
    deadlines: a sequence has less to compute while its prefix comes back.
    """

    def __init__(self, memory: SequenceMemory, queue: FairQueue, deadlines: Deadlines) -> None:
        self._memory = memory
        self._tier = memory.tier
        self._queue = queue
        self._deadlines = deadlines
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    @property
    def has_loads(self) -> bool:
        """True until all loads have ended, and `end` has taken them in."""
        return self._tier is not None and self._tier.has_loads

    def poll(self) -> None:
        """Let the loads advance. The next `end` takes in their ends."""
        if self._tier is not None and self._tier.has_loads:
            self._tier.poll()

    def begin(self, sequence: Sequence, spare: int) -> bool:
        """Let a request from the queue wait for its prefix from host memory, or for the store. Return False if there is
        none to load, and the store is not asked.

        spare: blocks that must remain free.
        """
        wait = self._memory.join_fetch(sequence) or self._memory.join_load(sequence, spare)
        if wait is None:
            return False
        self._queue.begin_load_wait(sequence)
        sequence.wait_for_load(*wait)
        self._sequences[sequence.id] = sequence
        self._deadlines.set(sequence)
        return True

    def end(self) -> None:
        """Return the requests whose loads have ended to their places in the queue."""
        ended = self._tier.end_loads(self._memory.blocks, self._memory.slots) if self._tier is not None else None
        if not ended:
            return
        for sequence in [sequence for sequence in self if sequence.load_id in ended]:
            del self._sequences[sequence.id]
            sequence.end_load_wait(self._memory.num_cached_tokens(sequence))
            self._deadlines.set(sequence)
            self._queue.push_loaded(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a request that is paused or has ended. Its load continues."""
        del self._sequences[sequence.id]
        self._queue.end_load_wait(sequence)

    def take_copies(self, *, has_rows: bool) -> tuple[list[HostCopy], list[HostLoad]]:
        """Return the saves and loads of a step. Saves wait for the next rows or loads, which may write their blocks,
        unless there is a store."""
        if self._tier is None or not (has_rows or self._tier.has_new_loads or self._tier.saves_without_rows):
            return [], []
        return self._tier.take_copies(self._memory.blocks, self._memory.slots)
