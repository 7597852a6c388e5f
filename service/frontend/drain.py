"""Drain of a front end: its clients move to other connections while their running calls end.

1. Readiness becomes NOT_SERVING, and new calls get UNAVAILABLE with RetryInfo (`Frontend.stop`).
2. After REFUSE_SECONDS, idle connections are closed (rpc/connections.py), and the others get GOAWAY. Their clients
   reconnect: to another server if there is a load balancer. A second gRPC server refuses the calls of clients that
   reconnect to this one.
3. Running calls may continue until the drain's end. The caller of `wait` then ends them with UNAVAILABLE.
4. After the last statuses are sent, idle connections are closed and the servers stop.

Each phase has a time limit (processes/child.py).
"""

from __future__ import annotations

import asyncio
import logging
import time

from npuserve.service import logs
from npuserve.service.frontend.server import Servers
from npuserve.service.processes import child

log = logging.getLogger(__name__)

SETTLE_SECONDS = 0.2
"""Minimum length of a drain: time to refuse calls that are arriving, and to send NOT_SERVING to health watchers."""
REFUSE_SECONDS = 0.8
"""Time after SETTLE_SECONDS until connections are closed, if calls run. Shorter than the RetryInfo of a refusal, 1 s,
so that the retry uses a new connection."""


class Drain:
    """Drain of the servers of one front end. It begins now. Call `wait`, then `stop`, each once.

    seconds: time that running calls have.
    """

    def __init__(self, servers: Servers, seconds: float):
        self._servers = servers
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._moving: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        """Wait until all calls have ended, at most until the drain's end. Move clients to other connections."""
        connections = self._servers.connections
        await asyncio.sleep(min(SETTLE_SECONDS, self._seconds))
        if not await connections.wait_until_idle(min(REFUSE_SECONDS, self._left())):
            self._moving = asyncio.ensure_future(self._move_clients())
            await connections.wait_until_idle(self._left())

    async def stop(self) -> None:
        """Wait until the last statuses are sent, at most FINAL_STATUS_SECONDS, and stop the servers."""
        await self._servers.connections.wait_until_idle(child.FINAL_STATUS_SECONDS)
        if self._moving:
            self._moving.cancel()
            await asyncio.wait([self._moving])  # the second server has started, or does not
        self._servers.connections.close_idle(self._servers.port)
        await self._servers.stop(child.STOP_SECONDS)

    async def _move_clients(self) -> None:
        try:
            self._servers.connections.close_idle(self._servers.port)
            # `stop` ends both servers before this grace period does.
            await self._servers.replace(self._left() + child.FRONTEND_STOP_SECONDS)
        except Exception as error:  # running calls continue
            logs.bug(log, "clients cannot move to other connections", error)

    def _left(self) -> float:
        """Return the seconds until the drain's end."""
        return self._end - time.monotonic()
