"""Calls into CANN by a steady step, by the emulator's call log, with the engine's own loop.

    launching thread    launch n+1  collect n  launch n+2  collect n+1         device: n+1 during the launch of n+2

The plugin's own thread submits launched work, and a thread of the native library passes lengths to captured attention.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from npuserve.npu import emulator
from npuserve.npu.backends.ascend.native_lengths import NativeLengths
from npuserve.npu.cann.versions import is_before
from npuserve.npu.execution.in_flight import LaunchedStep
from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import PENDING, NewRequest, Row, SamplingParams, Step, StepResult
from npuserve.service.engine.loop import Engine
from npuserve.service.ipc import messages
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from tests.npu.backends.ascend.test_backend import load
from tests.npu.backends.small import GREEDY, bits_of, saved, saved_w8a8
from tests.npu.emulator.child import emulated
from tests.service.engine.test_loop import MODEL
from tests.service.engine.test_loop_overlap import Script

LAYERS, ROWS, ANSWER = 3, 3, 150
STEADY = range(20, 135)
"""Steps in which all rows decode; one of them fills a block."""


def replay() -> list[str]:
    """Return the calls of a replay. torch_npu 2.10 asks before each one whether the stream captures; torch_npu 2.13
    does so only for a graph that draws random numbers (NPUGeneratorState::replay_prologue)."""
    try:
        asks = is_before(version("torch_npu"), "2.13")
    except PackageNotFoundError:
        asks = False
    return [*(["aclmdlRICaptureGetInfo"] if asks else []), "aclmdlRIExecuteAsync"]


REPLAY = replay()
LAUNCH = [
    "aclrtPointerGetAttributes",  # for the one H2D copy of the pinned inputs
    "aclnnInplaceCopyGetWorkspaceSize",  # scatters the block tables
    *REPLAY,
    "aclrtRecordEvent",  # after which the lengths of the graph's next replay may be written
    "aclnnInplaceCopyGetWorkspaceSize",  # for the D2H copy of the sampled ids during the next step
    "aclrtPointerGetAttributes",
]
COLLECT = [
    "aclrtSynchronizeEvent",  # the ids of the previous step are on the host
    "aclrtSynchronizeEvent", "aclrtSynchronizeEvent", "aclrtEventElapsedTime",  # its time span, which has ended
]
MAX_CALLS_WITH_A_CHUNK = len(LAUNCH) + len(COLLECT) + 1
"""At times an event is created."""
MAX_CALLS_CONSTRAINED = 120
"""The sampler of such a step runs kernel by kernel, with two calls for each operator."""
LENGTHS = Counter({
    "aclmdlRICaptureTaskUpdateBegin": LAYERS, "aclnnFusedInferAttentionScoreV3GetWorkspaceSize": LAYERS,
    "aclnnFusedInferAttentionScoreV3": LAYERS, "aclmdlRICaptureTaskUpdateEnd": LAYERS, "aclrtValueWrite": LAYERS})


class Marked:
    """Runner that marks launches and collections in the call log."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self.launches = self.collections = 0
        self.results: list[StepResult] = []

    def launch(self, step: Step) -> LaunchedStep:
        emulator.mark(f"launch {self.launches}")
        self.launches += 1
        return self._runner.launch(step)

    def ready(self, launched: LaunchedStep) -> bool:
        """Return True, so that the engine waits in `collect` instead of polling."""
        return True

    def collect(self, launched: LaunchedStep) -> StepResult:
        emulator.mark(f"collect {self.collections}")
        self.collections += 1
        self.results.append(self._runner.collect(launched))
        return self.results[-1]


DEFAULT = SamplingParams()
SAMPLING = {
    "greedy": [GREEDY] * ROWS,
    "sampled": [DEFAULT, SamplingParams(temperature=0.7, top_k=20, top_p=0.9), SamplingParams(min_p=0.1, seed=2)],
    "penalized": [SamplingParams(repetition_penalty=1.1, presence_penalty=0.1 * n, seed=n) for n in range(ROWS)],
    "mixed": [GREEDY, DEFAULT, SamplingParams(top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.1)],
}
"""Parameters of the requests of a run."""
HEAD, CACHE = {"lm_head_dtype": "int8"}, {"kv_cache_dtype": "int8"}
MODELS: dict[str, tuple[bool, dict[str, str]]] = {
    "float": (False, {}), "w8a8": (True, {}), "w8a8, int8 head": (True, HEAD), "int8 cache": (False, CACHE),
    "w8a8, int8 head and cache": (True, HEAD | CACHE)}
"""Name -> W8A8, and settings."""


def cases(default: list[tuple[str, str]], models: list[str]) -> list[Any]:
    """Return all pairs of a model and its requests' sampling. The default run has a few."""
    return [pytest.param(model, sampling, marks=[] if (model, sampling) in default else pytest.mark.full,
                         id=f"{model}, {sampling}") for model in models for sampling in SAMPLING]


def loaded(folder: Path, model: str) -> Runner:
    w8a8, settings = MODELS[model]
    return load((saved_w8a8 if w8a8 else saved)(folder, layers=LAYERS), **settings)


def serve(runner: Any, double_buffering: bool, sampling: list[SamplingParams]) -> Script:
    """Run `ROWS` requests of `ANSWER` tokens through the engine's loop."""
    scheduler = Scheduler(BlockManager(8, 128), max_num_seqs=8, max_num_batched_tokens=64, max_queue=0, aging_seconds=1)
    asked = [messages.Submit(n, messages.Request(f"{n}", [5, 7, n], ANSWER, time.monotonic(), sampling[n]))
             for n in range(ROWS)]
    script = Script({0: list(asked)})
    engine = script.engine = Engine(scheduler, runner, script, MODEL, 1, double_buffering)  # type: ignore[arg-type]
    engine.run()
    assert scheduler.blocks.counts.used == 0
    return script


@pytest.mark.parametrize(("model", "sampling"), cases(
    [("w8a8, int8 head", "sampled"), ("int8 cache", "penalized")],
    [*MODELS]))
@emulated(relax=("fp32",))
def test_a_steady_step_is_one_replay_and_ten_calls(tmp_path: Path, model: str, sampling: str) -> None:
    """LM head and sampler are in the replay, whatever the requests' parameters are."""
    runner = Marked(loaded(tmp_path, model))
    emulator.clear_calls()
    serve(runner, double_buffering=True, sampling=SAMPLING[sampling])
    calls, here = emulator.calls(), threading.get_native_id()
    at = {call.name: place for place, call in enumerate(calls) if call.name.startswith("#")}
    assert all(runner.results[step].captured_decodes == ROWS for step in STEADY)
    for step in STEADY:
        begin, collect, end = (at[f"# {mark}"] for mark in (f"launch {step}", f"collect {step - 1}",
                                                            f"launch {step + 1}"))
        assert begin < collect < end
        launched, collected = ([call.name for call in calls[first + 1 : last] if call.thread == here]
                               for first, last in ((begin, collect), (collect, end)))
        assert launched == LAUNCH
        assert collected == COLLECT
        assert len(launched) + len(collected) <= 12
        assert launched.count("aclmdlRIExecuteAsync") == 1
    # Calls of other threads are not synchronous with steps and are counted over all of them.
    stretch = calls[at[f"# launch {STEADY[0]}"] : at[f"# launch {STEADY[-1] + 1}"]]
    others = Counter(call.name for call in stretch if call.thread != here)
    asked = sum(others[name] for name in LENGTHS) / len(STEADY) / LAYERS
    assert asked == pytest.approx(5, abs=0.2)
    assert not [name for name in others if "Synchronize" in name]


@emulated(relax=("fp32",))
def test_lengths_are_given_by_another_thread_with_five_calls_a_layer(tmp_path: Path) -> None:
    runner = load(saved(tmp_path, layers=LAYERS))
    runner.collect(runner.launch(Step([Row(0, [1, 2], 0, [0], True)], [NewRequest(0, [1, 2], [], GREEDY)])))
    emulator.clear_calls()
    runner.collect(runner.launch(Step([Row(0, [3], 2, [0], True)])))
    calls, here = emulator.calls(), threading.get_native_id()
    assert Counter(call.name for call in calls if call.name in LENGTHS) == LENGTHS
    assert here not in {call.thread for call in calls if call.name in LENGTHS}


def counted(runner: Runner) -> Mock:
    """Return the library that updates lengths, whose calls are counted from now on."""
    lengths = runner.backend._lengths  # type: ignore[attr-defined]
    assert isinstance(lengths, NativeLengths)
    lengths._lib = Mock(wraps=lengths._lib)
    return lengths._lib


@pytest.mark.parametrize(("model", "sampling"), cases(
    [("float", "mixed"), ("w8a8, int8 head", "greedy")],
    [model for model, (_, settings) in MODELS.items() if settings.get("kv_cache_dtype") != "int8"]))
@emulated(relax=("fp32",))
def test_a_step_with_a_chunk_is_one_replay_and_as_many_calls(tmp_path: Path, model: str, sampling: str) -> None:
    """Three rows decode while a prompt is computed in chunks, of which the last yields a token. Over an int8 cache such
    steps are not captured."""
    runner = loaded(tmp_path, model)
    rows, here = range(ROWS), threading.get_native_id()
    prompt = [n % 90 for n in range(300)]
    flying = runner.launch(Step([Row(i, [5, 7, i], 0, [i], True) for i in rows],
                                [NewRequest(i, [5, 7, i], [], SAMPLING[sampling][i]) for i in rows]))
    lengths, library = runner.backend._lengths, counted(runner)
    for step in range(8):
        lengths.check(lengths.given)
        library.reset_mock()
        emulator.clear_calls()
        new = [NewRequest(9, prompt, [], GREEDY if sampling == "greedy" else DEFAULT)] if not step else []
        chunk = prompt[40 * step : 40 * step + 40]
        following = runner.launch(Step(
            [*(Row(i, [PENDING], 3 + step, [i], True) for i in rows),
             Row(9, chunk, 40 * step, [3, 4, 5][: (40 * step + len(chunk) - 1) // 128 + 1], step == 7)], new))
        result = runner.collect(flying)
        flying = following
        calls = [call.name for call in emulator.calls() if call.thread == here]
        assert library.npuserve_lengths_put.call_count == library.npuserve_lengths_replayed.call_count == 1
        if step > 1:  # operators initialize at their first call
            assert calls.count("aclmdlRIExecuteAsync") == 1, calls
            assert len(calls) <= MAX_CALLS_WITH_A_CHUNK, (len(calls), calls)
            assert not [name for name in calls if "Synchronize" in name and name != "aclrtSynchronizeEvent"]
            assert result.captured_decodes == ROWS
    assert len(runner.collect(flying).token_ids) == ROWS + 1


@pytest.mark.parametrize("model", ["float", *(
    pytest.param(model, marks=pytest.mark.full) for model in MODELS if model != "float")])
@emulated(relax=("fp32",))
def test_a_constrained_step_is_one_replay_and_its_sampler(tmp_path: Path, model: str) -> None:
    """Its masks depend on the tokens of the step before and arrive when its decoder is at work. LM head, masks and
    sampler are therefore called one by one, which takes more calls, and none of them blocks."""
    runner = loaded(tmp_path, model)
    rows, here = range(ROWS), threading.get_native_id()
    flying = runner.launch(Step([Row(i, [5, 7, i], 0, [i], True) for i in rows],
                                [NewRequest(i, [5, 7, i], [], SAMPLING["mixed"][i]) for i in rows]))
    lengths, library = runner.backend._lengths, counted(runner)
    for step in range(6):
        lengths.check(lengths.given)
        library.reset_mock()
        emulator.clear_calls()
        following = runner.launch(Step([
            Row(i, [PENDING], 3 + step, [i], True, is_constrained=i != 1) for i in rows]))
        result = runner.collect(flying)
        runner.sample(following, {i: bits_of([step, 20, 40]) for i in rows if i != 1})
        flying = following
        calls = [call.name for call in emulator.calls() if call.thread == here]
        assert library.npuserve_lengths_put.call_count == library.npuserve_lengths_replayed.call_count == 1
        assert calls.count("aclmdlRIExecuteAsync") == 1, calls
        if step > 1:
            assert {name for name in calls if "Synchronize" in name} == {"aclrtSynchronizeEvent"}
            assert len(calls) <= MAX_CALLS_CONSTRAINED, len(calls)
            assert result.decoder_decodes == ROWS
            assert {*result.token_ids[0], *result.token_ids[2]} <= {step - 1, 20, 40}
    runner.collect(flying)


@emulated(relax=("fp32",))
def test_a_step_is_launched_and_the_one_before_collected_while_the_device_is_at_work(tmp_path: Path) -> None:
    """The device hangs in step n. If collecting n - 1 or launching n + 1 waited for it, the test would never end."""
    import torch

    runner = load(saved(tmp_path, layers=LAYERS))

    def decode(at: int) -> LaunchedStep:
        return runner.launch(Step([Row(0, [PENDING], at, [0], True)]))

    runner.collect(runner.launch(Step([Row(0, [1, 2], 0, [0], True)], [NewRequest(0, [1, 2], [], GREEDY)])))
    before = decode(2)
    torch.npu.synchronize()  # so that a task of the next step hangs
    emulator.hang()
    hanging = decode(3)
    runner.collect(before)
    after = decode(4)
    assert emulator.pending() > 0
    emulator.heal()
    assert list(runner.collect(hanging).token_ids) == list(runner.collect(after).token_ids) == [0]
