"""Checkpoints of `npuserve quantize` loaded by transformers with compressed-tensors; test_w8a8.py tests the reverse."""

from __future__ import annotations

import pytest
import torch

from npuserve.npu.quantize.checkpoint import quantize_checkpoint
from tests.npu.model import test_w8a8
from tests.npu.model.test_w8a8 import FLIPS, far, logits, oracles
from tests.npu.quantize.test_checkpoint import outlying, sequences
from tests.support.models import saved
from tests.support.quantized import loaded

backend = test_w8a8.backend


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), [
    ("qwen3", torch.bfloat16), ("qwen3-untied", torch.float16), ("qwen2", torch.float32),
    ("llama-bias", torch.bfloat16),
])
def test_quantized_checkpoint_logits_equal_transformers(tmp_path, kind, dtype, backend):
    model = outlying(kind, dtype)
    folder = saved(model, tmp_path / "model", max_shard_size="20KB")
    quantize_checkpoint(folder, tmp_path / "out", sequences(), strength=0.5)
    whole, theirs = oracles(model.float()), oracles(loaded(tmp_path / "out"))
    assert 0.005 < far(theirs, whole) < 0.2
    assert far(logits(tmp_path / "out", backend), theirs) < FLIPS


@pytest.mark.slow
def test_quantized_checkpoint_ignored_layers_equal_transformers(tmp_path, backend):
    folder = saved(outlying("qwen3-untied", torch.float32), tmp_path / "model")
    quantize_checkpoint(folder, tmp_path / "out", ignore=["re:.*layers.1.self_attn", "model.layers.2.mlp.down_proj"])
    theirs = loaded(tmp_path / "out")
    assert not hasattr(theirs.model.layers[1].self_attn.q_proj, "quantization_scheme")
    assert hasattr(theirs.model.layers[0].self_attn.q_proj, "quantization_scheme")
    assert far(logits(tmp_path / "out", backend), oracles(theirs)) < FLIPS
