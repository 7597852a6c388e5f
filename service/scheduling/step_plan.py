"""A step while it is planned.

Overlap. A step may be planned before the one before it is applied; at most two are in flight. `Scheduler.schedule`
updates the number of computed tokens, `Scheduler.apply` the sampled ones. A request whose next token is being sampled
may compute that token as PENDING, at a known position, so it is at most one token ahead of the host. Lengths are known,
so no step exceeds max_tokens. The end of a request by its token is known one step late, and the result of that step's
row is discarded.

A freed block is given to another request at once, though a step in flight may still use it. This is safe because steps
run in the order of their plans:

    in flight: old owner's last reads and writes ──►│ later: new owner writes slots, and reads only what it wrote

and no other request reads what a step in flight writes: `apply` registers a block, which makes it shareable, only after
applied steps have written all its slots, and the rows of a request write ever higher positions. Slots of rejected
drafts are written again; a block with such slots is not registered, since only accepted tokens count as computed. No
other step is in flight when a row has drafts, so its request is at no time ahead of them. With a fixed state, a row
with a rejected draft is undone: the next row computes its valid tokens again, from the state before it.
"""

from __future__ import annotations

from typing import NamedTuple

from npuserve.npu.step import PENDING, NewRequest, Row, Step
from npuserve.service.scheduling.deadlines import DroppedRequest
from npuserve.service.scheduling.head_contexts import NO_HEAD, HeadContexts
from npuserve.service.scheduling.prompt_bound import StepBounds
from npuserve.service.scheduling.sequence import Sequence
from npuserve.service.scheduling.state_slots import NO_SLOT, StateSlots


class Plan(NamedTuple):
    """A step, and what belongs to it. A step without rows is empty.

    dropped: requests that could not be admitted before their deadlines.
    constrained: requests whose rows sample under a constraint.
    """

    step: Step
    dropped: list[DroppedRequest]
    constrained: list[Sequence]


class StepBuilder:
    """Builder of a step's rows under a token budget. The sequences are updated as their rows are added.

    budget: tokens that further rows may compute.
    slots: slots of fixed state; None for a model without.
    predicts: most tokens that the model's head or a smaller model drafts after a row; None: these compute no row.
    heads: contexts of a head that is not computed in all steps; None for none.
    rows, new: as in Step.
    dropped, constrained: as in Plan.
    """

    __slots__ = ("_block_size", "_head_start", "_heads", "_predicts", "_reserved", "_slots", "budget", "constrained",
                 "dropped", "new", "rows")

    def __init__(
        self, budget: int, block_size: int, slots: StateSlots | None = None, predicts: int | None = None,
        heads: HeadContexts | None = None,
    ):
        self.budget = budget
        self.rows: list[Row] = []
        self.new: list[NewRequest] = []
        self.dropped: list[DroppedRequest] = []
        self.constrained: list[Sequence] = []
        self._block_size = block_size
        self._slots = slots
        self._predicts = predicts or 0
        self._head_start = NO_HEAD if predicts is None else 0
        self._heads = heads
        self._reserved = StepBounds(0, 0)  # tokens of the budget that prompts may not take

    @property
    def has_streams(self) -> bool:
        """True if a row samples."""
        return any(row.samples for row in self.rows)

    def bound_prompts(self, bounds: StepBounds) -> None:
        """Limit the tokens of the prompts that are added from now on."""
        self._reserved = StepBounds(
            max(0, self.budget - bounds.pooled), max(0, self.budget - bounds.generating))

    def prompt_budget(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence's prompt may be added; not above 0 for none."""
        return self.budget - (self._reserved.pooled if sequence.pools else self._reserved.generating)

    def add_row(self, sequence: Sequence, max_tokens: int, drafts: list[int] | None = None) -> None:
        """Add the row of a sequence's next uncomputed tokens, at most `max_tokens`. It must have blocks for them.

        drafts: tokens to compute after the last known one, which the row then includes. It must have blocks for these,
            too, a spare slot if it has slots, and no step in flight.
        """
        start = sequence.num_computed_tokens
        tokens = sequence.token_ids
        planned = len(tokens) + sequence.num_pending_tokens
        end = start + max_tokens
        if end > planned:
            end = planned
        takes_state = is_expected = False
        if self._slots is not None and (end < planned or sequence.checkpoint_positions):
            end, takes_state, is_expected = self._end_at_checkpoint(sequence, end, planned)
        samples = int(end == planned and not sequence.pools)
        pools = sequence.pools and end == planned
        is_constrained = False
        if samples:
            sequence.num_pending_tokens += 1
            if sequence.matcher is not None:
                is_constrained = True
                self.constrained.append(sequence)
        sequence.num_computed_tokens = end
        row_tokens = tokens[start:end] or [PENDING]
        if drafts:
            row_tokens += drafts
            end += len(drafts)
            samples += len(drafts)
            sequence.has_drafts = True
        predicts = self._num_predicted(sequence, planned, end) if samples and self._predicts else 0
        num_blocks = -(-(end + predicts) // self._block_size)
        sequence.account.virtual_time += end - start
        sequence.num_steps_in_flight += 1
        self.budget -= end - start
        block_ids = sequence.blocks.block_ids
        if len(block_ids) > num_blocks:
            block_ids = block_ids[:num_blocks]
        state_source = state_slot = NO_SLOT
        if self._slots is not None:
            is_retractable = is_constrained or bool(drafts)
            state_source, state_slot = self._plan_state(self._slots, sequence, start, is_retractable=is_retractable)
            if samples and not is_retractable and start > 0 and end % self._block_size == 0:
                takes_state = is_expected = True  # of the answer, or of a prompt that fills its last block
            if takes_state:
                self._slots.take(sequence.slots, end, is_expected=is_expected)
        next_id = 0 if samples or pools else tokens[end]
        head_start = self._heads.plan(sequence, start, end) if self._heads is not None else self._head_start
        self.rows.append(Row(
            sequence.id, row_tokens, start, block_ids, samples, sequence.blocks.version, is_constrained, state_slot,
            state_source, pools=pools, next_id=next_id, predicts=predicts, head_start=head_start))

    def _num_predicted(self, sequence: Sequence, planned: int, end: int) -> int:
        """Return the number of tokens that the model's head or a smaller model drafts after a row.

        planned: number of the sequence's tokens before the row's samples.
        end: end of the row. Drafts write positions from here on, for which blocks must be there.
        """
        if not sequence.request.speculate:
            return 0
        last = sequence.num_prompt_tokens + sequence.request.max_tokens  # number of tokens at most
        covered = len(sequence.blocks.block_ids) * self._block_size
        return max(0, min(self._predicts, last - planned - 2, min(last, covered) - end))

    def _plan_state(
        self, slots: StateSlots, sequence: Sequence, start: int, *, is_retractable: bool
    ) -> tuple[int, int]:
        """Return the slots that a row from `start` on reads and writes. Keep the state of a retractable row before it,
        which can no longer be retracted, at a block boundary."""
        may_be_retractable = sequence.matcher is not None or sequence.drafter is not None
        if may_be_retractable and start >= sequence.num_prompt_tokens and start % self._block_size == 0:
            slots.take(sequence.slots, start)
        return sequence.slots.plan_row(start, is_retractable=is_retractable)

    def _end_at_checkpoint(self, sequence: Sequence, end: int, planned: int) -> tuple[int, bool, bool]:
        """Return the end of a row that would end at `end`, whether it takes a state, and whether that is expected.

        planned: number of the sequence's tokens. A row that ends before them, far from the last checkpoint, ends at a
            block boundary and takes a state on suspicion.
        """
        assert self._slots is not None
        start = sequence.num_computed_tokens
        positions = sequence.checkpoint_positions
        while positions and positions[0] <= start:
            del positions[0]
        if positions and positions[0] <= end:
            return positions[0], True, True
        boundary = end // self._block_size * self._block_size
        if end < planned and boundary > start and boundary - sequence.slots.last_position >= self._slots.spacing.middle:
            return boundary, True, False
        return end, False, False

    def add_new(self, sequence: Sequence) -> None:
        """Announce a sequence to the runner."""
        request = sequence.request
        self.new.append(NewRequest(sequence.id, request.prompt_ids, request.output_ids, request.sampling))
