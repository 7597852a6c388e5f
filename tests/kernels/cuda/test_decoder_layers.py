"""The kernel decoder_layers on a CPU, against its golden function in float64."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from npuserve.kernels.bench.tensors import copy_value, widened
from npuserve.kernels.cuda import launch_decoder_layers
from npuserve.kernels.decoder_layers import case, decoder_layers
from npuserve.kernels.layer import LayerWeights, Linear
from npuserve.kernels.registry import Case
from tests.kernels.cuda import emulation

CASES = [
    case([700]),
    case([33, 290], scheme="int8"),
    case([33, 290], scheme="float8"),
    case([70, 5]),
]
SLOW = [
    case([64, 97], (8, 2, 64), norm=False),
    case([40, 200], (16, 2, 64), (512, 512), 1, page=16),
    case([40], (56, 8, 64), (512, 512), 1, page=128),
    case([40, 7], (4, 2, 128), (512, 5632), 1, "int8"),
]
"""With CASES: one and two rows, both head sizes, each scheme and page at least once."""
FULL = [
    case([5, 300], (16, 2, 64), (1024, 512), 3),
    *(each for each in decoder_layers.cases
      if not each.benchmark and each.name not in {x.name for x in (*CASES, *SLOW)}),
    *(case(contexts, scheme=scheme) for scheme in ("", "int8", "float8") for contexts in ([1, 64], [97, 128])),
    case([40], sizes=(5120, 1024), layers=1, scheme="float8"),
    case([600, 31], sizes=(5120, 512), layers=1),
    case([3], (4, 1, 128), (1024, 2560), 1),
    case([40], (8, 1, 64), (1024, 512)),
    case([40], (8, 1, 64), (1024, 1024), scheme="int8"),  # the last key is beyond the end of a part that loads it
    case([40], sizes=(512, 5632), layers=1),
]


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


def made(of: Case, seed: int = 0) -> tuple[Any, ...]:
    return of.make(torch.Generator().manual_seed(seed), torch.bfloat16)


def error(tensor: Tensor, exact: Tensor) -> float:
    return float((tensor.double() - exact).norm() / exact.norm())


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    "of", [pytest.param(of, id=of.name, marks=marks)
           for cases, marks in ((CASES[:1], ()), (CASES[1:] + SLOW, pytest.mark.slow), (FULL, pytest.mark.full))
           for of in cases])
def test_errors_are_those_of_the_golden_function_in_bfloat16(of: Case, folder: Path) -> None:
    wide, golden, own = widened(made(of)), made(of), made(of)
    exact, rounded = decoder_layers.golden(*wide), decoder_layers.golden(*golden)
    out = emulation.run(folder, own)
    assert error(out, exact) <= 1.2 * error(rounded, exact) + 1e-4
    torch.testing.assert_close(out.double(), exact, rtol=of.tolerance, atol=of.tolerance)
    for layer in range(len(own[2])):
        for kind in range(2):
            exact, rounded, written = (args[2][layer][kind] for args in (wide, golden, own))
            assert error(written, exact) <= 1.2 * error(rounded, exact) + 1e-4


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("blocks", [1, pytest.param(70, marks=pytest.mark.full)])
def test_any_number_of_blocks_serves(blocks: int, folder: Path) -> None:
    """One block waits for nobody; more blocks than tiles leave some without work."""
    of = case([40, 130], (8, 2, 64), (512, 512), 1)
    exact = decoder_layers.golden(*widened(made(of)))
    assert error(emulation.run(folder, made(of), blocks), exact) < 0.01


@pytest.mark.slow
@needs_compiler
def test_rows_of_no_slot_write_nothing(folder: Path) -> None:
    """Padding rows may have the slot -1, or no context."""
    of = case([33, 290])
    args = list(made(of))
    args[6] = torch.tensor([-1, int(args[6][1])])
    before = copy_value(args[2])
    out = emulation.run(folder, args)
    assert torch.isfinite(out).all()
    place = args[6][1]
    for (keys, values), (old_keys, old_values) in zip(args[2], before, strict=True):
        for now, old in ((keys, old_keys), (values, old_values)):
            changed = (now.flatten(0, 1) != old.flatten(0, 1)).any(dim=-1).any(dim=-1)
            assert changed.nonzero().flatten().tolist() == [int(place)]


def without(of: Case, **changes: Any) -> dict[str, int] | None:
    """Return the constants for a case whose first layer is changed."""
    residual, layers, caches, _, cos_sin, *_, heads, _ = made(of)
    layers = (replace(layers[0], **{name: change(layers[0]) for name, change in changes.items()}), *layers[1:])
    return launch_decoder_layers.constants_of(
        len(residual), layers, caches[0][0], cos_sin.shape[1], heads, emulation.BLOCKS, emulation.SHARED)


def with_bias(layer: LayerWeights) -> Linear:
    return Linear(layer.qkv.weight, torch.zeros(layer.qkv.weight.shape[0]))


def in_float32(layer: LayerWeights) -> Linear:
    assert isinstance(layer.o.weight, Tensor)
    return Linear(layer.o.weight.float(), None)


@pytest.mark.slow
@pytest.mark.parametrize(("of", "changes"), [
    (case([3, 3, 3]), {}),
    (case([3], (4, 2, 32)), {}),
    (case([3], (4, 2, 256)), {}),
    (case([3], sizes=(520, 1024)), {}),
    (case([3], sizes=(5632, 512), layers=1), {}),
    (case([3]), {"qkv": with_bias}),
    (case([3]), {"o": in_float32}),
], ids=["three rows", "heads of 32", "heads of 256", "columns", "hidden size", "bias", "float32"])
def test_steps_that_it_does_not_take(of: Case, changes: dict[str, Any]) -> None:
    assert without(of, **changes) is None


def test_partial_rotary_embeddings_are_not_taken() -> None:
    residual, layers, caches, *_ = made(case([3]))
    for rotary_dim, taken in ((128, True), (64, False)):
        constants = launch_decoder_layers.constants_of(
            len(residual), layers, caches[0][0], rotary_dim, 4, emulation.BLOCKS, emulation.SHARED)
        assert (constants is not None) == taken


def test_cpu_tensors_are_not_taken() -> None:
    assert launch_decoder_layers.decoder_layers(*made(case([3]))) is None
