"""A store of the bytes of slots in memory, by which schedulers over real runners share prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from npuserve.service.store.connector import UNREADABLE, SlotMemory, StoreResult

POLLS = 3


class MemoryStore:
    """Connector whose calls take POLLS polls, and read and write slots as late as they may.

    memory: slots of host memory.
    values: in the store, by key; connectors may share them.
    """

    def __init__(self, memory: SlotMemory, values: dict[bytes, bytes]) -> None:
        self.is_available = True
        self.failures: Counter[str] = Counter()
        self.values = values
        self._memory = memory
        self._calls: list[tuple[int, Callable[[], StoreResult]]] = []  # polls that are left

    @property
    def is_busy(self) -> bool:
        return bool(self._calls)

    def _add(self, call: Callable[[], StoreResult]) -> bool:
        self._calls.append((POLLS, call))
        return True

    def lookup(self, call: int, keys: Sequence[bytes]) -> bool:
        return self._add(lambda: StoreResult(call, 0, bytes(key in self.values for key in keys)))

    def load(self, call: int, keys: Sequence[bytes], slots: Sequence[int], *, is_whole: bool) -> bool:
        def end() -> StoreResult:
            for key, slot in zip(keys, slots, strict=True):
                self._memory.view(slot)[:] = self.values[key]
            return StoreResult(call, len(keys))

        return self._add(end)

    def save(self, call: int, key: bytes, slot: int) -> bool:
        def end() -> StoreResult:
            value = self._memory.read(slot)
            if value is None:
                return StoreResult(call, UNREADABLE)
            self.values[key] = bytes(value)
            return StoreResult(call, 1)

        return self._add(end)

    def clear(self) -> None:
        raise NotImplementedError

    def take_results(self) -> list[StoreResult]:
        self._calls = [(polls - 1, call) for polls, call in self._calls]
        results = [call() for polls, call in self._calls if not polls]
        self._calls = [(polls, call) for polls, call in self._calls if polls]
        return results
