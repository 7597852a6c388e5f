"""Front end's end of a connection, with the transport's events given by the test."""

from __future__ import annotations

import asyncio

from npuserve.service.ipc.engine_connection import EngineConnection


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
