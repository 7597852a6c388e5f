"""Buckets on the CPU, and on a backend that captures buckets, with correct or wrong results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from npuserve.cli.acceptance import captures, reference
from npuserve.cli.acceptance.captures import check_captures
from npuserve.kernels import native
from npuserve.npu.backends.base import Backend, Captured
from npuserve.npu.backends.cpu import CpuBackend
from tests.npu.execution.test_dispatch import Bucketed, Graph
from tests.support.models import random_model, saved

built = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restore the numbers of threads afterwards."""
    before, of_torch = native.library().threads if native.available() else 0, torch.get_num_threads()
    yield
    torch.set_num_threads(of_torch)
    if native.available():
        native.library().set_threads(before)


def loaded(folder: Path, backend: Backend, **settings: int) -> reference.Loaded:
    backend.set_threads(1)
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16} | settings
    return reference.load(folder, backend, "auto", **sizes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(random_model("qwen3", max_position_embeddings=128), tmp_path)


@built
def test_buckets_one_dispatch_for_any_rows_is_one_bucket(folder: Path) -> None:
    (found,) = captures.buckets(loaded(folder, CpuBackend()), 4)
    assert (found.rows, found.difference, found.padded_difference) == (4, 0.0, 0.0)
    assert min(found.seconds, found.replay_seconds, found.single_seconds) > 0


def test_buckets_without_native_kernels_are_empty(folder: Path) -> None:
    assert list(captures.buckets(loaded(folder, CpuBackend(native=False)), 4)) == []


@built
def test_buckets_are_yielded_largest_first(folder: Path) -> None:
    backend = Bucketed()
    backend.decode_buckets = (2, 4)
    found = list(captures.buckets(loaded(folder, backend), 4))
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

    first, *_ = captures.buckets(loaded(folder, Backend()), 4)
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
