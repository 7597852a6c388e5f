from __future__ import annotations

import random

from npuserve.service.speculation.acceptance import LENGTHS, AcceptanceRates
from npuserve.service.speculation.drafter import MIN_SHARED_MATCH, Drafter
from npuserve.service.speculation.token_history import TokenHistory


def drafter_of(tokens: list[int], shared: list[int] | None = None) -> Drafter:
    return Drafter(tokens, None if shared is None else TokenHistory(shared), AcceptanceRates())


def test_drafts_continue_the_earlier_text() -> None:
    drafter = drafter_of([1, 2, 3, 4, 5, 6, 9, 1])
    drafter.extend([2, 3], 1)
    assert drafter.match_length == 3
    assert drafter.drafts(2) == [4, 5]
    drafter.extend([4, 5], 1)
    assert drafter.match_length == 5
    assert drafter.drafts(3) == [6, 9, 1]
    drafter.extend([7], 1)
    assert drafter.drafts(3) == []


def test_drafts_of_other_answers_need_a_longer_match() -> None:
    shared = [*range(50, 60)]
    drafter = drafter_of([1, 2], shared)
    drafter.extend(shared[: MIN_SHARED_MATCH - 1], 0)
    assert drafter.drafts(2) == []
    drafter.extend(shared[MIN_SHARED_MATCH - 1 : MIN_SHARED_MATCH], 0)
    assert drafter.drafts(9) == shared[MIN_SHARED_MATCH:]
    drafter.extend(shared[MIN_SHARED_MATCH:], 0)
    assert drafter.drafts(2) == []  # at the end of the answers


def test_gains_fall_with_wrong_predictions() -> None:
    drafter = drafter_of([1, 2, 3, 4] * 10)
    drafter.extend([1, 2, 3, 4], 0)
    before = drafter.gains(8)
    assert before == sorted(before, reverse=True)
    assert before[0] > 0.5
    chance = random.Random(0)
    for _ in range(60):
        for token in (1, 2, 3, chance.randrange(100, 999)):
            drafter.extend([token], 0)
    for token in (1, 2, 3):
        drafter.extend([token], 0)
    assert drafter.gains(8)[:1] < [0.2]


def test_failed_searches_pause() -> None:
    """A text without repetition is hardly searched, and a later repetition is found."""
    drafter = drafter_of([])
    searched = 0
    search = drafter._history.find

    class Counting(TokenHistory):
        __slots__ = ()

        def find(self, end_of_text):  # type: ignore[no-untyped-def]
            nonlocal searched
            searched += 1
            return super().find(end_of_text)

    drafter._history = Counting([])
    assert search
    for token in range(500):
        drafter.extend([token], 16)
    assert searched < 70
    drafter.extend([*range(100, 130)], 16)
    for token in range(130, 160):
        drafter.extend([token], 16)
    assert drafter.match_length > 5


def test_rates_of_a_request_begin_with_those_of_the_server() -> None:
    server = AcceptanceRates()
    first = AcceptanceRates(server)
    for _ in range(200):
        first.record(2, is_right=True)
        first.record(LENGTHS[-1] + 5, is_right=False)
    assert first.rate(2) > 0.95
    assert AcceptanceRates(server).rate(2) > 0.95
    assert AcceptanceRates(server).rate(999) < 0.05
    assert AcceptanceRates().rate(2) < 0.5
