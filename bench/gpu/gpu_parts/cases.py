"""Cases of the registry's kernels at the shape of a whole model, made on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from gpu_parts.shapes import SHAPES, inner_size
from gpu_parts.worker import Context
from npuserve.kernels import (
    attention,
    causal_conv_silu,
    embedding,
    experts,
    gated_delta_rule,
    gated_rms_norm,
    greedy,
    linear,
    norm,
    qk_norm_rope_kv_write,
    quantize,
    quantized,
    sample,
    sigmoid_gate,
    swiglu,
)
from npuserve.kernels.case_numbers import FLOATS, int4
from npuserve.kernels.kv_cache import QUANTIZED
from npuserve.kernels.registry import Case
from npuserve.npu.backends.machine import takes_case

FLOAT8 = ("float8", "grouped float8")
"""Forms of float8, for which fewer numbers of rows are tested and timed."""


INT4 = int4(128)
"""Form of 4 bits in groups of 128, for which as many are."""


def large_cases(context: Context, rows: tuple[int, ...]) -> dict[str, list[Case]]:
    """Return kernel -> cases at the run's shape: with each number of rows, and with many rows of one prompt."""
    shape = SHAPES[context.args.shape]
    rows = (1, 5) if context.toy else (1, 64) if context.quick else rows
    many = 9 if context.toy else 2048
    found: dict[str, list[Case]] = {}
    cases = _cases(shape, rows, many, context.toy)
    if "linear_num_key_heads" in shape:
        cases = chain(_hybrid_cases(shape, rows, many), cases)
    if "num_experts" in shape:
        cases = chain(_experts_cases(shape, rows, many), cases)
    for name, case in cases:
        case = quantized.with_levels(replace(case, benchmark=True), context.backend.capabilities.int8_levels)
        if takes_case(context.backend, case):
            found.setdefault(name, []).append(made_on(case, context.backend.device))
    return found


def _cases(shape: dict[str, Any], rows: tuple[int, ...], many: int, toy: bool) -> Iterator[tuple[str, Case]]:
    hidden, inner, head = shape["hidden_size"], inner_size(shape), shape["head_dim"]
    heads, kv_heads, vocabulary = shape["num_attention_heads"], shape["num_key_value_heads"], shape["vocab_size"]
    width = heads * head
    products = ((hidden, width + 2 * kv_heads * head), (width, hidden), (inner, hidden))
    few = [n for n in rows if n in (rows[0], 64, 256)]
    for numbers, scheme, each_tokens in (
            (FLOATS, "", rows), (linear.INT8_GIVEN, "int8", rows), (linear.FLOAT8_GIVEN, "float8", few),
            (linear.GROUPED_GIVEN, "grouped float8", few), (INT4, "", few)):
        for tokens in (*each_tokens, many):
            yield from (("linear", linear._case(tokens, k, n, numbers=numbers)) for k, n in products)
            yield "linear_swiglu", linear._swiglu_case(tokens, hidden, inner, numbers=numbers, scheme=scheme)
    for tokens in rows:
        yield from (("linear_argmax", linear._argmax_case(tokens, hidden, vocabulary, 0, numbers=numbers))
                    for numbers in (FLOATS, linear.INT8_MADE))
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


def _hybrid_cases(shape: dict[str, Any], rows: tuple[int, ...], many: int) -> Iterator[tuple[str, Case]]:
    """Yield the cases of a gated delta net, and of what is different in its model's attention."""
    hidden, head, kv_heads = shape["hidden_size"], shape["head_dim"], shape["num_key_value_heads"]
    heads, rotary = shape["num_attention_heads"], int(shape["head_dim"] * shape["partial_rotary_factor"])
    sizes = shape["linear_num_key_heads"], shape["linear_num_value_heads"]
    dims = shape["linear_key_head_dim"], shape["linear_value_head_dim"]
    channels = 2 * sizes[0] * dims[0] + sizes[1] * dims[1]
    half = [(many // 2, many // 2), *[(1, 512)] * rows[-1], (many // 4, many)]
    for steps in (*([(1, 512)] * n for n in rows), [(4, 512)] * rows[0], [(many, many)], half):
        yield "causal_conv_silu", causal_conv_silu._case(steps, channels)
        yield "gated_delta_rule", gated_delta_rule._case(steps, *sizes, *dims)
    for tokens in (*rows, many):
        yield "gated_rms_norm", gated_rms_norm._case(tokens, sizes[1], dims[1])
        yield "sigmoid_gate", sigmoid_gate._case(tokens, heads * head)
        yield "rms_norm", norm._case(1, tokens, hidden, "", wide_gamma=True)
        yield "add_rms_norm", norm._case(2, tokens, hidden, "", wide_gamma=True)
        yield from (("qk_norm_rope_kv_write", qk_norm_rope_kv_write._case(
            tokens, heads, kv_heads, head, cached=cached, rotary_dim=rotary, wide_gamma=True))
            for cached in ("", *QUANTIZED))


def _experts_cases(shape: dict[str, Any], rows: tuple[int, ...], many: int) -> Iterator[tuple[str, Case]]:
    """Yield the cases of a mixture of experts, whose tokens choose their own experts, and the same."""
    hidden, width = shape["hidden_size"], shape["moe_intermediate_size"]
    count, top_k = shape["num_experts"], shape["num_experts_per_tok"]
    few = [n for n in rows if n in (rows[0], 8, 64)]
    for tokens in (*rows, many):
        yield "route_experts", experts._route_case(tokens, hidden, count, top_k, True)
    for numbers, scheme, each_tokens in (
            (FLOATS, "", few), (experts.FLOAT8_GROUPS, "grouped float8", rows), (experts.INT8, "int8", few),
            (INT4, "", few)):
        for tokens in (*each_tokens, many):
            sizes = tokens, count, top_k, hidden, width
            yield "experts_swiglu", experts._swiglu_case(sizes, numbers, scheme)
            yield "experts_sum", experts._sum_case(sizes, numbers, shared="shared_expert_intermediate_size" in shape)
        yield "experts_swiglu", experts._swiglu_case((rows[-1], count, top_k, hidden, width), numbers, one=True)


def made_on(case: Case, device: torch.device) -> Case:
    """Return the case with inputs generated on the device; a CPU takes seconds for weights of this size."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
        with torch.device(device):
            return case.make(torch.Generator(device).manual_seed(generator.initial_seed()), dtype)

    return replace(case, make=make)
