"""Heads for multi-token prediction on emulated CUDA: captured drafts, and answers without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from npuserve.npu.backends.cuda import backend as cuda_backend
from npuserve.npu.backends.cuda import emulated_backend
from npuserve.npu.backends.cuda.graphs import CudaGraphs
from npuserve.npu.execution.batch import Batch
from npuserve.npu.execution.draft_buffers import SampledTokens
from npuserve.npu.execution.predictor import MtpHead
from npuserve.npu.execution.runner import Runner
from npuserve.npu.step import NewRequest, Row, SamplingParams, Step
from tests.kernels.triton import needs_triton
from tests.npu.backends.cuda.test_backend import emulated, load  # noqa: F401
from tests.npu.backends.cuda.test_hybrid import few_graphs, hybrid  # noqa: F401
from tests.npu.backends.eagle import saved_eagle
from tests.npu.backends.mtp import add_head
from tests.npu.backends.small import GREEDY, ids_of
from tests.npu.backends.small import saved as saved_small
from tests.support.loop import Answer, Ask, serve
from tests.support.models import random_model, saved
from tests.support.mtp import damped
from tests.support.recorded_drafting import RecordedDrafting

pytestmark = needs_triton

DEPTH = 2
MODELS: dict[str, Any] = {
    "hybrid": hybrid,
    "dense": lambda: hybrid(layer_types=["full_attention"] * 2)}


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
    ("hybrid", {"logprobs": 1}), pytest.param("hybrid", {"temperature": 0.7}, marks=pytest.mark.full), ("dense", {})],
    ids=str)
def test_cuda_answers_and_drafts_of_a_head_equal_the_cpus(
    tmp_path: Path, model: str, sampling: dict[str, Any]
) -> None:
    folder = add_head(saved(MODELS[model](), tmp_path), damping=0.3)
    cuda, cpu = (answered(loaded(folder, name, mtp="on"), asks(2, **sampling)) for name in ("cuda", "cpu"))
    assert_equal(cuda, cpu)


def test_cuda_answers_and_drafts_of_a_smaller_model_equal_the_cpus(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "max_position_embeddings": 256}
    folder = saved(damped(random_model("qwen3", **sizes)), tmp_path / "model")
    draft = saved(damped(random_model("llama", **sizes)), tmp_path / "draft")
    found = [answered(loaded(folder, name, draft=draft), asks(2), "model") for name in ("cuda", "cpu")]
    assert [answer.tokens for answer in found[0][0]] == [answer.tokens for answer in found[1][0]]
    assert len(found[0][1].drafts) > 3
    assert found[0][1].drafts == found[1][1].drafts


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


def test_cuda_step_with_a_head_is_two_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One verifies the drafts of a step, and one drafts."""
    folder = add_head(saved(hybrid(), tmp_path))
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
