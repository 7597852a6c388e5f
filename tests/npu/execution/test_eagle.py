"""Drafts of EAGLE-3 heads with random weights, compared with those of modules of transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution.load import with_draft
from npuserve.npu.execution.predictor import Eagle3Head
from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.model.layers.shard import Shard
from npuserve.npu.model.storage import stored_bytes
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(6, 20))])
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
    answers, _ = serve(runner, [ask(prompt, 12, 2 * place) for place, prompt in enumerate(chosen)], 2,
                               (64, 14)[seed % 2], 4, budget, drafting=drafting)
    for prompt, answer in zip(chosen, answers, strict=True):
        assert_greedy(model, prompt, answer.tokens, 12)
    assert len(drafting.drafts) > 10
    assert max(len(drafts) for _, drafts in drafting.drafts) == 1 + seed % 3
    head.assert_drafts(model, drafting.drafts)


def test_default_layers_are_those_of_published_heads(tmp_path: Path) -> None:
    """The inputs of layer 2, the middle one, and the third from the end; names as some heads have them."""
    model = random_model("qwen3", num_hidden_layers=8, max_position_embeddings=256)
    torch.manual_seed(0)
    head = EagleHead(model, [2, 4, 5], None)
    folder = head.saved(tmp_path / "head", eagle_aux_hidden_state_layer_ids=None, norm_before_residual=None,
                        draft_vocab_size=None, attention_bias=None, mlp_bias=None)
    file = folder / "model.safetensors"
    save_file({name.replace("midlayer.", "layers.0."): tensor for name, tensor in load_file(file).items()}, file)
    runner = load(saved(model, tmp_path / "model"), dtype="float32", max_num_batched_tokens=16, max_drafts=12,
                  draft=folder)
    drafting = RecordedDrafting(2, runner.max_drafts, mode="model")
    serve(runner, [ask([5, 6, 7, 8], 10, 0)], 2, 64, 4, 16, drafting=drafting)
    assert drafting.drafts
    head.assert_drafts(model, drafting.drafts)


@pytest.mark.parametrize(("changes", "said"), [
    ({"num_hidden_layers": 2}, "num_hidden_layers: an EAGLE-3 head has 1, got 2"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 3]},
     r"must be ascending numbers of layers of the served model, in \[0, 2\], got \[0, 3\]"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}},
     r"must be ascending numbers of layers of the served model, in \[0, 1\], got \[0, 2\]"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0]}}, "must be ascending numbers of layers"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}}, "must be ascending numbers of layers"),
    ({"eagle_aux_hidden_state_layer_ids": None},
     "eagle_aux_hidden_state_layer_ids: is missing, and a served model of 3 layers has no default"),
    ({"target_hidden_size": 64}, "target_hidden_size: is 64, where the served model has 32"),
    ({"hidden_size": 48}, "1 missing: embed_tokens.weight, since its hidden_size, 48, is not that of the served model"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: an EAGLE-3 head in floats is supported"),
    ({"speculators_model_type": "eagle3"}, "heads in the format of speculators are not supported"),
    ({"vocab_size": 99}, "has 99 tokens in its vocabulary, the served one 100"),
    ({"draft_vocab_size": 41}, r"of the wrong shape.*d2t \[40\] instead of \[41\]"),
    ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
])
def test_heads_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    model = random_model("qwen3")
    head = EagleHead(model, [0, 2], torch.arange(40)).saved(tmp_path / "head", **changes)
    with pytest.raises(ModelError, match=said):
        load(saved(model, tmp_path / "model"), max_num_batched_tokens=48, max_drafts=4, draft=head)


def test_ids_beyond_the_vocabulary_and_ids_that_are_missing_are_refused(tmp_path: Path) -> None:
    model = random_model("qwen3")
    folder = saved(model, tmp_path / "model")
    head = EagleHead(model, [0, 2], torch.arange(40)).saved(tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    save_file(tensors | {"d2t": tensors["d2t"] + 61}, head / "model.safetensors")
    with pytest.raises(ModelError, match=r"d2t: must lead to ids of the served model, in \[0, 99\], got \[61, 100\]"):
        load(folder, max_num_batched_tokens=48, max_drafts=4, draft=head)
    del tensors["d2t"]
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(ModelError, match="1 missing: d2t, since draft_vocab_size is not vocab_size, 100"):
        load(folder, max_num_batched_tokens=48, max_drafts=4, draft=head)


def test_a_head_is_not_served_and_not_divided(tmp_path: Path) -> None:
    model = random_model("qwen3")
    head = EagleHead(model, [0, 2], None).saved(tmp_path / "head")
    with pytest.raises(ModelError, match="is an EAGLE-3 head, which drafts for another model: serve that one, with"):
        ModelConfig.from_folder(head)
    config = ModelConfig.from_folder(saved(model, tmp_path / "model")).sharded(Shard(0, 2))
    with pytest.raises(ModelError, match="an EAGLE-3 head is not possible with a tensor_parallel_size above 1"):
        with_draft(config, head, CpuBackend())


def test_features_do_not_depend_on_a_pass_that_failed(tmp_path: Path) -> None:
    """A device that refuses to capture a step may compute the next one kernel by kernel."""
    model = random_model("qwen3")
    head = EagleHead(model, [0, 2], None).saved(tmp_path / "head")
    reader = load(saved(model, tmp_path / "model"), dtype="float32", max_num_batched_tokens=48, max_drafts=4,
                  draft=head)._forward._reader
    assert isinstance(reader, Eagle3Head)
    inputs = torch.randn(2, 5, 32)

    def features() -> Tensor:
        for layer, residual in zip((0, 2), inputs, strict=True):
            reader.read(layer, residual)
        return reader._features[:5].clone()

    expected = features()
    reader.read(0, torch.randn(9, 32))
    assert torch.equal(features(), expected)


def test_weights_of_a_head_are_counted(tmp_path: Path) -> None:
    """Each byte of the folder but t2d, in the dtype that is served; an embedding is counted where the head has one."""
    model = random_model("qwen3", vocab_size=96, hidden_size=64)
    plain = ModelConfig.from_folder(saved(model, tmp_path / "model"))
    for owns in (True, False):
        head = EagleHead(model, [0, 2], torch.arange(48), owns_embedding=owns).saved(tmp_path / str(owns))
        config = with_draft(plain, head, CpuBackend())
        tensors = load_file(head / "model.safetensors")
        expected = sum(tensor.nbytes for name, tensor in tensors.items() if name != "t2d")
        backend = CpuBackend()
        counted = stored_bytes(config, torch.float32, backend) - stored_bytes(plain, torch.float32, backend)
        assert expected <= counted <= 1.1 * expected, (owns, counted, expected)
