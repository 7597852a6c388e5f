from __future__ import annotations

import pytest

from npuserve.service.speculation.step_costs import StepCosts


def test_slow_first_steps_do_not_make_the_others_look_fast() -> None:
    """The seconds are those of 32 rows on a CPU after their prompts; steps of 64 tokens that wait would take 0.023."""
    costs = StepCosts()
    for seconds in (0.0191, 0.0155, 0.0122, 0.0123):
        costs.record(32, seconds, is_overlapped=True)
    assert costs.overlapped_seconds(32) == 0.0122
    costs.record(32, 0.0126, is_overlapped=True)
    assert costs.overlapped_seconds(32) == pytest.approx(0.0123)
