"""A model's weights as the kernels take them: projections that share an input are fused, the vocabulary is padded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from npuserve.kernels.native.choice import SMALL_BYTES, CpuKernels, Wanted
from npuserve.kernels.native.packed import Matrix, PackedWeight, packed_words, write
from npuserve.kernels.quantize import quantize
from npuserve.kernels.quantized import Int8Weight, Scheme, Weight
from npuserve.npu.backends.base import Backend
from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.quantization import W8A8

FLOATS, INT8, INTEGERS = ("F32", "F16", "BF16", "F64"), ("I8",), ("I8", "I16", "I32", "I64")
"""safetensors' names of dtypes."""

AT_ONCE = 1 << 17
"""Numbers that are rounded to int8 at a time, so that what is between stays in the processor's cache."""

MOST_INPUTS = 1 << 15
"""K of an int8 weight, so that the sums of its products fit an int32."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a tensor of the checkpoint goes.

    put: takes a row and the tensor's rows from there on; raises ValueError for numbers that cannot be. shapes: that the
    tensor may have, the first being that in which it is put. nbytes: of what is stored. dtypes: of the tensor.
    required: the checkpoint must have it.
    """

    put: Callable[[int, Tensor], None]
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int
    dtypes: tuple[str, ...] = FLOATS
    required: bool = True


Targets = dict[str, Target]
"""By the name of the checkpoint's tensor."""


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [N, K], bias [N] or None."""

    weight: Weight
    bias: Tensor | None

    @property
    def inputs(self) -> Scheme | None:
        """How its inputs become int8; None where they do not."""
        return self.weight.inputs if isinstance(self.weight, Int8Weight) else None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. I: intermediate size; queries come before keys before values, gate before up.

    qkv [(Hq + 2 Hkv) D, H], o [H, Hq D], gate_up [2 I, H], down [H, I]; norms [H]; q_norm, k_norm [D] or None.
    """

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """embedding [Vp, H], norm [H], lm_head [Vp, H]: Vp is the padded vocabulary. Of a tied model embedding and
    lm_head are one table.

    Rows of lm_head from the vocabulary's size on repeat row 0, so that a padded id is no likelier than id 0; those of
    an untied embedding are zero.
    """

    embedding: Weight
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Linear

    @property
    def padded_vocabulary(self) -> int:
        head = self.lm_head.weight
        return len(head.scale) if isinstance(head, Int8Weight) else head.shape[0]

    @property
    def unplanned_bytes(self) -> int:
        """What is held beyond `stored_bytes`: weights whose numbers did not become compact, and so lie elsewhere."""
        return sum(w.words.nbytes for w in self._refused)

    @property
    def unplanned_reads(self) -> int:
        """Bytes that a step reads of such weights beyond `read_bytes`."""
        return sum(w.words.nbytes - 4 * packed_words(w.n, w.k, w.dtype, True) for w in self._refused)

    @property
    def _refused(self) -> list[PackedWeight]:
        held = {id(weight): weight for weight in (self.embedding, *self._linear_weights())}
        return [weight for weight in held.values() if isinstance(weight, PackedWeight) and weight.refused]

    def finish(self, vocabulary: int, backend: Backend) -> None:
        """Once all real rows hold the checkpoint's numbers: fill the padded ones, and have int8 weights as the
        backend's kernels read them."""
        self._fill_padding(vocabulary)
        for weight in self._linear_weights():
            if isinstance(weight, Int8Weight):
                backend.arrange(weight, table=weight is self.embedding)

    def _linear_weights(self) -> list[Weight]:
        linears = [linear for x in self.layers for linear in (x.qkv, x.o, x.gate_up, x.down)]
        return [linear.weight for linear in (*linears, self.lm_head)]

    def _fill_padding(self, vocabulary: int) -> None:
        padded, head = self.padded_vocabulary, self.lm_head.weight
        count = padded - vocabulary
        if self.embedding is not head:
            assert not isinstance(self.embedding, Int8Weight)
            zeros = torch.zeros(count, self.embedding.shape[1], device=self.norm.device)
            write(self.embedding, vocabulary, zeros)
        if isinstance(head, Int8Weight):
            for numbers in (head.scale, head.zero, head.sums):
                if numbers is not None:
                    numbers[vocabulary:padded] = numbers[0].clone()
            head = head.values
        first = head.rows(torch.zeros(1, dtype=torch.int64)) if isinstance(head, PackedWeight) else head[:1]
        write(head, vocabulary, first.expand(count, -1))


@dataclass(frozen=True, slots=True)
class Stored:
    """A linear weight or a table as it is stored.

    parts: the checkpoint's, name -> rows, each below the one before, and `padding` rows. inputs: K. scheme: how it is
    int8. rounded: the checkpoint has it in floats, and it is rounded to the nearest of int8 as it is loaded.
    """

    parts: dict[str, int]
    inputs: int
    padding: int = 0
    biased: bool = False
    scheme: W8A8 | None = None
    rounded: bool = False

    @property
    def rows(self) -> int:
        return sum(self.parts.values()) + self.padding

    def nbytes(self, dtype: torch.dtype, backend: Backend) -> int:
        """What it takes, with its bias of `dtype`."""
        bias = self.rows * dtype.itemsize if self.biased else 0
        if (s := self.scheme) is None:
            return bias + backend.weight_bytes(self.rows, self.inputs, dtype)
        of_inputs = 0 if s.dynamic else 4 if s.symmetric_inputs else 8
        return bias + backend.weight_bytes(self.rows, self.inputs, torch.int8) + of_inputs + self.rows * (
            8 if s.symmetric else 12)


def linears(config: ModelConfig, index: int) -> tuple[Stored, Stored, Stored, Stored]:
    """A layer's qkv, o, gate_up and down. Raises ModelError where parts of one are quantized in different ways."""
    c = config
    attention, mlp = (f"model.layers.{index}.{part}." for part in ("self_attn", "mlp"))

    def stored(prefix: str, parts: dict[str, int], inputs: int, biased: bool) -> Stored:
        parts = {prefix + name: rows for name, rows in parts.items()}
        return Stored(parts, inputs, biased=biased, scheme=_scheme(c, parts, inputs))

    return (
        stored(attention, {"q_proj": c.q_size, "k_proj": c.kv_size, "v_proj": c.kv_size}, c.hidden_size, c.qkv_bias),
        stored(attention, {"o_proj": c.hidden_size}, c.q_size, c.o_bias),
        stored(mlp, {"gate_proj": c.intermediate_size, "up_proj": c.intermediate_size}, c.hidden_size, c.mlp_bias),
        stored(mlp, {"down_proj": c.hidden_size}, c.intermediate_size, c.mlp_bias),
    )


def tables(config: ModelConfig, vocabulary_tile: int) -> list[Stored]:
    """The embedding and, unless it is the same, the LM head."""
    c = config
    padding = c.padded_vocabulary(vocabulary_tile) - c.vocab_size
    asked = W8A8() if c.lm_head_dtype == "int8" else None

    embedding, head = ({name: c.vocab_size} for name in ("model.embed_tokens", "lm_head"))
    if c.tie_word_embeddings:
        return [Stored(embedding, c.hidden_size, padding, scheme=asked, rounded=bool(asked))]
    stored = _scheme(c, head, c.hidden_size)
    return [Stored(embedding, c.hidden_size, padding),
            Stored(head, c.hidden_size, padding, scheme=stored or asked, rounded=bool(asked and not stored))]


def _scheme(config: ModelConfig, parts: dict[str, int], inputs: int) -> W8A8 | None:
    if config.quantization is None:
        return None
    found = {name: config.quantization.of(name) for name in parts}
    (first, scheme), *others = found.items()
    for name, other in others:
        if other != scheme:
            raise ModelError(
                f"config.json: quantization_config: {first} and {name} are quantized in different ways ({scheme}, "
                f"{other}); supported: one way for all of {', '.join(n.rpartition('.')[2] for n in parts)}")
    if scheme and inputs > MOST_INPUTS:
        raise ModelError(
            f"config.json: quantization_config: {first} has {inputs} inputs; supported: up to {MOST_INPUTS} in int8")
    return scheme


def stored_bytes(config: ModelConfig, dtype: torch.dtype, backend: Backend) -> int:
    """What `allocate` takes."""
    c = config
    matrices = [*tables(c, backend.vocabulary_tile), *(w for i in range(c.num_layers) for w in linears(c, i))]
    norms = c.num_layers * (2 * c.hidden_size + (2 * c.head_dim if c.qk_norm else 0)) + c.hidden_size
    return norms * dtype.itemsize + sum(matrix.nbytes(dtype, backend) for matrix in matrices)


def read_bytes(config: ModelConfig, dtype: torch.dtype, backend: Backend) -> int:
    """Of `stored_bytes` what a step must read: of an embedding apart from the LM head next to nothing."""
    embedding, *head = tables(config, backend.vocabulary_tile)
    return stored_bytes(config, dtype, backend) - (embedding.nbytes(dtype, backend) if head else 0)


def compared_inputs(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return K of the weights by which the forms of bfloat16 weights are compared; 0 for no comparison.

    It is that of the first layer's largest weight, or of the LM head where the layers are int8. Weights that can become
    compact are compared where they take at least `choice.SMALL_BYTES`.
    """
    head = tables(config, 1)[-1]
    layers = [weight for i in range(config.num_layers) for weight in linears(config, i)]
    able = [w for w in (*layers, head) if w.scheme is None and w.inputs % 8 == 0]
    if dtype != torch.bfloat16 or sum(w.rows * w.inputs * dtype.itemsize for w in able) < SMALL_BYTES:
        return 0
    return max((w for w in linears(config, 0) if w in able), key=lambda w: w.rows * w.inputs, default=head).inputs


def choose_kernels(config: ModelConfig, dtype: torch.dtype, backends: Iterable[Backend | None], wanted: Wanted
                   ) -> CpuKernels | None:
    """Have the first of the backends that computes with CPU kernels choose them (`Backend.choose_kernels`). None if
    there is no such backend. dtype: of activations."""
    inputs = compared_inputs(config, dtype)
    found = (backend.choose_kernels(wanted, inputs) for backend in backends if backend)
    return next((kernels for kernels in found if kernels), None)


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """A static scheme of inputs, and what the checkpoint says of the parts that it is for: scales [parts] float32,
    zeros [parts] int32, 0 where there are none."""

    scheme: Scheme
    scales: Tensor
    zeros: Tensor

    def merge(self) -> bool:
        """Let the scheme have the range of all parts, as vLLM does (compressed_tensors_w8a8_int8). True if they
        differ."""
        assert self.scheme.scale is not None
        agree = len(set(zip(self.scales.tolist(), self.zeros.tolist(), strict=True))) == 1
        scale, zero = self.scales[:1], self.zeros[:1]
        if not agree and self.scheme.zero is None:
            scale = self.scales.amax().reshape(1)
        elif not agree:
            least, most = ((self.scales * (edge - self.zeros)) for edge in (-128, 127))
            scale = ((most.amax() - least.amin()) / 255).reshape(1)
            zero = (-128 - least.amin() / scale).round().int()
        self.scheme.scale.copy_(scale)
        if self.scheme.zero is not None:
            self.scheme.zero.copy_(zero)
        return not agree


@dataclass(slots=True)
class Allocation:
    """Storage for a model, its numbers yet to be written, and which of its parts each tensor of a checkpoint fills.
    After that the static inputs are to be merged and the weights to be finished."""

    weights: ModelWeights
    targets: Targets
    static: list[StaticInputs] = field(default_factory=list)


def allocate(config: ModelConfig, dtype: torch.dtype, backend: Backend) -> Allocation:
    """Raises ModelError for a quantization that cannot be."""
    c = config
    targets: Targets = {}
    static: list[StaticInputs] = []

    def empty(size: int, kind: torch.dtype) -> Tensor:
        return backend.empty((size,), kind)

    def vector(name: str, size: int) -> Tensor:
        made = empty(size, dtype)
        targets[f"{name}.weight"] = Target(partial(_put, made, 0), ((size,),), made.nbytes)
        return made

    def int8(stored: Stored, scheme: W8A8) -> Int8Weight:
        inputs = Scheme(symmetric=scheme.symmetric_inputs, levels=backend.int8_levels)
        if not scheme.dynamic:
            zero = None if scheme.symmetric_inputs else empty(1, torch.int32)
            inputs = Scheme(empty(1, torch.float32), zero, scheme.symmetric_inputs)
        n = stored.rows
        weight = Int8Weight(
            backend.weight(n, stored.inputs, torch.int8), empty(n, torch.float32),
            None if scheme.symmetric else empty(n, torch.int32), empty(n, torch.int32), inputs, dtype)
        if not stored.rounded:
            targets.update(_scale_targets(stored.parts, scheme, weight))
        if not scheme.dynamic:
            of_parts = StaticInputs(inputs, torch.empty(len(stored.parts)), torch.zeros(len(stored.parts)).int())
            targets.update(_input_targets(stored.parts, of_parts))
            static.append(of_parts)
        return weight

    def linear(stored: Stored) -> Linear:
        weight: Weight = int8(stored, stored.scheme) if stored.scheme else backend.weight(
            stored.rows, stored.inputs, dtype)
        bias = empty(stored.rows, dtype) if stored.biased else None
        put, dtypes, itemsize = (
            (partial(_put, weight), FLOATS, dtype.itemsize) if not isinstance(weight, Int8Weight) else
            (partial(_put_rounded, weight), FLOATS, 1) if stored.rounded else (partial(_put_int8, weight), INT8, 1))
        first = 0
        for name, rows in stored.parts.items():
            shape = (rows, stored.inputs)
            targets[f"{name}.weight"] = Target(partial(put, first), (shape,), math.prod(shape) * itemsize, dtypes)
            if bias is not None:
                targets[f"{name}.bias"] = Target(partial(_put, bias, first), ((rows,),), rows * dtype.itemsize)
            first += rows
        return Linear(weight, bias)

    def layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}"
        qkv, o, gate_up, down = linears(c, index)
        return LayerWeights(
            input_norm=vector(f"{prefix}.input_layernorm", c.hidden_size),
            qkv=linear(qkv),
            q_norm=vector(f"{prefix}.self_attn.q_norm", c.head_dim) if c.qk_norm else None,
            k_norm=vector(f"{prefix}.self_attn.k_norm", c.head_dim) if c.qk_norm else None,
            o=linear(o),
            post_norm=vector(f"{prefix}.post_attention_layernorm", c.hidden_size),
            gate_up=linear(gate_up),
            down=linear(down),
        )

    embedding, *head = map(linear, tables(c, backend.vocabulary_tile))
    weights = ModelWeights(
        embedding.weight, tuple(map(layer, range(c.num_layers))), vector("model.norm", c.hidden_size),
        head[0] if head else embedding)
    return Allocation(weights, targets, static)


_ONE = ((1,), (), (1, 1))
"""Shapes of a single number."""


def _scale_targets(parts: Mapping[str, int], scheme: W8A8, weight: Int8Weight) -> Targets:
    targets: Targets = {}
    first = 0
    for name, rows in parts.items():
        part, shapes = slice(first, first + rows), ((rows,), (rows, 1)) if scheme.per_channel else _ONE

        def into(numbers: Tensor, part: slice = part) -> Tensor:
            return numbers[part] if scheme.per_channel else numbers[part].unsqueeze(0)

        targets[f"{name}.weight_scale"] = Target(partial(_put_scales, into(weight.scale)), shapes, 4 * rows)
        targets[f"{name}.weight_zero_point"] = _zero_target(None if weight.zero is None else into(weight.zero), shapes)
        first += rows
    return targets


def _input_targets(parts: Mapping[str, int], static: StaticInputs) -> Targets:
    targets: Targets = {}
    for index, name in enumerate(parts):
        scale, zero = (numbers[index : index + 1] for numbers in (static.scales, static.zeros))
        targets[f"{name}.input_scale"] = Target(partial(_put_scales, scale), _ONE, scale.nbytes)
        targets[f"{name}.input_zero_point"] = _zero_target(None if static.scheme.zero is None else zero, _ONE)
    return targets


def _zero_target(into: Tensor | None, shapes: tuple[tuple[int, ...], ...]) -> Target:
    """into: None where config.json says that there are none; some checkpoints have them all the same, all 0."""
    if into is None:
        return Target(_put_no_zeros, shapes, 0, INTEGERS, required=False)
    return Target(partial(_put_zeros, into), shapes, into.nbytes, INTEGERS)


def _put(matrix: Matrix, first: int, row: int, piece: Tensor) -> None:
    write(matrix, first + row, piece)


def _put_int8(weight: Int8Weight, first: int, row: int, piece: Tensor) -> None:
    begin = first + row
    write(weight.values, begin, piece)
    weight.sums[begin : begin + len(piece)] = piece.sum(dim=1, dtype=torch.int32)


def _put_rounded(weight: Int8Weight, first: int, row: int, piece: Tensor) -> None:
    begin = first + row
    for rows in piece.split(max(1, AT_ONCE // piece.shape[1])):
        made = quantize(rows.float(), Scheme(levels=127))
        _put_int8(weight, begin, 0, made.values)
        weight.scale[begin : begin + len(rows)] = made.scale
        begin += len(rows)


def _put_scales(into: Tensor, row: int, piece: Tensor) -> None:
    if not bool((piece.isfinite() & (piece > 0)).all()):
        raise ValueError("scales must be numbers above 0")
    into[row : row + len(piece)] = piece


def _put_zeros(into: Tensor, row: int, piece: Tensor) -> None:
    if bool(((piece < -128) | (piece > 127)).any()):
        raise ValueError("zero points must be in [-128, 127]")
    into[row : row + len(piece)] = piece


def _put_no_zeros(row: int, piece: Tensor) -> None:
    if bool(piece.any()):
        raise ValueError("is not 0, though config.json says that the quantization is symmetric")
