"""Generation of a Hugging Face folder with random bfloat16 weights, for benchmarks in which only the shape counts.

    python bench/peers/make_model.py qwen3-0.6b FOLDER --tokenizer QWEN3_FOLDER
    python bench/peers/make_model.py qwen3.5-0.8b FOLDER [--mtp]
    python bench/peers/make_model.py m42 FOLDER [--tokenizer QWEN3_FOLDER]
    python bench/peers/make_model.py hybrid-m42 FOLDER
    python bench/peers/make_model.py experts FOLDER

Shapes: Qwen3-0.6B's; Qwen3.5-0.8B's text model, of gated delta net and attention; and a model of 42 million parameters
with its embedding, 25 million without, which makes the cost around the kernels visible, also as a hybrid. `experts` is
four layers of Qwen3-30B-A3B, with a small vocabulary, so that the LM head takes little of the time; its checkpoint has
4.9 GB. --mtp adds a hybrid's head for multi-token prediction. Norms multiply by 1, and all other weights are from N(0,
0.02), but for the decay of gated delta net, which is that of transformers' initialization. Without --tokenizer a byte-
level BPE of exactly the shape's vocabulary is made: the bytes, then pairs of bytes. If the tokenizer has more tokens
than the shape, the first ones are taken. In a BPE these are the most frequent ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
                   "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936, "eos_token_id": 151645},
    "qwen3.5-0.8b": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2,
                     "head_dim": 256, "intermediate_size": 3584, "vocab_size": 248320, "eos_token_id": 248044,
                     "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
                     "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4},
    "m42": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 64, "intermediate_size": 1536, "vocab_size": 32000, "eos_token_id": 31999},
    "hybrid-m42": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
                   "head_dim": 64, "intermediate_size": 1536, "vocab_size": 32000, "eos_token_id": 31999,
                   "linear_num_key_heads": 8, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
                   "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "full_attention_interval": 4},
    "experts": {"hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4,
                "head_dim": 128, "intermediate_size": 6144, "vocab_size": 4096, "eos_token_id": 4095,
                "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}
STD = 0.02


def config_of(shape: dict[str, Any]) -> dict[str, Any]:
    if is_hybrid(shape):
        return hybrid_config(shape)
    kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    if "num_experts" in shape:
        kind = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True,
                "decoder_sparse_step": 1, "mlp_only_layers": []}
    return {**kind, "attention_bias": False,
            "attention_dropout": 0.0, "bos_token_id": None, "hidden_act": "silu", "initializer_range": STD,
            "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1e6,
            "sliding_window": None, "tie_word_embeddings": True, "dtype": "bfloat16", "torch_dtype": "bfloat16",
            "use_cache": True, "use_sliding_window": False, **shape}


def is_hybrid(shape: dict[str, Any]) -> bool:
    """Return True for a shape with layers of gated delta net."""
    return "linear_num_key_heads" in shape


def has_attention(shape: dict[str, Any], layer: int) -> bool:
    return not is_hybrid(shape) or (layer + 1) % int(shape["full_attention_interval"]) == 0


def hybrid_config(shape: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a text-only Qwen3.5."""
    kinds = ["full_attention" if has_attention(shape, layer) else "linear_attention"
             for layer in range(shape["num_hidden_layers"])]
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
            "mrope_interleaved": True}
    return {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "attention_bias": False,
            "attention_dropout": 0.0, "attn_output_gate": True, "bos_token_id": None, "hidden_act": "silu",
            "initializer_range": STD, "layer_types": kinds, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
            "rope_parameters": rope, "tie_word_embeddings": True, "dtype": "bfloat16", "torch_dtype": "bfloat16",
            "use_cache": True, **shape}


def mlp_sizes(shape: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the matrices of a layer's MLP, or of its router and experts."""
    hidden = shape["hidden_size"]

    def sizes(prefix: str, inner: int) -> dict[str, tuple[int, int]]:
        return {f"{prefix}.gate_proj": (inner, hidden), f"{prefix}.up_proj": (inner, hidden),
                f"{prefix}.down_proj": (hidden, inner)}

    if "num_experts" not in shape:
        return sizes("mlp", shape["intermediate_size"])
    found = {"mlp.gate": (shape["num_experts"], hidden)}
    for expert in range(shape["num_experts"]):
        found |= sizes(f"mlp.experts.{expert}", shape["moe_intermediate_size"])
    return found


def weights_of(shape: dict[str, Any], seed: int, *, mtp: bool = False) -> dict[str, torch.Tensor]:
    """Return every tensor of the checkpoint in bfloat16; linear weights are [out, in].

    mtp: add a head for multi-token prediction, which needs the shape of a hybrid.
    """
    random = torch.Generator().manual_seed(seed)
    hidden, head = shape["hidden_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    hybrid = is_hybrid(shape)

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size).normal_(std=STD, generator=random).bfloat16()

    def norm(size: int) -> torch.Tensor:
        """Return a weight that multiplies by 1. A hybrid's checkpoint has the weights less 1."""
        return torch.full((size,), 0.0 if hybrid else 1.0, dtype=torch.bfloat16)

    def attention() -> dict[str, torch.Tensor]:
        return {"self_attn.q_norm": norm(head), "self_attn.k_norm": norm(head),
                "self_attn.q_proj": normal(queries * (2 if hybrid else 1), hidden),
                "self_attn.k_proj": normal(keys, hidden), "self_attn.v_proj": normal(keys, hidden),
                "self_attn.o_proj": normal(hidden, queries)}

    def delta_net() -> dict[str, torch.Tensor]:
        value_heads, value_dim = shape["linear_num_value_heads"], shape["linear_value_head_dim"]
        values = value_heads * value_dim
        channels = 2 * shape["linear_num_key_heads"] * shape["linear_key_head_dim"] + values
        decay = torch.empty(value_heads).uniform_(0, 16, generator=random).clamp_min(1e-3)
        return {"linear_attn.in_proj_qkv": normal(channels, hidden), "linear_attn.in_proj_z": normal(values, hidden),
                "linear_attn.in_proj_b": normal(value_heads, hidden),
                "linear_attn.in_proj_a": normal(value_heads, hidden),
                "linear_attn.conv1d": normal(channels, 1, shape["linear_conv_kernel_dim"]),
                "linear_attn.A_log": decay.log().bfloat16(),
                "linear_attn.dt_bias": torch.ones(value_heads, dtype=torch.bfloat16),
                "linear_attn.norm": torch.ones(value_dim, dtype=torch.bfloat16),
                "linear_attn.out_proj": normal(hidden, values)}

    weights = {"model.embed_tokens.weight": normal(shape["vocab_size"], hidden), "model.norm.weight": norm(hidden)}

    def add_layer(prefix: str, *, attends: bool) -> None:
        part = {
            "input_layernorm": norm(hidden), "post_attention_layernorm": norm(hidden),
            **(attention() if attends else delta_net()),
            **{name: normal(*size) for name, size in mlp_sizes(shape).items()}}
        for name, tensor in part.items():
            suffix = "" if name.endswith(("A_log", "dt_bias")) else ".weight"
            weights[f"{prefix}{name}{suffix}"] = tensor

    for layer in range(shape["num_hidden_layers"]):
        add_layer(f"model.layers.{layer}.", attends=has_attention(shape, layer))
    if mtp:
        weights |= {"mtp.fc.weight": normal(hidden, 2 * hidden), "mtp.norm.weight": norm(hidden),
                    "mtp.pre_fc_norm_embedding.weight": norm(hidden), "mtp.pre_fc_norm_hidden.weight": norm(hidden)}
        add_layer("mtp.layers.0.", attends=True)
    return weights


def write_tokenizer(folder: Path, size: int) -> None:
    """Write a byte-level BPE of exactly `size` ids: bytes, pairs and triples of bytes; the last is the end of text."""
    end = "<|endoftext|>"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    triples = ((first + second, third) for first, second, third in itertools.product(alphabet, repeat=3))
    pairs = list(itertools.islice(
        itertools.chain(itertools.product(alphabet, alphabet), triples), size - len(alphabet) - 1))
    words = [*alphabet, *("".join(pair) for pair in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([end])
    assert tokenizer.get_vocab_size() == size
    _save(tokenizer, folder, end)


def _save(tokenizer: Tokenizer, folder: Path, end: str) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "clean_up_tokenization_spaces": False}))


def copy_tokenizer(folder: Path, source: Path, size: int) -> None:
    """Copy the tokenizer of `source`, or if it has more than `size` tokens, the first `size` - 1 and an end of text."""
    found = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    if len(found["model"]["vocab"]) <= size:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(source / name, folder / name)
        return
    end = "<|endoftext|>"
    vocabulary = {word: number for word, number in found["model"]["vocab"].items() if number < size - 1}
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in found["model"]["merges"]]
    found["model"] |= {"vocab": vocabulary, "merges": [pair for pair in pairs if "".join(pair) in vocabulary]}
    found["added_tokens"] = []
    made = Tokenizer.from_str(json.dumps(found))
    made.add_special_tokens([end])
    assert made.get_vocab_size() == size
    _save(made, folder, end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="folder whose tokenizer is taken")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mtp", action="store_true", help="add a head for multi-token prediction")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    if args.mtp and not is_hybrid(shape):
        parser.error("--mtp needs a hybrid")
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "config.json").write_text(json.dumps(config_of(shape), indent=2) + "\n")
    if args.tokenizer:
        copy_tokenizer(args.folder, args.tokenizer, shape["vocab_size"])
    else:
        write_tokenizer(args.folder, shape["vocab_size"])
    weights = weights_of(shape, args.seed, mtp=args.mtp)
    save_file(weights, args.folder / "model.safetensors", metadata={"format": "pt"})
    print(f"{sum(tensor.numel() for tensor in weights.values()):,} parameters in {args.folder}")


if __name__ == "__main__":
    main()
