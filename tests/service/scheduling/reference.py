"""Reference for the scheduler, simple enough to verify by reading: the answer of a request that runs alone, and a
device that records from which tokens each KV-cache slot was computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from npuserve.npu.step import (
    PENDING,
    EndedLoad,
    HostLoad,
    NewRequest,
    Row,
    SamplingParams,
    Step,
    StepResult,
    TokenLogprobs,
)
from npuserve.service.ipc.messages import FinishReason, Request
from npuserve.service.structured_output.answer_matcher import AnswerMatcher
from tests.support.fake_grammar import answer_matcher, first_allowed, next_mask

STATE_PARTS = 2
"""Slots of host memory that a fixed state takes."""
VOCABULARY = 7
END_IDS = frozenset([6])
"""Tokens that end a constrained answer."""
Mask = npt.NDArray[np.int32]


def next_token(tokens: Sequence[int], num_prompt: int, sampling: SamplingParams, mask: Mask | None = None) -> int:
    """Return the next token of the "model": a function of seed, earlier tokens and mask, of nothing else."""
    token = crc32(bytes(tokens), sampling.seed) % VOCABULARY
    if mask is not None:
        return first_allowed(token, VOCABULARY, mask)
    while len(tokens) - num_prompt < sampling.min_tokens and token in sampling.ending_ids:
        token = (token + 1) % VOCABULARY
    return token


def report(token: int, position: int) -> TokenLogprobs:
    return TokenLogprobs(token, -float(position), 1, [], [])


def answer_alone(request: Request) -> tuple[list[int], FinishReason]:
    """Return all tokens of the answer, and the reason of its end."""
    tokens, num_prompt = [*request.prompt_ids, *request.output_ids], len(request.prompt_ids)
    matcher = matcher_of(request)
    while True:
        mask = next_mask(matcher, VOCABULARY) if matcher else None
        assert mask is not None or not matcher
        tokens.append(next_token(tokens, num_prompt, request.sampling, mask))
        if matcher:
            matcher.advance(tokens[-1])
            assert matcher.error is None
            if matcher.has_ended:
                return tokens[num_prompt:], "eos"
        if len(tokens) - num_prompt >= request.sampling.min_tokens:
            if tokens[-1] in request.eos_token_ids:
                return tokens[num_prompt:], "eos"
            if tokens[-1] in request.stop_token_ids:
                return tokens[num_prompt:], "stop_token"
        if len(tokens) - num_prompt == request.max_tokens:
            return tokens[num_prompt:], "length"


def matcher_of(request: Request) -> AnswerMatcher | None:
    """Return the matcher of a request's constraint after its output; None without a constraint."""
    return answer_matcher(request, VOCABULARY, END_IDS) if request.constraint else None


class FakeDevice:
    """Runner and device that computes each step at its launch. A KV-cache slot holds (salt, all tokens up to and
    including its own), which determine the contents of a real slot. Raises AssertionError where a real device would
    silently compute wrong numbers."""

    def __init__(self, num_blocks: int, block_size: int, salts: dict[int, str], step_seconds: float = 0.0) -> None:
        self.step_seconds = step_seconds
        self.block_size = block_size
        self.salts = salts
        self.slots: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.states: dict[int, tuple[int, ...]] = {}  # tokens that the fixed state in a slot has seen
        self.num_slots = num_blocks * block_size
        self.known: dict[int, NewRequest] = {}
        self.announced: set[int] = set()
        self.sampled: dict[int, list[int]] = {}  # tokens of the step before, by request
        # Result of the last step until it is sampled, and the contexts of its constrained rows.
        self.unsampled: tuple[StepResult, dict[int, list[tuple[int, ...]]]] | None = None

        self.host: dict[int, object] = {}  # contents of a block, or of a fixed state and the part, by slot
        self.corrupt: set[int] = set()  # slots of host memory whose checksums differ
        self.load_polls = 2  # calls of `take_ended_loads` until a load ends
        self.loads: list[tuple[HostLoad, int]] = []  # in progress, with the calls that are left

    def launch(self, step: Step) -> StepResult:
        assert self.unsampled is None, "a launch before the step was sampled"
        targets = self._targets()
        saved = [(not copy.is_block, copy.device_index) for copy in step.saves]
        assert targets.isdisjoint(saved), "saved while it is loaded"
        read = {copy.slot for load, _ in self.loads for copy in load.copies}
        assert read.isdisjoint(copy.slot for copy in step.saves), "a save overwrites what a load reads"
        assert len({copy.slot for copy in step.saves}) == len(step.saves), "two saves to one slot"
        for copy in step.saves:
            self.host[copy.slot] = (self.states[copy.device_index], copy.part) if not copy.is_block else [
                self.slots.get(slot) for slot in self._slots_of(copy.device_index)]
            self.corrupt.discard(copy.slot)
        for load in step.loads:
            for copy in load.copies:
                if not copy.is_block:
                    self.states.pop(copy.device_index, None)
                for slot in self._slots_of(copy.device_index) if copy.is_block else ():
                    self.slots.pop(slot, None)
            self.loads.append((load, self.load_polls))
        targets = self._targets()
        for row in step.rows:
            assert targets.isdisjoint((False, block) for block in row.block_ids), "a row has a block that is loaded"
            assert targets.isdisjoint([(True, row.state_slot), (True, row.state_source)]), "a row has a loaded state"
        return self.run(step, self.step_seconds)

    def _targets(self) -> set[tuple[bool, int]]:
        """Return what loads write: whether it is a slot of fixed state, and the index of the slot or block."""
        return {(not copy.is_block, copy.device_index) for load, _ in self.loads for copy in load.copies}

    def _slots_of(self, block: int) -> range:
        return range(block * self.block_size, (block + 1) * self.block_size)

    def take_ended_loads(self) -> list[EndedLoad]:
        """Return the loads that end with this call."""
        ended = []
        self.loads = [(load, polls - 1) for load, polls in self.loads]
        for load, polls in [entry for entry in self.loads if not entry[1]]:
            self.loads.remove((load, polls))
            num_intact = 0
            parts: dict[int, list[tuple[int, ...]]] = {}  # that came back, by slot of fixed state
            for copy in load.copies:
                if copy.slot in self.corrupt:
                    break
                num_intact += 1
                content: Any = self.host[copy.slot]
                if not copy.is_block:
                    state, part = content
                    assert part == copy.part, "another part of a state"
                    parts.setdefault(copy.device_index, []).append(state)
                    if len(parts[copy.device_index]) == STATE_PARTS:
                        assert len(set(parts[copy.device_index])) == 1, "parts of two states"
                        self.states[copy.device_index] = state
                    continue
                for slot, tokens in zip(self._slots_of(copy.device_index), content, strict=True):
                    assert tokens is not None
                    self.slots[slot] = tokens
            ended.append(EndedLoad(load.id, num_intact))
        return ended

    def sample(self, handle: StepResult, masks: Mapping[int, Mask]) -> None:
        assert self.unsampled, "a step without constrained rows is sampled"
        result, contexts = self.unsampled
        assert handle is result, "another step is sampled"
        assert masks.keys() <= contexts.keys()
        for request_id, each_context in contexts.items():
            each_mask = list(np.atleast_2d(masks[request_id])) if request_id in masks else [None]
            each_mask += each_mask[-1:] * (len(each_context) - len(each_mask))  # samples that are not valid
            for context, mask in zip(each_context, each_mask, strict=True):
                self._sample(request_id, context, result, mask)
        self.unsampled = None

    def ready(self, handle: StepResult) -> bool:
        return True

    def collect(self, handle: StepResult) -> StepResult:
        assert self.unsampled is None or self.unsampled[0] is not handle, "a step is collected that was not sampled"
        return handle

    def run(self, step: Step, device_seconds: float = 0.0) -> StepResult:
        for request_id in step.ended:
            del self.known[request_id]
        for new in step.new:
            assert new.request_id not in self.announced, "announced twice"
            self.announced.add(new.request_id)
            self.known[new.request_id] = new
        for row in step.rows:
            if row.state_source >= 0:
                self.states[row.state_slot] = self.states[row.state_source]
        written: set[int] = set()
        contexts: dict[int, tuple[int, ...]] = {}
        for row in step.rows:  # all write before any reads, as in one layer of a batch
            assert row.request_id not in contexts, "two rows of one request"
            assert row.token_ids, "a row without tokens"
            end = row.start + len(row.token_ids)
            assert len(row.block_ids) == -(-end // self.block_size), "block_ids are not those of [0, end)"
            slots = [row.block_ids[p // self.block_size] * self.block_size + p % self.block_size for p in range(end)]
            assert all(0 <= slot < self.num_slots for slot in slots)
            assert written.isdisjoint(slots[row.start :]), "two rows write one slot"
            written.update(slots[row.start :])
            before = [self.slots[slot][1][-1] for slot in slots[: row.start]]
            token_ids = row.token_ids
            if PENDING in token_ids:
                assert token_ids == [PENDING], "a known token beside a pending one"
                assert row.samples
                assert row.request_id in self.sampled, "a token that the step before has not sampled"
                (pending,) = self.sampled[row.request_id]
                token_ids = [pending]
            context = (*before, *token_ids)
            for position in range(row.start, end):
                self.slots[slots[position]] = (self.salts[row.request_id], context[: position + 1])
            self._advance_state(row, context)
            contexts[row.request_id] = context
        result = StepResult({}, {}, {}, device_seconds)
        unsampled: dict[int, list[tuple[int, ...]]] = {}
        for row in step.rows:
            new, context = self.known[row.request_id], contexts[row.request_id]
            for position in range(len(context)):
                slot = row.block_ids[position // self.block_size] * self.block_size + position % self.block_size
                expected = (self.salts[row.request_id], context[: position + 1])
                assert self.slots[slot] == expected, f"request {row.request_id} reads another's slot at {position}"
            num_prompt = len(new.prompt_ids)
            assert context[:num_prompt] == tuple(new.prompt_ids[: len(context)]), "the prompt of another request"
            if row.samples:
                known = context[: len(context) - row.samples + 1]
                assert len(known) >= num_prompt + len(new.output_ids), "samples before its last known token"
                each_context = [context[:length] for length in range(len(known), len(context) + 1)]
                if row.is_constrained:
                    unsampled[row.request_id] = each_context
                for each in () if row.is_constrained else each_context:
                    self._sample(row.request_id, each, result)
            assert row.samples or not row.is_constrained
            if new.sampling.prompt_logprobs is not None:
                predicted = range(row.start + 1, min(len(context) + 1, num_prompt))
                result.prompt_logprobs[row.request_id] = [report(new.prompt_ids[p], p) for p in predicted]
        if step.rows:
            self.sampled = result.token_ids
        self.unsampled = (result, unsampled) if unsampled else None
        return result

    def _advance_state(self, row: Row, context: tuple[int, ...]) -> None:
        """Continue the fixed state of a row, if the model has one."""
        if row.state_slot < 0:
            return
        is_own = not row.start or self.states[row.state_slot] == context[: row.start]
        assert is_own, f"request {row.request_id} continues another state"
        self.states[row.state_slot] = context

    def _sample(self, request_id: int, context: tuple[int, ...], result: StepResult, mask: Mask | None = None) -> None:
        new = self.known[request_id]
        token = next_token(context, len(new.prompt_ids), new.sampling, mask)
        result.token_ids.setdefault(request_id, []).append(token)
        if new.sampling.logprobs is not None:
            result.logprobs.setdefault(request_id, []).append(report(token, len(context)))
