"""Profiles in the engine: who gets which reply, and that nobody is waited for."""

from __future__ import annotations

from npuserve.npu.profile import ProfileError, ProfileSummary
from npuserve.service.engine.profiles import MAX_WAITING, Profiles
from npuserve.service.errors import from_wire
from npuserve.service.ipc.profile_messages import ProfileReply, StartProfile, StopProfile

SUMMARY = ProfileSummary("p", "p.trace.json", 5, 3, 2, 0.5, 0.25, "steps", True, "cpu", [])


class FakeProfiler:
    """Profiler whose profile ends when `ends` is set."""

    def __init__(self) -> None:
        self.last: ProfileSummary | ProfileError | None = None
        self.is_active = False
        self.ends: ProfileSummary | ProfileError | None = None
        self.stops = 0
        self.closed = False

    def start(self, name: str, steps: int, seconds: float) -> str:
        if self.is_active:
            raise ProfileError("a profile is running already")
        self.is_active = True
        return name or f"profile of {steps} steps, {seconds} s"

    def stop(self) -> None:
        self.stops += 1

    def poll(self) -> bool:
        if self.ends is None:
            return False
        self.last, self.ends, self.is_active = self.ends, None, False
        return True

    def close(self) -> None:
        self.closed = True


class Sent(list[tuple[bytes, ProfileReply]]):
    def __call__(self, frontend: bytes, reply: ProfileReply) -> None:
        self.append((frontend, reply))

    def take(self) -> list[tuple[bytes, int, str]]:
        """Return (front end, call, error or path or name) of the replies, and forget them."""
        found = [(frontend, reply.call, reply.error[1] if reply.error else reply.summary.path if reply.summary
                  else reply.name) for frontend, reply in self]
        self.clear()
        return found


def test_start_is_answered_at_once_and_waiting_stops_at_the_end() -> None:
    profiler, sent = FakeProfiler(), Sent()
    profiles = Profiles(profiler, 4)
    assert not profiles.is_active
    profiles.handle(b"a", StartProfile(1, "", 3, 2.0), sent)
    assert sent.take() == [(b"a", 1, "profile of 3 steps, 2.0 s")]
    assert profiles.is_active
    profiles.handle(b"b", StopProfile(8, wait=True), sent)
    profiles.poll(sent)
    assert (sent, profiler.stops) == ([], 0)
    profiles.handle(b"a", StopProfile(2, wait=False), sent)
    assert (sent, profiler.stops) == ([], 1)  # the trace is not written
    profiler.ends = SUMMARY
    profiles.poll(sent)
    assert [reply.epoch for _, reply in sent] == [4, 4]
    assert sent.take() == [(b"b", 8, "p.trace.json"), (b"a", 2, "p.trace.json")]
    profiles.handle(b"c", StopProfile(1, wait=False), sent)
    assert sent.take() == [(b"c", 1, "p.trace.json")]  # of the last profile


def test_refusals_name_the_reason() -> None:
    sent = Sent()
    Profiles(None, 1).handle(b"a", StartProfile(1, "", 3, 2.0), sent)
    profiler = FakeProfiler()
    profiles = Profiles(profiler, 1)
    profiles.handle(b"a", StopProfile(2, wait=True), sent)
    profiles.handle(b"a", StartProfile(3, "x", 3, 2.0), sent)
    profiles.handle(b"b", StartProfile(4, "y", 3, 2.0), sent)
    errors = [reply.error for _, reply in sent]
    assert [error and error[0] for error in errors] == ["ProfileRefused", "ProfileRefused", None, "ProfileRefused"]
    texts = [from_wire(error).message for error in errors if error]
    assert "profile_dir" in texts[0]
    assert "no profile was started since the engine's start" in texts[1]
    assert texts[2] == "a profile is running already"


def test_failed_trace_is_the_reply_and_that_of_later_stops() -> None:
    profiler, sent = FakeProfiler(), Sent()
    profiles = Profiles(profiler, 1)
    profiles.handle(b"a", StartProfile(1, "x", 3, 2.0), sent)
    profiles.handle(b"a", StopProfile(2, wait=True), sent)
    profiler.ends = ProfileError("no space left")
    profiles.poll(sent)
    profiles.handle(b"a", StopProfile(3, wait=True), sent)
    assert sent.take() == [(b"a", 1, "x"), (b"a", 2, "no space left"), (b"a", 3, "no space left")]


def test_waiting_calls_are_bounded_and_lost_front_ends_get_no_reply() -> None:
    profiler, sent = FakeProfiler(), Sent()
    profiles = Profiles(profiler, 1)
    profiles.handle(b"a", StartProfile(0, "x", 3, 2.0), sent)
    for call in range(MAX_WAITING):
        profiles.handle(b"a" if call else b"b", StopProfile(call, wait=True), sent)
    profiles.handle(b"b", StopProfile(99, wait=False), sent)
    assert profiler.stops == 1  # the profile ends although this call gets no summary
    refusal = f"{MAX_WAITING} calls wait for the end of the profile already, a fixed limit"
    assert sent.take()[1:] == [(b"b", 99, refusal)]
    profiles.on_disconnect(b"a")
    profiler.ends = SUMMARY
    profiles.poll(sent)
    assert sent.take() == [(b"b", 0, "p.trace.json")]
    profiles.close()
    assert profiler.closed
