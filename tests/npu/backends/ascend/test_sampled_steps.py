"""Captured steps with the sampler on the emulated Ascend device: one dispatch for rows of any parameters."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from npuserve.kernels import ascend
from npuserve.kernels.registry import KERNELS, KernelSet
from npuserve.kernels.sample import Filters
from npuserve.npu import emulator
from npuserve.npu.backends.ascend import captured_graph, graphs
from npuserve.npu.execution import capture
from npuserve.npu.execution.runner import Runner
from npuserve.npu.execution.sampler import Sampler
from npuserve.npu.execution.sampling_state import HostSampling, Penalties, SamplingInputs
from npuserve.npu.step import NewRequest, Row, SamplingParams, Step, StepResult, TokenLogprobs
from tests.npu.backends.ascend.test_backend import RELAX, load, started
from tests.npu.backends.small import Ask, answers, asks, saved, saved_w8a8
from tests.npu.emulator.child import emulated

DEFAULT = SamplingParams()
PARAMETERS = [
    SamplingParams(temperature=0.0), DEFAULT, SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(top_p=0.8), SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.25, top_p=0.95),
]


def varied(count: int, parameters: list[SamplingParams]) -> list[Ask]:
    """Return requests with different parameters and seeds."""
    made = asks(len(parameters), count)
    for seed, (ask, sampling) in enumerate(zip(made, parameters, strict=True)):
        ask.sampling = SamplingParams(**{name: getattr(sampling, name) for name in sampling.__struct_fields__}
                                      | {"seed": seed})
    return made


@pytest.mark.parametrize("buckets", [(), (1, 2)], ids=["captured", "beyond the largest bucket"])
@emulated(relax=RELAX)
def test_mixed_parameters_of_one_dispatch_equal_cpu(tmp_path: Path, buckets: tuple[int, ...]) -> None:
    """Greedy, sampled and penalized rows share steps, also with chunks, and beyond the buckets, where a step of any
    rows computes them. All count the tokens of penalties in the same place."""
    saved(tmp_path)
    npu, cpu = load(tmp_path, decode_buckets=buckets), load(tmp_path, "cpu", block_size=128, threads=1)
    got, results = answers(npu, varied(40, PARAMETERS))
    expected, _ = answers(cpu, varied(40, PARAMETERS))
    assert got == expected
    assert sum(result.captured_decodes for result in results) > 150
    assert max(result.captured_decodes for result in results) == 7
    assert not any(result.decoder_decodes for result in results)


@emulated(relax=RELAX)
def test_step_of_any_rows_samples_a_limited_number(tmp_path: Path) -> None:
    """Beyond it LM head and sampler follow kernel by kernel."""
    saved(tmp_path)
    with patch.object(capture, "MAX_CHOSEN", 3):
        npu = load(tmp_path, decode_buckets=(1, 2))
    got, results = answers(npu, varied(20, PARAMETERS))
    assert got == answers(load(tmp_path, "cpu", block_size=128, threads=1), varied(20, PARAMETERS))[0]
    assert npu._dispatch.chunks.sampled
    assert max(result.captured_decodes for result in results) == 3
    assert max(result.decoder_decodes for result in results) == 7


@emulated()
def test_w8a8_mixed_parameters_are_one_dispatch(tmp_path: Path) -> None:
    runner = load(saved_w8a8(tmp_path), dtype="bfloat16")
    got, results = answers(runner, varied(30, PARAMETERS))
    assert [len(tokens) for tokens in got] == [30 + i for i in range(len(PARAMETERS))]
    assert sum(result.captured_decodes for result in results) > 40


@pytest.mark.parametrize("other", [{"logprobs": 2}, {"logit_bias": {5: 4.0}}, {"allowed_token_ids": (3, 5, 7)},
                                   {"min_tokens": 50, "ending_ids": (5,)}], ids=lambda other: next(iter(other)))
@emulated(relax=RELAX)
def test_rows_that_need_logits_are_counted_apart(tmp_path: Path, other: dict[str, Any]) -> None:
    """Their decoder is a dispatch, their sampler is not: tokens of mode "decoder"."""
    saved(tmp_path)
    found = []
    for runner in (load(tmp_path), load(tmp_path, "cpu", block_size=128, threads=1)):
        got, results = answers(runner, varied(6, [SamplingParams(**other), DEFAULT]))
        found.append(got)
        if runner.backend_name == "npu":
            assert sum(result.decoder_decodes for result in results) > 4
            assert sum(result.captured_decodes for result in results) > 0  # steps of the other request alone
    assert found[0] == found[1]


@emulated(relax=RELAX)
def test_prompt_logprobs_of_captured_chunks_equal_cpu(tmp_path: Path) -> None:
    """The dispatch that also chooses the tokens returns the hidden states of the whole chunk. All requests but one
    have prompt_logprobs, and chunks run beside decode rows."""
    saved(tmp_path)
    found: list[tuple[list[list[int]], dict[int, list[TokenLogprobs]]]] = []
    for runner in (load(tmp_path), load(tmp_path, "cpu", block_size=128, threads=1)):
        requests = varied(12, [DEFAULT, *(SamplingParams(temperature=t, prompt_logprobs=2) for t in (0.0, 1.0, 1.0))])
        got, results = answers(runner, requests)
        reports: dict[int, list[TokenLogprobs]] = {}
        for result in results:
            for key, more in result.prompt_logprobs.items():
                reports.setdefault(key, []).extend(more)
        assert {key: len(made) for key, made in reports.items()} == {
            key: len(requests[key].prompt) - 1 for key in (1, 2, 3)}
        if runner.backend_name == "npu":
            assert all(result.captured for result in results)
            assert not any(result.decoder_decodes for result in results)
        found.append((got, reports))
    (got, reports), (expected, others) = found
    assert got == expected
    for key, made in reports.items():
        for one, other in zip(made, others[key], strict=True):
            assert (one.token_id, one.rank, one.top_ids) == (other.token_id, other.rank, other.top_ids)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def taking_turns(runner: Runner) -> tuple[dict[int, list[int]], list[StepResult]]:
    """Run requests 0 and 1 in turn with 2 and 3; then 4 and 5 replace 0 and 1. Return tokens and results."""
    tokens: dict[int, list[int]] = {}
    results = []

    def step(*requests: int, ended: Sequence[int] = ()) -> None:
        rows, new = [], []
        for i in requests:
            if i in tokens:
                rows.append(Row(i, tokens[i][-1:], len(tokens[i]) - 1, [i], True))
                continue
            tokens[i] = [i + 1, 7, 9]
            sampling = SamplingParams(temperature=0.0, repetition_penalty=1.1 + 0.1 * i)
            new.append(NewRequest(i, [*tokens[i]], [], sampling))
            rows.append(Row(i, [*tokens[i]], 0, [i], True))
        results.append(runner.collect(runner.launch(Step(rows, new, [*ended]))))
        for i, sampled in results[-1].token_ids.items():
            tokens[i] += sampled

    for _ in range(6):
        step(0, 1)
        step(2, 3)
    step(4, 5, ended=(0, 1))
    for _ in range(5):
        step(4, 5)
        step(2, 3)
    return tokens, results


@emulated(relax=RELAX)
def test_more_penalized_requests_than_slots_equal_cpu(tmp_path: Path) -> None:
    """Requests 2 and 3 have no slot and are sampled outside of the dispatch. 4 and 5 get the slots of 0 and 1."""
    saved(tmp_path)
    tokens, results = taking_turns(load(tmp_path, max_num_seqs=2))
    assert sum(result.captured_decodes for result in results) == 20
    assert sum(result.decoder_decodes for result in results) == 20
    assert tokens == taking_turns(load(tmp_path, "cpu", max_num_seqs=2, block_size=128, threads=1))[0]


@emulated(relax=RELAX)
def test_timed_sampled_step_equals_captured(tmp_path: Path) -> None:
    """Every third step runs kernel by kernel, and observes all kernels of the dispatch."""
    saved(tmp_path)
    seen: Counter[str] = Counter()
    timed = load(tmp_path, kernel_sampling=3, observe=lambda name, *_: seen.update([name]))
    got, results = answers(timed, varied(9, PARAMETERS))
    assert got == answers(load(tmp_path), varied(9, PARAMETERS))[0]
    assert {result.captured_decodes > 0 for result in results} == {True, False}
    assert {"penalize", "sample", "linear", "keep_ids", "take_ids"} <= set(seen)


# The distribution


def shares(logprobs: dict[int, float], sampling: SamplingParams) -> dict[int, float]:
    """Return the probabilities that the filters define, from a model's log-probabilities, in float64."""
    ranked = sorted(logprobs, key=lambda i: (-logprobs[i], i))
    peak = logprobs[ranked[0]]
    weight = {i: math.exp((logprobs[i] - peak) / sampling.temperature) for i in ranked}
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    total, mass, kept = sum(weight[i] for i in ranked), 0.0, []
    for i in ranked:
        if mass < sampling.top_p * total:
            kept.append(i)
        mass += weight[i]
    kept = [i for i in kept if weight[i] >= sampling.min_p]
    return {i: weight[i] / sum(weight[j] for j in kept) for i in kept}


@pytest.mark.parametrize("sampling", [
    pytest.param(DEFAULT, id="default", marks=pytest.mark.full),
    # By default test_backend.py compares the filters alone with the CPU's.
    pytest.param(SamplingParams(temperature=0.6, top_k=6), id="top_k", marks=pytest.mark.full),
    pytest.param(SamplingParams(temperature=1.5, top_p=0.7), id="top_p", marks=pytest.mark.full),
    pytest.param(SamplingParams(temperature=1.2, top_k=30, top_p=0.9, min_p=0.02), id="all")])
@emulated()
def test_sampled_rows_have_the_distribution_of_their_logits(tmp_path: Path, sampling: SamplingParams) -> None:
    """800 draws in bfloat16 from captured steps, with fixed seeds, beside the model's own probabilities. The bound of
    the chi-squared statistic is 5 standard deviations above its mean."""
    saved(tmp_path)
    runner, rows, prompt = load(tmp_path, dtype="bfloat16"), range(8), [3, 1, 4]
    report = SamplingParams(temperature=0.0, logprobs=100)
    runner.collect(runner.launch(Step([Row(i, prompt, 0, [i], True) for i in rows],
                                      [NewRequest(i, prompt, [], report) for i in rows])))
    first = runner.collect(runner.launch(Step([Row(0, [5], 3, [0], True)]))).logprobs[0][0]
    expected = shares(dict(zip(first.top_ids, first.top_logprobs, strict=True)), sampling)
    drawn: Counter[int] = Counter()
    ended, number = list(rows), 100
    for _ in range(100):
        new = [NewRequest(number + i, [*prompt, 5], [], SamplingParams(
            temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p,
            seed=number + i)) for i in rows]
        result = runner.collect(runner.launch(Step(
            [Row(number + i, [5], 3, [i], True) for i in rows], new, ended)))
        assert result.captured_decodes == len(rows)
        drawn.update(token for sampled in result.token_ids.values() for token in sampled)
        ended, number = [request.request_id for request in new], number + len(rows)
    count = sum(drawn.values())
    assert count == 800
    assert set(drawn) <= set(expected)
    common = {i: share for i, share in expected.items() if share * count >= 5}
    cells = [(drawn[i], share * count) for i, share in common.items()]
    if rare := 1 - sum(common.values()):
        cells.append((count - sum(n for n, _ in cells), max(rare * count, 1e-6)))
    statistic = sum((n - share) ** 2 / share for n, share in cells if share > 1)
    freedom = max(1, len(cells) - 1)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom), (statistic, freedom)


# The inputs


@emulated()
def test_rows_without_temperature_take_the_first_of_the_likeliest(tmp_path: Path) -> None:
    """Equal bfloat16 logits, NaN and infinities: as the kernel `greedy`, also beside sampled rows."""
    backend = started()
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    logits[0, 9] = logits[0, 40] = 5
    logits[1, 3] = math.nan
    logits[2] = -math.inf
    logits[3, 7] = logits[3, 8] = math.inf
    sampler = Sampler(KernelSet(ascend.LABEL), 60, backend, 2)
    host = HostSampling(np.zeros(5, np.int64), np.zeros(5, np.int32), np.zeros((7, 5), np.float32), 60)
    host.clear()
    host.set_chance(4, 0.9, 3, 0.8, 0.0, 0.999999999999)
    floats = [torch.from_numpy(row.copy()).npu() for row in host.floats]
    inputs = SamplingInputs(torch.from_numpy(host.slots).npu(), torch.from_numpy(host.top_k).npu(), *floats)
    for filters in (Filters.SMALL_TOP_K, Filters.ANY):
        ids = sampler.sample_fixed(logits.npu(), inputs, filters)[:, 0].tolist()
        assert ids[:4] == KERNELS["greedy"].golden(logits[:4], 60)[:, 0].tolist()
        assert ids[4] in logits[4, :60].topk(3).indices.tolist()


def test_penalties_slots_are_reused() -> None:
    from npuserve.npu.backends.cpu import CpuBackend

    penalties = Penalties(2, 10, CpuBackend())
    assert [penalties.take() for _ in range(3)] == [1, 2, 0]
    penalties.give_back(0)
    assert penalties.take() == 0
    penalties.give_back(1)
    assert penalties.take() == 1
    assert penalties.in_prompt.shape == penalties.output_counts.shape == (3, 10)


def test_uniform_number_stays_below_one_in_float32() -> None:
    host = HostSampling(np.zeros(1, np.int64), np.zeros(1, np.int32), np.zeros((7, 1), np.float32), 10)
    host.set_chance(0, 1.0, 11, 1.0, 0.0, 1 - 2**-53)
    assert host.floats[3, 0] < 1


# A sampler that cannot be captured


@pytest.mark.parametrize(("operator", "chunks"), [
    pytest.param("aclnnSort", False, marks=pytest.mark.full), ("aclnnIndexPutImpl", True)])
@emulated(relax=RELAX, fresh=True)
def test_refused_sampler_leaves_the_decoder_captured(tmp_path: Path, operator: str, chunks: bool) -> None:
    """The log names the operator, and tokens are the CPU's. A step with chunks needs no sort in its first capture."""
    saved(tmp_path)
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("npuserve.npu.execution.capture").addHandler(handler)
    refuse_in_captures(operator)
    npu = load(tmp_path, capture_chunks=chunks)
    emulator.heal()
    (said,) = warned
    assert said.startswith(f"device: steps cannot be captured with {operator}")
    assert said.endswith("The sampler runs kernel by kernel after captured steps, which is slower")
    captured = npu._dispatch
    assert captured.decodes.argmax
    assert (bool(captured.chunks.hidden), captured.decodes.sampled, captured.chunks.sampled) == (chunks, {}, {})
    got, results = answers(npu, varied(20, PARAMETERS))
    assert got == answers(load(tmp_path, "cpu", block_size=128, threads=1), varied(20, PARAMETERS))[0]
    assert sum(result.decoder_decodes for result in results) > 60
    got, results = answers(load(tmp_path, capture_chunks=chunks, capture="decoder"), asks(3, 6))
    assert sum(result.captured_decodes for result in results) > 5


def refuse_in_captures(operator: str) -> None:
    """Let the device refuse an operator from now on, but not outside of captures."""
    capture = captured_graph.capture

    def refusing(step: Any, *args: Any) -> Any:
        def launches(count: int) -> Any:
            if torch.npu.is_current_stream_capturing():
                emulator.fail(f"{operator}GetWorkspaceSize", 507009, times=-1)
            try:
                return step(count)
            finally:
                emulator.heal()

        return capture(launches, *args)

    graphs.capture = refusing  # type: ignore[assignment]
