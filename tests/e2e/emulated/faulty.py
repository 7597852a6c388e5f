"""`npuserve serve` whose emulated device fails when a test says so. All else is the server's own.

    python -m tests.e2e.emulated.faulty serve FOLDER [SETTINGS]    the supervisor
    python -m tests.e2e.emulated.faulty engine FOLDER              its engine process
    python -m tests.e2e.emulated.faulty frontend                   its front end

The engine listens at FOLDER/device for functions of npuserve.npu.emulator to call, see `tell`. What is in FOLDER/start,
in lines of JSON, it calls before it loads the model, at each of its starts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

STALL_SECONDS = 2
"""Of silence until an engine counts as stalled: 30 in a server of its own."""

PROGRAM = (sys.executable, "-m", "tests.e2e.emulated.faulty")


def tell(folder: Path, name: str, *args: Any, **options: Any) -> Any:
    """Calls `emulator.name` in the engine process. OSError where there is none."""
    with Client(str(folder / "device")) as connection:
        connection.send((name, args, options))
        return connection.recv()


def at_start(folder: Path, *calls: Sequence[Any]) -> None:
    """calls: (name, arguments, options) of each."""
    (folder / "start").write_text("\n".join(json.dumps(call) for call in calls))


def serve(folder: str, arguments: list[str]) -> int:
    from npuserve.service import logs, settings
    from npuserve.service.config import ConfigError
    from npuserve.service.supervisor import supervisor

    parser = argparse.ArgumentParser()
    supervisor.add_arguments(parser)
    config = settings.load(parser.parse_args(arguments), os.environ)
    logs.setup(config, "supervisor")
    try:
        return asyncio.run(supervisor.Supervisor(
            config, frontend=(*PROGRAM, "frontend"), engine=(*PROGRAM, "engine", folder),
            restarts=supervisor.Restarts(first=0.05, longest=0.05)).run())
    except ConfigError as error:  # as service/cli/main.py does
        print(f"npuserve: {error}", file=sys.stderr)
        return 2


def engine(folder: Path) -> int:
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

    emulator.activate()
    threading.Thread(target=listen, name="faults", daemon=True).start()
    start = folder / "start"
    for name, args, options in map(json.loads, start.read_text().splitlines() if start.exists() else ()):
        getattr(emulator, name)(*args, **options)
    return engine_process.main()


def frontend() -> int:
    from npuserve.service.frontend import process as own

    made: Any = own.EngineClient
    own.EngineClient = lambda address, on_state, stall, *rest: made(  # type: ignore[assignment,misc]
        address, on_state, min(stall, STALL_SECONDS), *rest)
    return own.main()


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    if kind == "engine":
        code = engine(Path(rest[0]))
        sys.stdout.flush()
        logging.shutdown()
        os._exit(code)  # as the engine process does it
    sys.exit(serve(rest[0], rest[1:]) if kind == "serve" else frontend())
