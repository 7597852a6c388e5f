from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npuserve.service.speculation.token_history import MAX_MATCH, Match, TokenHistory


def by_search(tokens: list[int], end: list[int]) -> Match | None:
    """Return what `find` should, by comparing each position."""
    best: Match | None = None
    for position in range(1, len(tokens)):
        length = 0
        while length < min(position, len(end), MAX_MATCH) and tokens[position - 1 - length] == end[-1 - length]:
            length += 1
        if length and (best is None or length >= best.length):
            best = Match(position, length)
    return best


@given(st.lists(st.integers(0, 2), min_size=1, max_size=80), st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_find_returns_the_latest_longest_match(tokens: list[int], other: list[int]) -> None:
    history = TokenHistory(tokens)
    assert history.find(history.ids[-MAX_MATCH:]) == by_search(tokens, tokens[-MAX_MATCH:])
    assert history.find(np.array(other, np.int32)) == by_search(tokens, other)


def test_extend_keeps_the_tokens_before() -> None:
    history = TokenHistory([1, 2])
    for number in range(1000):
        history.extend([number, number + 1])
    assert len(history) == 2002
    assert history.ids.tolist() == [1, 2, *(token for number in range(1000) for token in (number, number + 1))]
    assert history.token(2001) == 1000
    assert history.token(2002) is None


@pytest.mark.parametrize(("repeats", "tokens"), [(False, [7, 8, 9]), (True, [7, 8, 9, 7, 8, 9, 7])])
def test_following_at_the_end_repeats_the_text_since_the_match(repeats: bool, tokens: list[int]) -> None:
    assert TokenHistory([7, 8, 9, 7, 8, 9]).following(3, 7, repeats=repeats) == tokens
