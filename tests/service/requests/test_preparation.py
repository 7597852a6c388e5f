"""The pool of work before the engine: turns, limits, cancels. Jobs end when the test says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from prometheus_client import REGISTRY

from npuserve.service.errors import QueueFull, Unavailable
from npuserve.service.requests import preparation
from npuserve.service.requests.preparation import LARGE_LANE_BYTES, SMALL_JOB_BYTES, Preparation
from tests.support.fake_engine import until

LARGE = SMALL_JOB_BYTES + 1


class Gate:
    """Work that waits until it is released. order: names in the order in which their work began."""

    def __init__(self, pool: Preparation) -> None:
        self.pool = pool
        self.order: list[str] = []
        self.free = threading.Event()

    def submit(self, owner: str, name: str, size: int = LARGE) -> asyncio.Task[str]:
        def work() -> str:
            self.order.append(name)
            assert self.free.wait(60)
            return name

        return asyncio.ensure_future(self.pool.run(owner, "tokenize", size, work))


@pytest.fixture
async def gate(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gate]:
    """One thread for large work; it is busy with a job of "busy"."""
    monkeypatch.setattr(preparation.os, "cpu_count", lambda: 1)
    pool = Preparation(8)
    gate = Gate(pool)
    first = gate.submit("busy", "first")
    await until(lambda: gate.order == ["first"])
    yield gate
    gate.free.set()
    assert await first == "first"
    await until(lambda: not pool.count)
    pool.close()


def rejections(why: str) -> float:
    labels = {"kind": "tokenize", "why": why}
    return REGISTRY.get_sample_value("npuserve_preparation_rejections_total", labels) or 0.0


async def test_callers_take_turns_whatever_each_has_waiting(gate: Gate) -> None:
    flood = [gate.submit("flood", f"flood {n}") for n in range(3)]
    await asyncio.sleep(0)
    others = [gate.submit("one", "one"), gate.submit("two", "two")]
    await asyncio.sleep(0)
    assert gate.pool.count == 6
    gate.free.set()
    await asyncio.gather(*flood, *others)
    assert gate.order == ["first", "flood 0", "one", "two", "flood 1", "flood 2"]


async def test_small_work_does_not_wait_for_large_work(gate: Gate) -> None:
    large = gate.submit("flood", "large")
    assert await gate.pool.run("one", "tokenize", 1, lambda: "small") == "small"
    assert gate.order == ["first"]
    gate.free.set()
    await large


async def test_one_caller_does_not_take_both_threads_of_small_work(gate: Gate) -> None:
    """Even if its work never ends, another caller's is done."""
    mine = [gate.submit("mine", f"mine {n}", size=1) for n in range(2)]
    await until(lambda: gate.order == ["first", "mine 0"])
    assert await gate.pool.run("yours", "tokenize", 1, lambda: "yours") == "yours"
    assert gate.order == ["first", "mine 0"]
    gate.free.set()
    await asyncio.gather(*mine)


async def test_a_cancelled_call_leaves_the_queue_at_once(gate: Gate) -> None:
    waiting = [gate.submit("one", "one"), gate.submit("one", "two")]
    await asyncio.sleep(0)
    waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    assert gate.pool.count == 2
    gate.free.set()
    await waiting[1]
    assert gate.order == ["first", "two"]


async def test_a_caller_may_have_half_of_the_queue(gate: Gate) -> None:
    before = rejections("client_limit")
    calls = [gate.submit("flood", f"flood {n}") for n in range(5)]
    with pytest.raises(QueueFull, match="max_preparing") as refused:
        await calls[4]
    assert refused.value.why == "client_limit"
    assert rejections("client_limit") == before + 1
    gate.free.set()
    await asyncio.gather(*calls[:4])


async def test_a_caller_may_have_half_of_the_bytes(gate: Gate) -> None:
    calls = [gate.submit("flood", f"flood {n}", LARGE_LANE_BYTES // 4 + 1) for n in range(2)]
    with pytest.raises(QueueFull) as refused:
        await calls[1]
    assert refused.value.why == "client_limit"
    gate.free.set()
    await calls[0]


async def test_a_full_queue_makes_room_for_who_has_fewer(gate: Gate) -> None:
    before = rejections("displaced"), rejections("queue_full")
    floods = [gate.submit(owner, f"{owner} {n}") for owner in ("a", "b") for n in range(4)]
    await asyncio.sleep(0)
    one = gate.submit("one", "one")
    await until(lambda: any(task.done() for task in floods))
    (displaced,) = [task for task in floods if task.done()]
    with pytest.raises(QueueFull, match="displaced"):
        await displaced
    floods.remove(displaced)
    more = [gate.submit("one", f"one {n}") for n in range(2)]  # until it has as many as the others
    with pytest.raises(QueueFull, match="queue full"):
        await more[1]
    assert (rejections("displaced"), rejections("queue_full")) == (before[0] + 2, before[1] + 1)
    gate.free.set()
    ended = await asyncio.gather(*floods, one, more[0], return_exceptions=True)
    assert sum(isinstance(end, str) for end in ended) == 8


async def test_work_that_waits_too_long_is_refused(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "MAX_WAIT_SECONDS", 0.01)
    with pytest.raises(QueueFull, match="timeout"):
        await gate.submit("one", "one")
    assert gate.order == ["first"]
    assert gate.pool.count == 1


async def test_give_up_ends_what_waits_and_what_runs() -> None:
    pool = Preparation(8)
    gate = Gate(pool)
    calls = [gate.submit("one", f"{n}") for n in range(5)]
    await until(lambda: bool(gate.order))
    pool.give_up(Unavailable("the server leaves"))
    for end in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(end, Unavailable)
    assert pool.count == 0
    gate.free.set()
    pool.close()


async def test_errors_of_the_work_are_the_calls(gate: Gate) -> None:
    def fail() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match=r"^x$"):
        await gate.pool.run("one", "parse", 1, fail)
