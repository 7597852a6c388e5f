"""The step loop with a runner that counts upwards: what is launched when, and how many steps are in flight."""

from __future__ import annotations

import dataclasses

import pytest

from npuserve.npu.step import Step, StepResult
from npuserve.service.engine.pipeline import StepPipeline
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from tests.support.counting_runner import FakeRunner


class Recording(FakeRunner):
    """calls: "launch" and "collect", in order. device_seconds: of each result."""

    def __init__(self) -> None:
        super().__init__(block_size=4)
        self.calls: list[str] = []
        self.device_seconds = 0.0

    def launch(self, step: Step) -> tuple[StepResult, float]:
        self.calls.append("launch")
        return super().launch(step)

    def collect(self, handle: tuple[StepResult, float]) -> StepResult:
        self.calls.append("collect")
        return dataclasses.replace(super().collect(handle), device_seconds=self.device_seconds)


def pipeline_of(depth: int, *max_tokens: int) -> tuple[StepPipeline, Recording]:
    scheduler = Scheduler(
        BlockManager(64, 4), max_num_seqs=4, max_num_batched_tokens=64, max_queue=2, aging_seconds=1.0)
    for number, tokens in enumerate(max_tokens):
        scheduler.add(Request(f"r{number}", [number, number + 1], tokens, 0.0), (b"", number), 0.0)
    runner = Recording()
    return StepPipeline(scheduler, runner, depth), runner


@pytest.mark.parametrize(("depth", "calls"), [
    (1, ["launch", "collect"] * 3), (2, ["launch", "launch", "collect", "launch", "collect", "collect"])])
def test_pipeline_launches_before_it_collects_up_to_its_depth(depth: int, calls: list[str]) -> None:
    pipeline, runner = pipeline_of(depth, 3)
    tokens: list[int] = []
    for _ in range(9):
        if done := pipeline.advance():
            tokens += [token for progress in done.progress for token in progress.token_ids]
        assert len(pipeline) < 2
    assert tokens == [2, 3, 4]
    assert runner.calls == calls


def test_pipeline_without_work_launches_and_collects_nothing() -> None:
    pipeline, runner = pipeline_of(2)
    assert pipeline.advance() is None
    assert not pipeline.must_collect
    assert runner.calls == []
    with pytest.raises(IndexError):
        pipeline.collect()


def test_pipeline_collects_when_nothing_more_can_be_planned() -> None:
    pipeline, _ = pipeline_of(2, 1)
    assert pipeline.advance() is None
    assert (len(pipeline), pipeline.must_collect) == (1, False)
    done = pipeline.advance()
    assert done
    assert [progress.reason for progress in done.progress] == ["length"]
    assert not pipeline


def test_pipeline_oldest_step_began_when_the_device_ended_the_one_before() -> None:
    """The host collects the first step late, at 40, and the device began the second one at 13."""
    pipeline, runner = pipeline_of(2, 3)
    runner.device_seconds = 10.0
    times = iter([1.0, 3.0, 4.0, 5.0, 40.0])  # planned and launched, twice; collected
    pipeline._clock = times.__next__
    pipeline.launch(pipeline.plan().step)
    assert pipeline.oldest_began == 3.0
    pipeline.launch(pipeline.plan().step)
    pipeline.collect()
    assert pipeline.oldest_began == 13.0


def test_pipeline_oldest_step_began_no_later_than_the_host_collected_the_one_before() -> None:
    pipeline, runner = pipeline_of(2, 3)
    runner.device_seconds = 10.0
    pipeline._clock = iter([1.0, 3.0, 4.0, 5.0, 8.0]).__next__  # planned and launched, twice; collected
    for _ in range(2):
        pipeline.launch(pipeline.plan().step)
    pipeline.collect()
    assert pipeline.oldest_began == 8.0


def test_pipeline_times_are_those_of_its_clock() -> None:
    pipeline, _ = pipeline_of(1, 1)
    pipeline._clock = iter([5.0, 6.0, 7.0]).__next__
    done = pipeline.advance()
    assert done
    assert (done.planned, done.launched, done.collected) == (5.0, 6.0, 7.0)
    assert done.progress[0].sequence.timer.timing.last_step_end == 7.0
