"""Drafting by a head or a smaller model that keeps what was drafted."""

from __future__ import annotations

from collections.abc import Callable

from npuserve.service.scheduling.drafting import Drafting
from npuserve.service.scheduling.sequence import Sequence
from npuserve.service.speculation.speculator import Mode, Speculator


class RecordedDrafting(Drafting):
    """Drafting by a head. drafts: tokens of a request, and what the head drafted after them."""

    def __init__(self, depth: int, max_drafts: int, state_block_size: int = 0, mode: Mode = "mtp") -> None:
        speculator = Speculator(mode, recomputes=state_block_size > 0, depth=depth)
        super().__init__(speculator, max_drafts, state_block_size=state_block_size)
        self.drafts: list[tuple[list[int], list[int]]] = []

    def replace_predicted(self, sequence: Sequence, drafts: list[int]) -> None:  # type: ignore[override]
        super().replace_predicted(sequence, drafts)
        if drafts:
            self.drafts.append((list(sequence.token_ids), drafts))


class StoppedDrafting(RecordedDrafting):
    """Drafting by a head that some steps leave out. computes: from the number of the planned step."""

    def __init__(
        self, depth: int, max_drafts: int, computes: Callable[[int], bool], state_block_size: int = 0
    ) -> None:
        super().__init__(depth, max_drafts, state_block_size)
        self._computes = computes
        self._planned = 0

    @property
    def can_stop_head(self) -> bool:
        return True

    def plan_head(self, *, may_draft: bool) -> int | None:
        self._planned += 1
        if not self._computes(self._planned):
            self._head_depth = None
            return None
        return super().plan_head(may_draft=may_draft)
