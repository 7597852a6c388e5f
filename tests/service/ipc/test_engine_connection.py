"""Front end's end of a connection, with the transport's events given by the test."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from npuserve.service.ipc.engine_connection import EngineConnection
from npuserve.service.ipc.messages import Hello, Pause, encode


async def test_engine_connection_drained_waits_for_an_engine_that_reads() -> None:
    connection = EngineConnection(lambda data, connection: None)
    await asyncio.wait_for(connection.drained(), 10)
    connection.pause_writing()
    waiting = asyncio.ensure_future(connection.drained())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    connection.resume_writing()
    await asyncio.wait_for(waiting, 10)


async def test_engine_connection_deferred_messages_are_written_last_and_count_as_unsent() -> None:
    written: list[bytes] = []
    connection = EngineConnection(lambda data, connection: None)
    connection._transport = SimpleNamespace(  # type: ignore[assignment]
        write=lambda data: written.append(bytes(data)), get_write_buffer_size=lambda: 1000)
    connection.defer()
    connection.send(Pause(1))
    connection.send(Pause(2))
    connection.write(Hello())
    assert connection.unsent_bytes == 1000 + len(encode(Pause(1)) + encode(Pause(2)))
    connection.write_deferred()
    connection.send(Pause(3))
    assert written == [encode(Hello()), encode(Pause(1)) + encode(Pause(2)), encode(Pause(3))]
    assert connection.unsent_bytes == 1000
