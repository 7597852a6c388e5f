"""Thread pool for work before the engine: fairness, limits, cancellation. Jobs end when the test releases them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import pytest
from prometheus_client import REGISTRY

from npuserve.service.errors import QueueFull, Unavailable
from npuserve.service.requests import preparation
from npuserve.service.requests.preparation import MAX_LARGE_LANE_BYTES, MAX_SMALL_JOB_BYTES, Kind, Preparation
from npuserve.service.rpc.refusal_throttle import work_seconds
from tests.support.fake_engine import until

LARGE = MAX_SMALL_JOB_BYTES + 1


class Gate:
    """Jobs that block until they are released. order: names of the jobs in the order of their start."""

    def __init__(self, pool: Preparation) -> None:
        self.pool = pool
        self.order: list[str] = []
        self.released = threading.Event()

    def submit(self, owner: str, name: str, size: int = LARGE, kind: Kind = "tokenize") -> asyncio.Task[str]:
        def work() -> str:
            self.order.append(name)
            assert self.released.wait(60)
            return name

        return asyncio.ensure_future(self.pool.run(owner, kind, size, work))


@pytest.fixture
async def gate(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gate]:
    """A pool with one thread for large work, which runs a job of the caller "busy"."""
    monkeypatch.setattr(preparation.os, "cpu_count", lambda: 1)
    pool = Preparation(8)
    gate = Gate(pool)
    first = gate.submit("busy", "first")
    await until(lambda: gate.order == ["first"])
    yield gate
    gate.released.set()
    assert await first == "first"
    await until(lambda: not pool.count)
    for lane in (pool._small, pool._large):
        assert [bool(part) for part in (lane._waiting, lane._outside, lane._running)] == [False] * 3
    pool.close()


def rejections(why: str) -> float:
    labels = {"kind": "tokenize", "why": why}
    return REGISTRY.get_sample_value("npuserve_preparation_rejections_total", labels) or 0.0


async def test_run_is_round_robin_over_the_callers(gate: Gate) -> None:
    flood = [gate.submit("flood", f"flood {n}") for n in range(3)]
    await asyncio.sleep(0)
    others = [gate.submit("one", "one"), gate.submit("two", "two")]
    await asyncio.sleep(0)
    assert gate.pool.count == 6
    gate.released.set()
    await asyncio.gather(*flood, *others)
    assert gate.order == ["first", "flood 0", "one", "two", "flood 1", "flood 2"]


async def test_small_work_does_not_wait_for_large_work(gate: Gate) -> None:
    large = gate.submit("flood", "large")
    assert await gate.pool.run("one", "tokenize", 1, lambda: "small") == "small"
    assert gate.order == ["first"]
    gate.released.set()
    await large


async def test_run_leaves_a_thread_of_small_work_to_other_callers(gate: Gate) -> None:
    """Another caller's work is done even while the first caller's work never ends."""
    mine = [gate.submit("mine", f"mine {n}", size=1) for n in range(2)]
    await until(lambda: gate.order == ["first", "mine 0"])
    assert await gate.pool.run("yours", "tokenize", 1, lambda: "yours") == "yours"
    assert gate.order == ["first", "mine 0"]
    gate.released.set()
    await asyncio.gather(*mine)


async def test_run_that_is_cancelled_leaves_the_queue_at_once(gate: Gate) -> None:
    waiting = [gate.submit("one", "one"), gate.submit("one", "two")]
    await asyncio.sleep(0)
    waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    assert gate.pool.count == 2
    gate.released.set()
    await waiting[1]
    assert gate.order == ["first", "two"]


async def test_run_above_half_of_the_queue_is_refused(gate: Gate) -> None:
    before = rejections("client_limit")
    calls = [gate.submit("flood", f"flood {n}") for n in range(5)]
    with pytest.raises(QueueFull, match="max_preparing") as refused:
        await calls[4]
    assert refused.value.why == "client_limit"
    assert rejections("client_limit") == before + 1
    gate.released.set()
    await asyncio.gather(*calls[:4])


async def test_run_above_half_of_the_bytes_is_refused(gate: Gate) -> None:
    calls = [gate.submit("flood", f"flood {n}", MAX_LARGE_LANE_BYTES // 4 + 1) for n in range(2)]
    with pytest.raises(QueueFull) as refused:
        await calls[1]
    assert refused.value.why == "client_limit"
    gate.released.set()
    await calls[0]


async def test_run_of_one_job_may_exceed_the_bytes_until_others_wait(gate: Gate) -> None:
    huge = gate.submit("one", "huge", 2 * MAX_LARGE_LANE_BYTES)
    await asyncio.sleep(0)
    assert gate.pool.count == 2
    other = gate.submit("two", "other")
    with pytest.raises(QueueFull, match="displaced"):
        await huge
    gate.released.set()
    assert await other == "other"


async def test_run_above_the_bytes_of_all_callers_is_refused(gate: Gate) -> None:
    size = MAX_LARGE_LANE_BYTES // 5 * 2
    calls = [gate.submit(owner, owner, size) for owner in "abc"]
    with pytest.raises(QueueFull, match="queue full: 2 requests") as refused:
        await calls[2]
    assert refused.value.why == "queue_full"
    gate.released.set()
    await asyncio.gather(*calls[:2])


@pytest.mark.parametrize(("size", "places"), [(LARGE, 4), (MAX_LARGE_LANE_BYTES // 4, 2)])
async def test_parsing_leaves_half_of_the_queue_to_others(gate: Gate, size: int, places: int) -> None:
    """Messages wait outside of the queue, of whose 8 places and bytes they fill half. None is refused."""
    parsing = [gate.submit(f"caller {i}", f"message {i}", size, "parse") for i in range(7)]
    lane = gate.pool._large
    await until(lambda: gate.pool.count == 8)
    assert lane._waiting.shares.total_items == places
    later = gate.submit("later", "text")
    await until(lambda: lane._waiting.shares.total_items == places + 1)
    gate.released.set()
    await asyncio.gather(later, *parsing)
    assert gate.order[:1 + places + 1] == ["first", *(f"message {i}" for i in range(places)), "text"]


async def test_run_with_the_smallest_queue_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation.os, "cpu_count", lambda: 1)
    gate = Gate(Preparation(1))
    calls = [gate.submit("one", "first"), gate.submit("one", "second")]
    await until(lambda: gate.order == ["first"])
    assert gate.pool.count == 2
    gate.released.set()
    assert await asyncio.gather(*calls) == ["first", "second"]
    gate.pool.close()


async def test_run_in_a_full_queue_displaces_a_job_of_the_largest_caller(gate: Gate) -> None:
    before = rejections("displaced"), rejections("queue_full")
    floods = [gate.submit(owner, f"{owner} {n}") for owner in ("a", "b") for n in range(4)]
    await asyncio.sleep(0)
    one = gate.submit("one", "one")
    await until(lambda: any(task.done() for task in floods))
    (displaced,) = [task for task in floods if task.done()]
    with pytest.raises(QueueFull, match="displaced"):
        await displaced
    floods.remove(displaced)
    more = [gate.submit("one", f"one {n}") for n in range(2)]  # the second one would give it as many as the others
    with pytest.raises(QueueFull, match="queue full"):
        await more[1]
    assert (rejections("displaced"), rejections("queue_full")) == (before[0] + 2, before[1] + 1)
    gate.released.set()
    results = await asyncio.gather(*floods, one, more[0], return_exceptions=True)
    assert sum(isinstance(end, str) for end in results) == 8


async def test_run_in_a_full_queue_takes_the_place_of_a_cancelled_call(gate: Gate) -> None:
    before = rejections("displaced")
    floods = [gate.submit(owner, f"{owner} {n}") for owner in ("a", "b") for n in range(4)]
    await asyncio.sleep(0)
    for n in range(4):
        floods[n].cancel()
        floods[n + 4].cancel()
    one = gate.submit("one", "one")  # it runs before the cancelled calls do
    gate.released.set()
    assert await one == "one"
    ends = await asyncio.gather(*floods, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)
    assert rejections("displaced") == before
    assert gate.order == ["first", "one"]


async def test_run_that_waits_too_long_is_refused(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "MAX_WAIT_SECONDS", 0.01)
    with pytest.raises(QueueFull, match="timeout"):
        await gate.submit("one", "one")
    assert gate.order == ["first"]
    assert gate.pool.count == 1


async def test_give_up_ends_waiting_and_running_calls() -> None:
    pool = Preparation(8)
    gate = Gate(pool)
    calls = [gate.submit("one", f"{n}") for n in range(5)]
    await until(lambda: bool(gate.order))
    pool.fail_all(Unavailable("the server leaves"))
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(end, Unavailable) for end in ends)
    assert len(set(ends)) == len(calls)  # each call has an error of its own
    assert pool.count == 0
    gate.released.set()
    pool.close()


async def test_run_adds_the_cpu_time_of_the_thread_to_the_call() -> None:
    preparation = Preparation(4)

    def work() -> None:
        began = time.thread_time()
        while time.thread_time() - began < 0.02:
            pass

    await preparation.run("a", "parse", 1, work)
    assert work_seconds.get() >= 0.02
    preparation.close()


async def test_run_of_a_function_that_panics_raises_an_exception(gate: Gate) -> None:
    """A panic of a library in Rust is a BaseException, which would end neither the handler's task nor the call."""
    class PanicException(BaseException):
        pass

    def work() -> None:
        raise PanicException("an index is out of bounds")

    with pytest.raises(RuntimeError, match="a library panicked") as raised:
        await gate.pool.run("other", "tokenize", 1, work)
    assert isinstance(raised.value.__cause__, PanicException)


async def test_run_raises_the_error_of_the_function(gate: Gate) -> None:
    def fail() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match=r"^x$"):
        await gate.pool.run("one", "parse", 1, fail)


async def test_run_without_a_further_thread_is_refused_and_the_next_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, ran = Preparation(8), list[str]()
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", raise_no_thread)
        for _ in range(3):
            with pytest.raises(Unavailable, match="cannot start a thread"):
                await pool.run("one", "tokenize", 1, ran.append, "refused")
    await asyncio.gather(*(pool.run("one", "tokenize", 1, ran.append, "served") for _ in range(3)))
    assert ran == ["served"] * 3
    pool.close()


def raise_no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
