"""Floor of a step: the bytes that its kernels have to read and write, each byte once.

The decoder (npu/execution/decoder.py) runs on tensors without memory; kernels/bench/costs.py gives the cost of each
call. Weights count in the dtype of the checkpoint, also where a device stores them compact.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from npuserve.kernels.attention import AttentionMetadata
from npuserve.kernels.bench.costs import Cost, cost
from npuserve.kernels.kv_cache import LARGEST, Cache
from npuserve.kernels.quantized import Quantized, Scheme
from npuserve.kernels.routing import Routing
from npuserve.kernels.weight import Weight
from npuserve.npu.execution.decoder import Model
from npuserve.npu.execution.in_flight import StepRecord
from npuserve.npu.execution.state_store import KeysAndValues, LayerState, Slots, StateStore
from npuserve.npu.model.allocation import allocate_meta
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.layers.layer import Fixed, Paged, State
from npuserve.npu.model.weights import ModelWeights

Costs = dict[str, list[Cost]]
"""Kernel -> cost of each call."""
OF_EXPERTS = "experts_swiglu", "experts_sum"
"""Kernels that multiply by experts."""

LM_HEAD = "linear_argmax"
"""Kernel of the LM head here. Steps with sampling parameters call `linear` for it."""


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor without memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


@dataclass(slots=True)
class CostRecorder:
    """Kernels that record their costs and return tensors of the right shape. dtype: of the activations."""

    dtype: torch.dtype
    labels: dict[str, str] = field(default_factory=dict)
    costs: Costs = field(default_factory=lambda: defaultdict(list))

    def _record(self, name: str, *args: Any) -> None:
        self.costs[name].append(cost(name, args))

    def _output(self, shape: Sequence[int], scheme: Scheme | None) -> Tensor | Quantized:
        if scheme is None:
            return meta(*shape, dtype=self.dtype)
        return Quantized(meta(*shape, dtype=scheme.dtype), meta(*scheme.scale_shape(*shape), dtype=torch.float32))

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        self._record("embedding", ids, table)
        return meta(len(ids), table.shape[1], dtype=self.dtype)

    def rms_norm(self, x: Tensor, gamma: Tensor, eps: float, scheme: Scheme | None = None) -> Tensor | Quantized:
        self._record("rms_norm", x, gamma, eps, scheme)
        return self._output(x.shape, scheme)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, gamma: Tensor, eps: float, scheme: Scheme | None = None,
        widens: bool = False,
    ) -> tuple[Tensor | Quantized, Tensor]:
        self._record("add_rms_norm", x, residual, gamma, eps, scheme)
        return self._output(x.shape, scheme), residual

    def linear(self, x: Tensor | Quantized, weight: Weight, bias: Tensor | None) -> Tensor:
        self._record("linear", x, weight, bias)
        return meta(len(x), weight.shape[0], dtype=self.dtype)

    def linear_swiglu(
        self, x: Tensor | Quantized, weight: Weight, bias: Tensor | None, scheme: Scheme | None = None
    ) -> Tensor | Quantized:
        self._record("linear_swiglu", x, weight, bias, scheme)
        return self._output((len(x), weight.shape[0] // 2), scheme)

    def qk_norm_rope_kv_write(self, qkv: Tensor, *args: Any) -> Tensor:
        self._record("qk_norm_rope_kv_write", qkv, *args)
        *_, keys, _, heads = args
        head_dim = (keys.values if isinstance(keys, Quantized) else keys).shape[-1]
        return meta(len(qkv), heads, head_dim, dtype=self.dtype)

    def paged_attention(self, q: Tensor, *args: Any) -> Tensor:
        self._record("paged_attention", q, *args)
        return q.flatten(1)

    def route_experts(
        self, x: Tensor, weight: Tensor, top_k: int, renormalize: bool, first: int, count: int,
        tokens: Tensor | None = None,
    ) -> Routing:
        self._record("route_experts", x, weight, top_k, renormalize, first, count, tokens)
        return Routing(meta(len(x), top_k, dtype=torch.float32), meta(len(x), top_k, dtype=torch.int32),
                       meta(count + 1, dtype=torch.int32), len(weight))

    def experts_swiglu(
        self, x: Tensor, weight: Weight, routing: Routing, scheme: Scheme | None = None
    ) -> Tensor | Quantized:
        self._record("experts_swiglu", x, weight, routing, scheme)
        return self._output((routing.places.numel(), weight.shape[0] // routing.experts // 2), scheme)

    def experts_sum(self, x: Tensor | Quantized, weight: Weight, routing: Routing, *shared: Tensor | None) -> Tensor:
        self._record("experts_sum", x, weight, routing, *shared)
        return meta(len(routing.places), weight.shape[0] // routing.experts, dtype=self.dtype)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        self._record("sigmoid_gate", x, gate)
        return x

    def causal_conv_silu(self, x: Tensor, *args: Any) -> Tensor:
        self._record("causal_conv_silu", x, *args)
        return x

    def gated_delta_rule(self, qkv: Tensor, *args: Any) -> Tensor:
        self._record("gated_delta_rule", qkv, *args)
        state: Tensor = args[4]
        return meta(len(qkv), state.shape[1] * state.shape[3], dtype=self.dtype)

    def gated_rms_norm(self, x: Tensor, *args: Any) -> Tensor:
        self._record("gated_rms_norm", x, *args)
        return x

    def linear_argmax(self, x: Tensor, weight: Tensor, bias: Tensor | None, vocabulary: int) -> Tensor:
        self._record("linear_argmax", x, weight, bias, vocabulary)
        return meta(len(x), 1, dtype=torch.int64)


class MetaModel:
    """Model on tensors without memory.

    dtype: dtype of weights and activations.
    vocabulary_tile, int8_levels: see `Capabilities`.
    block_size: tokens of a KV-cache block.
    cache_dtype: `dtype`, or that of a quantized cache with scales of `scale_dtype`.
    state_dtype: of the states of linear attention.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, vocabulary_tile: int, int8_levels: float,
        block_size: int = 128, cache_dtype: torch.dtype | None = None, scale_dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
    ):
        self.config = config
        self._dtype = dtype
        self._block_size = block_size
        self._state_dtype = state_dtype
        self.weights: ModelWeights = allocate_meta(
            config, dtype, vocabulary_tile=vocabulary_tile, int8_levels=int8_levels).weights
        self.states = [self._meta_state(layer.state, cache_dtype, scale_dtype) for layer in config.local_layers]

    def _meta_state(self, state: State, cache_dtype: torch.dtype | None, scale_dtype: torch.dtype) -> LayerState:
        if isinstance(state, Fixed):
            return Slots(meta(1, *shape, dtype=self._dtype if name == "model" else self._state_dtype)
                         for shape, name in zip(state.shapes, state.dtypes, strict=True))
        if not isinstance(state, Paged):
            return None
        shape = 1, self._block_size, state.heads, state.head_dim
        cache: Cache = meta(*shape, dtype=self._dtype)
        if cache_dtype in LARGEST:
            cache = Quantized(meta(*shape, dtype=cache_dtype), meta(*shape[:3], dtype=scale_dtype))
        return KeysAndValues(cache, cache)

    def costs(
        self, rows: Sequence[tuple[int, int]], sampled: int, recorder: CostRecorder | None = None
    ) -> Costs:
        """Return the costs of one step.

        rows: (tokens, length of the context after the step) of each row.
        sampled: number of tokens that it samples, by argmax.
        recorder: records the calls; None for a new one.
        """
        recorder = recorder or CostRecorder(self._dtype)
        starts = [0]
        for tokens, _ in rows:
            starts.append(starts[-1] + tokens)
        contexts = [context for _, context in rows]
        blocks = -(-max(contexts) // self._block_size)
        metadata = AttentionMetadata(
            meta(len(rows), blocks, dtype=torch.int32), meta(len(rows), dtype=torch.int32),
            meta(len(rows) + 1, dtype=torch.int32), contexts, starts)
        ids = meta(starts[-1], dtype=torch.int64)
        kernels: Any = recorder
        batch: Any = SimpleNamespace(ids=ids, positions=ids, slot_mapping=ids, attention=metadata,
                                     state_slots=meta(len(rows), dtype=torch.int64))
        cos_sin = meta(self.config.context_length, self.config.rotary_dim, dtype=torch.float32)
        model = Model(self.config, self.weights, cos_sin, kernels)
        hidden = model.hidden(batch, StateStore(tuple(self.states)))
        if sampled:
            model.argmax(hidden[:sampled])
        return dict(recorder.costs)

    def nbytes(self, steps: Sequence[StepRecord]) -> dict[str, float]:
        """Return the bytes that all steps have to move, by kernel.

        The bytes of a step are a constant, for weights, plus terms that are linear in its tokens, its contexts, its
        rows, and the rows that continue a state. Those of the LM head are linear in the sampled tokens of steps that
        sample. Small steps give the factors. Experts are not linear: those that tokens share are read once.
        """
        first, longer, second = (self._bytes_of(rows) for rows in ([(1, 1)], [(2, 2)], [(1, 1), (1, 1)]))
        continued = self._bytes_of([(1, 2)])
        further = self._bytes_of([(1, 3)])
        moved: dict[str, float] = {}
        for kernel, value in first.items():
            if kernel in OF_EXPERTS:
                continue
            of_context = further[kernel] - continued[kernel]
            of_continued = continued[kernel] - value - of_context
            of_token = longer[kernel] - value - of_context
            of_row = second[kernel] - longer[kernel]
            constant = value - of_token - of_context - of_row
            moved[kernel] = sum(
                constant + of_token * step.tokens + of_context * step.context + of_row * step.rows
                + of_continued * step.continued for step in steps)
        for tokens, count in Counter(step.tokens for step in steps).items() if self.config.has_experts else ():
            of_step = self._bytes_of([(tokens, tokens)])
            for kernel in OF_EXPERTS:
                moved[kernel] = moved.get(kernel, 0) + count * of_step[kernel]
        if sampling := [step for step in steps if step.samples]:
            one_row, two_rows = (self._bytes_of([(2, 2)], samples)[LM_HEAD] for samples in (1, 2))
            moved[LM_HEAD] = sum(one_row + (two_rows - one_row) * (step.samples - 1) for step in sampling)
        return moved

    def _bytes_of(self, rows: Sequence[tuple[int, int]], samples: int = 0) -> dict[str, int]:
        """Return the bytes of one step by kernel, with the arguments of `costs`."""
        return {kernel: sum(each.nbytes for each in calls) for kernel, calls in self.costs(rows, samples).items()}
