from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from npuserve.npu.execution.pooler import Pooler
from npuserve.npu.model.config import ModelConfig
from tests.support.models import random_model, saved
from tests.support.pooling import embeds, ranks

HIDDEN = np.array([3.0, 4.0, 12.0], np.float32)


def floats(data: bytes) -> list[float]:
    return np.frombuffer(data, "<f4").tolist()


@pytest.mark.parametrize(("dimensions", "is_normalized", "values"), [
    (3, False, [3, 4, 12]), (3, True, [3 / 13, 4 / 13, 12 / 13]), (2, True, [0.6, 0.8]), (1, False, [3]),
])
def test_embedding_is_cut_before_it_is_normalized(dimensions: int, is_normalized: bool, values: list[float]) -> None:
    made = floats(Pooler().values(HIDDEN, dimensions, is_normalized))
    assert made == pytest.approx(values, abs=1e-7)


def test_embedding_of_zeros_is_zero() -> None:
    assert floats(Pooler().values(np.zeros(2, np.float32), 2, True)) == [0, 0]


@pytest.mark.parametrize(("odds", "score"), [(0, 0.5), (2, 1 / (1 + math.exp(-2))), (-2, 1 / (1 + math.exp(2))),
                                        (1000, 1), (-1000, 0)])
def test_score_is_the_probability_of_the_true_token(odds: float, score: float) -> None:
    pooler = Pooler(np.array([odds, 0], np.float32))
    assert floats(pooler.values(np.array([1, 5], np.float32), 0, False)) == [pytest.approx(score)]


def test_pooler_of_a_model(tmp_path: Path) -> None:
    model = random_model("qwen3")
    saved(model, tmp_path)
    assert Pooler.of(ModelConfig.from_folder(tmp_path), str(tmp_path)) is None
    assert Pooler.of(ModelConfig.from_folder(embeds(tmp_path)), str(tmp_path))._difference is None
    weight = model.lm_head.weight.detach().numpy()
    both = Pooler.of(ModelConfig.from_folder(ranks(tmp_path, 7, 3)), str(tmp_path))
    np.testing.assert_array_equal(both._difference, weight[7] - weight[3])
    alone = Pooler.of(ModelConfig.from_folder(ranks(tmp_path, 7, None)), str(tmp_path))
    np.testing.assert_array_equal(alone._difference, weight[7])
