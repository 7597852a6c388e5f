"""The floor of a decode step compared with independent sums, and its page."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from npuserve.npu.backends.graphs import default_buckets
from npuserve.npu.model.config import ModelConfig
from tests.support.benches import bench

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def roofline() -> ModuleType:
    return bench("kernels.roofline")


@pytest.mark.parametrize(("rows", "context"), [(1, 1024), (16, 3338), (64, 1)])
def test_a_step_reads_each_weight_and_each_key_once(roofline: ModuleType, rows: int, context: int) -> None:
    c = ModelConfig.from_dict(roofline.QWEN3_14B)
    head = c.vocab_size * c.hidden_size
    attention, mlp = c.kinds
    q_size, kv_size, width = attention.q_size, attention.kv_size, mlp.width
    projections = c.num_layers * c.hidden_size * (2 * q_size + 2 * kv_size + 3 * width)
    plain, narrow = (roofline.decode(c, rows, context, quantized) for quantized in (False, True))
    assert plain.weights == 2 * (projections + head)
    outputs = c.num_layers * (q_size + 2 * kv_size + 2 * c.hidden_size + 2 * width)
    assert narrow.weights == projections + 8 * outputs + 2 * head  # each row has a scale and a sum
    assert plain.cache == narrow.cache == rows * context * c.num_layers * 2 * kv_size * 2
    # The rest is norms, scales, and activations in and out of each kernel.
    for step in (plain, narrow):
        assert 0 < step.nbytes - step.weights - step.cache < 0.03e9 * rows + 0.02e9
    # A multiply-add for each weight, and for each key and value in each query head.
    operations = 2 * rows * (projections + head + c.num_layers * 2 * context * q_size)
    assert plain.operations == operations
    assert narrow.operations == operations


def test_checkpoint_has_the_published_size(roofline: ModuleType) -> None:
    assert 2 * ModelConfig.from_dict(roofline.QWEN3_14B).num_parameters == pytest.approx(29.5e9, rel=0.002)


def test_the_sampler_reads_and_writes_all_logits_of_its_rows_in_each_operator(roofline: ModuleType) -> None:
    """Most of its operators read one or two float32 of each logit and write one."""
    c = ModelConfig.from_dict(roofline.QWEN3_14B)
    one, many = roofline.sampler(c, 1), roofline.sampler(c, 16)
    assert many == pytest.approx(16 * one, rel=0.05)  # a few operators make one row for all
    launches = roofline.SAMPLER_LAUNCHES["NONE"]
    assert 4 * launches < one / c.vocab_size < 12 * launches


def test_designs_of_captures_have_graphs_of_default_buckets(roofline: ModuleType) -> None:
    table = roofline.captures(ModelConfig.from_dict(roofline.QWEN3_14B), (64,), roofline.BANDWIDTH)
    graphs = dict(re.findall(r"^\| (\w): .*? \| (\d+) \|", table, re.MULTILINE))
    decode, chunks = len(default_buckets(64)), 512 // 64
    assert {name: int(count) for name, count in graphs.items()} == {
        "A": 4 * decode + 3 * chunks, "B": 3 * decode + 2 * chunks, "C": 5 * decode + chunks,
        "D": 4 * decode + chunks, "E": 8 * decode + chunks}


@pytest.mark.slow
def test_page_is_up_to_date(roofline: ModuleType) -> None:
    assert roofline.PAGE.read_text() == roofline.default_page(), "run python bench/kernels/roofline.py --write"


@pytest.mark.parametrize(("rows", "context"), [(1, 1024), (16, 8192)])
def test_a_step_of_a_hybrid_reads_each_weight_and_moves_each_state(
    roofline: ModuleType, rows: int, context: int
) -> None:
    c = ModelConfig.from_dict(roofline.QWEN3_5_27B)
    hidden, layers, attention = 5120, 64, 16
    linear = layers - attention
    qkv, values = 2 * 16 * 128 + 48 * 128, 48 * 128
    products = attention * hidden * (2 * 24 + 2 * 4 + 24) * 256 + linear * hidden * (qkv + 2 * values)
    products += layers * 3 * hidden * 17408
    small, head = linear * 2 * 48 * hidden, 248320 * hidden
    plain, narrow = (roofline.decode_hybrid(c, rows, context, quantized) for quantized in (False, True))
    assert plain.weights == 2 * (products + small + head)
    assert plain.weights / 2 < narrow.weights - head - small < 1.01 * plain.weights / 2  # scales and sums of rows
    assert plain.cache == rows * context * attention * 2 * 4 * 256 * 2
    assert plain.states == 2 * rows * linear * (48 * 128 * 128 + 3 * qkv) * 2
    assert 0 < plain.nbytes - plain.weights - plain.cache - plain.states < 0.06e9 * rows + 0.1e9
