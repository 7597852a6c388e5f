"""Chooses the next tokens, and owns what that takes of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from npuserve.kernels.registry import KernelSet
from npuserve.kernels.uniform import uniform
from npuserve.npu.step import NewRequest, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Reports of N tokens, on the device. counts: how many likeliest tokens each report names, at most n.

    ids: [N] int64. logprob: [N] float32. rank: [N] int64. top_ids: [N, n] int64. top_logprobs: [N, n] float32.
    """

    ids: Tensor
    logprob: Tensor
    rank: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    counts: list[int]

    def reports(self) -> list[TokenLogprobs]:
        """Copies them to the host."""
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
    """What was chosen, on the device.

    ids: [R, W] int64, W >= 1: row r's token is ids[r, 0]; devices that pad use the rest.
    logprobs: the reports of the rows `logprob_rows`, None if no row asked.
    """

    ids: Tensor
    logprobs: Logprobs | None = None
    logprob_rows: tuple[int, ...] = ()

    def reports(self) -> dict[int, TokenLogprobs]:
        """Row -> its report, copied to the host."""
        return dict(zip(self.logprob_rows, self.logprobs.reports(), strict=True)) if self.logprobs else {}


@dataclass(slots=True)
class _State:
    """What sampling needs of one request. Tensors are on the device, None where the request does not use them.

    bias: (ids [n] int64, values [n] float32). counts: (in_prompt [vocabulary] bool, output_counts [vocabulary] int32),
    of the tokens before `next_position`, which is kept with them.
    """

    sampling: SamplingParams
    prompt_len: int
    allowed_ids: Tensor | None
    bias: tuple[Tensor, Tensor] | None
    ending_ids: Tensor | None
    counts: tuple[Tensor, Tensor] | None
    next_position: int

    def withholds_ending(self, position: int) -> bool:
        return self.ending_ids is not None and position - self.prompt_len < self.sampling.min_tokens

    def edits(self, position: int) -> bool:
        """True if the logits at `position` are not taken as they are."""
        return (
            self.allowed_ids is not None
            or self.bias is not None
            or self.counts is not None
            or self.withholds_ending(position)
        )


class Sampler:
    """The only owner of the requests' sampling state.

    kernels: those of the device. vocabulary: the real one; ids at or above it are never chosen.

    A row's token is a function of its own logits, parameters, tokens so far and position, never of other rows. The
    logits of a row go through, in this order: allowed_token_ids, logit_bias, min_tokens (the ending ids cannot be
    chosen), penalties, then the likeliest token at temperature 0, else `sample` with the random number of (seed,
    position). Reports are of the logits as they came.
    """

    def __init__(self, kernels: KernelSet, vocabulary: int, device: torch.device):
        self._k = kernels
        self._vocabulary = vocabulary
        self._device = device
        self._states: dict[int, _State] = {}

    def add(self, request: NewRequest) -> None:
        """Meets a request; ValueError if it is known already."""
        if request.request_id in self._states:
            raise ValueError(f"request {request.request_id} is known already")
        sampling, vocabulary = request.sampling, self._vocabulary
        allowed = {i for i in sampling.allowed_token_ids if i < vocabulary}
        bias = {i: value for i, value in sampling.logit_bias.items() if i < vocabulary}
        ending = {i for i in sampling.ending_ids if i < vocabulary} if sampling.min_tokens > 0 else set()
        # Where nothing but ending ids is allowed, they are not withheld: a row always has a token to choose.
        if allowed and allowed <= ending:
            ending = set()
        self._states[request.request_id] = _State(
            sampling=sampling,
            prompt_len=len(request.prompt_ids),
            allowed_ids=self._index(sorted(allowed)) if allowed else None,
            bias=(self._index(list(bias)), self._floats(list(bias.values()))) if bias else None,
            ending_ids=self._index(sorted(ending)) if ending else None,
            counts=(self._count(request.prompt_ids) > 0, self._count(request.output_ids))
            if sampling.penalized
            else None,
            next_position=len(request.prompt_ids) + len(request.output_ids),
        )

    def remove(self, request_id: int) -> None:
        """Forgets a request; KeyError if it is not known."""
        del self._states[request_id]

    def only_likeliest(self, rows: Sequence[tuple[int, int]]) -> bool:
        """True if each row, as `sample` takes them, is to have the likeliest token of its logits, and nothing else is
        asked."""
        states = ((self._states[request_id], position) for request_id, position in rows)
        return all(
            s.sampling.temperature == 0 and s.sampling.logprobs is None and not s.edits(position)
            for s, position in states
        )

    def sample(self, logits: Tensor, rows: Sequence[tuple[int, int]]) -> SampledIds:
        """Chooses one token per row of logits [R, Vp], which are not changed.

        rows: (request id, position) of each, the position being that of the token to choose in prompt + output.
        Raises KeyError for an unknown request, and ValueError if a request with penalties skips or repeats a position,
        since its counts are of the tokens chosen here.
        """
        states = [self._states[request_id] for request_id, _ in rows]
        positions = [position for _, position in rows]
        for state, (request_id, position) in zip(states, rows, strict=True):
            if state.counts is not None and position != state.next_position:
                raise ValueError(f"request {request_id}: position {position} instead of {state.next_position}")
        edited = [r for r, state in enumerate(states) if state.edits(positions[r])]
        ids = self._choose(self._edit(logits, states, positions, edited) if edited else logits, states, positions)
        for row, state in enumerate(states):
            if state.counts is not None:
                state.counts[1][ids[row, :1]] += 1
                state.next_position += 1
        reported = tuple(r for r, state in enumerate(states) if state.sampling.logprobs is not None)
        if not reported:
            return SampledIds(ids)
        counts = [states[r].sampling.logprobs or 0 for r in reported]
        where = self._index(reported)
        return SampledIds(ids, self._logprobs(logits[where], ids[where, 0], counts), reported)

    def prompt_logprobs(self, logits: Tensor, next_ids: Tensor, n: int) -> Logprobs:
        """Reports of the prompt's tokens next_ids [T] int64, which logits [T, Vp] predict, with n likeliest ones."""
        return self._logprobs(logits, next_ids, [n] * len(next_ids))

    def _choose(self, logits: Tensor, states: list[_State], positions: list[int]) -> Tensor:
        """ids [R, W]."""
        chance = [r for r, state in enumerate(states) if state.sampling.temperature > 0]
        if not chance:
            return self._k.greedy(logits, self._vocabulary)
        params = [states[r].sampling for r in chance]
        numbers = uniform([p.seed for p in params], [positions[r] for r in chance])
        where = self._index(chance)
        drawn = self._k.sample(
            logits if len(chance) == len(states) else logits[where],
            self._vocabulary,
            self._floats([p.temperature for p in params]),
            torch.tensor([p.top_k for p in params], device=self._device),
            self._floats([p.top_p for p in params]),
            self._floats([p.min_p for p in params]),
            torch.from_numpy(numbers).to(self._device),
        )
        if len(chance) == len(states):
            return drawn
        ids = torch.empty(len(states), 1, dtype=torch.int64, device=self._device)
        ids[where] = drawn[:, :1]
        likeliest = self._index([r for r, state in enumerate(states) if state.sampling.temperature == 0])
        ids[likeliest] = self._k.greedy(logits[likeliest], self._vocabulary)[:, :1]
        return ids

    def _edit(self, logits: Tensor, states: list[_State], positions: list[int], edited: list[int]) -> Tensor:
        """The logits as they are to be chosen from: [R, vocabulary] float32, a copy."""
        result = logits[:, : self._vocabulary].to(torch.float32, copy=True)
        for row in edited:
            state, line = states[row], result[row]
            if state.allowed_ids is not None:
                masked = torch.full_like(line, -torch.inf)
                masked[state.allowed_ids] = line[state.allowed_ids]
                line.copy_(masked)
            if state.bias is not None:
                line[state.bias[0]] += state.bias[1]
            if state.ending_ids is not None and state.withholds_ending(positions[row]):
                line[state.ending_ids] = -torch.inf
        penalized = [r for r in edited if states[r].counts is not None]
        if penalized:
            self._penalize(result, states, penalized)
        return result

    def _penalize(self, logits: Tensor, states: list[_State], rows: list[int]) -> None:
        """Changes these rows of logits [R, vocabulary] in place."""
        where, params = self._index(rows), [states[r].sampling for r in rows]
        in_prompt, output_counts = zip(*(counts for r in rows if (counts := states[r].counts)), strict=True)
        lines = logits[where]
        self._k.penalize(
            lines,
            torch.stack(in_prompt),
            torch.stack(output_counts),
            self._floats([p.repetition_penalty for p in params]),
            self._floats([p.presence_penalty for p in params]),
            self._floats([p.frequency_penalty for p in params]),
        )
        logits[where] = lines

    def _logprobs(self, logits: Tensor, ids: Tensor, counts: list[int]) -> Logprobs:
        n = min(max(counts, default=0), self._vocabulary)
        logprob, rank, top_ids, top_logprobs = self._k.logprobs(logits, self._vocabulary, ids, n)
        return Logprobs(ids, logprob, rank, top_ids, top_logprobs, counts)

    def _count(self, token_ids: list[int]) -> Tensor:
        """How often each id is among them: [vocabulary] int32."""
        counts = torch.bincount(torch.tensor(token_ids, dtype=torch.int64), minlength=self._vocabulary)
        return counts.to(self._device, torch.int32)

    def _index(self, indices: Sequence[int]) -> Tensor:
        return torch.tensor(indices, dtype=torch.int64, device=self._device)

    def _floats(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)
