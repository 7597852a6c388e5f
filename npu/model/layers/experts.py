"""Mixture of experts: SwiGLU MLPs of which a router chooses a few for each token (kernels/experts.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from npuserve.npu.model.layers.layer import Array, Counts, Inputs, Layer, Matrix, Parameters
from npuserve.npu.model.layers.shard import DivisionError, Rows, Shard, Span

if TYPE_CHECKING:
    from torch import Tensor

    from npuserve.kernels.layer import Linear

PANEL = 16
"""The columns of an expert on a rank must be a multiple of this: its weights are whole panels of the kernels."""

STACKED_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Tensor of a checkpoint that stacks the experts -> matrices of each expert in it, by rows."""


class ExpertsWeights(NamedTuple):
    """Weights of E experts for hidden size H, intermediate size I, and intermediate size S of the shared expert.

    router [E, H].
    gate_up [E * 2 I, H], down [E * H, I]: all experts, one after the other.
    shared_gate_up [2 S, H], shared_down [H, S], shared_gate [1, H]: None for a layer without.
    """

    router: Tensor
    gate_up: Linear
    down: Linear
    shared_gate_up: Linear | None = None
    shared_down: Linear | None = None
    shared_gate: Linear | None = None


@dataclass(frozen=True, slots=True)
class Experts(Layer):
    """MLP of `count` experts, of which `top_k` compute each token.

    hidden: size of the hidden states.
    width: intermediate size of an expert.
    renormalize: the weights of the chosen experts are divided by their sum.
    shared_width: intermediate size of an expert that computes every token; 0 without. A gate weighs its output.
    stacked: the checkpoint has the experts' weights in one tensor.
    held: experts whose weights a rank has; None for all.
    """

    count: int
    top_k: int
    hidden: int
    width: int
    renormalize: bool
    shared_width: int = 0
    stacked: bool = False
    held: Span | None = None

    weights: ClassVar[type] = ExpertsWeights

    def parameters(self, hidden: int, shard: Shard) -> Parameters:
        everything = Span.all(hidden)
        rows = Span.all(self.width) if shard.whole_experts else shard.part(self.width)
        held = shard.part(self.count) if shard.whole_experts else Span.all(self.count)
        experts = range(held.first, held.first + held.size)
        parameters: Parameters = {"router": Array("gate.weight", Span.all(self.count), (hidden,))}
        if self.stacked:
            halves = ((part * self.width + rows.first, rows.size) for part in range(2))
            gate_up = Rows.of_units(held, 2 * self.width, *halves, by_unit=True)
            parameters |= {
                "gate_up": Matrix({"experts.gate_up_proj": gate_up}, everything, stacked=self.count),
                "down": Matrix({"experts.down_proj": held.times(hidden)}, rows, stacked=self.count)}
        else:
            parameters |= {
                "gate_up": Matrix({f"experts.{expert}.{name}_proj": rows for expert in experts
                                   for name in ("gate", "up")}, everything),
                "down": Matrix({f"experts.{expert}.down_proj": everything for expert in experts}, rows)}
        if self.shared_width:
            shared = shard.part(self.shared_width)
            parameters |= {
                "shared_gate_up": Matrix(
                    {f"shared_expert.{name}_proj": shared for name in ("gate", "up")}, everything),
                "shared_down": Matrix({"shared_expert.down_proj": everything}, shared),
                "shared_gate": Matrix({"shared_expert_gate": Span.all(1)}, everything, can_quantize=False)}
        return parameters

    def local(self, shard: Shard) -> Experts:
        ranks = shard.size
        if shard.whole_experts and self.count % ranks:
            raise DivisionError(f"expert_parallel: {ranks} ranks do not divide the model's {self.count} experts")
        for what, width in (("columns of an expert", self.width), ("columns of the shared expert", self.shared_width)):
            if width % ranks and not (shard.whole_experts and width == self.width):
                raise DivisionError(f"tensor_parallel_size: {ranks} does not divide the model's {width} {what}")
        if shard.whole_experts:
            return replace(self, held=shard.part(self.count), shared_width=self.shared_width // ranks)
        if self.width // ranks % PANEL:
            raise DivisionError(f"tensor_parallel_size: {ranks} leaves a rank {self.width // ranks} of the model's "
                                f"{self.width} columns of an expert; supported: a multiple of {PANEL}")
        return replace(self, width=self.width // ranks, shared_width=self.shared_width // ranks)

    @property
    def by_expert(self) -> tuple[str, ...]:
        """Fields of the weights of which a step reads the chosen experts only."""
        return "gate_up", "down"

    @property
    def held_count(self) -> int:
        """Experts whose weights a rank has."""
        return self.held.size if self.held else self.count

    def experts_of(self, field: str) -> int:
        return self.held_count if field in self.by_expert else 0

    @property
    def reads_float32(self) -> bool:
        return True

    @property
    def parameters_of_expert(self) -> int:
        """Parameters of one expert: its gate, up and down projections."""
        return 3 * self.hidden * self.width

    @property
    def idle_parameters(self) -> int:
        """Parameters of the experts that are not chosen for a token."""
        return (self.count - self.top_k) * self.parameters_of_expert

    @property
    def kernels(self) -> tuple[str, ...]:
        return "route_experts", "experts_swiglu", "experts_sum"

    @property
    def state(self) -> Counts:
        return Counts(self.held_count)

    def forward(self, x: Tensor, weights: ExpertsWeights, state: Tensor | None, inputs: Inputs) -> Tensor:
        """Compute the layer, and add the tokens of each expert to `state` [E], or to `Inputs.uncounted`."""
        k, w = inputs.kernels, weights
        held = self.held or Span.all(self.count)
        counters = state if inputs.uncounted is None else None
        routing = k.route_experts(x, w.router, self.top_k, self.renormalize, held.first, held.size, counters)
        gated = k.experts_swiglu(x, w.gate_up.weight, routing, w.down.inputs)
        if inputs.uncounted is not None:
            inputs.uncounted.append(routing.tokens)
        shared = gate = None
        if w.shared_gate_up is not None and w.shared_down is not None and w.shared_gate is not None:
            of_shared = k.linear_swiglu(x, w.shared_gate_up.weight, w.shared_gate_up.bias, w.shared_down.inputs)
            shared = k.linear(of_shared, w.shared_down.weight, w.shared_down.bias)
            gate = k.linear(x, w.shared_gate.weight, w.shared_gate.bias)
        return k.experts_sum(gated, w.down.weight, routing, shared, gate)

    @property
    def output_width(self) -> int:
        rows = results = self.hidden  # of each chosen expert
        gated = quantized = self.width
        by_expert = self.top_k * (rows + results + gated + quantized)
        # The shared expert's gate, up and gated values; its result, and the sum with the others.
        shared = 3 * self.shared_width + 2 * self.hidden if self.shared_width else 0
        # A number of 32 bits counts as two elements: logits, and at most four of an expert's place and weight.
        router = 2 * (self.count + 4 * self.top_k)
        return by_expert + shared + router

    def golden_elements(self, tokens: int, context: int) -> int:
        rows = results = weighted = self.hidden  # of each chosen expert
        gate_up = 2 * self.width
        activated = gated = self.width
        by_expert = self.top_k * (rows + results + weighted + gate_up + activated + gated)
        shared = 4 * self.shared_width  # as SwiGLU.golden_elements
        router = 4 * self.count  # logits and their softmax, in 32 bits
        return tokens * (by_expert + shared + router) + self.parameters_of_expert
