"""Drafts of one request, from earlier text, or predicted by the model's head or a smaller model: the likelier ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from npuserve.service.speculation.drafter import Drafter
from npuserve.service.speculation.predicted_drafts import PredictedDrafts

PredictedKind = Literal["mtp", "model"]
Kind = Literal["suffix", PredictedKind]
KINDS: tuple[Kind, ...] = ("suffix", "mtp", "model")
"""Where drafts come from: earlier text, the model's head, or a smaller model."""


class RequestDrafter:
    """Sources of one request's drafts, at least one.

    text: drafts from earlier text; None for none.
    predicted: drafts of the model's head or a smaller model; None for none.
    kind: kind of `predicted`.
    """

    __slots__ = ("_kind", "_predicted", "_text")

    def __init__(self, text: Drafter | None, predicted: PredictedDrafts | None, kind: PredictedKind = "mtp") -> None:
        assert text is not None or predicted is not None
        self._text = text
        self._predicted = predicted
        self._kind: PredictedKind = kind

    def extend(self, token_ids: Sequence[int], max_pause: int) -> None:
        """Append tokens of the answer, and compare the drafts of all sources with them."""
        if self._text is not None:
            self._text.extend(token_ids, max_pause)
        if self._predicted is not None:
            self._predicted.extend(token_ids)

    def replace_predicted(self, drafts: Sequence[int]) -> None:
        """Take predicted drafts that follow the last token."""
        if self._predicted is not None:
            self._predicted.replace(drafts)

    def gains(self, count: int, *, has_head: bool = True) -> list[float]:
        """Return the probability that a 1st, 2nd, ... draft is accepted, for at most `count` drafts worth a row.

        has_head: predicted drafts count.
        """
        source = self._best(count, has_head=has_head)[1]
        return [] if source is None else source.gains(count)

    def num_predicted(self, count: int) -> int:
        """Return how many of the first `count` drafts a head or a smaller model predicted."""
        source = self._best(count, has_head=True)[1] if count else None
        return count if source is not None and source is self._predicted else 0

    @property
    def eager_drafts(self) -> int:
        """Number of drafts that are computed whatever they cost."""
        return max(source.eager_drafts for source in (self._text, self._predicted) if source is not None)

    def drafts(self, count: int, *, has_head: bool = True) -> tuple[Kind, list[int]]:
        """Return at most `count` drafts of the likelier source, and their kind. has_head: see `gains`."""
        kind, source = self._best(count, has_head=has_head)
        return kind, [] if source is None else source.drafts(count)

    def _best(self, count: int, *, has_head: bool) -> tuple[Kind, Drafter | PredictedDrafts | None]:
        """Return the source of which `count` drafts have the most expected right ones; None if there is none."""
        if self._predicted is None or not has_head:
            return "suffix", self._text
        if self._text is None or sum(self._predicted.gains(count)) >= sum(self._text.gains(count)):
            return self._kind, self._predicted
        return "suffix", self._text
