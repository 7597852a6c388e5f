"""Weights of a model as the kernels read them: projections with the same input are fused, the vocabulary is padded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from npuserve.kernels.layer import LayerWeights, Linear
from npuserve.kernels.quantized import Scheme
from npuserve.kernels.weight import WeightForm, form_of
from npuserve.npu.backends.base import Backend
from npuserve.npu.model.layers.attention import Attention
from npuserve.npu.model.layers.layer import Layer
from npuserve.npu.model.layers.swiglu import SwiGLU


@dataclass(frozen=True, slots=True)
class LoadedBlock:
    """Block of a decoder layer with its weights.

    norm: [H].
    layer: the mixer or MLP that this rank computes.
    weights: of the type `layer.weights`.
    """

    norm: Tensor
    layer: Layer
    weights: Any

    @property
    def input_scheme(self) -> Scheme | None:
        """Quantization scheme of the layer's input; None for floats."""
        return self.layer.input_scheme(self.weights)

    @property
    def linears(self) -> list[Linear]:
        """The linear layers in the order of their fields."""
        return [each for each in self.weights if isinstance(each, Linear)]


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """Weights of a head for multi-token prediction, for hidden size H.

    fc [H, 2 H]: of the normed embedding and hidden state, one after the other.
    embedding_norm, hidden_norm, norm [H].
    layers: blocks of each of its layers.
    lm_head: that of its drafts; None for the model's.
    """

    fc: Linear
    embedding_norm: Tensor
    hidden_norm: Tensor
    layers: tuple[tuple[LoadedBlock, ...], ...]
    norm: Tensor
    lm_head: Linear | None


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """Weights of an EAGLE-3 head beside those of a model, for hidden size H and served hidden size S.

    fc: [H, S] for each hidden state of the served model. Their sum is the head's feature of a token.
    embedding_norm: [H].
    served_ids: [D] int64, id of the served model for each of the head's; None if they are the same.
    """

    fc: tuple[Linear, ...]
    embedding_norm: Tensor
    served_ids: Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Weights of a model: embedding [Vp, H], norm [H], lm_head [Vp, H] for the padded vocabulary Vp.

    layers: blocks of each decoder layer.
    dtype: dtype of the activations. Some norms are float32 beside it.
    mtp: head for multi-token prediction; None if it is not loaded.
    eagle: of an EAGLE-3 head; None for a model.
    owns_embedding: False for an EAGLE-3 head with the served model's embedding.

    Tied embedding and lm_head are the same table. The padding rows of lm_head repeat row 0, so that a padding id is
    never more likely than id 0. The padding rows of an untied embedding are zero.
    """

    embedding: WeightForm
    layers: tuple[tuple[LoadedBlock, ...], ...]
    norm: Tensor
    lm_head: Linear
    dtype: torch.dtype
    mtp: MtpWeights | None = None
    eagle: EagleWeights | None = None
    owns_embedding: bool = True

    @property
    def predictor(self) -> ModelWeights | None:
        """The layers of the MTP head as a model, with the embedding of this one; None if the head is not loaded."""
        if (head := self.mtp) is None:
            return None
        return ModelWeights(self.embedding, head.layers, head.norm, head.lm_head or self.lm_head, self.dtype)

    @property
    def blocks(self) -> Iterator[LoadedBlock]:
        """The blocks of all decoder layers."""
        return chain.from_iterable(self.layers)

    @property
    def padded_vocabulary(self) -> int:
        return len(form_of(self.lm_head.weight))

    @property
    def quantized_inputs(self) -> set[torch.dtype]:
        """Return the dtypes of the quantized inputs of linear layers; empty if all inputs are floats."""
        return {inputs.dtype for weight in self._linear_weights() if (inputs := weight.inputs)}

    @property
    def unplanned_bytes(self) -> int:
        """Bytes beyond `stored_bytes`: weights whose numbers could not be compacted and are stored elsewhere."""
        return sum(form.unplanned_bytes for form in self._forms)

    @property
    def unplanned_reads(self) -> int:
        """Bytes that a step without drafts reads of such weights beyond `read_bytes`."""
        return sum(form.unplanned_reads for form in replace(self, mtp=None)._forms)

    @property
    def _forms(self) -> list[WeightForm]:
        embeddings = [self.embedding] if self.owns_embedding else []
        weights = {id(weight): weight for weight in (*embeddings, *self._linear_weights())}
        return list(weights.values())

    def attention_layers(self) -> tuple[LayerWeights, ...] | None:
        """Return the weights as the kernel `decoder_layers` takes them; None for layers other than its own."""
        layers = []
        for blocks in self.layers:
            if [type(block.layer) for block in blocks] != [Attention, SwiGLU]:
                return None
            mixer, mlp = blocks
            attention = mixer.weights
            swiglu = mlp.weights
            if attention.gate is not None:
                return None
            layers.append(LayerWeights(
                mixer.norm, attention.qkv, attention.q_norm, attention.k_norm, attention.o, mlp.norm, swiglu.gate_up,
                swiglu.down))
        return tuple(layers)

    def finish(self, vocabulary: int, backend: Backend) -> None:
        """Fill the padding rows, and convert weights to the layout of the backend's kernels.

        Call it once all other rows hold the checkpoint's numbers.
        """
        self._fill_padding(vocabulary)
        for form, experts in self._layer_weights():
            backend.weights.prepare(form, table=False, experts=experts)
        head = form_of(self.lm_head.weight)
        backend.weights.prepare(head, table=head is self.embedding)

    def _linear_weights(self) -> list[WeightForm]:
        return [*(form for form, _ in self._layer_weights()), form_of(self.lm_head.weight)]

    def _layer_weights(self) -> Iterator[tuple[WeightForm, int]]:
        """Yield the weights of the linear layers, also of heads for drafts, and their experts; 0 for one matrix."""
        mtp_blocks = chain.from_iterable(self.mtp.layers) if self.mtp else ()
        for block in chain(self.blocks, mtp_blocks):
            for name, linear in block.weights._asdict().items():
                if isinstance(linear, Linear):
                    yield form_of(linear.weight), block.layer.experts_of(name)
        of_mtp = [head for head in (self.mtp.fc, self.mtp.lm_head) if head] if self.mtp else []
        of_heads = (*of_mtp, *(self.eagle.fc if self.eagle else ()))
        for linear in of_heads:
            yield form_of(linear.weight), 0

    def _fill_padding(self, vocabulary: int) -> None:
        head = form_of(self.lm_head.weight)
        if self.embedding is not head and self.eagle is None:
            shape = self.padded_vocabulary - vocabulary, self.embedding.shape[1]
            self.embedding.write(vocabulary, torch.zeros(shape, device=self.norm.device))
        head.repeat_first(vocabulary)
        if self.mtp and self.mtp.lm_head:
            form_of(self.mtp.lm_head.weight).repeat_first(vocabulary)
