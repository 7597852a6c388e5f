"""Mixtures of experts on CUDA beyond the cases of all kernels: tiles, searched and sorted rows, limits of Hopper."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from npuserve.kernels.experts import experts_sum, experts_swiglu, route_experts
from npuserve.kernels.quantized import FLOAT8_GROUPED
from npuserve.kernels.routing import Routing
from npuserve.kernels.triton.linear_tiles import SHARED_BYTES, Form, Kind, Tiles
from tests.kernels.comparison import generator, randn
from tests.kernels.triton.hopper import Launch, compiled
from tests.kernels.triton.test_linear_hopper import FORMS, ITEMSIZES, QUANTIZED

HIDDEN, WIDTH, EXPERTS, TOP_K = 48, 32, 6, 2


@pytest.fixture
def launch(interpreted: ModuleType) -> ModuleType:
    from npuserve.kernels.triton import launch_experts

    return launch_experts


def routing_of(tokens: int, part: tuple[int, int] = (0, EXPERTS)) -> Routing:
    return route_experts(randn(tokens, EXPERTS, seed=tokens), torch.eye(EXPERTS), TOP_K, True, *part)


def used(routing: Routing) -> int:
    return int(routing.begins[-1])


# The router


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_choice_among_numbers_that_are_not_finite_has_places(launch: ModuleType, wrong: float) -> None:
    """Every token has distinct experts and each pair a place of its own, so that no kernel writes elsewhere."""
    x = randn(5, HIDDEN)
    x[1] = wrong
    x[3, 0] = wrong
    routing = launch.route_experts(x, randn(EXPERTS, HIDDEN, seed=1), TOP_K, False, 0, EXPERTS, None)
    assert sorted(routing.places.flatten().tolist()) == list(range(5 * TOP_K))
    assert used(routing) == 5 * TOP_K
    finite = [0, 2, 4]
    golden = route_experts(x[finite], randn(EXPERTS, HIDDEN, seed=1), TOP_K, False, 0, EXPERTS)
    torch.testing.assert_close(routing.weights[finite], golden.weights)


@pytest.mark.parametrize("part", [(0, EXPERTS), (2, 3)])
def test_one_launch_and_two_choose_the_same(
    launch: ModuleType, part: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where experts have equal logits: the first one is chosen."""
    x, weight = randn(37, HIDDEN).round(), randn(EXPERTS, HIDDEN, seed=1).round()
    weight[4] = weight[1]
    counters = [torch.full((part[1],), 7, dtype=torch.int64) for _ in range(2)]
    one = launch.route_experts(x, weight, TOP_K, True, *part, counters[0])
    monkeypatch.setattr(launch, "CHOSEN_AT_ONCE", 32)  # 4 tokens of 8 logits
    two = launch.route_experts(x, weight, TOP_K, True, *part, counters[1])
    golden = route_experts(x, weight, TOP_K, True, *part)
    for made in (one, two):
        assert torch.equal(made.places, golden.places)
        assert torch.equal(made.begins, golden.begins)
        torch.testing.assert_close(made.weights, golden.weights)
    assert counters[0].tolist() == counters[1].tolist() == (7 + golden.begins.diff()).tolist()


# Products


def test_searched_rows_are_the_sorted_ones(launch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if half of the experts are of another rank."""
    x, weight = randn(30, HIDDEN), randn(3 * 2 * WIDTH, HIDDEN, seed=1)
    routing = routing_of(30, (2, 3))
    assert used(routing) < 30 * TOP_K
    searched = launch.experts_swiglu(x, weight, routing)
    monkeypatch.setattr(launch, "SEARCHED", ())
    in_order = launch.experts_swiglu(x, weight, routing)
    assert torch.equal(searched[: used(routing)], in_order[: used(routing)])
    golden = experts_swiglu(x, weight, routing)
    torch.testing.assert_close(searched[: used(routing)], golden[: used(routing)], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tiles", [Tiles(32, 16, 32, 1, 4, 2), Tiles(16, 32, 16, 3, 4, 2), Tiles(64, 16, 32, 2, 4, 2)])
@pytest.mark.parametrize("one", [False, True])
def test_tiles_do_not_change_results(launch: ModuleType, tiles: Tiles, one: bool) -> None:
    """Several tiles of an expert, also if all tokens choose the same; K in parts, whose counts end at 0."""
    from npuserve.kernels.triton import launch_linear

    tokens = 41
    logits = randn(1 if one else tokens, EXPERTS).expand(tokens, -1)
    routing = route_experts(logits, torch.eye(EXPERTS), TOP_K, False, 0, EXPERTS)
    x, gate_up = randn(tokens, HIDDEN), randn(EXPERTS * 2 * WIDTH, HIDDEN, seed=1)
    down = randn(EXPERTS * HIDDEN, WIDTH, seed=2)
    gated = launch.experts_swiglu(x, gate_up, routing, tiles=tiles)
    torch.testing.assert_close(gated, experts_swiglu(x, gate_up, routing), atol=1e-4, rtol=1e-4)
    total = launch.sum_experts(launch.experts_linear(gated, down, routing, tiles), routing, None, None)
    torch.testing.assert_close(total, experts_sum(gated, down, routing), atol=1e-3, rtol=1e-4)
    assert not launch_linear.arrived_of(torch.device("cpu")).any()


def test_numbers_of_unused_places_are_in_no_sum(launch: ModuleType) -> None:
    """Experts of other ranks: their places of the results hold anything."""
    routing = routing_of(9, (0, 2))
    results = randn(9 * TOP_K, HIDDEN)
    results[used(routing):] = torch.nan
    shared, gate = randn(9, HIDDEN, seed=3), randn(9, 1, seed=4)
    found = launch.sum_experts(results, routing, shared, gate)
    expected = shared * torch.sigmoid(gate)
    for token, (places, weights) in enumerate(zip(routing.places.tolist(), routing.weights.tolist(), strict=True)):
        for place, weight in zip(places, weights, strict=True):
            expected[token] += weight * results[place] if place >= 0 else 0
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(launch.sum_experts(results, routing, shared, None),
                               found - shared * (torch.sigmoid(gate) - 1))


@pytest.mark.parametrize(("tokens", "top_k", "experts", "m"), [
    (1, 8, 128, 16), (8, 8, 128, 16), (64, 8, 128, 16), (512, 8, 128, 64), (40, 4, 4, 16), (3, 1, 9, 16)])
def test_tiles_of_any_choice_are_within_the_bound(
    launch: ModuleType, tokens: int, top_k: int, experts: int, m: int
) -> None:
    bound = launch.tile_bound(tokens, top_k, experts, m)
    chance = generator(tokens)
    for spread in (0.0, 1.0, 5.0, 1000.0):
        logits = torch.randn(tokens, experts, generator=chance) + spread * torch.randn(experts, generator=chance)
        rows = torch.bincount(logits.topk(top_k).indices.flatten(), minlength=experts)
        assert int(((rows + m - 1) // m).sum()) <= bound


def test_tiles_bound_with_one_token_is_the_number_of_its_experts(launch: ModuleType) -> None:
    assert launch.tile_bound(1, 8, 128, 16) == 8


@pytest.mark.parametrize("tokens", [1, 16, 64, 1024, 8192])
@pytest.mark.parametrize("kind", ["linear_swiglu", "linear"])
def test_tiles_of_a_rank_are_those_of_all_experts(launch: ModuleType, kind: Kind, tokens: int) -> None:
    """A rank with every eighth expert has an eighth of the rows, so that an expert has as many as on one device."""
    every, of_rank = (
        launch.choose_tiles(kind, 2, tokens, 8, experts, 1536, 2048, 132, all_experts=128) for experts in (128, 16))
    assert replace(of_rank, split=1) == replace(every, split=1)


@pytest.mark.parametrize("tokens", [1, 1023, 1024, 8192])
def test_tiles_of_a_rank_with_fewer_experts_than_top_k(launch: ModuleType, tokens: int) -> None:
    tiles, of_all = (launch.choose_tiles("linear", 2, tokens, 8, held, 1536, 2048, 132, all_experts=16)
                     for held in (2, 16))
    assert replace(tiles, split=1) == replace(of_all, split=1)


@pytest.mark.parametrize(("tokens", "experts"), [(512, 8), (1024, 8), (8192, 8), (2048, 128)])
@pytest.mark.parametrize("kind", ["linear_swiglu", "linear"])
def test_tiles_of_many_rows_do_not_split_k(launch: ModuleType, kind: Kind, tokens: int, experts: int) -> None:
    """Row tiles alone occupy the device."""
    assert launch.choose_tiles(kind, 2, tokens, 2, experts, 4096, 14336, 132).split == 1


@pytest.mark.parametrize(("arguments", "message"), [
    ((randn(3, HIDDEN), randn(EXPERTS * 2 * WIDTH, HIDDEN)), "x: 3 rows are not those of 5 tokens"),
    ((randn(5, HIDDEN), randn(EXPERTS * 2 * WIDTH + 1, HIDDEN)), "rows are not those of 6 experts"),
    ((randn(5, HIDDEN + 1), randn(EXPERTS * 2 * WIDTH, HIDDEN)), "x: "),
])
def test_arguments_that_do_not_fit_are_refused(
    launch: ModuleType, arguments: tuple[Tensor, Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        launch.experts_swiglu(*arguments, routing_of(5))
    routing = replace(routing_of(5), begins=torch.zeros(EXPERTS + 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="begins: not a contiguous"):
        launch.experts_swiglu(randn(5, HIDDEN), randn(EXPERTS * 2 * WIDTH, HIDDEN), routing)
    with pytest.raises(ValueError, match="top_k: 7 is not from 1 to 6"):
        launch.route_experts(randn(5, HIDDEN), randn(EXPERTS, HIDDEN), 7, True, 0, EXPERTS, None)


# Hopper

MODELS = {"30B-A3B": (128, 2048, 768), "35B-A3B": (256, 2048, 512)}
"""Experts, hidden size, columns of an expert."""


def product(launch: ModuleType, kind: Kind, name: str, model: str, tokens: int) -> tuple[Launch, Tiles]:
    experts, hidden, width = MODELS[model]
    n, k = (width, hidden) if kind == "linear_swiglu" else (hidden, width)
    gated = kind == "linear_swiglu"
    form: Form = FORMS.get(name, "int4" if name.startswith("int4") else "")
    tiles: Tiles = launch.choose_tiles(
        kind, ITEMSIZES[name], tokens, 8, experts, n * (1 + gated), k, 132, form, groups=gated)
    number, is_int4 = name.rpartition(" ")[2], name.startswith("int4")
    signature = {
        **dict.fromkeys(("x", "weight"), f"*{number}"), "out": "*bf16" if name in QUANTIZED else f"*{number}",
        **dict.fromkeys(("begins", "arrived"), "*i32"), "partial": "*i32" if name == "i8" else "*fp32",
        **dict.fromkeys(("pairs", "x_rows", "tiles_m"), "i32"),
        **dict.fromkeys(("experts", "n", "k", "x_stride", "scale_stride"), "i32/16")}
    if is_int4:
        signature |= {"weight": "*i32", "weight_scale": "*bf16", "weight_zero": "*i8"}
    if name in QUANTIZED:
        signature |= {"x_scale": "*fp32", "weight_scale": "*fp32"}
    in_groups = gated and launch.quantizes(tiles, form, FLOAT8_GROUPED)
    if in_groups:
        signature |= {"out": "*fp8e4nv", "out_scale": "*fp32"}
    searched = next((most for most in launch.SEARCHED if 8 * tokens <= most), 0) if gated else 0
    if gated:
        signature["places" if searched else "sources"] = "*i32"
    constants: dict[str, Any] = {
        "GATED": gated, "BLOCK_N": tiles.n, "BLOCK_M": tiles.m, "BLOCK_K": tiles.k, "SPLIT": tiles.split, "GROUP": 8,
        "EXPERTS": experts, "TOP_K": 8, "SEARCHED": searched, "EVEN": True, "ONCE": tokens <= tiles.m, "WIDE": False,
        "IMPRECISE": tiles.k if name == "fp8e4nv" and tiles.m <= 64 else None,
        "SCALED_K": 128 if name == "grouped fp8e4nv" else 0, "INT4_GROUP": 128 if is_int4 else 0, "PDL": True}
    every = ("x_scale", "out_scale", "weight_scale", "weight_zero", "places", "sources")
    constants |= {argument: None for argument in every if argument not in signature}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return Launch("experts", "experts_product_kernel", signature, constants, options), tiles


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["bf16", "grouped fp8e4nv", "i8", "int4 bf16"])
@pytest.mark.parametrize("kind", ["linear_swiglu", "linear"])
def test_hopper_products_neither_spill_nor_read_early(
    launch: ModuleType, kind: Kind, name: str, model: str
) -> None:
    """At 1 to 2,048 tokens: the tensor cores multiply, weights are copied 16 bytes at a time, and nothing that the
    previous kernel writes is read before it ends."""
    launches, tiles = zip(*(product(launch, kind, name, model, tokens) for tokens in (1, 64, 512, 2048)), strict=True)
    for made, own in zip(compiled(list(launches)), tiles, strict=True):
        assert made.local == 0
        assert made.shared <= min(SHARED_BYTES, own.shared_bytes(kind, ITEMSIZES[name]) + 4096)
        assert "wgmma.mma_async" in made.ptx
        assert "cp.async.cg.shared.global" in made.ptx
        early, _, late = made.ptx.partition("griddepcontrol.wait")
        assert "ld.global" not in early
        assert "cp.async" not in early
        assert "griddepcontrol.launch_dependents" in late


@pytest.mark.parametrize(("experts", "tokens"), [(128, 1), (128, 64), (256, 1), (512, 16)])
def test_hopper_choice_and_sums_do_not_spill(launch: ModuleType, experts: int, tokens: int) -> None:
    sizes = {"EXPERTS": experts, "TOP_K": 8, "CHOICES": 8, "TOKENS": tokens, "PDL": True}
    warps = {"num_warps": min(max(tokens * experts // 1024, 1), 8)}
    outputs = {"places": "*i32", "begins": "*i32", "rows_of_expert": "*i64"}
    numbers = dict.fromkeys(("tokens", "first", "count"), "i32")
    choose = {"logits": "*fp32", "weights": "*fp32", "experts": "i32/16", **outputs, **numbers}
    several = {"chosen": "*i32", "counts": "*i32"}
    add = {**dict.fromkeys(("results", "shared", "gate", "out"), "*bf16"), "places": "*i32", "weights": "*fp32",
           "width": "i32/16", "shared_stride": "i64/16", "gate_stride": "i64"}
    for made in compiled([
            Launch("experts", "choose_experts_kernel", choose,
                   {"RENORMALIZE": True, **sizes, **dict.fromkeys(several, None)}, warps),
            Launch("experts", "choose_experts_kernel", choose | several, {"RENORMALIZE": False, **sizes}, warps),
            Launch("experts", "place_experts_kernel", {**several, **outputs, **numbers, "programs": "i32"}, sizes,
                   warps),
            Launch("experts", "sources_kernel", {"places": "*i32", "sources": "*i32", "pairs": "i32"},
                   {"TOP_K": 8, "BLOCK": 1024, "PDL": True}, {"num_warps": 4}),
            Launch("experts", "sum_experts_kernel", add, {"TOP_K": 8, "BLOCK": 1024, "PDL": True}, {"num_warps": 4})]):
        assert made.local == 0
        assert "ld.global" not in made.ptx.partition("griddepcontrol.wait")[0]
