"""Qwen3.5: hybrids of random shapes, served as a request can ask, and compared with transformers."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen3_5TextConfig

from npuserve.npu.backends.base import BackendError
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution.memory_plan import STATE_SHARE, predict
from npuserve.npu.execution.runner import Runner
from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.model.loader import load_weights
from npuserve.npu.quantize.checkpoint import quantize_checkpoint
from tests.npu.execution.test_runner import load
from tests.support.hybrids import (
    VOCABULARY,
    ask,
    check_batch,
    logprobs_of,
    on_every_batch,
    prompts,
    random_hybrid,
    saved_as_published,
    settings_of,
    use_recurrent_rule,
)
from tests.support.loop import Ask, serve
from tests.support.models import assert_greedy, greedy, saved

BLOCK = 16


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, PreTrainedModel]:
    model = random_hybrid(0)
    folder = saved(model, tmp_path_factory.mktemp("hybrid"))
    return load(folder, dtype="float32", max_num_batched_tokens=48), model


@pytest.fixture(autouse=True)
def _recurrent_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    use_recurrent_rule(monkeypatch)


@pytest.mark.parametrize("seed", [
    *range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6)),
    *(pytest.param(seed, marks=pytest.mark.full) for seed in range(6, 24))])
def test_tokens_and_logprobs_equal_transformers(tmp_path: Path, seed: int) -> None:
    """The chunk budget differs by configuration. Either side is up to 7e-5 away from float64."""
    model = random_hybrid(seed)
    budget = (1, 5, 16, 48, 512)[seed % 5]
    runner = load(saved(model, tmp_path), dtype="float32", max_num_batched_tokens=max(budget, 8))
    chosen = prompts(5, seed)
    answers, _ = serve(runner, [ask(prompt, 10, 2 * index) for index, prompt in enumerate(chosen)], 1 + seed % 2, 64, 4,
                       budget if budget > 1 else 8)
    for prompt, answer in zip(chosen, answers, strict=True):
        assert_greedy(model, prompt, answer.tokens, 10)
        ours = torch.tensor([report.logprob for report in answer.logprobs])
        torch.testing.assert_close(ours, logprobs_of(model, prompt, answer.tokens), atol=3e-4, rtol=0)


@pytest.mark.slow
@on_every_batch
def test_numbers_do_not_depend_on_the_batch(
    served: tuple[Runner, PreTrainedModel], pool: int, seats: int, budget: int, depth: int
) -> None:
    """Ids and log-probabilities are the same bits alone, beside others, in chunks, preempted, and with prefix hits."""
    check_batch(served[0], pool, seats, budget, depth)


def conversations(count: int, seed: int) -> list[Ask]:
    """Return requests of which most continue an earlier prompt, whole or a part, and some are cancelled.

    Token 2 ends messages. Four requests arrive every 28 ticks.
    """
    draw = random.Random(seed)
    known: list[list[int]] = [[*draw.choices(range(3, VOCABULARY), k=33), 2]]
    asks = []
    for index in range(count):
        before = draw.choice(known[-12:]) if draw.random() < 0.8 else known[0]
        cut = len(before) if draw.random() < 0.7 else draw.randint(1, len(before))
        prompt = [*before[:cut], *draw.choices(range(3, VOCABULARY), k=draw.randint(1, 40)), 2]
        prompt += draw.choices(range(3, VOCABULARY), k=draw.randint(0, 4))
        if len(prompt) > 180:
            prompt = [*known[0], *prompt[-30:]]
        known.append(prompt)
        made = ask(prompt, draw.choice([1, 2, 17, 60]), index // 4 * 28)
        asks.append(replace(made, cancel=draw.randint(1, 20) if draw.random() < 0.1 else None))
    return asks


@pytest.mark.slow
@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.full)])
def test_random_requests_under_eviction_pressure_equal_those_without_prefix_cache(
    served: tuple[Runner, PreTrainedModel], count: int
) -> None:
    runner, _ = served
    if not runner.deterministic:
        pytest.skip("the native kernels are not built")
    asks = conversations(count, 11)
    settings: dict[str, Any] = {"depth": 2, "pool": 24, "seats": 6, "budget": 48, "num_slots": 14,
                                "message_end_ids": frozenset([2])}
    answers, scheduler = serve(runner, asks, **settings)
    bypassed, other = serve(
        runner, [replace(each, fields={**each.fields, "bypass_prefix_cache": True}) for each in asks], **settings)
    assert other.memory.prefix_hits == 0
    for answer, expected in zip(answers, bypassed, strict=True):
        shared = min(len(answer.tokens), len(expected.tokens))
        assert answer.tokens[:shared] == expected.tokens[:shared]
        assert answer.logprobs[:shared] == expected.logprobs[:shared]
        if "cancelled" not in (answer.reason, expected.reason):
            assert (answer.reason, len(answer.tokens)) == (expected.reason, len(expected.tokens))
    misses = scheduler.memory.take_misses()
    assert scheduler.memory.prefix_hits > scheduler.memory.prefix_queries // 4
    assert scheduler.preemptions > 0
    assert misses["no_block"] > 0
    assert misses["no_state"] > 0


def config_of(**changes: Any) -> dict[str, Any]:
    config = Qwen3_5TextConfig(**settings_of(0)).to_dict()
    return {**config, "architectures": ["Qwen3_5ForCausalLM"], **changes}


def test_nested_configuration_is_that_of_the_text_model() -> None:
    plain = ModelConfig.from_dict(config_of())
    nested = ModelConfig.from_dict({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": {"depth": 3}, "text_config": config_of(),
        "tie_word_embeddings": plain.tie_word_embeddings})
    assert nested.prefix == "model.language_model."
    assert nested.layers == plain.layers
    assert (nested.rope, nested.context_length) == (plain.rope, plain.context_length)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 24))])
def test_any_published_configuration_equals_transformers(tmp_path: Path, seed: int) -> None:
    """Old and new keys of rotary embeddings, kinds of layers, ratios of heads, odd sizes, yarn, nested or not."""
    model = saved_as_published(seed, tmp_path)
    budget = (8, 16, 48, 200)[seed % 4]
    runner = load(tmp_path, dtype="float32", max_num_batched_tokens=budget)
    chosen = prompts(3, seed)
    answers, _ = serve(
        runner, [ask(prompt, 8, 2 * index) for index, prompt in enumerate(chosen)], 1 + seed % 2, 64, 4, budget)
    for prompt, answer in zip(chosen, answers, strict=True):
        assert_greedy(model, prompt, answer.tokens, 8)
        ours = torch.tensor([report.logprob for report in answer.logprobs])
        torch.testing.assert_close(ours, logprobs_of(model, prompt, answer.tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("changes", "message"), [
    ({"attn_output_gate": False}, "attn_output_gate: false is not supported; supported: true, as in Qwen3.5"),
    ({"attn_output_gate": "no"}, "attn_output_gate: must be true or false, got 'no'"),
    ({"layer_types": ["linear_attention"] * 3}, "layer_types: must be a list of .* names, .*, got 3$"),
    ({"layer_types": "full"}, "layer_types: must be a list of .* names, one for each of num_hidden_layers, got 'full'"),
    ({"layer_types": ["mamba", "full_attention"], "num_hidden_layers": 2},
     "layer_types: mamba is not supported; supported: full_attention, linear_attention"),
    ({"layer_types": ["linear_attention"], "num_hidden_layers": 1},
     "layer_types: a model without full_attention is not supported"),
    ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval: must be a whole number"),
    ({"linear_num_key_heads": 3, "linear_num_value_heads": 4}, "3 does not divide linear_num_value_heads, 4"),
    ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: must be at least 2, got 1"),
    ({"linear_key_head_dim": "a"}, "linear_key_head_dim: must be a whole number of at least 1, got 'a'"),
    ({"num_key_value_heads": 5}, "num_key_value_heads: 5 does not divide"),
    ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported; supported: silu"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported; supported: default"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 2}},
     "partial_rotary_factor: must be above 0"),
    ({"vocab_size": None}, "vocab_size: is missing"),
    ({"intermediate_size": None}, "intermediate_size: is missing"),
])
@pytest.mark.parametrize("is_nested", [False, True])
def test_configurations_that_are_not_supported(changes: dict[str, Any], message: str, is_nested: bool) -> None:
    config = config_of(**changes)
    if is_nested:
        config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config, "vision_config": {}}
    with pytest.raises(ModelError, match=f"^config.json: .*{message}") as error:
        ModelConfig.from_dict(config)
    assert ". " not in str(error.value)


@pytest.mark.parametrize(("nested", "message"), [
    ({}, "text_config: is missing; it holds the sizes of the decoder"),
    ({"text_config": None}, "text_config: is missing"),
    ({"text_config": [1]}, r"text_config: must be an object, got \[1\]"), ({"text_config": {}}, "is missing")])
def test_text_config_that_is_missing(nested: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_dict({"architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": {}} | nested)


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    folder = saved(random_hybrid(0), tmp_path)
    file, config = folder / "model.safetensors", ModelConfig.from_folder(folder)
    good = load_file(file)
    name = "model.layers.0.linear_attn"
    for changes, message in (
        ({f"{name}.A_log": None}, f"1 missing: {name}.A_log$"),
        ({f"{name}.conv1d.weight": good[f"{name}.conv1d.weight"][:, 0]}, rf"{name}.conv1d.weight \[.*\] instead of \["),
        ({f"{name}.in_proj_qkv.weight": good[f"{name}.in_proj_qkv.weight"][1:]}, "1 of the wrong shape: "),
        ({f"{name}.in_proj_qkvz.weight": torch.ones(2)}, f"1 unknown: {name}.in_proj_qkvz.weight"),
        ({f"{name}.dt_bias": good[f"{name}.dt_bias"].int()}, f"1 not of a float type: {name}.dt_bias I32"),
        ({f"{name}.norm.weight": good[f"{name}.norm.weight"] / 0}, f"{name}.norm.weight: has numbers that"),
    ):
        tensors = {key: tensor.contiguous() for key, tensor in (good | changes).items() if tensor is not None}
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(ModelError, match=message):
            load_weights(folder, config, torch.float32, CpuBackend())


@pytest.mark.slow
def test_shared_beginnings_and_chats_hit_checkpoints(served: tuple[Runner, PreTrainedModel]) -> None:
    """A system prompt is found from its third use on, and a turn of a chat continues the state of the answer before."""
    runner, model = served
    system = prompts(1, 11)[0][:20] * 2
    draw = random.Random(1)
    asks = [ask([*system, *draw.choices(range(3, VOCABULARY), k=20)], 4, 40 * index) for index in range(4)]
    answers, scheduler = serve(runner, asks, 1, 64, 1, 48)
    assert scheduler.memory.prefix_hits == 2 * 32
    assert scheduler.memory.take_misses() == {"no_block": 1, "no_state": 1}
    first = draw.choices(range(3, VOCABULARY), k=30)
    turn = greedy(model, first, 40)
    second = [*first, *turn, *draw.choices(range(3, VOCABULARY), k=9)]
    answers, scheduler = serve(runner, [ask(first, 40), ask(second, 8, 100)], 1, 64, 1, 48)
    assert answers[0].tokens == turn
    assert_greedy(model, second, answers[1].tokens, 8)
    assert scheduler.memory.prefix_hits == 64  # the last block boundary before the end of the first answer


def test_devices_without_kernels_for_linear_attention_refuse_it() -> None:
    backend = CpuBackend()
    backend.capabilities = replace(backend.capabilities, fixed_state=False)
    with pytest.raises(BackendError, match=r"does not serve models with linear attention \(qwen3_5\); possible is"):
        predict(ModelConfig.from_dict(config_of()), backend)


def least_of(error: pytest.ExceptionInfo[ModelError], pattern: str) -> int:
    """Return the bytes that an error names, and what rounding hides."""
    found = re.search(pattern, str(error.value))
    assert found
    return int((float(found[1].replace(",", "")) + 0.05) * 2**20)


def test_context_whose_state_does_not_fit_names_the_least_memory() -> None:
    config = ModelConfig.from_dict(config_of())
    with pytest.raises(ModelError, match="holds the state of no request; the least is") as error:
        predict(config, CpuBackend(), kv_cache_memory=1000)
    least = least_of(error, r"the least is ([\d,.]+) MiB")
    assert predict(config, CpuBackend(), kv_cache_memory=least + 200000).num_slots >= 2


@pytest.mark.parametrize("max_num_seqs", [1, 8, 64])
def test_context_whose_blocks_do_not_fit_beside_the_states_names_the_least_memory(max_num_seqs: int) -> None:
    """Once with this max_num_seqs, once with a single request, where that is less."""
    large = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 256, "max_position_embeddings": 4096}
    config, backend = ModelConfig.from_dict(config_of(**large)), CpuBackend()
    needed = {"max_model_len": 4096, "max_num_seqs": max_num_seqs}
    with pytest.raises(ModelError, match=r"holds \d+ tokens beside .* of states; max_model_len 4096 needs") as error:
        predict(config, backend, kv_cache_memory=8 << 20, **needed)
    least = least_of(error, r"max_model_len 4096 needs ([\d,.]+) MiB")
    plan = predict(config, backend, kv_cache_memory=least, **needed)
    assert plan.max_model_len == 4096
    assert plan.num_slots >= 2
    with pytest.raises(ModelError, match="max_model_len 4096 needs"):
        predict(config, backend, kv_cache_memory=least * 3 // 4, **needed)
    if max_num_seqs > 1:
        single = least_of(error, r"or ([\d,.]+) MiB with max_num_seqs 1$")
        assert predict(config, backend, kv_cache_memory=single, max_model_len=4096, max_num_seqs=1).num_slots >= 2


def test_memory_beyond_two_slots_for_each_request_has_more_checkpoints_that_leave_max_model_len_its_blocks() -> None:
    config, backend = ModelConfig.from_dict(config_of(max_position_embeddings=1 << 20)), CpuBackend()
    memory = 64 << 20
    plan = predict(config, backend, kv_cache_memory=memory, max_num_seqs=2)
    assert plan.num_slots > 4
    assert plan.fixed_state == pytest.approx(STATE_SHARE * memory, rel=0.05)
    full = plan.num_blocks * plan.block_size
    longer = predict(config, backend, kv_cache_memory=memory, max_num_seqs=2, max_model_len=full + 1024)
    assert 4 <= longer.num_slots < plan.num_slots


def test_context_that_the_free_memory_does_not_hold_names_one_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    config, backend = ModelConfig.from_dict(config_of(head_dim=256, max_position_embeddings=1 << 20)), CpuBackend()
    monkeypatch.setattr(backend.memory, "available", lambda: 600 << 20)
    with pytest.raises(ModelError, match=r"fixed_state .* MiB is available; .* fits$") as error:
        predict(config, backend, max_model_len=1 << 20).require_fit()
    length = int(str(error.value).split("max_model_len ")[1].split()[0])
    memory = least_of(error, r"kv_cache_memory ([\d,.]+) MiB with") - (1 << 20)
    predict(config, backend, max_model_len=length, kv_cache_memory=memory + (1 << 20)).require_fit()
    assert length > 1024


def test_free_memory_that_holds_no_state_is_reported_by_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kv_cache_memory is set, so the message does not name it as wrong."""
    config, backend = ModelConfig.from_dict(config_of()), CpuBackend()
    monkeypatch.setattr(backend.memory, "available", lambda: 1 << 20)
    plan = predict(config, backend)
    assert (plan.num_slots, plan.fits) == (2, False)
    with pytest.raises(ModelError, match=r"the model needs .* \(weights .*fixed_state .*, and 1.0 MiB is available"):
        plan.require_fit()


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_state_dtype_of_the_cpu_is_float32(tmp_path: Path, dtype: str) -> None:
    folder = saved(random_hybrid(0), tmp_path)
    load(folder, dtype="bfloat16", max_num_batched_tokens=48, state_dtype=dtype)
    with pytest.raises(BackendError, match=r"^state_dtype: 'bfloat16' is not possible on cpu, since .* do not depend "
                                           r"on chunks, .*; possible are auto, float32$"):
        load(folder, max_num_batched_tokens=48, state_dtype="bfloat16")


def test_vision_tower_and_drafts_are_not_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = random_hybrid(0)
    folder = saved(model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    nested = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    nested |= {"model.visual.patch_embed.weight": torch.ones(3, 3), "mtp.fc.weight": torch.ones(3, 3)}
    save_file(nested, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "vision_config": {},
        "tie_word_embeddings": text["tie_word_embeddings"], "dtype": "float32"}))
    with caplog.at_level("INFO"):
        runner = load(folder, dtype="float32", max_num_batched_tokens=48)
    assert "1 tensors mtp.… are not loaded" in caplog.text
    assert "1 tensors model.visual.… are not loaded" in caplog.text
    (answer,), _ = serve(runner, [ask([5, 6, 7, 8], 12)], 1, 16, 1, 48)
    assert_greedy(model, [5, 6, 7, 8], answer.tokens, 12)


def rounded(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Give a model the dequantized weights in `folder`, and round the inputs of their layers as int8 kernels do."""
    tensors = load_file(folder / "model.safetensors")

    def round_input(_: object, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        scale = inputs[0].abs().amax(-1, keepdim=True) / 127.5
        return ((inputs[0] / scale).round().clamp(-128, 127) * scale,)

    weights = {name: tensor.float() * tensors[f"{name}_scale"].float() if tensor.dtype == torch.int8 else tensor
               for name, tensor in tensors.items() if not name.endswith("_scale")}
    model.load_state_dict(weights, strict=False)
    for name, module in model.named_modules():
        if f"{name}.weight_scale" in tensors:
            module.register_forward_pre_hook(round_input)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("calibrated", [False, True])
def test_quantized_checkpoint_equals_transformers_with_rounded_numbers(tmp_path: Path, calibrated: bool) -> None:
    model = random_hybrid(3)
    folder = saved(model, tmp_path / "float")
    texts = [prompt * 3 for prompt in prompts(3, 1)] if calibrated else []
    result = quantize_checkpoint(folder, tmp_path / "int8", texts)
    tensors = load_file(tmp_path / "int8" / "model.safetensors")
    kinds = {name.split(".")[-2] for name, tensor in tensors.items() if tensor.dtype == torch.int8}
    assert kinds == {"in_proj_qkv", "in_proj_z", "out_proj", "gate_proj", "up_proj", "down_proj", "q_proj", "k_proj",
                     "v_proj", "o_proj"}
    assert result.quantized == result.linears
    runner = load(tmp_path / "int8", dtype="float32", max_num_batched_tokens=48)
    answers, _ = serve(runner, [ask(prompt, 10, index) for index, prompt in enumerate(prompts(4, 2))], 1, 64, 4, 48)
    plain, theirs = random_hybrid(3), rounded(model, tmp_path / "int8")
    errors, effects = [], []
    for prompt, answer in zip(prompts(4, 2), answers, strict=True):
        expected = logprobs_of(theirs, prompt, answer.tokens)
        errors.append((torch.tensor([report.logprob for report in answer.logprobs]) - expected).abs().mean())
        effects.append((logprobs_of(plain, prompt, answer.tokens) - expected).abs().mean())
    assert sum(errors) < sum(effects) / 4  # last bits flip roundings


def test_bfloat16_numbers_are_about_those_of_float32_and_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    model = random_hybrid(4)
    runner = load(saved(model, tmp_path), dtype="bfloat16", max_num_batched_tokens=48)
    chosen = prompts(6, 4)
    alone = [serve(runner, [ask(prompt, 12, bypass_prefix_cache=True)], 1, 64, 1, 48)[0][0] for prompt in chosen]
    answers, _ = serve(runner, [ask(prompt, 12, index) for index, prompt in enumerate(chosen)], 2, 64, 4, 16)
    errors = []
    for prompt, answer, expected in zip(chosen, answers, alone, strict=True):
        if runner.deterministic:
            assert (answer.tokens, answer.logprobs) == (expected.tokens, expected.logprobs)
        ours = torch.tensor([report.logprob for report in answer.logprobs])
        errors.append((ours - logprobs_of(model, prompt, answer.tokens)).abs().mean())
    assert sum(errors) / len(errors) < 0.1
