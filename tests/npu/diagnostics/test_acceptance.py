"""Acceptance measurements on the CPU, and on a backend that captures buckets, with correct or wrong results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from npuserve.cli.acceptance.captures import check_captures
from npuserve.kernels import native
from npuserve.kernels.registry import GOLDEN, KnownSpan, Span
from npuserve.npu.backends.base import Backend, Captured
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.diagnostics import acceptance
from npuserve.npu.diagnostics.teacher_forced import forced_logits
from npuserve.npu.model.config import ModelError
from npuserve.npu.quantization import W8A8
from npuserve.npu.step import Step
from tests.npu.execution.test_dispatch import Bucketed, Graph
from tests.support.models import random_model, saved, saved_w8a8

built = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restore the numbers of threads afterwards."""
    before, of_torch = native.library().threads if native.available() else 0, torch.get_num_threads()
    yield
    torch.set_num_threads(of_torch)
    if native.available():
        native.library().set_threads(before)


def loaded(folder: Path, backend: Backend, **settings: int) -> acceptance.Loaded:
    backend.set_threads(1)
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16} | settings
    return acceptance.load(folder, backend, "auto", **sizes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(random_model("qwen3", max_position_embeddings=128), tmp_path)


def test_acceptance_load_sizes_cache_for_requests(folder: Path) -> None:
    found = loaded(folder, CpuBackend(), max_num_seqs=3, max_model_len=100, block_size=16)
    assert (found.runner.num_blocks, found.runner.block_size, found.runner.max_model_len) == (3 * 7, 16, 100)
    assert found.runner.collect(found.runner.launch(Step([]))).token_ids == {}
    assert found.model.cos_sin.shape == (100, 16)


def test_acceptance_reference_uses_other_kernels(folder: Path) -> None:
    assert acceptance.load_reference(folder, CpuBackend(), "float32", 32, 1)[1].kernels == GOLDEN
    other = type("Other", (Bucketed,), {})
    assert acceptance.load_reference(folder, other(), "float32", 32, 1)[1].kernels == GOLDEN


@built
def test_acceptance_reference_takes_the_cache_of_the_device(folder: Path) -> None:
    """The native kernels have no float8; a runner and logits of given tokens use the golden functions."""
    other: Any = SimpleNamespace(
        int8_levels=127.5, scale_dtype=torch.bfloat16, cache_dtypes=(torch.int8, torch.float8_e4m3fn))
    kernels = {cached: acceptance.load_reference(folder, other, "float32", 32, 1, "auto", cached)[1].kernels
               for cached in ("auto", "int8", "fp8")}
    assert kernels == {"auto": "cpu", "int8": "cpu", "fp8": GOLDEN}
    model, backend = acceptance.load_reference(folder, other, "float32", 32, 1, "auto", "fp8")
    exact, found = (torch.cat(list(forced_logits(model, backend, [[1, 2, 3, 4, 5, 6]], 4, cache_dtype=cached)))
                    for cached in (None, torch.float8_e4m3fn))
    assert 0 < (found - exact).abs().max() < 0.1 * exact.abs().max()
    assert acceptance.reference_runner(model, backend, 2, 16, "fp8").cache_dtype == torch.float8_e4m3fn


def test_acceptance_reference_computes_float8_models(tmp_path: Path) -> None:
    other: Any = SimpleNamespace(
        int8_levels=127.5, scale_dtype=torch.bfloat16, cache_dtypes=(torch.int8, torch.float8_e4m3fn))
    model = random_model("qwen3", max_position_embeddings=128)
    plain, float8 = saved(model, tmp_path / "plain"), saved_w8a8(model, tmp_path / "float8", W8A8(float8=True))
    exact, found = (acceptance.load_reference(folder, other, "float32", 32, 1) for folder in (plain, float8))
    assert found[1].kernels == GOLDEN
    assert (exact[0].weights.quantized_inputs, found[0].weights.quantized_inputs) == (set(), {torch.float8_e4m3fn})
    ours, theirs = (torch.cat(list(forced_logits(*made, [[1, 2, 3, 4, 5, 6]], 4))) for made in (found, exact))
    assert 0.01 < (ours - theirs).norm() / theirs.norm() < 0.3


def test_acceptance_reference_too_large_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "memory_available", lambda _: 1 << 10)
    with pytest.raises(ModelError, match=r"needs .* of memory"):
        acceptance.load_reference(folder, CpuBackend(), "float32", 32, 1)


@pytest.mark.parametrize("kernels", [pytest.param(True, marks=built), False])
def test_bandwidth_of_cpu_is_its_ceiling(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "READ_BYTES", 8 << 20)
    monkeypatch.setattr(acceptance.Ceilings, "read", lambda self: float(self.read_bytes))
    assert acceptance.bandwidth(CpuBackend(native=kernels)) == 8 << 20


class Spanned(Bucketed):
    """Backend on whose clock each span takes a second."""

    def span(self) -> Span:
        return KnownSpan(1.0)


def test_bandwidth_of_device_is_of_best_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(acceptance, "CpuBackend", int)  # not treated as a CPU
    assert acceptance.bandwidth(Spanned()) == 2 << 20  # a copy reads and writes


@built
def test_buckets_one_dispatch_for_any_rows_is_one_bucket(folder: Path) -> None:
    (found,) = acceptance.buckets(loaded(folder, CpuBackend()), 4)
    assert (found.rows, found.difference, found.padded_difference) == (4, 0.0, 0.0)
    assert min(found.seconds, found.replay_seconds, found.single_seconds) > 0


def test_buckets_without_native_kernels_are_empty(folder: Path) -> None:
    assert list(acceptance.buckets(loaded(folder, CpuBackend(native=False)), 4)) == []


@built
def test_buckets_are_yielded_largest_first(folder: Path) -> None:
    backend = Bucketed()
    backend.decode_buckets = (2, 4)
    found = list(acceptance.buckets(loaded(folder, backend), 4))
    assert backend.decode_buckets == (2, 4)
    assert [(x.rows, x.difference, x.padded_difference) for x in found] == [(4, 0.0, 0.0), (2, 0.0, 0.0)]


class Wrong(Graph):
    """Graph that permutes the rows of full or of padded batches."""

    padded = False

    def replay(self, rows: int, context_lens: Sequence[int], cu_seqlens: Sequence[int] = ()) -> Tensor:
        out = super().replay(rows, context_lens)
        return out.flip(0) if (rows < self.size(rows)) == self.padded else out


@built
@pytest.mark.parametrize("padded", [True, False])
def test_buckets_report_wrong_captures(folder: Path, padded: bool) -> None:
    class Backend(Bucketed):
        def capture(self, step: Callable[[int], Tensor], largest: int, *, decode: bool) -> Captured | None:
            made = Wrong(step)
            made.padded = padded
            return made if decode else None

    first, *_ = acceptance.buckets(loaded(folder, Backend()), 4)
    assert (first.difference > 0.1, first.padded_difference > 0.1) == (not padded, padded)


@built
def test_padded_capture_with_nan_fails(folder: Path) -> None:
    class Padded(Graph):
        def replay(self, rows: int, context_lens: Sequence[int], cu_seqlens: Sequence[int] = ()) -> Tensor:
            out = super().replay(rows, context_lens)
            return out * torch.nan if rows < self.size(rows) else out

    class Backend(Bucketed):
        def capture(self, step: Callable[[int], Tensor], largest: int, *, decode: bool) -> Captured | None:
            return Padded(step) if decode else None

    first, *_ = check_captures(loaded(folder, Backend()), 4)
    assert first.passed is False
    assert first.figures["padded_difference"] == torch.inf
