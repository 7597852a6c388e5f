"""Sampler: chooses the next tokens, and owns the sampling state of each request."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from npuserve.kernels.registry import KernelSet
from npuserve.kernels.sample import Filters
from npuserve.kernels.uniform import uniform
from npuserve.npu.backends.base import Backend, Event
from npuserve.npu.execution.masks import BITS, Array, RowMasks, mask_of, restrict
from npuserve.npu.execution.sampling_state import (
    HostSampling,
    Penalties,
    RequestState,
    RequestTensors,
    SamplingInputs,
    upload,
)
from npuserve.npu.step import NewRequest, SamplingParams, TokenLogprobs

Put = Callable[[Array], Tensor]
"""Copies host values to the device; the returned tensor holds them when the step runs."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Logprobs of N tokens on the device.

    ids: [N] int64, the tokens.
    logprob, rank: [N] float32 and int64, log-probability and rank of each token.
    top_ids, top_logprobs: [N, n] int64 and float32, the most likely tokens first.

    counts: number of most likely tokens to report for each of the N tokens, at most n.
    """

    ids: Tensor
    logprob: Tensor
    rank: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    counts: list[int]
    fetched: Sequence[Event] = ()

    def fetch(self, backend: Backend) -> Logprobs:
        """Copy to the host; complete once the returned `fetched` are. Call it within enqueued work."""
        events = []

        def copy(tensor: Tensor) -> Tensor:
            buffer = backend.host_buffer(*tensor.shape, dtype=tensor.dtype)
            events.append(backend.fetch(tensor, buffer))
            return buffer

        return Logprobs(copy(self.ids), copy(self.logprob), copy(self.rank), copy(self.top_ids),
                        copy(self.top_logprobs), self.counts, events)

    def reports(self) -> list[TokenLogprobs]:
        """Return one report per token, after waiting for the copies."""
        for event in self.fetched:
            event.wait()
        rows = zip(
            self.ids.tolist(),
            self.logprob.tolist(),
            self.rank.tolist(),
            self.top_ids.tolist(),
            self.top_logprobs.tolist(),
            self.counts,
            strict=True,
        )
        return [TokenLogprobs(i, lp, rank, top[:n], tops[:n]) for i, lp, rank, top, tops, n in rows]


@dataclass(frozen=True, slots=True)
class SampledIds:
    """Sampled ids on the device.

    ids: [R, W] int64, W >= 1. Column 0 has the tokens; further columns are padding of the device.
    logprobs: reports of the rows of `RowPlan.reported`; None if there are none.
    """

    ids: Tensor
    logprobs: Logprobs | None = None


class PenalizedRows(NamedTuple):
    """Consecutive rows of one request with penalties.

    first: number of the first row.
    drafts: tokens between their samples. Each row counts those before it, and a sample counts if these were right.
    """

    first: int
    drafts: list[int]

    @property
    def rows(self) -> range:
        return range(self.first, self.first + 1 + len(self.drafts))


class Edit(NamedTuple):
    """Row whose logits are edited. allowed, ending: its allowed_ids and ending_ids are among the edits."""

    row: int
    allowed: bool
    ending: bool


@dataclass(frozen=True, slots=True)
class ArgmaxPlan:
    """Plan of tokens of which each is the argmax of its allowed tokens, and for which nothing else is requested."""


@dataclass(frozen=True, slots=True)
class FixedPlan:
    """Plan of rows whose parameters are in `SamplingInputs`, where a captured step reads them.

    penalized: states of the rows with penalties.
    filters: last argument of `sample`.
    """

    penalized: Sequence[RequestState]
    filters: Filters


@dataclass(frozen=True, slots=True)
class Chance:
    """Sampling of the rows with a temperature above 0.

    arguments: of the kernel `sample`: temperature, top_k, top_p, min_p, uniform.
    filters: its last argument.
    rows: (these rows, the other rows) on the device; None if there are no others.
    """

    arguments: tuple[Tensor, ...]
    filters: Filters
    rows: tuple[Tensor, Tensor] | None


@dataclass(frozen=True, slots=True)
class Reported:
    """Rows with logprobs.

    rows, on_device: their numbers on the host and on the device.
    counts: number of most likely tokens that each of them reports.
    """

    rows: Sequence[int]
    on_device: Tensor
    counts: list[int]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Plan of rows with any parameters. Tensors are on the device when the step runs.

    states: of all rows.
    edited: rows whose logits are edited, other than by the masks of constrained rows.
    penalized: rows with penalties, by request.
    penalties: (rows, repetition, presence, frequency) of the penalized rows; () if there are none.
    chance: None if all rows take their argmax.
    reported: None if no row has logprobs.
    """

    states: Sequence[RequestState]
    edited: Sequence[Edit]
    penalized: Sequence[PenalizedRows]
    penalties: tuple[Tensor, ...]
    chance: Chance | None
    reported: Reported | None


Plan = ArgmaxPlan | FixedPlan | RowPlan
"""Plan for sampling R tokens, made on the host."""


class Sampler:
    """Owner of the requests' sampling state.

    kernels: kernels of the backend.
    vocabulary: size without padding; ids at or above it are never sampled.
    slots: requests with penalties that captured steps can sample.

    A row's token depends only on its own logits, parameters, tokens so far, position and mask, not on other rows.
    Logits are edited in this order: mask and allowed_token_ids, logit_bias, min_tokens (masks the ending ids),
    penalties. Then follows argmax at temperature 0, else `sample` with the random number of (seed, position). Reports
    use the unedited logits.

    The mask of a constrained row wins: allowed_token_ids or min_tokens are ignored in a step where they would leave no
    id of the mask. This is decided on the host (`restrict`), which applies both to the mask.

    `plan` runs on the host, `sample` in the device's queue, possibly while the next step is planned: it changes nothing
    that `plan` reads.
    """

    def __init__(self, kernels: KernelSet, vocabulary: int, backend: Backend, slots: int = 0):
        self._k = kernels
        self._vocabulary = vocabulary
        self._backend = backend
        self._penalties = Penalties(slots, vocabulary, backend) if backend.capabilities.sampler_filters else None
        self._states: dict[int, RequestState] = {}

    def add(self, request: NewRequest) -> None:
        """Add a request. Raises ValueError if it exists."""
        if request.request_id in self._states:
            raise ValueError(f"request {request.request_id} exists already")
        sampling = request.sampling
        vocabulary = self._vocabulary
        allowed = {i for i in sampling.allowed_token_ids if i < vocabulary}
        ending = {i for i in sampling.ending_ids if i < vocabulary} if sampling.min_tokens > 0 else set()
        # If only ending ids are allowed, they are not masked: a row must always have a token to choose.
        if allowed and allowed <= ending:
            ending = set()
        bias = {i: value for i, value in sampling.logit_bias.items() if i < vocabulary}
        self._states[request.request_id] = RequestState(
            request=request,
            allowed_ids=sorted(allowed),
            bias=bias,
            ending_ids=sorted(ending),
            biased=bool(bias) or sampling.penalized,
            next_position=len(request.prompt_ids) + len(request.output_ids),
            slot=self._penalties.take() if self._penalties and sampling.penalized else 0,
        )

    def remove(self, request_id: int) -> None:
        """Remove a request. Raises KeyError if it does not exist."""
        state = self._states.pop(request_id)
        if self._penalties:
            self._penalties.give_back(state.slot)

    def restrict(self, request_id: int, position: int, mask: Array) -> None:
        """Remove ids from the mask of a constrained row in place, by allowed_token_ids and min_tokens.

        mask: [ceil(vocabulary / 32)] int32 that allows at least one id. Neither removes the last one.
        """
        state = self._states[request_id]
        if not (state.allowed_ids or state.ending_ids):
            return
        if state.masks is None:
            words = len(mask)
            state.masks = (mask_of(state.allowed_ids, words) if state.allowed_ids else None,
                           ~mask_of(state.ending_ids, words) if state.ending_ids else None)
        allowed, others = state.masks
        if allowed is not None:
            restrict(mask, allowed)
        if others is not None and state.withholds_ending(position):
            restrict(mask, others)

    def plan(
        self, rows: Sequence[tuple[int, int]], put: Put, constrained: Container[int] = (),
        inputs: HostSampling | None = None, drafts: Mapping[int, list[int]] = {},
    ) -> Plan:
        """Plan the sampling of a step.

        rows: (request id, position in prompt + output) of each token to sample. Those of a request are consecutive.
        put: copies host values to the device.
        constrained: numbers of the rows for which `sample` gets masks.
        inputs: inputs of the captured step that samples rows whose parameters it supports; None without such a step.
        drafts: drafts of the requests that have some. They are the tokens between the request's samples.

        Raises KeyError for an unknown request, and ValueError if a request with penalties skips or repeats a position,
        since its counts cover the tokens sampled here.
        """
        states = [self._states[request_id] for request_id, _ in rows]
        edited = [r for r, s in enumerate(states) if s.edits(rows[r][1], r in constrained)]
        if not edited and all(s.sampling.temperature == 0 and s.sampling.logprobs is None for s in states):
            return ArgmaxPlan()
        penalized = self._penalized_rows(rows, states, drafts)
        if inputs and not any(each.drafts for each in penalized) and all(
                state.is_capturable(position) for state, (_, position) in zip(states, rows, strict=True)):
            return self._fixed_plan(rows, states, inputs)
        edits = [Edit(r, r not in constrained, r not in constrained and states[r].withholds_ending(rows[r][1]))
                 for r in edited]
        sampling = [state.sampling for state in states]
        numbers = [row for each in penalized for row in each.rows]
        penalties = _penalties(numbers, sampling, put) if numbers else ()
        return RowPlan(
            states, edits, penalized, penalties, self._chance(rows, sampling, put), _reported(sampling, put))

    @staticmethod
    def _penalized_rows(
        rows: Sequence[tuple[int, int]], states: Sequence[RequestState], drafts: Mapping[int, list[int]]
    ) -> list[PenalizedRows]:
        """Return the rows with penalties, and move their requests' positions. Raises ValueError for a wrong one."""
        penalized: list[PenalizedRows] = []
        for row, (state, (request_id, position)) in enumerate(zip(states, rows, strict=True)):
            if not state.sampling.penalized or (row and rows[row - 1][0] == request_id):
                continue
            latest = max(state.next_position, state.last_position)
            if not state.next_position <= position <= latest:
                raise ValueError(f"request {request_id}: position {position} instead of {state.next_position}")
            of_request = drafts.get(request_id, [])
            state.next_position = position + 1
            state.last_position = position + 1 + len(of_request)
            penalized.append(PenalizedRows(row, of_request))
        return penalized

    def _chance(
        self, rows: Sequence[tuple[int, int]], sampling: Sequence[SamplingParams], put: Put
    ) -> Chance | None:
        chance = [r for r, params in enumerate(sampling) if params.temperature > 0]
        if not chance:
            return None
        params = [sampling[r] for r in chance]
        greedy = [r for r, of_row in enumerate(sampling) if of_row.temperature == 0]
        both = (put(np.array(chance)), put(np.array(greedy))) if greedy else None
        arguments = (
            put(_floats([p.temperature for p in params])),
            put(np.array([p.top_k for p in params])),
            put(_floats([p.top_p for p in params])),
            put(_floats([p.min_p for p in params])),
            put(uniform([p.seed for p in params], [rows[r][1] for r in chance])),
        )
        return Chance(arguments, self._filters(params), both)

    def _fixed_plan(
        self, rows: Sequence[tuple[int, int]], states: Sequence[RequestState], inputs: HostSampling
    ) -> FixedPlan:
        """Write the parameters of all rows where a captured step reads them."""
        inputs.clear()
        numbers = uniform([state.sampling.seed for state in states], [position for _, position in rows])
        for row, (state, number) in enumerate(zip(states, numbers, strict=True)):
            params = state.sampling
            if params.temperature > 0:
                inputs.set_chance(row, params.temperature, params.top_k, params.top_p, params.min_p, float(number))
            if params.penalized:
                inputs.set_penalties(
                    row, state.slot, params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        penalized = [state for state in states if state.sampling.penalized]
        return FixedPlan(penalized, self._filters([state.sampling for state in states]))

    def _filters(self, parameters: Sequence[SamplingParams]) -> Filters:
        """Return the most that any row filters."""
        return max((Filters.of(p.top_k, p.top_p, self._vocabulary) for p in parameters if p.temperature > 0),
                   default=Filters.NONE)

    def prepare(self, plan: FixedPlan) -> None:
        """Create the tensors that `sample_fixed` reads. Call it within enqueued work."""
        for state in plan.penalized:
            self._tensors(state)

    def sample_fixed(self, logits: Tensor, inputs: SamplingInputs, filters: Filters) -> Tensor:
        """Sample one token per row of logits [R, Vp]: ids [R, W]. Everything else that a plan decides is in `inputs`.

        It calls the same kernels for all parameters within `filters`, without a copy to the host, so that it can be
        captured.
        """
        assert self._penalties
        scores = logits[:, : self._vocabulary].to(torch.float32)
        in_prompt = self._penalties.in_prompt
        counts = self._penalties.output_counts
        self._k.penalize(scores, in_prompt.index_select(0, inputs.slots), counts.index_select(0, inputs.slots),
                         inputs.repetition, inputs.presence, inputs.frequency)
        ids = self._k.sample(scores, self._vocabulary, inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p,
                             inputs.uniform, filters)
        counts.index_put_((inputs.slots, ids[:, 0]), self._penalties.one, accumulate=True)
        return ids

    def discard(self, requests: Iterable[int]) -> None:
        """Let requests sample the positions of the last plan again. Its tokens must not be counted for them."""
        for state in map(self._states.__getitem__, requests):
            if state.sampling.penalized:
                state.next_position -= 1
                state.last_position = state.next_position

    def sample(
        self, logits: Tensor, plan: RowPlan, masks: RowMasks | None = None, valid: Mapping[int, int] = {}
    ) -> SampledIds:
        """Sample one token per row of logits [R, Vp], of which only those are modified that `masks` masks.

        valid: number of samples, from the first on, that may count for the penalties of a request; all of one that it
            lacks.

        Call it within enqueued work, in the order in which the plans were made.
        """
        reported = plan.reported
        unedited = logits[reported.on_device] if reported else None
        if masks is not None:
            self._k.mask_logits(logits, self._vocabulary, *masks)
        ids = self._choose(self._edit(logits, plan) if plan.edited else logits, plan)
        for each in plan.penalized:
            self._count(each, plan.states[each.first], ids, valid)
        if reported is None or unedited is None:
            return SampledIds(ids)
        return SampledIds(ids, self._logprobs(unedited, ids[reported.on_device, 0], reported.counts))

    def warm_up(self, logits: Tensor) -> None:
        """Call each kernel that `sample` may call for logits [R, Vp], so that it is compiled."""
        def full(value: float, dtype: torch.dtype, *more: int) -> Tensor:
            return torch.full((len(logits), *more), value, dtype=dtype, device=logits.device)

        shaping = [full(1, torch.float32), full(0, torch.int64), full(1, torch.float32), full(0, torch.float32),
                   full(0, torch.float64)]
        edited = logits[:, : self._vocabulary].to(torch.float32, copy=True)
        for choices in (logits, edited):
            ids = self._k.greedy(choices, self._vocabulary)
            for filters in Filters:
                self._k.sample(choices, self._vocabulary, *shaping, filters)
        for n in (0, 1, 20):
            self._logprobs(logits, ids[:, 0], [n])
        self._k.mask_logits(logits, self._vocabulary, full(-1, torch.int32, -(-self._vocabulary // BITS)),
                            full(0, torch.int32))
        width = edited.shape[1]
        self._k.penalize(edited, full(0, torch.bool, width), full(0, torch.int32, width), *shaping[:1] * 3)

    def prompt_logprobs(self, logits: Tensor, next_ids: Tensor, n: int) -> Logprobs:
        """Return reports of prompt tokens next_ids [T] int64 predicted by logits [T, Vp], with n top tokens each."""
        return self._logprobs(logits, next_ids, [n] * len(next_ids))

    def _choose(self, logits: Tensor, plan: RowPlan) -> Tensor:
        """Return sampled ids [R, W]."""
        if plan.chance is None:
            return self._k.greedy(logits, self._vocabulary)
        arguments = plan.chance.arguments
        filters = plan.chance.filters
        if plan.chance.rows is None:
            return self._k.sample(logits, self._vocabulary, *arguments, filters)
        chance, greedy = plan.chance.rows
        ids = torch.empty(len(plan.states), 1, dtype=torch.int64, device=logits.device)
        ids[chance] = self._k.sample(logits[chance], self._vocabulary, *arguments, filters)[:, :1]
        ids[greedy] = self._k.greedy(logits[greedy], self._vocabulary)[:, :1]
        return ids

    def _edit(self, logits: Tensor, plan: RowPlan) -> Tensor:
        """Return a copy of the logits with all edits: [R, vocabulary] float32."""
        result = logits[:, : self._vocabulary].to(torch.float32, copy=True)
        for row, allowed, ending in plan.edited:
            tensors = self._tensors(plan.states[row])
            line = result[row]
            if tensors.allowed_ids is not None and allowed:
                masked = torch.full_like(line, -torch.inf)
                masked[tensors.allowed_ids] = line[tensors.allowed_ids]
                line.copy_(masked)
            if tensors.bias is not None:
                ids, values = tensors.bias
                line[ids] += values
            if tensors.ending_ids is not None and ending:
                line[tensors.ending_ids] = -torch.inf
        if plan.penalized:
            rows, *penalties = plan.penalties
            in_prompt: list[Tensor] = []
            output_counts: list[Tensor] = []
            for each in plan.penalized:
                of_prompt, counts = self._counts(plan.states[each.first])
                in_prompt += [of_prompt] * len(each.rows)
                output_counts.append(counts)
                for draft in each.drafts:
                    counts = counts.clone()
                    counts[draft] += 1
                    output_counts.append(counts)
            lines = result[rows]
            self._k.penalize(lines, torch.stack(in_prompt), torch.stack(output_counts), *penalties)
            result[rows] = lines
        return result

    def _count(self, penalized: PenalizedRows, state: RequestState, ids: Tensor, valid: Mapping[int, int]) -> None:
        """Count the sampled ids of a request up to the first that differs from its draft."""
        drafts = penalized.drafts
        count = min(1 + len(drafts), valid.get(state.request.request_id, 1 + len(drafts)))
        if not count:
            return
        _, output_counts = self._counts(state)
        sampled = ids[penalized.first : penalized.first + count, 0]
        increments = torch.ones(count, dtype=output_counts.dtype, device=ids.device)
        for place in range(1, count):
            is_right = sampled[place - 1] == drafts[place - 1]
            increments[place] = increments[place - 1] * is_right
        output_counts.index_add_(0, sampled, increments)

    def _counts(self, state: RequestState) -> tuple[Tensor, Tensor]:
        counts = self._tensors(state).counts
        assert counts is not None
        return counts

    def _tensors(self, state: RequestState) -> RequestTensors:
        if state.on_device is None:
            state.on_device = upload(state, self._vocabulary, self._backend, self._penalties)
        return state.on_device

    def _logprobs(self, logits: Tensor, ids: Tensor, counts: list[int]) -> Logprobs:
        n = min(max(counts, default=0), self._vocabulary)
        logprob, rank, top_ids, top_logprobs = self._k.logprobs(logits, self._vocabulary, ids, n)
        return Logprobs(ids, logprob, rank, top_ids, top_logprobs, counts)


def _penalties(penalized: Sequence[int], sampling: Sequence[SamplingParams], put: Put) -> tuple[Tensor, ...]:
    params = [sampling[r] for r in penalized]
    return (
        put(np.array(penalized)),
        put(_floats([p.repetition_penalty for p in params])),
        put(_floats([p.presence_penalty for p in params])),
        put(_floats([p.frequency_penalty for p in params])),
    )


def _reported(sampling: Sequence[SamplingParams], put: Put) -> Reported | None:
    rows = [r for r, params in enumerate(sampling) if params.logprobs is not None]
    if not rows:
        return None
    return Reported(rows, put(np.array(rows)), [sampling[r].logprobs or 0 for r in rows])


def _floats(values: list[float]) -> Array:
    return np.array(values, dtype=np.float32)
