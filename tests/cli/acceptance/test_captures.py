"""Buckets on the CPU, and on a backend that captures buckets, with correct or wrong results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from npuserve.cli.acceptance import captures
from npuserve.cli.acceptance.captures import check_captures
from npuserve.kernels import native
from npuserve.npu.backends.base import Captured
from npuserve.npu.backends.cpu import CpuBackend
from tests.cli.acceptance.loading import loaded
from tests.npu.execution.test_dispatch import Bucketed, Graph

pytestmark = pytest.mark.usefixtures("threads")
built = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")


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
    found = list(captures.buckets(loaded(folder, backend), 4))
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
        def capture(self, step: Callable[[int], Tensor], largest: int, *, decode: bool, **_: object) -> Captured | None:
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
        def capture(self, step: Callable[[int], Tensor], largest: int, *, decode: bool, **_: object) -> Captured | None:
            return Padded(step) if decode else None

    first, *_ = check_captures(loaded(folder, Backend()), 4)
    assert first.passed is False
    assert first.figures["padded_difference"] == torch.inf
