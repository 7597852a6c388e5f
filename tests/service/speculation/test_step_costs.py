from __future__ import annotations

import pytest

from npuserve.service.speculation.step_costs import HeadCosts, StepCosts


def test_slow_first_steps_do_not_make_the_others_look_fast() -> None:
    """The seconds are those of 32 rows on a CPU after their prompts; steps of 64 tokens that wait would take 0.023."""
    costs = StepCosts()
    for seconds in (0.0191, 0.0155, 0.0122, 0.0123):
        costs.record(32, seconds, is_overlapped=True)
    assert costs.overlapped_seconds(32) == 0.0122
    costs.record(32, 0.0126, is_overlapped=True)
    assert 0.0122 < costs.overlapped_seconds(32) < 0.01225


def test_averages_are_those_of_steps_that_little_disturbs() -> None:
    """One of four steps takes twice as long, and then all are faster."""
    costs = StepCosts()
    for step in range(200):
        costs.record(1, 0.02 if step % 4 == 3 else 0.01, is_overlapped=True)
    assert costs.overlapped_seconds(1) == pytest.approx(0.01, rel=0.1)
    for _ in range(20):
        costs.record(1, 0.006, is_overlapped=True)
    assert costs.overlapped_seconds(1) == pytest.approx(0.006, rel=0.05)


def test_single_slow_steps_of_a_number_of_tokens_do_not_count() -> None:
    """The fourth one counts, and one that takes so long that no other process explains it."""
    costs = StepCosts()
    for _ in range(4):
        costs.record(1, 1.0, is_overlapped=True)
    expected = costs.seconds_of(4)
    for _ in range(3):
        assert costs.record(4, 2.5, is_overlapped=False) == 2.5
        assert costs.seconds_of(4) == pytest.approx(expected)
    costs.record(4, 2.5, is_overlapped=False)
    assert costs.seconds_of(4) == 2.5
    costs.record(2, 1.02, is_overlapped=False)  # faster than expected
    assert costs.seconds_of(2) == 1.02
    costs.record(16, 50.0, is_overlapped=False)
    assert costs.seconds_of(16) == 50.0


def test_step_that_waits_takes_no_less_than_an_overlapped_one() -> None:
    """The overlapped ones were measured while other processes took time."""
    costs = StepCosts()
    for _ in range(8):
        costs.record(1, 1.0, is_overlapped=True)
    for _ in range(8):
        costs.record(1, 0.5, is_overlapped=False)
    assert costs.seconds_of(1) == costs.overlapped_seconds(1)


def test_head_costs_of_depths_that_were_not_measured() -> None:
    costs = HeadCosts()
    assert costs.seconds_by_depth(2) == [0.0, 0.0, 0.0]
    costs.record(1, 0.0)  # a clock may show none
    costs.record(1, 0.1)
    costs = HeadCosts()
    for seconds in (0.5, 0.1, 0.1, 0.1, 0.1):  # the first step is slow
        costs.record(1, seconds)
    assert costs.seconds_by_depth(3) == pytest.approx([0.0, 0.1, 0.2, 0.3])
    costs.record(0, 0.04)
    for _ in range(3):
        costs.record(3, 0.34)
        assert costs.seconds_by_depth(3)[3] < 0.3  # as the others suggest
    costs.record(3, 0.34)
    assert costs.seconds_by_depth(4) == pytest.approx([0.04, 0.1, 0.22, 0.34, 0.46], rel=0.05)
