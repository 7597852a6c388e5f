"""Replies that clients have not read yet, bounded by their bytes.

gRPC keeps the reply of a unary call, in several copies, until the client's flow control admits it. A client that reads
nothing keeps it as long as its connection, and a server of grpc.aio cannot end such a call.
"""

from __future__ import annotations

from npuserve.service.client_queue import ClientShares, refusal
from npuserve.service.rpc.call import Context

MAX_BYTES = 16 << 20
"""Unread replies of a front end; one client may have half."""


class UnreadReplies:
    """Bytes of the unread replies of a front end's calls, by client. Use it from one event loop."""

    def __init__(self, max_bytes: int = MAX_BYTES):
        self._shares = ClientShares(max_bytes=max_bytes)

    def add(self, context: Context, owner: str, kind: str, size: int) -> None:
        """Count a reply until its call ends. A client without an unread reply may always have one.

        owner: name of the caller.
        kind: kind of call, for metrics.
        size: bytes of the reply.

        Raises QueueFull if the unread replies of the client or of all clients would exceed the limit.
        """
        self.check(owner, kind, size)
        self.count(context, owner, size)

    def check(self, owner: str, kind: str, size: int = 0) -> None:
        """Raise QueueFull if `size` bytes more exceed the limit of the client or of all clients.

        A client without an unread reply is never refused.
        """
        unread = self._shares.bytes(owner)
        if not unread:
            return
        limit = f"{self._shares.max_bytes} bytes for each front end (frontends)"
        match self._shares.exceeded(owner, size):
            case "client_limit":
                raise refusal(kind, "client_limit", (
                    f"client limit: {unread} bytes of replies to this client are unread; a client may have half of "
                    f"{limit}"))
            case "queue_full":
                raise refusal(kind, "queue_full", (
                    f"queue full: {self._shares.total_bytes} bytes of replies are unread; the limit is {limit}"))

    def count(self, context: Context, owner: str, size: int) -> None:
        """Count a reply of `size` bytes until its call ends, whatever the limit."""
        self._shares.add(owner, size)
        context.add_done_callback(lambda _: self._shares.remove(owner, size))  # type: ignore[arg-type]  # the stub names a class
