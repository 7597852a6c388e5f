"""Interface of a store of prefixes. Calls return at once; their results come later, in the order of their ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class StoreResult(NamedTuple):
    """Result of a call.

    call: id of the call.
    num_blocks: of a lookup the number of the first blocks that the store has; of a load the number of the first blocks
        that are in their slots; of a save 1 if the store has the block, 0 if it may be tried again, or UNREADABLE.
    """

    call: int
    num_blocks: int


UNREADABLE = -1
"""Result of a save of a slot whose checksum differs: the block cannot be saved."""

MIN_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0


def longer_pause(seconds: float) -> float:
    """Return the pause after a failure, whose predecessor was `seconds`; 0 if the call before succeeded."""
    return min(max(2 * seconds, MIN_PAUSE_SECONDS), MAX_PAUSE_SECONDS)


class StoreConnector(Protocol):
    """Store of blocks by their digests. Each call that returns True has one result, within a bounded time.

    is_available: False while a store that failed is not asked.
    failures: number of failed calls by reason, since the start; one of FAILURES.
    """

    @property
    def is_available(self) -> bool: ...
    @property
    def failures(self) -> Counter[str]: ...

    def lookup(self, call: int, digests: Sequence[bytes]) -> bool:
        """Ask which of the first blocks the store has. Return False if it is not asked."""

    def load(self, call: int, digests: Sequence[bytes], slots: Sequence[int]) -> bool:
        """Load blocks into slots of host memory, which no one else may use until the result. Return False if not."""

    def save(self, call: int, digest: bytes, slot: int) -> bool:
        """Save the block in a slot, which must stay as it is until the result. Return False if it is not saved."""

    def clear(self) -> None:
        """Remove the model's blocks from the store, and drop what waits. Calls in progress still have results."""

    def take_results(self) -> list[StoreResult]:
        """Return the results since the last call."""


class SlotMemory(Protocol):
    """Memory of the slots: npu/execution/host_blocks.py. `read` and `view` may be called in any thread."""

    def is_saved(self, slot: int) -> bool:
        """Return whether the copy to a slot is complete, and its checksum known."""

    def is_copying(self, slot: int) -> bool:
        """Return whether a copy to a slot is in progress, which may overwrite it at any time."""

    def read(self, slot: int) -> memoryview | None:
        """Return the bytes of a saved slot; None if their checksum differs."""

    def view(self, slot: int) -> memoryview:
        """Return the bytes of a slot to write."""

    def received(self, slots: Sequence[int]) -> None:
        """Note that slots were written through their views, and take their checksums."""


FAILURES = "timeout", "error", "corrupt", "full", "dropped"
"""Reasons of failed calls: the store was too slow, it or its client failed, a value was not the one that was saved, it
had no space, or too many calls waited."""
