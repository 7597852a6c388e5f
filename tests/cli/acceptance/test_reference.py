"""Models beside the engine, and their logits at given tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from npuserve.cli.acceptance import reference
from npuserve.cli.acceptance.reference import forced_logits, load_reference
from npuserve.kernels import native
from npuserve.kernels.registry import GOLDEN
from npuserve.npu.backends.cpu import CpuBackend, HostMemory
from npuserve.npu.model.config import ModelError
from npuserve.npu.quantization.w8a8 import W8A8
from npuserve.npu.step import Step
from tests.cli.acceptance.loading import loaded
from tests.npu.execution.test_dispatch import Bucketed
from tests.npu.execution.test_runner import ids_of
from tests.support.models import random_model, saved, saved_w8a8

pytestmark = pytest.mark.usefixtures("threads")
built = pytest.mark.skipif(not native.available(), reason="the native kernels are not built")


def test_acceptance_load_sizes_cache_for_requests(folder: Path) -> None:
    found = loaded(folder, CpuBackend(), max_num_seqs=3, max_model_len=100, block_size=16)
    assert (found.runner.num_blocks, found.runner.block_size, found.runner.max_model_len) == (3 * 7, 16, 100)
    assert found.runner.collect(found.runner.launch(Step([]))).token_ids == {}
    assert found.model.cos_sin.shape == (100, 16)


def test_acceptance_reference_uses_other_kernels(folder: Path) -> None:
    assert reference.load_reference(folder, CpuBackend(), "float32", 32, 1)[1].kernels == GOLDEN
    other = type("Other", (Bucketed,), {})
    assert reference.load_reference(folder, other(), "float32", 32, 1)[1].kernels == GOLDEN


FLOAT8 = replace(CpuBackend.capabilities, float8=True, cache_dtypes=(torch.int8, torch.float8_e4m3fn))


@built
def test_acceptance_reference_takes_the_cache_of_the_device(folder: Path) -> None:
    """The native kernels have no float8; a runner and logits of given tokens use the golden functions."""
    other: Any = SimpleNamespace(capabilities=FLOAT8, state_dtype=lambda dtype: torch.float32)
    kernels = {cached: reference.load_reference(folder, other, "float32", 32, 1, "auto", cached)[1].kernels
               for cached in ("auto", "int8", "fp8")}
    assert kernels == {"auto": "cpu", "int8": "cpu", "fp8": GOLDEN}
    model, backend = reference.load_reference(folder, other, "float32", 32, 1, "auto", "fp8")
    exact, found = (torch.cat(list(forced_logits(model, backend, [[1, 2, 3, 4, 5, 6]], 4, cache_dtype=cached)))
                    for cached in (None, torch.float8_e4m3fn))
    assert 0 < (found - exact).abs().max() < 0.1 * exact.abs().max()
    assert reference.reference_runner(model, backend, 2, 16, "fp8").cache_dtype == torch.float8_e4m3fn


def test_acceptance_reference_computes_float8_models(tmp_path: Path) -> None:
    other: Any = SimpleNamespace(capabilities=FLOAT8, state_dtype=lambda dtype: torch.float32)
    model = random_model("qwen3", max_position_embeddings=128)
    plain, float8 = saved(model, tmp_path / "plain"), saved_w8a8(model, tmp_path / "float8", W8A8(float8=True))
    exact, found = (reference.load_reference(folder, other, "float32", 32, 1) for folder in (plain, float8))
    assert found[1].kernels == GOLDEN
    assert (exact[0].weights.quantized_inputs, found[0].weights.quantized_inputs) == (set(), {torch.float8_e4m3fn})
    ours, theirs = (torch.cat(list(forced_logits(*made, [[1, 2, 3, 4, 5, 6]], 4))) for made in (found, exact))
    assert 0.01 < (ours - theirs).norm() / theirs.norm() < 0.3


def test_acceptance_reference_too_large_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "available", lambda _: 1 << 10)
    with pytest.raises(ModelError, match=r"needs .* of memory"):
        reference.load_reference(folder, CpuBackend(), "float32", 32, 1)



@pytest.mark.parametrize("budget", [3, 16, 1000])
def test_forced_logits_equal_transformers(tmp_path: Path, budget: int) -> None:
    theirs = random_model("qwen3", max_position_embeddings=64)
    model, backend = load_reference(saved(theirs, tmp_path), CpuBackend(), "float32", 64, 1)
    sequences = [ids_of(n, n) for n in (1, 40, 7, 17, 33, 2)]  # more sequences than one step computes
    found = list(forced_logits(model, backend, sequences, budget, block_size=16))
    assert [x.shape for x in found] == [(len(ids), 100) for ids in sequences]
    for ids, logits in zip(sequences, found, strict=True):
        with torch.no_grad():
            expected = theirs(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
