"""`npuserve serve` with an emulated device that fails as tests demand.

    python -m tests.e2e.emulated.faulty serve FOLDER [SETTINGS]    the supervisor
    python -m tests.e2e.emulated.faulty engine FOLDER              its engine process
    python -m tests.e2e.emulated.faulty frontend                   its front end

The engine receives calls of npuserve.npu.emulator's functions at the socket FOLDER/device, see `tell`. At each start,
before it loads the model, it makes the calls in FOLDER/start, one JSON object per line.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

STALL_SECONDS = 2
"""Seconds without a message after which an engine counts as stalled; 30 in production."""

RELAX = ("fp32",)
"""Float32, since near ties in bfloat16 may fall the other way where a next engine computes tokens as one chunk."""

PROGRAM = (sys.executable, "-m", "tests.e2e.emulated.faulty")


def tell(folder: Path, name: str, *args: Any, **options: Any) -> Any:
    """Call `emulator.name` in the engine process and return its result. Raises OSError if there is no engine."""
    with Client(str(folder / "device")) as connection:
        connection.send((name, args, options))
        return connection.recv()


def at_start(folder: Path, *calls: Sequence[Any]) -> None:
    """Set the calls of each start: (name, arguments, options)."""
    (folder / "start").write_text("\n".join(json.dumps(call) for call in calls))


def serve(folder: str, arguments: list[str]) -> int:
    from npuserve.service.config import ConfigError
    from npuserve.service.supervisor import supervisor
    from tests.support.altered_server import load_config

    config = load_config(arguments)
    try:
        return asyncio.run(supervisor.Supervisor(
            config, frontend=(*PROGRAM, "frontend"), engine=(*PROGRAM, "engine", folder),
            restarts=supervisor.Restarts(start_pause=0.05, max_start_pause=0.05)).run())
    except ConfigError as error:  # as in cli/main.py
        print(f"npuserve: {error}", file=sys.stderr)
        return 2


def engine(folder: Path) -> int:
    from npuserve.npu.large_import import import_large

    import_large("npuserve.npu.emulator")
    from npuserve.npu import emulator
    from npuserve.service.engine import process as engine_process

    def listen() -> None:
        path = folder / "device"
        path.unlink(missing_ok=True)
        listener = Listener(str(path), "AF_UNIX")
        while True:
            with listener.accept() as connection:
                name, args, options = connection.recv()
                connection.send(getattr(emulator, name)(*args, **options))

    emulator.activate(relax=RELAX)
    threading.Thread(target=listen, name="faults", daemon=True).start()
    start = folder / "start"
    for name, args, options in map(json.loads, start.read_text().splitlines() if start.exists() else ()):
        getattr(emulator, name)(*args, **options)
    return engine_process.main()


def frontend() -> int:
    from npuserve.service.frontend import process as own

    made: Any = own.EngineClient
    own.EngineClient = lambda address, on_state, stall, **rest: made(  # type: ignore[assignment,misc]
        address, on_state, min(stall, STALL_SECONDS), **rest)
    return own.main()


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    if kind == "engine":
        from tests.support.altered_server import exit_as_engine

        exit_as_engine(engine(Path(rest[0])))
    sys.exit(serve(rest[0], rest[1:]) if kind == "serve" else frontend())
