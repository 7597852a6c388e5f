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
        self.save_polls = 0  # calls of `is_saved` that return False before one returns True
        self._polls = 0
        self.copying: set[int] = set()  # slots to which copies are in progress

    def is_saved(self, slot: int) -> bool:
        assert slot in self.device.host
        self._polls += 1
        return self._polls % (self.save_polls + 1) == 0

    def is_copying(self, slot: int) -> bool:
        return slot in self.copying

    def read(self, slot: int) -> Any:
        return None if slot in self.device.corrupt else self.device.host[slot]

    def view(self, slot: int) -> Any:
        raise NotImplementedError

    def received(self, slots: Sequence[int]) -> None:
        self.device.corrupt.difference_update(slots)


class _Call(NamedTuple):
    """Call in progress. content: of the slot at the beginning of a save."""

    kind: str
    id: int
    digests: list[bytes]
    slots: list[int]
    content: Any = None


class FakeStore:
    """Connector. contents: of the blocks in the store by digest, which several connectors may share.

    fault: returns for each result the number of blocks, at most `count`, that succeed.
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

    def lookup(self, call: int, digests: Sequence[bytes]) -> bool:
        self.lookups.append(list(digests))
        return self._add(_Call("lookup", call, list(digests), []))

    def load(self, call: int, digests: Sequence[bytes], slots: Sequence[int]) -> bool:
        assert len(digests) == len(slots) == len({*slots}) > 0
        assert self._memory.copying.isdisjoint(slots), "a copy from the device would overwrite what is loaded"
        if not self._add(_Call("load", call, list(digests), list(slots))):
            return False
        self._memory.device.host.update(dict.fromkeys(slots, GARBAGE))
        return True

    def save(self, call: int, digest: bytes, slot: int) -> bool:
        return self._add(_Call("save", call, [digest], [slot], self._memory.device.host[slot]))

    def clear(self) -> None:
        self.contents.clear()
        self._calls = [(call, 1) for call, _ in self._calls]

    def take_results(self) -> list[StoreResult]:
        self._calls = [(call, polls - 1) for call, polls in self._calls]
        ended = [call for call, polls in self._calls if polls <= 0]
        self._calls = [(call, polls) for call, polls in self._calls if polls > 0]
        return [StoreResult(call.id, self._count(call)) for call in ended]

    def _count(self, call: _Call) -> int:
        host = self._memory.device.host
        if call.kind == "save":
            assert host[call.slots[0]] is call.content, "a slot changed while it was saved"
            content = self._memory.read(call.slots[0])
            if content is None:
                return UNREADABLE
            count = self.fault("save", 1)
            if count:
                self.contents[call.digests[0]] = content
            return count
        known = 0
        while known < len(call.digests) and call.digests[known] in self.contents:
            known += 1
        count = self.fault(call.kind, known)
        if call.kind == "load":
            assert all(host[slot] is GARBAGE for slot in call.slots), "a slot changed while it was loaded"
            for digest, slot in zip(call.digests[:count], call.slots, strict=False):
                host[slot] = self.contents[digest]
        return count
