"""Bytes that the steps of a profile have to move."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution.in_flight import StepRecord
from npuserve.npu.execution.state_store import slot_bytes
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.profiling.floor import MetaModel

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128,
    "max_position_embeddings": 512, "dtype": "bfloat16"}
HYBRID = {
    **CONFIG, "architectures": ["Qwen3_5ForCausalLM"], "full_attention_interval": 3, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24}


def record(rows: list[tuple[int, int]], samples: int) -> StepRecord:
    """Return the record of a step. rows: (tokens, context) of each row."""
    tokens, context = (sum(numbers) for numbers in zip(*rows, strict=True))
    continued = sum(context > tokens for tokens, context in rows)
    return StepRecord(0, "decode", len(rows), tokens, samples, context, continued, (0.0, 0.0))


@pytest.mark.parametrize("config", [CONFIG, HYBRID], ids=["attention", "hybrid"])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_bytes_of_steps_are_the_sum_of_each_steps_bytes(cache: torch.dtype, config: dict[str, Any]) -> None:
    """Factors of a few traces give the same bytes as one trace for each step."""
    model = MetaModel(ModelConfig.from_dict(config), torch.bfloat16, vocabulary_tile=64, int8_levels=127,
                      cache_dtype=cache)
    steps = [([(5, 5)], 0), ([(9, 14)], 1), ([(1, 15)], 1), ([(1, 16), (4, 4), (2, 9), (1, 1)], 3)]
    expected: dict[str, int] = {}
    for rows, samples in steps:
        for kernel, costs in model.costs(rows, samples).items():
            expected[kernel] = expected.get(kernel, 0) + sum(cost.nbytes for cost in costs)
    assert model.nbytes([record(*step) for step in steps]) == expected
    others = {"sigmoid_gate", "causal_conv_silu", "gated_delta_rule", "gated_rms_norm"} if config is HYBRID else set()
    assert set(expected) == {"embedding", "rms_norm", "linear", "qk_norm_rope_kv_write", "paged_attention",
                             "add_rms_norm", "linear_swiglu", "linear_argmax"} | others


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_steps_of_a_hybrid_move_the_state_of_each_row(rows: int) -> None:
    """Each decode row reads and writes its states; the first chunk of a prompt only writes them."""
    config = ModelConfig.from_dict(HYBRID)
    model = MetaModel(config, torch.bfloat16, vocabulary_tile=64, int8_levels=127)
    per_row = 2 * (4 * 16 * 24 * 4 + (2 * 2 * 16 + 4 * 24) * 3 * 2)  # two layers: state in float32, inputs in bfloat16
    assert slot_bytes(config, torch.bfloat16, CpuBackend(native=False)) == per_row

    def moved(step: StepRecord) -> float:
        return sum(model.nbytes([step])[kernel] for kernel in ("gated_delta_rule", "causal_conv_silu"))

    chunk = moved(record([(rows, rows)], 1))
    decodes = moved(record([(1, 512)] * rows, rows))
    slots = 2 * 2 * 8 * (rows - 1)  # two layers, two kernels
    assert decodes - chunk == (2 * rows - 1) * per_row + slots


def test_queries_have_whole_heads_where_rotary_embeddings_turn_a_part() -> None:
    model = MetaModel(ModelConfig.from_dict(HYBRID), torch.bfloat16, vocabulary_tile=64, int8_levels=127)
    [attention] = model.costs([(3, 3)], 0)["paged_attention"]
    assert attention.operations == 4 * (3 + 2 + 1) * 4 * 32


def test_steps_without_a_sampled_token_do_not_read_the_lm_head() -> None:
    model = MetaModel(ModelConfig.from_dict(CONFIG), torch.bfloat16, vocabulary_tile=64, int8_levels=127)
    assert "linear_argmax" not in model.nbytes([record([(5, 5)], 0)])
