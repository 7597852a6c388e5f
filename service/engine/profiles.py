"""Profiles of the engine: messages of the front ends, and replies to the calls that wait for the end of a profile."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from npuserve.npu.profile import ProfileError, ProfileSummary
from npuserve.service import logs
from npuserve.service.errors import ProfileRefused, QueueFull, ServeError, to_wire
from npuserve.service.ipc.profile_messages import ProfileReply, StartProfile, StopProfile, ToEngineProfile

if TYPE_CHECKING:
    from npuserve.npu.profiling.session import Profiler

log = logging.getLogger(__name__)

MAX_WAITING = 64
"""Maximum calls that wait for the end of a profile. A call whose client has left counts until the end. A further
`StopProfile` ends the profile, but gets no summary."""
Send = Callable[[bytes, ProfileReply], None]


class Profiles:
    """Calls of the front ends to a profiler.

    profiler: None if the server makes no profiles.
    epoch: number of the run of the engine, in every message.
    """

    def __init__(self, profiler: Profiler | None, epoch: int):
        self._profiler = profiler
        self._epoch = epoch
        self._waiting: list[tuple[bytes, int]] = []  # front end and call

    @property
    def is_active(self) -> bool:
        """Whether `poll` has work."""
        return self._profiler is not None and self._profiler.is_active

    def handle(self, frontend: bytes, message: ToEngineProfile, send: Send) -> None:
        """Handle a message of a front end."""
        try:
            if self._profiler is None:
                raise ProfileRefused("profiles are off: the server's setting profile_dir turns them on")
            match message:
                case StartProfile(call=call, name=name, steps=steps, seconds=seconds):
                    started = self._profiler.start(name, steps, seconds)
                    logs.event(log, "profile started", steps=steps, seconds=seconds)
                    send(frontend, ProfileReply(self._epoch, call, started))
                case StopProfile(call=call, wait=wait):
                    self._stop(self._profiler, frontend, call, wait, send)
        except (ProfileError, ServeError) as error:
            refusal = error if isinstance(error, ServeError) else ProfileRefused(str(error))
            send(frontend, ProfileReply(self._epoch, message.call, error=to_wire(refusal)))

    def poll(self, send: Send) -> None:
        """End a profile that is due, and reply once its trace is written."""
        if self._profiler and self._profiler.poll():
            waiting = self._waiting
            self._waiting = []
            reply = self._last_reply(self._profiler)
            if summary := reply.summary:
                logs.event(log, "profile written", steps=summary.steps, bytes=summary.nbytes, ended=summary.ended)
            else:
                logs.event(log, "profile failed", level=logging.ERROR, error=reply.error and reply.error[1])
            for frontend, call in waiting:
                send(frontend, ProfileReply(self._epoch, call, "", reply.summary, reply.error))

    def on_disconnect(self, frontend: bytes) -> None:
        """Forget the calls of a front end that has disconnected. The profile ends within its bounds."""
        self._waiting = [waiting for waiting in self._waiting if waiting[0] != frontend]

    def close(self) -> None:
        """End without replies, at the end of the engine."""
        if self._profiler:
            self._profiler.close()

    def _stop(self, profiler: Profiler, frontend: bytes, call: int, wait: bool, send: Send) -> None:
        if not profiler.is_active:
            reply = self._last_reply(profiler)
            send(frontend, ProfileReply(self._epoch, call, "", reply.summary, reply.error))
            return
        if not wait:
            profiler.stop()
        if len(self._waiting) >= MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} calls wait for the end of the profile already, a fixed limit")
        self._waiting.append((frontend, call))

    def _last_reply(self, profiler: Profiler) -> ProfileReply:
        """Return the result of the last profile, for call 0."""
        match profiler.last:
            case ProfileSummary() as summary:
                return ProfileReply(self._epoch, 0, summary=summary)
            case ProfileError() as error:
                return ProfileReply(self._epoch, 0, error=to_wire(ProfileRefused(str(error))))
        raise ProfileRefused(
            "no profile was started since the engine's start; an engine that restarts loses its profile")
