"""Sampling as a function of a request's parameters, state and position."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from npuserve.kernels.registry import KERNELS, Implementation, KernelSet
from npuserve.kernels.sample import Filters
from npuserve.kernels.uniform import uniform
from npuserve.npu.backends import select
from npuserve.npu.execution.masks import mask_of
from npuserve.npu.execution.sampler import FixedPlan, Plan, RowPlan, SampledIds, Sampler
from npuserve.npu.step import NewRequest, SamplingParams, TokenLogprobs

VOCABULARY, PADDED = 97, 112
CPU = select("cpu")


def logits_of(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random logits whose padding has the largest values."""
    logits = torch.randn(rows, PADDED, generator=torch.Generator().manual_seed(seed)).mul(3)
    logits[:, VOCABULARY:] = 100
    return logits.to(dtype)


@dataclass
class Chosen:
    """Result of one call. ids: [R, W]."""

    plan: Plan
    sampled: SampledIds

    @property
    def ids(self) -> Tensor:
        return self.sampled.ids

    def reports(self) -> dict[int, TokenLogprobs]:
        made = self.sampled.logprobs.fetch(CPU).reports() if self.sampled.logprobs else []
        rows = self.plan.reported.rows if isinstance(self.plan, RowPlan) and self.plan.reported else []
        return dict(zip(rows, made, strict=True))


class Whole(Sampler):
    """Sampler that plans and samples in one call."""

    def choose(self, logits: Tensor, rows: list[tuple[int, int]]) -> Chosen:
        plan = self.plan(rows, torch.from_numpy)
        assert not isinstance(plan, FixedPlan)
        if isinstance(plan, RowPlan):
            return Chosen(plan, self.sample(logits, plan))
        # The runner calls the LM head with argmax instead.
        return Chosen(plan, SampledIds(self._k.greedy(logits, self._vocabulary)))


def sampler(*params: SamplingParams, prompt: list[int] = [1, 2, 3], output: list[int] = []) -> Whole:  # noqa: B006
    """Return a sampler with requests 0, 1, ... of these parameters."""
    made = Whole(KernelSet("none"), VOCABULARY, CPU)
    for request_id, p in enumerate(params):
        made.add(NewRequest(request_id, prompt, output, p))
    return made


def choose(logits: Tensor, params: SamplingParams, **request: Any) -> int:
    """Return the token after prompt and output of one request."""
    made = sampler(params, **request)
    position = len(request.get("prompt", [1, 2, 3])) + len(request.get("output", []))
    return int(made.choose(logits, [(0, position)]).ids[0, 0])


GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampler_greedy_is_one_call_on_unedited_logits(dtype: torch.dtype) -> None:
    logits = logits_of(4, dtype=dtype)
    made = sampler(*[GREEDY] * 4)
    calls = []
    made._k.greedy = lambda x, vocabulary: calls.append(x) or KERNELS["greedy"](x, vocabulary)  # type: ignore[func-returns-value]
    result = made.choose(logits, [(r, 3) for r in range(4)])
    assert result.ids[:, 0].tolist() == logits[:, :VOCABULARY].argmax(dim=-1).tolist()
    assert result.ids.dtype == torch.int64
    assert result.reports() == {}
    assert len(calls) == 1
    assert calls[0] is logits


MIXED = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2**64 - 1, temperature=0.7, top_k=5),
    SamplingParams(seed=3, top_p=0.8, min_p=0.01),
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
    SamplingParams(seed=4, presence_penalty=1.0, frequency_penalty=0.5, logprobs=3),
    SamplingParams(seed=5, logit_bias={7: 50.0}),
    SamplingParams(temperature=0.0, allowed_token_ids=(4, 9), logprobs=0),
    SamplingParams(seed=6, min_tokens=2, ending_ids=tuple(range(50)), logprobs=20),
    SamplingParams(seed=7, repetition_penalty=0.5, temperature=3.0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampler_row_does_not_depend_on_others(dtype: torch.dtype) -> None:
    together = sampler(*MIXED)
    alone = [sampler(*MIXED) for _ in MIXED]
    order = [3, 0, 9, 5, 2, 8, 1, 7, 4, 6]
    for position in range(3, 8):
        logits = logits_of(len(MIXED), seed=position, dtype=dtype)
        before = logits.clone()
        result = together.choose(logits, [(r, position) for r in order])
        assert torch.equal(logits, before)
        assert (result.ids[:, 0] < VOCABULARY).all()
        reports = result.reports()
        assert sorted(order[row] for row in reports) == [5, 7, 8]
        for row, request in enumerate(order):
            one = alone[request].choose(logits[row : row + 1], [(request, position)])
            assert one.ids[0, 0] == result.ids[row, 0], (request, position)
            assert one.reports().get(0) == reports.get(row)


def test_sampler_token_depends_on_seed_and_position() -> None:
    params = [SamplingParams(seed=s, temperature=2.0) for s in (11, 12)]
    logits = logits_of(1).expand(2, -1)
    made = sampler(*params)
    first = [made.choose(logits, [(0, p), (1, p)]).ids.tolist() for p in range(3, 40)]
    again = [made.choose(logits, [(0, p), (1, p)]).ids.tolist() for p in range(3, 40)]
    assert first == again
    assert len({ids[0][0] for ids in first}) > 3
    assert [ids[0] for ids in first] != [ids[1] for ids in first]
    expected = KERNELS["sample"](
        logits[:1], VOCABULARY, *(torch.tensor([x]) for x in (2.0, 0, 1.0, 0.0)), torch.from_numpy(uniform([11], [3]))
    )
    assert first[0][0] == expected[0].tolist()


def test_sampler_reads_ids_from_first_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device pads its results to eight columns of arbitrary values."""

    def padded(name: str) -> Any:
        def call(*args: Any) -> Tensor:
            ids = KERNELS[name].golden(*args)
            return torch.cat([ids, torch.full((len(ids), 7), 10**6)], dim=1)

        return call

    for name in ("greedy", "sample"):
        monkeypatch.setitem(KERNELS[name].implementations, "wide", Implementation(padded(name)))
    for params in (MIXED, [MIXED[0], MIXED[4], MIXED[7]], [MIXED[1], MIXED[5]]):
        narrow, wide = sampler(*params), Whole(KernelSet("wide"), VOCABULARY, CPU)
        for request_id, p in enumerate(params):
            wide.add(NewRequest(request_id, [1, 2, 3], [], p))
        for position in range(3, 7):
            logits, rows = logits_of(len(params), seed=position), [(r, position) for r in range(len(params))]
            a, b = narrow.choose(logits, rows), wide.choose(logits, rows)
            assert torch.equal(a.ids[:, 0], b.ids[:, 0])
            assert a.reports() == b.reports()


@pytest.mark.parametrize(("params", "filters"), [
    ([SamplingParams(min_p=0.1)], Filters.NONE), ([GREEDY, SamplingParams()], Filters.NONE),
    ([SamplingParams(top_k=VOCABULARY)], Filters.NONE), ([SamplingParams(top_k=1)], Filters.SMALL_TOP_K),
    ([SamplingParams(), SamplingParams(top_k=9, top_p=0.9)], Filters.SMALL_TOP_K),
    ([SamplingParams(temperature=0.0, top_p=0.9), SamplingParams()], Filters.NONE),
    ([SamplingParams(top_k=5), SamplingParams(top_p=0.9)], Filters.ANY)])
def test_sampler_filters_are_the_most_that_a_sampled_row_has(params: list[SamplingParams], filters: Filters) -> None:
    chooser = sampler(*params)
    seen: list[Filters] = []

    def sample(*args: Any) -> Tensor:
        seen.append(args[-1])
        ids: Tensor = KERNELS["sample"](*args)
        return ids

    chooser._k.sample = sample
    chooser.choose(logits_of(len(params)), [(r, 3) for r in range(len(params))])
    assert seen == [filters]


def test_filters_of_large_top_k_need_a_sort() -> None:
    assert Filters.of(1024, 1.0, 5000) is Filters.SMALL_TOP_K
    assert Filters.of(1025, 1.0, 5000) is Filters.ANY
    assert Filters.of(1025, 1.0, 1000) is Filters.NONE


def test_sampler_penalties_equal_transformers() -> None:
    """Greedy over many steps: repetition as in transformers, presence and frequency computed by hand."""
    params = SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2)
    prompt, output = [1, 2, 3, 3], [5]
    made = sampler(params, prompt=prompt, output=output)
    for position in range(5, 40):
        logits = logits_of(1, seed=position % 3)
        scores = logits[:, :VOCABULARY].clone()
        scores = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([prompt + output]), scores)
        for token, times in Counter(output).items():
            scores[0, token] -= 0.3 + 0.2 * times
        chosen = int(made.choose(logits, [(0, position)]).ids[0, 0])
        assert chosen == int(scores.argmax())
        output.append(chosen)
    assert len(set(output)) > 3


def test_sampler_request_with_output_continues() -> None:
    params = SamplingParams(seed=5, repetition_penalty=1.3, frequency_penalty=0.7, min_tokens=6, ending_ids=(4, 8))
    whole, output = sampler(params), []
    for position in range(3, 20):
        row = logits_of(1, seed=position)
        if position == 8:
            resumed = sampler(params, output=list(output))
        if position >= 8:
            expected = int(resumed.choose(row, [(0, position)]).ids[0, 0])
        output.append(int(whole.choose(row, [(0, position)]).ids[0, 0]))
        if position >= 8:
            assert output[-1] == expected


def test_sampler_logit_bias_equals_transformers() -> None:
    bias = {5: 4.0, 60: -100.0, 0: 1.5}
    theirs = SequenceBiasLogitsProcessor([[[i], b] for i, b in bias.items()])
    for seed in range(10):
        logits = logits_of(1, seed)
        expected = theirs(torch.tensor([[1, 2, 3]]), logits[:, :VOCABULARY].clone())
        assert choose(logits, SamplingParams(temperature=0.0, logit_bias=bias)) == int(expected.argmax())
    assert choose(logits_of(1), SamplingParams(seed=3, logit_bias={9: 100.0})) == 9


def test_sampler_chooses_only_allowed_tokens() -> None:
    allowed = (3, 50, 96)
    logits = logits_of(1)
    greedy = SamplingParams(temperature=0.0, allowed_token_ids=allowed)
    assert choose(logits, greedy) == max(allowed, key=lambda i: float(logits[0, i]))
    made = sampler(SamplingParams(seed=1, temperature=50.0, allowed_token_ids=allowed))
    assert {int(made.choose(logits, [(0, p)]).ids[0, 0]) for p in range(3, 60)} == set(allowed)
    biased = SamplingParams(temperature=0.0, allowed_token_ids=allowed, logit_bias={50: 90.0, 51: 100.0})
    assert choose(logits, biased) == 50


@pytest.mark.parametrize("min_tokens", [1, 4])
def test_sampler_min_tokens_equals_transformers(min_tokens: int) -> None:
    ending = (6, 7)
    logits = logits_of(1)
    logits[0, 7] = 60
    theirs = MinNewTokensLengthLogitsProcessor(3, min_tokens, list(ending))
    made = sampler(SamplingParams(temperature=0.0, min_tokens=min_tokens, ending_ids=ending))
    for position in range(3, 10):
        expected = theirs(torch.zeros(1, position, dtype=torch.int64), logits[:, :VOCABULARY].clone())
        assert made.choose(logits, [(0, position)]).ids.item() == int(expected.argmax())
        assert (int(expected.argmax()) == 7) == (position >= 3 + min_tokens)


@pytest.mark.parametrize(("ending", "is_ignored"), [((6, 7, 8), True), ((6, 7), True), ((7, 8), False)])
def test_sampler_min_tokens_with_only_endings_allowed_is_ignored(ending: tuple[int, ...], is_ignored: bool) -> None:
    params = SamplingParams(temperature=0.0, min_tokens=4, ending_ids=ending, allowed_token_ids=(6, 7))
    logits = logits_of(1)
    logits[0, 7] = 60
    assert choose(logits, params) == (7 if is_ignored else 6)


@pytest.mark.parametrize(("position", "kept"), [(3, [9]), (4, [9]), (5, [6, 7, 9])])
def test_sampler_restrict_removes_ending_ids_until_min_tokens(position: int, kept: list[int]) -> None:
    mask = mask_of([6, 7, 9], 4)
    sampler(SamplingParams(min_tokens=2, ending_ids=(6, 7))).restrict(0, position, mask)
    assert mask.tolist() == mask_of(kept, 4).tolist()


@pytest.mark.parametrize(("output", "chosen"), [([], 9), ([1, 1, 1], 9), ([1, 1, 1, 1], 6)])
def test_sampler_bias_does_not_override_min_tokens(output: list[int], chosen: int) -> None:
    params = SamplingParams(temperature=0.0, min_tokens=4, ending_ids=(6,), logit_bias={6: 100.0, 9: 50.0})
    assert choose(logits_of(1), params, output=output) == chosen


def test_sampler_ignores_ids_beyond_vocabulary() -> None:
    params = SamplingParams(
        temperature=0.0, min_tokens=9, ending_ids=(VOCABULARY, 10**6), logit_bias={VOCABULARY: 9.0},
        allowed_token_ids=(5, VOCABULARY)
    )
    assert choose(logits_of(1), params) == 5


def test_sampler_logprobs_use_unedited_logits() -> None:
    edits = {"repetition_penalty": 5.0, "logit_bias": {9: 100.0, 4: -100.0}, "min_tokens": 5, "ending_ids": (1,)}
    params = SamplingParams(temperature=0.0, logprobs=2, **edits)  # type: ignore[arg-type]
    logits = logits_of(2)
    result = sampler(params, GREEDY).choose(logits, [(1, 3), (0, 3)])
    logarithms = logits[1, :VOCABULARY].double().log_softmax(dim=-1)
    order = logarithms.sort(descending=True)
    (row, report), = result.reports().items()
    assert row == 1
    assert report.token_id == result.ids[1, 0] == 9
    assert report.logprob == pytest.approx(float(logarithms[9]), abs=1e-5)
    assert report.rank == order.indices.tolist().index(9) + 1
    assert report.top_ids == order.indices[:2].tolist()
    assert report.top_logprobs == pytest.approx(order.values[:2].tolist(), abs=1e-5)


def test_sampler_logprobs_have_requested_length() -> None:
    params = [SamplingParams(logprobs=n) for n in (0, 5, 20)] + [SamplingParams(logprobs=1000)]
    reports = sampler(*params).choose(logits_of(4), [(r, 3) for r in range(4)]).reports()
    assert [len(reports[r].top_ids) for r in range(4)] == [0, 5, 20, VOCABULARY]
    assert all(len(r.top_ids) == len(r.top_logprobs) for r in reports.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampler_prompt_logprobs(dtype: torch.dtype) -> None:
    logits = logits_of(5, dtype=dtype)
    next_ids = torch.tensor([4, 0, 96, 50, 4])
    reports = sampler().prompt_logprobs(logits, next_ids, 3).reports()
    logarithms = logits[:, :VOCABULARY].double().log_softmax(dim=-1)
    assert [r.token_id for r in reports] == next_ids.tolist()
    assert [r.logprob for r in reports] == pytest.approx(logarithms[torch.arange(5), next_ids].tolist(), abs=1e-5)
    for report, row in zip(reports, logarithms, strict=True):
        assert report.top_logprobs == pytest.approx(row.sort(descending=True).values[:3].tolist(), abs=1e-5)
        assert report.rank == int((row > row[report.token_id]).sum()) + 1
    assert sampler().prompt_logprobs(logits[:0], next_ids[:0], 3).reports() == []


def test_sampler_state_lives_from_add_to_remove() -> None:
    made = sampler(GREEDY)
    with pytest.raises(ValueError, match="request 0 exists already"):
        made.add(NewRequest(0, [1], [], GREEDY))
    made.remove(0)
    with pytest.raises(KeyError):
        made.remove(0)
    with pytest.raises(KeyError):
        made.choose(logits_of(1), [(0, 3)])
    made.add(NewRequest(0, [1], [], GREEDY))
    made.choose(logits_of(1), [(0, 1)])


def test_sampler_counts_only_with_penalties() -> None:
    made = sampler(*MIXED)
    made.choose(logits_of(len(MIXED)), [(request, 3) for request in range(len(MIXED))])
    penalized = [request for request, state in made._states.items() if state.on_device and state.on_device.counts]
    assert penalized == [request for request, p in zip(count(), MIXED) if p.penalized] == [4, 5, 9]


def test_sampler_slots_belong_to_live_requests_with_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPU, "capabilities", replace(CPU.capabilities, sampler_filters=(Filters.ANY,)))
    made, penalized = Sampler(KernelSet("none"), VOCABULARY, CPU, 1), SamplingParams(presence_penalty=1.0)
    for request, params in enumerate([SamplingParams(), penalized, penalized]):
        made.add(NewRequest(request, [1], [], params))
    made.remove(1)
    made.add(NewRequest(3, [1], [], penalized))
    assert {request: state.slot for request, state in made._states.items()} == {0: 0, 2: 0, 3: 1}


@pytest.mark.parametrize("position", [2, 4])
def test_sampler_penalized_position_out_of_order_is_refused(position: int) -> None:
    made = sampler(SamplingParams(presence_penalty=1.0))
    with pytest.raises(ValueError, match=f"request 0: position {position} instead of 3"):
        made.choose(logits_of(1), [(0, position)])
    made.choose(logits_of(1), [(0, 3)])
    made.choose(logits_of(1), [(0, 4)])
