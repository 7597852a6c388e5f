"""Heads for multi-token prediction on emulated CUDA: captured drafts, and answers without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from npuserve.npu import backends
from npuserve.npu.backends.cuda import backend as cuda_backend
from npuserve.npu.backends.cuda import emulated_backend
from npuserve.npu.backends.cuda.graphs import CudaGraphs
from npuserve.npu.execution.batch import Batch
from npuserve.npu.execution.draft_buffers import SampledTokens
from npuserve.npu.execution.predictor import MtpHead
from npuserve.npu.execution.runner import Runner
from npuserve.npu.quantization.w8a8 import W8A8
from npuserve.npu.step import NewRequest, Row, SamplingParams, Step
from tests.kernels.triton import needs_triton
from tests.npu.backends.cuda.test_backend import emulated, load  # noqa: F401
from tests.npu.backends.cuda.test_hybrid import few_graphs, hybrid  # noqa: F401
from tests.npu.backends.eagle import saved_eagle
from tests.npu.backends.mtp import add_head
from tests.npu.backends.small import GREEDY, ids_of
from tests.npu.backends.small import saved as saved_small
from tests.npu.model.test_experts_quantized import FLOATS
from tests.support.golden_cpu import GoldenCpu
from tests.support.loop import Answer, Ask, serve
from tests.support.mixtures import random_mixture, restack
from tests.support.models import PLAIN_W8A8, random_model, round_linears, saved
from tests.support.mtp import damped
from tests.support.recorded_drafting import RecordedDrafting, StoppedDrafting

pytestmark = [needs_triton, pytest.mark.timeout(600)]

DEPTH = 2
EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "hidden_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
NEXT: dict[str, Any] = EXPERTS | {"mlp_only_layers": [], "decoder_sparse_step": 1}
MODELS: dict[str, Any] = {
    "hybrid": hybrid,
    "dense": lambda: hybrid(layer_types=["full_attention"] * 2),
    "experts": lambda: random_mixture(2, **EXPERTS),
    "Qwen3-Next": lambda: random_mixture(1, **NEXT)}


def loaded(folder: Path, name: str, **settings: Any) -> Runner:
    given = {"max_num_batched_tokens": 8, "max_num_seqs": 2, "kv_cache_memory": 1 << 20, "max_drafts": 4,
             "draft_depth": DEPTH}
    return load(folder, name, **given | settings)


def asks(number: int, **sampling: Any) -> list[Ask]:
    return [Ask(2 * index, None, {
        "prompt_ids": ids_of(4 + 5 * index, index), "max_tokens": 6,
        "bypass_prefix_cache": True, "sampling": SamplingParams(seed=index, **({"temperature": 0.0} | sampling)),
    }) for index in range(number)]


def answered(runner: Runner, requests: Sequence[Ask], mode: Any = "mtp") -> tuple[list[Answer], RecordedDrafting]:
    drafting = RecordedDrafting(DEPTH, runner.max_drafts, runner.block_size if runner.num_slots else 0, mode)
    answers, _ = serve(runner, list(requests), 2, 40, 2, 8, drafting=drafting)
    return answers, drafting


def assert_equal(cuda: tuple[list[Answer], RecordedDrafting], cpu: tuple[list[Answer], RecordedDrafting]) -> None:
    assert [answer.tokens for answer in cuda[0]] == [answer.tokens for answer in cpu[0]]
    for one, other in zip(cuda[0], cpu[0], strict=True):
        assert [report.logprob for report in one.logprobs] == pytest.approx(
            [report.logprob for report in other.logprobs], abs=1e-4)
    assert len(cuda[1].drafts) > 3
    assert cuda[1].drafts == cpu[1].drafts
    assert 0 < cuda[1].accepted < cuda[1].drafted


@pytest.mark.parametrize(("model", "sampling"), [
    ("hybrid", {"logprobs": 1}), *(pytest.param(*case, marks=pytest.mark.full) for case in (
        ("hybrid", {"temperature": 0.7}), ("dense", {}), ("experts", {"logprobs": 1}),
        ("experts", {"temperature": 0.7}), ("Qwen3-Next", {})))], ids=str)
def test_cuda_answers_and_drafts_of_a_head_equal_the_cpus(
    tmp_path: Path, model: str, sampling: dict[str, Any]
) -> None:
    folder = add_head(saved(MODELS[model](), tmp_path), damping=0.3)
    cuda, cpu = (answered(loaded(folder, name, mtp="on"), asks(2, **sampling)) for name in ("cuda", "cpu"))
    assert_equal(cuda, cpu)


@pytest.mark.full  # test_experts.py has such experts without drafts
@pytest.mark.parametrize("head", ["float8", "floats"])
def test_cuda_answers_and_drafts_of_quantized_experts_equal_the_cpus(tmp_path: Path, head: str) -> None:
    """Published checkpoints have model and head in float8 in blocks, with fc in floats, or only the model quantized.
    Then the experts of the head may be in one tensor, those of the model are not."""
    if head == "float8":
        scheme = W8A8(per_channel=False, float8=True, blocks=True)
        floats = (*FLOATS, "mtp.fc")
        backends.register_emulated(GoldenCpu)
    else:
        scheme = PLAIN_W8A8
        floats = (*FLOATS, "re:mtp[.].*")
    folder = add_head(saved(MODELS["experts"](), tmp_path), damping=0.3)
    restack(folder, stacked=False, of="" if head == "float8" else "model.")
    round_linears(folder, scheme, floats)
    found = []
    for name in ("cuda", "cpu"):
        runner = loaded(folder, name, mtp="on")
        found.append(answered(runner, asks(2)))
        if name == "cuda":
            assert runner.fallbacks == []
    assert_equal(*found)


@pytest.mark.full
def test_cuda_drafts_of_experts_equal_the_cpus_after_pauses_of_the_head(tmp_path: Path) -> None:
    """The head returns to requests in progress and to prefixes that were computed without it, with any number of
    drafts."""
    folder = add_head(saved(MODELS["experts"](), tmp_path), damping=1.0)  # drafts depend on what attention reads
    requests = [Ask(6 * index, None, {
        "prompt_ids": ids_of(34, 7) + ids_of(2 + 2 * index, index), "max_tokens": 7, "sampling": GREEDY})
        for index in range(3)]
    found = []
    for name in ("cuda", "cpu"):
        runner = loaded(folder, name, mtp="auto", max_num_batched_tokens=32, max_num_seqs=3)
        drafting = StoppedDrafting(DEPTH, runner.max_drafts, lambda step: step % 7 > 2, runner.block_size)
        answers, scheduler = serve(runner, requests, 2, 12, 3, 32, drafting=drafting)
        assert scheduler.memory.prefix_hits
        assert drafting.head_steps["stopped"]
        assert len(drafting.drafts) > 5
        found.append(([answer.tokens for answer in answers], drafting.drafts))
    assert found[0] == found[1]


@pytest.mark.full  # ascend/test_mtp.py
def test_cuda_answers_and_drafts_of_a_smaller_model_equal_the_cpus(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "max_position_embeddings": 256}
    folder = saved(damped(random_model("qwen3", **sizes)), tmp_path / "model")
    draft = saved(damped(random_model("llama", **sizes)), tmp_path / "draft")
    found = [answered(loaded(folder, name, draft=draft), asks(2), "model") for name in ("cuda", "cpu")]
    assert [answer.tokens for answer in found[0][0]] == [answer.tokens for answer in found[1][0]]
    assert len(found[0][1].drafts) > 3
    assert found[0][1].drafts == found[1][1].drafts


@pytest.mark.full  # ascend/test_mtp.py
def test_cuda_answers_and_drafts_of_an_eagle_head_equal_the_cpus(tmp_path: Path) -> None:
    folder = saved_small(tmp_path / "model")
    draft = saved_eagle(tmp_path / "draft")
    found = [answered(loaded(folder, name, draft=draft), asks(2), "model") for name in ("cuda", "cpu")]
    assert [answer.tokens for answer in found[0][0]] == [answer.tokens for answer in found[1][0]]
    assert len(found[0][1].drafts) > 3
    assert found[0][1].drafts == found[1][1].drafts


def test_cuda_warm_up_and_measured_step_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So no prompt waits for a compiler, and the plan of the memory has the bytes of drafting."""
    drafted: list[tuple[int, int]] = []
    draft_all = MtpHead.draft_all

    def counting(head: MtpHead, batch: Batch, sampled: SampledTokens, depth: int) -> torch.Tensor:
        drafted.append((len(batch.positions), depth))
        return draft_all(head, batch, sampled, depth)

    monkeypatch.setattr(MtpHead, "draft_all", counting)
    compiling = replace(emulated_backend.EmulatedCuda.capabilities, compiles=True)
    monkeypatch.setattr(emulated_backend.EmulatedCuda, "capabilities", compiling)
    monkeypatch.setattr(cuda_backend, "build_driver_module", lambda: None)
    runner = loaded(add_head(saved(hybrid(), tmp_path)), "cuda", mtp="on", capture="off")
    assert drafted == [(8, DEPTH)]
    runner.compute_largest_step()
    assert drafted == [(8, DEPTH)] * 2


@pytest.mark.parametrize("model", ["hybrid", "experts"])
def test_cuda_step_with_a_head_is_two_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """One verifies the drafts of a step, and one drafts."""
    folder = add_head(saved(MODELS[model](), tmp_path))
    runner = loaded(folder, "cuda", mtp="on")
    replays: list[tuple[int, int]] = []
    replay = CudaGraphs.replay

    def counting(graphs: CudaGraphs, rows: int, *lengths: Any) -> torch.Tensor:
        replays.append((rows, graphs.size(rows)))
        return replay(graphs, rows, *lengths)

    monkeypatch.setattr(CudaGraphs, "replay", counting)
    first = Step([Row(0, [5, 7, 9], 0, [0], 1, state_slot=0, predicts=DEPTH)], [NewRequest(0, [5, 7, 9], [], GREEDY)])
    results = [runner.collect(runner.launch(first))]
    for start, tokens in ((3, 1), (4, 1 + DEPTH)):
        row = Row(0, [5] * tokens, start, [0], tokens, state_slot=0, predicts=DEPTH)
        results.append(runner.collect(runner.launch(Step([row]))))
    assert [len(result.drafts[0]) for result in results] == [DEPTH] * 3
    assert replays == [(3, 8)] * 2 + [(1, 1)] * 2 + [(3, 8)] * 2
