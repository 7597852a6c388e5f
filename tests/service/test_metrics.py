"""The metrics by name: the document against the code, and the rules of Prometheus."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from npuserve.service import metrics
from npuserve.service.block_manager import BlockManager
from npuserve.service.engine_metrics import EngineMetrics
from npuserve.service.errors import DuplicateRequest, InvalidField, QueueFull, ServeError
from npuserve.service.metrics_page import AGE, HEARTBEAT
from npuserve.service.scheduler import Scheduler

DOCUMENT = Path(__file__).parents[2] / "docs/metrics.md"


def defined() -> dict[str, MetricWrapperBase]:
    """Name as on the page -> metric."""
    found = [value for value in vars(metrics).values() if isinstance(value, MetricWrapperBase)]
    return {m._name + ("_total" if isinstance(m, Counter) else ""): m for m in found}


def documented() -> dict[str, tuple[str, list[str]]]:
    """Name -> (type, labels)."""
    rows = re.findall(r"^\| `(npuserve_\w+)` \| (\w+) \| (.*?)\|", DOCUMENT.read_text(), re.MULTILINE)
    assert len({name for name, *_ in rows}) == len(rows)
    return {name: (kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows}


def test_the_document_has_every_metric_with_its_type_and_labels() -> None:
    kinds = {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}
    code = {name: (kinds[type(m)], list(m._labelnames)) for name, m in defined().items()}
    # On the page the heartbeat's time is shown as its age.
    code[AGE] = code.pop(HEARTBEAT)
    assert documented() == code


def test_names_end_in_their_unit() -> None:
    units = ("_total", "_seconds", "_tokens", "_ratio", "_info", "_running", "_waiting", "_blocks")
    assert not [name for name in defined() if not name.endswith(units)]


def test_buckets_rise() -> None:
    for buckets in (metrics.LATENCY, metrics.GAP, metrics.STEP, metrics.KERNEL, metrics.TOKENS):
        assert list(buckets) == sorted(set(buckets))


def test_gauges_are_of_the_living() -> None:
    gauges = [m for m in defined().values() if isinstance(m, Gauge)]
    assert all(gauge._multiprocess_mode.startswith("live") for gauge in gauges)


@pytest.mark.parametrize(("error", "why"), [
    (QueueFull("full"), "queue_full"),
    (DuplicateRequest("again"), "duplicate"),
    (InvalidField("prompt", "too long"), "too_large"),
])
def test_refusals_are_told_apart(error: ServeError, why: str) -> None:
    scheduler = Scheduler(BlockManager(4, 4), max_num_seqs=1, max_num_batched_tokens=4, max_queue=1, aging_seconds=1)
    counter = metrics.queue_rejections_total.labels(why)
    before = counter._value.get()
    EngineMetrics(scheduler).rejected(error)
    assert counter._value.get() == before + 1
    assert why in DOCUMENT.read_text()
