"""Throttle of refusals: its delays, and its effect on calls over a real gRPC server."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from npuserve.service.errors import InvalidField, MessageTooLarge, QueueFull, ServeError
from npuserve.service.rpc.call import DelayedRefusal, call, refusal_throttle, refuse_after_delay
from npuserve.service.rpc.refusal_throttle import (
    BURST,
    MAX_ADDRESSES,
    MAX_SECONDS,
    MAX_WORK_SHARE,
    RefusalThrottle,
    add_work,
)
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import model_pb2
from tests.support.fake_engine import make_folder
from tests.support.front_end import ask, running


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_refusal_throttle_after_burst_delays_at_rate() -> None:
    throttle = RefusalThrottle(100, Clock())
    assert [throttle.delay("a") for _ in range(BURST)] == [0.0] * BURST
    assert [throttle.delay("a") for _ in range(3)] == pytest.approx([0.01, 0.02, 0.03])


def test_refusal_throttle_work_is_limited_to_its_share() -> None:
    throttle = RefusalThrottle(100, Clock())
    work = 10 * MAX_WORK_SHARE / 100  # as much as 10 refusals of the sustained rate
    assert [throttle.delay("a", work) for _ in range(BURST // 10)] == pytest.approx([0.0] * (BURST // 10), abs=1e-9)
    assert [throttle.delay("a", work) for _ in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    assert throttle.delay("b") == 0.0


def test_refusal_throttle_without_rate_delays_nothing() -> None:
    throttle = RefusalThrottle(0, Clock())
    assert not any(throttle.delay("a", work=1.0) for _ in range(2 * BURST))


def test_refusal_throttle_addresses_are_independent() -> None:
    throttle = RefusalThrottle(100, Clock())
    for _ in range(BURST + 50):
        throttle.delay("a")
    assert throttle.delay("b") == 0.0


def test_refusal_throttle_idle_time_restores_burst() -> None:
    clock = Clock()
    throttle = RefusalThrottle(100, clock)
    for _ in range(BURST + 50):
        throttle.delay("a")
    clock.now += 0.5
    assert throttle.delay("a") == pytest.approx(0.01)
    clock.now += 100
    assert [throttle.delay("a") for _ in range(BURST)] == [0.0] * BURST
    assert throttle.delay("a") > 0


def test_refusal_throttle_delay_and_recovery_are_bounded() -> None:
    clock = Clock()
    throttle = RefusalThrottle(100, clock)
    for _ in range(10 * BURST):
        longest = throttle.delay("a")
    assert longest == MAX_SECONDS
    clock.now += MAX_SECONDS + BURST / 100
    assert throttle.delay("a") == 0.0


def test_refusal_throttle_rate_zero_never_delays() -> None:
    throttle = RefusalThrottle(0, Clock())
    assert not any(throttle.delay("a") for _ in range(10 * BURST))


def test_refusal_throttle_addresses_are_bounded() -> None:
    throttle = RefusalThrottle(1, Clock())
    for number in range(2 * MAX_ADDRESSES):
        throttle.delay(str(number))
    assert [*throttle._due] == [str(number) for number in range(MAX_ADDRESSES, 2 * MAX_ADDRESSES)]


class Request:
    """Request of which a weak reference is taken."""


class Context:
    """Context of a call that keeps the details of its status, and whether the call's request was freed before it."""

    def __init__(self) -> None:
        self.request: Callable[[], object] = lambda: None
        self.ended: tuple[object, bool] | None = None

    def peer(self) -> str:
        return "ipv4:10.0.0.7:1"

    def time_remaining(self) -> None:
        return None

    def trailing_metadata(self) -> None:
        return None

    async def abort(self, code: object, details: str, metadata: object) -> None:
        self.ended = details, self.request() is None


@pytest.mark.parametrize(("error", "is_delayed"), [
    (InvalidField("n", "wrong"), True), (MessageTooLarge("wrong"), True), (QueueFull("wrong"), False)])
async def test_refusal_throttle_delays_errors_of_the_client(error: ServeError, is_delayed: bool) -> None:
    """A delayed call frees its request at once."""
    throttle, context = RefusalThrottle(1, Clock()), Context()
    for _ in range(BURST):
        throttle.delay("ipv4:10.0.0.7")
    refusal_throttle.set(throttle)

    async def handle() -> None:
        request = Request()
        context.request = weakref.ref(request)
        async with call(context, "Generate"):  # type: ignore[arg-type]
            raise error

    try:
        await handle()
    except DelayedRefusal as delayed:
        refusal = delayed
        refusal.seconds = 0.0
    if is_delayed:
        assert context.ended is None
        await refuse_after_delay(context, refusal)  # type: ignore[arg-type]
    assert context.ended
    assert context.ended[0].endswith("wrong")  # type: ignore[attr-defined]
    assert context.ended[1] or not is_delayed


async def test_refusal_throttle_counts_all_work_of_a_call() -> None:
    refusal_throttle.set(RefusalThrottle(100, Clock()))
    add_work(2 * MAX_WORK_SHARE)
    add_work(MAX_WORK_SHARE)
    with pytest.raises(DelayedRefusal) as delayed:
        async with call(Context(), "Generate"):  # type: ignore[arg-type]
            raise InvalidField("n", "wrong")
    assert delayed.value.seconds == pytest.approx(3 - BURST / 100)


@pytest.mark.slow
async def test_refusal_throttle_flood_delays_refusals_only(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("")
    folder = make_folder(tmp_path / "counting")
    async with running(folder, api_keys=str(tmp_path / "keys"), max_refusals_per_second=20) as server:
        began = time.monotonic()
        flood = [asyncio.ensure_future(server.inference.GetLoad(model_pb2.GetLoadRequest()).code())
                 for _ in range(BURST + 10)]
        assert {await one for one in flood} == {grpc.StatusCode.UNAUTHENTICATED}
        assert time.monotonic() - began >= 10 / 20
    async with running(folder, max_refusals_per_second=1) as server:
        invalid, began = pb.GenerateRequest(), time.monotonic()
        flood = [server.inference.Generate(invalid) for _ in range(BURST + 20)]
        assert await flood[0].code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await server.inference.Generate(ask("a", 2))).text
        # The last ones wait for MAX_SECONDS, unless the machine stood still for as long.
        assert not all(call.done() for call in flood) or time.monotonic() - began >= MAX_SECONDS
        for call in flood:
            call.cancel()
