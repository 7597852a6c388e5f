"""Variants of the acceptance check: tokens of a small model in int8 and with the LM head of a real model.

It is the built-in model. If the checked model has linear attention or experts, it is one with them, made of that.
"""

from __future__ import annotations

import gc
import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from npuserve.cli.acceptance import tokens as accept_tokens
from npuserve.cli.acceptance.model import check_tokens, exact_dtypes
from npuserve.cli.acceptance.reference import load, load_reference
from npuserve.cli.acceptance.report import Finding, guarded
from npuserve.kernels.kv_cache import QUANTIZED
from npuserve.npu.backends.base import Backend
from npuserve.npu.model.config import HeadDtype, ModelConfig
from npuserve.npu.quantize.checkpoint import quantize_checkpoint
from npuserve.service.text.model_path import resolve

ROWS = 8
IDS = 151_936
"""Ids of the Qwen3 models."""

WIDE_PROMPTS = slice(1, 5)
"""Prompts at IDS ids."""
WIDE_ANSWER = 16
"""Tokens of an answer at IDS ids: few, since the logits of all positions are compared."""

KEY_HEADS = 2
VALUE_HEADS = 4
KEY_DIM = 128
VALUE_DIM = 128
TAPS = 4
"""Sizes of the linear attention."""

EXPERTS = 8
CHOSEN = 2
"""Experts of a layer, and of a token."""

APART = 0.3
"""Difference of an expert's weights from those of the dense MLP, as a share of their size."""

SHARE = 0.2
"""Output of a random layer, as a share of the embeddings' size."""

GATE = 0.1
"""Standard deviation of the inputs of output gates."""

NORMS = "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Variant:
    """Quantized numbers in one or more parts of the model, or an LM head of real width.

    wide: the model has IDS ids, and an LM head apart from its embedding (`widen`).
    """

    name: str
    w8a8: bool = False
    lm_head_dtype: HeadDtype = "auto"
    kv_cache_dtype: str = "auto"
    wide: bool = False


VARIANTS = (
    Variant("W8A8, int8 head", w8a8=True, lm_head_dtype="int8"),
    Variant(f"W8A8, int8 head of {IDS:,}", w8a8=True, lm_head_dtype="int8", wide=True),
    Variant(f"head of {IDS:,}", wide=True),
    Variant("fp8 KV", kv_cache_dtype="fp8"),
    Variant("int8 KV", kv_cache_dtype="int8"),
)


def check_variants(
    backend: Backend, threads: int, *, hybrid: bool = False, experts: bool = False
) -> Iterator[Finding]:
    """Yield the findings of `check_tokens` for each variant that the device has: in float32, if the device has it, and
    in its preferred dtype.

    hybrid: check the small model with linear attention.
    experts: check the small model with mixtures of experts.
    """
    plain = resolve("")
    dtypes = dict.fromkeys([*exact_dtypes(backend, hybrid=hybrid), backend.resolve_dtype("auto", "bfloat16")])
    with tempfile.TemporaryDirectory() as folder:
        if hybrid:
            plain = Path(folder) / "hybrid"
            write_hybrid(resolve(""), plain)
        if experts:
            dense, plain = plain, Path(folder) / "experts"
            write_mixture(dense, plain)
        int8 = Path(folder) / "w8a8"
        quantize_checkpoint(plain, int8)
        for variant in VARIANTS:
            if (cached := QUANTIZED.get(variant.kv_cache_dtype)) and cached not in backend.capabilities.cache_dtypes:
                continue
            with tempfile.TemporaryDirectory(dir=folder) as variant_folder:
                for dtype in dtypes:
                    findings = _check(
                        variant, int8 if variant.w8a8 else plain, Path(variant_folder), dtype, backend, threads)
                    yield from guarded("variants", f"{variant.name}, {dtype}", findings)
                    gc.collect()


def _check(
    variant: Variant, folder: Path, wide_folder: Path, dtype: str, backend: Backend, threads: int
) -> Iterator[Finding]:
    """Yield the findings of one variant in one dtype. wide_folder: folder for a model that the variant needs."""
    count = WIDE_ANSWER if variant.wide else accept_tokens.ANSWER
    length = backend.capabilities.block_size + 4 * accept_tokens.BUDGET + count
    vocabulary = ModelConfig.from_folder(folder).vocab_size
    prompts = accept_tokens.prompts_of(resolve(""), vocabulary, length - count)
    if variant.wide:
        if not (wide := wide_folder / "wide").exists():
            widen(folder, wide, IDS)
        folder = wide
        prompts = [[IDS // vocabulary * token for token in prompt] for prompt in prompts[WIDE_PROMPTS]]
    golden = load_reference(
        folder, backend, "float32", length, threads, variant.lm_head_dtype, variant.kv_cache_dtype)
    loaded = load(
        folder, backend, dtype, max_model_len=length, max_num_seqs=ROWS, max_num_batched_tokens=accept_tokens.BUDGET,
        kv_cache_dtype=variant.kv_cache_dtype, lm_head_dtype=variant.lm_head_dtype)
    for finding in check_tokens(loaded, golden, prompts, count, folder):
        yield replace(finding, part="variants", name=f"{variant.name}: {finding.name}")


def widen(folder: Path, out: Path, vocabulary: int) -> None:
    """Write a model to the new folder `out` with more ids and an LM head of its own.

    Token i of n is token i * (vocabulary // n), so that the tokens are spread over the whole LM head. The rows of the
    LM head between two tokens are half the row before them: their logits are half as large, so none is the argmax
    where the largest logit is positive. The rows of the embedding between two tokens are 0.

    folder: model in one file, with tied embeddings.
    vocabulary: number of ids, at least the model's.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    tensors = load_file(folder / "model.safetensors")
    table = tensors[EMBEDDING]
    if vocabulary < len(table):
        raise ValueError(f"vocabulary: {vocabulary} is less than the {len(table)} ids of the model")
    stride = vocabulary // len(table)
    first = torch.arange(len(table)) * stride
    embedding = torch.zeros(vocabulary, table.shape[1], dtype=table.dtype)
    head = table[(torch.arange(vocabulary) // stride).clamp(max=len(table) - 1)] / 2
    embedding[first] = head[first] = table
    out.mkdir()
    save_file(tensors | {EMBEDDING: embedding, LM_HEAD: head}, out / "model.safetensors", {"format": "pt"})
    config |= {"vocab_size": vocabulary, "tie_word_embeddings": False}
    (out / "config.json").write_text(json.dumps(config), "utf-8")


def write_hybrid(folder: Path, out: Path) -> None:
    """Write a model with linear attention, made of a dense Qwen3, to the new folder `out`.

    Its attention layers are those of the other model, with output gates near a half. Before each stands a random layer
    of linear attention, whose output is small beside the embeddings, so that most tokens keep a likely successor.

    folder: dense Qwen3 in one file.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(0)
    table = tensors[EMBEDDING]
    written = {EMBEDDING: table, "model.norm.weight": tensors["model.norm.weight"] - 1}
    count = config["num_hidden_layers"]
    for index in range(count):
        prefix = f"model.layers.{index}."
        layer = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        linear = _linear_layer(layer, float(table.std()), generator)
        written |= {f"model.layers.{2 * index}.{name}": tensor for name, tensor in linear.items()}
        gated = _gated(layer, config["num_attention_heads"], generator)
        written |= {f"model.layers.{2 * index + 1}.{name}": tensor for name, tensor in gated.items()}
    out.mkdir()
    rounded = {name: tensor.to(getattr(torch, config["dtype"])).contiguous() for name, tensor in written.items()}
    save_file(rounded, out / "model.safetensors", {"format": "pt"})
    config |= {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": 2 * count,
        "layer_types": ["linear_attention", "full_attention"] * count,
        "rope_parameters": config["rope_parameters"] | {"partial_rotary_factor": 1.0},
        "linear_num_key_heads": KEY_HEADS, "linear_num_value_heads": VALUE_HEADS, "linear_key_head_dim": KEY_DIM,
        "linear_value_head_dim": VALUE_DIM, "linear_conv_kernel_dim": TAPS}
    (out / "config.json").write_text(json.dumps(config), "utf-8")


def write_mixture(folder: Path, out: Path) -> None:
    """Write a model with mixtures of experts, made of a dense one, to the new folder `out`.

    Each expert is the dense MLP with other random parts, so that a router that chooses another one, by the rounding of
    its logits, changes little. A model with linear attention gets a shared expert, too, whose output is small.

    folder: dense Qwen3, or Qwen3.5 of `write_hybrid`, in one file.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    hybrid = config["architectures"] == ["Qwen3_5ForCausalLM"]
    inner = config["intermediate_size"]
    size = float(tensors[EMBEDDING].float().std())

    def random(weight: Tensor, scale: float) -> Tensor:
        return torch.randn(weight.shape, generator=generator) * scale

    written = {name: tensor for name, tensor in tensors.items() if ".mlp." not in name}
    for index in range(config["num_hidden_layers"]):
        mlp = f"model.layers.{index}.mlp."
        dense = {part: tensors[f"{mlp}{part}_proj.weight"].float() for part in ("gate", "up", "down")}
        hidden = dense["gate"].shape[1]
        router = torch.randn(EXPERTS, hidden, generator=generator) / hidden**0.5
        written[f"{mlp}gate.weight"] = router
        for part, weight in dense.items():
            for expert in range(EXPERTS):
                other = weight + random(weight, APART * float(weight.std()))
                written[f"{mlp}experts.{expert}.{part}_proj.weight"] = other
            if hybrid:
                scale = (SHARE * size if part == "down" else 1.0) / weight.shape[1] ** 0.5
                written[f"{mlp}shared_expert.{part}_proj.weight"] = random(weight, scale)
        if hybrid:
            written[f"{mlp}shared_expert_gate.weight"] = router[:1] * GATE
    out.mkdir()
    dtype = getattr(torch, config["dtype"])
    save_file({name: tensor.to(dtype) for name, tensor in written.items()}, out / "model.safetensors", {"format": "pt"})
    config |= {
        "architectures": ["Qwen3_5MoeForCausalLM" if hybrid else "Qwen3MoeForCausalLM"], "num_experts": EXPERTS,
        "model_type": "qwen3_5_moe_text" if hybrid else "qwen3_moe", "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": inner, "shared_expert_intermediate_size": inner, "norm_topk_prob": True}
    (out / "config.json").write_text(json.dumps(config), "utf-8")


def _gated(layer: dict[str, Tensor], heads: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return a layer of attention with output gates, and zero-centred norms."""
    gated = dict(layer)
    for name in NORMS:
        gated[f"{name}.weight"] = layer[f"{name}.weight"] - 1
    queries = layer["self_attn.q_proj.weight"]
    gates = torch.randn(queries.shape, generator=generator) * GATE / queries.shape[1] ** 0.5
    parts = [weight.unflatten(0, (heads, -1)) for weight in (queries, gates)]
    gated["self_attn.q_proj.weight"] = torch.cat(parts, 1).flatten(0, 1)
    gated["self_attn.o_proj.weight"] = 2 * layer["self_attn.o_proj.weight"]  # a gate near 0 is a factor of a half
    return gated


def _linear_layer(layer: dict[str, Tensor], size: float, generator: torch.Generator) -> dict[str, Tensor]:
    """Return a random layer of linear attention with the MLP's sizes of `layer`. size: of the embeddings' numbers."""
    hidden, inner = layer["mlp.down_proj.weight"].shape
    values = VALUE_HEADS * VALUE_DIM
    channels = 2 * KEY_HEADS * KEY_DIM + values

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * (scale / math.sqrt(shape[-1]))

    return {
        "input_layernorm.weight": torch.zeros(hidden), "post_attention_layernorm.weight": torch.zeros(hidden),
        "linear_attn.in_proj_qkv.weight": random(channels, hidden),
        "linear_attn.in_proj_z.weight": random(values, hidden),
        "linear_attn.in_proj_a.weight": random(VALUE_HEADS, hidden),
        "linear_attn.in_proj_b.weight": random(VALUE_HEADS, hidden),
        "linear_attn.conv1d.weight": random(channels, 1, TAPS),
        "linear_attn.A_log": torch.rand(VALUE_HEADS, generator=generator) * 3 - 1,
        "linear_attn.dt_bias": torch.randn(VALUE_HEADS, generator=generator) - 2,
        "linear_attn.norm.weight": torch.ones(VALUE_DIM),
        "linear_attn.out_proj.weight": random(hidden, values, scale=SHARE * size),
        "mlp.gate_proj.weight": random(inner, hidden), "mlp.up_proj.weight": random(inner, hidden),
        "mlp.down_proj.weight": random(hidden, inner, scale=SHARE * size)}
