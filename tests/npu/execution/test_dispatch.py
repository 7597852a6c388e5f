"""Backend that captures only decode steps, in buckets, as a device with graphs does. It uses the CPU's kernels, so that
results can be compared bit by bit with a backend that captures every step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from npuserve.kernels import native
from npuserve.npu.backends.base import Captured, CaptureError
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution import load as load_module
from npuserve.npu.execution.batch import Batch
from npuserve.npu.execution.capture import CapturableSteps, capture_steps
from npuserve.npu.execution.dispatch import MIN_FORCED, MIN_FORCED_EAGER
from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import NewRequest, Row, SamplingParams, Step
from tests.npu.execution.test_runner import Driver, ids_of, load
from tests.support.models import random_model, saved

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")

BUCKETS = (2, 4)


class Graph:
    """Captured step that computes whole buckets and cannot be split into kernels. replays: rows of each replay."""

    largest = BUCKETS[-1]

    def __init__(self, step: Callable[[int], Tensor]):
        self._step = step
        self.replays: list[int] = []
        for rows in BUCKETS:  # graphs are warmed up on the padding in the buffers
            step(rows)

    def size(self, rows: int) -> int:
        return next(size for size in BUCKETS if size >= rows)

    def replay(self, rows: int, context_lens: Sequence[int], cu_seqlens: Sequence[int] = ()) -> Tensor:
        size = self.size(rows)
        assert len(context_lens) == size
        assert list(context_lens[rows:]) == [1] * (size - rows)
        self.replays.append(rows)
        return self._step(size)[:rows]

    def replay_timed(self, rows: int, context_lens: Sequence[int]) -> None:
        return


class Bucketed(CpuBackend):
    capabilities = replace(CpuBackend.capabilities, padding_blocks=1)

    def capture(self, step: Callable[[int], Tensor], largest: int, *, decode: bool, **_: object) -> Captured | None:
        return Graph(step) if decode else None


@pytest.fixture
def pair(tmp_path, monkeypatch) -> Iterator[tuple[Runner, Runner]]:
    """Return runners of one model: decode buckets captured, every step captured."""
    before = native.library().threads
    folder = saved(random_model("qwen3", max_position_embeddings=128), tmp_path)
    plain = load(folder, max_num_seqs=8)
    monkeypatch.setattr(load_module, "select", lambda name, emulate, settings: Bucketed(settings=settings))
    yield load(folder, max_num_seqs=8), plain
    native.library().set_threads(before)


SAMPLING = [
    SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(seed=5, top_p=0.9, logprobs=1), SamplingParams(temperature=0.0, prompt_logprobs=1),
    SamplingParams(temperature=0.0, repetition_penalty=1.2), SamplingParams(temperature=0.0),
]


def test_chunks_of_forced_tokens_are_longer_where_they_are_not_captured(pair):
    bucketed, plain = pair
    assert (bucketed.min_forced, plain.min_forced) == (MIN_FORCED_EAGER, MIN_FORCED)


@pytest.mark.parametrize("greedy", [True, False])
def test_bucketed_steps_are_bit_identical(pair, greedy):
    seen = []
    for runner in pair:
        r, driver = random.Random(4), Driver(runner, seed=3)
        captured = decodes = 0
        waiting, found = list(range(6)), {}
        while waiting or driver.tokens:
            if waiting and (r.random() < 0.5 or not driver.tokens):
                request = waiting.pop(0)
                driver.add(request, ids_of(3 + 5 * request, request), SAMPLING[0 if greedy else request])
            before = {q: driver.done[q] for q in driver.tokens}
            result = driver.step(7)
            captured += result.captured_decodes + result.decoder_decodes
            decodes += sum(before[q] > 0 and driver.done[q] == before[q] + 1 and q in result.token_ids
                           for q in driver.tokens)
            for request in [q for q in driver.tokens if len(driver.generated(q)) == 25]:
                found[request] = driver.end(request)
        seen.append((found, driver.logprobs, driver.prompt_logprobs))
        assert 0 < captured <= decodes
        if runner is pair[1]:
            assert captured == decodes
    assert seen[0] == seen[1]
    captured = pair[0]._dispatch.decodes
    graphs = [captured.argmax, captured.hidden]
    assert {rows for graph in graphs for rows in graph.replays} == {1, 2, 3, 4}
    assert len(graphs[0].replays) > 0


def test_bucketed_padding_does_not_change_cache(pair):
    runner, _ = pair
    caches = [tensor for layer in runner._store.paged for tensor in layer]
    prompt = ids_of(5)
    runner.collect(runner.launch(Step(
        [Row(0, prompt, 0, [3], True)], [NewRequest(0, prompt, [], SAMPLING[0])])))
    before = [tensor.clone() for tensor in caches]
    runner.collect(runner.launch(Step([Row(0, [1], 5, [3], True)])))
    assert runner._dispatch.decodes.argmax.replays[-1] == 1
    for tensor, was in zip(caches, before, strict=True):
        changed = [block for block in range(len(tensor)) if not torch.equal(tensor[block], was[block])]
        assert set(changed) <= {3, runner.num_blocks}
        assert 3 in changed


def test_mixed_step_still_replays_decode_rows(pair):
    runner, _ = pair
    news = [NewRequest(q, ids_of(4, q), [], SAMPLING[0]) for q in range(6)]
    runner.collect(runner.launch(Step(
        [Row(q, ids_of(4, q), 0, [q], True) for q in range(5)], news)))

    def step(*rows: Row):
        return runner.collect(runner.launch(Step(list(rows))))

    decodes = [Row(q, [1], 4, [q], True) for q in range(5)]
    mixed = step(*decodes[:3], Row(5, ids_of(3, 5), 0, [5], False))
    assert (mixed.captured, mixed.captured_decodes) == (True, 3)
    assert set(mixed.token_ids) == {0, 1, 2}
    beyond = step(*decodes)  # more rows than the largest bucket: each row still gets its token
    assert (beyond.captured, beyond.captured_decodes) == (False, 0)
    assert set(beyond.token_ids) == set(range(5))
    chunk = step(Row(5, ids_of(4, 5)[3:], 3, [5], True))
    assert chunk.captured_decodes == 1  # a prompt's last token counts as a decode row


def test_timed_step_runs_kernel_by_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(load_module, "select", lambda name, emulate, settings: Bucketed(settings=settings))
    calls: list[str] = []
    folder = saved(random_model("qwen3"), tmp_path)
    runner = load(folder, kernel_sampling=2, observe=lambda name, *_: calls.append(name))
    driver = Driver(runner)
    driver.add(0, ids_of(4))
    results = [driver.step(64) for _ in range(4)]
    assert [result.captured for result in results] == [False, True, False, True]
    assert calls.count("take_ids") == 2
    assert calls.count("linear_argmax") == 2


def test_timed_step_of_a_device_that_compiles_has_the_sizes_of_captured_steps(tmp_path, monkeypatch):
    """A timed step of another size would wait for a compiler, and all streams with it."""

    class Compiling(Bucketed):
        capabilities = replace(Bucketed.capabilities, compiles=True)

    monkeypatch.setattr(load_module, "select", lambda name, emulate, settings: Compiling(settings=settings))
    runners = [load(saved(random_model("qwen3"), tmp_path), kernel_sampling=sampling) for sampling in (1, 0)]
    sizes: list[tuple[int, int]] = []
    forward = runners[0]._forward
    hidden = forward.hidden

    def counted(batch: Batch) -> Tensor:
        sizes.append((len(batch.ids), len(batch.attention.context_lens)))
        return hidden(batch)

    monkeypatch.setattr(forward, "hidden", counted)
    answers = []
    for runner in runners:
        driver = Driver(runner)
        for number in range(3):
            driver.add(number, ids_of(2, number))
        found = [driver.step(64) for _ in range(3)]
        answers.append([step.token_ids for step in found])
        assert [step.captured for step in found[1:]] == [runner is runners[1]] * 2
    assert sizes == [(6, 3), (4, 4), (4, 4)]
    assert answers[0] == answers[1]


def test_rank_that_cannot_capture_fails(tmp_path, monkeypatch):
    """A process without other ranks runs its steps kernel by kernel, and a rank would then pad other rows."""

    class Refusing(Bucketed):
        def capture(self, step: Callable[[int], Tensor], largest: int, *, decode: bool, **_: object) -> Captured | None:
            raise CaptureError("device: steps cannot be captured")

    backend = Refusing()
    monkeypatch.setattr(load_module, "select", lambda *_: backend)
    runner = load(saved(random_model("qwen3"), tmp_path))
    assert runner._dispatch.decodes.argmax is None
    steps = CapturableSteps(runner._forward, runner._buffers, 2)
    with pytest.raises(CaptureError, match="cannot be captured"):
        capture_steps(backend, runner._buffers, steps, 2, mode="auto", captures_chunks=True, may_drop=False)
