"""Interface of a store of prefixes. Calls return at once; their results come later, in the order of their ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class StoreResult(NamedTuple):
    """Result of a call.

    call: id of the call.
    num_values: of a load the number of the first values that are in their slots; of a save 1 if the store has the
        value, 0 if it may be tried again, or UNREADABLE.
    present: of a lookup, one byte for each key: 1 if the store has its value, 0 if not; empty if it failed.
    """

    call: int
    num_values: int
    present: bytes = b""


UNREADABLE = -1
"""Result of a save of a slot whose checksum differs: it cannot be saved."""

MIN_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0


def longer_pause(seconds: float) -> float:
    """Return the pause after a failure, whose predecessor was `seconds`; 0 if the call before succeeded."""
    return min(max(2 * seconds, MIN_PAUSE_SECONDS), MAX_PAUSE_SECONDS)


class StoreConnector(Protocol):
    """Store of values by keys. A value has the bytes of a slot of host memory, and a key names its content
    (scheduling/store_tier.py). Each call that returns True has one result, within a bounded time.

    is_available: False while a store that failed is not asked.
    failures: number of failed calls by reason, since the start; one of FAILURES.
    """

    @property
    def is_available(self) -> bool: ...
    @property
    def failures(self) -> Counter[str]: ...

    def lookup(self, call: int, keys: Sequence[bytes]) -> bool:
        """Ask which values the store has. Return False if it is not asked."""

    def load(self, call: int, keys: Sequence[bytes], slots: Sequence[int], *, is_whole: bool) -> bool:
        """Load values into slots of host memory, which no one else may use until the result. Return False if not.

        is_whole: nothing is loaded unless the store has all of them.
        """

    def save(self, call: int, key: bytes, slot: int) -> bool:
        """Save the value in a slot, which must stay as it is until the result. Return False if it is not saved."""

    def clear(self) -> None:
        """Remove the model's values from the store, and drop what waits. Calls in progress still have results."""

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


FAILURES = "timeout", "error", "lost", "corrupt", "full", "dropped"
"""Reasons of failed calls: the store was too slow, it or its client failed, it had lost a value since the look-up or a
part of a state, a value was not the one that was saved, it had no space, or too many calls waited."""
