"""Products by experts: the bits of a token do not depend on the others, whichever experts they choose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from npuserve.kernels.experts import experts_sum, experts_swiglu, route_experts
from npuserve.kernels.int4_weight import int4_of
from npuserve.kernels.native.packed import PackedWeight
from npuserve.kernels.quantized_weight import weight_of
from npuserve.kernels.routing import Routing
from npuserve.kernels.weight import FloatWeight, WeightForm, form_of
from tests.kernels.comparison import generator, randn
from tests.kernels.variants import ISAS

pytestmark = pytest.mark.skipif(not ISAS, reason="the native kernels are not built")

EXPERTS, TOP_K, HIDDEN, WIDTH, TOKENS = 6, 2, 264, 48, 300


def packed(weight: Tensor, numbers: str) -> WeightForm:
    """Return a weight in a form: "plain" or "compact" floats, "int8", "int4"."""
    if numbers == "int8":
        return weight_of(weight.float(), generator(), weight.dtype).packed()
    if numbers == "int4":
        return int4_of(weight.float(), 32, weight.dtype).packed()
    return FloatWeight(PackedWeight.pack(weight, compact=numbers == "compact"), weight.dtype)


def routed(logits: Tensor) -> Routing:
    identity = torch.eye(EXPERTS, dtype=logits.dtype)
    routing: Routing = route_experts.implementations["cpu"].function(logits, identity, TOP_K, True, 0, EXPERTS)
    return routing


@pytest.mark.parametrize("same", [False, True], ids=["", "all the same"])
@pytest.mark.parametrize("numbers", ["plain", "compact", "int8", "int4"])
def test_token_bits_are_independent_of_other_tokens(isa: str, numbers: str, same: bool) -> None:
    dtype = torch.bfloat16
    gate_up = packed(randn(EXPERTS * 2 * WIDTH, HIDDEN, seed=1).mul(HIDDEN**-0.5).to(dtype), numbers)
    down = packed(randn(EXPERTS * 272, WIDTH, seed=2).mul(WIDTH**-0.5).to(dtype), numbers)
    x, logits = randn(TOKENS, HIDDEN, seed=3).to(dtype), randn(TOKENS, EXPERTS, seed=4).to(dtype)
    if same:
        logits = logits[:1].expand(TOKENS, -1).contiguous()

    def layer(part: slice) -> Tensor:
        routing = routed(logits[part].contiguous())
        gated = experts_swiglu.implementations["cpu"].function(
            x[part].contiguous(), gate_up, routing, form_of(down).inputs)
        out: Tensor = experts_sum.implementations["cpu"].function(gated, down, routing)
        return out

    together = layer(slice(0, TOKENS))
    assert together.isfinite().all()
    for begin, end in ((0, 1), (7, 8), (299, 300), (3, 5), (10, 27), (100, 165), (1, 290)):
        assert torch.equal(layer(slice(begin, end)), together[begin:end]), (begin, end)


def test_router_counts_the_tokens_of_each_expert(isa: str) -> None:
    tokens = torch.arange(4)
    x, weight = randn(50, 24), randn(9, 24, seed=1)
    routing = route_experts.implementations["cpu"].function(x, weight, 3, False, 2, 4, tokens)
    assert torch.equal(tokens, torch.arange(4) + routing.begins.diff())
    golden = route_experts(x, weight, 3, False, 2, 4)
    assert torch.equal(routing.places, golden.places)
    assert torch.equal(routing.begins, golden.begins)
