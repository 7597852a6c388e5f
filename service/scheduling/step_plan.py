"""A step while it is planned."""

from __future__ import annotations

from typing import NamedTuple

from npuserve.npu.step import PENDING, NewRequest, Row, Step
from npuserve.service.scheduling.sequence import Dropped, Sequence


class Plan(NamedTuple):
    """A step, and the requests that could not be admitted before their deadlines. A step without rows is empty."""

    step: Step
    dropped: list[Dropped]


class StepPlan:
    """Rows of a step under a token budget. The sequences are updated as their rows are added.

    budget: tokens that further rows may compute.
    rows, new: as in Step.
    dropped: as in Plan.
    """

    __slots__ = ("_block_size", "budget", "dropped", "new", "rows")

    def __init__(self, budget: int, block_size: int):
        self.budget = budget
        self.rows: list[Row] = []
        self.new: list[NewRequest] = []
        self.dropped: list[Dropped] = []
        self._block_size = block_size

    def add_row(self, sequence: Sequence, max_tokens: int) -> None:
        """Add the row of a sequence's next uncomputed tokens, at most `max_tokens`. It must have blocks for them."""
        start, tokens, block_ids = sequence.num_computed_tokens, sequence.token_ids, sequence.blocks.block_ids
        end, planned = start + max_tokens, len(tokens) + sequence.num_pending_tokens
        samples = end >= planned
        if samples:
            end = planned
            sequence.num_pending_tokens += 1
        num_blocks = -(-end // self._block_size)
        sequence.num_computed_tokens = end
        sequence.account.virtual_time += end - start
        sequence.num_steps_in_flight += 1
        self.budget -= end - start
        self.rows.append(Row(
            sequence.id, tokens[start:end] or [PENDING], start,
            block_ids if len(block_ids) == num_blocks else block_ids[:num_blocks], samples, sequence.blocks.version))

    def add_new(self, sequence: Sequence) -> None:
        """Announce a sequence to the runner."""
        request = sequence.request
        self.new.append(NewRequest(sequence.id, request.prompt_ids, request.output_ids, request.sampling))
