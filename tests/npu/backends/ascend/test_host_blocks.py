"""Blocks and fixed states in host memory on the emulated Ascend device, whose streams run as late as they may, or in a
random order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npuserve.npu.execution.runner import Runner
from tests.npu.backends.ascend.test_backend import RELAX, load
from tests.npu.backends.hybrid import saved_hybrid
from tests.npu.backends.offload import (
    POOL,
    PROMPTS,
    check_bits,
    check_corruption,
    check_load_after_step_in_flight,
    check_pressure,
    check_store,
)
from tests.npu.backends.small import saved
from tests.npu.emulator.child import emulated, needs_npu, run

BUDGET = 256
SLOTS = 3
"""Slots of fixed state that the scheduler uses: one of a request, and two checkpoints."""


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
@pytest.mark.parametrize(("order", "seed"), [("lazy", 0), pytest.param("shuffled", 1, marks=pytest.mark.full)])
def test_ascend_answers_under_pressure_are_those_without_cache(tmp_path: Path, order: str, seed: int) -> None:
    run(pressure, {"folder": tmp_path}, {"relax": RELAX, "order": order, "seed": seed, "poison": True})


def hybrid(folder: Path, memory: int = 64 << 20, **settings: Any) -> Runner:
    """A state takes two slots of host memory, or more with int8 blocks."""
    saved_hybrid(folder, layers=4, full=(3,), head_dim=128, context=1024)
    runner = load(folder, max_num_batched_tokens=BUDGET, max_num_seqs=4, capture="off", kv_offload_memory=memory,
                  kv_cache_memory=128 << 20, **settings)
    assert runner.num_slots > 2 * PROMPTS
    return runner


def state_bits_are_equal(folder: Path, cache: str) -> None:
    scheduler = check_bits(
        lambda memory: hybrid(folder, memory and 64 << 20, kv_cache_dtype=cache), BUDGET, num_slots=SLOTS)
    assert scheduler.tier is not None
    assert scheduler.tier.state_parts > 1


def state_pressure(folder: Path) -> None:
    check_pressure(hybrid(folder), BUDGET, num_slots=8, pool=POOL)


@needs_npu
@pytest.mark.parametrize("cache", [pytest.param("auto", marks=pytest.mark.full), "int8"])
@pytest.mark.parametrize(("order", "seed"), [
    pytest.param("lazy", 0, marks=pytest.mark.full), ("shuffled", 1)])
def test_ascend_states_come_back_with_the_same_bits(tmp_path: Path, cache: str, order: str, seed: int) -> None:
    run(state_bits_are_equal, {"folder": tmp_path, "cache": cache},
        {"relax": RELAX, "order": order, "seed": seed, "poison": True})


@needs_npu
@pytest.mark.full
@pytest.mark.parametrize(("order", "seed"), [("lazy", 0), ("shuffled", 1)])
def test_ascend_answers_of_hybrids_under_pressure_are_those_without_cache(
    tmp_path: Path, order: str, seed: int
) -> None:
    run(state_pressure, {"folder": tmp_path}, {"relax": RELAX, "order": order, "seed": seed, "poison": True})


def store_bits_are_equal(folder: Path, num_slots: int | None) -> None:
    model = hybrid if num_slots else loaded
    check_store(lambda memory: model(folder, memory and 64 << 20), BUDGET, num_slots)


@needs_npu
@pytest.mark.parametrize(("num_slots", "order", "seed"), [
    pytest.param(None, "lazy", 0, marks=pytest.mark.full), pytest.param(SLOTS, "lazy", 0, marks=pytest.mark.full),
    (SLOTS, "shuffled", 1)])
def test_ascend_prefixes_come_from_a_store_with_the_same_bits(
    tmp_path: Path, num_slots: int | None, order: str, seed: int
) -> None:
    run(store_bits_are_equal, {"folder": tmp_path, "num_slots": num_slots},
        {"relax": RELAX, "order": order, "seed": seed, "poison": True})


@pytest.mark.full
@emulated(relax=RELAX)
def test_ascend_corrupt_state_is_a_miss(tmp_path: Path) -> None:
    check_corruption(hybrid(tmp_path), BUDGET, num_slots=SLOTS, part=-1)


@emulated(relax=RELAX)
def test_ascend_load_waits_for_the_step_in_flight(tmp_path: Path) -> None:
    check_load_after_step_in_flight(loaded(tmp_path))


@emulated(relax=RELAX)
def test_ascend_corrupt_block_is_a_miss(tmp_path: Path) -> None:
    check_corruption(loaded(tmp_path), BUDGET)
