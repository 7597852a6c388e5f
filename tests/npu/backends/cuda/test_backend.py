"""Emulated CUDA backend: whole steps on Triton's interpreter, their order and their graphs."""

from __future__ import annotations

import gzip
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from npuserve.cli.acceptance.reference import load_reference
from npuserve.kernels import triton
from npuserve.kernels.kv_cache import QUANTIZED
from npuserve.npu import backends
from npuserve.npu.backends import BackendError, select
from npuserve.npu.backends.cuda import emulated as cuda_emulated
from npuserve.npu.backends.cuda import emulated_backend
from npuserve.npu.backends.cuda import graphs as cuda_graphs
from npuserve.npu.backends.cuda.backend import CudaBackend
from npuserve.npu.backends.cuda.graphs import CudaGraphs
from npuserve.npu.execution.load import load_runner
from npuserve.npu.execution.runner import Runner
from npuserve.npu.profile import ProfileSummary
from npuserve.npu.profiling.session import Profiler
from npuserve.npu.profiling.trace_folder import TraceFolder
from npuserve.npu.step import PENDING, NewRequest, Row, SamplingParams, Step, StepResult
from npuserve.service import metrics
from tests.kernels.triton import needs_triton
from tests.npu.backends.small import GREEDY, answers, asks, ids_of, masked, saved, saved_w8a8
from tests.support import constrained
from tests.support.loop import Ask, serve
from tests.support.real_models import model_folder, published

pytestmark = needs_triton


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_emulated", {})  # restores the device's backend at the end
    monkeypatch.setattr(triton, "DEVICE", "cpu")
    emulated_backend.emulate()


def load(folder: Path, backend: str = "cuda", **settings: Any) -> Runner:
    defaults: dict[str, Any] = {
        "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 16, "kv_cache_memory": 4 << 20,
        "block_size": 16, "max_model_len": 256, "threads": 1}
    if backend == "cuda":
        defaults["decode_buckets"] = (1, 3)
    return load_runner(folder, backend=backend, **{**defaults, **settings}, progress=lambda done, total: None)


def started() -> CudaBackend:
    backend = select("cuda")
    assert isinstance(backend, CudaBackend)
    return backend


# Steps


@pytest.mark.parametrize("sampling", [
    pytest.param({}, id="greedy", marks=pytest.mark.full),  # test_emulated_cuda.py has greedy requests
    pytest.param({"temperature": 1.0, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 2}, id="all"),
])
def test_cuda_tokens_equal_cpu(tmp_path: Path, sampling: dict[str, Any]) -> None:
    """Chunks, mixed steps, more rows than the largest decode graph, and two steps in flight."""
    saved(tmp_path, layers=1)
    cuda = load(tmp_path, max_num_batched_tokens=32, decode_buckets=(2,))
    assert cuda.fallbacks == []
    got, results = answers(cuda, asks(3, 7, **sampling))
    expected, _ = answers(load(tmp_path, "cpu", max_num_batched_tokens=32), asks(3, 7, **sampling))
    assert got == expected
    assert all(result.captured for result in results)
    assert {result.captured_decodes + result.decoder_decodes for result in results} >= {0, 1, 2, 3}
    assert any(result.decoder_decodes for result in results)


def test_cuda_constrained_tokens_equal_cpu(tmp_path: Path) -> None:
    """Two of three requests are constrained, one of them greedy. Their decoder is captured, LM head and sampler are
    not."""
    saved(tmp_path, layers=1)
    found = []
    for name in ("cuda", "cpu"):
        requests = asks(3, 4, temperature=0.9, repetition_penalty=1.2)
        requests[0].mask, requests[2].mask, requests[2].sampling = masked(0), masked(2), GREEDY
        got, results = answers(load(tmp_path, name, max_num_batched_tokens=32), requests)
        found.append(got)
        assert all(result.captured for result in results)
    assert found[0] == found[1]


@pytest.mark.parametrize("temperature", [
    pytest.param(0.0, marks=pytest.mark.full), 0.7])  # test_mtp.py has greedy drafts
def test_cuda_row_with_drafts_is_one_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Tokens after right drafts are those of single steps. One graph computes up to 8 tokens of a row, and a decode row
    beside it."""
    saved(tmp_path, layers=1)
    prompt = ids_of(5)
    sampling = SamplingParams(temperature=temperature, seed=3)
    new = [NewRequest(request, prompt, [], sampling) for request in range(2)]
    cuda = load(tmp_path, max_drafts=8)
    cpu = load(tmp_path, "cpu")

    def run(runner: Runner, *rows: Row, new: Sequence[NewRequest] = ()) -> StepResult:
        return runner.collect(runner.launch(Step(list(rows), list(new))))

    answer: list[int] = []
    for start in range(5, 14):
        token_ids = [answer[-1]] if answer else prompt
        rows = [Row(request, token_ids, start - len(token_ids), [request], 1) for request in range(2)]
        answer += run(cpu, *rows, new=[] if start > 5 else new).token_ids[0]
    first = run(cuda, *(Row(request, prompt, 0, [request], 1) for request in range(2)), new=new)
    assert first.token_ids == {0: answer[:1], 1: answer[:1]}
    replays = Counter[int]()
    replay = CudaGraphs.replay

    def counting(graphs: CudaGraphs, rows: int, *lengths: Sequence[int]) -> torch.Tensor:
        replays[rows] += 1
        return replay(graphs, rows, *lengths)

    monkeypatch.setattr(CudaGraphs, "replay", counting)
    for drafts in (1, 3, 7):
        result = run(cuda, Row(0, answer[: 1 + drafts], 5, [0], 1 + drafts), Row(1, answer[:1], 5, [1], 1))
        assert result.token_ids == {0: answer[1 : 2 + drafts], 1: answer[1:2]}
        assert result.decoder_decodes == 1  # LM head and sampler follow, for all tokens in one call
    assert replays == {3: 1, 5: 1, 9: 1}


def test_cuda_step_beyond_captured_tokens_is_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode rows and a chunk run kernel by kernel."""
    monkeypatch.setattr(cuda_graphs, "MAX_TOKENS", 4)
    saved(tmp_path, layers=1)
    prompt = ids_of(9)
    found = []
    for runner in (load(tmp_path), load(tmp_path, "cpu")):
        results = [runner.collect(runner.launch(step)) for step in (
            Step([Row(0, prompt[:3], 0, [0], True)], [NewRequest(0, prompt[:3], [], GREEDY)]),
            Step([Row(0, [PENDING], 3, [0], True), Row(1, prompt, 0, [1], True)],
                 [NewRequest(1, prompt, [], GREEDY)]),
            Step([Row(0, [PENDING], 4, [0], True), Row(1, [PENDING], 9, [1], True)]))]
        found.append([result.token_ids for result in results])
        if runner.backend_name == "cuda":
            assert [result.captured for result in results] == [True, False, True]
            assert [result.captured_decodes for result in results] == [0, 0, 2]
    assert found[0] == found[1]


def test_cuda_int8_logprobs_are_near_cpu(tmp_path: Path) -> None:
    """Weights, activations, LM head and KV cache are int8, equal to the CPU's except where a number is a near tie."""
    folder, prompt = saved_w8a8(tmp_path, layers=1), ids_of(20)
    found = []
    for name in ("cuda", "cpu"):
        runner = load(folder, name, kv_cache_dtype="int8", lm_head_dtype="int8", dtype="float32")
        assert runner.cache_dtype == torch.int8
        new = NewRequest(0, prompt, [], SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1))
        chunks = [Row(0, prompt[:12], 0, [0], False), Row(0, prompt[12:], 12, [0, 1], True)]
        results = [runner.collect(runner.launch(Step([row], [new] * (row.start == 0)))) for row in chunks]
        reports = [report for result in results for report in result.prompt_logprobs[0]]
        found.append([report.logprob for report in [*reports, *results[-1].logprobs[0]]])
    assert len(found[0]) == 20
    torch.testing.assert_close(*map(torch.tensor, found), atol=0.05, rtol=0.02)


def test_cuda_fp8_cache_logprobs_are_near_golden(tmp_path: Path) -> None:
    """Chunks, a captured decode step, and a request that reads blocks of another.

    The golden functions over the same cache give the same logprobs, except where a near tie is rounded the other way.
    """
    prompt, found = ids_of(20), []
    model, golden = load_reference(saved(tmp_path, layers=1), started(), "float32", 256, 1, kv_cache_dtype="fp8")
    params = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)
    new, other = (NewRequest(i, prompt, [], params) for i in range(2))
    steps = [Step([Row(0, prompt[:12], 0, [0], False)], [new]), Step([Row(0, prompt[12:], 12, [0, 1], True)]),
             Step([Row(0, ids_of(1), 20, [0, 1], True)]), Step([Row(1, prompt[16:], 16, [0, 2], True)], [other])]
    sizes = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    for runner in (load(tmp_path, kv_cache_dtype="fp8"), *(
            Runner(golden, model.weights, model.config, 16, 16, kv_cache_dtype=cached, **sizes)
            for cached in ("fp8", "auto"))):
        results = [runner.collect(runner.launch(step)) for step in steps]
        assert runner.backend_name == "cpu" or results[2].captured
        found.append([report.logprob for result in results for report in (
            *result.prompt_logprobs.get(0, []), *(each for reports in result.logprobs.values() for each in reports))])
    assert len(found[0]) == 19 + 3
    ours, same_cache, exact = map(torch.tensor, found)
    torch.testing.assert_close(ours, same_cache, atol=0.02, rtol=0.01)
    assert (same_cache - exact).abs().max() > 1e-3


def test_cuda_padding_does_not_change_cache(tmp_path: Path) -> None:
    """Decode rows and tokens of any rows are padded after longer steps that left their inputs in the buffers."""
    saved(tmp_path, layers=1)
    runner = load(tmp_path)
    ((keys, values),) = runner._store.plain
    news = [NewRequest(q, ids_of(5, q), [], GREEDY) for q in range(3)]
    runner.collect(runner.launch(Step([Row(q, ids_of(5, q), 0, [q], True) for q in range(3)], news)))
    for rows, graph in (([Row(0, ids_of(3), 5, [0], True)], runner._dispatch.chunks.hidden),  # 3 tokens of 4
                        # 2 rows of 3
                        ([Row(0, [1], 8, [0], True), Row(1, [1], 5, [1], True)], runner._dispatch.decodes.argmax)):
        assert graph is not None
        assert graph.size(sum(len(row.token_ids) for row in rows)) > sum(len(row.token_ids) for row in rows)
        before = [tensor.clone() for tensor in (keys, values)]
        assert runner.collect(runner.launch(Step(rows))).captured
        for tensor, was in zip((keys, values), before, strict=True):
            slots = (tensor != was).flatten(2).any(-1).nonzero().tolist()
            own = [[row.block_ids[0], row.start + i] for row in rows for i in range(len(row.token_ids))]
            assert [slot for slot in slots if slot[0] != runner.num_blocks] == own


def test_cuda_timed_step_runs_kernel_by_kernel(tmp_path: Path) -> None:
    saved(tmp_path, layers=1)
    calls: list[tuple[str, str, str, float]] = []
    runner = load(tmp_path, kernel_sampling=2, observe=lambda *call: calls.append(call), decode_buckets=(1,),
                  max_num_batched_tokens=4)
    _, results = answers(runner, asks(1, 4))
    assert [result.captured for result in results] == [False, True, False, True]
    assert {label for _, _, label, _ in calls} == {"cuda"}
    assert all(seconds > 0 for *_, seconds in calls)


@pytest.mark.full  # test_hybrid.py has both, with states
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["random", *published("stories260K-qwen3")])
def test_cuda_tokens_with_prefix_hits_and_preemption_equal_cpu(tmp_path: Path, name: str) -> None:
    """The real scheduler has few blocks. All tokens in float32 equal the CPU's."""
    folder = saved(tmp_path, layers=1, head_dim=8) if name == "random" else model_folder(name)
    shared = ids_of(16)
    prompts = [[*shared, *ids_of(12, 1)], [*shared, *ids_of(14, 2)], ids_of(14, 3)]
    greedy = SamplingParams(temperature=0.0)
    all_asks = [Ask(2 * i, None, {"prompt_ids": prompt, "max_tokens": 6, "sampling": greedy})
                for i, prompt in enumerate(prompts)]
    cuda, cpu = load(folder, decode_buckets=(3,)), load(folder, "cpu")
    (got, scheduler), (expected, _) = (serve(runner, all_asks, 2, 4, 3, 16) for runner in (cuda, cpu))
    assert [answer.tokens for answer in got] == [answer.tokens for answer in expected]
    assert {len(answer.tokens) for answer in got} == {6}
    assert scheduler.preemptions > 0
    assert scheduler.memory.prefix_hits > 0


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mask_seconds", [math.inf, 0.0], ids=["waiting", "deferred"])
@pytest.mark.parametrize("is_restored", [True, False], ids=["restored", "new"])
@pytest.mark.parametrize("depth", [2, 1])
def test_cuda_tokens_by_grammars_equal_cpu(
    tmp_path: Path, depth: int, is_restored: bool, mask_seconds: float
) -> None:
    """Requests of several kinds run together and are preempted, also after an engine's death. Rows are deferred if no
    step waits for a mask.

    By default the CPU and Ascend run grammars, and CUDA masks: tests/npu/execution/test_constrained_loop.py.
    """
    folder = saved(tmp_path, layers=1, head_dim=8, vocabulary=constrained.VOCABULARY)
    cuda, cpu = (load(folder, name, max_num_batched_tokens=64, **buckets)
                 for name, buckets in (("cuda", {"decode_buckets": (4,)}), ("cpu", {})))
    cases, alone = constrained.cases(16), constrained.expected_by(cpu, 64)
    chosen = [("json_schema", "greedy"), ("none", "greedy"), ("regex", "seeded")]
    cases = [case for one in chosen for case in cases if (case.kind, case.sampling) == one]
    deferred = metrics.deferred_rows_total._value.get()
    found, scheduler = constrained.answered(
        cuda, cases, alone, depth=depth, pool=4, seats=4, budget=16, is_restored=is_restored, mask_seconds=mask_seconds)
    assert found == [alone(case) for case in cases]
    assert scheduler.preemptions > 0
    assert (metrics.deferred_rows_total._value.get() > deferred) == (not mask_seconds)


# Order


def test_cuda_fetch_is_complete_after_wait() -> None:
    """The copy holds the value of the tensor at the time of the call, although the tensor is overwritten before it."""
    backend = started()
    tensor = torch.arange(4)
    buffers = [backend.host_buffer(4, dtype=torch.int64) for _ in range(3)]
    first = backend.fetch(tensor, buffers[0])
    tensor += 10
    second, third = backend.fetch(tensor, buffers[1]), backend.fetch(tensor + 1, buffers[2])
    assert not first.done()
    assert buffers[0].tolist() == [torch.iinfo(torch.int64).min] * 4
    second.wait()  # copies complete in order
    assert first.done()
    assert [buffer.tolist() for buffer in buffers[:2]] == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert [third.done() for _ in range(3)] == [False, False, True]
    assert buffers[2].tolist() == [11, 12, 13, 14]
    with pytest.raises(RuntimeError, match="accepts only copies"), cuda_emulated.stream(backend._copies):
        torch.ones(3)


def test_cuda_events_are_reused() -> None:
    backend = started()
    for _ in range(3):
        backend.fetch(torch.ones(2), backend.host_buffer(2, dtype=torch.float32)).wait()
        span = backend.span()
        span.stop()
        backend.synchronize()
        assert span.read() >= 0
    assert (len(backend._events), len(backend._spans)) == (2, 1)


def test_cuda_graph_output_is_valid_until_next_replay() -> None:
    backend = started()
    x = torch.ones(4)
    graphs = backend.capture(lambda rows: x[:rows] * 2, 4, decode=True, buckets=(2, 4))
    other = backend.capture(lambda rows: x[:rows] * 3, 4, decode=False)
    assert isinstance(graphs, CudaGraphs)
    assert other is not None
    assert ([graphs.size(rows) for rows in (1, 2, 3, 4)], graphs.largest) == ([2, 2, 4, 4], 4)
    out = graphs.replay(3, [])
    assert out.tolist() == [2, 2, 2]
    x += 1
    again = graphs.replay(3, [])
    assert again.data_ptr() == out.data_ptr()
    assert again.tolist() == [4, 4, 4]
    assert other.replay(1, []).tolist() == [6]
    assert out.isnan().all()
    with pytest.raises(ValueError, match="5 rows, where the largest graph has 4"):
        graphs.replay(5, [])


def test_cuda_first_graph_of_a_process_runs_its_step_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads the kernels. Others run at their first replay."""
    monkeypatch.setattr(cuda_emulated, "_is_recorded", False)
    rows_of_steps: list[int] = []

    def step(rows: int) -> torch.Tensor:
        rows_of_steps.append(rows)
        return torch.ones(rows)

    graphs = started().capture(step, 4, decode=True, buckets=(2, 4))
    assert graphs is not None
    assert rows_of_steps == [4]  # the largest is captured first
    graphs.replay(2, [])
    assert rows_of_steps == [4, 2]


def test_cuda_graph_with_device_read_is_refused() -> None:
    graphs = started().capture(lambda rows: torch.full((rows,), float(torch.ones(1).sum().item())), 1, decode=False)
    assert graphs is not None
    with pytest.raises(RuntimeError, match=r"not permitted when .* capturing: aten\._local_scalar_dense"):
        graphs.replay(1, [])


# The device


def test_cuda_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = started()
    can = backend.capabilities
    assert (backend.name, backend.kernels, backend.chip, can.deterministic) == ("cuda", "cuda", "emulated", False)
    assert (can.block_size, can.block_multiple, can.padding_blocks) == (32, 16, 1)
    assert 0 < backend.memory.available() <= cuda_emulated.MAX_BYTES
    assert backend.memory.cache_share(1000) == 900
    for asked, checkpoint, dtype in (("auto", "bfloat16", "bfloat16"), ("auto", "float16", "float16"),
                                     ("auto", "float32", "bfloat16"), ("float32", "bfloat16", "float32")):
        assert backend.resolve_dtype(asked, checkpoint) == dtype
    with pytest.raises(BackendError, match="dtype: 'int4' is not one of auto, bfloat16, float16, float32"):
        backend.resolve_dtype("int4", "float32")
    for name, dtype in QUANTIZED.items():
        assert backend.cache_dtype(name, torch.bfloat16) == dtype
    backend.check_heads(128)
    for size in (6, 17, 258):
        with pytest.raises(BackendError, match=f"heads have {size} dimensions; cuda takes even numbers from 8 to 256"):
            backend.check_heads(size)

    def none_left(*shape: int, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 100.00 MiB")

    backend._record = none_left  # type: ignore[assignment]  # the emulated one runs no step
    with pytest.raises(BackendError, match="no memory is left to capture steps: a smaller kv_cache_memory"):
        backend.capture(lambda rows: torch.ones(rows), 4, decode=True)
    monkeypatch.setattr(torch, "empty", none_left)
    with pytest.raises(BackendError, match=r"device: no 100 MiB of device memory.*smaller kv_cache_memory"):
        backend.empty((100 << 20,), torch.uint8)


# Profiles


def test_profile_has_the_launches_and_no_times(tmp_path: Path) -> None:
    saved(tmp_path / "model", layers=1)
    expected, _ = answers(load(tmp_path / "model", "cpu"), asks(1, 6))
    runner = load(tmp_path / "model", decode_buckets=(1,), max_num_batched_tokens=4)
    profiler = Profiler(runner, TraceFolder(tmp_path / "traces"))
    profiler.start("", 4, 60.0)
    got, results = answers(runner, asks(1, 6))
    assert got == expected
    assert all(result.captured for result in results)  # graphs are replayed as without a profile
    while not profiler.poll():
        time.sleep(0.01)
    made = profiler.last
    assert isinstance(made, ProfileSummary), made
    assert (made.steps, made.has_times, made.kernels) == (4, False, [])
    assert made.device == "torch.profiler on an emulated GPU: its host's operators, no kernels"
    assert made.path.endswith(".json.gz")  # the interpreter calls many operators
    events = json.loads(gzip.decompress(Path(made.path).read_bytes()))["traceEvents"]
    ranges = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert ranges == [f"step {number}" for number in range(4)]
