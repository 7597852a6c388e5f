"""`npuserve serve` on a host other than the first of a group: it runs the host's ranks, and serves nothing.

The ranks end when one of the group ends. They are then started again and wait for the new group, until SIGTERM.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import threading
from pathlib import Path

from npuserve.service import logs
from npuserve.service.config import ServerConfig
from npuserve.service.ipc.child import EXIT_NODE_FAULT, UNUSABLE
from npuserve.service.ranks.processes import RankArgs, start, wait
from npuserve.service.ranks.world import World

log = logging.getLogger(__name__)

PAUSE_SECONDS = 0.5
"""Pause before the ranks are started again."""


def run(config: ServerConfig, folder: Path, world: World) -> int:
    """Run the ranks of this host until SIGTERM, or until they are unusable. Return the exit code.

    0: SIGTERM. 2: the configuration, the model or the group is unusable. 4: device fault.
    """
    stopped, processes = threading.Event(), list[subprocess.Popen[bytes]]()

    def stop(*_: object) -> None:
        stopped.set()
        for process in processes:
            process.kill()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    ranks = world.ranks(config)
    logs.event(log, "ranks of a group", ranks=f"{ranks[0]} to {ranks[-1]}", address=world.address)
    while not stopped.is_set():
        processes[:] = [start(RankArgs(config, str(folder), rank, world.address, len(ranks))) for rank in ranks]
        code, event = wait(processes[0])
        for process in processes:
            process.kill()
            other, of_other = wait(process)
            code, event = (other, of_other) if other > 0 and code <= 0 else (code, event)
        if stopped.is_set():
            break
        if code in (UNUSABLE, EXIT_NODE_FAULT):
            logs.event(log, "ranks cannot be used", level=logging.ERROR, error=event.get("error", ""), code=code)
            return code
        logs.event(log, "ranks ended, starting them again", level=logging.WARNING, code=code,
                   **{"error": event["error"]} if event else {})
        stopped.wait(PAUSE_SECONDS)
    return 0
