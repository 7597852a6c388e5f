"""Latency part of the acceptance check on the CPU."""

from __future__ import annotations

import pytest

from npuserve.cli.acceptance import latency
from npuserve.cli.acceptance.latency import LatencyCheck
from npuserve.kernels.registry import KERNELS, Implementation, KnownSpan, Span
from npuserve.npu.backends.cpu import CpuBackend
from tests.cli.acceptance.running import built
from tests.npu.execution.test_dispatch import Bucketed

pytestmark = pytest.mark.usefixtures("small")


@pytest.mark.parametrize(("judged", "judge", "passed"), [
    (None, True, None), (0.5, True, True), (0.51, True, False), (0.51, False, None),
])
def test_latency_is_judged_by_its_share_of_the_floor(judged: float | None, judge: bool, passed: bool | None) -> None:
    found = LatencyCheck(False, judged, bytes_per_second=100.0).latency("step", 4.0, 200.0, "do this", judge)
    assert (found.passed, found.figures) == (passed, {"seconds": 4.0, "floor_seconds": 2.0, "share": 0.5})


@built
def test_latency_samplers_are_timed_and_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CpuBackend()
    assert list(LatencyCheck(False, None).samplers(backend)) == []
    timed = list(LatencyCheck(False, 0.0, bytes_per_second=1.0).samplers(backend))
    assert [x.name for x in timed] == [f"sampler, 8 rows, {name}" for name in latency.SAMPLERS]
    assert all(x.figures["seconds"] > 0 for x in timed)
    monkeypatch.setattr(latency, "MAX_SAMPLER_SECONDS", 0.0)
    assert not any(x.passed for x in LatencyCheck(False, 0.0, bytes_per_second=1.0).samplers(backend))


@pytest.mark.slow
@built
def test_latency_kernels_are_compared_with_the_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "KERNELS", {"swiglu": KERNELS["swiglu"]})
    backend = CpuBackend()
    found = list(LatencyCheck(False, 0.0, bytes_per_second=1.0).kernels(backend))
    assert [x.name for x in found] == [f"swiglu {c.name}" for c in KERNELS["swiglu"].cases if c.benchmark]
    assert all(x.passed and x.figures["seconds"] > 0 for x in found)
    dominated_by_launches = LatencyCheck(False, 0.0, bytes_per_second=1e30)
    assert all(x.passed is None for x in dominated_by_launches.kernels(backend))
    assert len(list(LatencyCheck(True, None, bytes_per_second=1.0).kernels(backend))) == 1
    right = KERNELS["swiglu"].implementations["cpu"]
    monkeypatch.setitem(KERNELS["swiglu"].implementations, "cpu", Implementation(lambda x: right.function(x) + 1))
    wrong = [x for x in LatencyCheck(False, None, bytes_per_second=1.0).kernels(backend) if x.part == "kernels"]
    assert len(wrong) == len(found)
    assert not any(x.passed for x in wrong)


@pytest.mark.parametrize("kernels", [pytest.param(True, marks=built), False])
def test_bandwidth_of_cpu_is_its_ceiling(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "READ_BYTES", 8 << 20)
    monkeypatch.setattr(latency.Ceilings, "read", lambda self: float(self.read_bytes))
    assert latency.bandwidth(CpuBackend(native=kernels)) == 8 << 20


class Spanned(Bucketed):
    """Backend on whose clock each span takes a second."""

    def span(self) -> Span:
        return KnownSpan(1.0)


def test_bandwidth_of_device_is_of_best_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(latency, "CpuBackend", int)  # not treated as a CPU
    assert latency.bandwidth(Spanned()) == 2 << 20  # a copy reads and writes
