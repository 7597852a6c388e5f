from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.model.loader import check_weights, read_head_rows
from npuserve.npu.model.pooling import Pooling, read_pooling
from tests.support.models import edit_config, random_model, saved
from tests.support.pooling import LOGIT_SCORE, NORMALIZE, POOLING, TRANSFORMER, embeds, ranks, saved_classifier, write


def test_pooling_of_a_generator_is_none(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) is None


def test_pooling_of_an_embedding_model(tmp_path: Path) -> None:
    embeds(tmp_path, prompts={"query": "Q: "})
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 40})
    assert read_pooling(tmp_path) == Pooling("embed", is_normalized=True, prompts={"query": "Q: "}, max_tokens=40)
    assert not read_pooling(embeds(tmp_path, normalize=False)).is_normalized


def test_pooling_of_a_newer_file_names_one_mode(tmp_path: Path) -> None:
    write(embeds(tmp_path), "1_Pooling/config.json", {"embedding_dimension": 32, "pooling_mode": "lasttoken"})
    assert read_pooling(tmp_path).task == "embed"


def test_pooling_of_a_reranker(tmp_path: Path) -> None:
    assert read_pooling(ranks(tmp_path, 7, 3, "Find it")) == Pooling(
        "rank", true_id=7, false_id=3, prompts={"default": "Find it"}, default_prompt="Find it")
    assert read_pooling(ranks(tmp_path, 7, None)).false_id is None


def test_generator_ranks_by_the_setting_and_by_the_tokens_of_its_tokenizer(tmp_path: Path) -> None:
    saved(random_model("qwen3"), tmp_path)
    with pytest.raises(ModelError, match=r"has no tokenizer.json, whose tokens yes and no make a score; task is rank"):
        read_pooling(tmp_path, "rank")
    write(tmp_path, "tokenizer.json", {"model": {"vocab": {"yes": 7, "nope": 3}}})
    with pytest.raises(ModelError, match=r"tokenizer.json: has no token 'no', by which a reranker without"):
        read_pooling(tmp_path, "rank")
    write(tmp_path, "tokenizer.json", {"model": {"vocab": {"yes": 7, "no": 3}}})
    assert read_pooling(tmp_path, "rank") == Pooling("rank", true_id=7, false_id=3)
    assert read_pooling(tmp_path) is None
    assert ModelConfig.from_folder(tmp_path).pooling is None
    assert ModelConfig.from_folder(tmp_path, task="rank").pooling == Pooling("rank", true_id=7, false_id=3)


def test_classifier_ranks_by_the_setting_or_by_its_modules(tmp_path: Path) -> None:
    model = saved_classifier(tmp_path)
    with pytest.raises(ModelError, match=r"Qwen3ForSequenceClassification has a classifier .*--task rank"):
        ModelConfig.from_folder(tmp_path)
    by_setting = ModelConfig.from_folder(tmp_path, task="rank")
    write(tmp_path, "modules.json", [TRANSFORMER])
    config = ModelConfig.from_folder(tmp_path)
    assert config == by_setting
    assert config.pooling == Pooling("rank", is_classifier=True)
    assert "score.weight" not in check_weights(tmp_path, config)
    assert torch.equal(read_head_rows(tmp_path, config, [0]), model.score.weight)


@pytest.mark.parametrize("labels", [2, 3])
def test_classifier_of_several_labels_is_refused(tmp_path: Path, labels: int) -> None:
    saved_classifier(tmp_path, labels)
    with pytest.raises(ModelError, match=f"a classifier of {labels} labels is not supported"):
        read_pooling(tmp_path, "rank")


def test_embedding_model_is_not_served_as_a_reranker(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"modules.json: is of a model for embed, and task is rank"):
        read_pooling(embeds(tmp_path), "rank")


def test_modules_without_pooling_of_a_generator_are_refused(tmp_path: Path) -> None:
    saved(random_model("qwen3"), tmp_path)
    write(tmp_path, "modules.json", [TRANSFORMER])
    with pytest.raises(ModelError, match="Transformer is not supported"):
        read_pooling(tmp_path)


@pytest.mark.parametrize(("path", "content", "message"), [
    ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True}, "pooling mode mean is not supported"),
    ("1_Pooling/config.json", {"pooling_mode": "cls"}, "pooling mode cls is not supported"),
    ("1_Pooling/config.json", {"pooling_mode": ["lasttoken", "mean"]}, "pooling mode lasttoken and mean is not"),
    ("1_Pooling/config.json", [], "must hold a JSON object"),
    ("modules.json", {}, "must hold a JSON list"),
    ("modules.json", [{"type": "a.Transformer", "path": "../x"}], "a path within the folder"),
    ("modules.json", [TRANSFORMER, POOLING, {**NORMALIZE, "type": "x.Dense"}], "Transformer, Pooling, Dense is not"),
    ("config_sentence_transformers.json", {"prompts": {"a": 1}}, "prompts: must be an object of texts"),
    ("config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": "q"}, "default_prompt_name"),
    ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length: must be"),
])
def test_pooling_unsupported_file_is_refused_by_name(tmp_path: Path, path: str, content: Any, message: str) -> None:
    write(embeds(tmp_path), path, content)
    with pytest.raises(ModelError, match=message):
        read_pooling(tmp_path)


@pytest.mark.parametrize("config", [{}, {"true_token_id": -1}, {"true_token_id": True},
                                    {"true_token_id": 1, "false_token_id": "no"}])
def test_pooling_score_without_token_ids_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    write(tmp_path, "modules.json", [TRANSFORMER, LOGIT_SCORE])
    write(tmp_path, "1_LogitScore/config.json", config)
    with pytest.raises(ModelError, match="_token_id: must be a token id"):
        read_pooling(tmp_path)


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "20KB"}])
def test_config_of_a_bare_decoder_that_embeds(tmp_path: Path, shards: dict[str, str]) -> None:
    saved(random_model("qwen3").model, tmp_path, **shards)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3Model"]
    with pytest.raises(ModelError, match=r"Qwen3Model has no LM head, and the folder has no modules.json"):
        ModelConfig.from_folder(tmp_path)
    config = ModelConfig.from_folder(embeds(tmp_path))
    assert (config.architecture, config.prefix, config.embedding_dimension) == ("Qwen3ForCausalLM", "", 32)
    assert "norm.weight" in check_weights(tmp_path, config)


def test_config_of_an_untied_model_that_pools_loads_no_head(tmp_path: Path) -> None:
    saved(random_model("qwen3-untied"), tmp_path)
    config = ModelConfig.from_folder(ranks(tmp_path, 7, 3))
    assert (config.prefix, config.head, config.embedding_dimension) == ("model.", "lm_head", 0)
    assert "lm_head.weight" not in check_weights(tmp_path, config)


def test_config_of_a_model_that_attends_to_later_tokens_is_refused(tmp_path: Path) -> None:
    saved(random_model("qwen2"), tmp_path)
    edit_config(embeds(tmp_path), is_causal=False)
    with pytest.raises(ModelError, match="attention to later tokens is not supported"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-untied"])
def test_head_rows_are_those_of_the_logits(tmp_path: Path, kind: str) -> None:
    model = random_model(kind)
    config = ModelConfig.from_folder(ranks(saved(model, tmp_path), 7, 3))
    assert torch.equal(read_head_rows(tmp_path, config, [7, 3]), model.lm_head.weight[[7, 3]])
    with pytest.raises(ModelError, match=r"token id 100 of its score must be in \[0, 99\]"):
        read_head_rows(tmp_path, config, [100])


def test_head_rows_of_a_quantized_head_are_refused(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(ranks(saved(random_model("qwen3-untied"), tmp_path), 7, 3))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"].to(torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="must be floats"):
        read_head_rows(tmp_path, config, [7, 3])
