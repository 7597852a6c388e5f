"""Predicted lower bound of a decode step of Qwen3-14B on one Ascend A2, by kernel.

    python bench/kernels/roofline.py [--model FOLDER] [--batch 1 16 64] [--context 1024] [--bandwidth 1.6e12]
    python bench/kernels/roofline.py --write     writes docs/ascend-roofline.md

The decoder (npu/execution/decoder.py) runs on tensors without memory; kernels/bench/costs.py gives the cost of each
call. The time is bytes divided by bandwidth: no launches, no kernel slower than the memory, no cache hits.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from npuserve.kernels.attention import AttentionMetadata
from npuserve.kernels.bench.costs import Cost, cost, nbytes
from npuserve.kernels.quantized import Int8, Scheme, Weight
from npuserve.npu.backends.ascend.backend import BACKEND
from npuserve.npu.execution.decoder import Model
from npuserve.npu.model.allocation import allocate
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.quantization import LINEAR, W8A8, Quantization

PAGE = Path(__file__).parents[2] / "docs" / "ascend-roofline.md"
QWEN3_14B = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40,
    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rope_theta": 1000000, "dtype": "bfloat16"}
PUBLISHED = (
    ("ITL, batch 1, asynchronous", "bf16", 28.8, (1,), 1024),
    ("TPOT, prompt 3338, capacity 16", "bf16", 36.3, (1, 16), 3338),
    ("a step at batch 16", "bf16", 37.7, (16,), 1024),
    ("a token in A8W8", "w8a8", 42.0, (1,), 1024))
"""Figures of pypto-serving: name, format, ms, and the batches and context of the floor to compare with. The context is
1024 where none was published."""


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def made(shape: Sequence[int], scheme: Scheme | None) -> Tensor | Int8:
    return meta(*shape) if scheme is None else Int8(meta(*shape, dtype=torch.int8), meta(shape[0], dtype=torch.float32))


@dataclass(slots=True)
class Ledger:
    """Kernels that record their costs and return tensors of the right shape."""

    costs: dict[str, list[Cost]] = field(default_factory=lambda: defaultdict(list))

    def _note(self, name: str, *args: Any) -> None:
        self.costs[name].append(cost(name, args))

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        self._note("embedding", ids, table)
        return meta(len(ids), table.shape[1])

    def rms_norm(self, x: Tensor, gamma: Tensor, eps: float, scheme: Scheme | None = None) -> Tensor | Int8:
        self._note("rms_norm", x, gamma, eps, scheme)
        return made(x.shape, scheme)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, gamma: Tensor, eps: float, scheme: Scheme | None = None
    ) -> tuple[Tensor | Int8, Tensor]:
        self._note("add_rms_norm", x, residual, gamma, eps, scheme)
        return made(x.shape, scheme), residual

    def linear(self, x: Tensor | Int8, weight: Weight, bias: Tensor | None) -> Tensor:
        self._note("linear", x, weight, bias)
        return meta(len(x), weight.shape[0])

    def linear_swiglu(
        self, x: Tensor | Int8, weight: Weight, bias: Tensor | None, scheme: Scheme | None = None
    ) -> Tensor | Int8:
        self._note("linear_swiglu", x, weight, bias, scheme)
        return made((len(x), weight.shape[0] // 2), scheme)

    def qk_norm_rope_kv_write(self, qkv: Tensor, *args: Any) -> Tensor:
        self._note("qk_norm_rope_kv_write", qkv, *args)
        return meta(len(qkv), args[-1], args[-2].shape[-1])

    def paged_attention(self, q: Tensor, *args: Any) -> Tensor:
        self._note("paged_attention", q, *args)
        return q.flatten(1)

    def linear_argmax(self, x: Tensor, weight: Tensor, bias: Tensor | None, vocabulary: int) -> Tensor:
        self._note("linear_argmax", x, weight, bias, vocabulary)
        return meta(len(x), 1, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Step:
    """Costs of a decode step by kernel. weights, cache: the bytes of weights, and of keys and values, in `nbytes`."""

    costs: dict[str, list[Cost]]
    weights: int
    cache: int

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for calls in self.costs.values() for c in calls)

    @property
    def operations(self) -> int:
        """Number of operations of matrix products and attention."""
        return sum(c.operations for calls in self.costs.values() for c in calls if c.kind != "fp32")


def decode(config: ModelConfig, rows: int, context: int, quantized: bool) -> Step:
    """Return the costs of a greedy step of `rows` requests with `context` tokens each, this step's included."""
    w8a8 = Quantization((((LINEAR,), W8A8()),), ignore=("lm_head",))
    c, ledger = replace(config, quantization=w8a8 if quantized else None), Ledger()
    backend: Any = SimpleNamespace(device=torch.device("meta"), vocabulary_tile=BACKEND.vocabulary_tile,
                                   int8_levels=BACKEND.int8_levels, weight=lambda n, k, dtype: meta(n, k, dtype=dtype),
                                   empty=lambda shape, dtype: meta(*shape, dtype=dtype))
    weights = allocate(c, torch.bfloat16, backend).weights
    blocks = -(-context // BACKEND.block_size)
    layer = meta(rows * blocks, BACKEND.block_size, c.num_kv_heads, c.head_dim)
    metadata = AttentionMetadata(meta(rows, blocks, dtype=torch.int32), meta(rows, dtype=torch.int32),
                                 meta(rows + 1, dtype=torch.int32), [context] * rows, list(range(rows + 1)))
    ids = meta(rows, dtype=torch.int64)
    kernels: Any = ledger
    batch: Any = SimpleNamespace(ids=ids, positions=ids, slot_mapping=ids, attention=metadata)
    cos_sin = meta(c.context_length, c.head_dim, dtype=torch.float32)
    model = Model(c, weights, cos_sin, kernels)
    cache: Any = SimpleNamespace(layers=[(layer, layer)] * c.num_layers)
    model.argmax(model.hidden(batch, cache))
    linear = nbytes(*(w.weight for x in weights.layers for w in (x.qkv, x.o, x.gate_up, x.down)))
    return Step(dict(ledger.costs), linear + nbytes(weights.lm_head.weight),
                rows * context * c.num_layers * 2 * layer[0, 0].nbytes)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)) + "\n"


def page(config: ModelConfig, batches: Sequence[int], context: int, bandwidth: float,
         published: Sequence[tuple[str, str, float, tuple[int, ...], int]] = PUBLISHED) -> str:
    """Return the tables as Markdown."""

    def ms(nbytes: int) -> float:
        return nbytes / bandwidth * 1e3

    formats = {"bf16": False, "w8a8": True}
    steps = {(name, rows): decode(config, rows, context, quantized)
             for name, quantized in formats.items() for rows in batches}
    whole = [[name, str(rows), f"{s.weights / 1e9:.2f}", f"{s.cache / 1e9:.2f}",
              f"{(s.nbytes - s.weights - s.cache) / 1e9:.2f}", f"{s.nbytes / 1e9:.2f}", f"{ms(s.nbytes):.1f}",
              f"{rows / ms(s.nbytes) * 1e3:.0f}", f"{s.operations / s.nbytes * bandwidth / 1e12:.1f}"]
             for (name, rows), s in steps.items()]
    text = [table(["format", "batch", "weights GB", "keys, values GB", "else GB", "in all GB", "floor ms", "tokens/s",
                   "TFLOP/s at the floor"], whole)]
    for name in formats:
        first = steps[name, batches[0]]
        rows = [[kernel, str(len(calls))] + [f"{sum(c.nbytes for c in steps[name, n].costs[kernel]) / 1e6:,.1f} / "
                                             f"{ms(sum(c.nbytes for c in steps[name, n].costs[kernel])):.3f}"
                                             for n in batches] for kernel, calls in first.costs.items()]
        text.append(table([f"kernel, {name}", "calls", *(f"MB / ms at {n}" for n in batches)], rows))
    beat = []
    for what, name, figure, sizes, tokens in published:
        floors = [ms(decode(config, n, tokens, formats[name]).nbytes) for n in sizes]
        beat.append([what, name, f"{figure:.1f}", " – ".join(f"{f:.1f}" for f in floors),
                     " – ".join(f"{figure / f:.2f}" for f in floors)])
    if beat:
        text.append(table(["published by pypto-serving", "format", "ms", "floor ms", "times the floor"], beat))
    return "\n".join(text)


INTRODUCTION = """# A decode step of Qwen3-14B on Ascend A2: the floor

Written by `python bench/kernels/roofline.py --write`; a test compares the two. **A prediction: nothing here was
measured.** The decoder of `npu/execution/decoder.py` is traced kernel by kernel. `kernels/bench/costs.py` counts each
call (every byte read and written once), at a context of 1024 tokens and 1.6 TB/s, on one card. The floor is the bytes
divided by the bandwidth. Launches, kernels slower than the memory and idle time add to it; activations that stay in an
L2 cache reduce it.

bf16: 2 bytes per weight. w8a8: the decoder's projections in int8 with scales. Activations are quantized per token by
the kernel before the projection, or after attention by the projection's own kernel. LM head, norms, keys and values
stay in bf16. A step reads only its rows of the embedding table, so it reads less than the whole checkpoint (29.5 GB,
18.5 ms).

The last column of the first table is the speed that the matrix units need for memory to be the limit: compare it with
the card's peak. `linear_argmax` is the LM head with the argmax. Published figures are compared with the floor of a step
at their batch and context: batches of 1 and of 16 where up to 16 requests ran, 1 and 1024 where none was published.
"""


def default_page() -> str:
    return f"{INTRODUCTION}\n{page(ModelConfig.from_dict(QWEN3_14B), (1, 16, 64), 1024, 1.6e12)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder with config.json (default: Qwen3-14B's numbers)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=1024, help="tokens of each row (default: %(default)s)")
    parser.add_argument("--bandwidth", type=float, default=1.6e12, help="bytes/s (default: %(default)s)")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if min(*args.batch, args.context) < 1 or args.bandwidth <= 0:
        parser.error("--batch, --context and --bandwidth must be above 0")
    if args.write:
        PAGE.write_text(default_page())
        return
    config = ModelConfig.from_folder(args.model) if args.model else ModelConfig.from_dict(QWEN3_14B)
    print(page(config, args.batch, args.context, args.bandwidth, () if args.model else PUBLISHED), end="")


if __name__ == "__main__":
    main()
