"""Steps of a group as rank 0 sends them and the other ranks launch them."""

from __future__ import annotations

from collections import deque
from typing import Any

from npuserve.npu.step import NewRequest, Row, SamplingParams, Step
from npuserve.service.ranks.lead import LeadRunner, check_followers, follow, stop_followers


class FakeGroup:
    """Group whose messages wait in memory."""

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()

    def broadcast(self, message: bytes = b"") -> bytes:
        if message:
            self.messages.append(message)
            return message
        return self.messages.popleft()


class FakeRunner:
    """Runner that times each second step."""

    def __init__(self, times: bool) -> None:
        self.launched: list[tuple[Step, bool | None]] = []
        self._times = times

    def is_timed(self, step: Step) -> bool:
        return self._times and len(self.launched) % 2 == 1

    def launch(self, step: Step, timed: bool | None = None) -> int:
        self.launched.append((step, timed))
        return len(self.launched)

    def collect(self, handle: int) -> None:
        return


def test_followers_time_the_steps_that_rank_0_times() -> None:
    """Timed kernels may compute another number of rows than a captured step, also in collectives."""
    group: Any = FakeGroup()
    lead: Any = FakeRunner(times=True)
    follower: Any = FakeRunner(times=False)
    steps = [Step([Row(7, [5, i], 2 * i, [3], True)], [NewRequest(7, [5], [], SamplingParams())] * (i == 0))
             for i in range(4)]
    runner = LeadRunner(lead, group)
    for step in steps:
        runner.launch(step)
        check_followers(group)
    stop_followers(group)
    follow(follower, group)
    assert [timed for _, timed in lead.launched] == [False, True, False, True]
    assert follower.launched == lead.launched
