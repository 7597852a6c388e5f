"""Gauges that the engine publishes for endpoint pickers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from npuserve.npu.step import Step, StepResult
from npuserve.service import metrics
from npuserve.service.engine import loop
from npuserve.service.engine.metrics import EngineMetrics
from npuserve.service.ipc import messages as m
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from tests.service.engine.test_loop import Peer, running, until
from tests.support.counting_runner import FakeRunner


class HeldRunner(FakeRunner):
    """Runner whose steps end once `released` is set."""

    def __init__(self) -> None:
        super().__init__(block_size=4)
        self.released = threading.Event()
        self.steps = 0

    def launch(self, step: Step) -> tuple[StepResult, float]:
        self.steps += 1
        return super().launch(step)

    def ready(self, handle: tuple[StepResult, float]) -> bool:
        return self.released.is_set()

    def collect(self, handle: tuple[StepResult, float]) -> StepResult:
        assert self.released.wait(20)
        return super().collect(handle)


def counts() -> tuple[float, float]:
    return metrics.requests_running._value.get(), metrics.requests_waiting._value.get()


def test_gauges_follow_the_queue_during_a_step_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LATE_SECONDS", 15.0)
    runner = HeldRunner()
    with running(tmp_path, runner=runner) as engine:
        peer = Peer(engine.address)
        peer.submit(1, [5, 6], 3)
        until(lambda: runner.steps)
        for key in range(2, 7):
            peer.submit(key, [5, 6], 3)
            until(lambda key=key: sum(counts()) == key)
        peer.send(m.Cancel(6))
        until(lambda: sum(counts()) == 5)
        until(lambda: counts() == (engine.scheduler.num_running, engine.scheduler.num_waiting))
        assert runner.steps <= 2
        assert not runner.released.is_set()
        runner.released.set()
        peer.until_end(*range(1, 6))
        until(lambda: counts() == (0, 0))


def test_gauges_are_written_only_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(
        BlockManager(8, 4), max_num_seqs=2, max_num_batched_tokens=8, max_queue=4, aging_seconds=10)
    made = EngineMetrics(scheduler)
    made.refresh(0.0)
    written: list[tuple[str, float]] = []
    for name in ("requests_running", "requests_waiting"):
        monkeypatch.setattr(getattr(metrics, name), "set", lambda value, name=name: written.append((name, value)))
    made.refresh(0.0)
    assert written == []
    scheduler.add(m.Request("r", [1, 2], 3, 0.0), (b"f", 1), 0.0)
    made.refresh(0.0)
    made.refresh(0.0)
    assert written == [("requests_running", 0), ("requests_waiting", 1)]


def test_gauge_of_the_cache_has_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []

    class Child:
        def set(self, value: float) -> None:
            shown.append(value)

    monkeypatch.setattr(metrics.kv_cache_config_info, "labels", lambda *labels: shown.append(labels) or Child())
    EngineMetrics(Scheduler(
        BlockManager(77, 16), max_num_seqs=2, max_num_batched_tokens=8, max_queue=4, aging_seconds=10))
    assert shown == [("16", "77"), 1]
