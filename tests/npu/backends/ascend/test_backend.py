"""Ascend backend on the emulated device: whole steps, their order and their calls."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from npuserve.npu import emulator
from npuserve.npu.backends import BackendError, select
from npuserve.npu.backends.ascend import backend as ascend_backend
from npuserve.npu.backends.ascend.backend import AscendBackend
from npuserve.npu.backends.ascend.native_lengths import NativeLengths
from npuserve.npu.backends.base import CaptureError, DeviceSettings
from npuserve.npu.backends.graphs import default_buckets
from npuserve.npu.execution.load import load_runner
from npuserve.npu.execution.runner import Runner
from npuserve.npu.model.config import ModelError
from npuserve.npu.step import PENDING, NewRequest, Row, Step
from tests.npu.backends.small import GREEDY, Ask, answers, asks, saved, saved_w8a8
from tests.npu.emulator.child import emulated, needs_npu, run

RELAX = ("fp32",)
LAYERS = 2


def load(folder: Path, backend: str = "npu", **settings: Any) -> Runner:
    defaults: dict[str, Any] = {
        "dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory": 16 << 20}
    if backend == "npu":
        defaults["decode_buckets"] = (1, 8)
    return load_runner(folder, backend=backend, **{**defaults, **settings}, progress=lambda done, total: None)


def started() -> AscendBackend:
    backend = select("npu")
    assert isinstance(backend, AscendBackend)
    return backend


# Steps


def equal_to_the_cpu(folder: Path, sampling: dict[str, Any], capture_chunks: bool = True) -> None:
    saved(folder, layers=LAYERS)
    npu = load(folder, decode_buckets=(2, 4), capture_chunks=capture_chunks)
    cpu = load(folder, "cpu", block_size=128, threads=1)
    assert npu.fallbacks == []
    got, results = answers(npu, asks(6, 8, **sampling))
    expected, _ = answers(cpu, asks(6, 8, **sampling))
    assert got == expected
    # Chunks arrive while other requests decode, and some steps have more decode rows than the largest graph.
    assert {result.captured for result in results} == ({True} if capture_chunks else {True, False})
    assert len({len(result.token_ids) for result in results}) > 3


@needs_npu
@pytest.mark.parametrize("capture_chunks", [True, False], ids=["one dispatch", "decode rows and chunks"])
@pytest.mark.parametrize(("order", "seed"), [
    ("lazy", 0), ("shuffled", 1), pytest.param("shuffled", 2, marks=pytest.mark.full), ("eager", 0)])
def test_ascend_greedy_tokens_equal_cpu(tmp_path: Path, order: str, seed: int, capture_chunks: bool) -> None:
    """The order in which the device runs its streams and the contents of new memory do not matter."""
    options = {"relax": RELAX, "order": order, "seed": seed, "poison": True}
    run(equal_to_the_cpu, {"folder": tmp_path, "sampling": {}, "capture_chunks": capture_chunks}, options)


@pytest.mark.parametrize("sampling", [
    {"temperature": 1.2, "top_k": 7, "top_p": 0.8},
    # test_sampled_steps.py has both.
    *(pytest.param(sampling, marks=pytest.mark.full) for sampling in (
        {"temperature": 0.9}, {"temperature": 1.0, "min_p": 0.1})),
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"logit_bias": {5: 4.0}, "min_tokens": 3, "ending_ids": (5, 7)}, {"logprobs": 3, "prompt_logprobs": 2},
], ids=lambda sampling: "+".join(sampling))
@emulated(relax=RELAX)
def test_ascend_sampled_tokens_equal_cpu(tmp_path: Path, sampling: dict[str, Any]) -> None:
    """Random numbers depend on seed and position only; in float32 no draw falls between two tokens here."""
    equal_to_the_cpu(tmp_path, sampling)


@emulated(relax=RELAX, poison=True)
def test_ascend_tokens_of_heads_of_256_equal_cpu(tmp_path: Path) -> None:
    """Captured decode steps and chunks, over a cache whose heads have 256 dimensions."""
    saved(tmp_path, head_dim=256)
    npu = load(tmp_path, kv_cache_memory=64 << 20)
    cpu = load(tmp_path, "cpu", kv_cache_memory=64 << 20, block_size=128, threads=1)
    got, results = answers(npu, asks(5, 8))
    expected, _ = answers(cpu, asks(5, 8))
    assert got == expected
    assert sum(result.captured_decodes for result in results) > 0


@pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 32), ("float16", 32), ("bfloat16", 256)])
@emulated()
def test_ascend_step_in_device_dtypes_needs_no_relaxation(tmp_path: Path, dtype: str, head_dim: int) -> None:
    """Heads of 32 dimensions are padded to a size that attention supports. Logits are near the CPU's in float32."""
    saved(tmp_path, head_dim=head_dim)
    npu, cpu = load(tmp_path, dtype=dtype), load(tmp_path, "cpu", threads=1)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    reports = []
    for runner in (npu, cpu):
        new = NewRequest(1, prompt, [], type(GREEDY)(temperature=0.0, logprobs=5))
        reports.append(runner.collect(runner.launch(Step([Row(1, prompt, 0, [0], True)], [new]))).logprobs[1][0])
    assert reports[0].token_id == reports[1].token_id
    assert reports[0].logprob == pytest.approx(reports[1].logprob, abs=0.05)


@emulated(relax=RELAX)
def test_ascend_steady_step_is_one_replay_without_blocking(tmp_path: Path) -> None:
    """Two steps are in flight. Only calls of this thread count, not of torch_npu's queue and of the updater.

    All lengths of a step are one call of the native library, and its thread is none of Python's.
    """
    saved(tmp_path, layers=LAYERS)
    runner = load(tmp_path)
    rows, here = range(3), threading.get_native_id()
    flying = runner.launch(Step([Row(i, [5, 7, 9], 0, [i], True) for i in rows],
                                [NewRequest(i, [5, 7, 9], [], GREEDY) for i in rows]))
    lengths = runner.backend._lengths
    assert isinstance(lengths, NativeLengths)
    requests = lengths._lib = Mock(wraps=lengths._lib)
    for step in range(12):
        lengths.check(lengths.given)  # the updater is done with the previous step
        requests.reset_mock()
        emulator.clear_calls()
        following = runner.launch(Step([Row(i, [PENDING], 3 + step, [i], True) for i in rows]))
        emulator.mark("launched")
        result = runner.collect(flying)
        flying = following
    lengths.check(lengths.given)
    calls = emulator.calls()
    assert result.captured_decodes == 3
    own = [call.name for call in calls if call.thread == here]
    launch, collect = own[: own.index("# launched")], own[own.index("# launched") + 1 :]
    assert Counter(launch)["aclmdlRIExecuteAsync"] == 1
    assert len(launch) + len(collect) <= 12
    assert not [name for name in launch if "Synchronize" in name]
    # The host waits for the copy of the ids and reads two events that are recorded: no stream, no device.
    assert {name for name in collect if "Synchronize" in name} == {"aclrtSynchronizeEvent"}
    assert requests.npuserve_lengths_put.call_count == requests.npuserve_lengths_replayed.call_count == 1
    updater, = {call.thread for call in calls if "TaskUpdate" in call.name}
    assert updater not in {thread.native_id for thread in threading.enumerate()}
    update = Counter(call.name for call in calls if call.thread == updater)
    assert update == {"aclrtStreamWaitEvent": 1, **dict.fromkeys((
        "aclmdlRICaptureTaskUpdateBegin", "aclnnFusedInferAttentionScoreV3GetWorkspaceSize",
        "aclnnFusedInferAttentionScoreV3", "aclmdlRICaptureTaskUpdateEnd", "aclrtValueWrite"), LAYERS)}
    runner.collect(flying)


@emulated(relax=RELAX)
def test_ascend_padding_beyond_a_block_has_distinct_slots(tmp_path: Path) -> None:
    """197 padding rows beside 3, and 62 padding tokens in the largest captured chunk: the emulator refuses a slot that
    is given twice."""
    saved(tmp_path)
    prompts = [[(7 * i + 3 * j) % 90 for j in range(length)] for i, length in enumerate((450, 3, 40))]
    wide = {"max_num_seqs": 200, "max_num_batched_tokens": 512}
    with patch.object(ascend_backend, "TOKEN_BUCKET", 256):
        npu = load(tmp_path, decode_buckets=(200, 65536), **wide)
    assert npu.backend.capabilities.padding_blocks == 2
    assert len(npu._store.tensors[0]) == npu.num_blocks + 2
    assert npu._dispatch.chunks.hidden is not None
    assert npu._dispatch.chunks.hidden.largest == 512
    found = [answers(runner, [Ask(prompt, 4, at=i) for i, prompt in enumerate(prompts)], chunk=450)[0]
             for runner in (npu, load(tmp_path, "cpu", block_size=128, threads=1, **wide))]
    npu.backend.synchronize()
    assert found[0] == found[1]


@emulated(relax=RELAX)
def test_ascend_small_batch_is_padded_large_is_a_step_of_any_rows(tmp_path: Path) -> None:
    saved(tmp_path)
    runner = load(tmp_path, decode_buckets=(2, 4))
    got, results = answers(runner, asks(6, 16))
    assert all(result.captured_decodes == len(result.token_ids) for result in results[20:])  # all requests decode
    assert {len(result.token_ids) for result in results[20:]} >= {1, 3, 4}
    assert max(len(result.token_ids) for result in results) == 6
    assert got == answers(load(tmp_path, decode_buckets=(1,)), asks(6, 16))[0]


# Order


@emulated()
def test_ascend_fetch_of_overwritten_tensor_returns_old_value() -> None:
    """The tensor is overwritten before the copy runs, and its memory is reused."""
    backend = started()
    buffers = [backend.host_buffer(1000, dtype=torch.int64) for _ in range(2)]
    assert all(buffer.is_pinned() for buffer in buffers)
    tensor = torch.zeros(1000, dtype=torch.int64, device=backend.device)
    events = []
    for number in range(8):
        events.append(backend.enqueue(
            lambda number=number: backend.fetch(tensor.fill_(number), buffers[number % 2])).wait())
        if number:
            events[-2].wait()
            assert (buffers[(number - 1) % 2] == number - 1).all()
    made = backend.enqueue(lambda: backend.fetch(tensor + 1, buffers[0])).wait()
    backend.enqueue(lambda: [torch.full_like(tensor, -1) for _ in range(20)])
    made.wait()
    assert (buffers[0] == 8).all()


@emulated()
def test_ascend_span_measures_device_time() -> None:
    backend = started()
    span = backend.span()
    torch.ones(100, device=backend.device).sum()
    span.stop()
    backend.synchronize()
    assert span.read() >= 0
    again = backend.span()
    assert again._events is not None  # type: ignore[attr-defined]
    assert backend._spans == []  # the pair of events is reused


# Faults


def let_go() -> None:
    """Update the lengths of replays that wait for them, so that the process can exit."""
    emulator.heal()
    for graph in [x for x in gc.get_objects() if isinstance(x, torch.npu.NPUGraph)]:
        if not (records := graph.graph_dispatch_mode.graph_dispatch_records):
            continue
        ends = records[0].kwargs["actual_seq_lengths"]
        tokens = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        for _ in range(3):
            graph.update(cpu_update_input=[{"actual_seq_lengths_kv": tokens}])
            graph.graph_dispatch_mode.update_stream.synchronize()


@emulated(fresh=True, memory=64 << 20)
def test_ascend_cache_too_large_names_settings(tmp_path: Path) -> None:
    backend = started()
    with pytest.raises(BackendError, match=r"no 100 MiB of device memory.*smaller kv_cache_memory"):
        backend.empty((100 << 20,), torch.uint8)
    with pytest.raises(ModelError, match=r"of memory .*kv_cache 96\.2 MiB.* is available"):
        load(saved(tmp_path), dtype="bfloat16", kv_cache_memory=96 << 20)


@pytest.mark.parametrize(("code", "said"), [
    (207000, "it is too old .error 207000"), (207019, "the driver is too old .error 207019"),
    (207008, "it is too old .error 207008"),
    (207001, "short of memory or of a resource .error 207001.: .* fewer decode_buckets")])
@emulated(fresh=True)
def test_ascend_capture_error_gives_advice(tmp_path: Path, code: int, said: str) -> None:
    saved(tmp_path)
    if code == 207000:
        emulator.fail("aclrtValueWrite", code, times=-1)
    elif code == 207019:
        emulator.fail("aclmdlRICaptureTaskUpdateBegin", code, times=2)  # both updaters of lengths are tried
    else:
        emulator.fail("aclmdlRICaptureBegin", code)
    with pytest.raises(CaptureError, match=said):
        load(tmp_path, dtype="bfloat16", capture="on")
    let_go()


@pytest.mark.parametrize(("call", "code", "nth"), [
    ("aclmdlRICaptureBegin", 207005, 1), ("aclmdlRICaptureBegin", 207000, 4),
    pytest.param("aclmdlRICaptureBegin", 207008, 4, marks=pytest.mark.full)])
@emulated(fresh=True, relax=RELAX)
def test_ascend_without_possible_capture_runs_kernel_by_kernel(tmp_path: Path, call: str, code: int, nth: int) -> None:
    """The first capture fails, or a later one. The tokens are the CPU's. torch_npu raises no error of 207000: it finds
    that no capture has begun."""
    saved(tmp_path)
    emulator.fail(call, code, nth=nth, times=-1)
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("npuserve.npu.execution.capture").addHandler(handler)
    runner = load(tmp_path, decode_buckets=(1, 2, 4, 8))
    (said,) = warned
    number = "" if code == 207000 else f" (error {code})"
    assert f"it is too old{number}: update the Ascend HDK driver and firmware to 25.5.1" in said
    assert said.endswith("Steps run kernel by kernel, which is slower")
    got, results = answers(runner, asks(6, 8))
    assert not any(result.captured for result in results)
    assert got == answers(load(tmp_path, "cpu", block_size=128, threads=1), asks(6, 8))[0]


@pytest.mark.parametrize(("call", "code", "nth", "told"), [
    ("aclmdlRICaptureTaskUpdateBegin", 207000, 1, " .error 207000"),
    ("aclmdlRICaptureTaskUpdateBegin", 207019, 1, " .error 207019"),
    ("aclmdlRICaptureEnd", 207005, 3, " .error 207005"),
    ("aclmdlRICaptureEnd", 207000, 3, ": update the Ascend HDK driver")])
@emulated(fresh=True)
def test_ascend_capture_that_blocks_the_device_is_an_error(
    tmp_path: Path, call: str, code: int, nth: int, told: str
) -> None:
    """A replay waits forever for lengths, or a stream remains in its capture: this process cannot use the device."""
    saved(tmp_path)
    emulator.fail(call, code, nth=nth, times=2 if "Update" in call else 1)  # both updaters of lengths are tried
    with pytest.raises(CaptureError, match=f"too old{told}"):
        load(tmp_path, dtype="bfloat16")
    let_go()


def serve_with_growing_segments(folder: Path) -> None:
    saved(folder)
    got, results = answers(load(folder), asks(6, 8))
    assert all(result.captured for result in results)
    assert got == answers(load(folder, "cpu", block_size=128, threads=1), asks(6, 8))[0]


@needs_npu
@pytest.mark.full
def test_ascend_with_growing_segments_equals_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting of the allocator that the checks before the start advise."""
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")
    run(serve_with_growing_segments, {"folder": tmp_path}, {"relax": RELAX}, fresh=True)


@pytest.mark.full
@emulated(fresh=True)
def test_ascend_capture_imports_no_dynamo(tmp_path: Path) -> None:
    """The import would take half a second of each start."""
    saved(tmp_path)
    with patch.dict(sys.modules, {"torch._dynamo": None}):  # its import fails
        _, results = answers(load(tmp_path, dtype="bfloat16", decode_buckets=(1,), capture="on"), asks(1, 4))
    assert all(result.captured for result in results)


@emulated(relax=RELAX)
def test_ascend_capture_off_makes_no_graph(tmp_path: Path) -> None:
    """The start calls the operators of a step, since the first call of each takes long."""
    saved(tmp_path)
    emulator.clear_calls()
    runner = load(tmp_path, capture="off")
    loaded = {call.name for call in emulator.calls()}
    emulator.clear_calls()
    got, results = answers(runner, asks(6, 8))
    used = {call.name for call in emulator.calls()}
    assert {name for name in used if name.startswith("aclnn")} <= loaded
    assert not any(result.captured for result in results)
    assert not [name for name in loaded | used if "aclmdlRI" in name]
    assert got == answers(load(tmp_path), asks(6, 8))[0]


@emulated(fresh=True)
def test_ascend_variables_of_torch_npu_are_checked_before_the_load(tmp_path: Path) -> None:
    saved(tmp_path)
    for name, value in (("TASK_QUEUE_ENABLE", "2"), ("ASCEND_LAUNCH_BLOCKING", "1")):
        os.environ[name] = value
        with pytest.raises(BackendError, match=rf"^{name}: {value} .*, or serve with --capture off$"):
            load(tmp_path, dtype="bfloat16")
        del os.environ[name]


@pytest.mark.parametrize(("w8a8", "settings"), [
    pytest.param(False, {}, marks=pytest.mark.full), (True, {"lm_head_dtype": "int8"}),
    (True, {"kv_cache_dtype": "int8"}), pytest.param(False, {"kv_cache_dtype": "int8"}, marks=pytest.mark.full),
    pytest.param(True, {}, marks=pytest.mark.full)],
    ids=["float", "w8a8, int8 head", "w8a8, int8 cache", "int8 cache", "w8a8"])
@emulated(relax=RELAX)
def test_ascend_bucket_is_captured_once_per_sampling(tmp_path: Path, w8a8: bool, settings: dict[str, Any]) -> None:
    """Each bucket of rows is captured with argmax and with the sampler for each of three filters, each bucket of tokens
    with the sampler for two, and nothing is captured again by requests. Chunks are not captured over an int8 cache."""
    folder = saved_w8a8(tmp_path) if w8a8 else saved(tmp_path)
    load(folder, decode_buckets=(1,), capture="on", **settings)  # a second updater of lengths may be tested
    emulator.clear_calls()
    runner = load(folder, decode_buckets=(1, 4), max_num_batched_tokens=130, capture="on", **settings)
    rows, tokens = [1, 4], [] if "kv_cache_dtype" in settings else [64, 128, 130]
    for sampling in ({}, {"temperature": 0.9}, {"top_k": 5}, {"top_p": 0.5}):
        answers(runner, asks(3, 4, **sampling))
        runner.launch(Step([], ended=[0, 1, 2]))
    captures = [call.name for call in emulator.calls() if call.name == "aclmdlRICaptureBegin"]
    assert len(captures) == 4 * len(rows) + 3 * len(tokens) + 1  # and the test of new lengths


# The device


@emulated()
def test_ascend_properties(tmp_path: Path) -> None:
    backend = started()
    assert (backend.name, backend.kernels, backend.capabilities.deterministic) == ("npu", "ascend", False)
    can = backend.capabilities
    assert (can.block_size, can.block_multiple, can.max_block_size, can.padding_blocks) == (128, 128, 128, 1)
    for buckets, blocks in (((1, 130), 1), ((4, 134), 2), ((512,), 4), ((1, 4, 16, 64, 256), 2)):
        other = select(backend.name, settings=DeviceSettings(decode_buckets=buckets))
        assert other.capabilities.padding_blocks == blocks
    assert backend.cache.shapes(5, 128, 2, 64, torch.bfloat16) == ((5, 128, 2, 128),) * 2
    free = backend.memory.available()
    held = backend.empty((32 << 20,), torch.uint8)
    assert 30 << 20 < free - backend.memory.available() < 40 << 20
    del held
    assert backend.memory.cache_share(1000) == 900
    for asked, checkpoint, dtype in (("auto", "bfloat16", "bfloat16"), ("auto", "float16", "float16"),
                                     ("auto", "float32", "bfloat16"), ("float16", "bfloat16", "float16")):
        assert backend.resolve_dtype(asked, checkpoint) == dtype
    with pytest.raises(BackendError, match="dtype: 'float32' is not one of auto, bfloat16, float16"):
        backend.resolve_dtype("float32", "float32")
    assert backend.cache.shapes(5, 128, 2, 160, torch.bfloat16) == ((5, 128, 2, 256),) * 2
    assert backend.cache.shapes(5, 128, 2, 256, torch.int8) == ((5, 2, 128, 256),) * 2
    backend.check_heads(256, 64)
    for size in (48, 100, 264, 288, 512):
        with pytest.raises(BackendError, match=f"heads have {size} dimensions; npu takes multiples of 32 up to 256"):
            backend.check_heads(size)
    with pytest.raises(BackendError, match=r"rotary embeddings cover 48 dimensions .* takes multiples of 32"):
        backend.check_heads(96, 48)


def test_default_buckets() -> None:
    assert default_buckets(1) == (1,)
    assert default_buckets(3) == (1, 2, 3)
    assert default_buckets(20) == (1, 2, 4, 8, 16, 20)
    sizes = default_buckets(300)
    assert sizes[:10] == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56)
    assert sizes[-4:] == (224, 240, 256, 300)
    assert list(sizes) == sorted(set(sizes))
