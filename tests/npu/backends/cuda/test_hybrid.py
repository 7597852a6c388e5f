"""Emulated CUDA backend with Qwen3.5: linear attention whose states lie in slots, beside the CPU's kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from npuserve.cli.acceptance import reference
from npuserve.cli.acceptance import tokens as accept_tokens
from npuserve.cli.acceptance.model import check_tokens
from npuserve.cli.acceptance.reference import load_reference
from npuserve.kernels.registry import KERNELS
from npuserve.npu import backends
from npuserve.npu.backends.base import DeviceSettings
from npuserve.npu.backends.cuda import backend as cuda_backend
from npuserve.npu.backends.cuda import graphs as cuda_graphs
from npuserve.npu.backends.cuda.backend import CudaBackend
from npuserve.npu.execution.memory_plan import predict
from npuserve.npu.execution.runner import Runner
from npuserve.npu.execution.state_store import slot_bytes
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.quantization.w8a8 import W8A8
from npuserve.npu.step import PENDING, NewRequest, Row, SamplingParams, Step
from tests.kernels.triton import needs_triton
from tests.npu.backends.cuda.test_backend import emulated, load, started  # noqa: F401
from tests.npu.backends.small import GREEDY, ids_of
from tests.support.golden_cpu import GoldenCpu
from tests.support.hybrids import random_hybrid
from tests.support.loop import Ask, serve
from tests.support.models import saved, saved_w8a8

pytestmark = needs_triton

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "full_attention_interval": 2, "hidden_size": 32, "intermediate_size": 40,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}


@pytest.fixture(autouse=True)
def few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture two sizes of steps of any rows, since each capture is interpreted."""

    def token_buckets(largest: int) -> tuple[int, ...]:
        largest = min(largest, cuda_graphs.MAX_TOKENS)
        return min(8, largest), largest

    monkeypatch.setattr(cuda_backend, "token_buckets", token_buckets)


def hybrid(**changes: Any) -> PreTrainedModel:
    return random_hybrid(0, **SIZES | changes)


def ask(prompt: list[int], count: int, tick: int = 0, **fields: object) -> Ask:
    return Ask(tick, None, {"prompt_ids": prompt, "max_tokens": count, "sampling": GREEDY, **fields})


def both(folder: Path, **settings: Any) -> list[Runner]:
    given = {"max_num_batched_tokens": 48, "max_num_seqs": 3, "kv_cache_memory": 1 << 20} | settings
    return [load(folder, name, **given) for name in ("cuda", "cpu")]


def test_chunks_and_decode_rows_are_captured_and_equal_the_cpu(tmp_path: Path) -> None:
    """Mixed steps of rows of 1, few and many tokens, two steps in flight, slots used again, and all heads of 256."""
    folder = saved(hybrid(head_dim=256, num_attention_heads=3), tmp_path)
    found = []
    asks = [ask(ids_of(length, length), 3, index) for index, length in enumerate((35, 4, 20))]
    for runner in both(folder):
        assert runner.fallbacks == []
        answers, _ = serve(runner, asks, 2, 64, 3, 48)
        found.append([answer.tokens for answer in answers])
    assert found[0] == found[1]
    assert [len(tokens) for tokens in found[0]] == [3] * 3


def test_steps_are_one_launch_of_a_captured_graph(tmp_path: Path) -> None:
    """A first chunk, a second one beside a decode row, and decode rows."""
    prompt, other = ids_of(37), ids_of(9, 1)
    steps = [
        Step([Row(0, other, 0, [0], True, state_slot=1)], [NewRequest(0, other, [], GREEDY)]),
        Step([Row(0, [PENDING], 9, [0], True, state_slot=1), Row(1, prompt[:30], 0, [1, 2], False, state_slot=0)],
             [NewRequest(1, prompt, [], GREEDY)]),
        Step([Row(0, [PENDING], 10, [0], True, state_slot=1), Row(1, prompt[30:], 30, [1, 2, 3], True, state_slot=0)]),
        Step([Row(0, [PENDING], 11, [0], True, state_slot=1), Row(1, [PENDING], 37, [1, 2, 3], True, state_slot=0)])]
    found = []
    for runner in both(saved(hybrid(), tmp_path)):
        results = [runner.collect(runner.launch(step)) for step in steps]
        found.append([result.token_ids for result in results])
        if runner.backend_name == "cuda":
            assert all(result.captured for result in results)
            assert [result.captured_decodes + result.decoder_decodes for result in results] == [0, 1, 1, 2]
    assert found[0] == found[1]


def test_step_beyond_captured_tokens_runs_kernel_by_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_TOKENS", 4)
    prompt = ids_of(20)
    found = []
    for runner in both(saved(hybrid(), tmp_path)):
        result = runner.collect(runner.launch(
            Step([Row(0, prompt, 0, [0, 1], True, state_slot=0)], [NewRequest(0, prompt, [], GREEDY)])))
        assert result.captured == (runner.backend_name == "cpu")
        found.append(result.token_ids)
    assert found[0] == found[1]


def test_preempted_requests_and_prefix_hits_equal_the_cpu(tmp_path: Path) -> None:
    """Few blocks preempt requests; a second turn continues a checkpoint of the first one's state."""
    folder = saved(hybrid(), tmp_path)
    first = [ids_of(14, 1), ids_of(47, 2)]
    second = [*first[1], *ids_of(5)]
    asks = [*(ask(prompt, 4) for prompt in first), ask(second, 2, 30)]
    found = []
    for runner in both(folder):
        answers, scheduler = serve(runner, asks, 2, 5, 2, 48, num_slots=8)
        found.append([answer.tokens for answer in answers])
        assert scheduler.preemptions > 0
        assert scheduler.memory.prefix_hits > 0
    assert found[0] == found[1]


def test_slot_is_copied_by_one_call_for_all_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests continue the state of one prompt, each in a slot of its own."""
    copied: list[int] = []
    copy_each = torch._foreach_copy_

    def counted(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        copied.append(len(targets))
        copy_each(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    prompt = ids_of(16)
    answers = []
    runner = load(saved(hybrid(), tmp_path), capture="off", max_num_batched_tokens=32)
    for step in (
            Step([Row(0, prompt, 0, [0], True, state_slot=0)], [NewRequest(0, prompt, [], GREEDY)]),
            Step([Row(index, [5], 16, [0, index], True, state_slot=index, state_source=0) for index in (1, 2)],
                 [NewRequest(index, [*prompt, 5], [], GREEDY) for index in (1, 2)], [0])):
        answers.append(runner.collect(runner.launch(step)).token_ids)
    assert copied == [2, 2]
    assert answers[1][1] == answers[1][2]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("length", [1000, pytest.param(8000, marks=pytest.mark.full)])
def test_long_context_equals_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """A prompt in chunks and a decode row after it: log-probabilities, windows and states are the CPU's.

    Triton's interpreter takes milliseconds for each program. So the rule is Triton's for all tokens, convolution and
    attention in steps of less than 128, of which the last chunk of 1,000 tokens is one, and other kernels are golden.
    """
    own = {name: kernel.golden for name, kernel in KERNELS.items()
           if "cuda" in kernel.implementations and name != "gated_delta_rule" and not kernel.optional}

    def launched(name: str) -> Any:
        launch = KERNELS[name].implementations["cuda"].function
        return lambda x, *others: (launch if len(x) < 128 else own[name])(x, *others)

    by_context = {name: launched(name) for name in ("causal_conv_silu", "paged_attention")}
    monkeypatch.setattr(CudaBackend, "own_kernels", own | by_context)
    chunk = 448
    model = hybrid(max_position_embeddings=8192, linear_num_value_heads=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-6)  # states forget within a thousand tokens, not within a few
    folder = saved(model, tmp_path)
    prompt, found = ids_of(length, 5), []
    for runner in both(folder, max_num_batched_tokens=chunk, max_model_len=8192, kv_cache_memory=16 << 20,
                       capture="off"):
        blocks = list(range(-(-(length + 1) // 16)))
        new = [NewRequest(1, prompt, [], SamplingParams(temperature=0.0, logprobs=5))]
        for first in range(0, length, chunk):
            row = Row(1, prompt[first : first + chunk], first, blocks, first + chunk >= length, state_slot=0)
            result = runner.collect(runner.launch(Step([row], new)))
            new = []
        following = runner.collect(runner.launch(Step([Row(1, [7], length, blocks, True, state_slot=0)])))
        found.append([[reports.logprobs[1][0] for reports in (result, following)],
                      [tensor[0].clone() for tensor in runner._store.fixed]])
    (cuda, cuda_states), (cpu, cpu_states) = found
    assert [report.top_ids for report in cuda] == [report.top_ids for report in cpu]
    for got, expected in zip(cuda, cpu, strict=True):
        torch.testing.assert_close(
            torch.tensor(got.top_logprobs), torch.tensor(expected.top_logprobs), rtol=1e-4, atol=1e-4)
    for state, expected_state in zip(cuda_states, cpu_states, strict=True):
        torch.testing.assert_close(state, expected_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("quantized", [pytest.param("blocks", marks=pytest.mark.full), "int8 cache and head"])
def test_quantized_hybrid_is_near_golden(tmp_path: Path, quantized: str) -> None:
    """Float8 in blocks as of the published -FP8, and an int8 KV cache and LM head: chunks, and a captured step."""
    settings = {}
    if quantized == "blocks":
        model = hybrid(hidden_size=160, intermediate_size=200)
        # The gates' inputs are not quantized in the published checkpoints.
        folder = saved_w8a8(model, tmp_path, W8A8(per_channel=False, float8=True, blocks=True),
                            ignore=("lm_head", "re:.*in_proj_[ab]"))
        assert ModelConfig.from_folder(folder).quantization_name == "w8a8-fp8"
        backends.register_emulated(GoldenCpu)
    else:
        folder = saved(hybrid(), tmp_path)
        settings = {"kv_cache_dtype": "int8", "lm_head_dtype": "int8"}
    prompt, found = ids_of(40), []
    new = NewRequest(0, prompt, [], SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1))
    steps = [Step([Row(0, prompt[:30], 0, [0, 1], False, state_slot=2)], [new]),
             Step([Row(0, prompt[30:], 30, [0, 1, 2], True, state_slot=2)]),
             Step([Row(0, [7], 40, [0, 1, 2], True, state_slot=2)])]
    for runner in both(folder, **settings):
        results = [runner.collect(runner.launch(step)) for step in steps]
        reports = [report for result in results[:2] for report in result.prompt_logprobs[0]]
        found.append([report.logprob for report in (*reports, *results[1].logprobs[0], *results[2].logprobs[0])])
    assert len(found[0]) == 41
    torch.testing.assert_close(*map(torch.tensor, found), atol=0.05, rtol=0.02)


@pytest.mark.parametrize("state", [pytest.param("float32", marks=pytest.mark.full), "bfloat16"])
def test_tokens_of_bfloat16_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """The rule of `npuserve check --accept`: near the golden functions in float32, and equal with and without two steps
    in flight."""
    folder = saved(hybrid(), tmp_path)
    monkeypatch.setattr(accept_tokens, "BUDGET", 24)
    backend = backends.select("cuda", settings=DeviceSettings(state_dtype=state, decode_buckets=(2,)))
    golden = load_reference(folder, backend, "float32", 64, 1)
    loaded = reference.load(folder, backend, "bfloat16", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=24,
                            block_size=16)
    checks = check_tokens(loaded, golden, [ids_of(26), ids_of(5, 1)], 2, folder)
    assert checks
    assert all(check.passed for check in checks), checks


def test_memory_plan_has_the_states(tmp_path: Path) -> None:
    """Slots, with one for padding, of states beside windows in the dtype of activations."""
    config = ModelConfig.from_folder(saved(hybrid(), tmp_path))
    for state, itemsize in (("auto", 4), ("bfloat16", 2)):
        backend = backends.select("cuda", settings=DeviceSettings(state_dtype=state))
        plan = predict(config, backend, dtype="bfloat16", max_num_seqs=4, kv_cache_memory=4 << 20)
        size = slot_bytes(config, torch.bfloat16, backend)
        assert size == 2 * 16 * 16 * itemsize + (2 * 16 + 2 * 16) * 3 * 2
        assert plan.num_slots >= 8
        assert plan.fixed_state == (plan.num_slots + 1) * size
