"""A restarted engine finds the weights of the previous one in memory. Needs the native kernels and a system with large
pages for memory files; on others every engine loads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from npuserve.kernels.native import available, library
from npuserve.kernels.native.choice import CpuKernels, CpuKernelSettings, gemm_of
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution.load import SharedMemory
from npuserve.npu.model.storage import stored_bytes
from tests.npu.execution.test_runner import Driver, load
from tests.support.models import random_model, saved, saved_w8a8


@pytest.fixture
def file() -> Iterator[int]:
    if not hasattr(os, "memfd_create"):
        pytest.skip("this system has no files in memory")
    made = os.memfd_create("test")
    yield made
    os.close(made)


@pytest.fixture
def shared(file: int) -> int:
    if not available():
        pytest.skip("the native kernels are not built")
    with CpuBackend().memory.sharing(file, filled=False) as possible:
        if not possible:
            pytest.skip("this system makes no large pages of a file in memory")
    return file


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Restore the instruction set and the form of weights afterwards."""
    before = available() and (library().isa, library().compact)
    yield
    if before:
        library().isa, library().compact = before


def tokens(runner) -> list[int]:
    driver = Driver(runner)
    driver.add(0, [5, 6, 7, 8, 9])
    while len(driver.tokens[0]) < 25:
        driver.step()
    return driver.end(0)


def told(left: object) -> dict:
    """Return the description as the supervisor receives it."""
    return json.loads(json.dumps(left))


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch):
    def forbid() -> None:
        monkeypatch.setattr("npuserve.npu.model.loader._open_files", lambda *_: pytest.fail("a checkpoint is read"))

    return forbid


@pytest.mark.parametrize("kind", ["qwen3", "llama-bias", "w8a8"])
def test_shared_weights_restart_reads_no_files(kind, shared, tmp_path, no_reading):
    folder = saved_w8a8(random_model("qwen3"), tmp_path) if kind == "w8a8" else saved(random_model(kind), tmp_path)
    alone = tokens(load(folder))
    first = load(folder, memory=SharedMemory(shared))
    assert tokens(first) == alone
    left = told(first.shared_weights)
    no_reading()
    for _ in range(2):
        again = load(folder, memory=SharedMemory(shared, left))
        assert (again.num_blocks, again.max_model_len) == (first.num_blocks, first.max_model_len)
        assert told(again.shared_weights) == left
        assert tokens(again) == alone


def test_shared_weights_restart_keeps_the_plan_of_a_draft_that_is_not_compact(shared, tmp_path):
    """Bytes of its weights beyond the plan are added once."""
    model = random_model("qwen3")
    folder = saved(model, tmp_path / "model")
    draft = saved(model, tmp_path / "draft")
    exponents = torch.rand((32, 48), generator=torch.Generator().manual_seed(0)) * 200 - 100
    tensors = load_file(draft / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.exp2(exponents)
    save_file(tensors, draft / "model.safetensors", {"format": "pt"})
    settings = {"dtype": "bfloat16", "cpu": CpuKernelSettings(weights="compact"), "max_drafts": 4}
    first = load(folder, memory=SharedMemory(shared), draft=draft, **settings)
    left = told(first.shared_weights)
    assert first.weights_bytes > stored_bytes(first.config, torch.bfloat16, first.backend)
    for _ in range(2):
        again = load(folder, memory=SharedMemory(shared, left), draft=draft, **settings)
        assert told(again.shared_weights) == left
    assert again.weights_bytes == first.weights_bytes


def test_shared_weights_changed_model_is_loaded(shared, tmp_path):
    folder = saved(random_model("qwen3"), tmp_path)
    first = load(folder, memory=SharedMemory(shared))
    left = told(first.shared_weights)
    del first
    saved(random_model("qwen3", seed=1), tmp_path)
    os.utime(Path(folder) / "model.safetensors", ns=(1, 1))
    assert tokens(load(folder, memory=SharedMemory(shared, left))) == tokens(load(folder))


def test_shared_weights_other_form_is_loaded(shared, tmp_path):
    folder = saved(random_model("qwen3"), tmp_path)
    compact, plain = (CpuKernelSettings(weights=form) for form in ("compact", "plain"))
    settings = {"dtype": "bfloat16"}
    first = load(folder, memory=SharedMemory(shared), cpu=compact, **settings)
    left, alone, size = told(first.shared_weights), tokens(first), first.weights_bytes
    del first
    second = load(folder, memory=SharedMemory(shared, left), cpu=plain, **settings)
    assert tokens(second) == alone
    assert second.weights_bytes > size
    assert told(second.shared_weights) != left


@pytest.mark.skipif(available() and len(library().isas) < 2, reason="the native kernels have one instruction set here")
def test_shared_weights_other_instruction_set_is_loaded(shared, tmp_path):
    """Packed int8 weights depend on the set."""
    folder = saved_w8a8(random_model("qwen3"), tmp_path)
    first, *_, last = (CpuKernelSettings(kept=CpuKernels(isa, gemm_of(isa), "plain", {})) for isa in library().isas)
    made = load(folder, memory=SharedMemory(shared), cpu=first)
    left = told(made.shared_weights)
    del made
    assert tokens(load(folder, memory=SharedMemory(shared, left), cpu=last)) == tokens(load(folder, cpu=last))


def test_shared_weights_without_description_are_loaded(shared, tmp_path):
    """The file holds half a model, and no ready engine described it."""
    os.ftruncate(shared, 64 << 20)
    os.pwrite(shared, b"\x7f" * (1 << 20), 0)
    folder = saved(random_model("qwen3"), tmp_path)
    assert tokens(load(folder, memory=SharedMemory(shared))) == tokens(load(folder))


def test_shared_weights_without_large_pages_are_loaded(file, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise MemoryError

    folder = saved(random_model("qwen3"), tmp_path)
    monkeypatch.setattr("npuserve.kernels.native.Library.share", refuse)
    runner = load(folder, memory=SharedMemory(file, None))
    assert runner.shared_weights is None
    assert tokens(runner) == tokens(load(folder))


@pytest.mark.skipif(not available(), reason="the native kernels are not built")
def test_shared_weights_exclude_later_allocations(shared, tmp_path):
    folder = saved(random_model("qwen3"), tmp_path)
    load(folder, memory=SharedMemory(shared))
    small = os.fstat(shared).st_size
    load(folder, memory=SharedMemory(shared), kv_cache_memory=64 << 20)
    assert os.fstat(shared).st_size == small
