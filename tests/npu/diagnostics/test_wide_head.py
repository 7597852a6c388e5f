"""Small models with the vocabulary of a real one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from npuserve.npu import storyteller
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.diagnostics.acceptance import load_reference
from npuserve.npu.diagnostics.teacher_forced import forced_logits
from npuserve.npu.diagnostics.wide_head import widen


def test_wide_model_has_the_argmax_of_the_small_one(tmp_path: Path) -> None:
    widen(storyteller.FOLDER, tmp_path / "wide", 10_000)
    prompts = [[5, 300, 2047, 11, 42], [17, 900, 4]]
    small, wide = (
        torch.cat(list(forced_logits(*load_reference(folder, CpuBackend(native=False), "float32", 256, 1), ids, 64)))
        for folder, ids in ((storyteller.FOLDER, prompts),
                            (tmp_path / "wide", [[4 * token for token in prompt] for prompt in prompts])))
    assert wide.shape == (8, 10_000)
    assert torch.equal(wide.argmax(-1), 4 * small.argmax(-1))
    torch.testing.assert_close(wide[:, : 4 * 2048 : 4], small, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(wide[:, 1 : 4 * 2048 : 4], small / 2, atol=1e-4, rtol=1e-4)


def test_fewer_ids_than_the_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocabulary: 2000 is less than the 2048 ids of the model"):
        widen(storyteller.FOLDER, tmp_path / "wide", 2000)
