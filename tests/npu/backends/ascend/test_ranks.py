"""Tensor parallelism on emulated NPUs: a process and a device for each rank, and collectives by torch_npu over HCCL."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from npuserve.npu import backends, emulator
from npuserve.npu.backends import select
from npuserve.npu.backends.base import BackendError, CaptureError, DeviceSettings
from npuserve.npu.backends.faults import Fault
from npuserve.npu.execution.memory_plan import predict
from npuserve.npu.execution.runner import Runner
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.layers.shard import Shard
from npuserve.npu.parallel import Group
from npuserve.npu.step import PENDING, NewRequest, Row, Step, StepResult
from npuserve.service.ranks.lead import LeadRunner, follow, stop_followers
from tests.e2e.emulated.test_calls import (
    ANSWER,
    COLLECT,
    LAUNCH,
    LAYERS,
    LENGTHS,
    ROWS,
    SAMPLING,
    STEADY,
    Marked,
    serve,
)
from tests.npu.backends.ascend.test_backend import load
from tests.npu.backends.small import GREEDY, answers, asks, saved, saved_w8a8
from tests.npu.emulator.child import emulated, needs_npu
from tests.npu.emulator.ranks import Place, on_ranks

SMALL_BUFFER = {"HCCL_BUFFSIZE": "1"}
EXEC_SECONDS = "15"
"""Time limit of a collective that lacks a rank: longer than ranks load apart on a busy machine."""
SUMS, GATHERS = 2 * LAYERS + 1, 1
"""Collectives of a step: a sum for the embedding and two for each layer, and the gather at the LM head."""


def loaded(place: Place, folder: Path, **settings: Any) -> tuple[Runner, Group]:
    """Load a rank's shard of the model on its device."""
    group = Group(place.rank, place.size, place.store)
    return load(folder, group=group, **settings), group


def from_first(place: Place, name: str, make: Callable[[], str]) -> str:
    """Return what rank 0 makes."""
    if place.rank == 0:
        place.store.set(name, make())
    text: str = place.store.get(name).decode()
    return text


def share(place: Place, name: str, make: Callable[[], Path]) -> Path:
    """Return the folder that rank 0 makes."""
    return Path(from_first(place, name, lambda: str(make())))


def of_one_device(place: Place, folder: Path, **settings: Any) -> list[list[int]]:
    """Return the answers of the whole model on the device of rank 0."""
    text = from_first(place, "answers", lambda: json.dumps(answers(load(folder, **settings), asks(4, 8))[0]))
    return json.loads(text)  # type: ignore[no-any-return]


@pytest.mark.parametrize("sampling", [
    pytest.param({}, id="greedy", marks=pytest.mark.full),  # test_tokens_do_not_depend_on_the_order_of_streams
    pytest.param({"temperature": 0.9}, id="sampled", marks=pytest.mark.full),  # a part of "penalized"
    pytest.param({"temperature": 1.2, "top_k": 7, "top_p": 0.8, "repetition_penalty": 1.3}, id="penalized")])
@on_ranks(joined=False, relax=("fp32",))
def test_tokens_of_two_ranks_equal_those_of_the_cpu(place: Place, tmp_path: Path, sampling: dict[str, Any]) -> None:
    """Chunks arrive while other requests decode. Every step is a replay of a graph that contains the collectives."""
    folder = share(place, "model", lambda: saved(tmp_path, layers=LAYERS))
    runner, _ = loaded(place, folder, decode_buckets=(2, 4))
    assert runner.fallbacks == []
    assert runner.backend.device.index == place.rank
    got, results = answers(runner, asks(6, 8, **sampling))
    expected, _ = answers(load(folder, "cpu", block_size=128, threads=1), asks(6, 8, **sampling))
    assert got == expected
    assert {result.captured for result in results} == {True}


@pytest.mark.full
@on_ranks(4, joined=False, relax=("fp32",), environment=SMALL_BUFFER)
def test_tokens_of_four_ranks_equal_those_of_the_cpu(place: Place, tmp_path: Path) -> None:
    """Two ranks have the same key and value head. The vocabulary of 100 ids leaves two ranks without one."""
    folder = share(place, "model", lambda: saved(tmp_path))
    runner, _ = loaded(place, folder, decode_buckets=(1, 4), max_num_batched_tokens=32)
    got, _ = answers(runner, asks(4, 6))
    expected, _ = answers(load(folder, "cpu", block_size=128, threads=1), asks(4, 6))
    assert got == expected


@needs_npu
@pytest.mark.parametrize(("order", "capture"), [
    ("shuffled", "on"), ("eager", "off"),
    *(pytest.param(*case, marks=pytest.mark.full) for case in (("eager", "on"), ("shuffled", "off")))])
def test_tokens_do_not_depend_on_the_order_of_streams(tmp_path: Path, order: str, capture: str) -> None:
    run_in_order = on_ranks(joined=False, relax=("fp32",), order=order, seed=3, poison=True, environment=SMALL_BUFFER)
    run_in_order(compare_with_the_cpu)(tmp_path=tmp_path, capture=capture)


def compare_with_the_cpu(place: Place, tmp_path: Path, capture: str) -> None:
    folder = share(place, "model", lambda: saved(tmp_path))
    runner, _ = loaded(place, folder, decode_buckets=(4,), capture=capture, max_num_batched_tokens=32)
    got, results = answers(runner, asks(4, 6))
    expected, _ = answers(load(folder, "cpu", block_size=128, threads=1), asks(4, 6))
    assert got == expected
    assert {result.captured for result in results} == {capture == "on"}


@on_ranks(joined=False, relax=("fp32",), environment=SMALL_BUFFER)
def test_int8_cache_gives_the_tokens_of_one_device(place: Place, tmp_path: Path) -> None:
    """Each rank has the scales of its own heads."""
    folder = share(place, "model", lambda: saved(tmp_path / "float"))
    settings: dict[str, Any] = {"kv_cache_dtype": "int8", "decode_buckets": (1, 4), "capture_chunks": False}
    runner, _ = loaded(place, folder, **settings)
    got, results = answers(runner, asks(4, 8))
    assert got == of_one_device(place, folder, **settings)
    assert any(result.captured_decodes for result in results)


@on_ranks(joined=False, relax=("fp32",), environment=SMALL_BUFFER)
def test_ranks_agree_in_w8a8_and_choose_the_first_tokens_of_one_device(place: Place, tmp_path: Path) -> None:
    """Each rank quantizes its own columns of dynamic inputs, so that later tokens may differ."""
    folder = share(place, "model", lambda: saved_w8a8(tmp_path / "int8"))
    runner, _ = loaded(place, folder, decode_buckets=(1, 4))
    got, results = answers(runner, asks(4, 8))
    assert {result.captured for result in results} == {True}
    assert json.dumps(got) == from_first(place, "got", lambda: json.dumps(got))
    alone = of_one_device(place, folder, decode_buckets=(1, 4))
    assert sum(mine[0] == theirs[0] for mine, theirs in zip(got, alone, strict=True)) >= 3


def decoding(runner: Runner, steps: int) -> StepResult:
    """Run a prompt and decode steps; return the last result."""
    runner.collect(runner.launch(Step([Row(0, [1, 2], 0, [0], True)], [NewRequest(0, [1, 2], [], GREEDY)])))
    for step in range(steps):
        emulator.clear_calls()
        emulator.log_tasks(True)
        result = runner.collect(runner.launch(Step([Row(0, [PENDING], 2 + step, [0], True)])))
    return result


@on_ranks(joined=False, relax=("fp32",), environment=SMALL_BUFFER)
def test_a_step_of_l_layers_has_2_l_plus_2_collectives(place: Place, tmp_path: Path) -> None:
    folder = share(place, "model", lambda: saved(tmp_path, layers=LAYERS))
    runner, group = loaded(place, folder, decode_buckets=(1,), capture_chunks=False)
    assert decoding(runner, 3).captured
    tasks = Counter(task.name for task in emulator.tasks())
    assert (tasks["HcclAllReduce"], tasks["HcclAllGather"]) == (SUMS, GATHERS)
    # torch_npu's watchdog asks for errors.
    assert {call.name for call in emulator.calls() if call.name.startswith("Hccl")} <= {"HcclGetCommAsyncError"}
    group.minimum(0)


@on_ranks(joined=False, relax=("fp32",), environment=SMALL_BUFFER)
def test_a_step_that_is_not_captured_calls_each_collective_once(place: Place, tmp_path: Path) -> None:
    folder = share(place, "model", lambda: saved(tmp_path, layers=LAYERS))
    runner, group = loaded(place, folder, capture="off")
    assert not decoding(runner, 3).captured
    calls = Counter(call.name for call in emulator.calls() if call.name.startswith("Hccl"))
    assert calls["HcclAllReduce"] == SUMS
    assert calls["HcclAllGather"] == GATHERS
    group.minimum(0)


@pytest.mark.full  # test_calls.py has each on one device
@pytest.mark.parametrize("sampling", SAMPLING)
@on_ranks(joined=False, relax=("fp32",), environment=SMALL_BUFFER)
def test_a_steady_step_has_the_calls_of_one_device(place: Place, tmp_path: Path, sampling: str) -> None:
    """Rank 0 runs the engine's loop with two steps in flight. Lengths are updated on each rank, by its own thread."""
    folder = share(place, "model", lambda: saved(tmp_path, layers=LAYERS))
    runner, group = loaded(place, folder, decode_buckets=(4,), capture_chunks=False)
    emulator.clear_calls()
    if place.rank:
        follow(runner, group)
        names = Counter(call.name for call in emulator.calls())
        assert names["aclmdlRIExecuteAsync"] >= ANSWER - 2
        assert names["aclmdlRICaptureTaskUpdateBegin"] >= LAYERS * (ANSWER - 2)
        return
    marked = Marked(LeadRunner(runner, group))  # type: ignore[arg-type]
    serve(marked, double_buffering=True, sampling=SAMPLING[sampling])
    stop_followers(group)
    calls = emulator.calls()
    at = {call.name: index for index, call in enumerate(calls) if call.name.startswith("#")}
    launching = calls[at[f"# launch {STEADY[0]}"]].thread
    assert all(marked.results[step].captured_decodes == ROWS for step in STEADY)
    for step in STEADY:
        begin, end = at[f"# launch {step}"], at[f"# launch {step + 1}"]
        own = [call.name for call in calls[begin:end] if call.thread == launching and not call.name.startswith("#")]
        assert own == LAUNCH + COLLECT
    others = Counter(call.name for call in calls[at[f"# launch {STEADY[0]}"] : at[f"# launch {STEADY[-1] + 1}"]]
                     if call.thread != launching)
    assert sum(others[name] for name in LENGTHS) / len(STEADY) / LAYERS == pytest.approx(5, abs=0.2)
    # torch_npu's watchdog asks for errors.
    assert {name for name in others if name.startswith("Hccl")} <= {"HcclGetCommAsyncError"}


@on_ranks(joined=False, relax=("fp32",), environment={"HCCL_BUFFSIZE": "30"})
def test_memory_of_the_communicator_is_planned(place: Place, tmp_path: Path) -> None:
    backend = select("npu", settings=DeviceSettings((place.rank, place.size)))
    planned, before = backend.communicator_bytes(2), emulator.memory().used
    assert planned == 60 << 20
    Group(place.rank, place.size, place.store).ranks(
        backend.capabilities.collectives, backend.device, 1 << 16, shared=False, reduces=backend.capabilities.reduces)
    backend.synchronize()
    assert 0 <= emulator.memory().used - before - planned < 8 << 20
    assert backend.communicator_bytes(1) == 0


@emulated()
def test_sums_in_place_take_no_planned_memory(tmp_path: Path) -> None:
    """The logits of all rows are gathered, the hidden states are not."""
    config = ModelConfig.from_folder(saved(tmp_path)).sharded(Shard(0, 2))
    settings: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 64}
    backend = select("npu", settings=DeviceSettings((0, 1)))
    found = predict(config, backend, **settings)
    backend.capabilities = replace(backend.capabilities, reduces=False)
    gathering = predict(config, backend, **settings)
    assert gathering.activations - found.activations == 2 * 16 * config.hidden_size * 2
    backend.capabilities = replace(backend.capabilities, shares_memory=True)
    assert found.logits - predict(config, backend, **settings).logits == 3 * config.padded_vocabulary(64) * 2


@pytest.mark.full
@on_ranks(joined=False, relax=("fp32",), environment=SMALL_BUFFER)
def test_a_step_whose_kernels_are_timed_gives_the_same_tokens(place: Place, tmp_path: Path) -> None:
    """Each second step runs kernel by kernel, on all ranks."""
    folder = share(place, "model", lambda: saved(tmp_path))
    seen = Counter[str]()
    runner, _ = loaded(place, folder, decode_buckets=(4,), kernel_sampling=2,
                       observe=lambda kernel, *_: seen.update([kernel]))
    got, results = answers(runner, asks(4, 8))
    expected, _ = answers(load(folder, "cpu", block_size=128, threads=1), asks(4, 8))
    assert got == expected
    assert seen["all_reduce"] > 0
    assert {result.captured for result in results} == {True, False}


@on_ranks(joined=False, relax=("fp32",), environment={"HCCL_OP_EXPANSION_MODE": "AIV", **SMALL_BUFFER})
def test_settings_that_ranks_do_not_have_are_refused(place: Place, tmp_path: Path) -> None:
    """Prompts on the host, and collectives on vector cores for captured steps."""
    folder = share(place, "model", lambda: saved(tmp_path))
    group = Group(place.rank, place.size, place.store)
    with pytest.raises(BackendError, match="prefill_device: cpu is not possible with a tensor_parallel_size above 1"):
        load(folder, group=group, prefill_device="cpu")
    with pytest.raises(BackendError, match="HCCL_OP_EXPANSION_MODE: AIV conflicts with the task groups"):
        load(folder, group=group)


@on_ranks(joined=False, relax=("fp32",), environment={"HCCL_EXEC_TIMEOUT": EXEC_SECONDS, **SMALL_BUFFER})
def test_a_rank_that_cannot_capture_fails_even_if_captures_are_optional(place: Place, tmp_path: Path) -> None:
    """Steps that are not captured have other sizes than the captured steps of the other ranks. The next group captures
    none."""
    folder = share(place, "model", lambda: saved(tmp_path))
    if place.rank:
        emulator.fail("aclmdlRICaptureEnd", 207005, nth=2, times=-1)
        with pytest.raises(CaptureError, match="207005"):
            loaded(place, folder, decode_buckets=(1, 2))
    else:
        with pytest.raises(RuntimeError, match="507048") as failed:  # it warms up for its next graph
            loaded(place, folder, decode_buckets=(1, 2))
        assert backends.fault(failed.value) is Fault.ENGINE
        assert backends.explain(failed.value).startswith("a rank waited in a collective for another one (EI0002): ")


@pytest.mark.full
@on_ranks(joined=False, relax=("fp32",), environment={"HCCL_EXEC_TIMEOUT": EXEC_SECONDS, **SMALL_BUFFER})
def test_a_collective_without_the_other_rank_is_a_fault_with_advice(place: Place, tmp_path: Path) -> None:
    folder = share(place, "model", lambda: saved(tmp_path))
    runner, _ = loaded(place, folder, decode_buckets=(1,), capture_chunks=False)
    if place.rank == 0:
        with pytest.raises(RuntimeError) as failed:
            decoding(runner, 1)
        assert backends.fault(failed.value) is Fault.ENGINE
        assert backends.explain(failed.value).startswith("a rank waited in a collective for another one (EI0002): ")


@emulated(fresh=True)
def test_more_ranks_than_visible_devices_are_refused() -> None:
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "3"
    with pytest.raises(BackendError, match=r"2 ranks of this host need as many devices, and 1 is visible here "
                       r"\(ASCEND_RT_VISIBLE_DEVICES\)"):
        select("npu", settings=DeviceSettings((0, 2)))
