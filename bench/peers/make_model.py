"""Generation of a Hugging Face folder with random bfloat16 weights, for benchmarks in which only the shape counts.

    python bench/peers/make_model.py qwen3-0.6b FOLDER --tokenizer QWEN3_FOLDER
    python bench/peers/make_model.py m42 FOLDER [--tokenizer QWEN3_FOLDER]

Shapes: Qwen3-0.6B's, and a model of 42 million parameters with its embedding, 25 million without, which makes the cost
around the kernels visible. Norms are 1, all other weights are from N(0, 0.02). Without --tokenizer a byte-level BPE of
exactly the shape's vocabulary is made: the bytes, then pairs of bytes. If the tokenizer has more tokens than the shape,
the first ones are taken. In a BPE these are the most frequent ones.
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

SHAPES: dict[str, dict[str, int]] = {
    "qwen3-0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
                   "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936, "eos_token_id": 151645},
    "m42": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 64, "intermediate_size": 1536, "vocab_size": 32000, "eos_token_id": 31999},
}
STD = 0.02


def config_of(shape: dict[str, int]) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
            "attention_dropout": 0.0, "bos_token_id": None, "hidden_act": "silu", "initializer_range": STD,
            "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1e6,
            "sliding_window": None, "tie_word_embeddings": True, "dtype": "bfloat16", "torch_dtype": "bfloat16",
            "use_cache": True, "use_sliding_window": False, **shape}


def weights_of(shape: dict[str, int], seed: int) -> dict[str, torch.Tensor]:
    """Return every tensor of the checkpoint in bfloat16; linear weights are [out, in]."""
    random = torch.Generator().manual_seed(seed)
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size).normal_(std=STD, generator=random).bfloat16()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    weights = {"model.embed_tokens.weight": normal(shape["vocab_size"], hidden), "model.norm.weight": ones(hidden)}
    for layer in range(shape["num_hidden_layers"]):
        part = {
            "input_layernorm": ones(hidden), "post_attention_layernorm": ones(hidden),
            "self_attn.q_norm": ones(head), "self_attn.k_norm": ones(head),
            "self_attn.q_proj": normal(queries, hidden), "self_attn.k_proj": normal(keys, hidden),
            "self_attn.v_proj": normal(keys, hidden), "self_attn.o_proj": normal(hidden, queries),
            "mlp.gate_proj": normal(inner, hidden), "mlp.up_proj": normal(inner, hidden),
            "mlp.down_proj": normal(hidden, inner)}
        weights |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in part.items()}
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
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "config.json").write_text(json.dumps(config_of(shape), indent=2) + "\n")
    if args.tokenizer:
        copy_tokenizer(args.folder, args.tokenizer, shape["vocab_size"])
    else:
        write_tokenizer(args.folder, shape["vocab_size"])
    weights = weights_of(shape, args.seed)
    save_file(weights, args.folder / "model.safetensors", metadata={"format": "pt"})
    print(f"{sum(tensor.numel() for tensor in weights.values()):,} parameters in {args.folder}")


if __name__ == "__main__":
    main()
