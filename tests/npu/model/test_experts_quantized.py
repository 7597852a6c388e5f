"""Quantized mixtures of experts: W8A8, float8 in blocks, 4 bits, ModelSlim, and `npuserve quantize`."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from npuserve.kernels import native
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.model.loader import load_weights
from npuserve.npu.model.storage import linears, stored_bytes
from npuserve.npu.quantization import modelslim
from npuserve.npu.quantization.w8a8 import W8A8
from npuserve.npu.quantize.checkpoint import quantize_checkpoint
from npuserve.npu.quantize.rounding import Int4Rounding
from npuserve.npu.step import SamplingParams
from tests.npu.execution.test_runner import load
from tests.support.hybrids import prompts
from tests.support.int4_checkpoints import save_int4
from tests.support.loop import Ask, serve
from tests.support.mixtures import random_mixture, restack
from tests.support.models import PLAIN_W8A8, edit_config, saved, saved_w8a8

FLOATS = "lm_head", "re:.*shared_expert_gate", "re:.*in_proj_(a|b|ba|qkvz)$"
"""Linear layers that the checkpoints have in floats."""

FLOAT8_BLOCKS = W8A8(per_channel=False, float8=True, blocks=True, scale_name="weight_scale_inv")

PROMPTS = prompts(3, 0)


def prompt_logprobs(folder: Path, dtype: str = "float32") -> torch.Tensor:
    """Return the log-probabilities of the prompts' tokens."""
    runner = load(folder, dtype=dtype, max_num_batched_tokens=48)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=1)
    answers, _ = serve(runner, [Ask(0, None, {"prompt_ids": prompt, "max_tokens": 2, "sampling": sampling})
                                for prompt in PROMPTS], 1, 64, 4, 48)
    return torch.tensor([report.logprob for answer in answers for report in answer.prompt_logprobs])


def dequantized(folder: Path, out: Path) -> Path:
    """Write the checkpoint with its weights as floats."""
    tensors = load_file(folder / "model.safetensors")
    floats = {}
    for name, numbers in tensors.items():
        module = name.removesuffix(".weight")
        if (scale := tensors.get(f"{module}.weight_scale_inv")) is not None:
            each = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
            floats[name] = numbers.float() * each[: numbers.shape[0], : numbers.shape[1]]
        elif (scale := tensors.get(f"{module}.weight_scale")) is not None:
            floats[name] = numbers.float() * scale.float()
        elif "weight_scale" not in name:
            floats[name] = numbers
    out.mkdir()
    save_file(floats, out / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (out / "config.json").write_text(json.dumps(config))
    return out


def far(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the root mean square of the differences of log-probabilities."""
    return float((ours - theirs).square().mean().sqrt())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_w8a8_is_near_its_weights_in_floats(tmp_path: Path, seed: int) -> None:
    """The inputs' rounding to int8 remains. A checkpoint of ModelSlim with the same numbers gives the same bits."""
    folder = saved_w8a8(random_mixture(seed), tmp_path / "w8a8", PLAIN_W8A8, FLOATS)
    ours = prompt_logprobs(folder)
    assert 1e-4 < far(ours, prompt_logprobs(dequantized(folder, tmp_path / "floats"))) < 0.3
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quant_model_description.json").write_text(json.dumps(modelslim.description(tensors)))
    assert ModelConfig.from_folder(folder).quantization_name == "w8a8"
    assert torch.equal(prompt_logprobs(folder), ours)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_int4_experts_of_modelslim_are_those_in_int8(tmp_path: Path, seed: int) -> None:
    """The experts of published checkpoints have 4 bits (W4A8_DYNAMIC), the rest 8: the same bits as with the same
    numbers in int8. Written by hand as in `modelslim_w4a8`, since msmodelslim 26.1.0 leaves experts in floats here."""
    folder = saved_w8a8(random_mixture(seed), tmp_path / "w8a8", PLAIN_W8A8, FLOATS)
    tensors = load_file(folder / "model.safetensors")
    experts = [name.removesuffix(".weight") for name in tensors if ".experts." in name and name.endswith(".weight")]
    assert experts
    for name in experts:
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] // 16
        tensors[f"{name}.weight_scale"] = tensors[f"{name}.weight_scale"].float() * 16
    description = modelslim.description(tensors)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    found, taken = [], []
    for packed in (False, True):
        for name in experts if packed else ():
            rows = tensors[f"{name}.weight"]
            tensors[f"{name}.weight"] = (rows[1::2] << 4) | (rows[::2] & 15)
            tensors[f"{name}.scale_bias"] = torch.zeros(len(rows), 1)
            description |= dict.fromkeys(
                (f"{name}.{part}" for part in ("weight", "weight_scale", "scale_bias")), "W4A8_DYNAMIC")
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "quant_model_description.json").write_text(json.dumps(description))
        found.append(prompt_logprobs(folder))
        taken.append(stored_bytes(ModelConfig.from_folder(folder), torch.float32, CpuBackend()))
    assert torch.equal(*found)
    numbers = sum(tensors[f"{name}.weight"].numel() for name in experts)  # two in a byte
    assert taken[0] - taken[1] == (numbers if native.available() else 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2])
def test_float8_blocks_become_their_floats(tmp_path: Path, seed: int) -> None:
    folder = saved_w8a8(random_mixture(seed), tmp_path / "fp8", FLOAT8_BLOCKS, FLOATS)
    edit_config(folder, quantization_config={
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["shared_expert_gate", "in_proj_a", "in_proj_b", "mlp.gate"]})
    assert torch.equal(prompt_logprobs(folder), prompt_logprobs(dequantized(folder, tmp_path / "floats")))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "symmetric"), [("compressed-tensors", True), ("awq", False), ("gptq", True)])
@pytest.mark.parametrize("seed", [0, 2])
def test_int4_equals_its_numbers_in_floats(tmp_path: Path, seed: int, method: str, symmetric: bool) -> None:
    changes = {"hidden_size": 64, "num_hidden_layers": 2}
    changes |= {"mlp_only_layers": []} if seed == 0 else {"layer_types": ["linear_attention", "full_attention"]}
    model = save_int4(random_mixture(seed, **changes), tmp_path / "int4", method, symmetric=symmetric,
                      dtype=torch.float32 if method == "compressed-tensors" else torch.float16)
    assert ModelConfig.from_folder(tmp_path / "int4").quantization_name == "w4a16"
    floats = saved(model, tmp_path / "floats")
    torch.testing.assert_close(
        prompt_logprobs(tmp_path / "int4"), prompt_logprobs(floats), atol=2e-4, rtol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_quantize_makes_the_same_of_stacked_and_of_single_experts(tmp_path: Path, seed: int) -> None:
    folder = saved(random_mixture(seed), tmp_path / "model")
    logprobs = prompt_logprobs(folder)
    written = []
    for stacked in (False, True):
        restack(folder, stacked=stacked)
        out = tmp_path / f"w8a8-{stacked}"
        result = quantize_checkpoint(folder, out, PROMPTS)
        assert result.quantized == result.linears
        written.append(load_file(out / "model.safetensors"))
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(tensor, written[1][name]) for name, tensor in written[0].items())
    experts = [name for name in written[0] if re.search(r"experts\.\d+\..*_proj\.weight$", name)]
    assert experts
    assert all(written[0][name].dtype == torch.int8 for name in experts)
    assert 1e-4 < far(prompt_logprobs(tmp_path / "w8a8-True"), logprobs) < 0.3


@pytest.mark.slow
def test_quantize_to_int4(tmp_path: Path) -> None:
    folder = saved(random_mixture(0, mlp_only_layers=[], hidden_size=64), tmp_path / "model")
    quantize_checkpoint(folder, tmp_path / "int4", PROMPTS, rounding=Int4Rounding(32))
    config = ModelConfig.from_folder(tmp_path / "int4")
    assert all(not matrix.form.is_float for matrix in linears(config, 0))
    assert far(prompt_logprobs(tmp_path / "int4"), prompt_logprobs(folder)) < 1.5


def test_stacked_experts_that_are_quantized_are_refused(tmp_path: Path) -> None:
    folder = saved_w8a8(random_mixture(2), tmp_path / "w8a8", PLAIN_W8A8, FLOATS)
    shutil.copy(folder / "config.json", tmp_path / "config.json")
    saved(random_mixture(2), folder)
    restack(folder, stacked=True)
    shutil.copy(tmp_path / "config.json", folder / "config.json")
    with pytest.raises(ModelError, match=r"experts.gate_up_proj is quantized \(w8a8\), and has the weights of all "
                                         r"experts; supported: tensors of single experts, or floats$"):
        load_weights(folder, ModelConfig.from_folder(folder), torch.float32, CpuBackend())


def test_experts_of_one_layer_have_one_scheme(tmp_path: Path) -> None:
    folder = saved_w8a8(random_mixture(0), tmp_path / "w8a8", PLAIN_W8A8, (*FLOATS, "re:.*experts.1.gate_proj"))
    config = ModelConfig.from_folder(folder)
    with pytest.raises(ModelError, match=r"experts.0.gate_proj and \S+experts.1.gate_proj are quantized in different "
                                         r"ways \(w8a8, floats\); supported: one way for all of gate_proj, up_proj$"):
        load_weights(folder, replace(config), torch.float32, CpuBackend())
