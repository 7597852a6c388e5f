"""Tokens of whole steps compared with greedy tokens of transformers."""

from __future__ import annotations

import math
import random
import threading
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from npuserve.kernels.native import available
from npuserve.kernels.registry import KernelSet
from npuserve.npu.backends import BackendError
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution import decoder
from npuserve.npu.execution.load import load_runner
from npuserve.npu.execution.runner import Runner
from npuserve.npu.model.config import ModelError
from npuserve.npu.step import NewRequest, Row, SamplingParams, Step, StepResult, TokenLogprobs
from tests.npu.backends.small import ids_of
from tests.support.models import FAMILIES, greedy, random_model, saved
from tests.support.real_models import BUILT_IN, model_folder, published

GREEDY = SamplingParams(temperature=0.0)


def load(folder, **settings) -> Runner:
    defaults = {"backend": "cpu", "block_size": 16, "max_num_seqs": 8, "kv_cache_memory": 8 << 20, "threads": 1}
    return load_runner(folder, **{**defaults, **settings}, progress=lambda done, total: None)


class Driver:
    """Plans steps as a scheduler does, with blocks in random order."""

    def __init__(self, runner: Runner, seed: int = 0):
        self.runner = runner
        self.random = random.Random(seed)
        self.free = self.random.sample(range(runner.num_blocks), runner.num_blocks)
        self.tokens: dict[int, list[int]] = {}
        self.prompt: dict[int, int] = {}
        self.done: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}
        self.new: list[NewRequest] = []
        self.ended: list[int] = []
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}

    def add(self, request: int, prompt: list[int], sampling: SamplingParams = GREEDY, output: tuple[int, ...] = ()):
        self.tokens[request] = [*prompt, *output]
        self.prompt[request] = len(prompt)
        self.done[request] = 0
        self.blocks[request] = []
        self.new.append(NewRequest(request, prompt, list(output), sampling))

    def end(self, request: int) -> list[int]:
        """Remove a request; return its generated tokens."""
        self.free.extend(self.blocks.pop(request))
        self.ended.append(request)
        return self.tokens.pop(request)[self.prompt[request] :]

    def step(self, chunk: int | None = None, only: set[int] | None = None) -> StepResult:
        """Plan and run a step. chunk: maximum tokens of a prompt; None for random."""
        rows = []
        for request, tokens in self.tokens.items():
            if only is None or request in only:
                start = self.done[request]
                end = min(len(tokens), start + (chunk or self.random.randint(1, 9)))
                while len(self.blocks[request]) * self.runner.block_size < end:
                    self.blocks[request].append(self.free.pop())
                rows.append(Row(request, tokens[start:end], start, self.blocks[request], end == len(tokens)))
                self.done[request] = end
        result = self.runner.collect(self.runner.launch(Step(rows, self.new, self.ended)))
        self.new, self.ended = [], []
        assert set(result.token_ids) == {row.request_id for row in rows if row.samples}
        for request, sampled in result.token_ids.items():
            self.tokens[request] += sampled
        for request, reports in result.logprobs.items():
            self.logprobs.setdefault(request, []).extend(reports)
        for request, reports in result.prompt_logprobs.items():
            self.prompt_logprobs.setdefault(request, []).extend(reports)
        return result

    def generated(self, request: int) -> list[int]:
        return self.tokens[request][self.prompt[request] :]

    def answer(self, prompt: list[int], count: int, chunk: int | None = None) -> list[int]:
        self.add(0, prompt)
        while len(self.generated(0)) < count:
            self.step(chunk)
        return self.end(0)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("chunk", [64, 5])
def test_runner_greedy_tokens_equal_transformers(tmp_path, kind, chunk):
    model = random_model(kind)
    prompt = ids_of(20)
    assert Driver(load(saved(model, tmp_path))).answer(prompt, 40, chunk) == greedy(model, prompt, 40)


def test_runner_step_is_ready_once_it_is_computed(tmp_path):
    runner, free = load(saved(random_model("qwen3"), tmp_path)), threading.Event()
    runner.backend.enqueue(lambda: free.wait(60))
    launched = runner.launch(Step([Row(0, [5], 0, [0], True)], [NewRequest(0, [5], [], GREEDY)]))
    assert not runner.ready(launched)
    free.set()
    runner.backend.synchronize()
    assert runner.ready(launched)


def test_runner_many_requests_equal_transformers(tmp_path):
    model = random_model("qwen3-untied")
    driver = Driver(load(saved(model, tmp_path, max_shard_size="20KB")))
    prompts = {request: ids_of(1 + 7 * request % 30, request) for request in range(8)}
    expected = {request: greedy(model, prompt, 12) for request, prompt in prompts.items()}
    waiting = list(prompts)
    answers = {}
    while waiting or driver.tokens:
        if waiting and len(driver.tokens) < 4:
            driver.add(waiting[0], prompts[waiting.pop(0)])
        driver.step()
        for request in [r for r in driver.tokens if len(driver.generated(r)) == 12]:
            answers[request] = driver.end(request)
    assert answers == expected


def test_runner_request_with_output_continues(tmp_path):
    model = random_model("qwen3")
    prompt = ids_of(9)
    expected = greedy(model, prompt, 20)
    driver = Driver(load(saved(model, tmp_path)))
    driver.add(3, prompt, output=tuple(expected[:8]))
    while len(driver.generated(3)) < 20:
        driver.step(6)
    assert driver.end(3) == expected


def test_runner_never_samples_padding_ids(tmp_path):
    """Id 0 has by far the largest logit, and the padding rows of the LM head repeat it."""
    model = random_model("llama")
    model.lm_head.weight.data *= 0.01
    model.lm_head.weight.data[0] = 0
    driver = Driver(load(saved(model, tmp_path)))
    seen = set()
    for request in range(4):
        driver.add(request, ids_of(5, request), SamplingParams(temperature=5.0, seed=request, logprobs=20))
    for _ in range(50):
        seen.update(token for sampled in driver.step().token_ids.values() for token in sampled)
    assert max(seen) < 100
    assert len(seen) > 30
    reported = {token for reports in driver.logprobs.values() for report in reports for token in report.top_ids}
    assert max(reported) < 100
    top_logprobs = [report.top_logprobs for reports in driver.logprobs.values() for report in reports]
    assert all(0.1 < sum(map(math.exp, values)) < 1 for values in top_logprobs)


@pytest.mark.parametrize("slice_bytes", [1, 1 << 20])
@pytest.mark.parametrize("chunk", [3, 64])
def test_runner_logprobs_equal_log_softmax(tmp_path, monkeypatch, slice_bytes, chunk):
    monkeypatch.setattr(decoder, "MAX_LOGITS_BYTES", slice_bytes)
    model = random_model("qwen3")
    prompt = ids_of(17)
    driver = Driver(load(saved(model, tmp_path)))
    driver.add(1, ids_of(11, 5))  # another request without logprobs
    driver.add(2, prompt, SamplingParams(temperature=0.0, prompt_logprobs=3, logprobs=2))
    while len(driver.generated(2)) < 4:
        driver.step(chunk)
    ids = driver.tokens[2]
    with torch.no_grad():
        reference = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert list(driver.prompt_logprobs) == [2]
    assert [report.token_id for report in driver.prompt_logprobs[2]] == prompt[1:]
    assert [report.token_id for report in driver.logprobs[2]] == ids[len(prompt) :]
    for position, report in enumerate(driver.prompt_logprobs[2] + driver.logprobs[2]):
        row, n = reference[position], 3 if position < len(prompt) - 1 else 2
        assert report.logprob == pytest.approx(row[ids[position + 1]].item(), abs=1e-3)
        assert report.rank == 1 + int((row > row[ids[position + 1]]).sum())
        assert report.top_ids == row.topk(n).indices.tolist()
        assert report.top_logprobs == pytest.approx(row.topk(n).values.tolist(), abs=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_runner_samples_after_each_draft_what_it_samples_alone(tmp_path, temperature, dtype):
    """Right drafts, a wrong one, and rows without drafts beside them: tokens and reports are those of single tokens."""
    runner = load(saved(random_model("qwen3"), tmp_path), dtype=dtype, max_drafts=8)
    sampling = {request: SamplingParams(temperature=temperature, seed=request, logprobs=2) for request in range(3)}
    driver = Driver(runner)
    for request in sampling:
        driver.add(request, ids_of(9 + request, request), sampling[request])
    while min(len(driver.generated(request)) for request in sampling) < 8:
        driver.step(16)
    answers = {request: driver.generated(request)[:8] for request in sampling}
    reports = {request: driver.logprobs[request][:8] for request in sampling}
    rows, new = [], []
    for request, wrong in ((0, 8), (1, 2), (2, 0)):  # the first wrong draft
        prompt = ids_of(9 + request, request)
        drafts = [token if place < wrong else (token + 1) % 100 for place, token in enumerate(answers[request][:7])]
        drafts = drafts[: 5 if request == 0 else 3 if request == 1 else 0]
        blocks = [3 * request, 3 * request + 1]
        rows.append(Row(10 + request, prompt + drafts, 0, blocks, len(drafts) + 1))
        new.append(NewRequest(10 + request, prompt, [], sampling[request]))
    result = runner.collect(runner.launch(Step(rows, new)))
    for request, valid in ((0, 6), (1, 3), (2, 1)):
        assert result.token_ids[10 + request][:valid] == answers[request][:valid]
        assert result.logprobs[10 + request][:valid] == reports[request][:valid]
    with pytest.raises(ValueError, match="17 samples"):
        runner.launch(Step([Row(10, [1] * 20, 0, [0, 1], 17)]))


def test_runner_step_without_rows(tmp_path):
    runner = load(saved(random_model("llama"), tmp_path))
    assert runner.collect(runner.launch(Step([]))) == StepResult({}, {}, {}, 0.0)
    runner.collect(runner.launch(Step([], new=[NewRequest(5, [1, 2], [], SamplingParams(prompt_logprobs=1))])))
    runner.collect(runner.launch(Step([], ended=[5])))
    result = runner.collect(runner.launch(Step(
        [Row(5, [1, 2, 3], 0, [0], False)], new=[NewRequest(5, [1, 2, 3, 4], [], GREEDY)])))
    assert result.token_ids == {}
    assert result.prompt_logprobs == {}  # not of the request that ended
    assert result.device_seconds > 0


def test_runner_kernel_sampling_times_every_nth_step(tmp_path):
    seen: list[tuple[str, str, str, float]] = []
    runner = load(saved(random_model("qwen3"), tmp_path), kernel_sampling=3, observe=lambda *call: seen.append(call))
    driver = Driver(runner)
    driver.add(0, ids_of(4))
    per_step = []
    for step in range(7):
        if step == 6:
            driver.add(1, ids_of(4))
        before = len(seen)
        driver.step(64)
        per_step.append(len(seen) - before)
    assert [count > 0 for count in per_step] == [True, False, False, True, False, False, True]
    phases = ["prefill"] * per_step[0] + ["decode"] * per_step[3] + ["mixed"] * per_step[6]
    assert [phase for _, phase, _, _ in seen] == phases
    names = [name for name, phase, _, _ in seen if phase == "decode"]
    assert {name: names.count(name) for name in sorted(set(names))} == {
        "add_rms_norm": 6, "embedding": 1, "keep_ids": 1, "linear": 9, "linear_argmax": 1, "linear_swiglu": 3,
        "paged_attention": 3, "qk_norm_rope_kv_write": 3, "rms_norm": 1, "take_ids": 1,
    }
    assert all(seconds > 0 for *_, seconds in seen)
    assert {backend for _, _, backend, _ in seen} <= {"cpu", "golden"}
    assert {name for name, _, backend, _ in seen if backend == "golden"} <= set(runner.fallbacks)


def test_runner_properties(tmp_path):
    model = random_model("qwen3")
    runner = load(saved(model, tmp_path), max_model_len=40, dtype="bfloat16", kv_cache_memory=1 << 20)
    assert runner.config.architecture == "Qwen3ForCausalLM"
    assert runner.config.vocab_size == 100
    assert (runner.dtype_name, runner.backend_name, runner.deterministic) == ("bfloat16", "cpu", available())
    assert runner.parameters == model.num_parameters()
    assert (runner.max_model_len, runner.block_size) == (40, 16)
    assert runner.num_blocks == (1 << 20) // (2 * 3 * 16 * 2 * 16 * 2)


def test_load_runner_unsupported_settings_are_refused(tmp_path):
    saved(random_model("qwen3"), tmp_path)
    for settings, error, message in (
        ({"backend": "abacus"}, BackendError, "no backend 'abacus'"),
        ({"dtype": "int4"}, BackendError, "dtype: 'int4'"),
        ({"max_model_len": 65}, ModelError,
         "max_model_len: 65 is beyond the model's context of 64 tokens; 0 takes all of them"),
        ({"kv_cache_memory": 100}, ModelError, "kv_cache_memory: .* holds 0 tokens"),
        ({"kv_cache_memory": 10000, "max_model_len": 64}, ModelError, "kv_cache_memory: .* max_model_len 64 needs"),
    ):
        with pytest.raises(error, match=message):
            load(tmp_path, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", [BUILT_IN, *published("stories260K", "stories260K-qwen3", "minimind2-small")])
def test_runner_real_models_equal_transformers(name: str):
    folder = model_folder(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = ids_of(24, 1, model.config.vocab_size)
    if name.startswith("stories"):
        prompt = [1, 403, 407, 261, 378]  # "Once upon a time" with its first token
    runner = load(folder, dtype="float32", block_size=16, kv_cache_memory=64 << 20)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=-1,
                              pad_token_id=0)[0].tolist()
    assert Driver(runner).answer(prompt, 64, chunk=16) == expected[len(prompt) :]


def test_runner_warm_up_calls_compiling_kernels(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels after the last norm are called for one row, powers of two and the largest number of rows."""
    folder = saved(random_model("qwen3"), tmp_path / "model")
    called: list[tuple[str, int]] = []
    monkeypatch.setattr(CpuBackend, "capabilities", replace(CpuBackend.capabilities, compiles=True))
    load_set = KernelSet.__init__

    def watched(self: KernelSet, *args, **kwargs) -> None:
        load_set(self, *args, **kwargs)

        def watching(name: str):
            def call(*args, **kwargs):
                called.append((name, len(args[0])))
                return self._functions[name](*args, **kwargs)

            return call

        self.__dict__.update({name: watching(name) for name in self._functions})

    monkeypatch.setattr(KernelSet, "__init__", watched)
    load(folder, max_num_seqs=6)
    ends = {name: {rows for other, rows in called if other == name} for name in
            ("linear_argmax", "greedy", "sample", "logprobs", "mask_logits", "penalize")}
    assert ends == {name: {1, 2, 4, 6} for name in ends}
