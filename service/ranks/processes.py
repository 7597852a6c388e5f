"""Processes of the ranks other than 0, as their parent starts and watches them.

On the host of rank 0 the parent is the engine process. If it ends, the kernel ends them. If one of them ends, so does
the engine, and the supervisor starts the group again. On other hosts the parent is `npuserve serve`, which starts the
host's ranks again. Ranks of other hosts notice a loss by their connections.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from npuserve.service import logs
from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.ipc import child
from npuserve.service.ranks.faults import CAPTURE_FAILED
from npuserve.service.ranks.lead import stop_followers
from npuserve.service.ranks.world import check_same, read_world

if TYPE_CHECKING:
    from npuserve.npu.parallel import Group

log = logging.getLogger(__name__)

PROCESS = (sys.executable, "-m", "npuserve.service.ranks.process")
JOIN_SECONDS = 600.0
"""Maximum time to wait for the other ranks, whose hosts may still start."""
STOP_SECONDS = 5.0
"""Time for the ranks to end by themselves."""
CAUSE_SECONDS = 0.3
"""Time in which the end of a rank is known after it has broken a collective."""


class RankArgs(msgspec.Struct, frozen=True):
    """Arguments of a rank's process, from rank 0.

    config: of the server.
    folder: of the model.
    rank: number of the rank, from 1.
    address: host:port where the ranks meet.
    local: number of ranks of each host.
    memory: descriptor of the file in memory that the ranks share; -1 for none.
    """

    config: ServerConfig
    folder: str
    rank: int
    address: str
    local: int
    memory: int = -1

    @property
    def may_drop_captures(self) -> bool:
        """Return True if the next group may do without captured steps when this rank cannot capture them."""
        return self.config.capture == "auto"


def join_seconds(config: ServerConfig) -> float:
    """Return the maximum time to wait for the other ranks."""
    return config.load_seconds or JOIN_SECONDS


def start(args: RankArgs) -> subprocess.Popen[bytes]:
    """Start the process of a rank. Raises OSError."""
    process = subprocess.Popen(PROCESS, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               pass_fds=[args.memory] if args.memory >= 0 else [])
    assert process.stdin
    process.stdin.write(msgspec.json.encode(args) + b"\n")
    process.stdin.flush()
    return process


def wait(process: subprocess.Popen[bytes]) -> tuple[int, dict[str, str]]:
    """Wait for the end of a rank's process. Return its exit code, and the event with its error; {} without one.

    Other lines of its output, which libraries print, are logged.
    """
    assert process.stdout
    found: dict[str, str] = {}
    for line in process.stdout:
        try:
            event = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:
            logs.event(log, "rank said", text=line.decode(errors="replace").rstrip())
        else:
            found = event if event.get("event") in ("unusable", CAPTURE_FAILED) else found
    return process.wait(), found


_watchers: list[threading.Thread] = []
"""Threads that wait for the ranks of this process."""


def end_with_rank() -> None:
    """End this process with a rank that has ended, or return if none has.

    Call it before this process ends by an error, since the end of a rank may be the cause.
    """
    until = time.monotonic() + CAUSE_SECONDS
    for watcher in _watchers:
        watcher.join(max(0.0, until - time.monotonic()))


class RankProcesses:
    """The ranks of this host other than 0, and the group with those of all hosts.

    Raises OSError if a process cannot be started, and ConfigError if ranks are missing or differ.
    """

    def __init__(self, config: ServerConfig, folder: str):
        from npuserve.npu.parallel import Group, MissingRanks, serve, wait_for_ranks

        size, world = config.tensor_parallel_size, read_world(config, os.environ)
        local = len(world.ranks(config)) if world else size
        store, address = serve(world.address if world else "127.0.0.1:0", size)
        memory = -1 if world else os.memfd_create("npuserve-ranks")
        self._stopping = False
        self._processes = [
            self._start(RankArgs(config, folder, rank, address, local, memory)) for rank in range(1, local)]
        try:
            wait_for_ranks(store, 0, size, join_seconds(config))
        except MissingRanks as error:
            raise ConfigError(f"tensor_parallel_size: {error}") from None
        self.group: Group = Group(0, size, store, memory, local)
        check_same(self.group, config, Path(folder))

    def _start(self, args: RankArgs) -> subprocess.Popen[bytes]:
        process = start(args)
        watcher = threading.Thread(
            target=self._watch, args=(args.rank, process), name=f"rank-{args.rank}", daemon=True)
        _watchers.append(watcher)
        watcher.start()
        return process

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Wait for the end of a rank's process, and end this one with it."""
        code, event = wait(process)
        if self._stopping:
            return
        logs.event(log, "a rank ended", level=logging.ERROR, rank=rank, code=code)
        if event:
            child.report(event["event"], error=event["error"])
        logging.shutdown()
        os._exit(code if code > 0 else 1)

    def stop(self) -> None:
        """End the ranks, at most STOP_SECONDS from now."""
        self._stopping = True
        stop_followers(self.group)
        for process in self._processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
