"""Choice of drafts, with simulated steps: a step's seconds are a function of its number of tokens."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from npuserve.service.speculation.acceptance import AcceptanceRates
from npuserve.service.speculation.drafter import Drafter
from npuserve.service.speculation.speculator import (
    MAX_ROW_DRAFTS,
    MAX_STEP_DRAFTS,
    Candidate,
    Speculator,
    StepTokens,
)
from npuserve.service.speculation.step_costs import StepCosts

OVERLAP = 0.05
"""Share of a step that the overlap saves."""


class KnownDrafter(Drafter):
    """Drafter with a long match. is_right: of the prediction of each token of the answer."""

    __slots__ = ("_is_right", "place")

    def __init__(self, rates: AcceptanceRates, is_right: Callable[[int], bool]) -> None:
        super().__init__([0], None, rates)
        self._is_right = is_right
        self.place = 0
        self._source, self._length = self._history, 25

    def take(self, count: int) -> int:
        """Take the tokens of a step with `count` drafts. Return their number."""
        taken = 0
        for _ in range(count + 1):
            is_right = self._is_right(self.place)
            self._rates.record(self._length, is_right)
            self.place += 1
            taken += 1
            if not is_right:
                break
        return taken


def simulate(
    rows: int, seconds_of: Callable[[int], float], is_right: Callable[[int], bool], tokens: int, noise: float = 0.0
) -> tuple[float, Speculator]:
    """Return the seconds that `rows` answers of about `tokens` tokens take, relative to overlapped steps."""
    speculator = Speculator("auto")
    drafters = [KnownDrafter(speculator.rates, is_right) for _ in range(rows)]
    candidates = [Candidate(drafter, 1000) for drafter in drafters]
    chance = random.Random(0)
    seconds = 0.0
    made = 0
    while made < rows * tokens:
        counts = [0] * rows
        waits = speculator.waits
        if waits:
            counts = speculator.choose(candidates, StepTokens(rows, rows), 512)
            waits = speculator.waits
        drafts = sum(counts)
        assert drafts <= MAX_STEP_DRAFTS
        assert max(counts) <= MAX_ROW_DRAFTS
        took = seconds_of(rows + drafts) * (1 + OVERLAP if waits else 1) * chance.uniform(1 - noise, 1 + noise)
        taken = sum(drafter.take(count) for drafter, count in zip(drafters, counts, strict=True))
        seconds += took
        made += taken
        speculator.step_applied(StepTokens(rows, rows + drafts, drafts), taken, took, is_overlapped=not waits)
        if not waits:
            speculator.review(candidates, StepTokens(rows, rows), 512)
    return seconds * rows / made / seconds_of(rows), speculator


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("slope", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("turn", [0, 3, 24, 100])
def test_wrong_and_adverse_drafts_cost_less_than_two_percent(
    rows: int, noise: float, slope: float, turn: int
) -> None:
    """turn: predictions are right and wrong for so many tokens in turn; 0: all are wrong."""
    relative, _ = simulate(
        rows, lambda tokens: 1 + slope * tokens, lambda place: bool(turn) and place // turn % 2 == 0, 2000, noise)
    assert relative < 1 / 0.98


@pytest.mark.parametrize(("rows", "slope", "most"), [(1, 0.02, 0.2), (1, 0.3, 0.7), (8, 0.02, 0.5), (32, 0.01, 0.6)])
def test_right_drafts_save_time_where_tokens_cost_little(rows: int, slope: float, most: float) -> None:
    relative, _ = simulate(rows, lambda tokens: 1 + slope * tokens, lambda place: True, 1000, 0.1)
    assert relative < most


def test_no_drafts_where_each_token_costs_a_step() -> None:
    relative, speculator = simulate(4, lambda tokens: tokens, lambda place: place % 4 > 0, 1000)
    assert relative < 1.01
    assert not speculator.waits


def test_costs_between_measured_numbers_of_tokens_are_interpolated() -> None:
    costs = StepCosts()
    for _ in range(4):
        costs.record(1, 0.010, is_overlapped=True)
        costs.record(2, 0.012, is_overlapped=False)
        costs.record(6, 0.020, is_overlapped=False)
    assert costs.overlapped_seconds(1) == pytest.approx(0.010, rel=0.3)
    assert costs.overlapped_seconds(2) is None
    seconds = costs.waiting_seconds(1, 12)
    assert seconds[3] == pytest.approx((seconds[1] + seconds[5]) / 2)
    assert seconds[11] > seconds[5]
    assert costs.seconds_of(2) == seconds[1]


def test_suffix_drafts_twice_the_match_within_the_limits() -> None:
    speculator = Speculator("suffix")
    assert speculator.waits
    drafters = [KnownDrafter(speculator.rates, lambda place: True) for _ in range(3)]
    for drafter, length in zip(drafters, (1, 3, 25), strict=True):
        drafter._length = length
    load = StepTokens(3, 3)
    candidates = [Candidate(drafter, 99) for drafter in drafters]
    assert speculator.choose(candidates, load, 512) == [0, 6, MAX_ROW_DRAFTS]
    assert speculator.choose([Candidate(drafter, 2) for drafter in drafters], load, 512) == [0, 2, 2]
    assert sum(speculator.choose(candidates, load, 9)) <= 9
