"""Blocks and fixed states in host memory on emulated CUDA, whose copies run when an event after them is waited for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from npuserve.kernels import triton
from npuserve.kernels.registry import GOLDEN
from npuserve.npu.backends.base import BackendError, Event
from npuserve.npu.execution import host_blocks
from npuserve.npu.execution.host_blocks import HostBlocks
from npuserve.npu.execution.runner import Runner
from npuserve.npu.model.config import ModelError
from npuserve.npu.step import HostCopy
from tests.kernels.triton import needs_triton
from tests.npu.backends.cuda.test_backend import emulated, load  # noqa: F401
from tests.npu.backends.cuda.test_hybrid import SIZES
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
from tests.support.hybrids import random_hybrid
from tests.support.models import saved as saved_model

pytestmark = needs_triton


@pytest.fixture(autouse=True)
def golden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute steps by golden functions: Triton's interpreter takes a second for each."""
    monkeypatch.setattr(triton, "LABEL", GOLDEN)


def loaded(folder: Path, memory: int = 1 << 20, **settings: Any) -> Runner:
    saved(folder, layers=1)
    return load(folder, max_num_batched_tokens=64, capture="off", kv_offload_memory=memory, **settings)


@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_cuda_blocks_come_back_with_the_same_bits(tmp_path: Path, cache: str) -> None:
    check_bits(lambda memory: loaded(tmp_path, memory, kv_cache_dtype=cache), 64)


def test_cuda_load_is_queued_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block a time: it has two tensors."""
    monkeypatch.setattr(host_blocks, "MAX_LOAD_COPIES", 3)
    queued: list[int] = []
    copy_to_device = HostBlocks._copy_to_device

    def counted(self: HostBlocks, copies: Sequence[HostCopy], is_first: bool) -> Event:
        queued.append(len(copies))
        return copy_to_device(self, copies, is_first)

    monkeypatch.setattr(HostBlocks, "_copy_to_device", counted)
    check_bits(lambda memory: loaded(tmp_path, memory), 64)
    assert set(queued) == {1}


def test_cuda_answers_under_pressure_are_those_without_cache(tmp_path: Path) -> None:
    check_pressure(loaded(tmp_path), 64)


def test_cuda_load_is_complete_when_it_is_reported(tmp_path: Path) -> None:
    check_load_after_step_in_flight(loaded(tmp_path))


def test_cuda_corrupt_block_is_a_miss(tmp_path: Path) -> None:
    check_corruption(loaded(tmp_path), 64)


def test_cuda_host_memory_holds_whole_blocks(tmp_path: Path) -> None:
    runner = loaded(tmp_path, 1 << 20)
    host = runner.host_blocks
    assert host is not None
    assert host.block_bytes == runner.token_bytes * runner.block_size
    assert PROMPTS * 3 <= len(host._slots) == (1 << 20) // host.block_bytes


def test_cpu_refuses_host_memory_beside_its_own(tmp_path: Path) -> None:
    saved(tmp_path, layers=1)
    with pytest.raises(BackendError, match="kv_offload_memory: the KV cache of cpu is in host memory already"):
        load(tmp_path, "cpu", kv_offload_memory=1 << 20)


def hybrid(folder: Path, memory: int = 1 << 20, **settings: Any) -> Runner:
    """A state takes two slots of host memory, or more with int8 blocks."""
    saved_model(random_hybrid(0, **SIZES | {"num_hidden_layers": 4, "full_attention_interval": 4}), folder)
    runner = load(folder, max_num_batched_tokens=64, max_num_seqs=4, capture="off", kv_offload_memory=memory,
                  kv_cache_memory=1 << 20, **settings)
    assert runner.num_slots > 2 * PROMPTS
    return runner


@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_cuda_states_come_back_with_the_same_bits(tmp_path: Path, cache: str) -> None:
    scheduler = check_bits(lambda memory: hybrid(tmp_path, memory, kv_cache_dtype=cache), 64, num_slots=3)
    assert scheduler.tier is not None
    assert scheduler.tier.state_parts > 1


@pytest.mark.parametrize("num_slots", [None, 3])
def test_cuda_prefixes_come_from_a_store_with_the_same_bits(tmp_path: Path, num_slots: int | None) -> None:
    model = hybrid if num_slots else loaded
    check_store(lambda memory: model(tmp_path, memory), 64, num_slots)


def test_cuda_answers_of_hybrids_under_pressure_are_those_without_cache(tmp_path: Path) -> None:
    check_pressure(hybrid(tmp_path), 64, num_slots=8, pool=POOL)


def test_cuda_corrupt_state_is_a_miss(tmp_path: Path) -> None:
    check_corruption(hybrid(tmp_path), 64, num_slots=3, part=-1)


def test_cuda_host_memory_without_space_for_a_state_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"kv_offload_memory: .* holds no block of .* with its state of"):
        hybrid(tmp_path, 6 << 10)


@pytest.mark.parametrize(("memory", "said"), [
    (1000, "holds no block of"), (1 << 45, "33,554,432.0 MiB is more than the host's free memory")])
def test_cuda_host_memory_that_does_not_fit_is_an_error(tmp_path: Path, memory: int, said: str) -> None:
    with pytest.raises(ModelError, match=f"kv_offload_memory: .*{said}"):
        loaded(tmp_path, memory)
