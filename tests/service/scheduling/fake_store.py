"""A store in memory that harnesses share, with delays and faults, which checks what happens to the slots it uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from npuserve.service.store.connector import UNREADABLE, StoreResult
from tests.service.scheduling.reference import FakeDevice

GARBAGE = ["half a block"]


class FakeMemory:
    """Slots of host memory of a fake device."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.save_polls = 0  # calls of `is_saved` with a slot that return False before one returns True
        self._polls: Counter[int] = Counter()
        self.copying: set[int] = set()  # slots to which copies are in progress

    def is_saved(self, slot: int) -> bool:
        assert slot in self.device.host
        self._polls[slot] = (self._polls[slot] + 1) % (self.save_polls + 1)
        return not self._polls[slot]

    def is_copying(self, slot: int) -> bool:
        return slot in self.copying

    def read(self, slot: int) -> Any:
        return None if slot in self.device.corrupt else self.device.host[slot]

    def view(self, slot: int) -> Any:
        raise NotImplementedError

    def received(self, slots: Sequence[int]) -> None:
        self.device.corrupt.difference_update(slots)


class _Call(NamedTuple):
    """Call in progress. is_whole: of a load. content: of the slot at the beginning of a save."""

    kind: str
    id: int
    keys: list[bytes]
    slots: list[int]
    is_whole: bool = False
    content: Any = None


class FakeStore:
    """Connector. contents: values in the store by key, which several connectors may share.

    fault: returns for each result the number of values, at most `count`, that succeed.
    """

    def __init__(self, memory: FakeMemory, contents: dict[bytes, Any]) -> None:
        self.is_available = True
        self.failures: Counter[str] = Counter()
        self.contents = contents
        self.polls = 2  # calls of take_results until a call ends
        self.fault: Callable[[str, int], int] = lambda kind, count: count
        self.limit = 8
        self.lookups: list[list[bytes]] = []
        self._memory = memory
        self._calls: list[tuple[_Call, int]] = []

    def _add(self, call: _Call) -> bool:
        if not self.is_available or len(self._calls) >= self.limit:
            return False
        self._calls.append((call, self.polls))
        return True

    def lookup(self, call: int, keys: Sequence[bytes]) -> bool:
        assert len(keys) == len({*keys}) > 0
        self.lookups.append(list(keys))
        return self._add(_Call("lookup", call, list(keys), []))

    def load(self, call: int, keys: Sequence[bytes], slots: Sequence[int], *, is_whole: bool) -> bool:
        assert len(keys) == len({*keys}) == len(slots) == len({*slots}) > 0
        assert self._memory.copying.isdisjoint(slots), "a copy from the device would overwrite what is loaded"
        if not self._add(_Call("load", call, list(keys), list(slots), is_whole)):
            return False
        self._memory.device.host.update(dict.fromkeys(slots, GARBAGE))
        return True

    def save(self, call: int, key: bytes, slot: int) -> bool:
        return self._add(_Call("save", call, [key], [slot], content=self._memory.device.host[slot]))

    def clear(self) -> None:
        self.contents.clear()
        self._calls = [(call, 1) for call, _ in self._calls]

    def take_results(self) -> list[StoreResult]:
        self._calls = [(call, polls - 1) for call, polls in self._calls]
        ended = [call for call, polls in self._calls if polls <= 0]
        self._calls = [(call, polls) for call, polls in self._calls if polls > 0]
        return [StoreResult(call.id, *self._result(call)) for call in ended]

    def _result(self, call: _Call) -> tuple[int, bytes]:
        if call.kind != "lookup":
            return self._count(call), b""
        count = self.fault("lookup", len(call.keys))
        return 0, bytes(key in self.contents for key in call.keys[:count])

    def _count(self, call: _Call) -> int:
        host = self._memory.device.host
        if call.kind == "save":
            assert host[call.slots[0]] is call.content, "a slot changed while it was saved"
            content = self._memory.read(call.slots[0])
            if content is None:
                return UNREADABLE
            count = self.fault("save", 1)
            if count:
                self.contents[call.keys[0]] = content
            return count
        known = 0
        while known < len(call.keys) and call.keys[known] in self.contents:
            known += 1
        if known < len(call.keys):
            self.failures["lost"] += 1
            known = 0 if call.is_whole else known
        count = self.fault("load", known)
        assert all(host[slot] is GARBAGE for slot in call.slots), "a slot changed while it was loaded"
        for key, slot in zip(call.keys[:count], call.slots, strict=False):
            host[slot] = self.contents[key]
        return count
