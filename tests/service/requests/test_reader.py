"""Reader of messages: concurrent reads, fairness between clients, slow messages. Reads end on demand."""

from __future__ import annotations

import asyncio
import time
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
    """A call whose message arrives when `arrive` is called. started: names of the calls whose read has started."""

    def __init__(self, name: str, started: list[str]):
        self._name = name
        self._started = started
        self._message: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def read(self) -> Any:
        self._started.append(self._name)
        return await self._message

    def arrive(self, data: object = b"x") -> None:
        self._message.set_result(data)


class Readers:
    """A reader and its calls. started: names of the calls whose read has started, in order."""

    def __init__(self) -> None:
        self.reader = RequestReader(LARGEST)
        self.started: list[str] = []

    def call(self, owner: str, name: str) -> tuple[Call, asyncio.Task[bytes | None]]:
        call = Call(name, self.started)
        return call, asyncio.ensure_future(self.reader.read(call, owner))  # type: ignore[arg-type]


@pytest.fixture
def no_slow_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no read become a slow one."""
    monkeypatch.setattr(request_reader, "MAX_QUICK_SECONDS", 60.0)


@pytest.fixture
def only_slow_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every read that is not done at once become a slow one."""
    monkeypatch.setattr(request_reader, "MAX_QUICK_SECONDS", 0.0)


@pytest.mark.usefixtures("no_slow_reads")
async def test_read_is_bounded_and_round_robin_over_the_clients() -> None:
    readers = Readers()
    slots = request_reader.MAX_QUICK_BYTES // LARGEST
    flood = [readers.call("flood", f"flood {n}") for n in range(slots + 3)]
    await until(lambda: len(readers.started) == slots)
    one = readers.call("one", "one")
    await asyncio.sleep(0)
    assert len(readers.started) == slots
    for call, _ in [*flood, one]:
        call.arrive()
    assert await asyncio.gather(*(task for _, task in [*flood, one])) == [b"x"] * (slots + 4)
    assert readers.started.index("one") < readers.started.index(f"flood {slots + 1}")
    assert (readers.reader._free_slots, readers.reader._waiting, readers.reader._slow) == (slots, {}, {})


@pytest.mark.usefixtures("no_slow_reads")
async def test_read_of_a_small_message_does_not_wait_for_heavy_clients() -> None:
    readers = Readers()
    call, task = readers.call("flood", "first")
    call.arrive(bytes(request_reader.MIN_HEAVY_BYTES + 1))
    await task
    slots = request_reader.MAX_QUICK_BYTES // LARGEST
    flood = [readers.call("flood", f"flood {n}") for n in range(slots + 1)]
    await until(lambda: len(readers.started) == 1 + slots - 1)
    one, task = readers.call("one", "one")
    one.arrive()
    assert await task == b"x"
    assert len(readers.started) == slots + 1
    for call, _ in flood:
        call.arrive()
    await asyncio.gather(*(task for _, task in flood))
    assert (readers.reader._free_slots, readers.reader._waiting) == (slots, {})


@pytest.mark.usefixtures("no_slow_reads")
async def test_read_that_is_cancelled_releases_its_slot() -> None:
    readers = Readers()
    slots = request_reader.MAX_QUICK_BYTES // LARGEST
    calls = [readers.call("one", f"{n}") for n in range(slots + 2)]
    await until(lambda: len(readers.started) == slots)
    for _, task in calls:
        task.cancel()
    await asyncio.gather(*(task for _, task in calls), return_exceptions=True)
    assert (readers.reader._free_slots, readers.reader._waiting, readers.reader._slow) == (slots, {}, {})
    call, task = readers.call("two", "two")
    call.arrive(grpc.aio.EOF)
    assert await task is None


@pytest.mark.usefixtures("only_slow_reads")
async def test_read_of_slow_messages_is_bounded() -> None:
    """The newest slow read of the client with the most is ended."""
    readers = Readers()
    most = request_reader.MAX_SLOW_BYTES // LARGEST
    slow = [readers.call("flood", f"flood {n}") for n in range(most)]
    await until(lambda: len(readers.reader._slow) == most)
    one = readers.call("one", "one")
    await until(lambda: slow[-1][1].done())
    with pytest.raises(QueueFull, match="displaced"):
        await slow[-1][1]
    one[0].arrive()
    assert await one[1] == b"x"
    for call, _ in slow[:-1]:
        call.arrive()
    assert await asyncio.gather(*(task for _, task in slow[:-1])) == [b"x"] * (most - 1)
    assert readers.reader._slow == {}


@pytest.mark.usefixtures("only_slow_reads")
async def test_read_of_slow_messages_that_begin_at_once_is_bounded() -> None:
    readers = Readers()
    readers.reader._free_slots, readers.reader._max_slow = 5, 2
    calls = [readers.call(f"client {n}", "a") for n in range(5)]
    await until(lambda: sum(task.done() for _, task in calls) == 3)
    for call, task in calls:
        if task.done():
            assert "displaced" in str(task.exception())
        else:
            call.arrive()
            assert await task == b"x"


async def test_read_after_a_stall_of_the_loop_is_not_slow() -> None:
    """The messages arrived during the stall, and their arrival is noticed after the time limit."""
    readers = Readers()
    readers.reader._max_slow = 1
    calls = [readers.call("client", name) for name in "ab"]
    await until(lambda: len(readers.started) == 2)
    time.sleep(2 * request_reader.MAX_QUICK_SECONDS)  # noqa: ASYNC251  stalls the loop
    for call, _ in calls:
        asyncio.get_running_loop().call_later(0.005, call.arrive)
    assert await asyncio.gather(*(task for _, task in calls)) == [b"x", b"x"]


@pytest.mark.usefixtures("only_slow_reads")
async def test_read_above_the_limit_of_slow_reads_displaces_a_heavy_client_among_equals() -> None:
    readers = Readers()
    readers.reader._max_slow = 1
    readers.reader._heavy["heavy"] = None
    light, light_task = readers.call("light", "a")
    await until(lambda: len(readers.reader._slow) == 1)
    _, heavy_task = readers.call("heavy", "b")
    with pytest.raises(QueueFull, match="displaced"):
        await heavy_task
    light.arrive()
    assert await light_task == b"x"


@pytest.mark.usefixtures("only_slow_reads")
async def test_read_of_a_missing_message_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_reader, "MAX_SLOW_SECONDS", 0.01)
    readers = Readers()
    with pytest.raises(QueueFull, match="timeout"):
        await readers.call("one", "one")[1]
    assert readers.reader._slow == {}


@pytest.mark.usefixtures("no_slow_reads")
async def test_read_with_too_many_waiting_calls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_reader, "MAX_WAITING_CALLS", 4)
    readers = Readers()
    slots = request_reader.MAX_QUICK_BYTES // LARGEST
    calls = [readers.call("flood", f"flood {n}") for n in range(slots + 3)]
    with pytest.raises(QueueFull, match="queue full"):
        await calls[-1][1]
    for call, _ in calls[:-1]:
        call.arrive()
    await asyncio.gather(*(task for _, task in calls[:-1]))


GENERATE = "/npuserve.v1.InferenceService/Generate"


async def test_generate_without_a_message_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client sends only headers, another one half-closes without a message; other clients are served."""
    monkeypatch.setattr(request_reader, "MAX_SLOW_SECONDS", 0.2)
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
