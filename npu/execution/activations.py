"""Bytes of a step's activations and logits, and of the table of rotary embeddings, predicted from the model."""

from __future__ import annotations

from typing import Any

import torch

from npuserve.kernels.attention import paged_attention
from npuserve.kernels.linear import linear
from npuserve.kernels.native import LANES
from npuserve.kernels.registry import Kernel
from npuserve.kernels.sample import sample
from npuserve.npu.backends.base import Backend
from npuserve.npu.execution.sampling_state import penalties_bytes
from npuserve.npu.model import storage
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.forms.matrix import StoredMatrix

MAX_SCRATCH_BYTES = 1 << 20
"""Bytes that a kernel thread keeps at most, unless the weight panels that it works on are larger."""

GOLDEN_SAMPLING_BYTES = 6 * torch.float32.itemsize
"""Bytes per logit that the golden sampler allocates: up to six copies in float32."""

PANELS = 4
"""Panels of LANES weights that a thread of the native GEMMs works on at a time."""

HIDDEN_COPIES = 5
GOLDEN_HIDDEN_COPIES = 2
"""Tensors [T, H] that are held at the same time: the residual stream, its norm, and outputs of the layers."""

MTP_COPIES = 7
"""Tensors [T, H] that a head for drafts holds beside the model's: its two inputs, their norms, these two in one tensor,
and their product, or the features of a step. Where it is captured, the model's hidden states are copied for it."""


def decoder_bytes(config: ModelConfig, backend: Backend, tokens: int, context: int, itemsize: int) -> int:
    """Return the bytes that the decoder's kernels write and hold at the same time."""
    hidden = config.hidden_size
    layers = list(dict.fromkeys(config.local_layers))
    summed = 0 if backend.capabilities.reduces else _gathered_bytes(config, backend, tokens * hidden * itemsize)
    mtp_copies = MTP_COPIES + (1 if backend.capabilities.padding_blocks else 0)
    of_mtp = mtp_copies * tokens * hidden * itemsize if config.mtp or config.eagle else 0
    linears = storage.layer_matrices(config)
    if not has_own_kernel(backend, paged_attention):
        # The largest layer, beside the residual and its norm.
        largest = max(layer.golden_elements(tokens, context) for layer in layers)
        floats = (GOLDEN_HIDDEN_COPIES * tokens * hidden + largest) * itemsize
        # One GEMM in float64 exists at a time; the LM head's is counted with the logits.
        head = _in_float64(storage.tables(config, backend.capabilities.vocabulary_tile)[-1], backend, 0)
        return summed + of_mtp + floats + max(0, max(_in_float64(matrix, backend, tokens) for matrix in linears) - head)
    # Each kernel's output has its own memory, held until the next layer overwrites it.
    width = HIDDEN_COPIES * hidden + sum(layer.output_width for layer in layers)
    parts = max(layer.scratch_bytes(context, backend.threads) for layer in layers)
    panels = PANELS * LANES * max(matrix.inputs for matrix in linears) * itemsize
    return summed + of_mtp + tokens * width * itemsize + parts + backend.threads * max(MAX_SCRATCH_BYTES, panels)


def step_bytes(config: ModelConfig, backend: Backend, rows: int, tokens: int, context: int, itemsize: int) -> int:
    """Return the bytes of the activations of a step of `tokens` tokens and `rows` rows, and of drafting after it."""
    operators = _operator_bytes(config, backend, rows, tokens, itemsize)
    drafting = decoder_bytes(config.draft, backend, tokens, context, itemsize) if config.draft else 0
    return decoder_bytes(config, backend, tokens, context, itemsize) + operators + drafting


def _operator_bytes(config: ModelConfig, backend: Backend, rows: int, tokens: int, itemsize: int) -> int:
    """Return the bytes of the largest layer's operators beside their inputs and outputs."""
    return max(sum(backend.operator_bytes(kernel, sizes, rows, tokens, itemsize)
                   for kernel, sizes in layer.operator_sizes.items()) for layer in config.local_layers)


def _gathered_bytes(config: ModelConfig, backend: Backend, nbytes: int) -> int:
    """Return the bytes of a gather of `nbytes` from each rank; 0 for ranks that share memory, and for one rank."""
    return config.shard.size * nbytes if config.shard.size > 1 and not backend.capabilities.shares_memory else 0


def logits_bytes(config: ModelConfig, backend: Backend, rows: int, itemsize: int) -> int:
    """Return the bytes of the LM head's logits and their sampling.

    If captured steps sample, they allocate as much again in the memory of the graphs, and the tokens of `Penalties`.
    Otherwise edits of logits and counts for penalties are not included; they depend on the requests.
    """
    can = backend.capabilities
    copies = can.sampling_bytes if has_own_kernel(backend, sample) else GOLDEN_SAMPLING_BYTES
    head = storage.tables(config, can.vocabulary_tile)[-1]
    columns = config.padded_vocabulary(can.vocabulary_tile)  # each rank gathers the logits of all
    captured = (rows * columns * copies + penalties_bytes(rows, config.vocab_size)) if can.sampler_filters else 0
    gathered = _gathered_bytes(config, backend, rows * columns // config.shard.size * itemsize)
    return rows * columns * (itemsize + copies) + gathered + captured + _in_float64(head, backend, rows)


def _in_float64(weight: StoredMatrix, backend: Backend, tokens: int) -> int:
    """Return the bytes of float64 copies in the golden int8 GEMM, which is exact: the weight and its outputs."""
    copies = weight.form.golden_copies
    if not copies or has_own_kernel(backend, linear):
        return 0
    weights = weight.rows * weight.inputs * copies
    outputs = tokens * weight.rows * 2  # the sums, and their scaled copy
    return (weights + outputs) * torch.float64.itemsize


def has_own_kernel(backend: Backend, kernel: Kernel[Any, Any]) -> bool:
    """Return False if the golden function serves the kernel."""
    return backend.kernels in kernel.implementations


def rotary_bytes(config: ModelConfig, length: int) -> int:
    """Return the bytes of the table of rotary embeddings (`rope.cos_sin_table`), and of that of a model that drafts."""
    nbytes = length * config.rotary_dim * torch.float32.itemsize
    return nbytes + (rotary_bytes(config.draft, length) if config.draft else 0)
