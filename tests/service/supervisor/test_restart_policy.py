"""The policy on ended children: which end is final, and how long the pause is."""

from __future__ import annotations

import errno

import pytest

from npuserve.service.ipc.child import NODE_FAULT, UNUSABLE
from npuserve.service.supervisor.restart_policy import ExitPolicy, Life, Restarts

RESTARTS = Restarts(first=1, longest=8, healthy=60, deaths=3, again=0.5, again_longest=1, deaths_at_work=4)
NO_MEMORY, NO_FILE = OSError(errno.ENOMEM, "no memory"), FileNotFoundError(errno.ENOENT, "no python")


def pauses(*lives: Life, was_ready: bool) -> list[float | None]:
    policy = ExitPolicy(RESTARTS)
    return [policy.pause(life, was_ready) for life in lives]


@pytest.mark.parametrize("life", [Life(UNUSABLE), Life(NO_FILE), Life(RuntimeError()), Life(NODE_FAULT)])
def test_exit_policy_before_the_first_ready_is_final(life: Life) -> None:
    assert pauses(life, was_ready=False) == [None]


@pytest.mark.parametrize("life", [Life(UNUSABLE), Life(NO_MEMORY), Life(NO_FILE), Life(RuntimeError())])
def test_exit_policy_after_it_waits_for_the_repair(life: Life) -> None:
    assert pauses(*[life] * 6, was_ready=True) == [1, 2, 4, 8, 8, 8]
    assert pauses(*[life] * 2000, was_ready=True)[-1] == 8


def test_exit_policy_device_fault_is_always_final() -> None:
    assert pauses(Life(NODE_FAULT), was_ready=True) == [None]


def test_exit_policy_short_of_memory_before_the_first_ready_is_tried_again() -> None:
    assert pauses(*[Life(NO_MEMORY)] * 3, was_ready=False) == [1, 2, None]


def test_exit_policy_counts_of_other_deaths_stay() -> None:
    died, repaired = Life(1), Life(UNUSABLE)
    assert pauses(died, repaired, died, repaired, died, was_ready=True) == [1, 1, 2, 1, None]


def test_exit_policy_deaths_at_work_and_a_healthy_life() -> None:
    worked, healthy = Life(-9, worked=True), Life(-9, seconds=60, worked=True)
    assert pauses(worked, worked, healthy, worked, worked, worked, was_ready=True) == [0.5, 1, 0.5, 1, 1, None]


@pytest.mark.parametrize(("life", "why"), [
    (Life(-9), "died"), (Life(-9, hung=True), "hung"), (Life(UNUSABLE), "unusable"), (Life(NO_MEMORY), "not_started")])
def test_life_why(life: Life, why: str) -> None:
    assert life.why == why
