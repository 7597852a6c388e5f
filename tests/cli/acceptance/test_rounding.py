"""Reference that takes a device's rounding of ties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from npuserve.cli.acceptance.reference import load_reference, step_logits
from npuserve.cli.acceptance.rounding import MAX_TIE_DISTANCE, FollowedRounding
from npuserve.kernels import linear, native, norm
from npuserve.kernels.quantize import quantize
from npuserve.kernels.quantized import Quantized, Scheme
from npuserve.npu import storyteller
from npuserve.npu.backends.base import Backend, DeviceSettings
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution.decoder import Model
from npuserve.npu.quantize.checkpoint import quantize_checkpoint
from npuserve.npu.step import Row
from tests.kernels.variants import ISAS

EXACT = torch.tensor([[127.0, 1.5, 1.5 + MAX_TIE_DISTANCE / 2, 1.5 + 2 * MAX_TIE_DISTANCE, -2.5, 3.0]])


@pytest.mark.parametrize(("place", "value", "is_tie"), [
    (1, 1, True), (1, 2, True), (2, 1, True), (3, 1, False), (4, -3, True), (5, 4, False), (1, 0, False),
    (0, 126, False)])
def test_follow_takes_the_device_value_of_a_tie_alone(place: int, value: int, is_tie: bool) -> None:
    own = quantize(EXACT, Scheme(levels=127))
    device = own.values.clone()
    device[0, place] = value
    differs = int(device[0, place] != own.values[0, place])
    rounding = FollowedRounding()
    rounding.record(device)
    got = rounding.follow(EXACT, own)
    assert torch.equal(got.values, device if is_tie else own.values)
    assert (rounding.numbers, rounding.ties, rounding.others) == (6, differs * is_tie, differs * (not is_tie))
    assert rounding.distance <= MAX_TIE_DISTANCE


DEVICE: Any = SimpleNamespace(
    capabilities=replace(CpuBackend.capabilities, int8_levels=127, int4=False), state_dtype=lambda dtype: torch.float32)
"""Backend other than the CPU's, so that its reference has native kernels."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model in W8A8."""
    made = tmp_path_factory.mktemp("w8a8") / "model"
    quantize_checkpoint(storyteller.FOLDER, made)
    return made


@pytest.fixture(scope="module")
def golden(folder: Path) -> tuple[Model, Backend]:
    """The model with an int8 LM head, on golden functions."""
    backend = CpuBackend(native=False, settings=DeviceSettings(int8_levels=127))
    return load_reference(folder, backend, "float32", 256, 1, "int8")


def steps() -> list[list[Row]]:
    ids = torch.randint(2048, (3, 41), generator=torch.Generator().manual_seed(0)).tolist()
    return [[Row(i, ids[i][:40], 0, [i], True) for i in range(3)],
            [Row(i, ids[i][40:], 40, [i], True) for i in range(3)]]


class Compared(NamedTuple):
    """Largest differences of the device's logits from the reference's: `apart` with the reference's own roundings."""

    rounding: FollowedRounding
    apart: float
    followed: float


def compared(
    golden: tuple[Model, Backend], quantized: Callable[[Tensor, Scheme], Quantized],
    reference: tuple[Model, Backend] | None = None,
) -> Compared:
    """Follow a device that computes golden functions and quantizes by `quantized`. reference: None for golden."""
    model, backend = golden
    other = reference or golden
    rounding = FollowedRounding()
    with mock.patch.object(norm, "quantize", quantized), mock.patch.object(linear, "quantize", quantized):
        device = list(step_logits(rounding.device(model), backend, steps(), 3, 128))
    followed = list(step_logits(rounding.reference(other[0]), other[1], steps(), 3, 128))
    own = list(step_logits(*other, steps(), 3, 128))
    return Compared(rounding, *(
        max(float((a - b).abs().max()) for a, b in zip(device, others, strict=True)) for others in (own, followed)))


@pytest.mark.slow
@pytest.mark.parametrize("isa", [None, *ISAS])
def test_followed_reference_has_the_logits_of_a_device_that_multiplies(
    golden: tuple[Model, Backend], folder: Path, isa: str | None
) -> None:
    """CANN's kernels multiply by 127 / max where the golden function divides by max / 127."""

    def multiplied(x: Tensor, scheme: Scheme) -> Quantized:
        largest = x.abs().amax(-1, keepdim=True)
        return Quantized((x * (127 / largest)).round().to(torch.int8), (largest / 127).squeeze(-1))

    if isa is None:
        found = compared(golden, multiplied)
    else:
        with native.using(isa):
            found = compared(golden, multiplied, load_reference(folder, DEVICE, "float32", 256, 1, "int8"))
    assert found.rounding.numbers == 123 * (golden[0].config.num_layers * (256 + 256 + 256 + 512) + 256)
    assert found.rounding.ties > 0
    assert found.rounding.others == 0
    assert found.followed < 1e-4 < found.apart


@pytest.mark.slow
def test_rounding_down_is_no_tie(golden: tuple[Model, Backend]) -> None:
    def down(x: Tensor, scheme: Scheme) -> Quantized:
        made = quantize(x, scheme)
        return replace(made, values=(x / made.scale.unsqueeze(1)).floor().to(torch.int8))

    found = compared(golden, down)
    assert found.rounding.others > found.rounding.numbers // 10
    assert found.followed > 1e-4
