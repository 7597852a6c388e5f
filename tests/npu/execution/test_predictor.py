"""Drafts of a head for multi-token prediction, compared with those of transformers."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from npuserve.kernels import native
from npuserve.kernels.quantized_weight import QuantizedWeight
from npuserve.kernels.weight import WeightForm, form_of
from npuserve.npu.backends.base import BackendError
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.backends.weight_layout import WeightLayout
from npuserve.npu.execution.predictor import DraftModel, MtpHead
from npuserve.npu.execution.prefill_device import possible_mtp
from npuserve.npu.execution.runner import Runner
from npuserve.npu.model.config import ModelConfig, ModelError
from npuserve.npu.model.loader import load_weights
from npuserve.npu.model.storage import read_bytes, stored_bytes
from npuserve.npu.quantize.checkpoint import quantize_checkpoint
from npuserve.npu.step import Row, SamplingParams, StepResult
from npuserve.service.scheduling.drafting import Drafting
from npuserve.service.speculation.speculator import Mode
from tests.npu.execution.test_runner import load
from tests.npu.execution.test_speculation_loop import asks as random_asks
from tests.npu.execution.test_speculation_loop import equal
from tests.support import constrained, mixtures
from tests.support.eagle import EagleHead
from tests.support.hybrids import ask, prompts, random_hybrid, settings_of, use_recurrent_rule
from tests.support.loop import Ask, serve
from tests.support.models import assert_greedy, random_model, saved, saved_w8a8
from tests.support.mtp import add_likely_mtp, add_mtp, assert_drafts, damped, round_mtp
from tests.support.recorded_drafting import RecordedDrafting, StoppedDrafting


@pytest.fixture(autouse=True)
def _recurrent_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    use_recurrent_rule(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [
    *range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6)),
    *(pytest.param(seed, marks=pytest.mark.full) for seed in range(6, 20))])
def test_drafts_equal_transformers(tmp_path: Path, seed: int) -> None:
    """Of each depth, after prompts in chunks and after accepted and rejected drafts, beside other requests."""
    model = random_hybrid(seed, num_hidden_layers=settings_of(seed)["full_attention_interval"])
    head = add_mtp(model, saved(model, tmp_path), seed)
    budget = (8, 16, 48)[seed % 3]
    runner = load(tmp_path, dtype="float32", max_num_batched_tokens=budget, max_drafts=12, mtp="on")
    drafting = RecordedDrafting(1 + seed % 3, runner.max_drafts, runner.block_size)
    chosen = prompts(4, seed)
    answers, _ = serve(runner, [ask(prompt, 12, 2 * index, bypass_prefix_cache=True)
                                for index, prompt in enumerate(chosen)], 2, 64, 4, budget, drafting=drafting)
    for prompt, answer in zip(chosen, answers, strict=True):
        assert_greedy(model, prompt, answer.tokens, 12)
    assert len(drafting.drafts) > 10
    assert_drafts(model, head, drafting.drafts)
    assert max(len(drafts) for _, drafts in drafting.drafts) == 1 + seed % 3


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "stacked"), [
    (2, True), (1, False),
    *(pytest.param(seed, seed % 2 == 0, marks=mark)
      for seeds, mark in (((4, 5), pytest.mark.slow), ((7, 8), pytest.mark.full)) for seed in seeds)])
def test_drafts_of_experts_equal_transformers(
    tmp_path: Path, seed: int, stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3.5 with experts, and Qwen3-Next. The experts of the checkpoint are stacked, or one by one."""
    mixtures.use_recurrent_rule(monkeypatch)
    model = mixtures.random_mixture(seed)
    head = add_mtp(model, saved(model, tmp_path), seed)
    mixtures.restack(tmp_path, stacked=stacked)
    runner = load(tmp_path, dtype="float32", max_num_batched_tokens=16, max_drafts=12, mtp="on")
    drafting = RecordedDrafting(2, runner.max_drafts, runner.block_size if runner.num_slots else 0)
    chosen = prompts(3, seed)
    asks = [ask(prompt, 10, 2 * index, bypass_prefix_cache=True) for index, prompt in enumerate(chosen)]
    answers, _ = serve(runner, asks, 2, 64, 4, 16, drafting=drafting)
    for prompt, answer in zip(chosen, answers, strict=True):
        assert_greedy(model, prompt, answer.tokens, 10)
    assert len(drafting.drafts) > 10
    assert_drafts(model, head, drafting.drafts)


@pytest.mark.slow
@pytest.mark.parametrize("pool", [40, 12])
def test_drafts_after_prefix_hits_and_preemptions_equal_transformers(tmp_path: Path, pool: int) -> None:
    """Prompts that share a prefix share the token after its blocks, so the head's keys and values are those of each."""
    model = random_hybrid(3, num_hidden_layers=4, full_attention_interval=2)
    head = add_mtp(model, saved(model, tmp_path))
    runner = load(tmp_path, dtype="float32", max_num_batched_tokens=48, max_drafts=12, mtp="on")
    drafting = RecordedDrafting(2, runner.max_drafts, runner.block_size)
    chosen = prompts(9, 7)
    chosen += chosen[:3]
    asks = [ask(prompt, 30, 4 * index) for index, prompt in enumerate(chosen)]
    answers, scheduler = serve(runner, asks, 2, pool, 8, 48, drafting=drafting)
    for prompt, answer in zip(chosen, answers, strict=True):
        assert_greedy(model, prompt, answer.tokens, 30)
    assert scheduler.memory.prefix_hits > 100
    assert bool(scheduler.preemptions) == (pool == 12)
    assert_drafts(model, head, drafting.drafts)


def test_head_that_returns_drafts_as_one_that_begins_there(tmp_path: Path) -> None:
    """After prompts whose first blocks were computed without the head, by the same request or by another one."""
    model = random_hybrid(3, num_hidden_layers=4, full_attention_interval=2)
    head = add_mtp(model, saved(model, tmp_path))
    size = 16
    runner = load(tmp_path, dtype="float32", max_num_batched_tokens=2 * size, max_drafts=12, mtp="on", block_size=size)
    prompt = [(7 * place) % 90 + 5 for place in range(3 * size)]
    drafting = StoppedDrafting(2, runner.max_drafts, lambda step: step != 1, runner.block_size)
    asks = [ask([*prompt, 5, 9], 12, 0), ask([*prompt, 5, 7, 6], 12, 30)]
    answers, scheduler = serve(runner, asks, 2, 40, 2, 2 * size, drafting=drafting)
    for each, answer in zip(asks, answers, strict=True):
        assert_greedy(model, each.fields["prompt_ids"], answer.tokens, 12)
    assert scheduler.memory.prefix_hits >= 2 * size
    assert len(drafting.drafts) > 10
    assert_drafts(model, head, drafting.drafts, 2 * size)
    with pytest.raises(AssertionError):
        assert_drafts(model, head, drafting.drafts)


@pytest.mark.slow
@pytest.mark.parametrize("pool", [40, 12])
def test_drafts_of_a_smaller_model_are_its_own_answers(tmp_path: Path, pool: int) -> None:
    """Also after prefix hits, preemptions, and accepted and rejected drafts."""
    model = random_model("qwen3", max_position_embeddings=256)
    smaller = random_model("llama", max_position_embeddings=256, num_hidden_layers=1, hidden_size=32)
    runner = load(saved(model, tmp_path / "model"), dtype="float32", max_num_batched_tokens=16, max_drafts=12,
                  draft=saved(smaller, tmp_path / "draft"), kv_cache_dtype="auto")
    drafting = RecordedDrafting(3, runner.max_drafts, mode="model")
    chosen = [[token % 100 for token in prompt] for prompt in prompts(9, 7)]
    chosen += chosen[:3]
    asks = [ask(prompt, 30, 4 * index) for index, prompt in enumerate(chosen)]
    answers, scheduler = serve(runner, asks, 2, pool, 8, 16, drafting=drafting)
    for prompt, answer in zip(chosen, answers, strict=True):
        assert_greedy(model, prompt, answer.tokens, 30)
    assert scheduler.memory.prefix_hits > 100
    assert bool(scheduler.preemptions) == (pool == 12)
    assert max(len(drafts) for _, drafts in drafting.drafts) == 3
    for tokens, drafts in drafting.drafts[::7]:
        assert_greedy(smaller, tokens, drafts, len(drafts))


def test_models_that_cannot_draft_are_refused(tmp_path: Path) -> None:
    folder = saved(random_model("qwen3"), tmp_path / "model")
    hybrid = saved(random_hybrid(0, vocab_size=100), tmp_path / "hybrid")
    other = saved(random_model("qwen3", vocab_size=128), tmp_path / "other")
    with pytest.raises(ModelError, match=r"with linear attention \(qwen3_5\) cannot draft"):
        load(folder, draft=hybrid, max_num_batched_tokens=48)
    with pytest.raises(ModelError, match="has 128 tokens in its vocabulary, the served one 100"):
        load(folder, draft=other, max_num_batched_tokens=48)
    with pytest.raises(BackendError, match=r"a model that drafts is not possible with prompts computed on cpu"):
        possible_mtp("off", folder, CpuBackend())


def test_drafts_are_dropped_if_they_follow_other_samples() -> None:
    """The host may accept fewer samples than the device: a request ends, or a mask is missing."""
    row = Row(0, [5, 6, 7], 10, [0], samples=3)
    for samples, valid in (([6, 9, 8], 2), ([6, 7, 8], 3), ([4, 7, 8], 1)):
        result = StepResult({0: samples}, {}, {}, 0.0, drafts={0: [1, 2]})
        assert [count for count in range(5) if result.drafts_after(row, count)] == [valid]
        assert result.drafts_after(row, valid) == [1, 2]
    single = StepResult({0: [4], 1: [3]}, {}, {}, 0.0, drafts={0: [1]})
    assert single.drafts_after(Row(0, [5], 10, [0], samples=1), 1) == [1]
    assert single.drafts_after(Row(1, [5], 10, [0], samples=1), 1) == []


class Served(NamedTuple):
    """A model with a head or a smaller model that drafts, and the same model served without."""

    with_head: Runner
    without: Runner

    def drafting(self, depth: int, mode: Mode = "mtp") -> RecordedDrafting:
        runner = self.with_head
        if mode == "mtp" and runner.config.draft:
            mode = "model"
        return RecordedDrafting(depth, runner.max_drafts, runner.block_size if runner.num_slots else 0, mode)


MODELS = {
    "hybrid": lambda: random_hybrid(3, num_hidden_layers=4, full_attention_interval=2, vocab_size=100),
    "hybrid with experts": lambda: mixtures.random_mixture(
        5, layer_types=["linear_attention", "full_attention"], num_hidden_layers=2, vocab_size=100),
    "draft model": lambda: random_model("qwen3", max_position_embeddings=128),
    "eagle head": lambda: random_model("qwen3", max_position_embeddings=128),
}


def disturbed(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model whose answers are often the same."""
    copied = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1 + 0.05 * torch.randn(parameter.shape))
    return copied


@pytest.fixture(scope="module", params=[
    "hybrid", "eagle head",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("hybrid with experts", "draft model"))])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if not native.available():
        pytest.skip("the native kernels are not built")
    before = native.library().threads
    model = MODELS[request.param]()
    if request.param != "draft model":
        damped(model)
    folder = saved(model, Path(tmp_path_factory.mktemp("model")))
    if request.param == "draft model":
        drafts: dict[str, Any] = {"draft": saved(disturbed(model), Path(tmp_path_factory.mktemp("draft")))}
    elif request.param == "eagle head":
        torch.manual_seed(0)
        drafts = {"draft": EagleHead(model, [0, 1, 2], None).trained(model).saved(tmp_path_factory.mktemp("head"))}
    else:
        add_likely_mtp(model, folder)
        drafts = {"mtp": "on"}
    sizes = {"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 48, "max_drafts": 24}
    yield Served(load(folder, **sizes, **drafts), load(folder, **sizes))
    native.library().set_threads(before)


@pytest.mark.parametrize("mode", ["mtp", pytest.param("auto", marks=pytest.mark.slow)])
@settings(max_examples=settings.default.max_examples // 5, deadline=None,
          suppress_health_check=[HealthCheck.too_slow])
@given(all_asks=st.lists(random_asks(), min_size=3, max_size=8), pool=st.sampled_from([7, 9, 40]),
       seats=st.sampled_from([8, 3, 1]), budget=st.sampled_from([48, 9]), depth=st.sampled_from([1, 2]),
       slots=st.sampled_from([2, 9, 16]), kept=st.sampled_from([0, 0, 3]), of_head=st.sampled_from([1, 2, 3]))
def test_answers_with_a_head_equal_those_without(
    served: Served, mode: Mode, all_asks: list[Ask], pool: int, seats: int, budget: int, depth: int, slots: int,
    kept: int, of_head: int,
) -> None:
    """kept: tokens of each answer that an earlier engine computed. of_head: depth of the head's drafts."""
    num_slots = min(slots, served.without.num_slots)
    plain, _ = serve(served.without, all_asks, 1, pool, seats, budget, num_slots=num_slots)
    asked = [Ask(each.tick, each.cancel, {**each.fields, "output_ids": answer.tokens[:kept]})
             if kept and len(answer.tokens) > kept and each.fields["sampling"].prompt_logprobs is None else each
             for each, answer in zip(all_asks, plain, strict=True)]
    drafting = served.drafting(of_head, mode)
    drafted, _ = serve(
        served.with_head, asked, depth, pool, seats, budget, drafting=drafting, num_slots=num_slots)
    for each, one, other in zip(asked, plain, drafted, strict=True):
        if before := len(each.fields.get("output_ids", ())):
            other.tokens[:0] = each.fields["output_ids"]
            one.logprobs = one.logprobs[before:]
        equal(one, other)
    event(f"accepted: {drafting.accepted > 0}, rejected: {drafting.accepted < drafting.drafted}")


@pytest.mark.slow
def test_drafts_of_a_head_are_accepted_and_rejected(served: Served) -> None:
    """The same tokens, of which most are accepted drafts; some drafts are wrong."""
    sampling = SamplingParams(temperature=0.0, logprobs=1)
    chosen = [Ask(index, None, {"prompt_ids": [token % 100 for token in prompt], "max_tokens": 40,
                                "sampling": sampling}) for index, prompt in enumerate(prompts(6, 1))]
    plain, _ = serve(served.without, chosen, 2, 64, 4, 48)
    drafting = served.drafting(3)
    drafted, _ = serve(served.with_head, chosen, 2, 64, 4, 48, drafting=drafting)
    assert drafted == plain
    assert 0.3 * drafting.drafted < drafting.accepted < drafting.drafted
    assert drafting.accepted_by_kind.keys() == {"model" if served.with_head.config.draft else "mtp"}


@pytest.mark.parametrize("drafter", ["head", "draft model"])
def test_what_drafts_is_not_computed_where_no_draft_is_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    if drafter == "head":
        model = random_hybrid(3)
        add_mtp(model, saved(model, tmp_path / "model"))
        settings: dict[str, Any] = {"mtp": "auto"}
    else:
        saved(random_model("qwen3"), tmp_path / "model")
        settings = {"draft": saved(random_model("llama"), tmp_path / "draft")}
    runner = load(tmp_path / "model", dtype="float32", max_num_batched_tokens=32, max_drafts=0, **settings)
    assert runner.predicts
    for unit, method in ((MtpHead, "forward"), (DraftModel, "prepare"), (DraftModel, "draft")):
        monkeypatch.setattr(unit, method, lambda *_: pytest.fail("computes what drafts"))
    answers, _ = serve(runner, [ask([5, 6, 7, 8], 10, 0)], 1, 40, 2, 32, drafting=Drafting(obstacle="device"))
    assert len(answers[0].tokens) == 10


@settings(max_examples=settings.default.max_examples // 10, deadline=None,
          suppress_health_check=[HealthCheck.too_slow])
@given(all_asks=st.lists(random_asks(), min_size=3, max_size=8), pool=st.sampled_from([7, 40]),
       seats=st.sampled_from([8, 3]), depth=st.sampled_from([1, 2]), stopped=st.lists(st.booleans(), min_size=40))
def test_answers_with_a_head_that_is_stopped_equal_those_without(
    served: Served, all_asks: list[Ask], pool: int, seats: int, depth: int, stopped: list[bool]
) -> None:
    if served.with_head.config.draft:
        return  # a smaller model is not stopped
    plain, _ = serve(served.without, all_asks, 1, pool, seats, 48)
    runner = served.with_head
    state_block_size = runner.block_size if runner.num_slots else 0
    drafting = StoppedDrafting(
        2, runner.max_drafts, lambda step: not stopped[step % len(stopped)], state_block_size)
    drafted, _ = serve(runner, all_asks, depth, pool, seats, 48, drafting=drafting)
    for one, other in zip(plain, drafted, strict=True):
        equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("mask_seconds", [0.0, math.inf])
@pytest.mark.parametrize("pool", [4, 64])
def test_constrained_tokens_do_not_depend_on_a_head(tmp_path: Path, pool: int, mask_seconds: float) -> None:
    model = damped(random_hybrid(3, num_hidden_layers=2, full_attention_interval=2,
                                 vocab_size=constrained.VOCABULARY))
    folder = saved(model, tmp_path)
    add_likely_mtp(model, folder)
    runner = load(folder, dtype="float32", max_num_batched_tokens=48, max_drafts=24, mtp="on")
    alone = constrained.expected_by(runner, 64)
    cases = constrained.cases(16)
    drafting = RecordedDrafting(2, runner.max_drafts, runner.block_size)
    found, _ = constrained.answered(
        runner, cases, alone, depth=2, pool=pool, seats=8, budget=48, is_restored=False, mask_seconds=mask_seconds,
        drafting=drafting)
    assert found == [alone(case) for case in cases]
    assert drafting.drafts


@pytest.mark.slow
@pytest.mark.parametrize("form", ["w8a8", "w8a8 with a head of floats", "quantized here", "int8 cache"])
def test_head_has_the_form_of_the_checkpoint(tmp_path: Path, form: str) -> None:
    """Drafts are accepted about as often as those of floats, and change no answer."""
    model = damped(random_hybrid(3, num_hidden_layers=2, full_attention_interval=2))
    folder = tmp_path / "floats"
    if form.startswith("w8a8"):
        saved_w8a8(model, folder, ignore=("lm_head", "re:.*in_proj_[ab]$", *(["re:mtp.*"] if "floats" in form else ())))
    else:
        saved(model, folder)
    add_likely_mtp(model, folder)
    if form == "w8a8":
        round_mtp(folder)
    if form == "quantized here":
        quantize_checkpoint(folder, tmp_path / "int8")
        folder = tmp_path / "int8"
    cache = "int8" if form == "int8 cache" else "auto"
    runner = load(folder, dtype="float32", max_num_batched_tokens=48, max_drafts=24, mtp="on", kv_cache_dtype=cache)
    layer = load_weights(folder, ModelConfig.from_folder(folder, mtp="on"), torch.float32, CpuBackend()).mtp
    assert layer
    assert bool(layer.fc.inputs) == (form == "w8a8")
    chosen = [ask(prompt, 30, index) for index, prompt in enumerate(prompts(4, 1))]
    plain, _ = serve(runner, chosen, 1, 64, 4, 48)
    drafting = RecordedDrafting(3, runner.max_drafts, runner.block_size)
    drafted, _ = serve(runner, chosen, 2, 64, 4, 48, drafting=drafting)
    if runner.deterministic:
        assert drafted == plain
    assert drafting.accepted > 0.3 * drafting.drafted


def test_weights_of_a_head_are_prepared_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_hybrid(0)
    add_mtp(model, saved(model, tmp_path))
    prepared: list[WeightForm] = []
    monkeypatch.setattr(WeightLayout, "prepare", lambda self, weight, **_: prepared.append(weight))
    weights = load_weights(tmp_path, ModelConfig.from_folder(tmp_path, mtp="on"), torch.float32, CpuBackend())
    assert weights.mtp is not None
    linears = [linear for blocks in (*weights.layers, *weights.mtp.layers) for block in blocks
               for linear in block.linears]
    expected = [form_of(linear.weight) for linear in (*linears, weights.mtp.fc, weights.lm_head)]
    assert [id(weight) for weight in prepared] == [id(weight) for weight in expected]


@pytest.mark.parametrize("drafter", ["head", "draft model"])
def test_bytes_of_a_step_are_without_what_drafts(tmp_path: Path, drafter: str) -> None:
    model = random_hybrid(0)
    folder = saved(model, tmp_path / "model")
    config, backend = ModelConfig.from_folder(folder), CpuBackend()
    if drafter == "head":
        add_mtp(model, folder)
        drafting = ModelConfig.from_folder(folder, mtp="on")
    else:
        drafting = replace(config, draft=ModelConfig.from_folder(saved(random_model("qwen3"), tmp_path / "draft")))
    assert read_bytes(drafting, torch.float32, backend) == read_bytes(config, torch.float32, backend)
    assert stored_bytes(drafting, torch.float32, backend) > stored_bytes(config, torch.float32, backend)


def test_head_is_loaded_where_it_is_wanted(tmp_path: Path) -> None:
    model = random_hybrid(3, num_hidden_layers=2, full_attention_interval=2)
    saved(model, tmp_path)
    message = r"speculate: mtp: .* has no head for multi-token prediction \(tensors mtp.\*\)"
    with pytest.raises(ModelError, match=message):
        load(tmp_path, mtp="on", max_num_batched_tokens=48)
    assert not load(tmp_path, mtp="auto", max_num_batched_tokens=48).predicts
    add_mtp(model, tmp_path)
    assert load(tmp_path, mtp="auto", max_num_batched_tokens=48).predicts
    assert not load(tmp_path, max_num_batched_tokens=48).predicts
    assert possible_mtp("auto", "", CpuBackend()) == "off"
    with pytest.raises(BackendError, match=r"with prompts computed on cpu \(prefill_device\)"):
        possible_mtp("on", "", CpuBackend())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["mtp.fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 missing: mtp.fc.weight$"):
        load(tmp_path, mtp="auto", max_num_batched_tokens=48)


@pytest.mark.parametrize("tied", [True, False])
def test_drafts_of_bfloat16_have_an_lm_head_in_int8(tmp_path: Path, tied: bool) -> None:
    """The answers do not depend on it."""
    model = damped(random_hybrid(3, num_hidden_layers=2, full_attention_interval=2, tie_word_embeddings=tied))
    folder = saved(model, tmp_path)
    add_likely_mtp(model, folder)
    runner = load(folder, dtype="bfloat16", max_num_batched_tokens=48, max_drafts=24, mtp="on")
    assert runner.config.draft_head_dtype == "int8"
    weights = load_weights(folder, runner.config, torch.bfloat16, CpuBackend())
    assert weights.mtp
    assert weights.mtp.lm_head
    head = form_of(weights.mtp.lm_head.weight)
    assert isinstance(head, QuantizedWeight)
    largest = model.get_output_embeddings().weight.abs().amax(1)
    assert torch.allclose(127 * head.scale[: len(largest)], largest, rtol=0.01)
    assert head.scale[len(largest) :].tolist() == [float(head.scale[0])] * (len(head) - len(largest))
    chosen = [ask(prompt, 30, index) for index, prompt in enumerate(prompts(4, 1))]
    plain, _ = serve(runner, chosen, 1, 64, 4, 48)
    drafting = RecordedDrafting(3, runner.max_drafts, runner.block_size)
    drafted, _ = serve(runner, chosen, 2, 64, 4, 48, drafting=drafting)
    assert drafted == plain
    assert drafting.accepted > 0.3 * drafting.drafted
