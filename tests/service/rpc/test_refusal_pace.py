from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import pytest

from npuserve.service.rpc.refusal_pace import BURST, MAX_ADDRESSES, MAX_SECONDS, RefusalPace
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import model_pb2
from tests.support.fake_engine import make_folder
from tests.support.front_end import ask, running


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_is_not_delayed_and_what_follows_keeps_the_rate() -> None:
    pace = RefusalPace(100, Clock())
    assert [pace.delay("a") for _ in range(BURST)] == [0.0] * BURST
    assert [pace.delay("a") for _ in range(3)] == pytest.approx([0.01, 0.02, 0.03])


def test_addresses_do_not_delay_each_other() -> None:
    pace = RefusalPace(100, Clock())
    for _ in range(BURST + 50):
        pace.delay("a")
    assert pace.delay("b") == 0.0


def test_time_without_refusals_is_given_back() -> None:
    clock = Clock()
    pace = RefusalPace(100, clock)
    for _ in range(BURST + 50):
        pace.delay("a")
    clock.now += 0.5
    assert pace.delay("a") == pytest.approx(0.01)
    clock.now += 100
    assert [pace.delay("a") for _ in range(BURST)] == [0.0] * BURST
    assert pace.delay("a") > 0


def test_the_delay_is_bounded_and_so_is_what_it_takes_to_forget() -> None:
    clock = Clock()
    pace = RefusalPace(100, clock)
    for _ in range(10 * BURST):
        longest = pace.delay("a")
    assert longest == MAX_SECONDS
    clock.now += MAX_SECONDS + BURST / 100
    assert pace.delay("a") == 0.0


def test_no_limit() -> None:
    pace = RefusalPace(0, Clock())
    assert not any(pace.delay("a") for _ in range(10 * BURST))


def test_few_addresses_are_remembered() -> None:
    pace = RefusalPace(1, Clock())
    for number in range(2 * MAX_ADDRESSES):
        pace.delay(str(number))
    assert len(pace._due) == MAX_ADDRESSES


async def test_a_flood_of_refused_calls_is_paced_and_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("")
    folder = make_folder(tmp_path / "counting")
    async with running(folder, api_keys=str(tmp_path / "keys"), max_refusals_per_second=20) as server:
        began = time.monotonic()
        flood = [asyncio.ensure_future(server.inference.GetLoad(model_pb2.GetLoadRequest()).code())
                 for _ in range(BURST + 10)]
        assert {await one for one in flood} == {grpc.StatusCode.UNAUTHENTICATED}
        assert time.monotonic() - began >= 10 / 20
    async with running(folder, max_refusals_per_second=1) as server:
        invalid = pb.GenerateRequest()
        flood = [server.inference.Generate(invalid) for _ in range(BURST + 20)]
        assert await flood[0].code() is grpc.StatusCode.INVALID_ARGUMENT
        for _ in range(10):
            assert (await server.inference.Generate(ask("a", 2))).text
        assert not all(call.done() for call in flood)
        for call in flood:
            call.cancel()
