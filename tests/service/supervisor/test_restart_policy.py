"""Restart policy: which exits are final, and the length of the pauses."""

from __future__ import annotations

import errno

import pytest

from npuserve.service.processes.child import EXIT_NODE_FAULT, UNUSABLE
from npuserve.service.supervisor.restart_policy import RestartPolicy, Restarts, RunEnd

RESTARTS = Restarts(
    start_pause=1, max_start_pause=8, healthy=60, deaths=3, crash_pause=0.5, max_crash_pause=1, max_crashes=4)
NO_MEMORY, NO_FILE = OSError(errno.ENOMEM, "no memory"), FileNotFoundError(errno.ENOENT, "no python")


def pauses(*ends: RunEnd, was_server_ready: bool) -> list[float | None]:
    policy = RestartPolicy(RESTARTS)
    return [policy.pause(end, was_server_ready) for end in ends]


@pytest.mark.parametrize("end", [RunEnd(UNUSABLE), RunEnd(NO_FILE), RunEnd(RuntimeError()), RunEnd(EXIT_NODE_FAULT)])
def test_restart_policy_unusable_before_ready_is_final(end: RunEnd) -> None:
    assert pauses(end, was_server_ready=False) == [None]


@pytest.mark.parametrize("end", [RunEnd(UNUSABLE), RunEnd(NO_MEMORY), RunEnd(NO_FILE), RunEnd(RuntimeError())])
def test_restart_policy_unusable_after_ready_is_retried(end: RunEnd) -> None:
    assert pauses(*[end] * 6, was_server_ready=True) == [1, 2, 4, 8, 8, 8]
    assert pauses(*[end] * 2000, was_server_ready=True)[-1] == 8


def test_restart_policy_device_fault_is_final() -> None:
    assert pauses(RunEnd(EXIT_NODE_FAULT), was_server_ready=True) == [None]


def test_restart_policy_no_memory_before_ready_is_retried() -> None:
    assert pauses(*[RunEnd(NO_MEMORY)] * 3, was_server_ready=False) == [1, 2, None]


def test_restart_policy_repairs_keep_failed_starts() -> None:
    died, repaired = RunEnd(1), RunEnd(UNUSABLE)
    assert pauses(died, repaired, died, repaired, died, was_server_ready=True) == [1, 1, 2, 1, None]


def test_restart_policy_healthy_run_resets_crashes() -> None:
    crashed, healthy = RunEnd(-9, was_ready=True), RunEnd(-9, seconds=60, was_ready=True)
    runs = (crashed, crashed, healthy, crashed, crashed, crashed)
    assert pauses(*runs, was_server_ready=True) == [0.5, 1, 0.5, 1, 1, None]


def test_restart_policy_starts_killed_from_outside_are_crashes_once_the_server_was_ready() -> None:
    killed = RunEnd(-9, seconds=30)
    assert pauses(*[killed] * 4, was_server_ready=True) == [0.5, 1, 1, None]
    assert pauses(*[killed] * 3, was_server_ready=False) == [1, 2, None]
    assert pauses(*[RunEnd(code) for code in (-9, -11, -6, 1)], was_server_ready=True) == [0.5, 1, 2, None]
    assert pauses(*[RunEnd(-9, is_hung=True)] * 3, was_server_ready=True) == [1, 2, None]


def test_restart_policy_crash_of_an_engine_that_served_has_no_further_pause() -> None:
    """One that dies as soon as it is ready has the whole pause, however long it loaded."""
    runs = [RunEnd(-9, 30, was_ready=True, ready_seconds=seconds) for seconds in (0, 0.125, 25)]
    assert pauses(*runs, was_server_ready=True) == [0.5, 0.875, 0]


HUNG_LOAD, UNUSABLE_LOAD = RunEnd(-9, 600, is_hung=True), RunEnd(UNUSABLE, 600)


@pytest.mark.parametrize("end", [HUNG_LOAD, UNUSABLE_LOAD])
def test_restart_policy_group_that_does_not_join_again_is_final(end: RunEnd) -> None:
    policy = RestartPolicy(RESTARTS, join_seconds=600)
    assert policy.pause(end, was_server_ready=True) is None
    assert policy.is_group_incomplete


@pytest.mark.parametrize(("end", "join_seconds", "was_server_ready"), [
    (HUNG_LOAD, 0, True), (UNUSABLE_LOAD, 0, True), (HUNG_LOAD, 600, False), (HUNG_LOAD, 601, True),
    (RunEnd(1, 600), 600, True), (RunEnd(-9, 600, is_hung=True, was_ready=True), 600, True),
    (RunEnd(NO_MEMORY), 600, True)])
def test_restart_policy_other_ends_of_a_group_are_restarted(
    end: RunEnd, join_seconds: float, was_server_ready: bool
) -> None:
    """No other hosts; the first load; an earlier end; a death; a hang of a complete group; no process."""
    policy = RestartPolicy(RESTARTS, join_seconds)
    assert policy.pause(end, was_server_ready) == 1
    assert not policy.is_group_incomplete


def test_restart_policy_hang_after_ready_is_a_failed_start() -> None:
    assert pauses(*[RunEnd(-9, is_hung=True, was_ready=True)] * 3, was_server_ready=True) == [1, 2, None]


@pytest.mark.parametrize(("end", "why"), [
    (RunEnd(-9), "died"), (RunEnd(-9, is_hung=True), "hung"), (RunEnd(UNUSABLE), "unusable"),
    (RunEnd(NO_MEMORY), "not_started")])
def test_run_end_why(end: RunEnd, why: str) -> None:
    assert end.why == why
