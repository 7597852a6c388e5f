"""Mixtures of experts: random models of all families, served as a request can ask, and compared with transformers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from npuserve.kernels.native import available
from npuserve.kernels.routing import distinct_experts
from npuserve.npu.backends.base import BackendError
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution.memory_plan import predict
from npuserve.npu.execution.runner import Runner
from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.model.layers.experts import Experts
from npuserve.npu.model.layers.gated_delta_net import GatedDeltaNet
from npuserve.npu.model.layers.shard import Shard
from npuserve.npu.model.loader import load_weights
from npuserve.npu.model.storage import idle_bytes
from npuserve.npu.step import Row
from tests.npu.execution.test_decoder import Bench, oracle
from tests.npu.execution.test_runner import load
from tests.support.hybrids import VOCABULARY, ask, check_batch, logprobs_of, on_every_batch, prompts
from tests.support.loop import serve
from tests.support.mixtures import random_mixture, restack, use_recurrent_rule
from tests.support.models import assert_greedy, saved
from tests.support.oracle_drafts import Kind, drafting_of


@pytest.fixture(autouse=True)
def _recurrent_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    use_recurrent_rule(monkeypatch)


@pytest.mark.parametrize("seed", [
    0, 3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 4, 5)),
    *(pytest.param(seed, marks=pytest.mark.full) for seed in range(6, 24))])
def test_tokens_and_logprobs_equal_transformers(tmp_path: Path, seed: int) -> None:
    """The chunk budget, and whether the checkpoint stacks its experts, differ by configuration."""
    model = random_mixture(seed)
    restack(saved(model, tmp_path), stacked=seed % 4 < 2)
    budget = (8, 5, 16, 48, 512)[seed % 5]
    runner = load(tmp_path, dtype="float32", max_num_batched_tokens=max(budget, 8))
    chosen = prompts(5, seed)
    answers, _ = serve(runner, [ask(prompt, 10, 2 * index) for index, prompt in enumerate(chosen)], 1 + seed % 2, 64, 4,
                       budget)
    for prompt, answer in zip(chosen, answers, strict=True):
        assert_greedy(model, prompt, answer.tokens, 10)
        ours = torch.tensor([report.logprob for report in answer.logprobs])
        torch.testing.assert_close(ours, logprobs_of(model, prompt, answer.tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("seed", [0, 3])
def test_golden_functions_equal_transformers(tmp_path: Path, seed: int) -> None:
    model = random_mixture(seed)
    bench = Bench(saved(model, tmp_path), CpuBackend(native=False))
    ids = prompts(1, seed)[0][:30]
    ours = torch.cat([bench.logits([Row(0, ids[begin:end], begin, [0, 1], True)])[0]
                      for begin, end in ((0, 20), (20, len(ids)))])
    torch.testing.assert_close(ours, oracle(model, ids), atol=2e-4, rtol=2e-4)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = saved(random_mixture(1), tmp_path_factory.mktemp("mixture"))
    return load(folder, dtype=request.param, max_num_batched_tokens=48)


@pytest.mark.slow
@on_every_batch
def test_numbers_do_not_depend_on_the_batch(served: Runner, pool: int, seats: int, budget: int, depth: int) -> None:
    """Ids and log-probabilities are the same bits alone, beside others, in chunks, preempted, and with prefix hits."""
    check_batch(served, pool, seats, budget, depth)


def config_of(seed: int, **changes: Any) -> dict[str, Any]:
    model = random_mixture(seed)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    config["num_experts"] = config.pop("num_local_experts", None) or config["num_experts"]
    return config | changes


@pytest.mark.parametrize("seed", range(3))
def test_configuration_counts_the_models_parameters(seed: int) -> None:
    model = random_mixture(seed)
    config = ModelConfig.from_dict(config_of(seed))
    assert config.num_parameters == model.num_parameters()
    assert config.has_experts
    experts = model.config.num_experts - model.config.num_experts_per_tok
    one = 3 * config.hidden_size * model.config.moe_intermediate_size
    layers = sum(isinstance(block.layer, Experts) for blocks in config.layers for block in blocks)
    assert config.num_parameters - config.active_parameters == layers * experts * one


def test_published_configuration_has_the_familys_defaults() -> None:
    """Qwen3-30B-A3B names all but norm_topk_prob as transformers' defaults; without it weights are not renormalized."""
    data = {"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048, "head_dim": 128,
            "num_hidden_layers": 48, "num_attention_heads": 32}
    config = ModelConfig.from_dict(data)
    assert {type(blocks[1].layer) for blocks in config.layers} == {Experts}
    assert config.layers[0][1].layer == Experts(128, 8, 2048, 768, renormalize=False)
    assert config.attention.num_kv_heads == 4
    nested = ModelConfig.from_dict({"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": {
        "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16}})
    assert nested.prefix == "model.language_model."
    assert nested.layers[0][1].layer == Experts(256, 8, 2048, 512, renormalize=True, shared_width=512)
    following = ModelConfig.from_dict({"architectures": ["Qwen3NextForCausalLM"], "vocab_size": 151936,
                                       "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16})
    assert following.layers[0][1].layer == Experts(512, 10, 2048, 512, renormalize=True, shared_width=512)
    mixer = following.layers[0][0].layer
    assert isinstance(mixer, GatedDeltaNet)
    assert mixer.fused


@pytest.mark.parametrize(("seed", "changes", "message"), [
    (0, {"num_experts_per_tok": 300},
     r"num_experts_per_tok: 300 is more than the model's \d+ experts \(num_experts\)$"),
    (2, {"num_experts": 0}, "num_experts: must be a whole number of at least 1, got 0"),
    (1, {"num_experts": 5000}, r"num_experts: must be in \[1, 4096\], got 5000"),
    (0, {"moe_intermediate_size": 40},
     "moe_intermediate_size: of a mixture of experts must be a multiple of 16, got 40"),
    (0, {"hidden_size": 40}, "hidden_size: of a mixture of experts must be a multiple of 16, got 40"),
    (0, {"mlp_only_layers": [99]}, r"mlp_only_layers: must be a list of layers in \[0, \d\], got \[99\]"),
    (1, {"mlp_only_layers": 3}, r"mlp_only_layers: must be a list of layers in \[0, \d\], got 3"),
    (1, {"decoder_sparse_step": 0}, "decoder_sparse_step: must be a whole number of at least 1, got 0"),
    (0, {"norm_topk_prob": 1}, "norm_topk_prob: must be true or false, got 1"),
    (2, {"shared_expert_intermediate_size": "a"}, "shared_expert_intermediate_size: must be a whole number"),
])
def test_configurations_that_are_not_supported(seed: int, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"^config.json: {message}") as error:
        ModelConfig.from_dict(config_of(seed, **changes))
    assert ". " not in str(error.value)


@pytest.mark.parametrize(("ranks", "message"), [
    (3, "3 does not divide the model's 64 columns of an expert; possible below are 1, 2$"),
    (8, "8 leaves a rank 8 of the model's 64 columns of an expert; supported: a multiple of 16; possible below are "
        "1, 2, 4$"),
])
def test_experts_that_ranks_cannot_divide(ranks: int, message: str) -> None:
    changes = {"moe_intermediate_size": 64, "num_attention_heads": 24, "num_key_value_heads": 24}
    with pytest.raises(ModelError, match=f"^tensor_parallel_size: {message}"):
        ModelConfig.from_dict(config_of(0, **changes)).sharded(Shard(0, ranks))


@pytest.mark.parametrize(("config", "shard", "message"), [
    ({}, Shard(0, 1, True), "expert_parallel: needs a tensor_parallel_size of at least 2$"),
    ({"num_experts": 9, "num_attention_heads": 4, "num_key_value_heads": 4}, Shard(0, 2, True),
     "expert_parallel: 2 ranks do not divide the model's 9 experts; possible below are none$"),
    ({"architectures": ["Qwen3ForCausalLM"]}, Shard(0, 2, True), "expert_parallel: the model has no experts$"),
])
def test_whole_experts_that_ranks_cannot_have(config: dict[str, Any], shard: Shard, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_dict(config_of(0, **config)).sharded(shard)


@pytest.mark.parametrize(("stacked", "part"), [
    (True, "gate_up_proj"), (True, "down_proj"), (False, "1.down_proj.weight")])
def test_missing_experts_are_named(tmp_path: Path, stacked: bool, part: str) -> None:
    folder = saved(random_mixture(2), tmp_path)
    restack(folder, stacked=stacked)
    name = f"model.layers.0.mlp.experts.{part}"
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"the tensors do not fit config.json; 1 missing: {re.escape(name)}$"):
        load_weights(folder, ModelConfig.from_folder(folder), torch.float32, CpuBackend())


def test_devices_without_kernels_for_experts_refuse_them() -> None:
    backend = CpuBackend()
    backend.capabilities = replace(backend.capabilities, experts=False)
    with pytest.raises(BackendError, match=r"does not serve mixtures of experts \(qwen3_moe\); possible is device"):
        predict(ModelConfig.from_dict(config_of(0)), backend)


@pytest.mark.parametrize(("dtype", "seed"), [("float32", 0), ("bfloat16", 0), ("bfloat16", 2)])
def test_plan_counts_the_copies_of_routers_in_float32(dtype: str, seed: int) -> None:
    """Qwen3.5, of seed 2, has one more in its head for multi-token prediction."""
    config, backend = ModelConfig.from_dict(config_of(seed)), CpuBackend()
    plain = predict(config, backend, dtype=dtype)
    backend.capabilities = replace(backend.capabilities, widens_routers=True)
    layers = [*config.local_layers, *(config.predictor.local_layers if config.predictor else ())]
    routers = [layer for layer in layers if isinstance(layer, Experts)]
    assert len(routers) == (2 if seed == 0 else 1 + config.num_layers)
    copies = sum(4 * layer.count * config.hidden_size for layer in routers) if dtype == "bfloat16" else 0
    assert predict(config, backend, dtype=dtype).weights == plain.weights + copies


def test_step_reads_the_experts_that_its_tokens_choose() -> None:
    config, backend = ModelConfig.from_dict(config_of(0)), CpuBackend()
    layer = next(block.layer for blocks in config.layers for block in blocks if isinstance(block.layer, Experts))
    of_experts = config.num_parameters - replace(config, layers=()).num_parameters
    assert idle_bytes(config, torch.float32, backend, 10**6) == 0
    one = idle_bytes(config, torch.float32, backend, 1)
    assert one == 4 * (config.num_parameters - config.active_parameters)
    assert 0 < idle_bytes(config, torch.float32, backend, 8) < one < 4 * of_experts
    assert distinct_experts(1, layer.top_k, layer.count, layer.count) == pytest.approx(layer.top_k)


@pytest.mark.skipif(not available(), reason="the native kernels are not built")
@pytest.mark.parametrize("kind", ["right", "mixed"])
def test_answers_with_drafts_equal_those_without(tmp_path: Path, kind: Kind) -> None:
    runner = load(saved(random_mixture(0), tmp_path), dtype="float32", max_num_batched_tokens=48, max_drafts=24)
    asks = [ask(prompt, 30, index) for index, prompt in enumerate(prompts(6, 3))]
    plain, _ = serve(runner, asks, 1, 40, 4, 48)
    known = {tuple(each.fields["prompt_ids"]): answer.tokens for each, answer in zip(asks, plain, strict=True)}
    drafting = drafting_of(
        kind, lambda sequence: known[tuple(sequence.request.prompt_ids)], VOCABULARY, runner.max_drafts)
    drafted, _ = serve(runner, asks, 2, 40, 4, 48, drafting=drafting)
    assert [(answer.tokens, answer.logprobs) for answer in drafted] == [
        (answer.tokens, answer.logprobs) for answer in plain]
    assert drafting.accepted > 0
