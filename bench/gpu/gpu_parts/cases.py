"""Cases of the registry's kernels at the shape of a whole model, made on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from gpu_parts.shapes import SHAPES
from gpu_parts.worker import Context
from npuserve.kernels import (
    attention,
    embedding,
    greedy,
    linear,
    norm,
    qk_norm_rope_kv_write,
    quantize,
    quantized,
    sample,
    swiglu,
)
from npuserve.kernels.kv_cache import QUANTIZED
from npuserve.kernels.registry import Case
from npuserve.npu.backends.machine import takes_case

FLOAT8 = ("float8", "grouped float8")
"""Forms of float8, for which fewer numbers of rows are tested and timed."""


def large_cases(context: Context, rows: tuple[int, ...]) -> dict[str, list[Case]]:
    """Return kernel -> cases at the run's shape: with each number of rows, and with many rows of one prompt."""
    shape = SHAPES[context.args.shape]
    rows = (1, 5) if context.toy else (1, 64) if context.quick else rows
    many = 9 if context.toy else 2048
    found: dict[str, list[Case]] = {}
    for name, case in _cases(shape, rows, many, context.toy):
        case = quantized.with_levels(replace(case, benchmark=True), context.backend.int8_levels)
        if takes_case(context.backend, case):
            found.setdefault(name, []).append(made_on(case, context.backend.device))
    return found


def _cases(shape: dict[str, Any], rows: tuple[int, ...], many: int, toy: bool) -> Iterator[tuple[str, Case]]:
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads, vocabulary = shape["num_attention_heads"], shape["num_key_value_heads"], shape["vocab_size"]
    width = heads * head
    products = ((hidden, width + 2 * kv_heads * head), (width, hidden), (inner, hidden))
    few = [n for n in rows if n in (rows[0], 64, 256)]
    for int8 in ("", "given", *FLOAT8):
        for tokens in (*(few if int8 in FLOAT8 else rows), many):
            yield from (("linear", linear._case(tokens, k, n, int8=int8)) for k, n in products)
            scheme = "int8" if int8 == "given" else int8
            yield "linear_swiglu", linear._swiglu_case(tokens, hidden, inner, int8=int8, scheme=scheme)
    for tokens in rows:
        yield from (("linear_argmax", linear._argmax_case(tokens, hidden, vocabulary, 0, int8=i)) for i in ("", "made"))
        yield "greedy", greedy._case(tokens, vocabulary, 0)
        yield "sample", sample._case(tokens, vocabulary, 0, top_k=20, top_p=0.95)
    for tokens in (*rows, many):
        for scheme in ("", "int8", *(FLOAT8 if tokens in (*few, many) else ())):
            yield "rms_norm", norm._case(1, tokens, hidden, scheme)
            yield "add_rms_norm", norm._case(2, tokens, hidden, scheme)
            if scheme:
                yield "quantize", quantize._quantize_case(tokens, width, scheme)
        yield "swiglu", swiglu._case(tokens, inner)
        yield from (("qk_norm_rope_kv_write", qk_norm_rope_kv_write._case(tokens, heads, kv_heads, head, cached=cached))
                    for cached in ("", *QUANTIZED))
    short, long = (40, 90) if toy else (512, 8192)
    for cached in ("", *QUANTIZED):
        for steps in (*([(1, short)] * n for n in rows), [(1, long)], [(1, long)] * rows[1], [(many, many)],
                      [(short, long)], [(1, short)] * rows[1] + [(short, long)]):
            yield "paged_attention", attention._case(steps, heads, kv_heads, head, 32, cached=cached)
    yield from (("embedding", embedding._case(tokens, vocabulary, hidden)) for tokens in (rows[0], many))


def made_on(case: Case, device: torch.device) -> Case:
    """Return the case with inputs generated on the device; a CPU takes seconds for weights of this size."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
        with torch.device(device):
            return case.make(torch.Generator(device).manual_seed(generator.initial_seed()), dtype)

    return replace(case, make=make)
