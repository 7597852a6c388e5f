"""Reader of request messages, which limits the number of concurrent reads to bound the memory of incomplete messages.

gRPC buffers a call's message up to the channel's limit once a handler reads it; until then it buffers WINDOW_BYTES. So
few messages are read at a time, round-robin over the authenticated callers and, for anonymous ones, the connections.
A read that takes longer than MAX_QUICK_SECONDS releases its slot to the next one and becomes a slow read. Slow reads
are bounded too: above the limit, the newest slow read of the client with the most, a heavy one among equals, is ended.

A client whose last message was large is heavy. Other clients take precedence, and one slot is reserved for them, so
that small messages do not wait for large ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict, deque

from npuserve.service import metrics
from npuserve.service.errors import QueueFull
from npuserve.service.rpc.call import Context

WINDOW_BYTES = 16 << 10
"""HTTP/2 window of a stream before its handler reads."""
MAX_QUICK_BYTES = 8 << 20
MAX_SLOW_BYTES = 16 << 20
"""Memory of quick and of slow reads, which determines their numbers; at least 2 of each are allowed."""
MAX_QUICK_READS, MAX_SLOW_READS = 8, 64
MAX_QUICK_SECONDS = 0.05
MAX_LATE_SECONDS = 0.01
"""If the event loop notices the end of MAX_QUICK_SECONDS later than this, the message may have arrived meanwhile: the
read stays quick for as long again."""
MAX_SLOW_SECONDS = 30.0
"""Time limit for a message to arrive."""
MIN_HEAVY_BYTES = 16 << 10
"""A client is heavy if its last message was larger."""
MAX_HEAVY_CLIENTS = 4096
"""Limit of the number of heavy clients that are remembered."""
MAX_WAITING_CALLS = 512
"""Calls that may wait to be read; one client may have half of them."""


class RequestReader:
    """Reader of the messages of a front end's calls. Use it from one event loop.

    largest: size limit of a message at the channel, in bytes.
    """

    def __init__(self, largest: int):
        self._free_slots = min(MAX_QUICK_READS, max(2, MAX_QUICK_BYTES // largest))
        self._max_slow = min(MAX_SLOW_READS, max(2, MAX_SLOW_BYTES // largest))
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._heavy: OrderedDict[str, None] = OrderedDict()
        self._slow: dict[asyncio.Future[object], str] = {}  # without displaced ones

    async def read(self, context: Context, owner: str) -> bytes | None:
        """Return the call's next message, None if the client half-closed the call.

        owner: the caller's name, or the connection of an anonymous caller.

        Raises QueueFull if too many calls wait, or the message arrives too slowly.
        """
        await self._acquire_slot(owner)
        reading = asyncio.ensure_future(context.read())
        try:
            try:
                limit = time.monotonic() + MAX_QUICK_SECONDS
                await asyncio.wait((reading,), timeout=MAX_QUICK_SECONDS)
                if not reading.done() and time.monotonic() > limit + MAX_LATE_SECONDS:
                    await asyncio.wait((reading,), timeout=MAX_QUICK_SECONDS)
            finally:
                self._release_slot()
            if not reading.done():
                await self._read_slowly(reading, owner)
            data = reading.result()
        finally:
            reading.cancel()
        if not isinstance(data, bytes):  # grpc.aio.EOF
            return None
        self._heavy.pop(owner, None)
        if len(data) > MIN_HEAVY_BYTES:
            self._heavy[owner] = None
            if len(self._heavy) > MAX_HEAVY_CLIENTS:
                self._heavy.popitem(last=False)
        return data

    async def _acquire_slot(self, owner: str) -> None:
        """Wait for a slot. A heavy client leaves the last free slot to other clients."""
        if self._free_slots > (owner in self._heavy):
            self._free_slots -= 1
            return
        own = self._waiting.get(owner, ())
        if len(own) >= MAX_WAITING_CALLS // 2 or sum(map(len, self._waiting.values())) >= MAX_WAITING_CALLS:
            raise _refused(
                "queue_full", f"queue full: {MAX_WAITING_CALLS} calls wait to be read; a client may have half")
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():
                self._release_slot()
            elif owner in self._waiting:
                with contextlib.suppress(ValueError):
                    self._waiting[owner].remove(slot)
                if not self._waiting[owner]:
                    del self._waiting[owner]
            raise

    def _release_slot(self) -> None:
        """Give the slot to the next waiting call: round-robin over the clients, heavy clients last."""
        self._free_slots += 1
        while self._waiting:
            owner = next((client for client in self._waiting if client not in self._heavy), next(iter(self._waiting)))
            if self._free_slots <= (owner in self._heavy):
                return
            slots = self._waiting.pop(owner)
            slot = slots.popleft()
            if slots:
                self._waiting[owner] = slots
            if not slot.done():
                self._free_slots -= 1
                slot.set_result(None)
                return

    async def _read_slowly(self, reading: asyncio.Future[object], owner: str) -> None:
        """Wait for the message. Raise QueueFull if it takes too long, or if this read is displaced by a newer one."""
        self._slow[reading] = owner
        if len(self._slow) > self._max_slow:
            counts = Counter(self._slow.values())
            busiest = max(counts, key=lambda client: (counts[client], client in self._heavy))
            newest = [slow for slow, client in self._slow.items() if client == busiest][-1]
            del self._slow[newest]  # otherwise a further read would choose it again before its task runs
            newest.cancel()
        try:
            await asyncio.wait((reading,), timeout=MAX_SLOW_SECONDS)
            if reading not in self._slow:
                raise _refused("displaced", f"displaced: {self._max_slow} messages arrive slowly; that is the limit")
            if not reading.done():
                raise _refused("timeout", f"timeout: the message must arrive within {MAX_SLOW_SECONDS:g} s")
        finally:
            self._slow.pop(reading, None)


def _refused(why: str, message: str) -> QueueFull:
    metrics.preparation_rejections_total.labels("read", why).inc()
    return QueueFull(message, why=why)
