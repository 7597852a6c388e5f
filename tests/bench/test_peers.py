"""bench/peers: models of random weights, and the work that their ceilings count."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from npuserve.npu.model.allocation import allocate_meta
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.profiling.floor import MetaModel
from tests.support.benches import BENCH, bench

SMALL: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 300, "intermediate_size": 48},
    "qwen3.5-0.8b": {"hidden_size": 32, "num_hidden_layers": 5, "vocab_size": 300, "intermediate_size": 48,
                     "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                     "linear_value_head_dim": 16},
}


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType, ModuleType]:
    """Return make_model, ceiling_peer and harness, whose folder is on the path when they run as programs."""
    monkeypatch.syspath_prepend(str(BENCH / "peers"))
    import harness

    return bench("peers.make_model"), bench("peers.ceiling_peer"), harness


@pytest.mark.parametrize(("name", "mtp"), [*((name, False) for name in SMALL), ("qwen3.5-0.8b", True)])
def test_made_weights_are_those_that_the_model_reads(
    name: str, mtp: bool, peers: tuple[ModuleType, ModuleType, ModuleType]
) -> None:
    make_model = peers[0]
    shape = make_model.SHAPES[name] | SMALL[name]
    weights = make_model.weights_of(shape, seed=0, mtp=mtp)
    config = ModelConfig.from_dict(make_model.config_of(shape))
    targets = allocate_meta(config if mtp else replace(config, mtp=()), torch.bfloat16).targets
    assert {key: tuple(tensor.shape) for key, tensor in weights.items()} == {
        key: tuple(target.shapes[0]) for key, target in targets.items()}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("measure", ["decode-8x128", "prefill-512"])
def test_ceiling_counts_the_work_of_the_kernels(
    name: str, measure: str, peers: tuple[ModuleType, ModuleType, ModuleType]
) -> None:
    make_model, ceiling_peer, harness = peers
    config = make_model.config_of(make_model.SHAPES[name])
    case = harness.Measure.parse(measure)
    rows = [(1, case.context)] * case.rows if case.decode else [(case.context, case.context)]
    model = MetaModel(ModelConfig.from_dict(config), torch.bfloat16, vocabulary_tile=64, int8_levels=127.0)
    costs = model.costs(rows, case.rows)
    work = ceiling_peer.work(config, case)
    products = sum(cost.operations for kernel, calls in costs.items() for cost in calls
                   if kernel.startswith("linear") or kernel == "paged_attention")
    assert work.products == pytest.approx(products, rel=0.005)
    assert work.recurrence == sum(cost.operations for cost in costs.get("gated_delta_rule", []))
    if case.decode:  # the activations, which the kernels also move, are few
        assert work.moved == pytest.approx(sum(cost.nbytes for calls in costs.values() for cost in calls), rel=0.02)
