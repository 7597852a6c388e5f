"""Bytes that the steps of a profile have to move."""

from __future__ import annotations

import pytest
import torch

from npuserve.npu.execution.in_flight import StepRecord
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.profiling.floor import MetaModel

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128,
    "max_position_embeddings": 512, "dtype": "bfloat16"}


def record(tokens: int, context: int, samples: int) -> StepRecord:
    return StepRecord(0, "decode", 1, tokens, samples, context, (0.0, 0.0))


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_bytes_of_steps_are_the_sum_of_each_steps_bytes(cache: torch.dtype) -> None:
    """Two traces of sums give the same bytes as one trace for each step."""
    model = MetaModel(ModelConfig.from_dict(CONFIG), torch.bfloat16, vocabulary_tile=64, int8_levels=127,
                      cache_dtype=cache)
    steps = [(5, 5, 0), (9, 14, 1), (1, 15, 1), (1, 16, 1)]
    expected: dict[str, int] = {}
    for tokens, context, samples in steps:
        for kernel, costs in model.costs([(tokens, context)], samples).items():
            expected[kernel] = expected.get(kernel, 0) + sum(cost.nbytes for cost in costs)
    assert model.nbytes([record(*step) for step in steps]) == expected
    assert set(expected) == {"embedding", "rms_norm", "linear", "qk_norm_rope_kv_write", "paged_attention",
                             "add_rms_norm", "linear_swiglu", "linear_argmax"}


def test_steps_without_a_sampled_token_do_not_read_the_lm_head() -> None:
    model = MetaModel(ModelConfig.from_dict(CONFIG), torch.bfloat16, vocabulary_tile=64, int8_levels=127)
    assert "linear_argmax" not in model.nbytes([record(5, 5, 0)])
