"""Storage plan of a model: its tensors as they are stored, and their bytes, before any is allocated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from npuserve.kernels.native.choice import SMALL_BYTES, CpuKernels, CpuKernelSettings
from npuserve.kernels.routing import distinct_experts
from npuserve.npu.backends.base import Backend, BackendError
from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.model.eagle import EagleHead
from npuserve.npu.model.forms import form_of_scheme
from npuserve.npu.model.forms.floats import Floats
from npuserve.npu.model.forms.matrix import StoredForm, StoredMatrix
from npuserve.npu.model.forms.w4a16 import ConvertedInt4, StoredInt4
from npuserve.npu.model.forms.w8a8 import RoundedInt8
from npuserve.npu.model.layers.experts import Experts
from npuserve.npu.model.layers.layer import Array, Layer, Matrix, norm
from npuserve.npu.model.layers.shard import Span
from npuserve.npu.quantization.scheme import WeightScheme
from npuserve.npu.quantization.w4a16 import W4A16
from npuserve.npu.quantization.w8a8 import W8A8


def check_schemes(config: ModelConfig, backend: Backend) -> None:
    """Raise BackendError for a quantization of the model that the backend's kernels do not support."""
    for scheme in (*config.schemes, *(config.draft.schemes if config.draft else ())):
        if refusal := scheme.refusal(backend):
            raise BackendError(f"quantization_config: {refusal}")


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
        prefix = config.layer_name(index)
        layer = block.layer.local(config.shard)
        parameters = {
            field: _stored(config, f"{prefix}{block.name}.", parameter, layer.experts_of(field))
            for field, parameter in block.layer.parameters(config.hidden_size, config.shard).items()}
        if config.stacks:
            parameters = _stacked(parameters, layer.stackable)
        blocks.append(StoredBlock(_norm(config, prefix + block.norm), layer, parameters))
    return blocks


def _stacked(
    parameters: dict[str, StoredArray | StoredMatrix], fields: Sequence[str]
) -> dict[str, StoredArray | StoredMatrix]:
    """Return the parameters with neighbours of `fields` stored as one matrix, where their forms allow it.

    fields: `Layer.stackable`.
    """
    stacked = dict(parameters)
    above = ""
    for field in fields:
        first = stacked.get(above)
        matrix = stacked[field]
        stack = None
        if isinstance(first, StoredMatrix) and isinstance(matrix, StoredMatrix):
            stack = first.stacked_with(matrix)
        if stack is None:
            above = field
        else:
            stacked[above] = stack
            del stacked[field]
    return stacked


def _stored(
    config: ModelConfig, prefix: str, parameter: Array | Matrix, experts: int
) -> StoredArray | StoredMatrix:
    """Return a parameter as it is stored. experts: see `Layer.experts_of`."""
    if isinstance(parameter, Array):
        return StoredArray(prefix + parameter.tensor, parameter)
    parts = {prefix + name: rows for name, rows in parameter.parts.items()}
    if parameter.stacked:
        form: StoredForm = Floats()
        scheme = next(filter(None, (_scheme(config, name) for name in parts)), None)
        if scheme:
            raise ModelError(
                f"config.json: quantization_config: {next(iter(parts))} is quantized ({scheme.name}), and has the "
                "weights of all experts; supported: tensors of single experts, or floats")
    else:
        form = _form(config, list(parts), parameter.columns, can_quantize=parameter.can_quantize)
    if isinstance(form, StoredInt4):
        form = replace(form, experts=experts)
    return StoredMatrix(parts, parameter.columns, form, biased=parameter.biased, stacked=parameter.stacked)


def _scheme(config: ModelConfig, name: str) -> WeightScheme | None:
    return config.quantization.of(name) if config.quantization else None


@dataclass(frozen=True, slots=True)
class StoredInput:
    """Input of the MTP head: fc [H, 2 H] of the normed embedding and hidden state, one after the other.

    embedding_norm, hidden_norm: norms of these.
    """

    fc: StoredMatrix
    embedding_norm: StoredArray
    hidden_norm: StoredArray


def stored_input(predictor: ModelConfig) -> StoredInput:
    """Return the input of an MTP head. predictor: its configuration (`ModelConfig.predictor`)."""
    name = f"{predictor.prefix}fc"
    columns = Span.all(2 * predictor.hidden_size)
    return StoredInput(
        StoredMatrix({name: Span.all(predictor.hidden_size)}, columns, _form(predictor, [name], columns)),
        *(_norm(predictor, f"{predictor.prefix}pre_fc_norm_{part}") for part in ("embedding", "hidden")))


@dataclass(frozen=True, slots=True)
class StoredFeatures:
    """Input of an EAGLE-3 head: the parts of fc [H, S] for each hidden state of the served model.

    embedding_norm: norm of the embedding.
    """

    fc: list[StoredMatrix]
    embedding_norm: StoredArray


def stored_features(config: ModelConfig, eagle: EagleHead) -> StoredFeatures:
    """Return the input of an EAGLE-3 head with this configuration."""
    size = eagle.served_size
    columns = [Span(number * size, size, len(eagle.inputs) * size) for number in range(len(eagle.inputs))]
    rows = {"fc": Span.all(config.hidden_size)}
    return StoredFeatures([StoredMatrix(rows, part, Floats()) for part in columns],
                          _norm(config, f"{eagle.layer}input_layernorm"))


def final_norm(config: ModelConfig) -> StoredArray:
    """Return the norm after the last layer."""
    return _norm(config, f"{config.prefix}norm")


def _norm(config: ModelConfig, name: str) -> StoredArray:
    return StoredArray(f"{name}.weight", norm("", config.hidden_size, zero_centred=config.zero_centred_norms))


def linears(config: ModelConfig, index: int) -> list[StoredMatrix]:
    """Return the linear layers of a decoder layer in the order of their use."""
    return [matrix for block in stored_blocks(config, index) for matrix in block.matrices]


def tables(config: ModelConfig, vocabulary_tile: int) -> list[StoredMatrix]:
    """Return the embedding and, unless it is tied, the LM head. An EAGLE-3 head may have no embedding."""
    c = config
    ids = config.vocabulary(vocabulary_tile)
    hidden = Span.all(config.hidden_size)
    padding = c.padded_vocabulary(vocabulary_tile) // c.shard.size - ids.size
    embedding, head = ({name: ids} for name in (f"{c.prefix}embed_tokens", "lm_head"))
    if c.eagle:
        of_served_ids = StoredMatrix({"embed_tokens": Span.all(c.eagle.vocabulary)}, hidden, Floats())
        lm_head = StoredMatrix(head, hidden, Floats(), padding)
        return [of_served_ids, lm_head] if c.eagle.has_embedding else [lm_head]
    form = Floats() if c.tie_word_embeddings else _form(c, list(head), hidden)
    if c.lm_head_dtype == "int8" and isinstance(form, Floats):
        form = RoundedInt8(W8A8(), form.converted)
    if c.tie_word_embeddings:
        return [StoredMatrix(embedding, hidden, form, padding)]
    return [StoredMatrix(embedding, hidden, Floats(), padding), StoredMatrix(head, hidden, form, padding)]


def draft_head(config: ModelConfig, vocabulary_tile: int) -> StoredMatrix | None:
    """Return the LM head of an MTP head, rounded to int8; None if it has none of its own."""
    head = tables(config, vocabulary_tile)[-1]
    if not config.mtp or config.draft_head_dtype != "int8" or not head.form.is_float or head.form.converted:
        return None
    return replace(head, form=RoundedInt8(W8A8()))


def _form(config: ModelConfig, parts: list[str], columns: Span, *, can_quantize: bool = True) -> StoredForm:
    """Return the form of a matrix of the checkpoint's tensors `parts`. can_quantize: `Matrix.can_quantize`."""
    if config.quantization is None:
        return Floats()
    converted = _converted(config, parts)
    schemes = {name: None if name in converted else config.quantization.of(name) for name in parts}
    (first, scheme), *others = schemes.items()
    for name, other in others:
        if other != scheme:
            ways = [each.name if each else "floats" for each in (scheme, other)]
            if ways[0] == ways[1]:
                ways = [str(scheme), str(other)]
            modules = dict.fromkeys(part.rpartition(".")[2] for part in parts)
            raise ModelError(
                f"config.json: quantization_config: {first} and {name} are quantized in different ways "
                f"({', '.join(ways)}); supported: one way for all of {', '.join(modules)}")
    if scheme is None:
        return Floats(converted)
    if not can_quantize:
        raise ModelError(f"config.json: quantization_config: {first} is quantized; supported: floats")
    if isinstance(scheme, W4A16) and config.becomes_floats(scheme):
        form: StoredForm = ConvertedInt4(scheme)
    else:
        form = form_of_scheme(scheme)
    form.check(first, columns)
    return form


def _converted(config: ModelConfig, parts: Iterable[str]) -> dict[str, W8A8]:
    """Return the schemes of the parts whose float8 numbers become floats while loading."""
    if config.quantization is None or not config.converts_float8:
        return {}
    schemes = {name: config.quantization.of(name) for name in parts}
    return {name: scheme for name, scheme in schemes.items() if isinstance(scheme, W8A8) and scheme.float8}


def matrices(config: ModelConfig, vocabulary_tile: int) -> list[StoredMatrix]:
    """Return all matrices of a model."""
    head = draft_head(config, vocabulary_tile)
    return [*tables(config, vocabulary_tile), *([head] if head else ()), *layer_matrices(config)]


def layer_matrices(config: ModelConfig) -> list[StoredMatrix]:
    """Return the matrices of all layers, those of the MTP head among them."""
    of_decoder = [matrix for index in range(config.num_layers) for matrix in linears(config, index)]
    if predictor := config.predictor:
        return [*of_decoder, stored_input(predictor).fc, *layer_matrices(predictor)]
    return [*of_decoder, *(stored_features(config, config.eagle).fc if config.eagle else [])]


def stored_bytes(config: ModelConfig, dtype: torch.dtype, backend: Backend) -> int:
    """Return the bytes that `allocate` takes, for the model and for a smaller one that drafts."""
    stored = matrices(config, backend.capabilities.vocabulary_tile)
    nbytes = array_bytes(config, dtype) + sum(matrix.nbytes(dtype, backend) for matrix in stored)
    return nbytes + (stored_bytes(config.draft, dtype, backend) if config.draft else 0)


def array_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of norms and other tensors that are not matrices."""
    arrays = [array for i in range(config.num_layers) for block in stored_blocks(config, i) for array in block.arrays]
    nbytes = sum(array.nbytes(dtype) for array in (*arrays, final_norm(config)))
    if predictor := config.predictor:
        head = stored_input(predictor)
        nbytes += array_bytes(predictor, dtype) + head.embedding_norm.nbytes(dtype) + head.hidden_norm.nbytes(dtype)
    if config.eagle:
        ids = config.vocab_size * torch.int64.itemsize if config.eagle.has_ids else 0
        nbytes += stored_features(config, config.eagle).embedding_norm.nbytes(dtype) + ids
    return nbytes


def read_bytes(config: ModelConfig, dtype: torch.dtype, backend: Backend) -> int:
    """Return the part of `stored_bytes` that a step without drafts reads.

    It is all but the MTP head, a smaller model that drafts, and an embedding that is not tied to the LM head.
    """
    decoder = replace(config, mtp=(), draft=None)
    embedding, *head = tables(decoder, backend.capabilities.vocabulary_tile)
    return stored_bytes(decoder, dtype, backend) - (embedding.nbytes(dtype, backend) if head else 0)


def idle_bytes(config: ModelConfig, dtype: torch.dtype, backend: Backend, tokens: int) -> int:
    """Return the part of `read_bytes` of experts that no token is expected to choose, if each chooses at random."""
    idle = 0.0
    for index in range(config.num_layers):
        for block in stored_blocks(config, index):
            if isinstance(layer := block.layer, Experts):
                share = 1 - distinct_experts(tokens, layer.top_k, layer.count, 1)
                idle += share * sum(matrix.nbytes(dtype, backend) for field, matrix in block.parameters.items()
                                    if field in layer.by_expert and isinstance(matrix, StoredMatrix))
    return int(idle)


def compared_inputs(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return K of the weights on which the forms of bfloat16 weights are compared; 0 for no comparison.

    It is K of the first layer's largest weight, or of the LM head if the layers are int8. There is no comparison if the
    weights that can become compact take less than `choice.SMALL_BYTES`.
    """
    head = tables(config, 1)[-1]
    layers = [weight for i in range(config.num_layers) for weight in linears(config, i)]
    able = [w for w in (*layers, head) if w.form.is_float and w.inputs % 8 == 0]
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
