"""Gauges that the engine publishes for endpoint pickers."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from npuserve.npu.step import Step, StepResult
from npuserve.service import metrics
from npuserve.service.engine import loop
from npuserve.service.engine.metrics import EngineMetrics
from npuserve.service.errors import (
    DeadlineExceeded,
    EngineKiller,
    InvalidField,
    NoTokenizer,
    QueueFull,
    ServeError,
    Unavailable,
)
from npuserve.service.ipc import messages as m
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.streams.engine_client import EngineClient
from tests.service.engine.test_loop import Peer, running, until
from tests.support.counting_runner import FakeRunner
from tests.support.fake_engine import until as async_until


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
        assert self.released.wait(60)
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


async def test_load_of_a_front_end_counts_requests_that_a_late_step_keeps_from_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards each is counted once."""
    monkeypatch.setattr(loop, "LATE_SECONDS", 0.2)
    runner = HeldRunner()
    with running(tmp_path, runner=runner) as engine:
        client = EngineClient(engine.address)
        client.start()
        try:
            await async_until(lambda: client.state == "ready")
            streams = [client.submit(m.Request("0", [5, 6], 3, 0.0))]
            await async_until(lambda: runner.steps > 0)
            await asyncio.sleep(0.5)  # the engine reads nothing any more
            streams += [client.submit(m.Request(str(number), [5, 6], 3, 0.0)) for number in range(1, 6)]
            await asyncio.sleep(0.1)
            assert client.load.running + client.load.waiting == 6
            assert engine.scheduler.num_running + engine.scheduler.num_waiting == 1
            runner.released.set()
            for stream in streams:
                assert sum([len(output.token_ids) async for part in stream for output in part]) == 3
            await async_until(lambda: client.load == m.Load(free_kv_ratio=1.0, tokens_per_second=ANY))
        finally:
            await client.close()


def test_load_has_the_current_counts_between_two_updates_of_the_cache() -> None:
    scheduler = Scheduler(
        BlockManager(8, 4), max_num_seqs=2, max_num_batched_tokens=8, max_queue=4, aging_seconds=10)
    made = EngineMetrics(scheduler)
    now = time.monotonic()
    for number in range(3):
        scheduler.add(m.Request(str(number), [1, 2], 3, 0.0), (b"f", number), 0.0)
        made.refresh(now)
        assert (made.load.running, made.load.waiting) == (0, number + 1)


def test_load_counts_a_paused_request_that_holds_blocks() -> None:
    scheduler = Scheduler(
        BlockManager(8, 4), max_num_seqs=2, max_num_batched_tokens=8, max_queue=4, aging_seconds=10)
    made = EngineMetrics(scheduler)
    sequence = scheduler.add(m.Request("r", [1, 2], 3, 0.0), (b"f", 1), 0.0).sequence
    plan = scheduler.schedule(0.0)
    scheduler.apply(plan.step, StepResult({sequence.id: [5]}, {}, {}, 0.0), 0.0)
    scheduler.pause(sequence.id)
    made.refresh(0.0)
    assert (made.load.running, made.load.waiting, made.load.paused) == (0, 0, 1)


@pytest.mark.parametrize(("cached_tokens", "counted"), [(None, 10), (0, 0), (4, 0)])
def test_request_that_an_earlier_engine_began_is_not_counted_again(cached_tokens: int | None, counted: int) -> None:
    def count() -> list[float]:
        return [counter._value.get() for counter in (
            metrics.prompt_tokens_total, metrics.prefix_cache_queries_total, metrics.prefix_cache_hits_total)]

    scheduler = Scheduler(
        BlockManager(8, 4), max_num_seqs=2, max_num_batched_tokens=16, max_queue=4, aging_seconds=10)
    made = EngineMetrics(scheduler)
    before, waits = count(), metrics.queue_time_seconds._sum.get()
    progress = m.PriorProgress(cached_tokens=cached_tokens, accepted=True)
    scheduler.add(m.Request("r", list(range(10)), 3, 0.0, progress=progress), (b"f", 1), 0.0)
    made.launched(scheduler.schedule(5.0).step, 5.0)
    made.heartbeat()
    assert [now - then for now, then in zip(count(), before, strict=True)] == [counted, counted, 0]
    assert metrics.queue_time_seconds._sum.get() - waits == (5.0 if counted else 0.0)


@pytest.mark.parametrize(("error", "why"), [
    (InvalidField("prompt", "is too long"), "too_large"), (DeadlineExceeded("deadline: late"), "deadline"),
    (QueueFull("queue full"), "queue_full"), (NoTokenizer("the model has no tokenizer"), None),
    (Unavailable("the compiler cannot start"), None),
])
def test_rejection_is_counted_by_its_reason_or_as_an_error_of_the_grammar(error: ServeError, why: str | None) -> None:
    def count() -> list[float]:
        return [metrics.grammar_errors_total.labels("compile")._value.get(),
                metrics.queue_rejections_total.labels(why or "too_large")._value.get()]

    made = EngineMetrics(Scheduler(
        BlockManager(8, 4), max_num_seqs=2, max_num_batched_tokens=8, max_queue=4, aging_seconds=10))
    before = count()
    made.rejected(error)
    made.rejected(EngineKiller("it is counted elsewhere"))
    assert [now - then for now, then in zip(count(), before, strict=True)] == ([0, 1] if why else [1, 0])


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
