"""Reader of request messages, which bounds the memory of incomplete messages.

gRPC buffers a call's message up to the channel's limit once a handler reads it; until then it buffers WINDOW_BYTES. So
a call that waits to be read costs little, and a read that has begun costs at most what has arrived
(rpc/incomplete_messages.py). Any number of messages may be read at a time while what they hold and reserve is below
the limit. Above it calls wait, round-robin over the authenticated callers and, for anonymous ones, the connections.

A client is light if its last message was small, and heavy if it was large or arrived slowly. Light clients take
precedence, then new ones. The others leave them a share of the memory, so that small messages do not wait for large
ones.

A message that has arrived counts until it is parsed. A client with much to parse begins no further reads.

Two things end a read. If messages hold more than the limit without light clients' share, the newest read of the client
that holds most is ended at once. If they hold so much that a waiting call cannot begin for MAX_BLOCKED_SECONDS,
the same is done to a client that holds more than its share, or whose connection stalls.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from npuserve.service import logs
from npuserve.service.client_queue import ClientQueue, ClientShares, refusal
from npuserve.service.errors import QueueFull
from npuserve.service.rpc.call import Context
from npuserve.service.rpc.connections import SocketTable
from npuserve.service.rpc.incomplete_messages import MAX_SILENT_SECONDS, MIN_PROGRESS_BYTES, IncompleteMessages, Read

log = logging.getLogger(__name__)

WINDOW_BYTES = 16 << 10
"""HTTP/2 window of a stream before its handler reads."""
MAX_INCOMPLETE_BYTES = 48 << 20
"""Memory of incomplete messages; two messages of the largest size if that is more."""
LIGHT_SHARE = 1 / 8
"""Share of it for light clients only."""
NEW_SHARE = 1 / 8
"""Share of it for light and new clients only."""
MAX_FRESH_READS = 8
"""Messages of unknown or of large size that begin to be read between two measurements, as far as memory is free."""
MAX_UNPARSED_BYTES = 2 << 20
"""Messages of one client that have arrived and are not parsed, until which it may begin to read more."""
MAX_CLIENT_SHARE = 1 / 16
"""Share of it that a client keeps if a call is blocked."""
MAX_UNMEASURED_READS = 4
"""Messages that are read at a time on connections whose bytes the system does not count."""
MEASURE_SECONDS = 0.01
MAX_MEASURE_SHARE = 0.05
"""Interval of measurements, and their share of the time, which makes the interval longer with many connections."""
MAX_BLOCKED_SECONDS = 2.0
"""Time for which nothing begins because of what messages hold, until one of them is given up."""
MIN_HEAVY_BYTES = 16 << 10
"""A client is heavy if its last message was larger."""
MAX_WAITING_CALLS = 512
"""Calls that may wait to be read; one client may have half of them."""

LIGHT, NEW, HEAVY = range(3)
"""Ranks of clients: a lower one takes precedence."""

_REMEDY = "more front ends (frontends) have more memory"


@dataclass(eq=False)
class _WaitingCall:
    """Call that waits to be read. client: see `RequestReader.read`. read: its read, once it may begin."""

    peer: str
    client: str
    read: asyncio.Future[Read]


class RequestReader:
    """Reader of the messages of a front end's calls. Use it from one event loop.

    sockets: table of the process's sockets.
    largest: size limit of a message at the channel, in bytes.
    limit: memory of incomplete messages, in bytes.
    """

    def __init__(self, sockets: SocketTable, largest: int, limit: int | None = None):
        self._limit = max(MAX_INCOMPLETE_BYTES, 2 * largest) if limit is None else limit
        fresh_bytes = min(self._limit // MAX_FRESH_READS, MAX_FRESH_READS * largest)
        unmeasured_bytes = min(self._limit // MAX_UNMEASURED_READS, largest)
        self._messages = IncompleteMessages(sockets, largest, fresh_bytes, unmeasured_bytes)
        self._unparsed = ClientShares()  # messages that have arrived
        self._waiting: ClientQueue[_WaitingCall] = ClientQueue(MAX_WAITING_CALLS)  # by owner
        self._ended: dict[Read, QueueFull] = {}  # reads to be ended, until their calls notice
        self._timer: asyncio.TimerHandle | None = None
        self._blocked_since: float | None = None
        self._has_warned = False

    async def read(self, context: Context, owner: str, client: str) -> bytes | None:
        """Return the call's next message, None if the client half-closed the call.

        The caller calls `release` with the message's size once it is parsed.

        owner: the caller's name, or the connection of an anonymous caller.
        client: the caller's name.

        Raises QueueFull if too many calls wait, the message arrives too slowly, or its memory is needed.
        """
        read = await self._begin(context.peer(), owner, client)
        size = None
        try:
            read.task = asyncio.ensure_future(context.read())  # type: ignore[arg-type]
            try:
                await asyncio.wait((read.task,))
                if read in self._ended:
                    raise self._ended[read]
                data = read.task.result()
            finally:
                read.task.cancel()
            if not isinstance(data, bytes):  # grpc.aio.EOF
                return None
            size = len(data)
            self._unparsed.add(client, size)
            return data
        finally:
            self._end(read, size)

    def release(self, client: str, size: int) -> None:
        """Free the account of a message that is parsed or refused."""
        self._unparsed.remove(client, size)
        self._begin_waiting()

    async def _begin(self, peer: str, owner: str, client: str) -> Read:
        """Wait until a message of this client may be read, and return the read."""
        rank = self._rank(owner)
        following = self._next_waiting()
        if self._is_free(owner, client, rank) and (following is None or rank < following[2]):
            self._set_timer()
            return self._messages.begin(peer, owner)
        if self._waiting.shares.exceeded(owner):
            raise refusal("read", "queue_full", (
                f"queue full: {MAX_WAITING_CALLS} calls wait to be read, of which a client may have half; {_REMEDY}"))
        call = _WaitingCall(peer, client, asyncio.get_running_loop().create_future())
        self._waiting.append(owner, call)
        self._set_timer()
        try:
            return await call.read
        except asyncio.CancelledError:
            if call.read.done() and not call.read.cancelled():
                self._end(call.read.result(), None)
            else:
                self._waiting.remove(owner, call)
            raise

    def _end(self, read: Read, size: int | None) -> None:
        self._ended.pop(read, None)
        self._messages.end(read, size)
        self._begin_waiting()
        if self._timer and not (self._messages or self._waiting):  # nothing is left to measure
            self._timer.cancel()
            self._timer = None
            self._blocked_since = None

    def _rank(self, owner: str) -> int:
        size = self._messages.last_size(owner)
        if size is None:
            return NEW
        return HEAVY if size > MIN_HEAVY_BYTES else LIGHT

    def _max_taken(self, owner: str, rank: int) -> float:
        """Return the bytes that may be taken already if a message of this client is to be read."""
        shares = (0.0, LIGHT_SHARE, LIGHT_SHARE + NEW_SHARE)
        return self._limit * (1 - shares[rank]) - min(self._messages.needed(owner), self._limit // 4)

    def _is_free(self, owner: str, client: str, rank: int) -> bool:
        """Return whether a message of this client may be read now."""
        if self._unparsed.bytes(client) >= MAX_UNPARSED_BYTES:
            return False
        unparsed = 0 if rank == LIGHT else self._unparsed.total_bytes
        return self._messages.charge + unparsed <= self._max_taken(owner, rank)

    def _next_waiting(self) -> tuple[str, _WaitingCall, int] | None:
        """Return the call that is read next, with its owner and its rank.

        None: no call waits, or only calls of clients with much to parse.
        """
        lowest = None
        for owner, call in self._waiting.firsts():
            rank = self._rank(owner)
            if (lowest is None or rank < lowest[2]) and self._unparsed.bytes(call.client) < MAX_UNPARSED_BYTES:
                lowest = owner, call, rank
        return lowest

    def _begin_waiting(self) -> None:
        """Begin to read waiting calls: round-robin over the clients of the lowest rank."""
        while following := self._next_waiting():
            owner, call, rank = following
            if not self._is_free(owner, call.client, rank):
                return
            self._blocked_since = None
            self._waiting.take(owner, call)
            if not call.read.done():
                call.read.set_result(self._messages.begin(call.peer, owner))

    def _set_timer(self, seconds: float = MEASURE_SECONDS) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._measure)

    def _measure(self) -> None:
        """Measure what has arrived; end reads that must end, and begin those that can."""
        self._timer = None
        began = time.monotonic()
        for late in self._messages.measure():
            self._give_up(late, "timeout", (
                f"timeout: {MIN_PROGRESS_BYTES >> 10} KiB or the rest of the message must arrive within "
                f"{MAX_SILENT_SECONDS:g} s"))
        self._displace()
        self._begin_waiting()
        self._warn_of_unmeasured()
        if self._messages or self._waiting:
            self._set_timer(max(MEASURE_SECONDS, (time.monotonic() - began) / MAX_MEASURE_SHARE))

    def _displace(self) -> None:
        """End reads while messages hold more than the limit, or one read that has blocked calls for too long."""
        max_held = int(self._limit * (1 - LIGHT_SHARE))
        excess = self._messages.held - max_held
        ended = set(self._ended)
        while excess > 0 and (read := self._messages.largest_client(ended, 0)):
            ended.add(read)
            excess -= read.connection.held // len(read.connection.reads)
            self._give_up(read, "displaced", (
                f"displaced: incomplete messages take {max_held >> 20} MiB, the limit; {_REMEDY}"))
        following = self._next_waiting()
        taken = self._messages.held + self._messages.unmeasured
        if following is None or taken <= self._max_taken(following[0], following[2]):
            self._blocked_since = None
            return
        now = time.monotonic()
        self._blocked_since = self._blocked_since or now
        if now - self._blocked_since < MAX_BLOCKED_SECONDS:
            return
        if read := self._messages.largest_client(ended, int(self._limit * MAX_CLIENT_SHARE)):
            self._give_up(read, "displaced", (
                f"displaced: the message arrives slowly, and its memory is needed: incomplete messages may take "
                f"{self._limit >> 20} MiB; {_REMEDY}"))

    def _give_up(self, read: Read, why: str, message: str) -> None:
        """End a read by this error. Its call notices later."""
        if read not in self._ended and read.task is not None and not read.task.done():
            self._ended[read] = refusal("read", why, message)
            read.task.cancel()

    def _warn_of_unmeasured(self) -> None:
        if self._messages.unmeasured and not self._has_warned:
            self._has_warned = True
            logs.event(log, "the system does not count the bytes of a connection: few messages are read at a time",
                       level=logging.WARNING, limit=MAX_UNMEASURED_READS)
