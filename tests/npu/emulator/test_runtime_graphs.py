"""Graphs of the emulated NPU: capture, update and replay by NPUGraph, and refusals of a capture.

Error codes: CANN Runtime documentation, aclError.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from npuserve.npu import emulator
from tests.npu.emulator.child import emulated


def tensors(*values: float) -> list[Tensor]:
    made = [torch.full((4,), float(value), device="npu") for value in values]
    torch.npu.synchronize()
    return made


def capture(work: Callable[[], object]) -> torch.npu.NPUGraph:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        work()
    return graph


@emulated()
def test_capture_computes_nothing_and_replay_reads_current_values():
    x, one, y = tensors(0, 1, 0)
    graph = capture(lambda: y.copy_(x + one))
    assert y.tolist() == [0] * 4
    for value in (5.0, 7.0):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [value + 1] * 4


def is_captured(streams: int, work: Callable[[], object]) -> bool:
    """Return whether a capture succeeds with this number of streams, or is refused for lack of one."""
    emulator.limit(streams=streams)
    try:
        work()
    except RuntimeError as error:
        if "207008" not in str(error):
            raise
        return False
    return True


@emulated(fresh=True)
def test_graphs_take_streams_of_the_device():
    """A graph takes one stream for each 2,016 tasks. Further graphs are refused, and other work continues."""
    y, one = tensors(0, 1)
    graphs = [capture(lambda: y.add_(one))]
    torch.npu.synchronize()
    taken = 2
    while not is_captured(taken + 1, lambda: graphs.append(capture(lambda: y.add_(one)))):
        taken += 1  # streams of torch_npu's pool
    with pytest.raises(RuntimeError, match="207008"):
        capture(lambda: y.add_(one))
    emulator.limit(streams=taken + 3)
    graphs.append(capture(lambda: [y.add_(one) for _ in range(2017)]))
    with pytest.raises(RuntimeError, match="207008"):
        capture(lambda: y.add_(one))
    y.zero_()
    graphs[-1].replay()
    assert y.tolist() == [2017.0] * 4
    del graphs[0]
    with pytest.raises(RuntimeError, match="operator name is aclnnInplaceAdd"):  # the code is on stderr
        capture(lambda: [y.add_(one) for _ in range(2017)])


@emulated(fresh=True)
def test_device_has_so_many_events():
    events = [torch.npu.Event() for _ in range(4)]
    emulator.limit(events=3)
    for event in events[:3]:
        event.record()
    torch.npu.synchronize()
    del events[0]
    events[-1].record()  # takes the place of the destroyed one
    torch.npu.synchronize()
    one_more = torch.npu.Event()
    one_more.record()
    with pytest.raises(RuntimeError, match=r"current working event"):  # of torch_npu's thread; the code is on stderr
        torch.npu.synchronize()


@emulated()
def test_replays_run_in_stream_order():
    y, one = tensors(0, 1)
    graph = capture(lambda: y.add_(one))
    for _ in range(3):
        graph.replay()
    y.mul_(10)
    graph.replay()
    assert y.tolist() == [31] * 4


def forked(*, wait: bool) -> float:
    """Return a value that the graph's second stream writes and the first reads, with or without waiting for it."""
    x, one, y = tensors(0, 1, 0)
    side, fork, join, late = torch.npu.Stream(), torch.npu.Event(), torch.npu.Event(), torch.npu.Event()

    def work() -> None:
        fork.record()
        fork.wait(side)
        with torch.npu.stream(side):
            x.add_(one)
            join.record()
        if wait:
            join.wait()
        y.copy_(x)
        with torch.npu.stream(side):
            late.record()
        late.wait()

    graph = capture(work)
    graph.replay()
    torch.npu.synchronize()
    return y[0].item()


@emulated()
def test_missing_wait_in_graph_gives_wrong_data():
    assert forked(wait=False) == 0
    assert forked(wait=True) == 1


def grouped(x: Tensor, one: Tensor, y: Tensor, scale: float = 1) -> tuple[Any, object, Any]:
    """Return a graph of y = x + scale * one, its updatable group, and its event, as torch_npu's graphs have them."""
    graph, handles, event = torch.npu.NPUGraph(), [], torch.npu.ExternalEvent()
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        event.wait(stream)
        event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        torch.add(x, one, alpha=scale, out=y)
        handles.append(torch.npu.graph_task_group_end(stream))
    return graph, handles[0], event


def update(handle: object, event: Any, x: Tensor, one: Tensor, y: Tensor, scale: float) -> None:
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        torch.npu.graph_task_update_begin(stream, handle)
        torch.add(x, one, alpha=scale, out=y)
        torch.npu.graph_task_update_end(stream)
        if event is not None:
            event.record(stream)


@emulated()
def test_an_update_replaces_what_a_task_group_computes():
    x, one, y = tensors(10, 1, 0)
    graph, handle, event = grouped(x, one, y)
    for scale in (2.0, 5.0):
        graph.replay()
        update(handle, event, x, one, y, scale)
        assert y.tolist() == [10 + scale] * 4


@emulated()
def test_an_update_from_another_thread_comes_before_the_replay_that_waits_for_it():
    x, one, y = tensors(10, 1, 0)
    graph, handle, event = grouped(x, one, y)
    for scale in (2.0, 3.0, 4.0):
        graph.replay()
        done = torch.npu.Event()
        done.record()
        late = threading.Timer(0.05, update, (handle, event, x, one, y, scale))
        late.start()
        done.synchronize()
        assert y.tolist() == [10 + scale] * 4
        late.join()


@emulated()
def test_a_graph_of_attention_is_updated_by_torch_npu_itself():
    """`NPUGraph.update` from another thread, after the launch of the replay, sets the lengths of that replay."""
    import torch_npu

    heads, dim, block = 2, 128, 128
    query = torch.randn(2, heads, dim).bfloat16().npu()
    keys, values = (torch.randn(4, block, heads * dim).bfloat16().npu() for _ in range(2))
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32).npu()
    mask = torch.triu(torch.ones(2048, 2048), 1).to(torch.int8).npu()

    def attention(lengths: list[int]) -> Tensor:
        out: Tensor = torch_npu.npu_fused_infer_attention_score(
            query, keys, values, atten_mask=mask, block_table=table, input_layout="TND", block_size=block,
            actual_seq_lengths=[1, 2], actual_seq_lengths_kv=lengths, num_heads=heads, num_key_value_heads=heads,
            scale=dim**-0.5, sparse_mode=3)[0]
        return out

    steps = [[5, 130], [6, 131], [200, 1]]
    expected = [2 * attention(lengths).cpu() for lengths in steps]
    out = torch.zeros_like(query)
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        out.copy_(attention([1, 1]) + attention([1, 1]))
    for lengths, wanted in zip(steps, expected, strict=True):
        graph.replay()
        done = torch.npu.Event()
        done.record()
        late = threading.Timer(0.02, graph.update, ([{"actual_seq_lengths_kv": lengths}],))
        late.start()
        done.synchronize()
        late.join()
        assert torch.equal(out.cpu(), wanted)


@emulated()
def test_update_without_wait_comes_too_late():
    x, one, y = tensors(10, 1, 0)
    graph, handles = torch.npu.NPUGraph(), []
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        torch.npu.graph_task_group_begin(stream)
        torch.add(x, one, alpha=1.0, out=y)
        handles.append(torch.npu.graph_task_group_end(stream))
    update(handles[0], None, x, one, y, 5.0)
    graph.replay()
    assert y.tolist() == [11] * 4
    torch.npu.synchronize()
    graph.replay()
    assert y.tolist() == [15] * 4


@emulated(fresh=True)
def test_an_update_must_be_of_the_same_operators():
    x, one, y = tensors(10, 1, 0)
    graph, handle, event = grouped(x, one, y)
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        torch.npu.graph_task_update_begin(stream, handle)
        with pytest.raises(RuntimeError, match="the update has 0 tasks, the task group 1"):
            torch.npu.graph_task_update_end(stream)
        torch.npu.graph_task_update_begin(stream, handle)
        torch.exp(x, out=y)
        with pytest.raises(RuntimeError, match="aclnnExp"):
            torch.npu.graph_task_update_end(stream)
    del graph, event


@emulated()
def test_random_numbers_continue_across_replays():
    y = torch.zeros(64, device="npu")
    torch.npu.synchronize()
    graph = capture(lambda: y.uniform_())
    drawn = []
    for _ in range(3):
        graph.replay()
        drawn.append(tuple(y.tolist()))
    assert len(set(drawn)) == 3


Refused = Callable[[Tensor, Any, Any], object]  # takes a tensor, the capturing stream, a new event

@emulated(order="eager")
def test_updates_come_in_time_in_the_eager_order():
    test_an_update_from_another_thread_comes_before_the_replay_that_waits_for_it.__wrapped__()
    test_a_graph_of_attention_is_updated_by_torch_npu_itself.__wrapped__()
    assert forked(wait=True) == 1


@emulated(order="shuffled", seed=2)
def test_updates_come_in_time_in_the_shuffled_order():
    test_an_update_from_another_thread_comes_before_the_replay_that_waits_for_it.__wrapped__()
    test_a_graph_of_attention_is_updated_by_torch_npu_itself.__wrapped__()
    assert forked(wait=True) == 1


REFUSED: dict[str, tuple[Refused, str]] = {
    "a synchronous copy": (lambda x, stream, event: x.cpu(), "107030"),
    "synchronizing the stream": (lambda x, stream, event: stream.synchronize(), "107027"),
    "querying the stream": (lambda x, stream, event: stream.query(), "107027"),
    "synchronizing the device": (lambda x, stream, event: torch.npu.synchronize(), "107027"),
    "synchronizing an event of the capture":
        (lambda x, stream, event: (event.record(), event.synchronize()), "107028"),
    "querying an event of the capture": (lambda x, stream, event: (event.record(), asked(event)), "107028"),
}


def asked(event: Any) -> None:
    """Query the event until the device answers: before its launch thread has recorded it, torch_npu itself answers
    no."""
    deadline = time.monotonic() + 10
    while not event.query() and time.monotonic() < deadline:
        time.sleep(0.001)


def refused(call: Refused) -> str:
    """Return the errors of `call` within a capture and of the capture's end, and discard the capture."""
    (x,) = tensors(1)
    stream, event, said = torch.npu.Stream(), torch.npu.Event(), ""
    try:
        with torch.npu.graph(torch.npu.NPUGraph(), stream=stream):
            x.add_(1)
            call(x, stream, event)
    except RuntimeError as error:
        said = f"{error}\n{error.__context__}"
    return said


@pytest.mark.parametrize("what", REFUSED)
@emulated()
def test_a_capture_refuses(what: str):
    call, code = REFUSED[what]
    assert code in refused(call)
    torch.npu.synchronize()
    x, y = tensors(1, 0)
    capture(lambda: y.copy_(x)).replay()  # the next capture works
    assert y.tolist() == [1] * 4


@emulated(fresh=True)
def test_a_capture_refuses_an_asynchronous_copy_of_pageable_memory():
    def copy(x: Tensor, stream: Any, event: Any) -> None:
        x.copy_(torch.ones(4), non_blocking=True)
        time.sleep(0.1)  # torch_npu's launch thread marks the error before it stores the text

    said = refused(copy)
    assert "a copy of pageable memory cannot be captured" in said, said


@emulated(fresh=True)
def test_capture_refuses_wait_for_earlier_event():
    before = torch.npu.Event()
    before.record()
    said = refused(lambda x, stream, event: before.wait(stream))
    assert "an event that was not recorded in the capture" in said
    assert "error code is 507903" in said  # the end of an invalid capture


@emulated()
def test_copy_of_other_thread_during_capture_depends_on_mode():
    (x,) = tensors(1)
    for mode, refused in (("global", True), ("thread_local", False), ("relaxed", False)):
        said: list[str] = []

        def copy(said: list[str] = said) -> None:
            try:
                torch.ones(4).to("npu")
            except RuntimeError as error:
                said.append(str(error))

        with torch.npu.graph(torch.npu.NPUGraph(), capture_error_mode=mode):
            x.add_(1)
            other = threading.Thread(target=copy)
            other.start()
            other.join()
        assert bool(said) == refused
        assert not said or "1070" in said[0]


@emulated()
def test_a_stream_that_is_not_joined_again_ends_the_capture():
    (x,) = tensors(1)
    side, fork = torch.npu.Stream(), torch.npu.Event()

    def work() -> None:
        fork.record()
        fork.wait(side)
        with torch.npu.stream(side):
            x.add_(1)

    with pytest.raises(RuntimeError, match="107025"):
        capture(work)


@emulated()
def test_a_graph_is_destroyed_with_its_memory():
    torch.npu.synchronize()
    x = torch.zeros(1 << 20, device="npu")
    torch.npu.empty_cache()
    before = emulator.memory().used
    graph = capture(lambda: (x + 1).add_(1))
    graph.replay()
    torch.npu.synchronize()
    assert emulator.memory().used > before
    graph.reset()
    del graph
    torch.npu.empty_cache()
    assert emulator.memory().used == before


@emulated()
def test_a_graph_can_be_printed(tmp_path: Path):
    x, one, y = tensors(0, 1, 0)
    graph = capture(lambda: y.copy_(x + one))
    file = tmp_path / "graph.json"
    graph.debug_dump(str(file))
    names = [event["name"] for event in json.loads(file.read_text())]
    assert any("Add" in name for name in names)


@emulated()
def test_a_replay_is_one_call():
    y, one = tensors(0, 1)
    graph = capture(lambda: [y.add_(one) for _ in range(20)])
    graph.replay()
    torch.npu.synchronize()
    emulator.clear_calls()
    for step in range(3):
        emulator.mark(f"step {step}")
        graph.replay()
    names = [call.name for call in emulator.calls()]
    assert names.count("aclmdlRIExecuteAsync") == 3
    steps = " ".join(names).split("# step ")[1:]
    assert all(len(step.split()) <= 8 for step in steps), names
    assert {call.thread for call in emulator.calls()} == {threading.get_native_id()}
    assert not [name for name in names if "Synchronize" in name or "aclnn" in name]
