"""Private server: `npuserve serve --private`, for a program that starts a server for itself alone.

The server listens on a free port of 127.0.0.1 and answers calls with its key alone. Once it listens, it writes one
JSON line to stdout: `address` (host:port of gRPC) and `api_key`. It ends at end of file on stdin, so also if the
program that started it is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import msgspec

from npuserve.service.access.api_keys import hash_key, new_key, save_tables
from npuserve.service.access.peer_process import LOOPBACK
from npuserve.service.config import ServerConfig
from npuserve.service.supervisor.supervisor import Supervisor, serve

KEY_NAME = "private"


def serve_privately(config: ServerConfig) -> int:
    """Run a private server until stdin ends, and return its exit code, as `serve` does.

    config: loaded for a private server, so without addresses and keys.

    Raises ConfigError if the model does not exist.
    """
    with tempfile.TemporaryDirectory(prefix="npuserve-key-") as folder:
        key = new_key()
        keys = Path(folder, "keys.toml")
        save_tables(str(keys), {KEY_NAME: {"sha256": [hash_key(key).hex()]}})
        config = msgspec.structs.replace(
            config, host=LOOPBACK, port=0, metrics_port=0, health_port=0, api_keys=str(keys))
        return serve(config, partial(_run, key))


async def _run(key: str, supervisor: Supervisor) -> int:
    loop = asyncio.get_running_loop()
    is_abandoned = asyncio.Event()

    def wait_for_end_of_stdin() -> None:
        while os.read(sys.stdin.fileno(), 4096):  # a reader with a lock would abort the end of the interpreter
            pass
        loop.call_soon_threadsafe(is_abandoned.set)

    threading.Thread(target=wait_for_end_of_stdin, daemon=True).start()
    serving = asyncio.create_task(supervisor.run())
    listening = asyncio.create_task(supervisor.listening.wait())
    abandoned = asyncio.create_task(is_abandoned.wait())
    await asyncio.wait({serving, listening, abandoned}, return_when=asyncio.FIRST_COMPLETED)
    if listening.done():
        print(json.dumps({"address": supervisor.address, "api_key": key}), flush=True)
    await asyncio.wait({serving, abandoned}, return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        supervisor.drain(0.0)
    listening.cancel()
    abandoned.cancel()
    return await serving
