"""How many messages are read at a time, the clients' turns, and slow messages. Reads end on demand."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from npuserve.service.errors import QueueFull
from npuserve.service.requests import reader as request_reader
from npuserve.service.requests.reader import RequestReader
from tests.support.fake_engine import make_folder, until
from tests.support.front_end import ask, running

LARGEST = 4 << 20


class Call:
    """A call whose message arrives when `arrive` is called. begun: names of the calls whose read began."""

    def __init__(self, name: str, begun: list[str]):
        self._name = name
        self._begun = begun
        self._message: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def read(self) -> Any:
        self._begun.append(self._name)
        return await self._message

    def arrive(self, data: object = b"x") -> None:
        self._message.set_result(data)


class House:
    def __init__(self) -> None:
        self.reader = RequestReader(LARGEST)
        self.begun: list[str] = []

    def call(self, owner: str, name: str) -> tuple[Call, asyncio.Task[bytes | None]]:
        call = Call(name, self.begun)
        return call, asyncio.ensure_future(self.reader.read(call, owner))  # type: ignore[arg-type]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No read is slow."""
    monkeypatch.setattr(request_reader, "QUICK_SECONDS", 60.0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read that is not done at once is slow."""
    monkeypatch.setattr(request_reader, "QUICK_SECONDS", 0.0)


@pytest.mark.usefixtures("patient")
async def test_few_are_read_at_a_time_and_the_clients_take_turns() -> None:
    house = House()
    quick = request_reader.QUICK_BYTES // LARGEST
    flood = [house.call("flood", f"flood {n}") for n in range(quick + 3)]
    await until(lambda: len(house.begun) == quick)
    one = house.call("one", "one")
    await asyncio.sleep(0)
    assert len(house.begun) == quick
    for call, _ in [*flood, one]:
        call.arrive()
    assert await asyncio.gather(*(task for _, task in [*flood, one])) == [b"x"] * (quick + 4)
    assert house.begun.index("one") < house.begun.index(f"flood {quick + 1}")
    assert (house.reader._quick, house.reader._waiting, house.reader._slow) == (quick, {}, {})


@pytest.mark.usefixtures("patient")
async def test_small_messages_do_not_wait_for_clients_with_large_ones() -> None:
    house = House()
    call, task = house.call("flood", "first")
    call.arrive(bytes(request_reader.HEAVY_BYTES + 1))
    await task
    quick = request_reader.QUICK_BYTES // LARGEST
    flood = [house.call("flood", f"flood {n}") for n in range(quick + 1)]
    await until(lambda: len(house.begun) == 1 + quick - 1)
    one, task = house.call("one", "one")
    one.arrive()
    assert await task == b"x"
    assert len(house.begun) == quick + 1
    for call, _ in flood:
        call.arrive()
    await asyncio.gather(*(task for _, task in flood))
    assert (house.reader._quick, house.reader._waiting) == (quick, {})


@pytest.mark.usefixtures("patient")
async def test_cancelled_calls_leave_no_trace() -> None:
    house = House()
    quick = request_reader.QUICK_BYTES // LARGEST
    calls = [house.call("one", f"{n}") for n in range(quick + 2)]
    await until(lambda: len(house.begun) == quick)
    for _, task in calls:
        task.cancel()
    await asyncio.gather(*(task for _, task in calls), return_exceptions=True)
    assert (house.reader._quick, house.reader._waiting, house.reader._slow) == (quick, {}, {})
    call, task = house.call("two", "two")
    call.arrive(grpc.aio.EOF)
    assert await task is None


@pytest.mark.usefixtures("impatient")
async def test_slow_reads_hold_nobody_up_and_are_bounded() -> None:
    """The newest one of the client with the most is ended."""
    house = House()
    most = request_reader.SLOW_BYTES // LARGEST
    slow = [house.call("flood", f"flood {n}") for n in range(most)]
    await until(lambda: len(house.reader._slow) == most)
    one = house.call("one", "one")
    await until(lambda: slow[-1][1].done())
    with pytest.raises(QueueFull, match="displaced"):
        await slow[-1][1]
    one[0].arrive()
    assert await one[1] == b"x"
    for call, _ in slow[:-1]:
        call.arrive()
    assert await asyncio.gather(*(task for _, task in slow[:-1])) == [b"x"] * (most - 1)
    assert (house.reader._slow, house.reader._displaced) == ({}, set())


@pytest.mark.usefixtures("impatient")
async def test_a_message_that_does_not_arrive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_reader, "SLOW_SECONDS", 0.01)
    house = House()
    with pytest.raises(QueueFull, match="timeout"):
        await house.call("one", "one")[1]
    assert house.reader._slow == {}


@pytest.mark.usefixtures("patient")
async def test_the_calls_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_reader, "MAX_WAITING", 4)
    house = House()
    quick = request_reader.QUICK_BYTES // LARGEST
    calls = [house.call("flood", f"flood {n}") for n in range(quick + 3)]
    with pytest.raises(QueueFull, match="queue full"):
        await calls[-1][1]
    for call, _ in calls[:-1]:
        call.arrive()
    await asyncio.gather(*(task for _, task in calls[:-1]))


GENERATE = "/npuserve.v1.InferenceService/Generate"


async def test_calls_whose_message_does_not_arrive_end_over_the_wire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that sends headers alone, and one that ends its side without a message; others are served."""
    monkeypatch.setattr(request_reader, "SLOW_SECONDS", 0.2)
    async with running(make_folder(tmp_path / "m")) as server:
        silent = server.channel.stream_unary(GENERATE)()
        assert (await server.inference.Generate(ask("ab", 3))).text == "cde"
        assert await silent.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "timeout: the message must arrive within 0.2 s" in await silent.details()
        empty = server.channel.stream_unary(GENERATE)()
        await empty.done_writing()
        assert await empty.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await empty.details() == "the call has no message"
        assert (await server.inference.Generate(ask("ab", 3))).text == "cde"
