"""All decoder layers of a decode step, for backends that compute them in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from npuserve.kernels import triton
from npuserve.kernels.attention import AttentionMetadata, paged_attention
from npuserve.kernels.kv_cache import Cache
from npuserve.kernels.layer import LayerWeights, Linear
from npuserve.kernels.linear import linear, linear_swiglu
from npuserve.kernels.norm import add_rms_norm, rms_norm
from npuserve.kernels.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from npuserve.kernels.quantized import DYNAMIC, FLOAT8_DYNAMIC, Scheme
from npuserve.kernels.quantized_weight import weight_of
from npuserve.kernels.registry import Case, kernel, to_host

_SCHEMES: dict[str, Scheme | None] = {"": None, "int8": DYNAMIC, "float8": FLOAT8_DYNAMIC}


def case(
    contexts: Sequence[int], heads: tuple[int, int, int] = (4, 2, 128), sizes: tuple[int, int] = (512, 1024),
    layers: int = 2, scheme: str = "", norm: bool = True, benchmark: bool = False, page: int = 32,
) -> Case:
    """Return a case.

    contexts: context length of each row.
    heads: numbers of query heads and of KV heads, and their size.
    sizes: hidden and intermediate size.
    page: tokens of a block of the cache.
    """
    q_heads, kv_heads, dim = heads
    hidden, inner = sizes
    rows = len(contexts)

    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[object, ...]:
        def gamma(size: int) -> Tensor:
            return (torch.rand(size, generator=generator) + 0.5).to(dtype)

        def projection(n: int, k: int) -> Linear:
            weight = torch.randn(n, k, generator=generator) / k**0.5
            weight_scheme = _SCHEMES[scheme]
            if weight_scheme is None:
                return Linear(weight.to(dtype), None)
            return Linear(weight_of(weight, generator, dtype, weight_scheme), None)

        def layer() -> LayerWeights:
            return LayerWeights(
                gamma(hidden), projection((q_heads + 2 * kv_heads) * dim, hidden), gamma(dim) if norm else None,
                gamma(dim) if norm else None, projection(hidden, q_heads * dim), gamma(hidden),
                projection(2 * inner, hidden), projection(hidden, inner))

        width = -(-max(contexts) // page) + 1
        tables = torch.randperm(rows * width, generator=generator).int().view(rows, width)
        shape = (2, rows * width, page, kv_heads, dim)
        caches = [tuple(torch.randn(shape, generator=generator).to(dtype)) for _ in range(layers)]
        angles = torch.arange(max(contexts))[:, None] * 1e4 ** (-torch.arange(0, dim, 2) / dim)
        positions = torch.tensor(contexts) - 1
        slots = tables[torch.arange(rows), positions // page].long() * page + positions % page
        metadata = AttentionMetadata.from_lengths(tables, contexts, [1] * rows)
        residual = torch.randn(rows, hidden, generator=generator).to(dtype)
        return (residual, tuple(layer() for _ in range(layers)), caches, 1e-6,
                torch.cat([angles.cos(), angles.sin()], dim=-1), positions, slots, metadata, q_heads, dim**-0.5)

    name = (f"{layers} layers {hidden}/{inner} {q_heads}/{kv_heads}x{dim} of {'+'.join(map(str, contexts))}"
            f"{scheme and ' ' + scheme}{'' if norm else ' no norm'}")
    # Last-bit differences flip quantized numbers, whose differences pass through all layers.
    return Case(name, make, benchmark, dim, float8=scheme == "float8", tolerance=0.3 if scheme else 0.06)


@kernel(
    "decoder_layers",
    optional=True,
    dtypes=(torch.bfloat16,),
    cases=[
        case([1]),
        case([700]),
        case([33, 290]),
        case([64, 97], (8, 2, 64), norm=False),
        case([5, 300], (16, 2, 64), (1024, 512), 3),
        *(case(contexts, scheme=scheme) for scheme in ("int8", "float8") for contexts in ([130], [33, 290])),
        *(case([512] * rows, (16, 8, 128), (1024, 3072), scheme=scheme, benchmark=True)
          for scheme in _SCHEMES for rows in (1, 2)),
    ],
)
def decoder_layers(
    residual: Tensor, layers: Sequence[LayerWeights], caches: Sequence[tuple[Cache, Cache]], eps: float,
    cos_sin: Tensor, positions: Tensor, slots: Tensor, metadata: AttentionMetadata, heads: int, scale: float,
) -> Tensor | None:
    """Compute the layers of rows of one token each; return the residual stream after them, [R, H].

    residual: [R, H], the embeddings of the tokens.
    layers, caches: weights, and keys and values, of each layer.
    eps: epsilon of the norms.
    heads: number of query heads.
    scale: factor of the attention scores.

    The others are arguments of `qk_norm_rope_kv_write` and `paged_attention`. An implementation returns None for steps
    that it does not take. The caller then calls the kernels of each layer.
    """
    for layer, (keys, values) in zip(layers, caches, strict=True):
        normed = rms_norm.golden(residual, layer.input_norm, eps, layer.qkv.inputs)
        qkv = linear.golden(normed, layer.qkv.weight, layer.qkv.bias)
        q = qk_norm_rope_kv_write.golden(
            qkv, layer.q_norm, layer.k_norm, eps, cos_sin, positions, slots, keys, values, heads)
        attended = paged_attention.golden(q, keys, values, metadata, scale)
        out = linear.golden(attended, layer.o.weight, layer.o.bias)
        normed, residual = add_rms_norm.golden(out, residual, layer.post_norm, eps, layer.gate_up.inputs)
        gated = linear_swiglu.golden(normed, layer.gate_up.weight, layer.gate_up.bias, layer.down.inputs)
        residual = residual + linear.golden(gated, layer.down.weight, layer.down.bias)
    return residual


def register_cuda(device: torch.device) -> None:
    """Register the implementation for CUDA, once, if this GPU and its software can run it."""
    from npuserve.kernels.cuda import launch_decoder_layers

    if triton.LABEL not in decoder_layers.implementations and launch_decoder_layers.runs_on(device):
        register = decoder_layers.implementation(triton.LABEL, adapt=triton.to_device, restore=to_host)
        register(launch_decoder_layers.decoder_layers)
