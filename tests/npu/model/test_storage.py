"""Matrices of a layer that are stored as one (`ModelConfig.stacks`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from npuserve.kernels.attention import AttentionMetadata
from npuserve.kernels.registry import KernelSet
from npuserve.kernels.weight import form_of
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.layers.gated_delta_net import GatedDeltaNetWeights
from npuserve.npu.model.layers.layer import Inputs
from npuserve.npu.model.layers.shard import WHOLE, Shard
from npuserve.npu.model.loader import load_weights
from npuserve.npu.model.storage import stored_blocks, stored_bytes
from npuserve.npu.model.weights import LoadedBlock
from npuserve.npu.quantization.assignment import Quantization
from npuserve.npu.quantization.w8a8 import W8A8
from npuserve.npu.quantize.checkpoint import quantize_checkpoint
from npuserve.npu.quantize.rounding import Int4Rounding, Int8Rounding
from tests.npu.backends.hybrid import saved_hybrid
from tests.npu.backends.mixture import saved_mixture

FIELDS = "qkv", "z", "a", "b"
BACKEND = CpuBackend(native=False)


def mixers(folder: Path, shard: Shard = WHOLE, **changes: Any) -> list[LoadedBlock]:
    """Return the layer of linear attention of a model of two layers, stored apart and stacked."""
    config = replace(ModelConfig.from_folder(folder), **changes).sharded(shard)
    loaded = []
    for stacks in (False, True):
        weights = load_weights(folder, replace(config, stacks=stacks), torch.float32, BACKEND, lambda *_: None)
        loaded.append(weights.layers[0][0])
    apart, together = (stored_bytes(replace(config, stacks=stacks), torch.float32, BACKEND) for stacks in (False, True))
    assert apart == together
    return loaded


def check(apart: LoadedBlock, stacked: LoadedBlock, stacks: Sequence[Sequence[str]]) -> None:
    """Check which fields are stored as one, and that rows and results are those of the fields apart."""
    weights: GatedDeltaNetWeights = stacked.weights
    assert [name for name in FIELDS if getattr(weights, name) is not None] == [fields[0] for fields in stacks]
    for fields in stacks:
        parts = [form_of(getattr(apart.weights, name).weight) for name in fields]
        form = form_of(getattr(weights, fields[0]).weight)
        rows = torch.cat([part.rows(torch.arange(len(part))) for part in parts])
        assert torch.equal(form.rows(torch.arange(len(form))), rows)
    results = []
    for block in (apart, stacked):
        tokens = 5
        metadata = AttentionMetadata.from_lengths(torch.zeros(1, 1, dtype=torch.int32), [tokens], [tokens])
        slots = torch.zeros(1, dtype=torch.int64)
        inputs = Inputs(KernelSet("golden"), slots, slots, metadata, slots, torch.zeros(1, 1), 1e-6)
        state = tuple(torch.zeros(1, *shape) for shape in block.layer.state.shapes)  # type: ignore[union-attr]
        x = torch.randn(tokens, len(block.norm), generator=torch.Generator().manual_seed(0))
        results.append(block.layer.forward(x, block.weights, state, inputs))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("shard", [WHOLE, Shard(0, 2), Shard(1, 2)], ids=str)
def test_projections_in_floats_are_one_matrix(tmp_path: Path, shard: Shard) -> None:
    folder = saved_hybrid(tmp_path, layers=2, full=(1,), key_heads=2, value_heads=4, linear_dim=16)
    check(*mixers(folder, shard), [FIELDS])


@pytest.mark.parametrize("shard", [WHOLE, Shard(1, 2)], ids=str)
def test_projections_of_a_fused_checkpoint_are_one_matrix(tmp_path: Path, shard: Shard) -> None:
    """qkv and z are rows of one tensor of the checkpoint, as are a and b: each is read once."""
    folder = saved_mixture(
        tmp_path, "qwen3_next", layers=2, full=(1,), key_heads=2, value_heads=4, linear_dim=16)
    check(*mixers(folder, shard), [FIELDS])


@pytest.mark.parametrize("form", ["W8A8", "ModelSlim"])
def test_projections_in_int8_are_one_matrix_and_those_in_floats_another(tmp_path: Path, form: str) -> None:
    folder = saved_hybrid(tmp_path / "floats", layers=2, full=(1,))
    quantize_checkpoint(folder, tmp_path / "int8", rounding=Int8Rounding(modelslim=form == "ModelSlim"))
    check(*mixers(tmp_path / "int8"), [("qkv", "z"), ("a", "b")])


def test_projections_that_become_floats_are_one_matrix(tmp_path: Path) -> None:
    """qkv and z of a float8 checkpoint, on a device that does not multiply float8, beside a and b."""
    from tests.support.hybrids import random_hybrid
    from tests.support.models import saved_w8a8

    blocks = W8A8(per_channel=False, float8=True, blocks=True)
    folder = saved_w8a8(random_hybrid(0), tmp_path, blocks, ignore=("lm_head", "re:.*in_proj_[ab]"))
    check(*mixers(folder, converts_float8=True), [FIELDS])


def test_projections_of_mixed_forms_are_stored_apart(tmp_path: Path) -> None:
    folder = saved_hybrid(tmp_path / "floats", layers=2, full=(1,))
    quantize_checkpoint(folder, tmp_path / "z", ignore=["re:.*in_proj_qkv"])
    check(*mixers(tmp_path / "z"), [("qkv",), ("z",), ("a", "b")])
    quantize_checkpoint(folder, tmp_path / "qkv", ignore=["re:.*in_proj_z"])
    check(*mixers(tmp_path / "qkv"), [("qkv",), ("z", "a", "b")])


def test_projections_in_4_bits_are_stored_apart(tmp_path: Path) -> None:
    """Their kernels ask for a number of rows, and groups may have an order of their own."""
    folder = saved_hybrid(tmp_path / "floats", layers=2, full=(1,))
    quantize_checkpoint(folder, tmp_path / "int4", rounding=Int4Rounding(32))
    check(*mixers(tmp_path / "int4"), [("qkv",), ("z",), ("a", "b")])


def test_static_scales_of_inputs_are_not_merged() -> None:
    """A stack would take the range of all parts, which changes the numbers of each."""
    data = {"architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 4,
            "num_attention_heads": 4, "intermediate_size": 64}
    static = Quantization(((("re:.*in_proj_(qkv|z)",), W8A8(dynamic=False)),), ())
    config = replace(ModelConfig.from_dict(data), quantization=static, stacks=True)
    assert list(stored_blocks(config, 0)[0].parameters)[:3] == ["qkv", "z", "a"]
