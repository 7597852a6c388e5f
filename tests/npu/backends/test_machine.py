"""Machines for kernel measurements: the host itself, or a backend that captures the measured calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from npuserve.kernels.bench import measure
from npuserve.kernels.bench.ceilings import HOST, Ceilings
from npuserve.kernels.bench.measure import Bench
from npuserve.kernels.registry import GOLDEN, Case
from npuserve.kernels.swiglu import swiglu
from npuserve.npu.backends.base import BackendError, Captured
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.backends.machine import Device, machine_of, served_kernel, takes_case


class Graph:
    """Captured step that is executed again. replays: their number."""

    largest = 1

    def __init__(self, step: Callable[[int], Tensor]):
        self.replays = 0
        self._step = step

    def size(self, rows: int) -> int:
        return rows

    def replay(self, rows: int, context_lens: Sequence[int], cu_seqlens: Sequence[int] = ()) -> Tensor:
        assert (rows, list(context_lens)) == (1, [1])
        self.replays += 1
        return self._step(rows)

    def replay_timed(self, rows: int, context_lens: Sequence[int]) -> None:
        return


class Capturing(CpuBackend):
    """Backend that records its graphs and the requested buckets in `captures`."""

    def __init__(self, able: bool = True) -> None:
        super().__init__(native=False)
        self.captures: list[tuple[Graph, tuple[int, ...]]] = []
        self._able = able

    def capture(
        self, step: Callable[[int], Tensor], largest: int, *, decode: bool, buckets: Sequence[int] = ()
    ) -> Captured | None:
        assert decode
        made = Graph(step)
        self.captures.append((made, tuple(buckets)))
        return made if self._able else None

    def check_heads(self, head_dim: int) -> None:
        if head_dim > 100:
            raise BackendError("heads")


def test_machine_of_cpu_is_host() -> None:
    assert machine_of(CpuBackend(native=False)) is HOST


def test_served_kernel_has_the_own_function_of_the_backend() -> None:
    backend = Capturing()
    assert served_kernel(backend, swiglu) is swiglu
    backend.own_kernels = {"swiglu": torch.neg}
    backend.kernels = "cpu"
    swiglu_of_backend = served_kernel(backend, swiglu)
    assert swiglu_of_backend.implementations["cpu"].function is torch.neg
    assert swiglu_of_backend.implementations["cpu"].adapt is swiglu.implementations["cpu"].adapt
    assert swiglu.implementations["cpu"].function is not torch.neg


def test_device_record_is_one_dispatch_of_one_bucket() -> None:
    backend, calls = Capturing(), []
    replay = Device(backend).record(lambda: calls.append(1) or torch.empty(0))  # type: ignore[func-returns-value]
    assert replay
    replay()
    replay()
    (graph, buckets), = backend.captures
    assert (graph.replays, len(calls), buckets) == (2, 2, (1,))
    assert Device(Capturing(able=False)).record(lambda: torch.empty(0)) is None


def test_device_times_captured_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_PASS_SECONDS", 1e-4)
    monkeypatch.setattr(measure, "_SECONDS", 0.0)
    monkeypatch.setattr("npuserve.kernels.bench.ceilings._TORCH_SIZES", (16, 16))
    backend = Capturing()
    bench = Bench(swiglu, swiglu.cases[1], torch.bfloat16, Device(backend), seed=7)
    assert bench.alone(GOLDEN) > 0
    assert all(graph.replays for graph, _ in backend.captures)
    best = {"read_gbs": 1.0, "bf16_gflops": 1.0, "int8_gops": 1.0, "fp32_gflops": 1.0}
    found = bench.measure(GOLDEN, Ceilings(1 << 20, machine=Device(backend)), best)
    assert 0 < found.error < 0.05
    assert found.seconds > 0


@pytest.mark.slow
def test_device_ceilings_count_copied_bytes() -> None:
    """On the test's clock each span takes a second."""

    class Slow(Device):
        def span(self):  # type: ignore[no-untyped-def]
            from npuserve.kernels.registry import KnownSpan

            return KnownSpan(1.0)

    made = Ceilings(1 << 20, machine=Slow(Capturing()))
    assert made.read() == made.copy() == 1 << 20
    size = 2 * 1024**3
    assert [made.peak(kind) for kind in ("bf16", "int8", "fp32")] == [size] * 3  # type: ignore[arg-type]
    assert made.peak_of("float16") == size


@pytest.mark.parametrize(("facts", "taken"), [
    ({}, True), ({"cache": torch.int8}, True), ({"cache": torch.float8_e4m3fn}, False), ({"zeros": True}, True),
    ({"float8": True}, False), ({"head_dim": 64}, True), ({"head_dim": 128}, False)])
def test_takes_case_refuses_unsupported_features(facts: dict[str, Any], taken: bool) -> None:
    case = Case("some", lambda generator, dtype: (), **facts)  # type: ignore[arg-type]
    assert takes_case(Capturing(), case) is taken
