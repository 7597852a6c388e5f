"""Groups of ranks, each a process, compared with one process and with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npuserve.kernels.native import available
from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.model.layers.shard import Shard
from npuserve.npu.quantization.w8a8 import W8A8
from tests.npu.rank import PROMPTS, TOKENS, Answers, reports

GREEDY: list[dict[str, Any]] = [{"temperature": 0.0}] * len(PROMPTS)
MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1}, {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.3}, {"temperature": 0.0, "allowed_token_ids": [3, 70, 99]}]
MIXTURES: list[dict[str, Any]] = [
    {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48},
    {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "linear_num_key_heads": 2,
     "linear_num_value_heads": 4},
    {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}]
"""Sizes of mixtures of experts that two ranks can divide, by seed."""

SHARED = pytest.param(True, marks=pytest.mark.skipif(not available(), reason="the native kernels are not built"))


def answers(folder: Path, size: int, sampling: list[dict[str, Any]], **more: Any) -> Answers:
    """Return the answers of a group; see `reports`."""
    return reports(folder, size, sampling, **more).answers


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"": tmp_path_factory.mktemp("ranks")}


def model(folders: dict[str, Path], kind: str, **overrides: Any) -> Path:
    from tests.support.models import random_model, saved

    if kind not in folders:
        folders[kind] = saved(random_model(kind, **overrides), folders[""] / kind)
    return folders[kind]


@pytest.mark.slow
@pytest.mark.parametrize("shared", [SHARED, False])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-untied", "qwen3-bias", "qwen2", "llama-bias"])
def test_greedy_tokens_equal_those_of_transformers(
    folders: dict[str, Path], kind: str, size: int, shared: bool
) -> None:
    """With 4 ranks, several hold the same key and value head, and some have no ids of the vocabulary of 100."""
    from transformers import AutoModelForCausalLM

    from tests.support.models import assert_greedy

    folder = model(folders, kind)
    reference = AutoModelForCausalLM.from_pretrained(folder)
    for prompt, (tokens, *_) in zip(PROMPTS, answers(folder, size, GREEDY, shared=shared), strict=True):
        assert_greedy(reference, prompt, tokens, TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [SHARED, False])
@pytest.mark.parametrize("whole", [False, True], ids=["rows", "whole"])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_divide_experts(tmp_path: Path, seed: int, whole: bool, shared: bool) -> None:
    """Each rank has a part of the rows of all experts, or whole ones: tokens as those of transformers, and of one
    process."""
    from tests.support.mixtures import random_mixture, restack
    from tests.support.models import assert_greedy, saved

    reference = random_mixture(seed, **MIXTURES[seed])
    folder = saved(reference, tmp_path)
    restack(folder, stacked=seed == 1)
    divided = answers(folder, 2, GREEDY, shared=shared, expert_parallel=whole)
    alone = answers(folder, 1, GREEDY, shared=shared)
    for prompt, (tokens, *_) in zip(PROMPTS, divided, strict=True):
        assert_greedy(reference, prompt, tokens, TOKENS)
    assert [tokens for tokens, *_ in divided] == [tokens for tokens, *_ in alone]


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["rows", "whole"])
@pytest.mark.parametrize("shared", [SHARED, False])
def test_ranks_divide_a_head_for_drafts(tmp_path: Path, shared: bool, whole: bool) -> None:
    """Ranks draft the same, and tokens are those of transformers, which has no drafts."""
    from tests.support.mixtures import random_mixture
    from tests.support.models import assert_greedy, saved
    from tests.support.mtp import add_likely_mtp, damped

    reference = damped(random_mixture(2, **MIXTURES[2]))
    add_likely_mtp(reference, saved(reference, tmp_path))
    report = reports(tmp_path, 2, GREEDY, shared=shared, expert_parallel=whole, mtp="on", max_drafts=8)
    for prompt, (tokens, *_) in zip(PROMPTS, report.answers, strict=True):
        assert_greedy(reference, prompt, tokens, TOKENS)
    assert report.accepted > 5


@pytest.mark.slow
@pytest.mark.parametrize("shared", [SHARED, False])
def test_ranks_divide_a_smaller_model_that_drafts(folders: dict[str, Path], shared: bool) -> None:
    """The served model drafts for itself, so all drafts are right, but for rounding."""
    folder = model(folders, "qwen3")
    report = reports(folder, 2, GREEDY, shared=shared, draft=str(folder), max_drafts=8)
    assert report.answers == answers(folder, 1, GREEDY, shared=shared)
    assert report.accepted > TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "int8"}, {"lm_head_dtype": "int8"}],
                         ids=["float", "int8-cache", "int8-head"])
def test_answers_equal_those_of_one_process(folders: dict[str, Path], settings: dict[str, str]) -> None:
    folder = model(folders, "qwen3")
    alone, divided = (answers(folder, size, MIXED, **settings) for size in (1, 2))
    tolerance = 1e-2 if "lm_head_dtype" in settings else 1e-4  # a last bit of an input flips an int8 value
    assert [tokens for tokens, *_ in divided] == [tokens for tokens, *_ in alone]
    for (_, *logprobs), (_, *wanted) in zip(divided, alone, strict=True):
        assert [pytest.approx(part, abs=tolerance) for part in wanted] == logprobs


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="the native kernels are not built")
def test_recorded_step_has_two_collectives_a_layer_and_two(folders: dict[str, Path]) -> None:
    """The calls of the recorded program are timed, and those with a collective are counted."""
    folder = model(folders, "qwen3")
    layers = ModelConfig.from_folder(folder).num_layers
    found = reports(folder, 2, GREEDY, counts=True, kernel_sampling=1).steps
    assert len(found) > TOKENS
    assert {step.kernels for step in found} == {2 * layers + 2}
    assert all(step.captured for step in found)


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="the native kernels are not built")
def test_group_captures_no_step_if_one_rank_cannot(folders: dict[str, Path]) -> None:
    """As a rank of another host that failed before, which rank 0 does not know."""
    found = reports(model(folders, "qwen3"), 2, GREEDY, counts=True, of_last={"capture": "off"})
    assert {step.captured for step in found.steps} == {False}
    assert found.answers == answers(model(folders, "qwen3"), 2, GREEDY)


@pytest.mark.slow
def test_rank_that_cannot_capture_ends_the_load_of_the_others(folders: dict[str, Path]) -> None:
    """Rank 0 would otherwise be ready before it notices that a rank of another host has ended."""
    with pytest.raises(RuntimeError, match="the ranks failed"):
        reports(model(folders, "qwen3"), 2, GREEDY, of_last={"fails": True})


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [W8A8(dynamic=False), W8A8(dynamic=False, symmetric_inputs=False, symmetric=False)],
                         ids=["static", "static-zeros"])
def test_w8a8_with_static_inputs_equals_one_process(
    folders: dict[str, Path], scheme: W8A8, tmp_path: Path
) -> None:
    from tests.support.models import random_model, saved_w8a8

    folder = saved_w8a8(random_model("qwen3"), tmp_path / "w8a8", scheme)
    alone, divided = (answers(folder, size, GREEDY) for size in (1, 2))
    assert divided == alone


@pytest.mark.slow
def test_w8a8_with_dynamic_inputs_is_as_close_to_the_float_model_as_one_process(tmp_path: Path) -> None:
    """Each rank quantizes its own columns by their own scale, so the numbers differ from one process's."""
    from tests.support.models import random_model, saved, saved_w8a8

    reported = [{"temperature": 0.0, "prompt_logprobs": 1}] * len(PROMPTS)
    exact = answers(saved(random_model("qwen3"), tmp_path / "float"), 1, reported)
    folder = saved_w8a8(random_model("qwen3"), tmp_path / "w8a8")

    def error(size: int) -> float:
        differences = [abs(got - wanted) for (*_, ours), (*_, prompt) in zip(
            answers(folder, size, reported), exact, strict=True) for got, wanted in zip(ours, prompt, strict=True)]
        return sum(differences) / len(differences)

    alone = error(1)
    assert alone > 0
    assert error(2) < 1.2 * alone


CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 1, "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8}


@pytest.mark.parametrize(("size", "wrong"), [
    (5, "does not divide the model's 12 attention heads; possible below are 1, 2, 3$"),
    (4, "neither divides the model's 6 key and value heads nor is a multiple; possible below are 1, 2, 3$")])
def test_sharded_model_that_cannot_be_divided_is_refused(size: int, wrong: str) -> None:
    with pytest.raises(ModelError, match=rf"^tensor_parallel_size: {size} {wrong}"):
        ModelConfig.from_dict(CONFIG).sharded(Shard(0, size))


def test_shards_cover_each_row_once() -> None:
    for size, kv in ((2, 4), (4, 4), (8, 2)):
        shards = [Shard(rank, size) for rank in range(size)]
        parts = [s.part(16) for s in shards]
        assert [i for part in parts for i in range(part.first, part.first + part.size)] == list(range(16))
        heads = [s.kv_heads(kv) for s in shards]
        assert [h.first for h in heads] == [rank * kv // size for rank in range(size)]
        assert {h.size for h in heads} == {max(1, kv // size)}
        ids = [s.vocabulary(100, 64 * size) for s in shards]
        assert sum(i.size for i in ids) == 100
        assert [i.first for i in ids] == [min(64 * rank, 100) for rank in range(size)]
