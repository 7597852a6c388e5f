"""Steps of a group as rank 0 sends them and the other ranks launch them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

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
        self.sampled: list[tuple[int, dict[int, list[int]]]] = []  # handle, masks
        self.collected: list[int] = []  # handles
        self._times = times

    def is_timed(self, step: Step) -> bool:
        return self._times and len(self.launched) % 2 == 1

    def launch(self, step: Step, timed: bool | None = None) -> int:
        self.launched.append((step, timed))
        return len(self.launched)

    def sample(self, handle: int, masks: Mapping[int, np.ndarray[Any, Any]]) -> None:
        self.sampled.append((handle, {request: mask.tolist() for request, mask in masks.items()}))

    def collect(self, handle: int) -> None:
        self.collected.append(handle)


def test_followers_time_the_steps_that_rank_0_times() -> None:
    """Timed kernels may compute another number of rows than a captured step, also in collectives."""
    group: Any = FakeGroup()
    lead: Any = FakeRunner(times=True)
    follower: Any = FakeRunner(times=False)
    steps = [Step([Row(7, [5, i], 2 * i, [3], 1)], [NewRequest(7, [5], [], SamplingParams())] * (i == 0))
             for i in range(4)]
    runner = LeadRunner(lead, group)
    for step in steps:
        runner.launch(step)
        check_followers(group)
    stop_followers(group)
    follow(follower, group)
    assert [timed for _, timed in lead.launched] == [False, True, False, True]
    assert follower.launched == lead.launched


def test_followers_sample_the_last_step_and_collect_the_steps_before_the_last_two() -> None:
    group: Any = FakeGroup()
    lead: Any = FakeRunner(times=False)
    follower: Any = FakeRunner(times=False)
    runner = LeadRunner(lead, group)
    for i in range(4):
        handle = runner.launch(Step([Row(7, [5], i, [3], 1)], []))
        runner.sample(handle, {7: np.array([i, -1], np.int32), 8: np.array([2, 3], np.int32)})
    stop_followers(group)
    follow(follower, group)
    assert follower.sampled == lead.sampled
    assert [handle for handle, _ in follower.sampled] == [1, 2, 3, 4]
    assert follower.collected == [1, 2]
