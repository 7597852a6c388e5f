"""Estimates from measured steps and answers."""

from __future__ import annotations

import pytest

from npuserve.service.scheduling.latency_estimator import (
    MAX_RETRY_SECONDS,
    MIN_MARGIN_SECONDS,
    MIN_RETRY_SECONDS,
    STALE_SECONDS,
    LatencyEstimator,
)


def test_estimator_without_samples_estimates_zero() -> None:
    estimator = LatencyEstimator(64)
    assert (estimator.prefill_seconds(1000), estimator.drain_seconds(5, 2)) == (0.0, 0.0)
    assert (estimator.retry_seconds(0.0, 2), estimator.margin) == (None, MIN_MARGIN_SECONDS)


def test_estimator_separates_steps_of_few_and_of_many_prompt_tokens() -> None:
    estimator = LatencyEstimator(64)
    estimator.record_step(4, 0, 0.03)
    assert (estimator.prefill_seconds(1), estimator.prefill_seconds(640)) == (0.03, 0.03)
    estimator.record_step(4, 60, 0.64)
    assert estimator.prefill_seconds(640) == pytest.approx(6.4)
    assert estimator.prefill_seconds(1) == 0.03
    assert estimator.prefill_seconds(0) == 0.0
    assert estimator.margin == pytest.approx(2 * (0.03 + 0.1 * 0.61))


def test_estimator_many_decode_rows_leave_the_prompt_estimate_unchanged() -> None:
    estimator = LatencyEstimator(256)
    estimator.record_step(0, 256, 0.256)
    for _ in range(100):
        estimator.record_step(250, 0, 0.5)
    assert estimator.prefill_seconds(2560) == pytest.approx(2.56)
    assert estimator.step_seconds(250, 0) == pytest.approx(0.5)
    assert estimator.step_seconds(6, 250) == pytest.approx(max(0.5, 0.256))


def test_retry_seconds_follow_the_expected_ends_of_requests() -> None:
    estimator = LatencyEstimator(64)
    estimator.record_answer(4.0, 5, 10)
    assert [estimator.retry_seconds(100.0, 8) for _ in range(3)] == pytest.approx([0.5, 1.0, 1.5])
    assert estimator.retry_seconds(101.0, 8) == pytest.approx(1.0)
    assert [estimator.retry_seconds(101.0, 8) for _ in range(99)][-1] == pytest.approx(MAX_RETRY_SECONDS)
    assert estimator.retry_seconds(1000.0, 4000) == MIN_RETRY_SECONDS


def test_step_begins_when_the_step_before_it_has_ended() -> None:
    estimator = LatencyEstimator(64)
    for planned in (0.0, 0.5):
        estimator.step_planned(1, 0, planned)
    for applied in (1.0, 2.0):
        assert estimator.expected_seconds == (0.0 if applied == 1.0 else 1.0)
        estimator.step_applied(applied)
    assert estimator.token_gap == 1.0
    assert estimator.expected_seconds == 0.0


@pytest.mark.parametrize(("decodes", "prompts"), [(1, 0), (0, 64)])
def test_durations_are_forgotten_unless_a_step_in_flight_measures_them(decodes: int, prompts: int) -> None:
    estimator = LatencyEstimator(64)

    def known() -> list[bool]:
        return [estimator.step_seconds(decodes, prompts) > 0, estimator.token_gap > 0]

    estimator.step_planned(decodes, prompts, 0.0)
    estimator.step_applied(1.0)
    estimator.step_planned(decodes, prompts, 1.0)
    estimator.forget_stale(2.0 + STALE_SECONDS)
    assert known() == [True, bool(decodes)]
    estimator.step_applied(2.0 + STALE_SECONDS)
    estimator.forget_stale(3.0 + 2 * STALE_SECONDS)
    assert known() == [False, False]
