"""Decoder layer in float32, with optional rounded projections, and the folding of factors into its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels.attention import AttentionMetadata
from npuserve.kernels.layer import Linear
from npuserve.kernels.norm import normalize
from npuserve.kernels.registry import GOLDEN, KernelSet
from npuserve.kernels.swiglu import swiglu
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.layers.layer import Array, Block, Fixed, Inputs, Paged, Smoothing
from npuserve.npu.model.layers.layer import Layer as MixerOrMlp
from npuserve.npu.model.layers.shard import WHOLE, Rows, Span
from npuserve.npu.quantize.rounding import Rounding


@dataclass(frozen=True, slots=True)
class SmoothMapping:
    """Layers that factors are folded into: the output of `before` is the input of each of `after`.

    block: index of the block.
    smoothing: how the outputs of `before` feed the columns of `after`.
    """

    before: str
    after: tuple[str, ...]
    block: int
    smoothing: Smoothing

    @property
    def is_norm(self) -> bool:
        """True if `before` is a norm."""
        return not self.smoothing.before


def mappings_of(blocks: Sequence[Block]) -> list[SmoothMapping]:
    """Return the mappings of a decoder layer, in the order of the blocks."""
    mappings = []
    for index, block in enumerate(blocks):
        for smoothing in block.layer.smoothings:
            before = f"{block.name}.{smoothing.before}" if smoothing.before else block.norm
            after = tuple(f"{block.name}.{name}" for name in smoothing.after)
            mappings.append(SmoothMapping(before, after, index, smoothing))
    return mappings


class Layer:
    """Decoder layer computed in float32 by golden kernels.

    blocks: the layer's blocks.
    weights: weights of the checkpoint, by name in the layer.
    dtypes: dtypes of the weights in the checkpoint.
    rounding: rounding of the weights and inputs of projections.
    cos_sin: [P, R] float32, as by `rope.cos_sin_table`.
    rounded: dequantized weights of the projections that are computed as `rounding` rounds them.
    input_power: `power` of the inputs of each projection, after the factors that were folded into it.
    power: sum over tokens of x_j^2 / mean(x^2); None if not recorded. The key is the first projection with input x.
    """

    def __init__(
        self, config: ModelConfig, index: int, weights: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype],
        cos_sin: Tensor, rounding: Rounding,
    ):
        self.blocks = config.layers[index]
        self.mappings = mappings_of(config.layers[index])
        self.weights = dict(weights)
        self.dtypes = dtypes
        self.cos_sin = cos_sin
        self.rounding = rounding
        self.rounded: dict[str, Tensor] = {}
        self.input_power: dict[str, Tensor] = {}
        self.power: dict[str, Tensor] | None = None
        self._config = config
        self._offset = 1.0 if config.zero_centred_norms else 0.0

    def outputs(self, block: int, x: Tensor) -> Tensor:
        """Return what a block adds to the residual stream x [T, H], a sequence from its beginning."""
        return self._computed(block, x, {})

    def inputs(self, mapping: SmoothMapping, x: Tensor) -> Tensor:
        """Return the input of `mapping.after` for the residual stream x [T, H] before its block."""
        inputs: dict[str, Tensor] = {}
        self._computed(mapping.block, x, inputs)
        return inputs[mapping.after[0]]

    def _computed(self, block: int, x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Compute a block, and add the input of each projection to `inputs` under its first part's name."""
        norm = self.blocks[block].norm
        layer = self.blocks[block].layer
        weights, projections = self._block_weights(self.blocks[block])
        kernels = ProjectingKernels(self, projections, inputs)
        positions = torch.arange(len(x))
        config = self._config
        eps = config.rms_norm_eps
        metadata = AttentionMetadata.from_lengths(torch.zeros(1, 1, dtype=torch.int32), [len(x)], [len(x)])
        step = Inputs(kernels, positions, positions, metadata, torch.zeros(1, dtype=torch.int64), self.cos_sin, eps)
        normed = normalize(x, self.weights[f"{norm}.weight"] + self._offset, eps)
        return layer.forward(normed, weights, empty_state(layer, len(x)), step)

    def _block_weights(self, block: Block) -> tuple[Any, dict[int, tuple[str, ...]]]:
        """Return a block's weights, and the names of the parts of each matrix by its id."""
        fields: dict[str, Linear | Tensor] = {}
        projections: dict[int, tuple[str, ...]] = {}
        for field, parameter in block.layer.parameters(self._config.hidden_size, WHOLE).items():
            if isinstance(parameter, Array):
                numbers = self.weights[f"{block.name}.{parameter.tensor}"].view(parameter.shape)
                fields[field] = numbers + parameter.offset if parameter.offset else numbers
                continue
            rows = {f"{block.name}.{name}": rows for name, rows in parameter.parts.items()}
            names = tuple(rows)
            weight = _stacked([_taken(self.rounded.get(name, self.weights[f"{name}.weight"]), rows[name])
                               for name in names])
            biases = [_taken(self.weights[f"{name}.bias"], rows[name]) for name in names] if parameter.biased else []
            projections[id(weight)] = names
            fields[field] = Linear(weight, _stacked(biases) if biases else None)
        return block.layer.weights(**fields), projections

    def project(self, names: Sequence[str], x: Tensor) -> Tensor:
        """Return the projections `names` of x [T, K], concatenated. Either all of them are rounded or none."""
        weight = _stacked([self.rounded.get(name, self.weights[f"{name}.weight"]) for name in names])
        biases = [self.weights[f"{name}.bias"] for name in names if f"{name}.bias" in self.weights]
        return self.product(names, x, weight, _stacked(biases) if biases else None)

    def product(self, names: Sequence[str], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply x [T, K] by the stacked weight of the projections `names`."""
        if self.power is not None:
            squares = x.square()
            beside = squares.mean(dim=1, keepdim=True).clamp(min=1e-30)
            self.power[names[0]] = self.power.get(names[0], 0) + (squares / beside).sum(dim=0)
        if names[0] in self.rounded:
            x = self.rounding.inputs(x)
        return F.linear(x, weight, bias)

    def fold(self, mapping: SmoothMapping, factors: Tensor) -> None:
        """Divide the outputs of `mapping.before` by factors and multiply the columns of `mapping.after` by them."""
        weight = self.weights[f"{mapping.before}.weight"]
        bias = self.weights.get(f"{mapping.before}.bias")
        if mapping.is_norm:
            # The norm is rounded to the checkpoint's dtype; the columns use the factors that result from the rounding.
            offset = self._offset
            dtype = self.dtypes[f"{mapping.before}.weight"]
            folded = ((weight + offset) / factors - offset).to(dtype).float()
            norm = folded + offset
            usable = (norm != 0) & norm.isfinite()
            factors = torch.where(usable, (weight + offset) / norm, 1.0)
            self.weights[f"{mapping.before}.weight"] = torch.where(usable, folded, weight)
        else:
            self.weights[f"{mapping.before}.weight"] = weight / factors[:, None]
        if bias is not None:
            self.weights[f"{mapping.before}.bias"] = bias / factors
        factors = self.spread(mapping, factors)
        for name in mapping.after:
            self.weights[f"{name}.weight"] = self.weights[f"{name}.weight"] * factors

    def factors(self, mapping: SmoothMapping, power: Tensor, strength: float) -> Tensor:
        """Return the factors of the outputs of `mapping.before`.

        Their geometric mean is 1. Then each that would make a bias infinite in the checkpoint's dtype is replaced by 1.

        power: value of `Layer.power` for the inputs of `mapping.after`.
        """
        if strength == 0:
            return torch.ones(len(self.weights[f"{mapping.before}.weight"]))
        columns = torch.stack([self.weights[f"{name}.weight"].abs().amax(dim=0) for name in mapping.after]).amax(dim=0)
        inputs, weights = (self._column_maximum(mapping, sizes) for sizes in (power, columns))
        logs = strength / 2 * _log(inputs) - (1 - strength) * _log(weights)
        factors = (logs - logs.mean()).exp()
        if (bias := self.weights.get(f"{mapping.before}.bias")) is not None:
            folded = (bias / factors).to(self.dtypes[f"{mapping.before}.bias"])
            factors = torch.where(folded.isfinite(), factors, 1.0)
        return factors

    def _column_maximum(self, mapping: SmoothMapping, columns: Tensor) -> Tensor:
        """Return for each output of `mapping.before` the maximum of the columns that it feeds."""
        smoothing = mapping.smoothing
        if smoothing.repeats == 1:
            return columns
        return columns.view(smoothing.groups, -1, smoothing.group_size).amax(dim=1).flatten()

    def spread(self, mapping: SmoothMapping, factors: Tensor) -> Tensor:
        """Return for each column of `mapping.after` the factor of the output that feeds it."""
        smoothing = mapping.smoothing
        if smoothing.repeats == 1:
            return factors
        groups = factors.view(smoothing.groups, 1, smoothing.group_size)
        return groups.expand(-1, smoothing.repeats, -1).flatten()


class ProjectingKernels(KernelSet):
    """Golden kernels whose products are those of a `Layer`.

    projections: id of a weight -> names of its parts.
    inputs: the input of each product is added under the first of its names.
    """

    def __init__(self, layer: Layer, projections: Mapping[int, Sequence[str]], inputs: dict[str, Tensor]):
        super().__init__(GOLDEN, fuse=False)

        def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            names = projections[id(weight)]
            inputs[names[0]] = x
            return layer.product(names, x, weight, bias)

        def linear_swiglu(x: Tensor, weight: Tensor, bias: Tensor | None, scheme: None = None) -> Tensor:
            return swiglu(linear(x, weight, bias))

        self.__dict__.update(linear=linear, linear_swiglu=linear_swiglu)


def empty_state(layer: MixerOrMlp, tokens: int) -> tuple[Tensor, ...] | None:
    """Return the state of one sequence of `tokens` tokens in float32, in the golden layout."""
    state = layer.state
    if isinstance(state, Paged):
        shape = 1, tokens, state.heads, state.head_dim
        return torch.zeros(shape), torch.zeros(shape)
    if isinstance(state, Fixed):
        return tuple(torch.zeros(1, *shape) for shape in state.shapes)
    return None


def _taken(tensor: Tensor, rows: Span | Rows) -> Tensor:
    """Return the rows of a tensor that a matrix stacks."""
    if isinstance(rows, Span):
        return tensor
    return torch.cat([tensor[first : first + size] for first, size in rows.ranges])


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _log(sizes: Tensor) -> Tensor:
    """Return the logarithm of sizes >= 0, clamped to 1e-6 of their mean."""
    return sizes.clamp(min=float(sizes.mean()) * 1e-6 + 1e-30).log()
