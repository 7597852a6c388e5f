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
HYBRID = {
    **CONFIG, "architectures": ["Qwen3_5ForCausalLM"], "full_attention_interval": 3, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16}


def record(tokens: int, context: int, samples: int, rows: int = 1) -> StepRecord:
    return StepRecord(0, "decode", rows, tokens, samples, context, (0.0, 0.0))


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


def test_bytes_of_rows_with_fixed_state_are_those_of_each_row() -> None:
    model = MetaModel(ModelConfig.from_dict(HYBRID), torch.bfloat16, vocabulary_tile=64, int8_levels=127)
    steps = [[(9, 9), (4, 4)], [(1, 10), (7, 11), (1, 5)], [(1, 11), (1, 12), (1, 6)]]
    expected: dict[str, int] = {}
    for rows in steps:
        for kernel, costs in model.costs(rows, len(rows)).items():
            expected[kernel] = expected.get(kernel, 0) + sum(cost.nbytes for cost in costs)
    records = [record(sum(n for n, _ in rows), sum(context for _, context in rows), len(rows), len(rows))
               for rows in steps]
    assert model.nbytes(records) == expected
    assert {"causal_conv_silu", "gated_delta_rule", "gated_rms_norm", "sigmoid_gate"} <= set(expected)


def test_queries_have_whole_heads_where_rotary_embeddings_turn_a_part() -> None:
    model = MetaModel(ModelConfig.from_dict(HYBRID), torch.bfloat16, vocabulary_tile=64, int8_levels=127)
    [attention] = model.costs([(3, 3)], 0)["paged_attention"]
    assert attention.operations == 4 * (3 + 2 + 1) * 4 * 32


def test_steps_without_a_sampled_token_do_not_read_the_lm_head() -> None:
    model = MetaModel(ModelConfig.from_dict(CONFIG), torch.bfloat16, vocabulary_tile=64, int8_levels=127)
    assert "linear_argmax" not in model.nbytes([record(5, 5, 0)])
