"""What a layer of a model declares. A layer is a mixer of tokens, such as attention, or an MLP.

A decoder layer is a sequence of blocks. Each adds the output of its layer to the residual stream:
x + layer(norm(x)).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from npuserve.npu.model.layers.shard import Rows, Shard, Span

if TYPE_CHECKING:
    from torch import Tensor

    from npuserve.kernels.attention import AttentionMetadata
    from npuserve.kernels.quantized import Scheme
    from npuserve.kernels.registry import KernelSet


# Parameters


@dataclass(frozen=True, slots=True)
class Array:
    """Tensor of the checkpoint that is stored as it is and never quantized, such as the weight of a norm.

    tensor: its name within the layer.
    rows: rows of this rank.
    row_shape: dimensions after the first.
    dtype: "model" for the dtype of the activations.
    offset: added to the numbers, in float32: 1 for the weight of a zero-centred norm.
    whole_row_shape: `row_shape` in the checkpoint if it has other dimensions for the same numbers.
    """

    tensor: str
    rows: Span | Rows
    row_shape: tuple[int, ...] = ()
    dtype: Literal["model", "float32"] = "model"
    offset: float = 0.0
    whole_row_shape: tuple[int, ...] | None = None

    @property
    def is_linear(self) -> bool:
        """True if the tensor is the weight of a linear layer, such as a router."""
        return len(self.row_shape) == 1 and self.whole_row_shape is None

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape in the checkpoint."""
        return self.rows.whole, *(self.row_shape if self.whole_row_shape is None else self.whole_row_shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return self.rows.size, *self.row_shape


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weight of a linear layer, stacked from tensors of the checkpoint with the same input.

    parts: module within the layer -> rows of this rank, in the order in which they are stacked.
    columns: columns of this rank. If the ranks divide them, each rank computes a part of the sum.
    biased: the modules have biases.
    can_quantize: the weight may be int8 or float8.
    stacked: number of matrices that a tensor [stacked, rows, columns] of the checkpoint has, and whose name is the
        module's. 0 for a tensor [rows, columns] named `weight` in the module.
    """

    parts: Mapping[str, Span | Rows]
    columns: Span
    biased: bool = False
    can_quantize: bool = True
    stacked: int = 0


def norm(name: str, size: int, *, zero_centred: bool = False) -> Array:
    """Return the weight of a norm. zero_centred: the checkpoint has the weight less 1, which float32 keeps exact."""
    if zero_centred:
        return Array(f"{name}.weight", Span.all(size), dtype="float32", offset=1.0)
    return Array(f"{name}.weight", Span.all(size))


Parameters = dict[str, Array | Matrix]
"""Field of a layer's weights -> parameter."""


# State


@dataclass(frozen=True, slots=True)
class Paged:
    """State that each token adds to: a key and a value of each of `heads` heads of size `head_dim`, in blocks."""

    heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Fixed:
    """State of constant size for each request, in a slot: tensors of these shapes.

    shapes: shape of each tensor of a request.
    dtypes: dtype of each, "model" for that of the activations, "state" for that of `Backend.state_dtype`.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Literal["model", "state"], ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """State of constant size of all requests together: counters [size] int64 that only grow."""

    size: int


State = Paged | Fixed | Counts | None


# Layers


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the layers of a step read besides the hidden states.

    positions, slot_mapping: [T] int64 (`Batch`).
    attention: queries and keys of each row.
    state_slots: [R] int64, slot of each row's fixed state; None if no layer has one.
    cos_sin: [P, rotary dimension] float32 (`rope.cos_sin_table`).
    eps: epsilon of the norms.
    uncounted: list to which each layer with counters appends what the step adds to them; None if it adds it itself.
    """

    kernels: KernelSet
    positions: Tensor
    slot_mapping: Tensor
    attention: AttentionMetadata
    state_slots: Tensor | None
    cos_sin: Tensor
    eps: float
    uncounted: list[Tensor] | None = None


class Layer(ABC):
    """Mixer or MLP. A subclass is a frozen dataclass of the sizes in config.json.

    weights: type with a field for each parameter; fields without a parameter have a default.
    """

    weights: ClassVar[type]

    __slots__ = ()

    @abstractmethod
    def parameters(self, hidden: int, shard: Shard) -> Parameters:
        """Return the parameters of a rank. hidden: size of the hidden states."""

    @abstractmethod
    def local(self, shard: Shard) -> Layer:
        """Return the layer that a rank computes. Raises DivisionError if the ranks cannot divide it."""

    @property
    def state(self) -> State:
        """State of a request, for a layer returned by `local`."""
        return None

    @property
    def kernels(self) -> tuple[str, ...]:
        """Kernels that the layer calls and that are marked `by_layer`."""
        return ()

    @property
    def operator_sizes(self) -> Mapping[str, tuple[int, ...]]:
        """Sizes of the calls of those kernels for which a device may have an operator for some sizes alone."""
        return {}

    @property
    def reads_float32(self) -> bool:
        """True if a kernel computes from the layer's input in float32 (`add_rms_norm`)."""
        return False

    @property
    def stackable(self) -> tuple[str, ...]:
        """Fields of matrices with the same input, of which neighbours may be stored as one (`ModelConfig.stacks`).

        The first field of a stack has the rows of all its matrices, in this order, and the others are None.
        """
        return ()

    def experts_of(self, field: str) -> int:
        """Return the number of experts whose matrices are the rows of a field of the weights; 0 for one matrix."""
        return 0

    def input_scheme(self, weights: Any) -> Scheme | None:
        """Return the scheme in which the layer takes its input; None for floats."""
        return None

    @abstractmethod
    def forward(self, x: Any, weights: Any, state: Any, inputs: Inputs) -> Tensor:
        """Return the output [T, H] for x [T, H], before the sum over ranks.

        x: normed, and quantized by `input_scheme`.
        state: tensors of the layer in the store: (keys, values) of `Paged`, a tuple of [slots, ...] of `Fixed`, the
            counters of `Counts`, which may be None.

        A row that begins at position 0 begins with a state of zeros, whatever its slot holds.
        """

    # Memory of a step, for layers returned by `local`

    @property
    @abstractmethod
    def output_width(self) -> int:
        """Elements per token of the kernels' outputs that are held at the same time."""

    @abstractmethod
    def golden_elements(self, tokens: int, context: int) -> int:
        """Return the elements that the golden functions hold at the same time. context: tokens of the longest row."""

    def scratch_bytes(self, context: int, threads: int) -> int:
        """Return the bytes of intermediate results whose size depends on `context` and the host's threads."""
        return 0

    @property
    def smoothings(self) -> tuple[Smoothing, ...]:
        """Pairs of modules between which quantization may move factors (npu/quantize/smoothing.py)."""
        return ()


@dataclass(frozen=True, slots=True)
class Smoothing:
    """Pair of a producer and its consumers: column j of each module of `after` multiplies one output of `before`.

    before: module of the layer whose rows take the factors; "" for the norm before the layer.
    after: modules whose columns take them.
    groups, group_size: the outputs of `before` are [groups, group_size], and each group feeds `repeats` groups of
        columns. (1, 0, 1): output j feeds column j.
    """

    before: str
    after: tuple[str, ...]
    groups: int = 1
    group_size: int = 0
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Block:
    """Layer with the norm before it.

    norm: name of the norm in the decoder layer.
    name: prefix of the layer's parameters in the decoder layer.
    """

    norm: str
    name: str
    layer: Layer


DecoderLayer = tuple[Block, ...]
