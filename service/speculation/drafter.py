"""Drafts of one request from text: what followed an earlier occurrence of the end of its own."""

from __future__ import annotations

from collections.abc import Sequence

from npuserve.service.speculation.acceptance import AcceptanceRates
from npuserve.service.speculation.token_history import MAX_MATCH, TokenHistory

MIN_SHARED_MATCH = 4
"""Least match in another answer. A match in the request's own text is more probable to continue."""
MIN_EAGER_MATCH = 2
"""Least match of drafts that are computed whatever they cost."""
MIN_GAIN = 0.02
"""Least probability that a draft is accepted."""


class Drafter:
    """Prediction of a request's next tokens, which it compares with those that follow.

    The match is kept as long as its predictions are right, and searched again after a wrong one. After several searches
    without a right prediction the next ones wait for up to `max_pause` tokens.

    token_ids: tokens of the request so far.
    shared: answers of the same client and cache salt; None for none.
    rates: the server's acceptance rates.
    """

    __slots__ = ("_failures", "_history", "_length", "_pause", "_position", "_rates", "_shared", "_source",
                 "num_accepted", "num_drafted")

    def __init__(self, token_ids: Sequence[int], shared: TokenHistory | None, rates: AcceptanceRates) -> None:
        self._history = TokenHistory(token_ids)
        self._shared = shared
        self._rates = AcceptanceRates(rates)
        self._source: TokenHistory | None = None  # history of the match
        self._position = 0  # of the predicted token in it
        self._length = 0  # of the match
        self._failures = 0  # wrong predictions and failed searches since the last right prediction
        self._pause = 0  # tokens until the next search
        self.num_drafted = 0
        self.num_accepted = 0

    def extend(self, token_ids: Sequence[int], max_pause: int) -> None:
        """Append tokens of the answer, and count the right and wrong predictions among them. Then search if needed."""
        for token_id in token_ids:
            self._compare(token_id, max_pause)
        self._history.extend(token_ids)
        if self._source is None:
            if self._pause > 0:
                self._pause -= len(token_ids)
            else:
                self._search(max_pause)

    def _compare(self, token_id: int, max_pause: int) -> None:
        """Continue the match with a token, or end it."""
        source = self._source
        if source is None:
            return
        predicted = source.token(self._position)
        if predicted is None:
            self._source = None
            return
        is_right = predicted == token_id
        self._rates.record(self._length, is_right)
        if is_right:
            self._position += 1
            self._length += 1
            self._failures = 0
        else:
            self._source = None
            self._fail(max_pause)

    def _search(self, max_pause: int) -> None:
        """Search the end of the text."""
        end = self._history.ids[-MAX_MATCH:]
        match = self._history.find(end)
        source = self._history
        if self._shared is not None and (match is None or match.length < MIN_SHARED_MATCH):
            other = self._shared.find(end)
            if other is not None and other.length >= MIN_SHARED_MATCH:
                match = other
                source = self._shared
        if match is None:
            self._fail(max_pause)
            return
        self._source = source
        self._position, self._length = match

    def _fail(self, max_pause: int) -> None:
        self._failures += 1
        self._pause = min(self._failures // 2, max_pause)

    def gains(self, count: int, *, has_head: bool = True) -> list[float]:
        """Return the probability that a 1st, 2nd, ... draft is accepted, for at most `count` drafts worth a row.

        has_head: drafts of a head would count.
        """
        if self._source is None:
            return []
        gains: list[float] = []
        gain = 1.0
        for length in range(self._length, self._length + count):
            gain *= self._rates.rate(length)
            if gain < MIN_GAIN:
                break
            gains.append(gain)
        return gains

    def num_predicted(self, count: int) -> int:
        """Return 0: no draft is predicted by a head or a smaller model."""
        return 0

    @property
    def eager_drafts(self) -> int:
        """Number of drafts that are computed whatever they cost: twice the length of the match."""
        return 2 * self.match_length if self.match_length >= MIN_EAGER_MATCH else 0

    @property
    def match_length(self) -> int:
        """Length of the match; 0 without one."""
        return self._length if self._source is not None else 0

    def drafts(self, count: int) -> list[int]:
        """Return at most `count` predicted tokens."""
        if self._source is None or not count:
            return []
        return self._source.following(self._position, count, repeats=self._source is self._history)
