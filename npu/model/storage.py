"""Storage plan of a model: its tensors as they are stored, and their bytes, before any is allocated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from npuserve.kernels.native.choice import SMALL_BYTES, CpuKernels, CpuKernelSettings
from npuserve.kernels.quantized import FLOAT8
from npuserve.npu.backends.base import Backend
from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.model.layers.layer import Array, Layer, Matrix, norm
from npuserve.npu.model.layers.shard import Rows, Span
from npuserve.npu.quantization import BLOCK, W8A8

MAX_INPUTS = 1 << 15
"""Maximum K of an int8 weight, so that the sums of its products fit an int32."""


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """Linear weight or embedding table as it is stored.

    parts: tensors of the checkpoint, name -> rows of this shard, stacked in this order and followed by `padding` rows.
    columns: columns of this shard.
    biased: the checkpoint has biases. They are added on each rank, or on rank 0 if the ranks divide the columns.
    scheme: quantization scheme of an int8 or float8 matrix; None for floats.
    rounded: the checkpoint has floats, which are rounded to the nearest int8 value while loading.
    float8: scheme of each part that the checkpoint has in float8, and that becomes floats while loading.
    """

    parts: Mapping[str, Span | Rows]
    columns: Span
    padding: int = 0
    biased: bool = False
    scheme: W8A8 | None = None
    rounded: bool = False
    float8: Mapping[str, W8A8] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(span.size for span in self.parts.values()) + self.padding

    @property
    def inputs(self) -> int:
        """Return K."""
        return self.columns.size

    @property
    def adds_bias(self) -> bool:
        """Return True if this shard has the biases."""
        return self.biased and self.columns.first == 0

    def nbytes(self, dtype: torch.dtype, backend: Backend) -> int:
        """Return the bytes of the matrix and its bias of `dtype`."""
        bias = self.rows * dtype.itemsize if self.adds_bias else 0
        if (s := self.scheme) is None:
            return bias + backend.weight_bytes(self.rows, self.inputs, dtype)
        of_inputs = 0 if s.dynamic else 4 if s.symmetric_inputs else 8
        groups = -(-self.inputs // BLOCK) if s.blocks else 1
        dtype, of_row = (FLOAT8, 4 * groups) if s.float8 else (torch.int8, 8 if s.symmetric else 12)
        return bias + backend.weight_bytes(self.rows, self.inputs, dtype) + of_inputs + self.rows * of_row


def check_schemes(config: ModelConfig, backend: Backend) -> None:
    """Raise BackendError for a quantization of the model that the backend's kernels do not support."""
    for scheme in config.schemes:
        backend.check_scheme(scheme)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Tensor that is stored as it is. name: in the checkpoint; array: its part on this rank."""

    name: str
    array: Array

    def dtype(self, model: torch.dtype) -> torch.dtype:
        """Return the stored dtype. model: dtype of the activations."""
        return model if self.array.dtype == "model" else torch.float32

    def nbytes(self, model: torch.dtype) -> int:
        """Return the bytes of the tensor. model: dtype of the activations."""
        return math.prod(self.array.shape) * self.dtype(model).itemsize


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """Block of a decoder layer as this rank stores it.

    norm: the norm before the layer.
    layer: the mixer or MLP that this rank computes.
    parameters: field of its weights -> tensor.
    """

    norm: StoredArray
    layer: Layer
    parameters: dict[str, StoredArray | StoredMatrix]

    @property
    def arrays(self) -> list[StoredArray]:
        return [self.norm, *(each for each in self.parameters.values() if isinstance(each, StoredArray))]

    @property
    def matrices(self) -> list[StoredMatrix]:
        return [each for each in self.parameters.values() if isinstance(each, StoredMatrix)]


def stored_blocks(config: ModelConfig, index: int) -> list[StoredBlock]:
    """Return the blocks of a decoder layer. Raises ModelError if parts of a matrix have different schemes."""
    blocks = []
    for block in config.layers[index]:
        prefix = f"{config.prefix}layers.{index}."
        blocks.append(StoredBlock(
            _norm(config, prefix + block.norm),
            block.layer.local(config.shard),
            {field: _stored(config, f"{prefix}{block.name}.", parameter)
             for field, parameter in block.layer.parameters(config.hidden_size, config.shard).items()}))
    return blocks


def _stored(config: ModelConfig, prefix: str, parameter: Array | Matrix) -> StoredArray | StoredMatrix:
    if isinstance(parameter, Array):
        return StoredArray(prefix + parameter.tensor, parameter)
    parts = {prefix + name: rows for name, rows in parameter.parts.items()}
    scheme = _scheme(config, list(parts), parameter.columns)
    if scheme and not parameter.can_quantize:
        raise ModelError(f"config.json: quantization_config: {next(iter(parts))} is quantized; supported: floats")
    return StoredMatrix(parts, parameter.columns, biased=parameter.biased, scheme=scheme,
                        float8=_converted(config, parts))


def final_norm(config: ModelConfig) -> StoredArray:
    """Return the norm after the last layer."""
    return _norm(config, f"{config.prefix}norm")


def _norm(config: ModelConfig, name: str) -> StoredArray:
    return StoredArray(f"{name}.weight", norm("", config.hidden_size, zero_centred=config.zero_centred_norms))


def linears(config: ModelConfig, index: int) -> list[StoredMatrix]:
    """Return the linear layers of a decoder layer in the order of their use."""
    return [matrix for block in stored_blocks(config, index) for matrix in block.matrices]


def tables(config: ModelConfig, vocabulary_tile: int) -> list[StoredMatrix]:
    """Return the embedding and, unless it is tied, the LM head."""
    c = config
    ids = config.vocabulary(vocabulary_tile)
    hidden = Span.all(config.hidden_size)
    padding = c.padded_vocabulary(vocabulary_tile) // c.shard.size - ids.size
    requested = W8A8() if c.lm_head_dtype == "int8" else None

    embedding, head = ({name: ids} for name in (f"{c.prefix}embed_tokens", "lm_head"))
    if c.tie_word_embeddings:
        return [StoredMatrix(embedding, hidden, padding, scheme=requested, rounded=bool(requested))]
    stored = _scheme(c, list(head), hidden)
    return [StoredMatrix(embedding, hidden, padding),
            StoredMatrix(head, hidden, padding, scheme=stored or requested, rounded=bool(requested and not stored),
                         float8=_converted(c, head))]


def _scheme(config: ModelConfig, parts: list[str], columns: Span) -> W8A8 | None:
    if config.quantization is None:
        return None
    converted = _converted(config, parts)
    schemes = {name: None if name in converted else config.quantization.of(name) for name in parts}
    (first, scheme), *others = schemes.items()
    for name, other in others:
        if other != scheme:
            raise ModelError(
                f"config.json: quantization_config: {first} and {name} are quantized in different ways ({scheme}, "
                f"{other}); supported: one way for all of {', '.join(n.rpartition('.')[2] for n in parts)}")
    if scheme and not scheme.float8 and columns.size > MAX_INPUTS:
        raise ModelError(f"config.json: quantization_config: {first} has {columns.size} inputs; supported: up to "
                         f"{MAX_INPUTS} in int8")
    if scheme and scheme.blocks and columns.size < columns.whole and columns.size % BLOCK:
        raise ModelError(
            f"config.json: quantization_config: blocks of {BLOCK} columns of {first} are divided between ranks; "
            f"supported: a tensor_parallel_size that gives each rank a multiple of {BLOCK} of {columns.whole} columns")
    return scheme


def _converted(config: ModelConfig, parts: Iterable[str]) -> dict[str, W8A8]:
    """Return the schemes of the parts whose float8 numbers become floats while loading."""
    if config.quantization is None or not config.converts_float8:
        return {}
    return {name: scheme for name in parts if (scheme := config.quantization.of(name)) and scheme.float8}


def matrices(config: ModelConfig, vocabulary_tile: int) -> list[StoredMatrix]:
    """Return all matrices of a model."""
    return [*tables(config, vocabulary_tile), *(w for i in range(config.num_layers) for w in linears(config, i))]


def stored_bytes(config: ModelConfig, dtype: torch.dtype, backend: Backend) -> int:
    """Return the bytes that `allocate` takes."""
    stored = matrices(config, backend.vocabulary_tile)
    return array_bytes(config, dtype) + sum(matrix.nbytes(dtype, backend) for matrix in stored)


def array_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of norms and other tensors that are not matrices."""
    arrays = [array for i in range(config.num_layers) for block in stored_blocks(config, i) for array in block.arrays]
    return sum(array.nbytes(dtype) for array in (*arrays, final_norm(config)))


def read_bytes(config: ModelConfig, dtype: torch.dtype, backend: Backend) -> int:
    """Return the part of `stored_bytes` that a step reads: all but an embedding that is not tied to the LM head."""
    embedding, *head = tables(config, backend.vocabulary_tile)
    return stored_bytes(config, dtype, backend) - (embedding.nbytes(dtype, backend) if head else 0)


def compared_inputs(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return K of the weights on which the forms of bfloat16 weights are compared; 0 for no comparison.

    It is K of the first layer's largest weight, or of the LM head if the layers are int8. There is no comparison if the
    weights that can become compact take less than `choice.SMALL_BYTES`.
    """
    head = tables(config, 1)[-1]
    layers = [weight for i in range(config.num_layers) for weight in linears(config, i)]
    able = [w for w in (*layers, head) if w.scheme is None and w.inputs % 8 == 0]
    if dtype != torch.bfloat16 or sum(w.rows * w.inputs * dtype.itemsize for w in able) < SMALL_BYTES:
        return 0
    return max((w for w in linears(config, 0) if w in able), key=lambda w: w.rows * w.inputs, default=head).inputs


def choose_kernels(
    config: ModelConfig, dtype: torch.dtype, backends: Iterable[Backend | None], wanted: CpuKernelSettings
) -> CpuKernels | None:
    """Choose the CPU kernels on the first backend that uses any (`Backend.choose_kernels`); None if none does.

    dtype: dtype of activations.
    """
    inputs = compared_inputs(config, dtype)
    choices = (backend.choose_kernels(wanted, inputs) for backend in backends if backend)
    return next((kernels for kernels in choices if kernels), None)
