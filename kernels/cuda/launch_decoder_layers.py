"""Calls of the kernel decoder_layers: which steps it takes, its constants and its arguments."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from npuserve.kernels.attention import AttentionMetadata
from npuserve.kernels.cuda import compiled
from npuserve.kernels.kv_cache import Cache
from npuserve.kernels.layer import LayerWeights
from npuserve.kernels.triton.common import processors, shared_memory
from npuserve.kernels.weight import Weight
from npuserve.kernels.weight import form_of as weight_form

log = logging.getLogger(__name__)

ROWS = (1, 2)
"""Rows of a step that the kernel takes. With more, kernels one by one are faster (bench/RESULTS.md)."""

MAX_HIDDEN = 5120
"""Numbers of a row whose norm the kernel computes in registers."""

THREADS = 384
"""Threads of a block."""

_POINTER = ctypes.c_void_p


class Layer(ctypes.Structure):
    """`Layer` in decoder_layers.cu."""

    _fields_ = [
        ("weight", _POINTER * 4), ("scale", _POINTER * 4),
        *((name, _POINTER) for name in ("input_norm", "post_norm", "q_norm", "k_norm", "keys", "values"))]


@cache
def step_type(layers: int) -> type[Any]:
    """Return `Step` in decoder_layers.cu."""

    class Step(ctypes.Structure):
        _fields_ = [
            ("layers", Layer * layers),
            *((name, _POINTER) for name in (
                "residual", "qkv", "attended", "gated", "partial", "counters", "cos_sin", "positions", "slots",
                "tables", "contexts")),
            ("table_stride", ctypes.c_int64), ("eps", ctypes.c_float), ("levels", ctypes.c_float),
            ("scale", ctypes.c_float)]

    return Step


def runs_on(device: torch.device) -> bool:
    """Return True if the GPU has the instructions, and NVRTC can be used."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) and compiled.available()


def form_of(weights: Sequence[Weight]) -> int | None:
    """Return the constant FORM for weights that are all of one form; None for a form that the kernel does not take."""
    first, *others = (weight.fused_form for weight in map(weight_form, weights))
    return None if first is None or any(other != first for other in others) else first[0]


def constants_of(
    rows: int, layers: Sequence[LayerWeights], keys: Cache, rotary_dim: int, heads: int, blocks: int, shared: int
) -> dict[str, int] | None:
    """Return the constants of a compilation; None if the kernel does not take such a model or number of rows.

    rotary_dim: rotated numbers of a head. The kernel rotates whole heads.
    blocks: multiprocessors of the device. shared: bytes of shared memory that a block may have.
    """
    if rows not in ROWS or not isinstance(keys, Tensor) or keys.dtype != torch.bfloat16:
        return None
    head_dim = keys.shape[3]
    if head_dim not in (64, 128) or rotary_dim != head_dim:
        return None
    linears = [linear for x in layers for linear in x.linears]
    form = form_of([linear.weight for linear in linears])
    if form is None or any(linear.bias is not None for linear in linears):
        return None
    kv_heads = keys.shape[2]
    hidden, inner = layers[0].qkv.weight.shape[1], layers[0].down.weight.shape[1]
    inputs = hidden, inner, heads * head_dim
    columns = 1024 if form and not any(n % 1024 for n in inputs) else 512  # of a stage
    if hidden > MAX_HIDDEN or any(n % columns for n in inputs):
        return None
    return {"ROWS": rows, "BLOCKS": blocks, "SHARED": shared, "LAYERS": len(layers), "HIDDEN": hidden,
            "INTERMEDIATE": inner, "Q_HEADS": heads, "KV_HEADS": kv_heads, "DIM": head_dim, "PAGE": keys.shape[1],
            "COLUMNS": columns, "FORM": form}


def sizes(constants: dict[str, int]) -> tuple[int, int]:
    """Return the numbers of `counters` of a layer and of `partial`."""
    group = constants["Q_HEADS"] // constants["KV_HEADS"]
    passes = -(-group // 6)
    units = constants["ROWS"] * constants["KV_HEADS"] * passes
    split = max(1, constants["BLOCKS"] // units)
    return 5 + 2 * constants["ROWS"] + units, units * split * -(-group // passes) * (constants["DIM"] + 4)


def arguments(
    constants: dict[str, int], residual: Tensor, layers: Sequence[LayerWeights], caches: Sequence[tuple[Cache, Cache]],
    eps: float, cos_sin: Tensor, positions: Tensor, slots: Tensor, metadata: AttentionMetadata, scale: float,
) -> tuple[ctypes.Structure, list[Tensor]]:
    """Return the kernel's argument, and the tensors of its own that it points to."""
    rows, device, activations = len(residual), residual.device, residual.dtype
    counters, partial = sizes(constants)
    q_size, kv_size = (constants[name] * constants["DIM"] for name in ("Q_HEADS", "KV_HEADS"))
    own = {
        "qkv": torch.empty(rows, q_size + 2 * kv_size, dtype=activations, device=device),
        "attended": torch.empty(rows, q_size, dtype=activations, device=device),
        "gated": torch.empty(rows, constants["INTERMEDIATE"], dtype=activations, device=device),
        "partial": torch.empty(partial, dtype=torch.float32, device=device),
        "counters": torch.zeros(len(layers) * counters, dtype=torch.int32, device=device),
    }
    given = {"residual": residual, "cos_sin": cos_sin, "positions": positions, "slots": slots,
             "tables": metadata.block_tables, "contexts": metadata.context_lens}
    step = step_type(len(layers))()
    for name, tensor in {**own, **given}.items():
        setattr(step, name, tensor.data_ptr())
    step.table_stride, step.eps, step.scale = metadata.block_tables.stride(0), eps, scale
    inputs = layers[0].qkv.inputs
    step.levels = inputs.levels if inputs else 1.0
    for to, layer, (keys, values) in zip(step.layers, layers, caches, strict=True):
        for i, linear in enumerate(layer.linears):
            parts = weight_form(linear.weight).parts
            to.weight[i] = parts.values.data_ptr()
            to.scale[i] = None if parts.scale is None else parts.scale.data_ptr()
        for name in ("input_norm", "post_norm", "q_norm", "k_norm"):
            norm = getattr(layer, name)
            setattr(to, name, None if norm is None else norm.data_ptr())
        assert isinstance(keys, Tensor)
        assert isinstance(values, Tensor)
        to.keys, to.values = keys.data_ptr(), values.data_ptr()
    return step, list(own.values())


def decoder_layers(
    residual: Tensor, layers: Sequence[LayerWeights], caches: Sequence[tuple[Cache, Cache]], eps: float,
    cos_sin: Tensor, positions: Tensor, slots: Tensor, metadata: AttentionMetadata, heads: int, scale: float,
) -> Tensor | None:
    """Launch the kernel `decoder_layers`; None where it does not take the step, or cannot be compiled.

    Raises RuntimeError if the launch fails.
    """
    rows = len(residual)
    if not residual.is_cuda or residual.dtype != torch.bfloat16:
        return None
    blocks, shared = processors(residual.device), shared_memory(residual.device)
    constants = constants_of(rows, layers, caches[0][0], cos_sin.shape[1], heads, blocks, shared)
    if constants is None or metadata.host_cu_seqlens_q != list(range(rows + 1)):
        return None
    if (made := _kernel(tuple(constants.items()), residual.device, shared)) is None:
        return None
    out = residual.clone()
    step, _ = arguments(constants, out, layers, caches, eps, cos_sin, positions, slots, metadata, scale)
    compiled.launch(made, residual.device, blocks, THREADS, shared, step)
    return out


@cache
def _kernel(constants: tuple[tuple[str, int], ...], device: torch.device, shared: int) -> Any:
    """Return the compiled kernel, or None, with a warning, if it cannot be compiled."""
    try:
        return compiled.kernel("decoder_layers", constants, device, shared)
    except RuntimeError as error:
        log.warning("decode steps of %d rows run kernel by kernel, which is slower: %s", dict(constants)["ROWS"], error)
        return None
