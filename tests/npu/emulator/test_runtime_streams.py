"""Streams, events and copies of the emulated NPU: missing waits give wrong data."""

from __future__ import annotations

import time

import torch

from npuserve.npu import emulator
from tests.npu.emulator.child import emulated


def ones() -> torch.Tensor:
    made = torch.ones(4, device="npu")
    torch.npu.synchronize()
    return made


def hand_over(*, wait: bool) -> list[float]:
    """Return a value made on one stream and copied on another, which waits for it or does not."""
    one, value, copy = ones(), torch.zeros(4, device="npu"), torch.zeros(4, device="npu")
    side, made = torch.npu.Stream(), torch.npu.Event()
    torch.npu.synchronize()
    value.add_(one)
    made.record()
    with torch.npu.stream(side):
        if wait:
            made.wait()
        copy.copy_(value)
    side.synchronize()
    host = torch.empty(4, pin_memory=True)
    with torch.npu.stream(side):
        host.copy_(copy, non_blocking=True)
    side.synchronize()
    return host.tolist()


@emulated()
def test_missing_wait_gives_wrong_data():
    assert hand_over(wait=False) == [0] * 4


@emulated()
def test_wait_gives_right_data():
    assert hand_over(wait=True) == [1] * 4


def overwritten_before_read() -> float:
    """Return the data of a stream that another stream overwrites before it is read."""
    value, read = ones(), torch.zeros(4, device="npu")
    side = torch.npu.Stream()
    torch.npu.synchronize()
    read.copy_(value)
    with torch.npu.stream(side):
        value.zero_()
    side.synchronize()
    return read.cpu()[0].item()


@emulated()
def test_early_overwrite_loses_data():
    assert overwritten_before_read() == 0


@emulated()
def test_streams_run_only_on_wait():
    one, value = ones(), torch.zeros(4, device="npu")
    torch.npu.synchronize()
    for _ in range(3):
        value.add_(one)
    first = torch.npu.Event()
    first.record()
    value.add_(one)
    torch.npu.current_stream().query()  # now torch_npu's launching thread has submitted everything
    first.synchronize()
    assert value.cpu().tolist() == [4] * 4
    assert emulator.pending() == 0


@emulated()
def test_event_query_after_reached():
    value = ones()
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    assert start.query()  # never recorded
    start.record()
    value.add_(1)
    end.record()
    while not end.query():  # polling makes the device progress
        time.sleep(0.001)
    assert start.query()
    assert 0 <= start.elapsed_time(end) < 10_000


@emulated()
def test_wait_applies_to_latest_record_before_it():
    """A record after the wait does not affect it."""
    value, copy = torch.zeros(4, device="npu"), torch.zeros(4, device="npu")
    one = ones()
    side, event = torch.npu.Stream(), torch.npu.Event()
    value.add_(one)
    event.record()
    event.wait(side)
    value.add_(one)
    event.record()
    with torch.npu.stream(side):
        copy.copy_(value)
    side.synchronize()
    with torch.npu.stream(side):
        assert copy.cpu().tolist() == [1] * 4


@emulated()
def test_a_copy_from_pinned_memory_reads_it_when_it_runs():
    host = torch.full((4,), 7.0).pin_memory()
    assert host.is_pinned()
    assert not torch.zeros(4).is_pinned()
    device = host.to("npu", non_blocking=True)
    host.fill_(9)
    assert device.cpu().tolist() == [9] * 4


@emulated()
def test_copy_to_pinned_memory_needs_wait():
    value = ones()
    host = torch.zeros(4, pin_memory=True)
    host.copy_(value, non_blocking=True)
    there = torch.npu.Event()
    there.record()
    assert host.tolist() == [0] * 4
    there.synchronize()
    assert host.tolist() == [1] * 4


@emulated()
def test_a_copy_of_pageable_memory_is_done_when_the_call_returns():
    host = torch.full((4,), 7.0)
    device = host.to("npu", non_blocking=True)
    host.fill_(9)
    assert device.cpu().tolist() == [7] * 4
    back = torch.zeros(4)
    back.copy_(device, non_blocking=True)
    assert back.tolist() == [7] * 4


@emulated()
def test_a_synchronous_copy_waits_for_its_own_stream_alone():
    one, value = ones(), torch.zeros(4, device="npu")
    side = torch.npu.Stream()
    torch.npu.synchronize()
    with torch.npu.stream(side):
        value.add_(one)
    assert value.cpu().tolist() == [0] * 4
    side.synchronize()
    assert value.cpu().tolist() == [1] * 4


@emulated()
def test_a_host_function_runs_at_its_turn():
    import torch_npu  # noqa: F401

    one, value = ones(), torch.zeros(4, device="npu")
    host = torch.zeros(4, pin_memory=True)
    seen: list[float] = []
    value.add_(one)
    host.copy_(value, non_blocking=True)
    torch.npu._launch_host_func_pending(torch.npu.current_stream(), lambda: seen.append(host[0].item()), ())
    assert seen == []
    torch.npu.synchronize()
    assert seen == [1]


@emulated()
def test_external_events_hand_over_between_streams_and_threads():
    import torch_npu  # noqa: F401

    one, value, copy = ones(), torch.zeros(4, device="npu"), torch.zeros(4, device="npu")
    event, side = torch.npu.ExternalEvent(), torch.npu.Stream()
    torch.npu.synchronize()
    event.wait(torch.npu.current_stream())  # before the record, unlike other events
    copy.copy_(value)
    with torch.npu.stream(side):
        value.add_(one)
    event.record(side)
    assert copy.cpu().tolist() == [1] * 4


def program() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(n: int) -> int:
        return int(torch.randint(n, (1,), generator=generator))

    streams = [torch.npu.Stream() for _ in range(3)]
    values = [torch.full((4,), float(i), device="npu") for i in range(5)]
    expected = [torch.full((4,), float(i)) for i in range(5)]
    torch.npu.synchronize()
    touched: list[torch.npu.Event | None] = [None] * 5
    for _ in range(200):
        stream, to = streams[draw(3)], draw(5)
        source = (to + 1 + draw(4)) % 5
        for event in (touched[to], touched[source]):
            if event is not None:
                event.wait(stream)
        with torch.npu.stream(stream):
            values[to].mul_(0.5).add_(values[source])
        done = torch.npu.Event()
        done.record(stream)
        touched[to] = touched[source] = done
        expected[to] = expected[to] * 0.5 + expected[source]
    torch.npu.synchronize()
    for value, wanted in zip(values, expected, strict=True):
        assert torch.equal(value.cpu(), wanted)


@emulated()
def test_a_long_program_gives_the_same_numbers_when_lazy():
    program()


@emulated(depth=8)
def test_a_full_queue_makes_the_host_wait_for_the_oldest():
    one, value = ones(), torch.zeros(4, device="npu")
    torch.npu.synchronize()
    most = 0
    for _ in range(100):
        value.add_(one)
        most = max(most, emulator.pending())
    assert most <= 8
    assert value.cpu().tolist() == [100] * 4


@emulated(order="eager")
def test_a_wait_holds_in_the_eager_order():
    assert all(hand_over(wait=True) == [1] * 4 for _ in range(20))


@emulated(order="eager")
def test_a_long_program_gives_the_same_numbers_when_eager():
    program()


@emulated(order="shuffled", seed=1)
def test_shuffled_order_shows_both_outcomes_of_race():
    assert {tuple(hand_over(wait=False)) for _ in range(60)} == {(0.0,) * 4, (1.0,) * 4}
    assert all(hand_over(wait=True) == [1] * 4 for _ in range(20))


@emulated(order="shuffled", seed=1)
def test_a_long_program_gives_the_same_numbers_when_shuffled():
    program()
