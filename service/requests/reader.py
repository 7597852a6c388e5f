"""Reading of request messages: how many are read at a time, so that the memory for unread ones is bounded.

gRPC holds a call's message while it arrives, up to the channel's limit, from when a handler begins to read it; before,
it holds WINDOW_BYTES. So reads take turns: few at a time, the connections or the authenticated callers in turn. A read
that takes longer than QUICK_SECONDS gives its place to the next and becomes a slow one. Slow reads are bounded, too: if
there are too many, the newest one of the client with the most is ended.

A client whose last message was large is a heavy one. The others go first, and one place is theirs alone, so that small
messages do not wait for large ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque

from npuserve.service import metrics
from npuserve.service.errors import QueueFull
from npuserve.service.rpc.call import Context

WINDOW_BYTES = 16 << 10
"""HTTP/2 window of a stream that nobody reads."""
QUICK_BYTES = 8 << 20
SLOW_BYTES = 16 << 20
"""Memory of quick and of slow reads, from which their numbers follow; at least 2 of each are allowed."""
MAX_QUICK, MAX_SLOW = 8, 64
QUICK_SECONDS = 0.05
SLOW_SECONDS = 30.0
"""Time for a message to arrive."""
HEAVY_BYTES = 16 << 10
"""A client whose last message was larger is a heavy one."""
MAX_HEAVY = 4096
"""Heavy clients that are remembered."""
MAX_WAITING = 512
"""Calls that wait until they are read; a client may have half of it."""


class RequestReader:
    """largest: bytes that a message may have at the channel."""

    def __init__(self, largest: int):
        self._quick = min(MAX_QUICK, max(2, QUICK_BYTES // largest))
        self._max_slow = min(MAX_SLOW, max(2, SLOW_BYTES // largest))
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._heavy: OrderedDict[str, None] = OrderedDict()
        self._slow: dict[asyncio.Future[bytes], str] = {}
        self._displaced: set[asyncio.Future[bytes]] = set()

    async def read(self, context: Context, owner: str) -> bytes | None:
        """Return the call's next message; None if the client ended its side without one more.

        owner: the caller's name, or the connection of an anonymous one.
        Raises QueueFull if too many calls wait, or the message arrives too slowly.
        """
        await self._turn(owner)
        reading = asyncio.ensure_future(context.read())
        try:
            try:
                await asyncio.wait((reading,), timeout=QUICK_SECONDS)
            finally:
                self._give_turn()
            if not reading.done():
                await self._read_slowly(reading, owner)
            data = reading.result()
        finally:
            reading.cancel()
        if not isinstance(data, bytes):  # grpc.aio.EOF
            return None
        self._heavy.pop(owner, None)
        if len(data) > HEAVY_BYTES:
            self._heavy[owner] = None
            if len(self._heavy) > MAX_HEAVY:
                self._heavy.popitem(last=False)
        return data

    async def _turn(self, owner: str) -> None:
        """Wait for the caller's turn to read."""
        if self._quick > (owner in self._heavy):
            self._quick -= 1
            return
        own = self._waiting.get(owner, ())
        if len(own) >= MAX_WAITING // 2 or sum(map(len, self._waiting.values())) >= MAX_WAITING:
            raise _refused("queue_full", f"queue full: {MAX_WAITING} calls wait to be read; a client may have half")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_turn()
            elif owner in self._waiting:
                with contextlib.suppress(ValueError):
                    self._waiting[owner].remove(turn)
                if not self._waiting[owner]:
                    del self._waiting[owner]
            raise

    def _give_turn(self) -> None:
        """Let the next one read: the clients in turn, the heavy ones last."""
        self._quick += 1
        while self._waiting:
            owner = next((one for one in self._waiting if one not in self._heavy), next(iter(self._waiting)))
            if self._quick <= (owner in self._heavy):
                return
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns
            if not turn.done():
                self._quick -= 1
                turn.set_result(None)
                return

    async def _read_slowly(self, reading: asyncio.Future[bytes], owner: str) -> None:
        """Wait until the message is there. Raises QueueFull if it takes too long or another one needs the place."""
        self._slow[reading] = owner
        if len(self._slow) > self._max_slow:
            most = Counter(self._slow.values()).most_common(1)[0][0]
            newest = [one for one, whose in self._slow.items() if whose == most][-1]
            self._displaced.add(newest)
            newest.cancel()
        try:
            await asyncio.wait((reading,), timeout=SLOW_SECONDS)
            if reading in self._displaced:
                raise _refused("displaced", f"displaced: {self._max_slow} messages arrive slowly; that is the limit")
            if not reading.done():
                raise _refused("timeout", f"timeout: the message must arrive within {SLOW_SECONDS:g} s")
        finally:
            del self._slow[reading]
            self._displaced.discard(reading)


def _refused(why: str, message: str) -> QueueFull:
    metrics.preparation_rejections_total.labels("read", why).inc()
    return QueueFull(message, why=why)
