"""Configurations of the tunable CUDA kernels, each as an implementation, by the shape that they are for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from gpu_parts.cases import made_on
from gpu_parts.shapes import SHAPES, inner_size
from gpu_parts.worker import Context
from npuserve.kernels import attention, linear, quantized
from npuserve.kernels.case_numbers import FLOATS, Numbers
from npuserve.kernels.kv_cache import QUANTIZED
from npuserve.kernels.registry import KERNELS, Case, Implementation, Kernel
from npuserve.kernels.triton import LABEL
from npuserve.kernels.weight import form_of
from npuserve.npu.backends.machine import takes_case

CHOSEN = "chosen"
"""Label of the configuration that the tables choose; the labels of the others are their repr."""

ROWS = {16: 1, 32: 32, 64: 64, 128: 128, 256: 256, 512: 2048}
"""Bucket of rows -> the number of rows at which it is measured."""


@dataclass(frozen=True)
class Shape:
    """A shape. kernel: with an implementation for each configuration. key: of the kernels' tables."""

    name: str
    key: str
    kernel: Kernel[..., Any]
    case: Case


def shapes(context: Context) -> Iterator[Shape]:
    """Yield the shapes, the most frequent first; none if the kernels are not in Triton."""
    if context.backend.kernels != LABEL:
        return
    for numbers in (FLOATS, linear.FLOAT8_GIVEN, linear.INT8_GIVEN, linear.GROUPED_GIVEN):
        for bucket, rows in list(ROWS.items())[: 1 if context.toy or context.quick else None]:
            yield from _products(context, numbers, bucket, rows)
    yield from _attentions(context)


def _made(name: str, key: str, kernel: Kernel[..., Any], case: Case, variants: dict[str, Callable[..., Any]],
          context: Context) -> Shape:
    own = kernel.implementations[LABEL]
    if context.toy:
        variants = dict(list(variants.items())[:2])
    made = {CHOSEN: own} | {
        label: Implementation(variant, own.adapt, own.restore) for label, variant in variants.items()}
    case = quantized.with_levels(replace(case, benchmark=True), context.backend.capabilities.int8_levels)
    return Shape(name, key, replace(kernel, implementations=made), made_on(case, context.backend.device))


def _products(context: Context, numbers: Numbers, bucket: int, rows: int) -> Iterator[Shape]:
    """Yield the shapes of the products."""
    from npuserve.kernels.triton.common import processors
    from npuserve.kernels.triton.linear_tiles import candidates, key

    shape = SHAPES[context.args.shape]
    hidden, inner = shape["hidden_size"], inner_size(shape)
    width = shape["num_attention_heads"] * shape["head_dim"]
    qkv = width + 2 * shape["num_key_value_heads"] * shape["head_dim"]
    form: Any = numbers.label if numbers.is_float8 else ""
    cases: list[tuple[Any, int, int, Case]] = [("linear", n, k, linear._case(rows, k, n, numbers=numbers)) for k, n in (
        (hidden, qkv), (width, hidden), (inner, hidden))]
    cases.append(("linear_swiglu", 2 * inner, hidden, linear._swiglu_case(rows, hidden, inner, numbers=numbers)))
    if bucket <= 256 and not form:  # no checkpoint has a float8 LM head
        vocabulary = shape["vocab_size"]
        cases.append(("linear_argmax", vocabulary, hidden, linear._argmax_case(
            rows, hidden, vocabulary, 0, numbers=linear.INT8_MADE if numbers.scheme else FLOATS)))
    itemsize = 1 if numbers.scheme else 2
    for kind, n, k, case in cases:
        if not takes_case(context.backend, case):
            continue
        found = candidates(kind, itemsize, rows, n, k, processors(context.backend.device), form=form)
        yield _made(f"{kind} {case.name}", repr(key(kind, itemsize, bucket, n, k, form)), KERNELS[kind], case,
                    {str(tiles): _product(kind, tiles, numbers) for tiles in found}, context)


def _product(kind: str, tiles: Any, numbers: Numbers) -> Callable[..., Any]:
    """Return an implementation with these tiles; None: the library's GEMM."""
    from npuserve.kernels.triton import launch_linear as launch

    def call(x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
        x = form_of(weight).cuda_input(x)
        if tiles is not None:
            arguments = rest if kind == "linear_argmax" else ()
            return getattr(launch, kind)(x, weight, bias, *arguments, tiles=tiles)
        if numbers is linear.INT8_GIVEN:
            return launch.library(kind, x, weight, bias)  # type: ignore[arg-type]
        whole = launch.library("linear", x, weight, bias) if numbers.scheme else F.linear(x, weight, bias)
        if kind == "linear":
            return whole
        after, arguments = ("swiglu", ()) if kind == "linear_swiglu" else ("greedy", rest)
        return KERNELS[after].implementations[LABEL].function(whole, *arguments)

    return call


def _attentions(context: Context) -> Iterator[Shape]:
    from npuserve.kernels.triton.launch_attention import CONFIGS

    shape = SHAPES[context.args.shape]
    heads = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    short, long, many = (20, 40, 24) if context.toy else (512, 8192, 2048)
    decodes = [[(1, short)], [(1, short)] * 16, [(1, short)] * 64, [(1, short)] * 256, [(1, long)], [(1, long)] * 16]
    chunks = [[(short, short)], [(many, many)], [(short, long)]]
    for chunked, all_rows in ((False, decodes), (True, chunks)):
        for cached in ("", *QUANTIZED):
            for rows in all_rows[: 1 if context.toy or context.quick else None]:
                case = attention._case(rows, *heads, 32, cached=cached)
                variants = {str(config): _attention(chunked, config) for config in CONFIGS[chunked]}
                yield _made(f"paged_attention {case.name}", f"{'chunks' if chunked else 'decode'}, {case.name}",
                            KERNELS["paged_attention"], case, variants, context)


def _attention(chunked: bool, config: Any) -> Callable[..., torch.Tensor]:
    from npuserve.kernels.triton import launch_attention

    def call(q: Any, keys: Any, values: Any, metadata: Any, scale: float) -> torch.Tensor:
        return launch_attention.paged_attention(
            q, keys, values, metadata.block_tables, metadata.context_lens, metadata.cu_seqlens_q, scale, not chunked,
            **{"chunks" if chunked else "decode": config})

    return call
