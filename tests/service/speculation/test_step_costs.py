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
    assert costs.overlapped_seconds(32) == pytest.approx(0.0123)


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
    costs.record(3, 0.34)
    assert costs.seconds_by_depth(4) == pytest.approx([0.04, 0.1, 0.22, 0.34, 0.46], rel=0.05)
