"""Parts of a step on the device: each can be missing, and every row gets its own results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from npuserve.kernels.ascend import LABEL
from npuserve.kernels.registry import KERNELS
from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import PENDING, NewRequest, Row, Step, StepResult
from npuserve.service import metrics
from tests.npu.backends.ascend.test_backend import RELAX, load
from tests.npu.backends.small import GREEDY, Ask, answers, asks, masked, saved
from tests.npu.emulator.child import emulated
from tests.support import constrained

HEAD, TABLE = ("linear_argmax", "greedy"), ("embedding",)
"""Kernels that select a token, and the kernel that embeds it."""


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Replace the device's kernels of these names by their golden functions."""
    taken = {name: KERNELS[name].implementations.pop(LABEL) for name in names}
    try:
        yield
    finally:
        for name, implementation in taken.items():
            KERNELS[name].implementations[LABEL] = implementation


@contextmanager
def counted(runner: Runner) -> Iterator[Counter[str]]:
    """Count kernel calls by name, without the calls of replays."""
    kernels, calls = runner._kernels, Counter[str]()
    before = dict(kernels._functions)

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*args, **options)

        return call

    kernels.__dict__.update({name: counting(name, function) for name, function in before.items()})
    try:
        yield calls
    finally:
        kernels.__dict__.update(before)


def prefill(runner: Runner, rows: int, length: int = 3) -> StepResult:
    """Prefill `rows` requests with different prompts, one block each."""
    prompts = [[(7 * row + token) % 90 for token in range(length)] for row in range(rows)]
    return runner.collect(runner.launch(Step(
        [Row(row, prompt, 0, [row], True) for row, prompt in enumerate(prompts)],
        [NewRequest(row, prompt, [], GREEDY) for row, prompt in enumerate(prompts)])))


def decode(runner: Runner, rows: int, at: int) -> StepResult:
    return runner.collect(runner.launch(Step([Row(row, [PENDING], at, [row], True) for row in range(rows)])))


@pytest.mark.parametrize("missing", [
    HEAD, *(pytest.param(names, marks=pytest.mark.full) for names in (TABLE, (*TABLE, *HEAD)))], ids="+".join)
@emulated(relax=RELAX)
def test_ascend_step_without_one_kernel_uses_its_golden_function(tmp_path: Path, missing: tuple[str, ...]) -> None:
    """If the device lacks one of the kernels, its golden function runs on the device and in the captured step, so that
    no token is copied to the host in between."""
    saved(tmp_path)
    expected, _ = answers(load(tmp_path, "cpu", block_size=128, threads=1), asks(4, 8))
    with without(*missing):
        runner = load(tmp_path)
        assert set(runner.fallbacks) == set(missing)
        got, results = answers(runner, asks(4, 8))
    assert got == expected
    assert sum(result.captured_decodes for result in results) > 0


@emulated(relax=RELAX)
def test_ascend_prompt_token_is_selected_by_its_dispatch(tmp_path: Path) -> None:
    """The token after a prompt is selected in the captured step, as a decode row's."""
    saved(tmp_path)
    runner, cpu = load(tmp_path), load(tmp_path, "cpu", threads=1)
    with counted(runner) as calls:
        first = prefill(runner, 3)
        assert (calls, first.captured) == ({}, True)
        second = decode(runner, 3, 3)
        assert (calls, second.captured_decodes) == ({}, 3)
    assert first.token_ids == prefill(cpu, 3).token_ids
    assert second.token_ids == decode(cpu, 3, 3).token_ids


@pytest.mark.parametrize("drafts", [1, 3, 7])
@emulated(relax=RELAX)
def test_ascend_row_with_drafts_is_one_dispatch(tmp_path: Path, drafts: int) -> None:
    """Tokens after right drafts are those of single steps, and the captured step selects all of them."""
    saved(tmp_path)
    runner, cpu = load(tmp_path, max_drafts=16), load(tmp_path, "cpu", block_size=128, threads=1)
    first = prefill(runner, 2).token_ids
    assert first == prefill(cpu, 2).token_ids
    single = [decode(cpu, 2, at).token_ids for at in range(3, 4 + drafts)]
    answer = [token for each in single for token in each[0]]
    with counted(runner) as calls:
        result = runner.collect(runner.launch(Step([
            Row(0, [*first[0], *answer[:drafts]], 3, [0], 1 + drafts), Row(1, first[1], 3, [1], 1)])))
        assert (calls, result.captured) == ({}, True)
    assert result.token_ids == {0: answer, 1: single[0][1]}


@pytest.mark.parametrize("vocabulary", [
    64, 65, *(pytest.param(size, marks=pytest.mark.full) for size in (63, 100, 128, 200))])  # all other tests have 100
@emulated(relax=RELAX)
def test_ascend_rows_of_every_bucket_get_their_results(tmp_path: Path, vocabulary: int) -> None:
    """The padding of the vocabulary varies; rows run alone, in full and padded buckets, and beyond the largest."""
    saved(tmp_path, vocabulary=vocabulary)
    runner = load(tmp_path, decode_buckets=(1, 2, 4, 7))
    cpu = load(tmp_path, "cpu", block_size=128, threads=1)
    at, seen = 3, set()
    tokens = [prefill(each, 8).token_ids for each in (runner, cpu)]
    assert tokens[0] == tokens[1]
    assert set(tokens[0]) == set(range(8))
    for rows in (8, 7, 6, 5, 4, 3, 2, 1):
        found, expected = decode(runner, rows, at), decode(cpu, rows, at)
        assert found.token_ids == expected.token_ids
        assert set(found.token_ids) == set(range(rows))
        assert found.captured_decodes == rows
        assert all(0 <= token < vocabulary for (token,) in found.token_ids.values())
        seen |= {token for (token,) in found.token_ids.values()}
        at += 1
    assert len(seen) > 4


@pytest.mark.parametrize("capture_chunks", [True, False], ids=["one dispatch", "decode rows and chunks"])
@emulated(relax=RELAX)
def test_ascend_chunk_beside_decode_rows_equals_cpu(tmp_path: Path, capture_chunks: bool) -> None:
    """All its tokens are computed, in the dispatch of the decode rows or next to their replay."""
    saved(tmp_path)
    several = Step([
        Row(0, [PENDING], 3, [0], True), Row(1, [9, 8, 7], 3, [1], True), Row(2, [PENDING], 3, [2], True)])
    following = Step([Row(1, [PENDING], 6, [1], True)])
    found = []
    for runner in (load(tmp_path, capture_chunks=capture_chunks),
                   load(tmp_path, "cpu", block_size=128, threads=1)):
        prefill(runner, 3)
        found.append([runner.collect(runner.launch(step)) for step in (several, following)])
    npu, cpu = found
    assert [result.token_ids for result in npu] == [result.token_ids for result in cpu]
    assert [result.captured for result in npu] == [True, True]
    assert [result.captured_decodes for result in npu] == [2, 1]
    assert not any(result.decoder_decodes for result in npu)


@pytest.mark.parametrize("budget", [
    40, 130, *(pytest.param(size, marks=pytest.mark.full) for size in (64, 200))])  # most other tests have 64
@emulated(relax=RELAX)
def test_ascend_chunks_of_every_bucket_equal_cpu(tmp_path: Path, budget: int) -> None:
    """Prompts across blocks, alone in chunks of the budget and together: full and padded buckets of tokens, and batches
    of decode rows beyond the decode buckets."""
    saved(tmp_path)
    prompts = [[(7 * i + 3 * j) % 90 for j in range(length)] for i, length in enumerate((300, 1, 64, 190, 5))]
    found = []
    for settings in ({"decode_buckets": (2,)}, {"backend": "cpu", "block_size": 128, "threads": 1}):
        runner = load(tmp_path, max_num_batched_tokens=budget, **settings)
        alone, results = answers(runner, [Ask(prompts[0], 3)], chunk=budget)
        runner.launch(Step([], ended=[0]))
        got, more = answers(runner, [Ask(prompt, 12, at=i) for i, prompt in enumerate(prompts)], chunk=budget // 4)
        results += more
        found.append(alone + got)
        if runner.backend_name == "npu":
            assert all(result.captured for result in results)
            assert runner._dispatch.chunks.hidden is not None
            assert runner._dispatch.chunks.hidden.largest == budget
    assert found[0] == found[1]


@emulated(relax=RELAX)
def test_ascend_replay_of_other_batch_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    runner = load(tmp_path, decode_buckets=(2, 4))
    prefill(runner, 2)
    with pytest.raises(ValueError, match="request 1: a token that is being sampled must be alone in its row"):
        runner.launch(Step([Row(0, [PENDING], 3, [0], True), Row(1, [PENDING, 5], 3, [1], True)]))
    graphs = runner._dispatch.decodes.argmax
    assert graphs is not None
    for rows, lengths in ((2, [1]), (2, [1, 1, 1]), (3, [1, 1, 1])):
        with pytest.raises(ValueError, match=f"{len(lengths)} context lengths for a graph of {graphs.size(rows)} rows"):
            graphs.replay(rows, lengths)
    with pytest.raises(ValueError, match="5 rows, where the largest graph has 4"):
        graphs.replay(5, [1] * 5)
    chunks = runner._dispatch.chunks.hidden
    assert chunks is not None
    for lengths, ends in (([1, 2], [0, 1]), ([1, 2], [0, 1, 3])):
        with pytest.raises(ValueError, match=rf"2 context lengths and \[{ends[-1]}\] tokens for a graph of 64 tokens"):
            chunks.replay(3, lengths, ends)
    assert decode(runner, 2, 3).captured_decodes == 2


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "repetition_penalty": 1.2}], ids=["greedy", "sampled"])
@emulated(relax=RELAX)
def test_ascend_constrained_tokens_equal_cpu(tmp_path: Path, sampling: dict[str, Any]) -> None:
    """Two of three requests are constrained. The decoder of their steps is captured, LM head and sampler are not."""
    saved(tmp_path)
    found = []
    for runner in (load(tmp_path), load(tmp_path, "cpu", block_size=128, threads=1)):
        requests = asks(6, 8, **sampling)
        for key, request in enumerate(requests):
            request.mask = masked(key) if key % 3 else None
        got, results = answers(runner, requests)
        found.append(got)
        assert sum(result.decoder_decodes for result in results) > 20
    assert found[0] == found[1]


Order = tuple[int, int, bool, float]
"""Steps in flight, blocks of the KV cache, whether an engine died before, and the seconds to wait for a mask."""
ORDERS: list[Order] = [(depth, pool, is_restored, mask_seconds) for mask_seconds in (math.inf, 0.0) for depth in (1, 2)
                       for pool in (64, 3) for is_restored in (False, True)]


def constrained_by_grammars(folder: Path, orders: list[Order]) -> None:
    """Compare the tokens of each order. Rows are deferred if no step waits for a mask: they are computed again, on the
    device and beside captured decodes."""
    saved(folder, vocabulary=constrained.VOCABULARY)
    npu, cpu = load(folder), load(folder, "cpu", block_size=128, threads=1)
    cases, alone = constrained.cases(128), constrained.expected_by(cpu, 64)
    expected = [alone(case) for case in cases]
    preemptions = forced = 0
    for depth, pool, is_restored, mask_seconds in orders:
        deferred = metrics.deferred_rows_total._value.get()
        found, scheduler = constrained.answered(
            npu, cases, alone, depth=depth, pool=pool, seats=8, budget=64, is_restored=is_restored,
            mask_seconds=mask_seconds)
        assert found == expected
        assert mask_seconds or metrics.deferred_rows_total._value.get() > deferred
        preemptions += scheduler.preemptions
        forced += scheduler.forced_tokens
    assert preemptions
    assert forced
    for case in cases[:3]:
        assert constrained.answered(npu, [case], alone, depth=2, pool=64, seats=8, budget=64)[0] == [alone(case)]


@pytest.mark.full
@emulated(relax=RELAX)
def test_ascend_tokens_by_grammars_equal_cpu(tmp_path: Path) -> None:
    """Requests of all kinds run together and are preempted, after the death of an engine, and with deferred rows."""
    constrained_by_grammars(tmp_path, [(2, 64, False, math.inf), (2, 3, True, math.inf), (1, 3, False, 0.0)])


@pytest.mark.full
@emulated(relax=RELAX)
def test_ascend_tokens_by_grammars_in_every_order_equal_cpu(tmp_path: Path) -> None:
    constrained_by_grammars(tmp_path, ORDERS)
