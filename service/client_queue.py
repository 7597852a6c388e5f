"""Queues and counters that clients share: bounded as a whole, and one client may have half.

They bound what a front end and the compiler of constraints hold for clients: jobs and calls that wait, replies that are
not read. The engine's queue of requests, which counts tokens, is scheduling/fair_queue.py.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, Literal, TypeVar

from npuserve.service import metrics
from npuserve.service.errors import QueueFull

Item = TypeVar("Item", bound=Hashable)
Bound = Literal["client_limit", "queue_full"]


class ClientShares:
    """Number of items and of their bytes, by client.

    max_items, max_bytes: limits of all clients; None for none. One client may have half. Where there is none, a single
        item may exceed max_bytes.
    """

    def __init__(self, max_items: int | None = None, max_bytes: int | None = None):
        self.max_items = max_items
        self.max_bytes = max_bytes
        self.total_items = 0
        self.total_bytes = 0
        self._items: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def __bool__(self) -> bool:
        """Return whether a client has an item."""
        return bool(self._items)

    def items(self, client: str) -> int:
        """Return the number of a client's items."""
        return self._items[client]

    def bytes(self, client: str) -> int:
        """Return the bytes of a client's items."""
        return self._bytes[client]

    def add(self, client: str, size: int = 0) -> None:
        """Count an item, whatever the limits. size: its bytes."""
        self._items[client] += 1
        self._bytes[client] += size
        self.total_items += 1
        self.total_bytes += size

    def remove(self, client: str, size: int = 0) -> None:
        """Count an item less."""
        self._items[client] -= 1
        self._bytes[client] -= size
        self.total_items -= 1
        self.total_bytes -= size
        if not self._items[client]:
            del self._items[client]
            del self._bytes[client]

    def clear(self) -> None:
        self._items.clear()
        self._bytes.clear()
        self.total_items = 0
        self.total_bytes = 0

    def exceeded(self, client: str, size: int = 0) -> Bound | None:
        """Return the bound that one more item of `size` bytes would exceed; None if it is allowed."""
        items = self._items[client]
        if self.max_items is not None and items >= max(1, self.max_items // 2):
            return "client_limit"
        if self.max_bytes is not None and items and self._bytes[client] + size > self.max_bytes // 2:
            return "client_limit"
        if self.max_items is not None and self.total_items >= self.max_items:
            return "queue_full"
        if self.max_bytes is not None and self.total_items and self.total_bytes + size > self.max_bytes:
            return "queue_full"
        return None


class ClientQueue(Generic[Item]):
    """Waiting items of several clients, which take turns, whatever the number of their items.

    max_items, max_bytes: see ClientShares. `append` adds beyond them: the caller asks `shares.exceeded` before.
    """

    def __init__(self, max_items: int | None = None, max_bytes: int | None = None):
        self.shares = ClientShares(max_items, max_bytes)
        self._items: OrderedDict[str, dict[Item, int]] = OrderedDict()  # items with bytes, by client, the next first

    def __len__(self) -> int:
        return self.shares.total_items

    def has(self, client: str, item: Item) -> bool:
        """Return whether an item of a client waits."""
        return item in self._items.get(client, ())

    def firsts(self) -> Iterator[tuple[str, Item]]:
        """Yield each client with its first item, in the order of their turns."""
        for client, items in self._items.items():
            yield client, next(iter(items))

    def clients_of(self, item: Item) -> list[str]:
        """Return the clients for which an item waits."""
        return [client for client, items in self._items.items() if item in items]

    def append(self, client: str, item: Item, size: int = 0) -> None:
        """Add an item, which must not wait for the client yet. size: its bytes."""
        self._items.setdefault(client, {})[item] = size
        self.shares.add(client, size)

    def remove(self, client: str, item: Item) -> bool:
        """Remove an item, and keep the client's turn. Return False if it does not wait."""
        items = self._items.get(client, {})
        size = items.pop(item, None)
        if size is None:
            return False
        self.shares.remove(client, size)
        if not items:
            del self._items[client]
        return True

    def take(self, client: str, item: Item) -> None:
        """Remove an item that waits, and end the client's turn."""
        self.remove(client, item)
        if client in self._items:
            self._items.move_to_end(client)

    def largest(self) -> tuple[str, Item]:
        """Return the client with the most bytes, else items, and its newest item. One must wait."""
        client = max(self._items, key=lambda client: (self.shares.bytes(client), self.shares.items(client)))
        return client, next(reversed(self._items[client]))

    def clear(self) -> None:
        self._items.clear()
        self.shares.clear()


def refusal(kind: str, why: str, message: str) -> QueueFull:
    """Count a request that a front end refuses before the engine, and return its error.

    kind: kind of its work. why: reason, both for metrics.
    """
    metrics.preparation_rejections_total.labels(kind, why).inc()
    return QueueFull(message, why=why)
