"""Reader of messages: memory of incomplete messages, fairness between clients. Messages arrive on demand."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from npuserve.service.errors import QueueFull
from npuserve.service.requests import reader as request_reader
from npuserve.service.requests.reader import RequestReader
from npuserve.service.rpc import incomplete_messages
from npuserve.service.rpc.connections import SocketTable
from tests.support.fake_engine import make_folder, until
from tests.support.fake_sockets import FakeSockets
from tests.support.front_end import ask, running

MIB = 1 << 20
LARGEST = 12 * MIB
LIMIT = 48 * MIB
FRESH_READS = 7
"""Reads of new clients that begin before the first measurement: 7/8 of LIMIT in parts of LIMIT / MAX_FRESH_READS."""


class Call:
    """A call whose message arrives when `arrive` is called, on a connection of its owner.

    started: names of the calls whose read has started.
    """

    def __init__(self, owner: str, name: str, started: list[str]):
        self._owner = owner
        self._name = name
        self._started = started
        self._message: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def peer(self) -> str:
        return self._owner

    async def read(self) -> Any:
        self._started.append(self._name)
        return await self._message

    def arrive(self, data: object = b"x") -> None:
        self._message.set_result(data)


class Readers:
    """A reader, its connections and its calls. started: names of the calls whose read has started, in order."""

    def __init__(self, sockets: FakeSockets | SocketTable | None = None) -> None:
        self.sockets = FakeSockets()
        self.reader = RequestReader(sockets or self.sockets, LARGEST)  # type: ignore[arg-type]
        self.started: list[str] = []

    def call(self, owner: str, name: str = "") -> tuple[Call, asyncio.Task[bytes | None]]:
        """Read a call of a client, whose connection has received a byte at least."""
        call = Call(owner, name or owner, self.started)
        self.sockets.receive(owner, 1)
        return call, asyncio.ensure_future(self.reader.read(call, owner, owner))  # type: ignore[arg-type]

    async def know(self, owner: str, size: int) -> None:
        """Read a message of this size."""
        call, task = self.call(owner)
        call.arrive(bytes(size))
        await task
        self.reader.release(owner, size)
        self.started.clear()

    def is_empty(self) -> bool:
        reader = self.reader
        return not (reader._waiting or reader._ended or reader._unparsed or reader._messages.charge)


@pytest.fixture
def no_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first measurement never happen."""
    monkeypatch.setattr(request_reader, "MEASURE_SECONDS", 60.0)
    monkeypatch.setattr(incomplete_messages, "FRESH_SECONDS", 60.0)


@pytest.fixture
def soon_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a blocked call displace another one at once."""
    monkeypatch.setattr(request_reader, "MAX_BLOCKED_SECONDS", 0.0)


@pytest.mark.usefixtures("no_measurements")
async def test_read_of_new_clients_is_bounded_until_measured() -> None:
    readers = Readers()
    calls = [readers.call(f"client {n}") for n in range(FRESH_READS + 3)]
    await until(lambda: len(readers.started) == FRESH_READS)
    await asyncio.sleep(0)
    assert len(readers.started) == FRESH_READS
    for number, (call, _) in enumerate(calls):
        await until(lambda number=number: len(readers.started) > number)
        call.arrive()
    assert await asyncio.gather(*(task for _, task in calls)) == [b"x"] * len(calls)


async def test_read_of_distant_clients_begins_after_a_measurement() -> None:
    """Nothing has arrived of any message: no call waits for another one's message."""
    readers = Readers()
    calls = [readers.call(f"client {n}") for n in range(3 * FRESH_READS)]
    await until(lambda: len(readers.started) == 3 * FRESH_READS)
    for call, _ in calls:
        call.arrive()
    await asyncio.gather(*(task for _, task in calls))


async def test_read_that_is_the_last_leaves_no_measurement() -> None:
    readers = Readers()
    (first, first_read), (last, last_read) = readers.call("a"), readers.call("b")
    await until(lambda: len(readers.started) == 2)
    first.arrive()
    await first_read
    assert readers.reader._timer
    last.arrive()
    await last_read
    assert readers.reader._timer is None


@pytest.mark.usefixtures("no_measurements")
async def test_read_is_round_robin_over_the_clients() -> None:
    readers = Readers()
    message = bytes(MIB)
    for owner in ("flood", "other"):
        await readers.know(owner, len(message))
    flood = [readers.call("flood", f"flood {n}") for n in range(12)]
    await until(lambda: len(readers.started) == 9)  # 3/4 of LIMIT in parts of 4 MiB
    other = readers.call("other")
    await asyncio.sleep(0)
    assert len(readers.started) == 9
    for call, task in flood:
        task.add_done_callback(lambda _: readers.reader.release("flood", len(message)))
        call.arrive(message)
    other[0].arrive(message)
    assert await asyncio.gather(*(task for _, task in [*flood, other])) == [message] * 13
    assert readers.started.index("other") < readers.started.index("flood 10")


@pytest.mark.usefixtures("no_measurements")
@pytest.mark.parametrize("size", [100, None])
async def test_read_of_light_and_new_clients_does_not_wait_for_heavy_ones(size: int | None) -> None:
    readers = Readers()
    await readers.know("flood", 4 * MIB)
    if size:
        await readers.know("other", size)
    flood = [readers.call("flood", f"flood {n}") for n in range(20)]
    await until(lambda: len(readers.started) == 6)  # 3/4 of LIMIT in parts of 6 MiB
    other, task = readers.call("other")
    other.arrive()
    assert await task == b"x"
    assert len(readers.started) == 7
    for call, _ in flood:
        call.arrive()
    await asyncio.gather(*(task for _, task in flood))


@pytest.mark.usefixtures("no_measurements")
async def test_read_that_is_cancelled_frees_its_memory() -> None:
    readers = Readers()
    calls = [readers.call("client", f"{n}") for n in range(FRESH_READS + 2)]
    await until(lambda: len(readers.started) == FRESH_READS)
    for _, task in calls:
        task.cancel()
    await asyncio.gather(*(task for _, task in calls), return_exceptions=True)
    assert readers.is_empty()
    call, task = readers.call("two")
    call.arrive(grpc.aio.EOF)
    assert await task is None
    assert readers.is_empty()


@pytest.mark.usefixtures("no_measurements")
async def test_read_that_is_cancelled_while_it_waits_leaves_the_queue_at_once() -> None:
    readers = Readers()
    calls = [readers.call("client", f"{n}") for n in range(FRESH_READS + 2)]
    waiting = readers.reader._waiting
    await until(lambda: len(readers.started) == FRESH_READS and waiting.shares.total_items == 2)
    calls[-1][1].cancel()
    await until(calls[-1][1].done)
    assert waiting.shares.total_items == 1
    for call, _ in calls[:-1]:
        call.arrive(grpc.aio.EOF)
    await asyncio.gather(*(task for _, task in calls[:-1]))
    assert len(readers.started) == FRESH_READS + 1
    assert readers.is_empty()


async def test_read_that_is_cancelled_when_it_may_begin_frees_its_memory() -> None:
    readers = Readers()
    calls = [readers.call("client", f"{n}") for n in range(FRESH_READS + 1)]
    await asyncio.sleep(0)
    _, waiting = calls[-1]
    calls[0][0].arrive()
    for _ in range(100):
        if not readers.reader._waiting:
            break
        await asyncio.sleep(0)
    waiting.cancel()
    for _, task in calls:
        task.cancel()
    await asyncio.gather(*(task for _, task in calls), return_exceptions=True)
    readers.reader.release("client", sum(not task.cancelled() for _, task in calls))
    assert readers.is_empty()


async def test_read_above_the_limit_displaces_the_newest_of_the_client_that_holds_most() -> None:
    readers = Readers()
    calls = {owner: readers.call(owner) for owner in ("one", "two", "three", "four", "five")}
    await until(lambda: len(readers.started) == 5)
    for owner in calls:
        readers.sockets.receive(owner, 10 * MIB)
    with pytest.raises(QueueFull, match=r"displaced: incomplete messages take 42 MiB.*\(frontends\)"):
        await calls.pop("five")[1]
    await asyncio.sleep(0.05)
    for call, task in calls.values():
        call.arrive()
        assert await task == b"x"


@pytest.mark.usefixtures("soon_blocked")
async def test_read_that_is_blocked_displaces_a_client_with_more_than_its_share() -> None:
    readers = Readers()
    await readers.know("heavy", MIB)
    holding = [readers.call(f"client {n}") for n in range(4)]
    await until(lambda: len(readers.started) == 4)
    for number in range(4):
        readers.sockets.receive(f"client {number}", 10 * MIB)
    await asyncio.sleep(0.05)
    assert not any(task.done() for _, task in holding)
    heavy, task = readers.call("heavy")
    heavy.arrive()
    assert await task == b"x"
    with pytest.raises(QueueFull, match="displaced: the message arrives slowly"):
        await holding.pop()[1]
    for call, task in holding:
        call.arrive()
        await task


@pytest.mark.usefixtures("soon_blocked")
async def test_read_that_is_blocked_waits_for_messages_that_arrive() -> None:
    """All clients hold their share or less, and none stalls."""
    readers = Readers()
    await readers.know("heavy", MIB)
    holding = [readers.call(f"client {n}") for n in range(19)]
    await until(lambda: len(readers.started) == 19)
    for number in range(19):
        readers.sockets.receive(f"client {number}", 2 * MIB)
    await asyncio.sleep(0.05)
    heavy, task = readers.call("heavy")
    heavy.arrive()
    await asyncio.sleep(0.1)
    assert not any(waiting.done() for waiting in (task, *(task for _, task in holding)))
    for call, other in holding:
        call.arrive()
        assert await other == b"x"
    assert await task == b"x"


async def test_read_of_a_client_with_much_to_parse_waits() -> None:
    readers = Readers()
    size = request_reader.MAX_UNPARSED_BYTES
    call, task = readers.call("busy")
    call.arrive(bytes(size))
    await task
    waiting, task = readers.call("busy")
    waiting.arrive()
    other, other_task = readers.call("other")
    other.arrive()
    assert await other_task == b"x"
    assert not task.done()
    readers.reader.release("busy", size)
    assert await task == b"x"


async def test_read_of_a_missing_message_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incomplete_messages, "MAX_SILENT_SECONDS", 0.01)
    readers = Readers()
    with pytest.raises(QueueFull, match="timeout"):
        await readers.call("client")[1]
    assert readers.is_empty()


async def test_read_on_unmeasured_connections_is_bounded_and_refuses_none(caplog: pytest.LogCaptureFixture) -> None:
    readers = Readers(SocketTable())  # has no connection of these clients
    calls = [readers.call(f"client {n}") for n in range(12)]
    for number, (call, _) in enumerate(calls):
        await until(lambda number=number: len(readers.started) > number)
        await asyncio.sleep(0.02)
        assert len(readers.started) - number <= request_reader.MAX_UNMEASURED_READS
        call.arrive()
    assert await asyncio.gather(*(task for _, task in calls)) == [b"x"] * 12
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.usefixtures("no_measurements")
async def test_read_with_too_many_waiting_calls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_reader, "MAX_WAITING_CALLS", 4)
    readers = Readers()
    calls = [readers.call("client", f"{n}") for n in range(FRESH_READS + 3)]
    with pytest.raises(QueueFull, match=r"queue full: 4 calls wait to be read, .*\(frontends\)"):
        await calls[-1][1]
    for call, _ in calls[:-1]:
        call.arrive()
    await asyncio.gather(*(task for _, task in calls[:-1]))


GENERATE = "/npuserve.v1.InferenceService/Generate"


async def test_generate_without_a_message_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client sends only headers, another one half-closes without a message; other clients are served."""
    for module in (request_reader, incomplete_messages):
        monkeypatch.setattr(module, "MAX_SILENT_SECONDS", 0.2)
    async with running(make_folder(tmp_path / "m")) as server:
        silent = server.channel.stream_unary(GENERATE)()
        assert (await server.inference.Generate(ask("ab", 3))).text == "cde"
        assert await silent.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "timeout: 8 KiB or the rest of the message must arrive within 0.2 s" in await silent.details()
        empty = server.channel.stream_unary(GENERATE)()
        await empty.done_writing()
        assert await empty.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await empty.details() == "the call has no message"
        assert (await server.inference.Generate(ask("ab", 3))).text == "cde"
