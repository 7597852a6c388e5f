"""Speed of mixtures of experts: layers of the shape of Qwen3-30B-A3B, with random weights.

    python bench/engine/experts.py [--layers 4] [--folder DIR] [-- OPTIONS of npuserve bench step]

Writes a checkpoint of 1.2 GB a layer to a temporary folder, or to --folder, where it stays, and runs `npuserve bench
step` on it: 1, 8 and 32 rows and a prompt of 512 tokens. The bytes of a step are those of the experts that as many
random tokens are expected to choose. A router of random weights chooses nearly so. The vocabulary is small, so that the
LM head takes little of the time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from npuserve.cli.main import main as npuserve

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 4096, "hidden_size": 2048,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": True, "max_position_embeddings": 4096,
    "tie_word_embeddings": True, "dtype": "bfloat16", "rope_theta": 1000000.0}
OPTIONS = ["--batch", "1,8,32", "--context", "128", "--prompt", "512", "--ceilings", "--kv-cache-memory", "512MiB"]


def shapes_of_layer() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of a layer. Experts are stacked."""
    hidden, width, experts = 2048, 768, 128
    yield from ((f"{name}_layernorm.weight", (hidden,)) for name in ("input", "post_attention"))
    yield from ((f"self_attn.{name}_norm.weight", (128,)) for name in "qk")
    for name, heads in (("q", 32), ("k", 4), ("v", 4)):
        yield f"self_attn.{name}_proj.weight", (heads * 128, hidden)
    yield "self_attn.o_proj.weight", (hidden, 32 * 128)
    yield "mlp.gate.weight", (experts, hidden)
    yield "mlp.experts.gate_up_proj", (experts, 2 * width, hidden)
    yield "mlp.experts.down_proj", (experts, hidden, width)


def write(folder: Path, layers: int) -> None:
    """Write a checkpoint of random weights, a file for each layer."""
    numbers = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16()

    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        count = torch.Size(shape).numel()
        return numbers.repeat(-(-count // len(numbers)))[:count].view(shape)

    files: dict[str, str] = {}

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name, {"format": "pt"})
        files.update(dict.fromkeys(tensors, name))

    save("tables.safetensors",
         {"model.embed_tokens.weight": tensor((4096, 2048)), "model.norm.weight": tensor((2048,))})
    for layer in range(layers):
        numbers = numbers.roll(12345)
        save(f"layer-{layer}.safetensors",
             {f"model.layers.{layer}.{name}": tensor(shape) for name, shape in shapes_of_layer()})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))


def main(arguments: list[str]) -> int:
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args(arguments[:cut])
    with TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "config.json").exists():
            write(folder, args.layers)
        return npuserve(["bench", "step", str(folder), *OPTIONS, *arguments[cut + 1 :]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
