"""Costs of kernels, against counts by hand."""

from __future__ import annotations

import pytest
import torch

from npuserve.kernels.attention import AttentionMetadata
from npuserve.kernels.bench.costs import COSTS, Cost, cost, nbytes
from npuserve.kernels.quantized import DYNAMIC, Quantized, Scheme
from npuserve.kernels.quantized_weight import QuantizedWeight
from npuserve.kernels.registry import KERNELS, Case
from npuserve.kernels.routing import Routing


def test_costs_cover_every_kernel() -> None:
    assert set(COSTS) == set(KERNELS)


@pytest.mark.parametrize(("name", "case", "dtype"), [
    pytest.param(k.name, k.cases[0], dtype, id=f"{k.name}-{dtype}") for k in KERNELS.values() for dtype in k.dtypes])
def test_cost_takes_golden_arguments(name: str, case: Case, dtype: torch.dtype) -> None:
    args = case.make(torch.Generator().manual_seed(0), dtype)
    made = cost(name, args)
    assert made.nbytes > 0
    assert made.operations >= 0
    assert all(nbytes(args[i]) for i in made.cold)


def test_cost_of_linear() -> None:
    x, weight, bias = torch.zeros(3, 8, dtype=torch.bfloat16), torch.zeros(5, 8, dtype=torch.bfloat16), torch.zeros(5)
    made = cost("linear", (x, weight, bias.bfloat16()))
    assert made.operations == 2 * 3 * 8 * 5
    assert made.nbytes == 2 * (3 * 8 + 5 * 8 + 5 + 3 * 5)
    assert made.kind == "bf16"
    assert cost("linear", (x.float(), weight.float(), None)).kind == "fp32"


def test_cost_of_int8_linear() -> None:
    """A scale of 4 bytes for each row of both operands, and a sum for each row of the weight. The gated product is
    quantized, with a scale and a zero point for each row."""
    x = Quantized(torch.zeros(3, 8, dtype=torch.int8), torch.ones(3))
    weight = QuantizedWeight.of(torch.zeros(6, 8, dtype=torch.int8), torch.ones(6), torch.bfloat16)
    made = cost("linear", (x, weight, torch.zeros(6, dtype=torch.bfloat16)))
    assert made.operations == 2 * 3 * 8 * 6
    operands = 3 * (8 + 4) + 6 * (8 + 4 + 4)
    assert made.nbytes == operands + 2 * (6 + 3 * 6)
    assert made.kind == "int8"
    assert cost("linear_swiglu", (x, weight, None)).nbytes == operands + 2 * 3 * 3
    assert cost("linear_swiglu", (x, weight, None, DYNAMIC)).nbytes == operands + 3 * (3 + 4)
    assert cost("linear_swiglu", (x, weight, None, Scheme(symmetric=False))).nbytes == operands + 3 * (3 + 4 + 4)


def test_cost_of_int8_norm() -> None:
    x, gamma = torch.zeros(3, 8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)
    assert cost("rms_norm", (x, gamma, 1e-6)).nbytes == 2 * (24 + 8 + 24)
    assert cost("rms_norm", (x, gamma, 1e-6, DYNAMIC)).nbytes == 2 * (24 + 8) + 24 + 3 * 4
    assert cost("add_rms_norm", (x, x, gamma, 1e-6, DYNAMIC)).nbytes == 2 * (3 * 24 + 8) + 24 + 3 * 4


def test_cost_of_attention_counts_visible_keys() -> None:
    """Rows of 1 query over 7 tokens, and of 3 queries that attend to 2, 3 and 4 tokens."""
    metadata = AttentionMetadata.from_lengths(torch.zeros(2, 1, dtype=torch.int32), [7, 4], [1, 3])
    q, cache = torch.zeros(4, 6, 8), torch.zeros(1, 16, 2, 8)
    made = cost("paged_attention", (q, cache, cache, metadata, 1.0))
    products = 2 * 6 * 8 * (7 + 2 + 3 + 4)  # with the keys, then with the values
    assert made.operations == 2 * products
    assert made.nbytes == 4 * (2 * 4 * 6 * 8 + 2 * (7 + 4) * 2 * 8)


@pytest.mark.parametrize("tokens", [1, 7, 1023, 1024])
def test_cost_of_a_rank_with_fewer_experts_than_top_k(tokens: int) -> None:
    """The ranks' costs add up to that of all experts, but for x and the routing."""

    def of_rank(held: int) -> Cost:
        routing = Routing(
            torch.empty(tokens, 8, device="meta"), torch.empty(tokens, 8, dtype=torch.int32, device="meta"),
            torch.empty(held + 1, dtype=torch.int32, device="meta"), 16)
        weight = torch.empty(held * 64, 32, device="meta")
        given = nbytes(routing) + 4 * tokens * 32 + 4 * tokens * 8 * 32
        made = cost("experts_swiglu", (torch.empty(tokens, 32, device="meta"), weight, routing))
        return Cost(made.nbytes - given, made.operations, made.kind)

    one, every = of_rank(2), of_rank(16)
    assert one.nbytes == pytest.approx(every.nbytes / 8, abs=8)
    assert every.nbytes == pytest.approx(16 * 64 * 32 * 4 * (1 - 0.5**tokens), abs=1)
    assert 8 * one.operations == every.operations
