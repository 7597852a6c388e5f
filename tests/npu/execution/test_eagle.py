"""Drafts of EAGLE-3 heads with random weights, compared with those of modules of transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from npuserve.npu.execution.load import with_draft
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution.runner import Runner
from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.model.layers.shard import Shard
from tests.npu.execution.test_runner import load
from tests.support.eagle import EagleHead
from tests.support.hybrids import ask, prompts
from tests.support.loop import serve
from tests.support.models import assert_greedy, random_model, saved
from tests.support.recorded_drafting import RecordedDrafting

FAMILIES = "qwen3", "qwen3-untied", "qwen2", "llama"


def random_head(model: PreTrainedModel, seed: int) -> EagleHead:
    """Return a head of random form: layers read, own ids, embedding, norms, heads."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    layers = model.config.num_hidden_layers
    inputs = sorted(draw.sample(range(layers), draw.choice((1, 2, 3)) if layers >= 3 else 1))
    ids = None if seed % 3 == 0 else torch.tensor(sorted(draw.sample(range(model.config.vocab_size), 40)))
    owns = seed % 2 == 1
    return EagleHead(
        model, inputs, ids, owns_embedding=owns, norms_residual=draw.random() < 0.5,
        hidden_size=24 if owns and draw.random() < 0.5 else model.config.hidden_size, attention_bias=seed % 5 == 4,
        **draw.choice(({}, {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16})))


def serve_with(runner: Runner, chosen: list[list[int]], depth: int, budget: int, pool: int = 64) -> RecordedDrafting:
    """Serve the prompts; return the drafts."""
    drafting = RecordedDrafting(depth, runner.max_drafts, mode="model")
    serve(runner, [ask(prompt, 12, 2 * place) for place, prompt in enumerate(chosen)], 2, pool, 4, budget,
          drafting=drafting)
    return drafting


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 20))])
def test_drafts_equal_the_reference(tmp_path: Path, seed: int) -> None:
    """Of each depth, after prompts in chunks, prefix hits, preemptions, and accepted and rejected drafts."""
    model = random_model(FAMILIES[seed % 4], seed, num_hidden_layers=3 + seed % 3, max_position_embeddings=256)
    head = random_head(model, seed)
    budget = (16, 24, 48)[seed % 3]
    runner = load(saved(model, tmp_path / "model"), dtype="float32", max_num_batched_tokens=budget, max_drafts=12,
                  draft=head.saved(tmp_path / "head"))
    chosen = [[token % 100 for token in prompt] for prompt in prompts(5, seed)]
    chosen += chosen[:2]
    drafting = RecordedDrafting(1 + seed % 3, runner.max_drafts, mode="model")
    answers, scheduler = serve(runner, [ask(prompt, 12, 2 * place) for place, prompt in enumerate(chosen)], 2,
                               (64, 14)[seed % 2], 4, budget, drafting=drafting)
    for prompt, answer in zip(chosen, answers, strict=True):
        assert_greedy(model, prompt, answer.tokens, 12)
    assert len(drafting.drafts) > 10
    assert max(len(drafts) for _, drafts in drafting.drafts) == 1 + seed % 3
    head.assert_drafts(model, drafting.drafts)
