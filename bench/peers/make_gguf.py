"""Conversion of a Hugging Face folder's weights to a GGUF file in bfloat16, for llama.cpp, without a tokenizer.

    PYTHON bench/peers/make_gguf.py FOLDER FILE.gguf [q8_0 | q4_0 | q4_k_m]

With q8_0 all matrices are int8 in blocks of 32 that share a scale, as made by llama-quantize. q4_0 and q4_k_m are
llama-quantize's own, by llama-cpp-python; the LM head has 6 bits there. Supports Qwen2, Qwen3, Qwen3Moe with experts
one by one, Llama and the text model of Qwen3.5 with as many key heads as value heads, with one safetensors file. Needs
the packages gguf and numpy.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}
HYBRID_NAMES = {
    **NAMES, "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
EXPERTS_NAMES = {**NAMES, "mlp.gate": "ffn_gate_inp"}
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
QUANTIZED = {"q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0", "q4_k_m": "LLAMA_FTYPE_MOSTLY_Q4_K_M"}
ARCHITECTURES = {
    "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "llama": "llama", "qwen3_5_text": "qwen35"}
"""model_type -> llama.cpp's architecture."""
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
       "lm_head.weight": "output.weight"}


def read(file: Path) -> dict[str, np.ndarray]:
    """Return each tensor's bfloat16 values as uint16, in the tensor's shape."""
    with file.open("rb") as data:
        header = json.loads(data.read(size := int.from_bytes(data.read(8), "little")))
    numbers, tensors = np.memmap(file, np.uint8, "r", 8 + size), {}
    for name, entry in header.items():
        if name != "__metadata__":
            if entry["dtype"] != "BF16":
                raise SystemExit(f"{name}: {entry['dtype']}, not BF16")
            begin, end = entry["data_offsets"]
            tensors[name] = numbers[begin:end].view(np.uint16).reshape(entry["shape"])
    return tensors


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of q or k in the order of llama.cpp's Llama: it rotates neighbours, Hugging Face rotates halves."""
    rows, columns = weight.shape
    ordered: np.ndarray = weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(weight.shape)
    return ordered


def widened(weight: np.ndarray) -> np.ndarray:
    """Return bfloat16 numbers in float32."""
    return (weight.astype(np.uint32) << 16).view(np.float32)


def add_hybrid(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the sizes of gated delta net and of partial rotary embeddings."""
    values = config["linear_num_value_heads"]
    if config["linear_num_key_heads"] != values:
        raise SystemExit("linear_num_key_heads: differs from linear_num_value_heads; llama.cpp orders such heads anew")
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(values)
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * values)
    writer.add_full_attention_interval(config["full_attention_interval"])
    writer.add_rope_dimension_count(int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*config["rope_parameters"]["mrope_section"], 0])


def hybrid_tensor(layer: str, name: str, weight: np.ndarray) -> tuple[str, np.ndarray] | None:
    """Return the name and the numbers of a tensor that is not in bfloat16, or is changed; None for others."""
    if name == "linear_attn.A_log":
        return f"blk.{layer}.ssm_a", -np.exp(widened(weight))
    if name == "linear_attn.dt_bias":
        return f"blk.{layer}.ssm_dt.bias", widened(weight)
    if name == "linear_attn.conv1d.weight":
        return f"blk.{layer}.ssm_conv1d.weight", widened(weight[:, 0])
    if name.endswith("norm.weight") and name != "linear_attn.norm.weight":
        return f"blk.{layer}.{HYBRID_NAMES[name.removesuffix('.weight')]}.weight", widened(weight) + 1
    return None


def add_experts(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
    """Write the matrices of experts, stacked by layer, and remove them from `tensors`."""
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name in list(tensors):
        layer, _, part = name.removeprefix("model.layers.").partition(".")
        if match := EXPERT.fullmatch(part):
            experts.setdefault(f"blk.{layer}.ffn_{match[2]}_exps.weight", {})[int(match[1])] = tensors.pop(name)
    for target, matrices in experts.items():
        weight = np.stack([matrices[expert] for expert in range(len(matrices))])
        writer.add_tensor(target, weight.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)


def quantize(plain: str, out: str, kind: str) -> None:
    """Write `out`, the GGUF file `plain` quantized by llama.cpp. kind: name of its file type."""
    import llama_cpp as c

    params = c.llama_model_quantize_default_params()
    params.ftype = getattr(c, kind)
    if c.llama_model_quantize(plain.encode(), out.encode(), params):
        raise SystemExit(f"{plain}: llama.cpp did not quantize it")


def add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the sizes of the model."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if config["model_type"] == "qwen3_5_text":
        add_hybrid(writer, config)
    else:
        writer.add_rope_dimension_count(head_dim)
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def main() -> None:
    if len(sys.argv) not in (3, 4) or sys.argv[3:] not in ([], ["q8_0"], ["q4_0"], ["q4_k_m"]):
        raise SystemExit(__doc__)
    folder, out = Path(sys.argv[1]), sys.argv[2]
    if sys.argv[3:] and sys.argv[3] in QUANTIZED:
        plain = f"{out}.bf16"
        subprocess.run([sys.executable, __file__, str(folder), plain], check=True)
        quantize(plain, out, QUANTIZED[sys.argv[3]])
        Path(plain).unlink()
        return
    q8_0 = gguf.GGMLQuantizationType.Q8_0 if sys.argv[3:] else None
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        raise SystemExit(f"model_type: {kind} is none of {', '.join(ARCHITECTURES)}")
    is_hybrid = kind == "qwen3_5_text"
    has_experts = kind == "qwen3_moe"
    if has_experts and q8_0:
        raise SystemExit("q8_0: not possible with experts")
    writer = gguf.GGUFWriter(out, ARCHITECTURES[kind])
    add_sizes(writer, config)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if q8_0 else gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")
    names = HYBRID_NAMES if is_hybrid else EXPERTS_NAMES if has_experts else NAMES
    tensors = read(folder / "model.safetensors")
    if has_experts:
        add_experts(writer, tensors)
    for name, weight in tensors.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if match and is_hybrid and (changed := hybrid_tensor(match[1], match[2], weight)):
            writer.add_tensor(*changed)
            continue
        if match:
            part, _, field = match[2].rpartition(".")
            target = f"blk.{match[1]}.{names[part]}.{field}"
            if kind == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                weight = interleaved(
                    weight, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        else:
            target = TOP[name]
        if weight.ndim == 1:
            writer.add_tensor(target, widened(weight) + (1 if is_hybrid and name == "model.norm.weight" else 0))
        elif q8_0:
            writer.add_tensor(target, gguf.quants.quantize(widened(weight), q8_0), raw_dtype=q8_0)
        else:
            writer.add_tensor(target, np.ascontiguousarray(weight).view(np.uint8),
                              raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
