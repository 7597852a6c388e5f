"""Drafts of a model's head, and the choice between them and those from text."""

from __future__ import annotations

import pytest

from npuserve.service.speculation.acceptance import AcceptanceRates
from npuserve.service.speculation.drafter import Drafter
from npuserve.service.speculation.predicted_drafts import FIRST_RATES_BY_DEPTH, PredictedDrafts
from npuserve.service.speculation.request_drafter import RequestDrafter
from npuserve.service.speculation.speculator import MAX_PROBE_STEPS, Mode, Speculator


def head(depth: int = 3) -> PredictedDrafts:
    return PredictedDrafts(depth, AcceptanceRates(first=FIRST_RATES_BY_DEPTH))


def test_drafts_that_are_left_follow_right_ones() -> None:
    drafts = head()
    assert drafts.drafts(3) == []
    drafts.replace([5, 6, 7])
    assert (drafts.drafts(2), drafts.eager_drafts) == ([5, 6], 3)
    drafts.extend([5])
    assert drafts.drafts(3) == [6, 7]
    drafts.extend([6, 7, 8])
    assert drafts.drafts(3) == []
    drafts.replace([5, 6, 7])
    drafts.extend([5, 9])
    assert (drafts.drafts(3), drafts.eager_drafts) == ([], 0)


def test_gains_are_measured_by_depth() -> None:
    """The second draft is always wrong, the first one right. Rates of the third are those before any measurement."""
    drafts = head()
    first, second, third = drafts.gains(3)
    assert (first, second, third) == pytest.approx((0.7, 0.7 * 0.65, 0.7 * 0.65 * 0.6))
    for _ in range(200):
        drafts.replace([1, 2, 3])
        drafts.extend([1, 9])
    first, second, third = drafts.gains(3)
    assert first > 0.98
    assert second < 0.05
    assert third == pytest.approx(second * 0.6)
    drafts.replace([1, 2, 3])
    drafts.extend([1])
    assert drafts.gains(3) == pytest.approx([second / first, third / first])
    assert head(1).gains(3) == pytest.approx([0.7])
    assert head().gains(2) == pytest.approx([0.7, 0.7 * 0.65])


def test_requests_begin_with_the_rates_of_the_server() -> None:
    server = AcceptanceRates(first=FIRST_RATES_BY_DEPTH)
    drafts = PredictedDrafts(1, server)
    for _ in range(100):
        drafts.replace([1])
        drafts.extend([2])
    assert PredictedDrafts(1, server).gains(1)[0] < 0.05


def test_likelier_source_drafts() -> None:
    text = Drafter([1, 2, 3, 4, 5, 6, 7, 8, 9], None, AcceptanceRates())
    drafter = RequestDrafter(text, head())
    drafter.replace_predicted([30, 40, 50])
    assert drafter.drafts(3) == ("mtp", [30, 40, 50])
    drafter.extend([1, 2, 3, 4, 5], 1)
    assert text.match_length == 5
    drafter.replace_predicted([30, 40, 50])
    assert drafter.gains(3) == text.gains(3)
    assert drafter.drafts(3) == ("suffix", [6, 7, 8])
    assert drafter.eager_drafts == 10
    drafter.extend([80], 1)
    drafter.replace_predicted([81])
    assert drafter.drafts(3) == ("mtp", [81])


def test_one_source_alone() -> None:
    alone = RequestDrafter(None, head())
    alone.replace_predicted([3])
    alone.extend([3, 4], 1)
    assert alone.drafts(2) == ("mtp", [])
    of_text = RequestDrafter(Drafter([1, 2, 1], None, AcceptanceRates()), None)
    of_text.extend([2], 1)
    of_text.replace_predicted([9])
    assert of_text.drafts(2) == ("suffix", [1, 2])


@pytest.mark.parametrize(("mode", "depth"), [("mtp", 2), ("model", 2), ("suffix", 0)])
def test_drafts_are_as_deep_as_possible_without_auto(mode: Mode, depth: int) -> None:
    speculator = Speculator(mode, depth=depth)
    assert {speculator.head_depth() for _ in range(100)} == {depth}


def test_predicted_drafts_are_few_while_rows_wait_for_none() -> None:
    """One after each row until it is known how many are right, then none; as many as possible once rows wait."""
    speculator = Speculator("auto", depth=2)
    assert {speculator.head_depth() for _ in range(100)} == {1}
    assert speculator.head
    speculator.head._trial_begin = None
    assert {speculator.head_depth() for _ in range(100)} == {0}
    speculator.waits = True
    assert {speculator.head_depth() for _ in range(100)} == {2}
    speculator._used_depth = 1.0
    depths = [speculator.head_depth() for _ in range(9 + 10 * (MAX_PROBE_STEPS + 1))]
    assert [step for step, depth in enumerate(depths) if depth == 2][:5] == [0, 3, 8, 17, 34]  # rarer and rarer
    assert depths[200:].count(2) == len(depths[200:]) // (MAX_PROBE_STEPS + 1)
    speculator.head.stop()
    assert speculator.head_depth() is None
