"""Estimates from measured steps and answers."""

from __future__ import annotations

import pytest

from npuserve.service.scheduling.pace import MAX_RETRY_SECONDS, MIN_MARGIN_SECONDS, MIN_RETRY_SECONDS, Pace


def test_pace_without_samples_estimates_zero() -> None:
    pace = Pace(64)
    assert (pace.prefill_seconds(1000), pace.drain_seconds(5, 2)) == (0.0, 0.0)
    assert (pace.retry_seconds(0.0, 2), pace.margin) == (None, MIN_MARGIN_SECONDS)


def test_pace_separates_steps_of_few_and_of_many_prompt_tokens() -> None:
    pace = Pace(64)
    pace.record_step(4, 0, 0.03)
    assert (pace.prefill_seconds(1), pace.prefill_seconds(640)) == (0.03, 0.03)
    pace.record_step(4, 60, 0.64)
    assert pace.prefill_seconds(640) == pytest.approx(6.4)
    assert pace.prefill_seconds(1) == 0.03
    assert pace.prefill_seconds(0) == 0.0
    assert pace.margin == pytest.approx(2 * (0.03 + 0.1 * 0.61))


def test_pace_many_decode_rows_leave_the_prompt_estimate_unchanged() -> None:
    pace = Pace(256)
    pace.record_step(0, 256, 0.256)
    for _ in range(100):
        pace.record_step(250, 0, 0.5)
    assert pace.prefill_seconds(2560) == pytest.approx(2.56)
    assert pace.step_seconds(250, 0) == pytest.approx(0.5)
    assert pace.step_seconds(6, 250) == pytest.approx(max(0.5, 0.256))


def test_retry_seconds_follow_the_expected_ends_of_requests() -> None:
    pace = Pace(64)
    pace.record_answer(4.0, 10)
    assert [pace.retry_seconds(100.0, 8) for _ in range(3)] == pytest.approx([0.5, 1.0, 1.5])
    assert pace.retry_seconds(101.0, 8) == pytest.approx(1.0)
    assert [pace.retry_seconds(101.0, 8) for _ in range(99)][-1] == pytest.approx(MAX_RETRY_SECONDS)
    assert pace.retry_seconds(1000.0, 4000) == MIN_RETRY_SECONDS
