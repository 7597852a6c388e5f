"""Order of rows by expert on an emulated Ascend device, as by the golden router in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from npuserve.kernels import ascend
from npuserve.kernels.experts import route_experts
from npuserve.kernels.norm import add_rms_norm
from npuserve.kernels.quantized import Quantized, Scheme
from npuserve.npu import emulator
from tests.kernels.comparison import randn
from tests.npu.emulator.child import emulated

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUTE = route_experts.implementations[ascend.LABEL]


def routed(index: int, dtype: torch.dtype) -> tuple[Any, Tensor, Any]:
    """Return the golden routing of a case, its x, and the routing of the device."""
    x, weight, *rest = route_experts.cases[index].make(torch.Generator().manual_seed(0), dtype)
    golden = route_experts(x.double(), weight.double(), *rest)
    return golden, x, ROUTE.function(*ROUTE.adapt((x, weight, *rest)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [index for index, case in enumerate(route_experts.cases) if not case.benchmark])
@emulated(relax=("fp32",), poison=True)
def test_rows_are_ordered_as_by_the_golden_router(index: int, dtype: torch.dtype) -> None:
    golden, x, routing = routed(index, dtype)
    with pytest.raises(ValueError, match="not gathered yet"):
        routing.tokens  # noqa: B018
    rows = routing.gather(x.npu(), None).cpu()
    torch.testing.assert_close(routing.weights.cpu().double(), golden.weights, atol=1e-3, rtol=1e-3)
    assert torch.equal(routing.places.cpu().view_as(golden.places), golden.places)
    assert torch.equal(routing.tokens.cpu(), golden.begins.diff().long())
    token = torch.arange(len(x)).repeat_interleave(golden.places.shape[1])
    used = golden.places.flatten() >= 0
    assert torch.equal(rows[golden.places.flatten()[used].long()], x[token[used]])


@emulated()
def test_counters_add_the_tokens_of_each_expert() -> None:
    x, weight, *rest = route_experts.cases[0].make(torch.Generator().manual_seed(0), torch.bfloat16)
    x, weight, *rest = ROUTE.adapt((x, weight, *rest[:4]))
    counters = torch.full((rest[3],), 5).npu()
    routing = ROUTE.function(x, weight, *rest, counters)
    routing.gather(x, None)
    assert torch.equal(counters.cpu(), routing.tokens.cpu() + 5)


@pytest.mark.parametrize(
    "scheme", [Scheme(levels=ascend.LEVELS), Scheme(torch.tensor([0.04]))], ids=["dynamic", "static"])
@emulated()
def test_rows_are_quantized_as_they_are_gathered(scheme: Scheme) -> None:
    golden, x, routing = routed(2, torch.bfloat16)
    by = scheme if scheme.scale is None else Scheme(scheme.scale.npu())
    rows = routing.gather(x.npu(), by)
    assert isinstance(rows, Quantized)
    places = golden.places.flatten().long()
    wanted = x.double().repeat_interleave(golden.places.shape[1], 0)
    scale = rows.scale.cpu().double()[places].unsqueeze(1)
    assert ((rows.values.cpu().double()[places] * scale - wanted).abs() <= 0.51 * scale).all()


@emulated()
def test_norm_keeps_the_numbers_that_the_router_multiplies() -> None:
    """No cast is launched after it, and the copies are of the rounded numbers."""
    x, residual, gamma = (randn(*shape, seed=seed, dtype=torch.bfloat16).npu()
                          for seed, shape in enumerate(((5, 64), (5, 64), (64,))))
    norm = add_rms_norm.implementations[ascend.LABEL].function
    plain, total = norm(x, residual, gamma, 1e-6)
    kept, same = norm(x, residual, gamma, 1e-6, widens=True)
    assert torch.equal(total.cpu(), same.cpu())
    assert torch.equal(plain.cpu(), kept.cpu())
    emulator.clear_calls()
    wide = ascend.in_float32(kept)
    assert not [call for call in emulator.calls() if call.name.startswith("aclnn")]
    assert torch.equal(wide.cpu(), plain.cpu().float())
    assert torch.equal(ascend.in_float32(plain).cpu(), plain.cpu().float())


@emulated(relax=("fp32",), poison=True)
def test_places_of_other_ranks_add_nothing() -> None:
    """Rows beyond those of the rank's experts are never written, and are not read."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 32, generator=generator)
    weight, results = torch.randn(12, 32, generator=generator), torch.full((27, 16), torch.nan)
    golden = route_experts(x, weight, 3, True, 4, 5)
    routing = ROUTE.function(x.npu(), weight.npu(), 3, True, 4, 5)
    routing.gather(x.npu(), None)
    used = int(golden.begins[-1])
    results[:used] = torch.randn(used, 16, generator=generator)
    wanted = torch.zeros(9, 16)
    for place, factor in zip(golden.places.t(), golden.weights.t(), strict=True):
        row = results[place.clamp(min=0).long()] * factor.unsqueeze(1)
        wanted += torch.where(place.unsqueeze(1) >= 0, row, 0)
    torch.testing.assert_close(routing.sum(results.npu(), None).cpu(), wanted)
