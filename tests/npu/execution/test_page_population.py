"""Mapping of the KV cache's pages: a part before the server is ready, the others in the background."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading

import pytest
import torch
from torch import Tensor

from npuserve.kernels.native import arena, available
from npuserve.kernels.native.arena import Arena, can_populate, populate
from npuserve.npu.backends.cpu import CpuBackend, HostMemory
from npuserve.npu.execution import page_population
from npuserve.npu.execution.page_population import PagePopulation
from npuserve.npu.execution.state_store import StateStore
from npuserve.npu.model.config import ModelConfig
from tests.npu.execution.test_runner import load
from tests.support.models import SIZES, random_model, saved
from tests.support.processes import until

needs_pages = pytest.mark.skipif(
    not (available() and can_populate()), reason="needs the native kernels and MADV_POPULATE_WRITE (Linux 5.14)")


def mapped_bytes(tensor: Tensor) -> int:
    """Return the bytes of the tensor's pages that are in memory."""
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (tensor.data_ptr() + tensor.nbytes - begin) // mmap.PAGESIZE
    resident = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(pages * mmap.PAGESIZE), resident) == 0
    return sum(each & 1 for each in resident) * mmap.PAGESIZE


class Recording(HostMemory):
    """Memory that records the first number of each mapped part instead of mapping it."""

    def __init__(self) -> None:
        super().__init__(1, None)
        self.parts: list[list[int]] = []
        self.error: Exception | None = None

    @property
    def fresh_is_zero(self) -> bool:
        return True

    def populate(self, tensor: Tensor) -> None:
        if self.error:
            raise self.error
        self.parts.append(tensor.tolist())


@pytest.fixture
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_population, "PORTION_BYTES", 64)
    monkeypatch.setattr(page_population, "START_BYTES", 128)


@pytest.mark.usefixtures("small_portions")
def test_page_population_maps_tensors_side_by_side_in_the_order_of_their_blocks() -> None:
    memory, numbers = Recording(), [torch.arange(10), torch.arange(100, 120)]
    pages = PagePopulation([(memory, tensor) for tensor in numbers])
    pages.map_first()
    assert memory.parts == [[0, 1], [100, 101, 102, 103, 104], [2, 3, 4], [105, 106, 107, 108, 109]]
    pages.start()
    until(lambda: sum(map(len, memory.parts)) == 30)
    for tensor in numbers:
        assert [number for part in memory.parts for number in part if number in tensor] == tensor.tolist()


@pytest.mark.usefixtures("small_portions")
def test_page_population_pauses_while_steps_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(page_population.time, "sleep", pauses.append)
    memory, numbers = Recording(), torch.arange(80)
    for steps in (0, 2):
        pages = PagePopulation([(memory, numbers)])
        for _ in range(steps):
            pages.begin_step()
        pages._map_others()
        assert pauses == [page_population.BUSY_PAUSE_SECONDS] * 10 * bool(steps)


@pytest.mark.usefixtures("small_portions")
def test_page_population_ends_when_the_store_is_dropped() -> None:
    memory = Recording()
    pages = PagePopulation([(memory, torch.arange(1000))])
    pages.map_first()
    mapped = len(memory.parts)
    pages.start()
    until(lambda: not any(thread.name == "npuserve-pages" for thread in threading.enumerate()))
    assert len(memory.parts) == mapped


@pytest.mark.usefixtures("small_portions")
def test_page_population_without_memory_warns(caplog: pytest.LogCaptureFixture) -> None:
    memory, numbers = Recording(), torch.arange(1000)
    pages = PagePopulation([(memory, numbers)])
    memory.error = MemoryError("no memory for 64 bytes")
    with caplog.at_level(logging.WARNING):
        pages.start()
        until(lambda: caplog.messages)
    assert caplog.messages == ["the KV cache's pages are mapped at their first use: no memory for 64 bytes"]
    with pytest.raises(MemoryError):
        pages.map_first()
    assert len(numbers) == 1000


@needs_pages
def test_populate_maps_pages_and_keeps_numbers() -> None:
    tensor = Arena().empty((64, 1 << 20), torch.uint8)
    tensor[9] = 7
    assert mapped_bytes(tensor) < 8 << 20
    populate(tensor[8:32])
    assert mapped_bytes(tensor[8:32]) == 24 << 20
    assert int(tensor.sum()) == 7 << 20


@needs_pages
def test_state_store_of_fresh_memory_is_not_written() -> None:
    config = ModelConfig.from_dict({**SIZES, "architectures": ["Qwen3ForCausalLM"]})
    store = StateStore.allocate(config, 4096, 128, torch.float32, CpuBackend())
    assert sum(map(mapped_bytes, store.tensors)) < sum(tensor.nbytes for tensor in store.tensors) // 4


@pytest.mark.slow
@needs_pages
def test_runner_maps_its_cache_after_the_start(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(page_population, "START_BYTES", 16 << 20)
    monkeypatch.setattr(PagePopulation, "start", lambda self: None)
    runner = load(saved(random_model("qwen3"), tmp_path), kv_cache_memory=256 << 20, max_num_seqs=4096)
    tensors = runner._store.tensors
    total = sum(tensor.nbytes for tensor in tensors)
    assert 0 < sum(map(mapped_bytes, tensors)) < total // 2
    monkeypatch.undo()
    runner.map_cache()
    until(lambda: sum(map(mapped_bytes, tensors)) > total - len(tensors) * 2 * mmap.PAGESIZE)


def test_state_store_is_cleared_where_pages_cannot_be_mapped(monkeypatch) -> None:
    monkeypatch.setattr(arena, "_MADV_POPULATE_WRITE", 12345)
    can_populate.cache_clear()
    try:
        backend = CpuBackend()
        assert not backend.memory.fresh_is_zero
        config = ModelConfig.from_dict({**SIZES, "architectures": ["Qwen3ForCausalLM"]})
        store = StateStore.allocate(config, 64, 128, torch.float32, backend)
        assert sum(map(mapped_bytes, store.tensors)) > sum(tensor.nbytes for tensor in store.tensors) * 3 // 4
    finally:
        can_populate.cache_clear()
