"""Hybrids (Qwen3.5) on the emulated Ascend device: tokens equal the CPU's, by the operators or without them."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from npuserve.kernels.ascend_delta import DeltaLaunches
from npuserve.kernels.causal_conv_silu import causal_conv_silu
from npuserve.kernels.gated_delta_rule import gated_delta_rule
from npuserve.kernels.registry import Case, Implementation
from npuserve.npu import emulator
from npuserve.npu.backends.ascend import delta_kernels
from npuserve.npu.backends.base import BackendError
from npuserve.npu.emulator import fused_delta
from npuserve.npu.emulator.backend import EmulatedAscend
from npuserve.npu.execution.runner import Runner
from npuserve.npu.quantize.checkpoint import quantize_checkpoint
from npuserve.npu.quantize.rounding import Int8Rounding
from npuserve.npu.step import PENDING, NewRequest, Row, SamplingParams, Step
from tests.npu.backends.ascend.test_backend import RELAX, load
from tests.npu.backends.ascend.test_launches import EVENT, nodes
from tests.npu.backends.ascend.test_ranks import SMALL_BUFFER, loaded, of_one_device, share
from tests.npu.backends.hybrid import saved_hybrid
from tests.npu.backends.small import GREEDY, Ask, answers, asks, ids_of, sampled_asks
from tests.npu.emulator.child import emulated, needs_npu, run
from tests.npu.emulator.ranks import Place, on_ranks
from tests.support import loop
from tests.support.benches import bench
from tests.support.oracle_drafts import drafting_of

MEMORY = {"kv_cache_memory": 24 << 20}


@contextmanager
def captured_log(name: str) -> Iterator[list[str]]:
    """Yield the messages of a logger, to which messages are appended."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(name).removeHandler(handler)


def on_cpu(folder: Path, **settings: Any) -> Runner:
    return load(folder, "cpu", block_size=128, threads=1, **{**MEMORY, **settings})


def equal_to_the_cpu(folder: Path, sampling: dict[str, Any], capture_chunks: bool = True, **sizes: Any) -> None:
    saved_hybrid(folder, **sizes)
    npu = load(folder, decode_buckets=(2, 4), capture_chunks=capture_chunks, **MEMORY)
    assert npu.fallbacks == []
    got, results = answers(npu, asks(6, 8, **sampling))
    expected, _ = answers(on_cpu(folder), asks(6, 8, **sampling))
    assert got == expected
    assert {result.captured for result in results} == ({True} if capture_chunks else {True, False})
    if capture_chunks:
        assert not any(result.decoder_decodes for result in results)


@needs_npu
@pytest.mark.parametrize("capture_chunks", [True, False], ids=["one dispatch", "decode rows and chunks"])
@pytest.mark.parametrize(("order", "seed"), [
    ("lazy", 0), ("shuffled", 1), pytest.param("eager", 0, marks=pytest.mark.full)])
def test_hybrid_tokens_equal_cpu(tmp_path: Path, order: str, seed: int, capture_chunks: bool) -> None:
    """Prompts arrive in chunks beside decode rows; padded rows and tokens do not touch the requests' states."""
    options = {"relax": RELAX, "order": order, "seed": seed, "poison": True}
    run(equal_to_the_cpu, {"folder": tmp_path, "sampling": {}, "capture_chunks": capture_chunks}, options)


@needs_npu
@pytest.mark.parametrize("capture_chunks", [
    pytest.param(True, id="one dispatch"), pytest.param(False, id="decode rows and chunks", marks=pytest.mark.full)])
def test_hybrid_tokens_with_triton_equal_cpu(tmp_path: Path, capture_chunks: bool) -> None:
    """Stand-ins for the Triton kernels do convolution, gates and gated norm."""
    run(equal_to_the_cpu, {"folder": tmp_path, "sampling": {}, "capture_chunks": capture_chunks},
        {"relax": RELAX, "poison": True, "triton": True})


# Configurations

HEADS = {"1/1": (1, 1), "1/2": (1, 2), "2/2": (2, 2), "2/6": (2, 6)}
LAYERS: dict[str, dict[str, Any]] = {
    "3 of 4": {"head_dim": 256}, "2 of 3": {"layers": 3, "full": (1,), "head_dim": 128},
    "1 of 2": {"layers": 2, "full": (0,), "head_dim": 64}}
DIMS = {"operator": 128, "triton": 64, "fallback": 64}
"""What computes chunks -> size of the heads of linear attention. The stand-in for the Triton kernel is there for
"triton" alone."""
CONFIGURATIONS = [(heads, layers, by) for heads in HEADS for layers in LAYERS for by in DIMS]
"""docs/models.md has them as a table."""
NEAR_TIES = [("2/2", "3 of 4", "operator")]
"""Configurations in which one of four requests differs from a token on."""
DEFAULT = [("2/6", "2 of 3", "operator"), ("2/6", "2 of 3", "triton"), ("1/2", "1 of 2", "fallback")]


@pytest.mark.parametrize(("heads", "layers", "by"), [
    pytest.param(*case, marks=[] if case in DEFAULT else pytest.mark.full, id=", ".join(case))
    for case in CONFIGURATIONS])
@needs_npu
def test_hybrid_configuration_equals_cpu(tmp_path: Path, heads: str, layers: str, by: str) -> None:
    """By operators of torch chunks are computed token by token, and only decode rows are captured.

    The operators' results are in bfloat16 even here, so that a near tie may fall the other way.
    """
    run(configuration_equals_cpu, {"folder": tmp_path, "heads": heads, "layers": layers, "by": by},
        {"relax": RELAX, "poison": True, "triton": by == "triton"})


def configuration_equals_cpu(folder: Path, heads: str, layers: str, by: str) -> None:
    key_heads, value_heads = HEADS[heads]
    saved_hybrid(folder, key_heads=key_heads, value_heads=value_heads, linear_dim=DIMS[by], **LAYERS[layers], seed=3)
    npu = load(folder, decode_buckets=(2, 4), **MEMORY)
    assert npu.fallbacks == ([] if by == "operator" else ["gated_delta_rule"])
    emulator.log_tasks(True)
    got, results = answers(npu, asks(4, 6))
    emulator.log_tasks(False)
    expected, _ = answers(on_cpu(folder), asks(4, 6))
    assert got == expected or (
        (heads, layers, by) in NEAR_TIES and sum(a == b for a, b in zip(got, expected, strict=True)) == 3)
    decodes = [result for result in results if result.captured_decodes]
    assert len(decodes) > 5
    assert all(result.captured for result in results) == (by != "fallback")
    called = {task.name for task in emulator.tasks()}
    assert ("aclnnChunkGatedDeltaRule" in called) == (by == "operator")
    assert ("delta_rule_kernel" in called) == (by == "triton")


@emulated(relax=RELAX)
def test_hybrid_sampled_and_constrained_tokens_equal_cpu(tmp_path: Path) -> None:
    """Constrained rows are sampled after the dispatch."""
    saved_hybrid(tmp_path)
    got, _ = answers(load(tmp_path, decode_buckets=(1, 4), **MEMORY), sampled_asks(6, 8))
    assert got == answers(on_cpu(tmp_path), sampled_asks(6, 8))[0]


# Missing operators


LACKING = ["ChunkGatedDeltaRule", "RecurrentGatedDeltaRule"]


@pytest.mark.full  # test_hybrid_configuration_equals_cpu has heads that the operators do not take
@pytest.mark.parametrize("triton", [True, False], ids=["triton", "torch"])
@pytest.mark.parametrize("lacking", LACKING)
@needs_npu
def test_hybrid_without_an_operator_equals_cpu(tmp_path: Path, lacking: str, triton: bool) -> None:
    """CANN before 9.1 has no aclnnChunkGatedDeltaRule. The kernel counts as a fallback."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMULATED_CANN_WITHOUT", f"aclnn{lacking}")
        run(equal_without_operator, {"folder": tmp_path, "triton": triton, "lacks_chunk": lacking == LACKING[0]},
            {"relax": RELAX, "triton": triton, "poison": True}, fresh=True)


def equal_without_operator(folder: Path, triton: bool, lacks_chunk: bool) -> None:
    """With triton-ascend its kernel takes the operator's place, and chunks are captured. The log says what does."""
    saved_hybrid(folder, layers=2, full=(1,))
    with captured_log(delta_kernels.__name__) as said:
        npu = load(folder, decode_buckets=(2, 4), **MEMORY)
    assert npu.fallbacks == ["gated_delta_rule"]
    assert [("a Triton kernel" in line, "torch's operators" in line) for line in said] == [(triton, not triton)]
    emulator.log_tasks(True)
    got, results = answers(npu, asks(4, 6))
    emulator.log_tasks(False)
    assert got == answers(on_cpu(folder), asks(4, 6))[0]
    assert sum(result.captured_decodes for result in results) > 5
    assert all(result.captured for result in results) == triton
    called = {task.name for task in emulator.tasks()}
    assert ("delta_rule_kernel" in called) == triton
    assert ("aclnnRecurrentGatedDeltaRule" if lacks_chunk else "aclnnChunkGatedDeltaRule") in called


@pytest.mark.full
@emulated(relax=RELAX, triton=True)
def test_hybrid_beyond_the_operators_bounds_is_captured_with_triton(tmp_path: Path) -> None:
    """Heads of 64, and states in float32 beside activations in bfloat16: the operators take neither."""
    saved_hybrid(tmp_path / "64", layers=2, full=(1,), linear_dim=64)
    npu = load(tmp_path / "64", decode_buckets=(2, 4), **MEMORY)
    assert npu.fallbacks == ["gated_delta_rule"]
    got, results = answers(npu, asks(4, 6))
    assert got == answers(on_cpu(tmp_path / "64"), asks(4, 6))[0]
    assert all(result.captured for result in results)

    saved_hybrid(tmp_path / "128", layers=2, full=(1,))
    npu = load(tmp_path / "128", dtype="bfloat16", decode_buckets=(2, 4), **MEMORY, state_dtype="float32")
    assert npu.fallbacks == ["gated_delta_rule"]
    _, results = answers(npu, asks(4, 6))
    assert all(result.captured for result in results)


@pytest.mark.parametrize("fault", ["differs", "fails"])
@emulated(relax=RELAX)
def test_unfit_triton_kernels_of_linear_attention_are_not_used(tmp_path: Path, fault: str) -> None:
    """Each kernel fails at its first call, or gives other results: operators serve, and the log says why."""
    saved_hybrid(tmp_path, layers=2, full=(1,), linear_dim=64)

    def unfit(launch: Any) -> Any:
        def call(*args: Any) -> Any:
            if fault == "fails":
                raise RuntimeError("ub overflow")
            result = launch(*args)
            return result * 1.5 if isinstance(result, torch.Tensor) else (result[0], result[1] * 1.5)
        return call

    launches = DeltaLaunches(*(unfit(getattr(fused_delta.LAUNCHES, name)) for name in DeltaLaunches.__slots__))
    with pytest.MonkeyPatch.context() as patch, captured_log(delta_kernels.__name__) as said:
        patch.setattr(EmulatedAscend, "delta_launches", lambda self: launches)
        npu = load(tmp_path, decode_buckets=(2, 4), **MEMORY)
        got, _ = answers(npu, asks(2, 4))
    assert got == answers(on_cpu(tmp_path), asks(2, 4))[0]
    reason = "ub overflow" if fault == "fails" else "differ"
    for kernel in ("conv_silu", "delta_gates", "delta_rule", "gated_rms_norm"):
        assert any(line.startswith(f"{kernel}_kernel is not used") and reason in line for line in said), (kernel, said)


@emulated(relax=RELAX)
def test_hybrid_with_other_dtypes_of_states_and_activations_is_a_fallback(tmp_path: Path) -> None:
    """The operators take both in bfloat16 alone; float32 states beside them are possible without the operators."""
    saved_hybrid(tmp_path, layers=2, full=(1,))
    npu = load(tmp_path, dtype="bfloat16", **MEMORY, state_dtype="float32")
    assert npu.fallbacks == ["gated_delta_rule"]
    assert npu._store.fixed[1].dtype == torch.float32
    assert load(tmp_path, **MEMORY)._store.fixed[1].dtype == torch.float32
    assert load(tmp_path, dtype="float16", **MEMORY).fallbacks == ["gated_delta_rule"]
    assert load(tmp_path, dtype="bfloat16", **MEMORY).fallbacks == []
    with pytest.raises(BackendError, match="state_dtype: 'float16'"):
        load(tmp_path, **MEMORY, state_dtype="float16")


# States


def tokens_of_continued_slots(runner: Runner) -> list[int]:
    """Continue a checkpoint of a prompt by two rows, and the slot of a request that ended by a new one."""
    prompt, first, second = ids_of(128, 1), ids_of(9, 2), ids_of(5, 3)
    known: set[int] = set()
    tokens = []

    def step(rows: list[Row], ended: tuple[int, ...] = ()) -> None:
        new = [NewRequest(row.request_id, [], [], GREEDY) for row in rows if row.request_id not in known]
        known.update(row.request_id for row in rows)
        result = runner.collect(runner.launch(Step(rows, new, list(ended))))
        tokens.extend(token for key in sorted(result.token_ids) for token in result.token_ids[key])

    step([Row(0, prompt[:60], 0, [0], 0, state_slot=3)])
    step([Row(0, prompt[60:120], 60, [0], 0, state_slot=3)])
    step([Row(0, prompt[120:], 120, [0], 0, state_slot=3)])
    step([Row(0, first, 128, [0, 1], 1, state_slot=1, state_source=3),
          Row(1, second, 128, [0, 2], 1, state_slot=2, state_source=3)])
    step([Row(0, [tokens[0]], 137, [0, 1], 1, state_slot=1), Row(1, [tokens[1]], 133, [0, 2], 1, state_slot=2)])
    step([Row(2, second, 0, [3], 1, state_slot=1), Row(1, [7], 134, [0, 2], 1, state_slot=2)], ended=(0,))
    step([Row(3, [5], 0, [4], 1, state_slot=0), Row(2, [7], 5, [3], 1, state_slot=1)])  # a prompt of one token
    return tokens


@emulated(relax=RELAX, poison=True)
def test_hybrid_slots_are_cleared_copied_and_continued(tmp_path: Path) -> None:
    saved_hybrid(tmp_path)
    npu = load(tmp_path, decode_buckets=(2, 4), **MEMORY)
    assert tokens_of_continued_slots(npu) == tokens_of_continued_slots(on_cpu(tmp_path))


@pytest.mark.full
@emulated(relax=RELAX)
def test_hybrid_decodes_more_rows_than_slots(tmp_path: Path) -> None:
    """The operator takes no more tokens than slots, and graphs for more rows are captured anyway."""
    saved_hybrid(tmp_path, layers=2, full=(1,))
    npu = load(tmp_path, kv_cache_memory=10 << 20, max_num_seqs=64)
    assert npu.num_slots < 64
    got, results = answers(npu, asks(2, 6))
    assert got == answers(on_cpu(tmp_path), asks(2, 6))[0]
    assert all(result.captured for result in results)


# Quantized


INT8 = [{}, {"kv_cache_dtype": "int8"}, {"lm_head_dtype": "int8"},
        {"kv_cache_dtype": "int8", "lm_head_dtype": "int8"}]


@pytest.mark.parametrize(("form", "settings"), [
    ("floats", INT8[0]), ("W8A8", INT8[3]), *(pytest.param(*case, marks=pytest.mark.full) for case in (
        *(("floats", settings) for settings in INT8[1:]), *(("W8A8", settings) for settings in INT8[:3]),
        ("ModelSlim", INT8[0])))], ids=str)
@emulated()
def test_hybrid_log_probabilities_are_near_the_cpus(tmp_path: Path, form: str, settings: dict[str, Any]) -> None:
    """Of a prompt, in the device's dtypes without relaxation. The CPU has float32 and the device's int8 levels."""
    folder = saved_hybrid(tmp_path / "floats")
    w8a8 = form != "floats"
    if w8a8:
        quantize_checkpoint(folder, tmp_path / "int8", rounding=Int8Rounding(modelslim=form == "ModelSlim"))
        folder = tmp_path / "int8"
    npu = load(folder, dtype="bfloat16", **MEMORY, **settings)
    assert npu.fallbacks == []
    reports = []
    for runner in (npu, on_cpu(folder, int8_levels=127.0, **settings)):
        prompt = ids_of(60, 4)
        new = NewRequest(1, prompt, [], SamplingParams(temperature=0.0, prompt_logprobs=1))
        step = Step([Row(1, prompt, 0, [0], 1, state_slot=0)], [new])
        reports.append(runner.collect(runner.launch(step)).prompt_logprobs[1])
    apart = [abs(one.logprob - other.logprob) for one, other in zip(*reports, strict=True)]
    assert 0 < sum(apart) / len(apart) < (0.12 if w8a8 else 0.05)
    assert max(apart) < (0.6 if w8a8 else 0.2)
    assert sum(one.top_ids[0] == other.top_ids[0] for one, other in zip(*reports, strict=True)) >= 0.85 * len(apart)


@pytest.mark.full
@emulated()
def test_hybrid_context_of_8000_tokens_is_as_near_the_cpu_as_a_short_one(tmp_path: Path) -> None:
    """A prompt in chunks of 512 tokens, in the device's dtypes. Errors of a state in bfloat16 do not add up."""
    length, chunk, part = 8000, 512, 1000
    saved_hybrid(tmp_path, layers=2, full=(1,), context=8192, a_log=-6)
    prompt, reports = ids_of(length, 5), []
    for runner in (load(tmp_path, dtype="bfloat16", max_num_batched_tokens=chunk, max_num_seqs=2, **MEMORY),
                   on_cpu(tmp_path, max_num_batched_tokens=chunk)):
        new = [NewRequest(1, prompt, [], SamplingParams(temperature=0.0, prompt_logprobs=1))]
        found: list[Any] = []
        for first in range(0, length, chunk):
            ids = prompt[first : first + chunk]
            row = Row(1, ids, first, list(range(-(-length // 128))), first + chunk >= length, state_slot=0)
            result = runner.collect(runner.launch(Step([row], new)))
            found += result.prompt_logprobs[1]
            new = []
        reports.append(found)
    assert [len(found) for found in reports] == [length - 1] * 2
    apart = torch.tensor([abs(one.logprob - other.logprob) for one, other in zip(*reports, strict=True)])
    short, long = float(apart[:part].mean()), float(apart[-part:].mean())
    assert 0 < long < 0.05
    assert long < 1.5 * short


# Ranks


@pytest.mark.full  # test_experts.py has ranks with such layers
@on_ranks(joined=False, relax=RELAX, environment=SMALL_BUFFER)
def test_hybrid_tokens_of_two_ranks_equal_those_of_one_device(place: Place, tmp_path: Path) -> None:
    """Each rank has the states of its heads."""
    folder = share(place, "model", lambda: saved_hybrid(tmp_path, layers=2, full=(1,), key_heads=2, value_heads=4))
    runner, _ = loaded(place, folder, decode_buckets=(1, 4), **MEMORY)
    assert runner.fallbacks == []
    got, results = answers(runner, asks(4, 8))
    assert got == of_one_device(place, folder, **MEMORY)
    assert all(result.captured for result in results)


# Calls


LAUNCHES = {
    ("operators", "bf16"): {"1": (24, 15), "4": (24, 16), "chunk": (30, 16)},
    ("triton", "bf16"): {"1": (12, 12), "4": (12, 12), "chunk": (16, 12)},
    ("operators", "w8a8"): {"1": (28, 17), "4": (28, 18), "chunk": (34, 18)},
    ("triton", "w8a8"): {"1": (16, 14), "4": (16, 14), "chunk": (20, 14)}}
"""Step -> tasks of a layer of linear attention, and of one of attention without the two of its lengths' event."""
VLLM_ASCEND = 20
"""Tasks of vllm-ascend's layer of linear attention in a decode step, counted from its sources
(docs/ascend-audit.md)."""
FUSED = ("conv_silu_kernel", "delta_gates_kernel", "gated_rms_norm_kernel")


@needs_npu
@pytest.mark.parametrize(("by", "form"), [
    pytest.param(*case, marks=[] if case == ("operators", "bf16") else pytest.mark.full) for case in LAUNCHES])
def test_hybrid_launches_of_layers_by_kind(tmp_path: Path, by: str, form: str) -> None:
    run(check_launches, {"folder": tmp_path, "by": by, "form": form}, {"triton": by == "triton"})


def check_launches(folder: Path, by: str, form: str) -> None:
    expected = LAUNCHES[by, form]
    triton = by == "triton"
    found = []
    for full in ((2,), (1, 2), (1,)):
        model = saved_hybrid(folder / repr(full), layers=max(full) + 1, full=full, inner=80)
        if form == "w8a8":
            quantize_checkpoint(model, folder / f"int8 {full}")
            model = folder / f"int8 {full}"
        dispatch = load(model, dtype="bfloat16", decode_buckets=(1, 4), **MEMORY)._dispatch
        found.append({kind: nodes(dispatch.chunks.hidden, 64, folder / "graph.json") if kind == "chunk" else
                      nodes(dispatch.decodes.argmax, int(kind), folder / "graph.json") for kind in expected})
    two_linear, one_linear, shorter = found
    for kind, counts in expected.items():
        linear, full_layer = two_linear[kind] - shorter[kind], one_linear[kind] - shorter[kind]
        assert full_layer >= EVENT
        assert (linear.total(), full_layer.total() - EVENT.total()) == counts, (kind, linear, full_layer)
        assert [linear[kernel] for kernel in FUSED] == [int(triton)] * 3
        assert not triton or linear.total() <= VLLM_ASCEND
    if not triton:  # docs/ascend-roofline.md counts one row
        layers = expected["1"]
        others = shorter["1"].total() - sum(layers) - EVENT.total()
        assert bench("kernels.roofline").HYBRID_LAUNCHES[form] == (*layers, others)


@emulated(relax=RELAX)
def test_hybrid_steady_step_is_one_replay(tmp_path: Path) -> None:
    """Slots and lengths are inputs of the graph: no call beyond those of a model without states."""
    saved_hybrid(tmp_path)
    runner = load(tmp_path, **MEMORY)
    rows, here = range(3), threading.get_native_id()
    flying = runner.launch(Step([Row(i, [5, 7, 9], 0, [i], 1, state_slot=i) for i in rows],
                                [NewRequest(i, [5, 7, 9], [], GREEDY) for i in rows]))
    for step in range(6):
        runner.backend._lengths.check(runner.backend._lengths.given)  # type: ignore[attr-defined]
        emulator.clear_calls()
        following = runner.launch(Step([Row(i, [PENDING], 3 + step, [i], 1, state_slot=i) for i in rows]))
        emulator.mark("launched")
        result = runner.collect(flying)
        flying = following
    own = Counter(call.name for call in emulator.calls() if call.thread == here and call.name != "# launched")
    assert result.captured_decodes == 3
    assert own["aclmdlRIExecuteAsync"] == 1
    assert own.total() <= 12
    runner.collect(flying)


@pytest.mark.full
@emulated(relax=RELAX)
def test_hybrid_chunk_of_512_tokens_is_one_replay(tmp_path: Path) -> None:
    saved_hybrid(tmp_path, layers=2, full=(1,))
    npu = load(tmp_path, max_num_batched_tokens=512, max_num_seqs=4, **MEMORY)
    prompt = ids_of(500)
    found = []
    for runner in (npu, on_cpu(tmp_path, max_num_batched_tokens=512)):
        got, results = answers(runner, [Ask(prompt, 3), Ask(ids_of(12, 5), 4)], chunk=500)
        found.append(got)
        if runner is npu:
            assert all(result.captured for result in results)
    assert found[0] == found[1]


def tasks_of(implementation: Implementation[..., Any], case: Case) -> Counter[str]:
    """Return the names of the tasks that a kernel's implementation runs for a case in bfloat16."""
    args = implementation.adapt(case.make(torch.Generator().manual_seed(0), torch.bfloat16))
    emulator.log_tasks(True)
    implementation.function(*args)
    torch.npu.synchronize()
    emulator.log_tasks(False)
    return Counter(task.name for task in emulator.tasks())


@emulated()
def test_hybrid_operators_are_called() -> None:
    """The case with heads of 128 runs by the operators in bfloat16, and the others without."""
    for kernel, task, present in (
        (gated_delta_rule, "aclnnChunkGatedDeltaRule", True), (causal_conv_silu, "aclnnChunkGatedDeltaRule", False)):
        case = [case for case in kernel.cases if not case.benchmark][-1]
        made = kernel.implementations["ascend"]
        assert (task in tasks_of(made, case)) == present


@emulated()
def test_hybrid_rule_by_operators_of_torch_computes_the_gates_once() -> None:
    case = next(case for case in gated_delta_rule.cases if "16x16" in case.name)
    made = gated_delta_rule.implementations["ascend"]
    counted = tasks_of(made, case)
    assert (counted["aclnnSigmoid"], counted["aclnnSoftplus"]) == (1, 1)


# Drafts


@pytest.mark.parametrize("sampling", [
    pytest.param({"temperature": 0.0}, id="greedy", marks=pytest.mark.full),
    pytest.param({"temperature": 0.9, "repetition_penalty": 1.2}, id="penalized")])
@emulated(relax=RELAX, poison=True)
def test_hybrid_drafts_change_no_token(tmp_path: Path, sampling: dict[str, Any]) -> None:
    """A row with a rejected draft is computed again, from the state before it."""
    saved_hybrid(tmp_path)
    npu = load(tmp_path, decode_buckets=(2, 4), max_drafts=8, **MEMORY)
    assert npu.max_drafts == 8
    requests = [loop.Ask(3 * seed, None, {"prompt_ids": ids_of(5 + 9 * seed, seed), "max_tokens": 16,
                                          "sampling": SamplingParams(seed=seed, **sampling)}) for seed in range(3)]
    expected, _ = loop.serve(npu, requests, 2, 12, 4, 16)
    tokens = dict(enumerate(answer.tokens for answer in expected))  # by seed
    drafting = drafting_of("mixed", lambda sequence: tokens[sequence.request.sampling.seed], 100, npu.max_drafts,
                           npu.block_size)
    drafted, _ = loop.serve(npu, requests, 2, 12, 4, 16, drafting=drafting)
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in expected]
    assert 0 < drafting.accepted < drafting.drafted
