"""What a decode step asks of CANN, by the emulator's call log, while the engine's own loop drives the runner.

    launching thread    launch n+1  collect n  launch n+2  collect n+1         on the device: n+1 while n+2 is launched

The plugin's own thread submits what was launched, and `npuserve-lengths` gives captured attention its lengths.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from npuserve.npu import emulator
from npuserve.npu.execution.in_flight import Launched
from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import PENDING, NewRequest, Row, Step, StepResult
from npuserve.service.engine.loop import Engine
from npuserve.service.ipc import messages
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from tests.npu.backends.ascend.test_backend import load
from tests.npu.backends.small import GREEDY, saved, saved_w8a8
from tests.npu.emulator.child import emulated
from tests.service.engine.test_loop import MODEL
from tests.service.engine.test_loop_overlap import Script

LAYERS, ROWS, ANSWER = 3, 3, 200
STEADY = range(20, 180)
"""Steps whose rows all decode; a block is full once among them."""

LAUNCH = [
    "aclrtPointerGetAttributes",  # of the pinned inputs, for their one copy to the device
    "aclnnInplaceCopyGetWorkspaceSize",  # spreads the block tables to their places
    "aclmdlRIExecuteAsync",
    "aclnnInplaceCopyGetWorkspaceSize",  # the sampled ids, for their copy beside the next step
    "aclrtPointerGetAttributes",
]
COLLECT = [
    "aclrtSynchronizeEvent",  # the ids of the step before are on the host
    "aclrtSynchronizeEvent", "aclrtSynchronizeEvent", "aclrtEventElapsedTime",  # its span, which is past
]
LENGTHS = Counter({
    "aclmdlRICaptureTaskUpdateBegin": LAYERS, "aclnnFusedInferAttentionScoreV3GetWorkspaceSize": LAYERS,
    "aclnnFusedInferAttentionScoreV3": LAYERS, "aclmdlRICaptureTaskUpdateEnd": LAYERS, "aclrtValueWrite": LAYERS})


class Marked:
    """A runner whose launches and collections are marked in the call log."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self.launches = self.collections = 0
        self.results: list[StepResult] = []

    def launch(self, step: Step) -> Launched:
        emulator.mark(f"launch {self.launches}")
        self.launches += 1
        return self._runner.launch(step)

    def ready(self, launched: Launched) -> bool:
        """At once, so that the engine, which asks again and again while a long step runs, waits in `collect`."""
        return True

    def collect(self, launched: Launched) -> StepResult:
        emulator.mark(f"collect {self.collections}")
        self.collections += 1
        self.results.append(self._runner.collect(launched))
        return self.results[-1]


def serve(runner: Any, double_buffering: bool) -> Script:
    """`ROWS` requests of `ANSWER` tokens, through the engine's loop."""
    scheduler = Scheduler(BlockManager(8, 128), max_num_seqs=8, max_num_batched_tokens=64, max_queue=0, aging_seconds=1)
    asked = [messages.Submit(n, messages.Request(f"{n}", [5, 7, n], ANSWER, time.monotonic(), GREEDY))
             for n in range(ROWS)]
    script = Script({0: list(asked)})
    engine = script.engine = Engine(scheduler, runner, script, MODEL, 1, double_buffering)  # type: ignore[arg-type]
    engine.run()
    assert scheduler.blocks.counts.used == 0
    return script


@pytest.mark.parametrize("quantized", [False, True])
@emulated(relax=("fp32",))
def test_a_steady_step_is_one_replay_and_nine_calls(tmp_path: Path, quantized: bool) -> None:
    """In W8A8 as in floats."""
    runner = Marked(load((saved_w8a8 if quantized else saved)(tmp_path, layers=LAYERS)))
    emulator.clear_calls()
    serve(runner, double_buffering=True)
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
    # Other threads are not in step with this one, so theirs are counted over all steps.
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


@emulated(relax=("fp32",))
def test_a_step_is_launched_and_the_one_before_collected_while_the_device_is_at_work(tmp_path: Path) -> None:
    """The device hangs in step n. Who waited for anything of it, to collect n - 1 or to launch n + 1, would wait for
    ever."""
    import torch

    runner = load(saved(tmp_path, layers=LAYERS))

    def decode(at: int) -> Launched:
        return runner.launch(Step([Row(0, [PENDING], at, [0], True)]))

    runner.collect(runner.launch(Step([Row(0, [1, 2], 0, [0], True)], [NewRequest(0, [1, 2], [], GREEDY)])))
    before = decode(2)
    torch.npu.synchronize()  # so that the task that hangs is of the next step
    emulator.hang()
    hanging = decode(3)
    runner.collect(before)
    after = decode(4)
    assert emulator.pending() > 0
    emulator.heal()
    assert list(runner.collect(hanging).token_ids) == list(runner.collect(after).token_ids) == [0]
