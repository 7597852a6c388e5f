"""The KV cache takes what a measured step leaves. `Allocator` stands in for torch's statistics of a GPU's memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from npuserve.kernels import triton
from npuserve.npu import backends
from npuserve.npu.backends.cuda import emulated, emulated_backend
from npuserve.npu.execution.load import load_runner
from npuserve.npu.execution.runner import Runner
from npuserve.npu.model.config import ModelError
from tests.kernels.triton import needs_triton
from tests.npu.backends.small import Ask, answers, ids_of, saved

pytestmark = needs_triton

TOTAL = 2 << 20
"""Bytes of the device's memory. The weights take half, and the cache of two requests of the longest context 2 MiB."""


class Allocator(TorchDispatchMode):
    """Bytes of all tensors that the operators within the context return, as of an allocator without a cache.

    live, peak: now, and at most since the last reset.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[StorageWeakRef, int] = {}
        self.peak = 0
        monkeypatch.setattr(emulated, "mem_get_info", lambda device=None: (TOTAL - self.live, TOTAL))
        monkeypatch.setattr(emulated, "memory_reserved", lambda device=None: self.live)
        monkeypatch.setattr(emulated, "memory_allocated", lambda device=None: self.live)
        monkeypatch.setattr(emulated, "max_memory_reserved", lambda device=None: self.peak)
        monkeypatch.setattr(emulated, "reset_peak_memory_stats", self.reset)

    @property
    def live(self) -> int:
        for storage in [storage for storage in self._sizes if storage.expired()]:
            del self._sizes[storage]
        return sum(self._sizes.values())

    def reset(self, device: Any = None) -> None:
        self.peak = self.live

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._sizes[StorageWeakRef(storage)] = storage.nbytes()
        if self.live > TOTAL:
            del result, tensor, storage
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.peak = max(self.peak, self.live)
        return result


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    monkeypatch.setattr(backends, "_emulated", {})  # restores the device's backend at the end
    monkeypatch.setattr(triton, "DEVICE", "cpu")
    emulated_backend.emulate()
    measuring = replace(emulated_backend.EmulatedCuda.capabilities, measures_memory=True)
    monkeypatch.setattr(emulated_backend.EmulatedCuda, "capabilities", measuring)
    return Allocator(monkeypatch)


def load(folder: Path, **settings: Any) -> Runner:
    return load_runner(folder, backend="cuda", progress=lambda done, total: None, **{
        "dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": 16, "threads": 1,
        "decode_buckets": (2,), **settings})


def test_cache_takes_the_memory_that_a_measured_step_leaves(tmp_path: Path, allocator: Allocator) -> None:
    with allocator:
        runner = load(saved(tmp_path, layers=1, head_dim=128))
        allocator.reset()
        ids, _ = answers(runner, [Ask(ids_of(14, seed), 2, at=seed) for seed in range(2)])
    assert [len(each) for each in ids] == [2, 2]
    assert 0.9 * TOTAL < allocator.peak <= TOTAL
    assert runner.cache_bytes > TOTAL / 5


def test_larger_step_leaves_less_for_the_cache(tmp_path: Path, allocator: Allocator) -> None:
    saved(tmp_path, layers=1, head_dim=128, inner=512)
    caches = []
    with allocator:
        for tokens in (4, 16):
            runner = load(tmp_path, max_num_batched_tokens=tokens)
            caches.append(runner.cache_bytes)
            del runner
    # Gate and up of 512 numbers in four bytes each, and their product.
    assert caches[0] - caches[1] > 12 * 512 * 4 * 3 * 0.9


def test_step_that_does_not_fit_names_the_settings(tmp_path: Path, allocator: Allocator) -> None:
    saved(tmp_path, layers=1, inner=1024)
    with allocator, pytest.raises(ModelError, match="max_num_batched_tokens"):
        load(tmp_path, max_num_batched_tokens=128)


def test_given_cache_is_not_measured(tmp_path: Path, allocator: Allocator) -> None:
    with allocator:
        assert load(saved(tmp_path, layers=1), kv_cache_memory=1 << 19).cache_bytes < 9 << 16
