"""Messages about profiles on the local socket.

The engine runs one profile at a time, whichever front end has started it (npu/profiling/session.py).
"""

from __future__ import annotations

from npuserve.npu.profile import ProfileSummary
from npuserve.service.errors import WireError
from npuserve.service.ipc.framing import Wire


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
