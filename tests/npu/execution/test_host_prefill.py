"""Prompts computed on the host for a device that decodes: tokens equal the tokens of one device.

The device here is the CPU with golden functions and captured buckets; in test_host_prefill_ascend.py it is the emulated
NPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from npuserve.npu.backends.base import DEFAULT_SETTINGS, Captured, DeviceSettings
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution import load as load_module
from npuserve.npu.execution.host_prefill import HostPrefill, SlotRange, _portions
from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import NewRequest, Row, SamplingParams, Step
from tests.npu.backends import small

GREEDY = SamplingParams(temperature=0.0)


class Device(CpuBackend):
    """Device with memory of its own, although it is host memory."""

    name = "device"
    capabilities = replace(CpuBackend.capabilities, padding_blocks=1, block_size=16, vocabulary_tile=16)

    def __init__(self, settings: DeviceSettings = DEFAULT_SETTINGS) -> None:
        super().__init__(native=False, settings=settings)


class Graph:
    """Captured step of two or four rows."""

    largest = 4

    def __init__(self, step: Callable[[int], torch.Tensor]):
        self._step = step

    def size(self, rows: int) -> int:
        return 2 if rows <= 2 else 4

    def replay(self, rows: int, context_lens: Sequence[int], cu_seqlens: Sequence[int] = ()) -> torch.Tensor:
        return self._step(self.size(rows))[:rows]

    def replay_timed(self, rows: int, context_lens: Sequence[int]) -> None:
        return


class Bucketed(Device):
    def capture(
        self, step: Callable[[int], torch.Tensor], largest: int, *, decode: bool, **_: object
    ) -> Captured | None:
        return Graph(step) if decode else None


def load(folder: Path, **settings: Any) -> Runner:
    defaults = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 48, "threads": 1}
    runner = load_module.load_runner(
        folder, **{"kv_cache_memory": 16 << 20, **defaults, **settings}, progress=lambda done, total: None)
    assert isinstance(runner._prefill, HostPrefill) == (settings.get("prefill_device") == "cpu")
    return runner


@pytest.fixture(params=[Device, Bucketed])
def pair(request, tmp_path, monkeypatch, restored_threads) -> tuple[Runner, Runner]:
    """Return runners of one model: all on the device, and prompts on the host."""
    monkeypatch.setattr(load_module, "select", lambda name, emulate, settings: request.param(settings=settings))
    folder = small.saved(tmp_path, head_dim=16)
    return load(folder), load(folder, prefill_device="cpu")


@pytest.fixture
def restored_threads():
    before = torch.get_num_threads()
    yield
    CpuBackend(settings=DeviceSettings(threads=0))
    torch.set_num_threads(before)


def check_mirror(runner: Runner) -> int:
    """Assert that the mirror equals the device's cache bit by bit; return the number of slots compared."""
    prefill, size = runner._prefill, runner.block_size
    assert isinstance(prefill, HostPrefill)
    runner.backend.synchronize()
    runs = [SlotRange(block, 0, held) for block, held in enumerate(prefill._held) if held]
    assert all(run.last <= size for run in runs)
    slots = prefill._slots(runs)
    for own, cached in zip(prefill._mirror.paged, runner._store.paged, strict=True):
        mirrored = prefill._host.cache.read(*own, slots, runner.config.attention.head_dim)
        for ours, theirs in zip(mirrored, cached, strict=True):
            there = theirs[: runner.num_blocks].flatten(0, 1)[slots.to(theirs.device)].cpu()
            assert torch.equal(ours, there[..., : runner.config.attention.head_dim])
            assert not there[..., runner.config.attention.head_dim :].any()
            assert ours.any()
    return len(slots)


class Talks:
    """Conversations through the real scheduler: each prompt is the whole conversation and more. The tokens of a
    preempted request are a prompt, too."""

    def __init__(self, runner: Runner, blocks: int, depth: int, budget: int = 24, seats: int = 4):
        from npuserve.service.scheduling.block_manager import BlockManager
        from npuserve.service.scheduling.scheduler import Scheduler

        self.runner, self.depth = runner, depth
        self.scheduler = Scheduler(
            BlockManager(blocks, runner.block_size), max_num_seqs=seats, max_num_batched_tokens=budget, max_queue=100,
            aging_seconds=1.0)
        self.arrivals = 0

    def turn(self, prompts: list[list[int]], count: int, **sampling: Any) -> list[list[int]]:
        """Return answers of `count` tokens, computed concurrently."""
        from npuserve.service.ipc.messages import Request

        sequences = []
        for seed, prompt in enumerate(prompts):
            self.arrivals += 1
            request = Request(f"r{self.arrivals}", prompt, count, float(self.arrivals),
                              SamplingParams(seed=seed, **({"temperature": 0.0} | sampling)))
            sequences.append(self.scheduler.add(request, (b"", 0), 0.0).sequence)
        flying: list[Any] = []
        for _ in range(3000):
            step = self.scheduler.schedule(0.0).step
            if step.rows:
                flying.append((step, self.runner.launch(step)))
            if flying and (not step.rows or len(flying) == self.depth):
                done, handle = flying.pop(0)
                self.scheduler.apply(done, self.runner.collect(handle), 0.0)
            self.scheduler.check_integrity()
            if not (flying or self.scheduler.has_work):
                break
        return [sequence.token_ids[len(prompt):] for sequence, prompt in zip(sequences, prompts, strict=True)]


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(100, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def restored(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the number of slots of each copy from the device to the mirror."""
    counts: list[int] = []
    original = HostPrefill._restore
    monkeypatch.setattr(HostPrefill, "_restore", lambda self, runs: (
        counts.append(sum(run.last - run.first for run in runs)), original(self, runs))[1])
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [
    {}, {"temperature": 0.9, "top_p": 0.9}, {"repetition_penalty": 1.2, "logit_bias": {7: 4.0}}], ids=str)
def test_host_prefill_tokens_equal_one_device(pair, sampling):
    """Two steps are in flight. Chunks run next to decode rows, in some steps more than the largest bucket."""
    plain, hosted = pair
    expected, _ = small.answers(plain, small.asks(6, 12, **sampling))
    got, results = small.answers(hosted, small.asks(6, 12, **sampling))
    assert got == expected
    assert len({len(result.token_ids) for result in results}) > 3
    assert check_mirror(hosted) > 0


def constrained(count: int, **sampling: Any) -> list[small.Ask]:
    """Return six requests of which two of three are constrained."""
    made = small.asks(6, count, **sampling)
    for key, ask in enumerate(made):
        ask.mask = small.masked(key) if key % 3 else None
    return made


def test_host_prefill_computes_no_forced_tokens(pair):
    plain, hosted = pair
    assert plain.min_forced > hosted.min_forced == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.9, "logprobs": 1}], ids=str)
def test_host_prefill_constrained_tokens_equal_one_device(pair, depth, sampling):
    """The masks of a step are given while the host computes its chunks, or after that."""
    plain, hosted = pair
    expected, _ = small.answers(plain, constrained(12, **sampling))
    got, results = small.answers(hosted, constrained(12, **sampling), in_flight=depth)
    assert got == expected
    assert all(result.device_seconds > 0 for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
def test_host_prefill_next_prompt_restores_generated_tokens(pair, monkeypatch, depth):
    seen = []
    counts = restored(pair[1], monkeypatch)
    for runner in pair:
        talks = Talks(runner, blocks=60, depth=depth)
        prompts, answers = [ids(n, n) for n in (5, 40, 33)], []
        for turn in range(3):
            made = talks.turn(prompts, 30)
            answers.append(made)
            prompts = [p + a + ids(6 + turn, turn) for p, a in zip(prompts, made, strict=True)]
        seen.append((answers, talks.scheduler.memory.prefix_hits))
    assert seen[0] == seen[1]
    assert seen[0][1] > 200
    # generated tokens are copied only for the next prompt of their conversation, and once
    assert 100 <= sum(counts) <= 2 * 3 * 30
    check_mirror(pair[1])


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8}], ids=str)
@pytest.mark.parametrize("depth", [1, 2])
def test_host_prefill_preempted_requests_continue(pair, monkeypatch, depth, sampling):
    seen = []
    counts = restored(pair[1], monkeypatch)
    for runner in pair:
        talks = Talks(runner, blocks=9, depth=depth)
        seen.append(talks.turn([ids(n, n) for n in (20, 30, 9, 40)], 50, **sampling))
        assert talks.scheduler.preemptions > 1
    assert seen[0] == seen[1]
    assert sum(counts) > 0
    check_mirror(pair[1])


def test_host_prefill_reused_blocks_are_restored(pair):
    """A block's old owner decodes into it, its new owner computes a chunk in it, then decode rows and another chunk.

    The mirror tracks valid slots.
    """
    asked: list[list[int]] = []
    for runner in pair:
        answers = []
        for request, prompt in enumerate((ids(1, 1), ids(30, 2), ids(7, 3))):
            tokens, blocks, done = list(prompt), [3, 1, 2, 7], 0
            runner.collect(runner.launch(Step([], [NewRequest(request, prompt, [], GREEDY)])))
            for length in (1, 4, 1, 1, 3, 1, 40, 1, 2, 1):  # chunks of guessed tokens, which no scheduler would plan
                while len(tokens) < done + length:
                    tokens.append((7 * len(tokens) + request) % 100)
                end = min(done + length, len(tokens))
                row = Row(request, tokens[done:end], done, blocks[: -(-end // 16)], end == len(tokens))
                result = runner.collect(runner.launch(Step([row])))
                tokens += [token for sampled in result.token_ids.values() for token in sampled]
                done = end
            runner.launch(Step([], ended=[request]))
            answers += tokens
        asked.append(answers)
    assert asked[0] == asked[1]
    check_mirror(pair[1])


def test_host_prefill_logprobs_equal_one_device(pair):
    prompt = ids(40, 4)
    seen = []
    for runner in pair:
        sampling = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=3)
        runner.collect(runner.launch(Step([], [NewRequest(1, prompt, [], sampling), NewRequest(2, [5], [], GREEDY)])))
        reports = []
        for start in (0, 25):
            chunk = prompt[start : start + 25]
            rows = [Row(2, [5], 0, [9], True), Row(1, chunk, start, [4, 0, 2][: 2 + (start > 0)], start > 0)]
            result = runner.collect(runner.launch(Step(rows)))
            reports += result.prompt_logprobs[1] + [each for reports in result.logprobs.values() for each in reports]
        seen.append(reports)
    assert len(seen[0]) == len(prompt)
    for one, other in zip(*seen, strict=True):
        assert (one.token_id, one.rank, one.top_ids) == (other.token_id, other.rank, other.top_ids)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)


def test_host_prefill_decode_rows_do_not_wait(pair):
    """The previous step does not wait either: it is collected while the host computes a chunk."""
    _, runner = pair
    first = runner.launch(Step([Row(0, [5], 0, [0], True)], [NewRequest(0, [5], [], GREEDY)]))
    free = threading.Event()
    runner._prefill._host.enqueue(lambda: free.wait(60))
    second = runner.launch(Step(
        [Row(0, [-1], 1, [0], True), Row(1, ids(9, 1), 0, [1], True)], [NewRequest(1, ids(9, 1), [], GREEDY)]))
    token = runner.collect(first).token_ids[0][0]
    runner._waiting.queued.wait()  # the decode rows are complete
    early = int(runner._device_ids[0, 0])
    assert not runner.ready(second)
    assert second.output is None
    free.set()
    result = runner.collect(second)
    assert result.token_ids[0] == [early]
    plain = pair[0]
    expected, _ = small.answers(plain, [small.Ask([5], 2), small.Ask(ids(9, 1), 1)])
    assert [token, *result.token_ids[0]] == expected[0]
    assert result.token_ids[1] == expected[1][:1]


def test_host_prefill_error_is_raised_by_collect(pair, monkeypatch):
    _, runner = pair
    monkeypatch.setattr(runner._prefill, "_decode", lambda *_: 1 // 0)
    launched = runner.launch(Step([Row(0, [5, 6], 0, [0], True)], [NewRequest(0, [5, 6], [], GREEDY)]))
    with pytest.raises(ZeroDivisionError):
        runner.collect(launched)


def test_host_prefill_times_kernels_of_both(tmp_path, monkeypatch, restored_threads):
    monkeypatch.setattr(load_module, "select", lambda name, emulate, settings: Device(settings))
    calls: list[tuple[str, ...]] = []
    runner = load(small.saved(tmp_path, head_dim=16), prefill_device="cpu", kernel_sampling=1,
                  observe=lambda *call: calls.append(call[:3]))
    small.answers(runner, small.asks(1, 1), chunk=64)
    host = runner._prefill._host.kernels
    names = [name for name, _, _ in calls]
    assert {name: names.count(name) for name in ("paged_attention", "embedding", "linear_argmax", "keep_ids")} == {
        "paged_attention": 2, "embedding": 1, "linear_argmax": 1, "keep_ids": 1}
    assert {label for name, _, label in calls if name == "paged_attention"} == {host}
    assert {label for name, _, label in calls if name == "linear_argmax"} == {"golden"}


def test_portions_of_slot_ranges():
    runs = [SlotRange(1, 0, 16), SlotRange(2, 4, 16), SlotRange(5, 0, 16), SlotRange(6, 0, 3)]
    assert list(_portions(runs, 28)) == [runs[:2], runs[2:]]
    assert list(_portions(runs, 1)) == [[run] for run in runs]
    assert list(_portions([], 9)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_read_and_write_cache_slots_of_every_layout(cpu, dtype):
    shapes = cpu.cache.shapes(5, 16, 3, 24, dtype)
    keys, values = (cpu.empty(shape, dtype).zero_() for shape in shapes)
    slots = torch.tensor([79, 0, 17, 18, 33, 63])
    new = torch.randn(2, len(slots), 3, 24).to(dtype)
    cpu.cache.write(keys, values, slots, *new)
    for read, written in zip(cpu.cache.read(keys, values, slots, 24), new, strict=True):
        assert torch.equal(read, written)
    everything = torch.arange(80)
    for read, written in zip(cpu.cache.read(keys, values, everything, 24), new, strict=True):
        expected = torch.zeros(80, 3, 24, dtype=dtype)
        expected[slots] = written
        assert torch.equal(read, expected)
