"""Models of exact shapes with random weights, made on the device that runs them."""

from __future__ import annotations

import json
import math
import runpy
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from npuserve.kernels.quantized import FLOAT8, FLOAT8_MAX
from npuserve.npu.backends.base import Backend
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.model.allocation import allocate
from npuserve.npu.model.config import HeadDtype, ModelConfig
from npuserve.npu.model.forms.targets import FLOAT8S, INT8, INT32, Target
from npuserve.npu.model.weights import ModelWeights
from npuserve.npu.quantization.assignment import LINEAR, Quantization
from npuserve.npu.quantization.scheme import WeightScheme

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-14b": {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
                  "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False},
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
                   "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen3.5-27b": {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 5120,
        "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4,
        "head_dim": 256, "partial_rotary_factor": 0.25, "rope_theta": 1e7, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "vocab_size": 248320, "tie_word_embeddings": False},
    "toy-hybrid": {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "full_attention_interval": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "partial_rotary_factor": 0.25, "linear_num_key_heads": 1,
        "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4, "vocab_size": 300, "tie_word_embeddings": False},
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "vocab_size": 151936, "tie_word_embeddings": False},
    "qwen3.5-35b-a3b": {
        "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "hidden_size": 2048,
        "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "partial_rotary_factor": 0.25, "rope_theta": 1e7, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "vocab_size": 248320, "tie_word_embeddings": False},
    "toy-experts": {
        "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "hidden_size": 64,
        "num_hidden_layers": 2, "full_attention_interval": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "partial_rotary_factor": 0.25, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "vocab_size": 300, "tie_word_embeddings": False},
    "toy": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "tie_word_embeddings": False},
}
FLOATS = "lm_head", "re:.*in_proj_[ab]", "re:.*shared_expert_gate"
"""Layers that the published checkpoints do not quantize."""

PIECE = 1 << 26
"""Random numbers generated at a time."""

MEMORY = Path("/dev/shm")
"""File system in memory. A checkpoint of 30 GB takes seconds there, and minutes on many disks."""

WRITERS = 12
"""Threads that write a checkpoint, one file each, since the system locks a file during a write."""

FILE_BYTES = 1400 << 20
"""Default size of a file, so that every thread has a few of Qwen3-14B's."""


def inner_size(shape: dict[str, Any]) -> int:
    """Return the columns of an MLP: of the shared expert, or of an expert, where no layer has another."""
    sizes = (shape.get(key) for key in (
        "intermediate_size", "shared_expert_intermediate_size", "moe_intermediate_size"))
    return next(size for size in sizes if size is not None)


def json_of(shape: str, scheme: WeightScheme | None = None) -> dict[str, Any]:
    """Return the content of config.json. scheme: of the layers; None for floats."""
    found = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "hidden_act": "silu",
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "torch_dtype": "bfloat16",
        "bos_token_id": None, "eos_token_id": SHAPES[shape]["vocab_size"] - 1, **SHAPES[shape]}
    if scheme:
        found["quantization_config"] = Quantization((((LINEAR,), scheme),), FLOATS).to_json()
    return found


def config_of(shape: str, scheme: WeightScheme | None = None, head: HeadDtype = "auto") -> ModelConfig:
    return replace(ModelConfig.from_dict(json_of(shape, scheme)), lm_head_dtype=head)


def random_weights(config: ModelConfig, dtype: torch.dtype, backend: Backend, seed: int) -> ModelWeights:
    """Return weights generated on the backend's device, without a second copy."""
    made = allocate(config, dtype, backend)
    generator = torch.Generator(backend.device).manual_seed(seed)
    targets = {name: target for name, target in made.targets.items() if target.required}
    for name, target in targets.items():
        rows = target.shapes[0][0]
        step = max(1, PIECE // math.prod(target.shapes[0][1:]))
        for first in range(0, rows, step):
            target.put(first, random_rows(name, target, targets, min(step, rows - first), generator))
    made.finish(config.vocab_size, backend)
    backend.synchronize()
    return made.weights


def random_rows(name: str, target: Target, targets: dict[str, Target], rows: int, generator: torch.Generator
                ) -> torch.Tensor:
    """Return rows of a checkpoint's tensor, of a magnitude that keeps activations between layers at about 1."""
    shape, device = (rows, *target.shapes[0][1:]), generator.device
    if target.dtypes is INT8:
        return torch.randint(-127, 128, shape, dtype=torch.int8, device=device, generator=generator)
    if target.dtypes is INT32:  # words of 4 bits
        return torch.randint(-(1 << 31), 1 << 31, shape, device=device, generator=generator).int()
    numbers = torch.randn(shape, device=device, generator=generator)
    if target.dtypes is FLOAT8S:
        return (73 * numbers).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)
    if name.endswith("_scale"):
        module = name.removesuffix("_scale")
        packed = targets.get(f"{module}_packed")
        # Uniform int8 values, and the float8 values, have a standard deviation of 73, those of 4 bits of 4.6.
        inputs, deviation = (targets[module].shapes[0][-1], 73) if packed is None else (8 * packed.shapes[0][-1], 4.6)
        return ((1 + 0.1 * numbers.clamp(-3, 3)) * (inputs**-0.5 / deviation)).bfloat16().float()
    if len(shape) == 1:
        return 1 + 0.1 * numbers
    return numbers * (1.0 if "embed" in name else shape[1] ** -0.5)


def place_of(shape: str) -> Path | None:
    """Return where to write a checkpoint: in memory, else among temporary files; None if neither has the space."""
    needed = int(2.2 * config_of(shape).num_parameters) + (64 << 20)
    places = MEMORY, Path(tempfile.gettempdir())
    return next((place for place in places if place.is_dir() and shutil.disk_usage(place).free >= needed), None)


def random_folder(shape: str, folder: Path, backend: Backend, seed: int, file_bytes: int = FILE_BYTES) -> Path:
    """Write a bfloat16 checkpoint with a tokenizer of its vocabulary.

    file_bytes: maximum bytes of a file with several tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(json_of(shape)))
    targets = _names(shape)
    files: list[list[str]] = [[]]
    for name, target in targets.items():
        if files[-1] and sum(_bytes_of(targets[each]) for each in files[-1]) + _bytes_of(target) > file_bytes:
            files.append([])
        files[-1].append(name)
    names = [f"model-{number:05}.safetensors" for number in range(1, len(files) + 1)]
    index = {name: file for file, own in zip(names, files, strict=True) for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))

    def write(number: int) -> None:
        generator = torch.Generator(backend.device).manual_seed(seed + number)
        _write_random(folder / names[number], files[number], targets, backend, generator)

    with ThreadPoolExecutor(WRITERS) as pool:
        written = pool.map(write, range(len(files)))
        peers = runpy.run_path(str(Path(__file__).resolve().parents[2] / "peers" / "make_model.py"))
        peers["write_tokenizer"](folder, SHAPES[shape]["vocab_size"])
        list(written)  # raises the errors of the threads
    return folder


def _bytes_of(target: Target) -> int:
    return 2 * math.prod(target.shapes[0])


def _write_random(
    file: Path, names: list[str], targets: dict[str, Target], backend: Backend, generator: torch.Generator
) -> None:
    """Write tensors generated on the device in the format of safetensors, without a second copy on the host."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + _bytes_of(targets[name])
        header[name] = {"dtype": "BF16", "shape": list(targets[name].shapes[0]), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    buffer = backend.host_buffer(min(PIECE, end // 2), dtype=torch.bfloat16)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            target = targets[name]
            rows = target.shapes[0][0]
            step = max(1, PIECE // math.prod(target.shapes[0][1:]))
            for first in range(0, rows, step):
                made = random_rows(name, target, targets, min(step, rows - first), generator).flatten()
                piece = buffer[: len(made)].copy_(made.bfloat16())
                out.write(piece.view(torch.uint8).numpy())


def _names(shape: str) -> dict[str, Target]:
    """Return the tensors of a checkpoint, without memory."""
    backend = CpuBackend(native=False)
    backend.device = torch.device("meta")
    return allocate(config_of(shape), torch.bfloat16, backend).targets
