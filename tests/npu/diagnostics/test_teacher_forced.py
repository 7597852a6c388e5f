"""Logits of given sequences compared with transformers, for any chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.diagnostics.acceptance import load_reference
from npuserve.npu.diagnostics.teacher_forced import forced_logits
from tests.npu.execution.test_runner import ids_of
from tests.support.models import random_model, saved


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
