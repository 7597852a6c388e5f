"""Predicted lower bound of a decode step of Qwen3-14B on one Ascend A2, by kernel.

    python bench/kernels/roofline.py [--model FOLDER] [--batch 1 16 64] [--context 1024] [--bandwidth 1.6e12]
    python bench/kernels/roofline.py --write     writes docs/ascend-roofline.md

npu/profiling/floor.py runs the decoder on tensors without memory and counts the bytes of each call. The time is bytes
divided by bandwidth: no launches, no kernel slower than the memory, no cache hits.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from npuserve.kernels import ascend
from npuserve.kernels.bench.costs import Cost, nbytes
from npuserve.kernels.layer import Linear
from npuserve.kernels.registry import KERNELS
from npuserve.kernels.routing import distinct_experts
from npuserve.kernels.sample import Filters
from npuserve.npu.backends.ascend.backend import BACKEND, TOKEN_BUCKET
from npuserve.npu.backends.graphs import MAX_TOKENS, default_buckets
from npuserve.npu.execution.capture import MAX_CHOSEN
from npuserve.npu.execution.state_store import KeysAndValues, Slots
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.layers.experts import Experts
from npuserve.npu.model.layers.layer import Paged
from npuserve.npu.profiling.floor import MetaModel
from npuserve.npu.quantization.assignment import LINEAR, Quantization
from npuserve.npu.quantization.w8a8 import W8A8

CAPABILITIES = BACKEND.capabilities
PAGE = Path(__file__).parents[2] / "docs" / "ascend-roofline.md"
QWEN3_14B = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40,
    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rope_theta": 1000000, "dtype": "bfloat16"}
QWEN3_8B = {**QWEN3_14B, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
            "num_attention_heads": 32}
"""Also the text model of Qwen3-VL-8B."""
QWEN3_5_27B = {
    "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
    "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 48, "vocab_size": 248320, "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}, "dtype": "bfloat16"}
"""Also the text model of Qwen3.6-27B and Qwen3.8-27B."""
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rope_theta": 1000000, "dtype": "bfloat16"}
QWEN3_5_35B_A3B = {
    "architectures": ["Qwen3_5MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 40,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "vocab_size": 248320, "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}, "dtype": "bfloat16"}
"""Also the text model of Qwen3.6-35B-A3B."""
SEEN = "hw-native-sys/pypto-serving, read on 2026-11-20"
LIB, VLLM = "https://github.com/hw-native-sys/pypto-lib/pull", "https://github.com/vllm-project/vllm-ascend/pull"


@dataclass(frozen=True, slots=True)
class Published:
    """Figure of another server on one card.

    batches, context: batches and context of the floor to compare with; context 1024 where none was published.
    """

    what: str
    source: str
    quantized: bool
    ms: float
    batches: tuple[int, ...]
    context: int
    model: str = "Qwen3-14B"


PUBLISHED = (
    Published("pypto-serving: ITL, batch 1, asynchronous", SEEN, False, 28.8, (1,), 1024),
    Published("pypto-serving: TPOT, prompt 3338, capacity 16", SEEN, False, 36.3, (1, 16), 3338),
    Published("pypto-lib: a step, batch 16, contexts 3338 to 3358", f"[#795]({LIB}/795)", False, 37.7, (16,), 3348),
    Published("pypto-lib: a token in A8W8, 48 tokens", f"[#810]({LIB}/810)", True, 42.0, (1,), 48),
    Published("vllm-ascend, ACL graph: TPOT, 1 request", f"[#5228]({VLLM}/5228)", False, 27.75, (1,), 1024,
              "Qwen3-VL-8B"),
    Published("xlite: TPOT, 1 request", f"[#5228]({VLLM}/5228)", False, 11.44, (1,), 1024, "Qwen3-VL-8B"),
    Published("vllm-ascend, ACL graph: TPOT, 16 requests", f"[#5228]({VLLM}/5228)", False, 48.24, (16,), 1024,
              "Qwen3-VL-8B"),
    Published("xlite: TPOT, 16 requests", f"[#5228]({VLLM}/5228)", False, 15.09, (16,), 1024, "Qwen3-VL-8B"))
MODELS = {"Qwen3-14B": QWEN3_14B, "Qwen3-VL-8B": QWEN3_8B}
FORMATS = {"bf16": False, "w8a8": True}
LAUNCHES = {"bf16": (12, 19), "w8a8": (13, 20)}
"""Format -> operators of a greedy decode step: for each layer, and besides the layers. A profile of the emulated NPU
counts them (tests/e2e/emulated/test_profile.py)."""
HYBRID_LAUNCHES = {"bf16": (24, 15, 24), "w8a8": (28, 17, 24)}
"""Format -> operators of a greedy decode step of one row of a hybrid: for each layer of linear attention, for each
layer of attention, and besides the layers (tests/npu/backends/ascend/test_hybrid.py)."""
MIXTURES = {"Qwen3-30B-A3B": QWEN3_30B_A3B, "Qwen3.5-35B-A3B": QWEN3_5_35B_A3B}
MIXTURE_LAUNCHES = {
    "Qwen3-30B-A3B": {"bf16": (0, 16, 21), "w8a8": (0, 16, 22)},
    "Qwen3.5-35B-A3B": {"bf16": (34, 25, 26), "w8a8": (37, 26, 26)}}
"""The same for mixtures of experts, by model (tests/npu/backends/ascend/test_experts.py). Qwen3.5 has a shared expert,
and the counters of experts take 2 operators of a step."""
EVENT_TASKS = 2
"""Further tasks of each layer: attention waits for the event of its lengths, and resets it."""
ATTENTION_SECONDS = 21e-6
"""Time of a call of fused attention besides its reads: what a profile of another server on an A2 shows for short
contexts, of which the reads are 3 us."""
SHARES, GAPS = (0.9, 0.7), (1e-6, 3e-6)
"""Assumptions of the prediction, best and worst: share of the bandwidth that kernels reach, and seconds between two
tasks of a graph."""
ARGMAX_LAUNCHES = 7
SAMPLER_LAUNCHES = {"NONE": 41, "SMALL_TOP_K": 46, "ANY": 60}
"""Operators of the argmax, and of `Sampler.sample_fixed` for each of `Filters`, as the emulated NPU captures them
(tests/npu/backends/ascend/test_launches.py)."""
SORT_BYTES = 24
"""Least bytes for each logit of `npu_top_k_top_p`: a sort reads a float32 and writes it with an int32 index. A filter
reads both and writes a float32."""
CONTEXTS = (1024, 8192)
BANDWIDTH = 1.6e12
"""Bytes a second of an Ascend A2's memory."""


@dataclass(frozen=True, slots=True)
class Design:
    """Design of captures.

    of_rows, of_tokens: graphs with a decoder for each bucket of decode rows, and for each bucket of tokens.
    heads: graphs without a decoder for each bucket of decode rows.
    samplers: graphs with a sampler for each bucket of decode rows, and of tokens. There are three, see `Filters`; steps
        with chunks have the two with filters.
    replays: of a greedy step, a sampled one, and the two with a chunk.
    """

    name: str
    of_rows: int
    of_tokens: int
    heads: int
    samplers: tuple[int, int]
    replays: tuple[int, int, int, int]


DESIGNS = (
    Design("A: with argmax, and with each sampler", 4, 3, 0, (3, 2), (1, 1, 1, 1)),
    Design("B: always with a sampler", 3, 2, 0, (3, 2), (1, 1, 1, 1)),
    Design("C: decoder; shared heads", 1, 1, 4, (3, 0), (2, 2, 2, 2)),
    Design("D: decoder, logits and argmax; shared samplers", 1, 1, 3, (3, 0), (1, 2, 1, 2)),
    Design("E: A for decode rows, C for chunks", 4, 1, 4, (6, 0), (1, 1, 2, 2)))


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
    model = MetaModel(replace(config, quantization=w8a8 if quantized else None), torch.bfloat16,
                      vocabulary_tile=CAPABILITIES.vocabulary_tile, int8_levels=CAPABILITIES.int8_levels,
                      block_size=CAPABILITIES.block_size)
    weights = model.weights
    linear = nbytes(*(w.weight for x in weights.attention_layers() for w in x.linears))
    token = nbytes(*model.states) // CAPABILITIES.block_size
    return Step(model.costs([(1, context)] * rows, rows), linear + nbytes(weights.lm_head.weight),
                rows * context * token)


@dataclass(frozen=True, slots=True)
class HybridStep:
    """Bytes of a decode step of a hybrid or a mixture: weights of products, keys and values, fixed states, and all.

    weights: of all products, also of experts that no token chooses.
    """

    weights: int
    cache: int
    states: int
    nbytes: int


def decode_hybrid(config: ModelConfig, rows: int, context: int, quantized: bool) -> HybridStep:
    """Return the bytes of a greedy step of `rows` requests with `context` tokens each and states in bfloat16."""
    floats = "lm_head", "re:.*in_proj_[ab]$", "re:.*shared_expert_gate$"
    w8a8 = Quantization((((LINEAR,), W8A8()),), ignore=floats)
    model = MetaModel(replace(config, quantization=w8a8 if quantized else None, stacks=CAPABILITIES.stacks),
                      torch.bfloat16, vocabulary_tile=CAPABILITIES.vocabulary_tile,
                      int8_levels=CAPABILITIES.int8_levels, block_size=CAPABILITIES.block_size,
                      state_dtype=torch.bfloat16)
    linears = [part.weight for block in model.weights.blocks for part in block.weights if isinstance(part, Linear)]
    paged = [state for state in model.states if isinstance(state, KeysAndValues)]
    fixed = [state for state in model.states if isinstance(state, Slots)]
    costs = model.costs([(1, context)] * rows, rows)
    return HybridStep(
        nbytes(*linears, model.weights.lm_head.weight),
        rows * context * nbytes(*(tensor for state in paged for tensor in state)) // CAPABILITIES.block_size,
        2 * rows * nbytes(*(tensor for state in fixed for tensor in state)),
        sum(c.nbytes for calls in costs.values() for c in calls))


class Traffic(TorchDispatchMode):
    """Bytes that the called operators read and write. Views count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            chosen = "index" in func.__name__  # reads the chosen rows of a table, not the whole
            self.nbytes += nbytes(*tree_leaves(made)) + nbytes(*(tree_leaves(made) if chosen else tree_leaves(args)))
        return made


def sampler(config: ModelConfig, rows: int) -> int:
    """Return the bytes of `Sampler.sample_fixed` for rows of logits, without `npu_top_k_top_p`."""
    vocabulary = config.vocab_size

    def of_rows(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(rows, dtype=dtype, device="meta")

    tables = [torch.empty(rows + 1, vocabulary, dtype=dtype, device="meta") for dtype in (torch.bool, torch.int32)]
    logits, slots = torch.empty(rows, vocabulary, dtype=torch.bfloat16, device="meta"), of_rows(torch.int64)
    penalize, sample = (KERNELS[name].implementations[ascend.LABEL].function for name in ("penalize", "sample"))
    with Traffic() as traffic:
        scores = logits.to(torch.float32)
        penalize(scores, *(each.index_select(0, slots) for each in tables), *(of_rows() for _ in range(3)))
        sample(scores, vocabulary, of_rows(), of_rows(torch.int32), *(of_rows() for _ in range(3)), Filters.NONE)
    return traffic.nbytes


def captures(config: ModelConfig, batches: Sequence[int], bandwidth: float) -> str:
    """Return the tables of the designs of captures and of the sampler, as Markdown."""
    rows = []
    for batch in batches:
        unsorted, values = sampler(config, batch), batch * config.vocab_size
        sort = SORT_BYTES * values
        head = decode(config, batch, 1, False).costs["linear_argmax"][0].nbytes
        logits = 2 * 2 * values
        rows.append([str(batch), *(f"{part / 1e6:,.0f} / {milliseconds(part, bandwidth):.3f}"
                                   for part in (unsorted, sort, unsorted + sort, logits, head))])
    made = table(["batch", "sampler without filter, MB / ms", "filter, at least",
                  "sampler", "copy of logits", "LM head"], rows)
    buckets = len(default_buckets(batches[-1]))
    chunks = len(range(TOKEN_BUCKET, MAX_TOKENS, TOKEN_BUCKET)) + 1
    of_layer, others = LAUNCHES["bf16"]
    decoder = of_layer * config.num_layers + others
    lines = []
    for each in DESIGNS:
        large = each.of_rows * buckets + each.of_tokens * chunks
        of_all = sum(SAMPLER_LAUNCHES.values())
        samplers = each.samplers[0] * buckets * of_all // 3
        samplers += each.samplers[1] * chunks * (of_all - SAMPLER_LAUNCHES["NONE"]) // 2
        lines.append([each.name, str(large + each.heads * buckets), str(large),
                      f"{large * decoder + samplers:,}", *map(str, each.replays)])
    return made + "\n" + table(
        ["design", "graphs", "with a decoder", "operators in graphs", "replays: greedy", "sampled", "chunk, greedy",
         "chunk, sampled"], lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)) + "\n"


def milliseconds(nbytes: int, bandwidth: float) -> float:
    return nbytes / bandwidth * 1e3


def predicted(nbytes: int, tasks: int, layers: int, bandwidth: float) -> tuple[float, float]:
    """Return the best and the worst prediction of a step in ms.

    tasks: operators and waits of its graph. layers: calls of attention.
    """
    best, worst = (milliseconds(nbytes, share * bandwidth) + (tasks * gap + layers * ATTENTION_SECONDS) * 1e3
                   for share, gap in zip(SHARES, GAPS, strict=True))
    return best, worst


def page(config: ModelConfig, batches: Sequence[int], context: int, bandwidth: float) -> str:
    """Return the floor's tables as Markdown."""

    def ms(nbytes: int) -> float:
        return milliseconds(nbytes, bandwidth)

    steps = {(name, rows): decode(config, rows, context, quantized)
             for name, quantized in FORMATS.items() for rows in batches}
    whole = [[name, str(rows), f"{s.weights / 1e9:.2f}", f"{s.cache / 1e9:.2f}",
              f"{(s.nbytes - s.weights - s.cache) / 1e9:.2f}", f"{s.nbytes / 1e9:.2f}", f"{ms(s.nbytes):.1f}",
              f"{rows / ms(s.nbytes) * 1e3:.0f}", f"{s.operations / s.nbytes * bandwidth / 1e12:.1f}"]
             for (name, rows), s in steps.items()]
    text = [table(["format", "batch", "weights GB", "keys, values GB", "else GB", "in all GB", "floor ms", "tokens/s",
                   "TFLOP/s at the floor"], whole)]
    for name in FORMATS:
        first = steps[name, batches[0]]
        rows = [[kernel, str(len(calls))] + [f"{sum(c.nbytes for c in steps[name, n].costs[kernel]) / 1e6:,.1f} / "
                                             f"{ms(sum(c.nbytes for c in steps[name, n].costs[kernel])):.3f}"
                                             for n in batches] for kernel, calls in first.costs.items()]
        text.append(table([f"kernel, {name}", "calls", *(f"MB / ms at {n}" for n in batches)], rows))
    return "\n".join(text)


def prediction(config: ModelConfig, batches: Sequence[int], contexts: Sequence[int], bandwidth: float) -> str:
    """Return the table of predicted times as Markdown."""
    rows = []
    for name, quantized in FORMATS.items():
        of_layer, others = LAUNCHES[name]
        tasks = (of_layer + EVENT_TASKS) * config.num_layers + others
        for context in contexts:
            for batch in batches:
                step = decode(config, batch, context, quantized)
                best, worst = predicted(step.nbytes, tasks, config.num_layers, bandwidth)
                rows.append([name, str(batch), str(context), str(tasks), f"{step.nbytes / 1e9:.1f}",
                             f"{milliseconds(step.nbytes, bandwidth):.1f}", f"{best:.1f} – {worst:.1f}"])
    return table(["format", "batch", "context", "tasks", "GB", "floor ms", "predicted TPOT ms"], rows)


def hybrid_prediction(
    config: ModelConfig, batches: Sequence[int], contexts: Sequence[int], bandwidth: float
) -> str:
    """Return the table of a hybrid's floor and predicted times as Markdown."""
    attention = sum(isinstance(layer.state, Paged) for layer in config.local_layers)
    linear = config.num_layers - attention
    rows = []
    for name, quantized in FORMATS.items():
        of_linear, of_attention, others = HYBRID_LAUNCHES[name]
        tasks = linear * of_linear + attention * (of_attention + EVENT_TASKS) + others
        for context in contexts:
            for batch in batches:
                step = decode_hybrid(config, batch, context, quantized)
                best, worst = predicted(step.nbytes, tasks, attention, bandwidth)
                rows.append([name, str(batch), str(context), str(tasks), f"{step.weights / 1e9:.1f}",
                             f"{step.cache / 1e9:.2f}", f"{step.states / 1e9:.2f}", f"{step.nbytes / 1e9:.1f}",
                             f"{milliseconds(step.nbytes, bandwidth):.1f}", f"{best:.1f} – {worst:.1f}"])
    return table(["format", "batch", "context", "tasks", "weights GB", "keys, values GB", "states GB", "in all GB",
                  "floor ms", "predicted TPOT ms"], rows)


def mixture_prediction(batches: Sequence[int], context: int, bandwidth: float) -> str:
    """Return the table of the floors and predicted times of mixtures of experts as Markdown."""
    rows = []
    for model, data in MIXTURES.items():
        config = ModelConfig.from_dict(data)
        experts = next(layer for layer in config.local_layers if isinstance(layer, Experts))
        attention = sum(isinstance(layer.state, Paged) for layer in config.local_layers)
        linear = config.num_layers - attention
        for name, quantized in FORMATS.items():
            of_linear, of_attention, others = MIXTURE_LAUNCHES[model][name]
            tasks = linear * of_linear + attention * (of_attention + EVENT_TASKS) + others
            for batch in batches:
                step = decode_hybrid(config, batch, context, quantized)
                best, worst = predicted(step.nbytes, tasks, attention, bandwidth)
                distinct = distinct_experts(batch, experts.top_k, experts.count, experts.count)
                rows.append([model, name, str(batch), str(tasks), f"{step.weights / 1e9:.1f}",
                             f"{distinct:.0f} of {experts.count}", f"{step.nbytes / 1e9:.1f}",
                             f"{milliseconds(step.nbytes, bandwidth):.1f}", f"{best:.1f} – {worst:.1f}"])
    return table(["model", "format", "batch", "tasks", "weights GB", "experts read", "read, written GB", "floor ms",
                  "predicted TPOT ms"], rows)


def comparison(bandwidth: float) -> str:
    """Return the table of published figures as Markdown."""
    rows = []
    for each in PUBLISHED:
        config = ModelConfig.from_dict(MODELS[each.model])
        floors = [milliseconds(decode(config, n, each.context, each.quantized).nbytes, bandwidth)
                  for n in each.batches]
        rows.append([each.what, each.model, "w8a8" if each.quantized else "bf16", each.source, f"{each.ms:g}",
                     " – ".join(f"{floor:.1f}" for floor in floors),
                     " – ".join(f"{each.ms / floor:.2f}" for floor in floors)])
    return table(["published", "model", "format", "source", "ms", "floor ms", "times the floor"], rows)


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
the card's peak. `linear_argmax` is the LM head with the argmax.
"""
PREDICTION = f"""## Prediction

Tasks are the operators of a greedy step, as a [profile](profiling.md) of the emulated NPU counts them, and
{EVENT_TASKS} more in each layer: attention waits for the event of its lengths, and resets it. The prediction adds three
assumptions to the floor: kernels reach {SHARES[0]:.0%} to {SHARES[1]:.0%} of the bandwidth,
{GAPS[0] * 1e6:g} to {GAPS[1] * 1e6:g} µs pass between two tasks of a graph, and a call of attention takes
{ATTENTION_SECONDS * 1e6:g} µs besides its reads. None was measured here. The host's work is assumed to be hidden behind
the device. 64 rows of 8192 tokens have 86 GB of keys and values, more than one card's memory.

Published figures of others lie between 1.2 times the floor (xlite) and 2.9 times (vllm-ascend's graphs, a smaller
model). So the worse half of the band is the likelier one: 24 to 30 ms in bfloat16 and 14 to 20 ms in W8A8 at batch 1.
20 ms in bfloat16 would need all of these:

- kernels at 95% of the bandwidth, which saves 1.0 ms of the better end;
- constant lengths in attention, for which an operator must read them from device memory: {EVENT_TASKS} tasks a layer
  less, 0.1 to 0.2 ms;
- the Triton kernel for norms, rotation and cache write (3 operators a layer less, 0.1 to 0.4 ms);
- an attention kernel without the fixed 21 µs (0.8 ms), as xlite has;
- an LM head in int8 (`--lm-head-dtype int8`: 0.5 ms).
"""
CAPTURES = f"""## Captures

A decode step ends with an argmax of {ARGMAX_LAUNCHES} operators, or with one of three
[samplers](ascend.md#sampling): {SAMPLER_LAUNCHES["NONE"]} operators for rows without top_k and top_p,
{SAMPLER_LAUNCHES["SMALL_TOP_K"]} where each row has a top_k of at most 1,024 or neither, {SAMPLER_LAUNCHES["ANY"]} for
any rows. The first table has the bytes and times of what a design adds to a step: an operator reads its arguments and
writes its results once. The filter is counted with the least that any sort reads and writes, so it takes longer. The
second table has the graphs of five designs, with the default buckets for 64 rows and chunks of up to 512 tokens.
"""
DECISION = f"""**A is what is built.** It adds nothing to a step of decode rows, and every step is one replay. Its
price is more graphs at the start, and streams. All graphs share one memory pool. A device has 2,048 streams.
vllm-ascend uses [up to 1,800](https://github.com/vllm-project/vllm-ascend/issues/8585), one for each graph without
communication.

- The operator `npu_top_k_top_p` has a cost that no count of bytes shows. It sorts all logits, and then writes each
  token that it keeps by a scalar instruction
  ([source](https://github.com/hicann/ops-nn/blob/e5c3fa932/index/apply_top_k_top_p_with_sorted/op_api/aclnn_apply_top_k_top_p.cpp)).
  It took 0.24 ms with a top_k of 50 and [22 ms](https://github.com/vllm-project/vllm-ascend/pull/12232) with the
  vocabulary's size, whatever other rows have. Where rows have a large top_k, or top_p alone, a sort with a mask took
  [1 to 1.8 ms](https://github.com/vllm-project/vllm-ascend/pull/13842). So rows that do not need the operator pass
  through it with a top_k of 1, and a step with a row that would be slow has the sort. Rows without filters have
  neither.
- A step with chunks has LM head and sampler for the {MAX_CHOSEN} first rows that yield a token, or `max_num_seqs` if
  that is less, also where fewer do. That is the last line of the first table: 1.0 ms for a greedy step, 2.5 ms for a
  sampled one, in a step of 64 to 512 tokens, once for each chunk of a prompt. A step with more such rows has LM head
  and sampler kernel by kernel.
- B has a graph less for each bucket, but each greedy step runs a sampler. At 1, 16 and 64 rows that takes at least
  0.06, 0.4 and 1.6 ms with the launches: 0.4%, 2% and 6% of a step in bfloat16, 0.7%, 4% and 10% in W8A8. What was
  captured runs for all rows, also where none needs it.
- `npu_top_k_top_p_sample` skips rows without filters, but it ignores a `top_k` above
  [1,024](https://github.com/Ascend/op-plugin/blob/517f2e7d/docs/zh/custom_APIs/torch_npu/torch_npu-npu_top_k_top_p_sample.md).
- C and D have a second replay in each sampled step, the default of requests. A replay takes a launch by the host and
  the start of a graph on the device, whose time was not measured. D also copies the logits, and reads the LM head for
  chunks that yield no token.
- E chooses as many rows of a step with chunks as yield a token, in a second replay.

Fewer `decode_buckets` have a larger effect: with 1,4,16,64 A has 40 graphs.
"""
HYBRID = """## Qwen3.5-27B

The same for Qwen3.5, 3.6 and 3.8 with 27 billion parameters: 48 of 64 layers are linear attention, whose states are
read and written in each step, in bfloat16. W8A8 leaves in_proj_a, in_proj_b and the LM head in bfloat16. A layer of
linear attention has more tasks than one of attention, since its convolution is computed by shifted products
([ascend-audit.md](ascend-audit.md#linear-attention)). With triton-ascend it has 12 tasks less, 576 in all, and a layer
of attention 3 less.
"""
HYBRID_COMPARISON = """Published for this size, on other cards and with drafts, so none is a row of the table: 32 ms a
token at 4 streams of 8K for W8A8 with MTP on 910B4, TP4 × 2 (vllm-ascend, Alauda), and 50 ms at 54 streams for W8A8
with MTP on an A3 card (SGLang's CI). 16 and 64 requests of 65,536 tokens have 69 and 275 GB of keys and values, more
than one card's memory.

**With MTP**, by the same rates, on one die in W8A8 at one stream of 8K and depth 3: a draft reads the LM head (2.5 GB
in bfloat16) and the head's layer and input (0.85 GB), so three add 6.4 ms to the floor of 17.3 ms. A step is then
predicted to take 29 – 42 ms, since the verified tokens read the same weights. With acceptance p it yields
1 + p + p² + p³ tokens:

| acceptance of each draft | tokens a step | predicted TPOT ms | with an LM head for drafts in int8 |
| --- | --- | --- | --- |
| 0.6 | 2.18 | 13.4 – 19.2 | 12.1 – 17.2 |
| 0.8 | 2.95 | 9.9 – 14.2 | 8.9 – 12.7 |
| 0.9 | 3.44 | 8.5 – 12.1 | 7.7 – 10.9 |

The published 32 ms are those of 4 streams on groups of four cards. An LM head in int8 for drafts is built for the CPU
alone. Tokens that a recurrent state computes twice after a wrong draft are not counted.
"""
MIXTURE = """## Mixtures of experts

Of the experts a step reads those that its tokens choose: here as many as are expected if each token chooses at random.
A layer of experts has 4 tasks more than a dense MLP in bfloat16 and 2 more in W8A8, and a shared expert 6 or 7 more
([launches](ascend-audit.md#mixtures-of-experts)). At one row the tasks and attention's fixed time are most of the
prediction. The context is 1024 tokens. Router, shared_expert_gate and LM head stay in bfloat16; the router is
multiplied in float32.
"""
MIXTURE_COMPARISON = """Published: Qwen3-30B-A3B takes 20 ms a token at one request, as long as Qwen3-4B
([vllm-ascend#4656](https://github.com/vllm-project/vllm-ascend/issues/4656)); in W8A8 with drafts (EAGLE-3) on an A3
card 10 ms at one stream and 50 ms at 160 (SGLang). Qwen3.6-35B-A3B in W8A8 with drafts takes 50 ms at 122 streams on an
A3 card (SGLang's CI). An A3 card is two dies, and drafts give more than one token a step, so none is a row of the
table.
"""
COMPARISON = """## Published figures

They are compared with the floor of a step at their batch and context: batches of 1 and of 16 where up to 16 requests
ran, and a context of 1024 where none was published. Qwen3-VL-8B ran on an Ascend 910B3; its floor is that of its text
model. xlite, at 1.2 times the floor, is near the better end of the prediction. The two figures without a link were read
in pypto-serving's repository, and their page was not found again. For three more figures that are ascribed to
pypto-serving, a TPOT of 48.9 ms that became 47.5 ms and a TTFT of 6.05 s, no public source was found on 2026-11-25.
Their model, batch and context are unknown, so they are not compared.
"""


def default_page() -> str:
    config, batches = ModelConfig.from_dict(QWEN3_14B), (1, 16, 64)
    return "\n".join((
        INTRODUCTION, page(config, batches, CONTEXTS[0], BANDWIDTH), PREDICTION,
        prediction(config, batches, CONTEXTS, BANDWIDTH), CAPTURES, captures(config, batches, BANDWIDTH), DECISION,
        COMPARISON, comparison(BANDWIDTH), HYBRID,
        hybrid_prediction(ModelConfig.from_dict(QWEN3_5_27B), batches, (*CONTEXTS, 65536), BANDWIDTH),
        HYBRID_COMPARISON, MIXTURE, mixture_prediction(batches, CONTEXTS[0], BANDWIDTH), MIXTURE_COMPARISON))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder with config.json (default: Qwen3-14B's numbers)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=1024, help="tokens of each row (default: %(default)s)")
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH, help="bytes/s (default: %(default)s)")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if min(*args.batch, args.context) < 1 or args.bandwidth <= 0:
        parser.error("--batch, --context and --bandwidth must be above 0")
    if args.write:
        PAGE.write_text(default_page())
        return
    config = ModelConfig.from_folder(args.model) if args.model else ModelConfig.from_dict(QWEN3_14B)
    print(page(config, args.batch, args.context, args.bandwidth))
    print(prediction(config, args.batch, [args.context], args.bandwidth), end="")
    if not args.model:
        print("\n" + comparison(args.bandwidth), end="")


if __name__ == "__main__":
    main()
