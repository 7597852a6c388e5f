"""Metric names, types and labels against docs/metrics.md and Prometheus' rules."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from npuserve.npu.step import Row, Step, StepResult
from npuserve.service import metrics
from npuserve.service.config import ServerConfig
from npuserve.service.engine import metrics as engine_metrics
from npuserve.service.engine.metrics import EngineMetrics
from npuserve.service.errors import DuplicateRequest, InvalidField, QueueFull, ServeError
from npuserve.service.ipc.messages import FinishReason
from npuserve.service.scheduling.block_manager import BlockCounts, BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.supervisor.metrics_page import AGE, HEARTBEAT

DOCUMENT = Path(__file__).parents[2] / "docs/metrics.md"


def defined() -> dict[str, MetricWrapperBase]:
    """Return name on the page -> metric."""
    found = [value for value in vars(metrics).values() if isinstance(value, MetricWrapperBase)]
    return {m._name + ("_total" if isinstance(m, Counter) else ""): m for m in found}


def documented() -> dict[str, tuple[str, list[str]]]:
    """Return name -> (type, labels) of docs/metrics.md."""
    rows = re.findall(r"^\| `(npuserve_\w+)` \| (\w+) \| (.*?)\|", DOCUMENT.read_text(), re.MULTILINE)
    assert len({name for name, *_ in rows}) == len(rows)
    return {name: (kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows}


def test_metrics_document_has_every_metric_with_type_and_labels() -> None:
    kinds = {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}
    code = {name: (kinds[type(m)], list(m._labelnames)) for name, m in defined().items()}
    # The page shows the age of the heartbeat in place of its time.
    code[AGE] = code.pop(HEARTBEAT)
    assert documented() == code


def test_metric_names_end_in_unit() -> None:
    units = {"_seconds": "seconds", "_seconds_total": "seconds", "_tokens": "tokens", "_tokens_total": "tokens",
             "_slots": "slots",
             "_ratio": "0 to 1", "_timestamp_seconds": "Unix time", "_blocks": "blocks", "_running": "requests",
             "_compiling": "requests", "_preparing": "requests", "_waiting": "requests", "_paused": "requests",
             "_info": "1", "_limit": "requests", "_flops": "operations/s", "_bytes": "bytes", "_ready": "0 or 1",
             "_imbalance": "1 or more"}
    for name, (unit, meaning) in meanings().items():
        assert name.endswith(("_total", *units)), name
        assert unit, name
        ends = [end for end in units if name.endswith(end)]
        assert not ends or unit == units[max(ends, key=len)], name
        assert len(meaning) > 3, name


def test_metrics_document_names_label_values() -> None:
    phases, modes = engine_metrics.PHASES, engine_metrics.MODES
    values = {
        "npuserve_request_finish_total": [reason for reason, in metrics.KNOWN[metrics.request_finish_total]],
        "npuserve_queue_rejections_total": [why for why, in metrics.KNOWN[metrics.queue_rejections_total]],
        "npuserve_step_seconds": [*phases, *modes], "npuserve_decode_tokens_total": modes,
        "npuserve_kv_cache_blocks": BlockCounts._fields, "npuserve_target_seconds": ["ttft", "itl"],
        "npuserve_requests_limit": ["running", "waiting"],
    }
    for name, known in values.items():
        assert not [value for value in known if value not in meanings()[name][1]], name
    assert set(get_args(FinishReason)) == set(values["npuserve_request_finish_total"])


def test_tally_counts_like_histogram() -> None:
    """Compare with a histogram that prometheus_client counts itself."""
    registry = CollectorRegistry()
    bounds = (0.001, 0.01, 0.1)
    ours, theirs = (Histogram(name, "", buckets=bounds, registry=registry) for name in ("ours", "theirs"))
    tally = metrics.Tally(ours)
    samples = [0.0, 0.001, 0.0010001, 0.05, 0.1, 0.11, 7.0]
    for sample in samples:
        tally.observe(sample)
        theirs.observe(sample)
    assert registry.get_sample_value("ours_count") == 0
    tally.flush()
    tally.flush()
    for end, labels in (("_count", {}), ("_sum", {}), *(("_bucket", {"le": str(b)}) for b in (*bounds, "+Inf"))):
        assert registry.get_sample_value(f"ours{end}", labels) == registry.get_sample_value(f"theirs{end}", labels)
    tally.observe(0.002)
    tally.flush()
    assert registry.get_sample_value("ours_count") == len(samples) + 1


def test_samples_of_another_thread_are_observed_at_each_flush() -> None:
    registry = CollectorRegistry()
    histogram, samples = Histogram("fed", "", buckets=(1.0,), registry=registry), deque([0.5, 2.0])
    metrics.feed(histogram, lambda: [samples.popleft() for _ in range(len(samples))])
    assert registry.get_sample_value("fed_count") == 0
    metrics.flush()
    assert not samples
    samples.append(0.25)
    metrics.flush()
    assert registry.get_sample_value("fed_count") == 3
    assert registry.get_sample_value("fed_sum") == 2.75


def test_tally_is_one_per_labels() -> None:
    first = metrics.tally(metrics.step_tokens, "decode")
    assert metrics.tally(metrics.step_tokens, "decode") is first
    assert metrics.tally(metrics.step_tokens, "mixed") is not first


def test_engine_metrics_count_device_time_of_timed_steps() -> None:
    scheduler = Scheduler(BlockManager(4, 4), max_num_seqs=2, max_num_batched_tokens=8, max_queue=1, aging_seconds=10)
    made, counter = EngineMetrics(scheduler), engine_metrics.TIMED_SECONDS["decode"]
    before = counter._value.get()
    for timed in (True, False):
        made.stepped(Step([ROWS["decode"]]), StepResult({}, {}, {}, 0.25, timed=timed), 1, 1.0, 2.0)
    made.heartbeat()
    assert counter._value.get() - before == 0.25


def meanings() -> dict[str, tuple[str, str]]:
    """Return name -> (unit, meaning) of docs/metrics.md."""
    rows = re.findall(r"^\| `(npuserve_\w+)` \|[^|]*\|[^|]*\| (.*?) \| (.*?) \|$", DOCUMENT.read_text(), re.MULTILINE)
    return {name: (unit, meaning) for name, unit, meaning in rows}


def test_buckets_ascend() -> None:
    for buckets in (metrics.LATENCY, metrics.ANSWER, metrics.GAP, metrics.STEP, metrics.KERNEL, metrics.TOKENS):
        assert list(buckets) == sorted(set(buckets))


def test_buckets_fit_answers_of_a_whole_context() -> None:
    """Contexts of Qwen3 have 40,960 tokens, and 131,072 with YaRN. A token takes 20 ms or more on a large model."""
    for histogram in (metrics.request_prompt_tokens, metrics.request_generation_tokens):
        assert histogram._upper_bounds[-2] == 131_072
    for histogram in (metrics.e2e_request_latency_seconds, metrics.decode_time_seconds):
        assert histogram._upper_bounds[-2] >= 0.02 * 0.9 * 131_072


def test_default_targets_are_bounds_of_buckets() -> None:
    """The alerts on latency compare a quantile with the target. Between two bounds it is interpolated."""
    config = ServerConfig()
    assert config.target_ttft_seconds in metrics.time_to_first_token_seconds._upper_bounds
    assert config.target_itl_seconds in metrics.time_per_output_token_seconds._upper_bounds


def test_gauges_cover_live_processes() -> None:
    gauges = [m for m in defined().values() if isinstance(m, Gauge)]
    assert all(gauge._multiprocess_mode.startswith("live") for gauge in gauges)


@pytest.mark.parametrize(("error", "why"), [
    (QueueFull("full"), "queue_full"),
    (DuplicateRequest("again"), "duplicate"),
    (InvalidField("prompt", "too long"), "too_large"),
])
def test_engine_metrics_refusals_by_reason(error: ServeError, why: str) -> None:
    scheduler = Scheduler(BlockManager(4, 4), max_num_seqs=1, max_num_batched_tokens=4, max_queue=1, aging_seconds=1)
    counter = metrics.queue_rejections_total.labels(why)
    before = counter._value.get()
    EngineMetrics(scheduler).rejected(error)
    assert counter._value.get() == before + 1
    assert why in DOCUMENT.read_text()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


ROWS = {"decode": Row(1, [5], 3, [0], True), "prefill": Row(2, [5, 6], 0, [1], True)}


def stepped(monkeypatch: pytest.MonkeyPatch, *steps: tuple[float, float, float], busy: bool = True
            ) -> tuple[list[float], list[float]]:
    """Run steps of (launched, device seconds, collected). Return the host gaps and the seconds of the steps."""
    clock, gaps, lengths = Clock(), [], []
    monkeypatch.setattr(engine_metrics, "time", clock)
    monkeypatch.setattr(engine_metrics.HOST_GAP, "observe", gaps.append)
    monkeypatch.setattr(engine_metrics.STEP_SECONDS["decode", "eager"], "observe", lengths.append)
    monkeypatch.setattr(Scheduler, "has_work", property(lambda self: busy))
    scheduler = Scheduler(
        BlockManager(4, 4), max_num_seqs=2, max_num_batched_tokens=8, max_queue=1, aging_seconds=10)
    made = EngineMetrics(scheduler)
    step = Step([ROWS["decode"]])
    for launched, device, collected in steps:
        clock.now = launched
        made.launched(step, launched)
        made.stepped(step, StepResult({1: [7]}, {}, {}, device), 1, launched, collected)
    return gaps, lengths


def test_host_gap_from_end_of_step_to_next_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps, lengths = stepped(monkeypatch, (101.0, 0.25, 101.5), (102.0, 0.25, 102.25))
    assert gaps == [0.75]
    assert lengths == [0.5, 0.25]


def test_host_gap_with_overlapping_steps_is_zero(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    gaps, lengths = stepped(monkeypatch, (101.0, 0.5, 101.5), (101.25, 0.5, 102.0), (101.75, 0.5, 102.75))
    assert gaps == [0.0, 0.0]
    assert lengths == [0.5, 0.5, 0.75]


def test_step_that_the_device_computes_during_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps, lengths = stepped(monkeypatch, (101.0, 0.25, 101.25), (102.25, 1.0, 102.5), (103.25, 1.0, 103.5))
    assert gaps == [0.25, 0.0]
    assert lengths == [0.25, 1.0, 1.0]


def test_host_gap_without_work_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stepped(monkeypatch, (101.0, 0.5, 101.5), (105.0, 0.5, 105.5), busy=False) == ([], [0.5, 0.5])


def test_engine_metrics_decode_tokens_by_mode() -> None:
    scheduler = Scheduler(
        BlockManager(4, 4), max_num_seqs=2, max_num_batched_tokens=8, max_queue=1, aging_seconds=10)
    made, counters = EngineMetrics(scheduler), engine_metrics.DECODE_TOKENS
    before = {mode: counter._value.get() for mode, counter in counters.items()}
    mixed = Step([ROWS["decode"], ROWS["decode"], ROWS["prefill"]])
    made.stepped(mixed, StepResult({}, {}, {}, 0.1, True, 2), 3, 1.0, 2.0)
    made.stepped(mixed, StepResult({}, {}, {}, 0.1), 3, 2.0, 3.0)
    made.stepped(mixed, StepResult({}, {}, {}, 0.1, True, 0, 1), 3, 2.0, 3.0)
    made.stepped(Step([ROWS["prefill"]]), StepResult({}, {}, {}, 0.1, True), 1, 3.0, 4.0)
    made.heartbeat()
    assert {mode: counter._value.get() - before[mode] for mode, counter in counters.items()} == {
        "captured": 2, "decoder": 1, "eager": 3}
