"""Blocks in host memory on emulated CUDA, whose copies run when an event after them is waited for."""

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
from npuserve.npu.step import BlockCopy
from tests.kernels.triton import needs_triton
from tests.npu.backends.cuda.test_backend import emulated, load  # noqa: F401
from tests.npu.backends.offload import (
    PROMPTS,
    check_bits,
    check_corruption,
    check_load_after_step_in_flight,
    check_pressure,
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
    monkeypatch.setattr(host_blocks, "MAX_COPIES", 3)
    queued: list[int] = []
    load_blocks = HostBlocks._load

    def counted(self: HostBlocks, copies: Sequence[BlockCopy], is_first: bool) -> Event:
        queued.append(len(copies))
        return load_blocks(self, copies, is_first)

    monkeypatch.setattr(HostBlocks, "_load", counted)
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
    assert PROMPTS * 3 <= host.num_slots == (1 << 20) // host.block_bytes


def test_cpu_refuses_host_memory_beside_its_own(tmp_path: Path) -> None:
    saved(tmp_path, layers=1)
    with pytest.raises(BackendError, match="kv_offload_memory: the KV cache of cpu is in host memory already"):
        load(tmp_path, "cpu", kv_offload_memory=1 << 20)


def test_cuda_refuses_host_memory_for_states(tmp_path: Path) -> None:
    folder = saved_model(random_hybrid(0), tmp_path)
    with pytest.raises(BackendError, match="kv_offload_memory: is not possible for models with linear attention"):
        load(folder, kv_offload_memory=1 << 20)


@pytest.mark.parametrize(("memory", "said"), [
    (1000, "holds no block of"), (1 << 45, "33,554,432.0 MiB is more than the host's free memory")])
def test_cuda_host_memory_that_does_not_fit_is_an_error(tmp_path: Path, memory: int, said: str) -> None:
    with pytest.raises(ModelError, match=f"kv_offload_memory: .*{said}"):
        loaded(tmp_path, memory)
