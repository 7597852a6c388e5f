from __future__ import annotations

import pytest

from npuserve.service.speculation.acceptance import AcceptanceRates
from npuserve.service.speculation.head_switch import (
    MAX_IDLE_STEPS,
    MAX_TRIAL_STEPS,
    MIN_STOPPED_STEPS,
    MIN_TRIAL_DRAFTS,
    HeadSwitch,
)


def test_predictions_after_a_pause_count_more_than_earlier_ones() -> None:
    """Those of the server, and those of a request that was there before."""
    server = AcceptanceRates()
    request = AcceptanceRates(server)
    for _ in range(300):
        request.record(1, False)
    before = request.rate(1)
    server.forget()
    for _ in range(MIN_TRIAL_DRAFTS):
        request.record(1, True)
    assert before < 0.02
    assert server.rate(1) > 0.45
    assert request.rate(1) > 0.45
    assert server.num_recorded == 300 + MIN_TRIAL_DRAFTS


def test_trial_ends_once_enough_drafts_are_compared() -> None:
    rates = AcceptanceRates()
    head = HeadSwitch(rates)
    for _ in range(MIN_TRIAL_DRAFTS - 1):
        rates.record(1, False)
    head.judge(0.5)
    assert head.is_on
    assert head.is_on_trial
    rates.record(1, False)
    head.judge(0.5)
    assert not head.is_on
    assert not head.is_on_trial


@pytest.mark.parametrize("waits", [False, True])
def test_trial_without_drafts_ends(waits: bool) -> None:
    """Rows may wait for drafts from text."""
    head = HeadSwitch(AcceptanceRates())
    for _ in range(MAX_TRIAL_STEPS):
        assert head.is_on
        head.count_step(waits=waits)
    assert not head.is_on


def test_head_that_no_step_needs_is_stopped_and_tried_again_later() -> None:
    rates = AcceptanceRates()
    head = HeadSwitch(rates)
    head.costs.record(1, 0.25)
    for _ in range(MIN_TRIAL_DRAFTS):
        rates.record(1, True)
    head.judge(1.2)
    for waits in (*[False] * (MAX_IDLE_STEPS - 1), True, *[False] * MAX_IDLE_STEPS):
        assert head.is_on
        assert head.trial_cost() is None
        head.count_step(waits=waits)
    assert not head.is_on
    for _ in range(MIN_STOPPED_STEPS):
        assert head.trial_cost() is None
        head.count_step(waits=False)
    assert head.trial_cost() == MIN_TRIAL_DRAFTS * 0.25
    head.begin_trial()
    assert head.is_on_trial
