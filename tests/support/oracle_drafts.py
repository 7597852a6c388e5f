"""Drafts from a known answer: right ones, wrong ones, or some of both."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from typing import Literal

from npuserve.service.scheduling.drafting import Drafting
from npuserve.service.scheduling.sequence import Sequence
from npuserve.service.speculation.speculator import Speculator

Kind = Literal["off", "auto", "suffix", "right", "wrong", "mixed"]
KINDS: tuple[Kind, ...] = ("off", "auto", "suffix", "right", "wrong", "mixed")
MAX_DRAFTS = 6


class OracleDrafting(Drafting):
    """Drafting that knows the answers, and that spoils drafts.

    answer: returns the whole answer of a request.
    """

    def __init__(
        self, kind: Kind, answer: Callable[[Sequence], list[int]], vocabulary: int, max_drafts: int,
        state_block_size: int,
    ) -> None:
        super().__init__(Speculator("suffix"), max_drafts, state_block_size=state_block_size)
        self._kind = kind
        self._answer = answer
        self._vocabulary = vocabulary
        self._random = random.Random(0)

    def choose(
        self, running: Ordered[Sequence], budget: int, *, is_beside_prompts: bool = False
    ) -> Mapping[int, list[int]]:
        if self._steps:
            return {}
        chosen: dict[int, list[int]] = {}
        candidates, sequences, load = self._candidates(running)
        left = self._budget(load, budget, is_beside_prompts=False)
        for (_, limit, _), sequence in zip(candidates, sequences, strict=True):
            count = max(0, min(limit, left, self._random.randint(0, MAX_DRAFTS)))
            answer = self._answer(sequence)
            drafts = answer[sequence.num_generated_tokens : sequence.num_generated_tokens + count]
            drafts += [0] * (count - len(drafts))  # beyond the end of the answer
            for place in range(count):
                if self._kind == "wrong" or (self._kind == "mixed" and self._random.random() < 0.3):
                    drafts[place] = (drafts[place] + 1) % self._vocabulary
            if drafts:
                chosen[sequence.id] = drafts
                left -= len(drafts)
        return chosen


def drafting_of(
    kind: Kind, answer: Callable[[Sequence], list[int]], vocabulary: int, max_drafts: int = 64,
    state_block_size: int = 0,
) -> Drafting:
    """Return the drafting of a kind; `auto` and `suffix` are those of the server."""
    if kind == "off":
        return Drafting()
    if kind in ("auto", "suffix"):
        speculator = Speculator(kind, recomputes=state_block_size > 0)  # type: ignore[arg-type]
        return Drafting(speculator, max_drafts, state_block_size=state_block_size)
    return OracleDrafting(kind, answer, vocabulary, max_drafts, state_block_size)

