"""Estimates from measured steps and answers."""

from __future__ import annotations

import pytest

from npuserve.service.scheduling.latency_estimator import (
    MAX_RETRY_SECONDS,
    MIN_MARGIN_SECONDS,
    MIN_RETRY_SECONDS,
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
    estimator.record_answer(4.0, 10)
    assert [estimator.retry_seconds(100.0, 8) for _ in range(3)] == pytest.approx([0.5, 1.0, 1.5])
    assert estimator.retry_seconds(101.0, 8) == pytest.approx(1.0)
    assert [estimator.retry_seconds(101.0, 8) for _ in range(99)][-1] == pytest.approx(MAX_RETRY_SECONDS)
    assert estimator.retry_seconds(1000.0, 4000) == MIN_RETRY_SECONDS
