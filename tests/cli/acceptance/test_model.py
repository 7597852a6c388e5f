"""Tokens part of the acceptance check: overlapped steps, and the minimum share of equal argmax."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from npuserve.cli.acceptance import kernels
from npuserve.cli.acceptance import tokens as accept_tokens
from npuserve.cli.acceptance.model import MIN_EQUAL_SHARE, min_equal_share
from npuserve.npu import backends
from npuserve.npu.execution.runner import Runner
from npuserve.npu.quantization.w8a8 import W8A8
from tests.cli.acceptance.running import Capture, accepted, built, part_of
from tests.support.golden_cpu import GoldenCpu

pytestmark = pytest.mark.usefixtures("small")


@pytest.mark.slow
@built
@pytest.mark.usefixtures("no_large_cases")
def test_check_tokens_corrupt_overlap_fails(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is launched while another is in flight changes that step's token ids."""
    launch, collect, in_flight = Runner.launch, Runner.collect, []

    def launched(self: Runner, step: Any) -> Any:
        if in_flight:
            self.backend.enqueue(lambda: self._device_ids[0].add_(1).remainder_(100))
        in_flight.append(step)
        return launch(self, step)

    def collected(self: Runner, handle: Any) -> Any:
        in_flight.pop()
        return collect(self, handle)

    monkeypatch.setattr(Runner, "launch", launched)
    monkeypatch.setattr(Runner, "collect", collected)
    monkeypatch.setattr(kernels, "check_kernels", lambda *_: iter(()))
    code, report = accepted(capsys, str(folder))
    assert code == 1
    found = part_of(report, "tokens")["overlapped and not, float32"]
    assert (found["passed"], found["said"].split()[0]) == (False, "OTHER")
    assert "--no-double-buffering" in found["advice"]


@pytest.mark.slow
@built
@pytest.mark.usefixtures("no_large_cases")
def test_check_of_a_hybrid_passes_in_all_parts(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays begin with the state before the step that they repeat."""
    from tests.support.hybrids import random_hybrid
    from tests.support.models import saved

    monkeypatch.setattr(kernels, "check_kernels", lambda *_: iter(()))
    code, report = accepted(capsys, str(saved(random_hybrid(0), tmp_path)), "--dtype", "float32")
    assert [finding for finding in report["findings"] if finding["passed"] is False] == []
    assert code == 0
    assert part_of(report, "tokens")["beside the CPU, float32"]["passed"]
    assert part_of(report, "capture")["9 rows"]["figures"]["difference"] == 0
    assert {finding["part"] for finding in report["findings"]} >= {"tokens", "sampling", "capture", "contexts"}


@pytest.mark.slow
@built
@pytest.mark.parametrize("own", [994, 996])
@pytest.mark.usefixtures("no_large_cases")
def test_check_tokens_verdict_is_the_same_on_both_sides_of_the_minimum(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, own: int
) -> None:
    """The device has 989 equal positions of 1,000; the CPU has slightly fewer, or more, than 995."""
    real, equal = accept_tokens.agreement, iter([1000, 989, own])

    def agreement(*arguments: Any) -> accept_tokens.Agreement:
        return dataclasses.replace(real(*arguments), positions=1000, equal=next(equal))

    monkeypatch.setattr(accept_tokens, "agreement", agreement)
    monkeypatch.setattr(kernels, "check_kernels", lambda *_: iter(()))
    _, report = accepted(capsys, str(folder), "--dtype", "bfloat16")
    found = part_of(report, "tokens")["beside the CPU, bfloat16"]
    assert (found["figures"]["equal_argmax"], found["passed"]) == (0.989, True)


@pytest.mark.slow
@pytest.mark.parametrize(("own", "passes"), [(970, True), (1000, False)])
@pytest.mark.usefixtures("no_large_cases")
def test_check_tokens_float8_in_float32_is_judged_as_bfloat16(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, own: int, passes: bool
) -> None:
    """The device has 980 equal positions of 1,000, and other tokens."""
    from tests.support.models import random_model, saved_w8a8

    folder = saved_w8a8(random_model("qwen3", max_position_embeddings=256), tmp_path, W8A8(float8=True))
    real, equal = accept_tokens.agreement, iter([980, own])

    def agreement(*arguments: Any) -> accept_tokens.Agreement:
        return dataclasses.replace(real(*arguments), positions=1000, equal=next(equal), likeliest=0)

    monkeypatch.setattr(backends, "_emulated", {"cpu": GoldenCpu})
    monkeypatch.setattr(accept_tokens, "agreement", agreement)
    monkeypatch.setattr(kernels, "check_kernels", lambda *_: iter(()))
    _, report = accepted(capsys, str(folder))
    found = part_of(report, "tokens")["beside the CPU, float32"]
    assert (found["figures"]["equal_argmax_of_the_cpu"], found["passed"]) == (own / 1000, passes)
    assert "; the CPU in bfloat16: " in found["said"]
    sampled = [x for name, x in part_of(report, "sampling").items() if name.endswith(", float32")]
    assert sampled
    assert all(x["passed"] for x in sampled)


@pytest.mark.parametrize("positions", [100, 200, 800, 1000, 20_000])
def test_min_equal_share_is_continuous_and_lower_for_fewer_positions(positions: int) -> None:
    """A change of the CPU's share by a tenth of a position changes the limit by less than half a position."""
    shares = [number / (10 * positions) for number in range(9 * positions, 10 * positions + 1)]
    limits = [min_equal_share(positions, own) for own in shares]
    steps = [after - before for before, after in pairwise(limits)]
    assert 0 <= min(steps) <= max(steps) < 0.5 / positions
    assert max(limits) == min_equal_share(positions) < MIN_EQUAL_SHARE
    assert min_equal_share(positions) < min_equal_share(2 * positions)
    assert min_equal_share(10**9) == pytest.approx(MIN_EQUAL_SHARE, abs=1e-5)


@pytest.mark.parametrize(("positions", "own", "share", "passes"), [
    (800, 0.9951, 0.9914, True),  # an emulated NPU with AVX2 alone
    (800, 0.9951, 0.98, False),
    (10_000, 0.9951, 0.9914, False),
    (1000, 0.9949, 0.9882, True),
    (1000, 0.9951, 0.9884, True),  # an earlier rule differed between these two
    (1000, 0.9949, 0.9860, False),
    (1000, 1.0, 0.9885, True),
    (1000, 1.0, 0.988, False),
])
def test_min_equal_share_separates_rounding_from_faults(positions: int, own: float, share: float, passes: bool) -> None:
    assert (share >= min_equal_share(positions, own)) == passes
