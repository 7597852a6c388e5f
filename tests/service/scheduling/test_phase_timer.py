from __future__ import annotations

from npuserve.service.ipc.messages import Timing
from npuserve.service.scheduling.phase_timer import PhaseTimer


def test_phases_are_disjoint_and_add_up() -> None:
    timer = PhaseTimer(10.0, None)
    timer.end_queue(10.5)
    timer.end_step(True, 0.125, 10.75)
    timer.end_step(True, 0.125, 11.0)
    timer.end_step(False, 0.25, 12.0)
    assert timer.timing == Timing(0.5, [0.25, 0.25], 1.0, 0.5, 1.0, 12.0)
    timer.end_queue(15.0)  # after a preemption
    timer.end_step(True, 0.5, 15.5)
    timer.end_step(True, 0.5, 16.0)
    timer.end_step(False, 0.5, 17.0)
    timing = timer.timing
    assert timing == Timing(3.5, [0.25, 0.25, 0.5, 0.5], 2.0, 2.0, 1.5, 17.0)
    assert timing.queue + sum(timing.prefill_chunks) + timing.decode == timing.last_step_end - 10.0
    assert timing.device + timing.host == sum(timing.prefill_chunks) + timing.decode


def test_device_is_at_most_the_elapsed_time() -> None:
    timer = PhaseTimer(10.0, None)
    timer.end_step(True, 99.0, 10.5)
    assert (timer.timing.device, timer.timing.host) == (0.5, 0.0)


def test_phases_continue_those_of_an_earlier_engine() -> None:
    """The earlier engine had not divided a quarter of a second of its computing time."""
    timer = PhaseTimer(10.0, Timing(1.0, [0.5], 0.5, 0.25, 0.5, 12.0))
    assert timer.computing_seconds == 1.0
    timer.end_queue(13.0)
    timer.end_step(False, 0.25, 13.5)
    assert timer.timing == Timing(2.0, [0.5], 1.0, 0.5, 0.75, 13.5)
