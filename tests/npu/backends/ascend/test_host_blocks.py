"""Blocks in host memory on the emulated Ascend device, whose streams run as late as they may, or in a random order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npuserve.npu.execution.runner import Runner
from tests.npu.backends.ascend.test_backend import RELAX, load
from tests.npu.backends.offload import (
    check_bits,
    check_corruption,
    check_load_after_step_in_flight,
    check_pressure,
)
from tests.npu.backends.small import saved
from tests.npu.emulator.child import emulated, needs_npu, run

BUDGET = 256


def loaded(folder: Path, memory: int = 8 << 20, **settings: Any) -> Runner:
    saved(folder, layers=1)
    return load(folder, max_num_batched_tokens=BUDGET, max_num_seqs=4, capture="off", kv_offload_memory=memory,
                **settings)


def bits_are_equal(folder: Path, cache: str) -> None:
    check_bits(lambda memory: loaded(folder, memory and 8 << 20, kv_cache_dtype=cache), BUDGET)


def pressure(folder: Path) -> None:
    check_pressure(loaded(folder), BUDGET)


@needs_npu
@pytest.mark.parametrize("cache", ["auto", "int8"])
@pytest.mark.parametrize(("order", "seed"), [("lazy", 0), ("shuffled", 1)])
def test_ascend_blocks_come_back_with_the_same_bits(tmp_path: Path, cache: str, order: str, seed: int) -> None:
    run(bits_are_equal, {"folder": tmp_path, "cache": cache},
        {"relax": RELAX, "order": order, "seed": seed, "poison": True})


@needs_npu
@pytest.mark.parametrize(("order", "seed"), [("lazy", 0), ("shuffled", 1)])
def test_ascend_answers_under_pressure_are_those_without_cache(tmp_path: Path, order: str, seed: int) -> None:
    run(pressure, {"folder": tmp_path}, {"relax": RELAX, "order": order, "seed": seed, "poison": True})


@emulated(relax=RELAX)
def test_ascend_load_waits_for_the_step_in_flight(tmp_path: Path) -> None:
    check_load_after_step_in_flight(loaded(tmp_path))


@emulated(relax=RELAX)
def test_ascend_corrupt_block_is_a_miss(tmp_path: Path) -> None:
    check_corruption(loaded(tmp_path), BUDGET)
