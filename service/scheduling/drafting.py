"""Drafts of the scheduler's requests: which may have some, and when rows wait for the step before.

Rules and method: the docstring of service/speculation.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Ordered
from typing import Literal, NamedTuple

from npuserve.npu.step import Row, Step
from npuserve.service.scheduling.sequence import Sequence
from npuserve.service.speculation.drafter import Drafter
from npuserve.service.speculation.predicted_drafts import PredictedDrafts
from npuserve.service.speculation.request_drafter import KINDS, Kind, RequestDrafter
from npuserve.service.speculation.speculator import MAX_ROW_DRAFTS, Candidate, Speculator, StepTokens

MIN_SHARED_ANSWER = 16
"""Least tokens of an answer that later requests search."""
MAX_CONSTRAINED_DRAFTS = 8
"""Most drafts of a row whose masks the engine's loop computes, while the device computes the row."""
MAX_KNOWN_TOKENS = 1 + MAX_ROW_DRAFTS
"""Most known tokens of a row with drafts: those of a row that is computed again, or forced ones."""
PROMPT_SHARE = 8
"""Beside prompts, drafts take at most one of so many tokens of a step's budget."""
HeadState = Literal["computed", "stopped"]
HEAD_STATES: tuple[HeadState, ...] = ("computed", "stopped")
"""Whether a step computes the model's head or a smaller model for drafts."""
REASONS = "request", "device"
"""Why a request has no drafts: it asked for none, or the device computes rows with drafts slowly."""


class _StepInFlight(NamedTuple):
    """A planned step.

    rows: number of its rows.
    drafts: number of its drafts.
    tokens: number of tokens that it computes, drafts among them.
    is_pure: it computes decode rows and drafts alone.
    is_overlapped: it was planned while another was in flight, or has no drafts where none can be.
    is_continued: it was planned as soon as the step before was applied.
    head_depth: number of tokens that a head drafts after each row; None if it is not computed.
    """

    rows: int
    drafts: int
    tokens: int
    is_pure: bool
    is_overlapped: bool
    is_continued: bool
    head_depth: int | None


class Drafting:
    """Owner of the requests' drafters.

    speculator: None for no drafts.
    max_drafts: most drafts of a step that the runner can compute; 0 for none.
    max_drafted_samples: most samples of a step after which the runner can draft; None for any number.
    obstacle: one of REASONS if no request may have drafts; "" otherwise.
    overlaps: two steps may be in flight. If not, steps without drafts are what others are compared with.
    state_block_size: block size of a model with fixed state, 0 for one without. A row with drafts ends at a block
        boundary at most, so that the state there can become a checkpoint.
    clock: processor seconds of this thread, to measure searches; other processes and threads do not count.

    drafted_by_kind, accepted_by_kind: number of drafts since the start that steps computed, and that were accepted.
    head_steps: number of steps since the start with rows, with and without a head or smaller model; none counts where
        there is none.
    """

    def __init__(
        self,
        speculator: Speculator | None = None,
        max_drafts: int = 0,
        obstacle: str = "",
        overlaps: bool = True,
        state_block_size: int = 0,
        clock: Callable[[], float] = time.thread_time,
        max_drafted_samples: int | None = None,
    ) -> None:
        self.speculator = speculator
        self.drafted_by_kind: Counter[Kind] = Counter()
        self.accepted_by_kind: Counter[Kind] = Counter()
        self.head_steps: Counter[HeadState] = Counter()
        self._lengths: Counter[tuple[Kind, int]] = Counter()  # rows with drafts by kind and accepted drafts
        self._kinds: dict[int, Kind] = {}  # sequence id -> kind of the drafts of its row in flight
        self._skipped: Counter[str] = Counter()  # tokens of requests without drafts, by reason
        self._max_drafts = max_drafts
        self._max_drafted_samples = max_drafted_samples
        self._obstacle = obstacle
        self._overlaps = overlaps
        self._state_block_size = state_block_size
        self._clock = clock
        self._steps: deque[_StepInFlight] = deque()
        self._tokens = 0  # appended by the step that is being applied
        self._accepted_before = 0  # drafts that the steps before had accepted
        self._last_applied = 0.0
        self._was_busy = False  # requests ran when the last step was applied
        self._head_depth: int | None = 0  # of the step that is being planned

    @property
    def drafted(self) -> int:
        """Number of drafts of all kinds since the start that steps computed."""
        return self.drafted_by_kind.total()

    @property
    def accepted(self) -> int:
        """Number of drafts of all kinds since the start that were accepted."""
        return self.accepted_by_kind.total()

    @property
    def seconds(self) -> float:
        """Time of searches and choices since the start."""
        return self.speculator.drafting_seconds if self.speculator is not None else 0.0

    def take_lengths(self) -> Counter[tuple[Kind, int]]:
        """Return the number of rows with drafts by the drafts' kind and number of accepted ones, since the last
        call."""
        lengths = self._lengths
        self._lengths = Counter()
        return lengths

    def take_skipped(self) -> Counter[str]:
        """Return the number of tokens of requests that cannot have drafts, by reason, since the last call."""
        skipped = self._skipped
        self._skipped = Counter()
        return skipped

    def must_wait(self, running: Iterable[Sequence]) -> bool:
        """Return whether the next step is planned only after those in flight are applied.

        running: requests that may have rows with drafts.
        """
        if self.speculator is None or not self._steps:
            return False
        if any(step.drafts for step in self._steps):
            return True
        return self.speculator.waits and any(sequence.drafter is not None for sequence in running)

    @property
    def can_stop_head(self) -> bool:
        """Whether some steps are computed without the model's head. Without a speculator all are."""
        return self.speculator is not None and self.speculator.head is not None

    def plan_head(self, *, may_draft: bool) -> int | None:
        """Return the number of tokens that a head or a smaller model drafts after each row of the next step.

        None: the head is not computed. may_draft: False for no drafts.
        """
        depth = self.speculator.head_depth() if self.speculator is not None else None
        self._head_depth = depth if may_draft or depth is None else 0
        return self._head_depth

    def choose(
        self, running: Ordered[Sequence], budget: int, *, is_beside_prompts: bool = False
    ) -> Mapping[int, list[int]]:
        """Return the drafts of the next step by sequence id.

        running: requests that may have rows with drafts.
        budget: tokens that the step may compute.
        is_beside_prompts: the step may compute prompts, too.
        """
        if self.speculator is None or self._steps or not running:
            return {}
        began = self._clock()
        candidates, sequences, load = self._candidates(running)
        drafts: dict[int, list[int]] = {}
        if candidates:
            most = self._budget(load, budget, is_beside_prompts=is_beside_prompts)
            counts = self.speculator.choose(candidates, load, most, is_beside_prompts=is_beside_prompts)
            self._kinds.clear()
            for sequence, count in zip(sequences, counts, strict=True):
                assert sequence.drafter is not None
                kind, tokens = sequence.drafter.drafts(count, has_head=self.speculator.drafts_of_head)
                if tokens:
                    drafts[sequence.id] = tokens
                    self._kinds[sequence.id] = kind
        self.speculator.add_drafting(self._clock() - began)
        return drafts

    def planned(self, step: Step) -> None:
        """Record a step with rows."""
        if self.speculator is None:
            return
        if self.speculator.depth:
            self.head_steps["stopped" if self._head_depth is None else "computed"] += 1
        drafts = sum(row.samples - 1 for row in step.rows if row.samples > 1)
        self._steps.append(_StepInFlight(
            len(step.rows), drafts, step.num_tokens, all(map(self._is_decode, step.rows)),
            is_overlapped=bool(self._steps) if self._overlaps else not drafts,
            is_continued=bool(self._steps) or self._was_busy, head_depth=self._head_depth))

    def extend(
        self, sequence: Sequence, token_ids: Ordered[int], num_drafts: int = 0, *, is_forced: bool = False
    ) -> None:
        """Record new tokens of a request, sampled after `num_drafts` drafts or forced."""
        if self.speculator is None:
            if self._obstacle:
                self._skipped[self._obstacle] += len(token_ids)
            return
        if not is_forced:
            self._tokens += len(token_ids)
        if num_drafts:
            accepted = max(0, len(token_ids) - 1)
            sequence.num_drafted += num_drafts
            sequence.num_accepted += accepted
            kind = self._kinds.get(sequence.id, KINDS[0])
            self.drafted_by_kind[kind] += num_drafts
            self.accepted_by_kind[kind] += accepted
            self._lengths[kind, accepted] += 1
        if not sequence.request.speculate:
            self._skipped["request"] += len(token_ids)
            return
        began = self._clock()
        if sequence.drafter is None:
            sequence.drafter = self._drafter(sequence)
        else:
            sequence.drafter.extend(token_ids, self.speculator.max_pause)
        self.speculator.add_drafting(self._clock() - began)

    def replace_predicted(self, sequence: Sequence, drafts: Ordered[int]) -> None:
        """Take predicted drafts that follow the last token of a request. Call it after `extend`."""
        if drafts and sequence.drafter is not None:
            sequence.drafter.replace_predicted(drafts)

    def step_applied(
        self, running: Ordered[Sequence], budget: int, now: float, *, is_beside_prompts: bool = False,
        head_seconds: float | None = None,
    ) -> None:
        """Record that the oldest step in flight was applied.

        running, budget, is_beside_prompts: as for `choose`, of the next step.
        head_seconds: see StepResult.
        """
        if self.speculator is None:
            return
        step = self._steps.popleft()
        seconds = now - self._last_applied
        if step.is_continued and seconds > 0.0 and step.is_pure:
            self.speculator.step_applied(
                StepTokens(step.rows, step.tokens, step.drafts), self._tokens, seconds,
                is_overlapped=step.is_overlapped, depth=step.head_depth, head_seconds=head_seconds)
        elif step.is_continued and seconds > 0.0:
            accepted = self.accepted - self._accepted_before
            self.speculator.mixed_step_applied(
                StepTokens(step.rows, step.tokens, step.drafts), accepted, seconds, depth=step.head_depth,
                head_seconds=head_seconds)
        if self._steps and running and self.speculator.is_review_due:
            began = self._clock()
            candidates, _, load = self._candidates(running)
            if candidates:
                most = self._budget(load, budget, is_beside_prompts=is_beside_prompts)
                self.speculator.review(candidates, load, most, is_beside_prompts=is_beside_prompts)
            self.speculator.add_drafting(self._clock() - began)
        self._tokens = 0
        self._accepted_before = self.accepted
        self._last_applied = now
        self._was_busy = bool(running)

    def end(self, sequence: Sequence) -> None:
        """Keep the answer of a request that ends for later ones."""
        if self.speculator is None or not _is_shared(sequence) or not sequence.request.speculate:
            return
        if sequence.num_generated_tokens >= MIN_SHARED_ANSWER:
            self.speculator.shared.add(_group(sequence), sequence.token_ids, sequence.num_prompt_tokens)

    def _drafter(self, sequence: Sequence) -> RequestDrafter:
        """Return the drafter of a request."""
        assert self.speculator is not None
        depth = self.speculator.depth
        predicted = PredictedDrafts(depth, self.speculator.predicted_rates) if depth else None
        if self.speculator.mode == "mtp" or self.speculator.mode == "model":
            return RequestDrafter(None, predicted, self.speculator.mode)
        shared = self.speculator.shared.history(_group(sequence)) if _is_shared(sequence) else None
        return RequestDrafter(Drafter(sequence.token_ids, shared, self.speculator.rates), predicted)

    def _budget(self, load: StepTokens, budget: int, *, is_beside_prompts: bool) -> int:
        """Return the most drafts of a step with such decode rows.

        The samples of a step that can draft for the next one stay few enough. Otherwise every second step would draft.
        """
        left = budget - load.tokens
        most_drafts = min(self._max_drafts, left // PROMPT_SHARE if is_beside_prompts else left)
        limit = self._max_drafted_samples
        return most_drafts if limit is None or load.rows > limit else min(most_drafts, limit - load.rows)

    def _candidates(self, running: Iterable[Sequence]) -> tuple[list[Candidate], list[Sequence], StepTokens]:
        """Return the candidates among the running requests, their sequences, and the decode rows without drafts."""
        candidates: list[Candidate] = []
        sequences: list[Sequence] = []
        rows = tokens = 0
        for sequence in running:
            known = sequence.num_uncomputed_tokens
            if known < 1 or sequence.is_preparing:
                continue
            if sequence.is_prefilling:
                tokens += known == 1  # the end of a prompt is planned among the decode rows
                continue
            rows += 1
            tokens += known
            positions = sequence.checkpoint_positions
            ends_early = known > 1 and positions and positions[-1] > sequence.num_computed_tokens
            if sequence.drafter is None or known > MAX_KNOWN_TOKENS or ends_early:
                continue
            limit = sequence.request.max_tokens - sequence.num_generated_tokens - 1
            if sequence.matcher is not None:
                limit = min(limit, MAX_CONSTRAINED_DRAFTS) if sequence.matcher.can_draft else 0
            if self._state_block_size:
                limit = min(limit, -sequence.num_tokens % self._state_block_size)
            if limit > 0:
                candidates.append(Candidate(sequence.drafter, limit, known))
                sequences.append(sequence)
        return candidates, sequences, StepTokens(rows, tokens)

    def _is_decode(self, row: Row) -> bool:
        """Return whether a row computes one known token of an answer, or valid tokens again, and maybe drafts."""
        known = len(row.token_ids) - row.samples + 1
        return row.samples > 0 and row.start > 0 and (
            known == 1 or (self._state_block_size > 0 and known <= MAX_KNOWN_TOKENS))


def _is_shared(sequence: Sequence) -> bool:
    return not sequence.request.bypass_prefix_cache


def _group(sequence: Sequence) -> tuple[str, str]:
    return sequence.request.client, sequence.request.cache_salt
