"""Profiles on the local socket: messages, and the calls of a front end.

The engine runs one profile at a time, whichever front end has started it (npu/profiling/session.py).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from npuserve.npu.profile import NAME, ProfileSummary
from npuserve.service.errors import InvalidField, ProfileRefused, Unavailable, WireError, from_wire
from npuserve.service.ipc.framing import Wire

MAX_PROFILE_STEPS = 1000
MAX_PROFILE_SECONDS = 600.0
DEFAULT_STEPS = 20
DEFAULT_SECONDS = 60.0


def check_name(field: str, name: str) -> str:
    """Return the name of a profile. Raises InvalidField."""
    if not NAME.fullmatch(name):
        raise InvalidField(field, "must be up to 64 letters, digits, - and _, the first a letter or digit")
    return name


def check_steps(field: str, steps: int) -> int:
    """Return the steps of a profile. Raises InvalidField."""
    if not 1 <= steps <= MAX_PROFILE_STEPS:
        raise InvalidField(field, f"must be in [1, {MAX_PROFILE_STEPS}], got {steps}")
    return steps


def check_seconds(field: str, seconds: float) -> float:
    """Return the maximum duration of a profile. Raises InvalidField."""
    if not 0 < seconds <= MAX_PROFILE_SECONDS:
        raise InvalidField(field, f"must be in (0, {MAX_PROFILE_SECONDS:g}] seconds, got {seconds:.15g}")
    return seconds


class StartProfile(Wire, frozen=True):
    """Start a profile. The reply is a ProfileReply with its name or an error.

    name: "" for a name of the engine's choice.
    steps, seconds: bounds, after which it ends.
    """

    call: int
    name: str
    steps: int
    seconds: float


class StopProfile(Wire, frozen=True):
    """End the profile. The reply is a ProfileReply with its summary or an error, once the trace is written.

    wait: let the profile end by itself. It has bounds.

    Without a running profile, the reply has the summary of the last one.
    """

    call: int
    wait: bool


class ProfileReply(Wire, frozen=True):
    """Reply to a StartProfile or a StopProfile."""

    epoch: int
    call: int
    name: str = ""
    summary: ProfileSummary | None = None
    error: WireError | None = None


ToEngineProfile = StartProfile | StopProfile


class ProfileCalls:
    """Calls of a front end.

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
