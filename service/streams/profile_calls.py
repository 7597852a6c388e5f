"""Calls of a front end to the engine about profiles."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from npuserve.npu.profile import ProfileSummary
from npuserve.service.errors import ProfileRefused, Unavailable, from_wire
from npuserve.service.ipc.profile_messages import ProfileReply, StartProfile, StopProfile, ToEngineProfile


class ProfileCalls:
    """Calls of one front end.

    folder: profile_dir of the server; "" if it makes no profiles.
    send: sends a message to the engine; returns False if none is connected.
    """

    def __init__(self, folder: str, send: Callable[[ToEngineProfile], bool]):
        self._folder = folder
        self._send = send
        self._waiting: dict[int, asyncio.Future[ProfileReply]] = {}
        self._numbers = itertools.count(1)

    async def start(self, name: str, steps: int, seconds: float) -> str:
        """Start a profile and return its name. Raises ProfileRefused and Unavailable."""
        return (await self._call(StartProfile(next(self._numbers), name, steps, seconds))).name

    async def stop(self, wait: bool) -> ProfileSummary:
        """End the profile, or wait for its end. Return its summary. Raises ProfileRefused and Unavailable."""
        reply = await self._call(StopProfile(next(self._numbers), wait))
        assert reply.summary
        return reply.summary

    def receive(self, reply: ProfileReply) -> None:
        """Handle a message of the engine. Replies to cancelled calls are ignored."""
        waiting = self._waiting.get(reply.call)
        if waiting and not waiting.done():
            if reply.error:
                waiting.set_exception(from_wire(reply.error))
            else:
                waiting.set_result(reply)

    def on_disconnect(self) -> None:
        """Fail all calls: a profile ends with its engine."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(
                    Unavailable("the engine ended before it replied; its profile, if one was running, is lost"))

    async def _call(self, message: ToEngineProfile) -> ProfileReply:
        if not self._folder:
            raise ProfileRefused(
                "profiles are off: the server's setting profile_dir, a folder for traces, turns them on")
        reply: asyncio.Future[ProfileReply] = asyncio.get_running_loop().create_future()
        self._waiting[message.call] = reply
        try:
            if not self._send(message):
                raise Unavailable("the engine is not connected")
            return await reply
        finally:
            del self._waiting[message.call]
