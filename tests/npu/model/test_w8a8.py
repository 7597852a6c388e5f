"""Checkpoints that compressed-tensors made, against transformers, which computes them in floats and rounds by it.

Two ways of adding floats differ in the last bits, and now and then a number between two of int8 goes to the other for
it, which shows in what follows it: foremost a token's largest number where it is negative, which lies between -127 and
-128 by definition of its scale. So many short sequences are compared, and the median must differ by a few such flips at
most.
"""

from __future__ import annotations

import logging
import statistics

import pytest
import torch

from npuserve.kernels.native import available
from npuserve.kernels.quantized import Int8Weight
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.step import Row
from tests.npu.execution.test_decoder import Bench, ids_of, oracle
from tests.support.models import edit_config, random_model
from tests.support.quantized import SCHEMES, edit_quantization, loaded, save_quantized, scheme

FLIPS = 3e-3
"""What a few of them change, of the logits' size. int8 as such changes more than 0.02."""

SEQUENCES = [ids_of(4, seed) for seed in range(15)]
BACKENDS = [CpuBackend(native=False), *([CpuBackend()] if available() else [])]


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.kernels)
def backend(request) -> CpuBackend:
    return request.param


def logits(folder, backend: CpuBackend, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Of each sequence, teacher-forced: all but the last token in one step, the last in another."""
    bench = Bench(folder, backend, dtype=dtype)
    steps = [bench.logits([Row(i, ids[begin:end], begin, [i], True) for i, ids in enumerate(SEQUENCES)])
             for begin, end in ((0, 3), (3, 4))]
    return [torch.cat(parts).float() for parts in zip(*steps, strict=True)]


def oracles(model) -> list[torch.Tensor]:
    return [oracle(model, ids).float() for ids in SEQUENCES]


def far(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """|| ours - theirs || / || theirs || of a sequence, the median."""
    return statistics.median(
        float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama-bias"])
def test_logits_are_those_of_transformers(tmp_path, kind, name, backend):
    model = random_model(kind)
    whole = oracles(model)
    theirs = oracles(loaded(save_quantized(model, tmp_path, scheme(name))))
    assert far(theirs, whole) > 0.02  # so much int8 changes
    assert far(logits(tmp_path, backend), theirs) < FLIPS


@pytest.mark.parametrize("status", ["compressed", "frozen"])
def test_a_quantized_head_in_shards_in_an_older_configuration(tmp_path, status, backend):
    model = random_model("qwen3-untied")
    save_quantized(model, tmp_path, scheme("dynamic"), ignore=(), max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    theirs = oracles(loaded(tmp_path))
    edit_quantization(tmp_path, quantization_status=status)
    config = Bench(tmp_path, backend).model.config
    assert config.quantization is not None
    edit_config(tmp_path, quantization_config=None, compression_config={
        "quantization_config": config.quantization.to_json(), "sparsity_config": {"format": "dense"}})
    bench = Bench(tmp_path, backend)
    assert isinstance(bench.model.weights.lm_head.weight, Int8Weight)
    assert far(logits(tmp_path, backend), theirs) < FLIPS


def test_two_groups_and_layers_that_are_left_out(tmp_path, backend):
    model = random_model("llama")
    save_quantized(
        model, tmp_path, scheme("static", ["re:.*down_proj$", "model.layers.2.self_attn.o_proj"]),
        scheme("dynamic asymmetric", ["Linear"]), ignore=("lm_head", "re:.*layers.1.self_attn.[qkv]_proj"))
    layers = Bench(tmp_path, backend).model.weights.layers
    static = [[linear.inputs is not None and linear.inputs.scale is not None
               for linear in (x.qkv, x.o, x.gate_up, x.down)] for x in layers]
    assert static == [[False, False, False, True], [False, False, False, True], [False, True, False, True]]
    assert [x.qkv.inputs is None for x in layers] == [False, True, False]
    assert far(logits(tmp_path, backend), oracles(loaded(tmp_path))) < FLIPS


@pytest.mark.parametrize("name", ["static", "static asymmetric"])
def test_fused_layers_whose_parts_have_scales_of_their_own(tmp_path, caplog, name, backend):
    """One scale serves them: the results are near, and as near to the whole model."""
    model = random_model("qwen3")
    whole = oracles(model)
    theirs = oracles(loaded(save_quantized(model, tmp_path, scheme(name), alike=False)))
    with caplog.at_level(logging.INFO):
        ours = logits(tmp_path, backend)
    assert "differ between the parts of 6 fused layers" in caplog.text
    assert far(ours, whole) < 1.25 * far(theirs, whole)


def test_bfloat16_is_as_far_as_theirs(tmp_path, backend):
    model = random_model("qwen3").to(torch.bfloat16)
    whole = oracles(random_model("qwen3"))
    folder = save_quantized(model, tmp_path, scheme("dynamic"))
    theirs = oracles(loaded(folder).to(torch.bfloat16))
    assert far(logits(folder, backend, torch.bfloat16), whole) < 1.25 * far(theirs, whole)
