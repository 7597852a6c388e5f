"""Effect of an int8 KV cache on the built-in model, end to end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from npuserve.cli.acceptance.reference import forced_logits
from npuserve.kernels.registry import KernelSet
from npuserve.npu import storyteller
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution.decoder import Model
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.loader import load_weights
from npuserve.npu.model.rope import cos_sin_table
from tests.npu.execution.test_runner import Driver, load

STARTS = ("Once upon a time", "One day, a girl named Lily", "The little dog was", "Tom and his mom went to the")
TOKENS = 96


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(storyteller.FOLDER)
    return [tokenizer.encode(start) for start in STARTS]


def told(prompts: list[list[int]], cache: str) -> list[list[int]]:
    """Return greedy stories, computed in one batch."""
    driver = Driver(load(storyteller.FOLDER, kv_cache_dtype=cache, max_model_len=256))
    for request, prompt in enumerate(prompts):
        driver.add(request, prompt)
    while min(len(driver.generated(request)) for request in range(len(prompts))) < TOKENS:
        driver.step()
    return [prompt + driver.generated(request)[:TOKENS] for request, prompt in enumerate(prompts)]


def logits(backend: CpuBackend, dtype: torch.dtype, sequences: list[list[int]], cache: torch.dtype | None) -> Tensor:
    config = ModelConfig.from_folder(storyteller.FOLDER)
    weights = load_weights(storyteller.FOLDER, config, dtype, backend, lambda done, total: None)
    cos_sin = cos_sin_table(config.rope, config.attention.head_dim, 256, backend.device)
    model = Model(config, weights, cos_sin, KernelSet(backend.kernels))
    return torch.cat(list(forced_logits(model, backend, sequences, 40, cache_dtype=cache)))


@pytest.mark.slow
def test_int8_cache_keeps_argmax_tokens(cpu: CpuBackend, prompts: list[list[int]]) -> None:
    """With an int8 cache at least 97 % of the positions have the same argmax token, and logprobs hardly change."""
    sequences = told(prompts, "auto")
    exact, found = (logits(cpu, torch.float32, sequences, cache) for cache in (None, torch.int8))
    assert not torch.equal(exact, found)
    assert (exact.argmax(-1) == found.argmax(-1)).float().mean() >= 0.97
    chances = exact.log_softmax(-1)
    assert (chances.exp() * (chances - found.log_softmax(-1))).sum(-1).mean() < 1e-3


def test_int8_cache_stories_begin_equally(prompts: list[list[int]]) -> None:
    without, within = told(prompts, "auto"), told(prompts, "int8")
    assert all(a[: len(p) + 16] == b[: len(p) + 16] for a, b, p in zip(without, within, prompts, strict=True))
