"""Small random hybrids (Qwen3.5) made by transformers, the reference of the tests."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import SamplingParams
from tests.support.loop import Ask, serve

VOCABULARY = 120
GREEDY = SamplingParams(temperature=0.0, logprobs=3)


def settings_of(seed: int) -> dict[str, Any]:
    """Return a random configuration."""
    draw = random.Random(seed)
    key_heads, ratio = draw.choice([1, 2, 4]), draw.choice([1, 2, 3])
    kv_heads, group = draw.choice([1, 2]), draw.choice([1, 2, 3])
    interval = draw.choice([2, 3, 4])
    return {
        "vocab_size": VOCABULARY, "hidden_size": draw.choice([24, 32, 48]), "intermediate_size": draw.choice([40, 64]),
        "num_hidden_layers": interval + draw.choice([0, 1]), "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads, "head_dim": draw.choice([16, 32]), "max_position_embeddings": 256,
        "full_attention_interval": interval, "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * ratio, "linear_key_head_dim": draw.choice([8, 16]),
        "linear_value_head_dim": draw.choice([8, 16]), "linear_conv_kernel_dim": draw.choice([3, 4]),
        "tie_word_embeddings": draw.random() < 0.5, "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor":
                            draw.choice([0.25, 0.5]), "mrope_section": [2, 1, 1], "mrope_interleaved": True}}


def random_hybrid(seed: int, config: dict[str, Any] | None = None, **changes: Any) -> PreTrainedModel:
    """Return a float32 model whose numbers are all random, so that a missing one changes the results.

    config: None for `settings_of` the seed.
    """
    torch.manual_seed(seed)
    settings = copy.deepcopy({**(settings_of(seed) if config is None else config), **changes})
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-1, 2)
            elif name.endswith("linear_attn.norm.weight"):
                parameter.normal_(1, 0.3)
            elif parameter.dim() == 1:
                parameter.normal_(0, 0.3)
            else:
                parameter.normal_(0, (0.6 if "conv1d" in name else 1.5 / parameter.shape[-1] ** 0.5))
    return model  # type: ignore[no-any-return]


def prompts(count: int, seed: int) -> list[list[int]]:
    """Return prompts of which a part begins with the same 40 tokens."""
    draw = random.Random(seed)
    shared = draw.choices(range(3, VOCABULARY), k=40)
    return [[*(shared if draw.random() < 0.5 else ()), *draw.choices(range(3, VOCABULARY), k=draw.randint(1, 60))]
            for _ in range(count)]


def ask(prompt: list[int], count: int, tick: int = 0, **fields: object) -> Ask:
    """Return a greedy request with log-probabilities."""
    return Ask(tick, None, {"prompt_ids": prompt, "max_tokens": count, "sampling": GREEDY, **fields})


on_every_batch = pytest.mark.parametrize(("pool", "seats", "budget", "depth"), [
    (64, 8, 48, 2), (64, 1, 48, 1), (64, 3, 5, 2), (12, 8, 16, 2), (10, 4, 16, 1)])


def check_batch(runner: Runner, pool: int, seats: int, budget: int, depth: int) -> None:
    """Compare answers alone with those of the same requests together: ids and log-probabilities are the same bits."""
    if not runner.deterministic:
        pytest.skip("the native kernels are not built")
    chosen = prompts(9, 7)
    chosen += chosen[:3]
    alone = [serve(runner, [ask(prompt, 16, bypass_prefix_cache=True)], 1, 64, 1, 48)[0][0] for prompt in chosen]
    answers, scheduler = serve(
        runner, [ask(prompt, 16, index // 2) for index, prompt in enumerate(chosen)], depth, pool, seats, budget)
    for answer, expected in zip(answers, alone, strict=True):
        assert (answer.tokens, answer.logprobs) == (expected.tokens, expected.logprobs)
    assert scheduler.memory.prefix_hits > 0



def use_recurrent_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers compute prompts by the recurrence, as decoding does: its chunked form rounds more."""

    def recurrent(*args: Any, chunk_size: int = 64, **settings: Any) -> Any:
        return modeling_qwen3_5.torch_recurrent_gated_delta_rule(*args, **settings)

    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", recurrent)


@torch.no_grad()
def logprobs_of(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Return the log-probability of each token of an answer."""
    logits = model(torch.tensor([[*prompt, *answer]])).logits[0].log_softmax(-1)
    return logits[len(prompt) - 1 : -1].gather(1, torch.tensor(answer)[:, None]).flatten()


def published(seed: int) -> dict[str, Any]:
    """Return a random config.json of a text model, in one of the forms that exist: old and new keys, nested or not."""
    draw = random.Random(seed)
    key_heads, ratio = draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 3, 4])
    kv_heads, group = draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
    head_dim, factor = draw.choice([32, 48, 64, 96, 128, 256]), draw.choice([0.25, 0.5, 1.0])
    config: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": draw.choice([24, 33, 40, 64]),
        "intermediate_size": draw.choice([17, 40, 64]), "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "max_position_embeddings": 256,
        "linear_num_key_heads": key_heads, "linear_num_value_heads": key_heads * ratio,
        "linear_key_head_dim": draw.choice([8, 12, 16, 40]), "linear_value_head_dim": draw.choice([8, 20, 32, 48]),
        "linear_conv_kernel_dim": draw.choice([2, 3, 4]), "attention_bias": draw.random() < 0.3,
        "rms_norm_eps": draw.choice([1e-6, 1e-5]), "tie_word_embeddings": draw.random() < 0.5, "hidden_act": "silu",
        "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32", "model_type": "qwen3_5_text"}
    config |= draw.choice([
        {"num_hidden_layers": 3, "layer_types": draw.choice([
            ["full_attention", "linear_attention", "full_attention"], ["full_attention"] * 3,
            ["linear_attention", "linear_attention", "full_attention"]])},
        {"num_hidden_layers": 4}, {"num_hidden_layers": 3, "full_attention_interval": 2},
        {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
         "full_attention_interval": 3}])
    return config | _rope_keys(draw, factor)


def _rope_keys(draw: random.Random, factor: float) -> dict[str, Any]:
    theta = draw.choice([1e4, 1e7])
    mrope = draw.choice([{}, {"mrope_section": [2, 1, 1]}, {"mrope_section": [2, 1, 1], "mrope_interleaved": True}])
    scaling = draw.choice([{}, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}])
    kind = {"rope_type": "default"} | mrope | scaling
    forms: list[dict[str, Any]] = [
        {"rope_parameters": kind | {"rope_theta": theta, "partial_rotary_factor": factor}},
        {"rope_parameters": kind, "rope_theta": theta, "partial_rotary_factor": factor},
        {"rope_parameters": kind | {"rope_theta": theta}},  # a quarter of a head is the default
        {"rope_scaling": mrope | scaling or None, "rope_theta": theta, "partial_rotary_factor": factor},
        {"rope_scaling": None, "rope_theta": theta}]
    if scaling:  # old form with `type`
        forms.append({"rope_scaling": {"type" if key == "rope_type" else key: value for key, value in scaling.items()},
                      "rope_theta": theta})
    return draw.choice(forms)


def saved_as_published(seed: int, folder: Path) -> PreTrainedModel:
    """Save a random model with the config.json of `published`, nested in that of a model with a tower for odd seeds."""
    config = published(seed)
    model = random_hybrid(seed, config)
    model.save_pretrained(folder)
    whole = {"architectures": ["Qwen3_5ForCausalLM"], **config}
    if seed % 2:
        tensors = load_file(folder / "model.safetensors")
        save_file({name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()},
                  folder / "model.safetensors")
        whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config, "vision_config": {},
                 "model_type": "qwen3_5", "tie_word_embeddings": config["tie_word_embeddings"]}
    (folder / "config.json").write_text(json.dumps(whole))
    return model
