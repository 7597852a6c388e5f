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
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from npuserve.service import logs
from npuserve.service.config import ConfigError, ServerConfig
from npuserve.service.processes import child
from npuserve.service.ranks.faults import CAPTURE_FAILED, may_drop_captures
from npuserve.service.ranks.lead import check_followers, stop_followers
from npuserve.service.ranks.world import check_same, join_seconds, read_world

if TYPE_CHECKING:
    from npuserve.npu.parallel import Group

log = logging.getLogger(__name__)

PROCESS = (sys.executable, "-m", "npuserve.service.ranks.follower")
STOP_SECONDS = 5.0
"""Time for the ranks to end by themselves."""
CHECK_SECONDS = 0.5
"""Minimum time between two checks of the ranks of other hosts."""
CAUSE_SECONDS = 0.3
"""Time in which the end of a rank is known after it has broken a collective."""


class RankArgs(msgspec.Struct, frozen=True):
    """Arguments of a rank's process, from rank 0.

    config: settings of the server.
    folder: folder of the model.
    rank: number of the rank, from 1.
    address: host:port at which rank 0 listens for the others.
    local: number of ranks of each host.

    memory: descriptor of the file in memory by which the ranks communicate; -1 for none.
    weights: descriptor of the file in memory for this rank's weights; -1 for none.
    shared_weights: description of its contents by the last process of this rank that was ready.
    capture: mode that replaces the setting after a failure of an earlier rank of this host to use captured steps; ""
        otherwise, and on the host of rank 0, whose engine knows.
    """

    config: ServerConfig
    folder: str
    rank: int
    address: str
    local: int
    memory: int = -1
    weights: int = -1
    shared_weights: dict[str, Any] | None = None
    capture: Literal["", "decoder", "off"] = ""

    @property
    def may_drop_captures(self) -> bool:
        """Return True if the next group may capture less when this rank cannot capture steps."""
        return may_drop_captures(self.config.capture, self.capture)


def create_shared_memory() -> int:
    """Return the descriptor of a file in memory for the weights of successive processes; -1 without memfd support.

    The caller holds it open for its lifetime.
    """
    return os.memfd_create("npuserve-weights") if hasattr(os, "memfd_create") else -1


class RankProcess:
    """Process of a rank. Raises OSError if it cannot be started.

    ready: set once the process has joined the group and loaded its weights.
    shared_weights: description of the weights in memory, once it is ready; None if they are not kept.
    error: event with which it reported an error, once it has ended; {} otherwise. Other lines of its output, which
        libraries print, are logged.
    """

    def __init__(self, args: RankArgs):
        self.ready = threading.Event()
        self.error = dict[str, str]()
        self.shared_weights: dict[str, Any] | None = None
        self.rank = args.rank
        self._process = subprocess.Popen(PROCESS, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         pass_fds=[file for file in (args.memory, args.weights) if file >= 0])
        assert self._process.stdin
        self._process.stdin.write(child.encode_line(args))
        self._process.stdin.flush()

    def run(self) -> int:
        """Handle the events of the process until it ends. Return its exit code."""
        assert self._process.stdout
        for line in self._process.stdout:
            event = child.parse_event(line)
            if event is None:
                logs.event(log, "rank said", rank=self.rank, text=line.decode(errors="replace").rstrip())
            elif event["event"] in ("unusable", CAPTURE_FAILED):
                self.error = event
            elif event["event"] == "ready":
                self.shared_weights = event["shared_weights"]
                self.ready.set()
                logs.event(log, "rank is ready", rank=self.rank)
        return self._process.wait()

    def kill(self, seconds: float = 0) -> None:
        """End the process by SIGKILL, if it has not ended in `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()


def end_processes(processes: Sequence[RankProcess], seconds: float) -> None:
    """End the processes by SIGKILL that have not ended in `seconds`."""
    end = time.monotonic() + seconds
    for process in processes:
        process.kill(max(0.0, end - time.monotonic()))


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
    """The ranks of this host other than 0, and the group of the ranks of all hosts.

    weights: descriptors of the files in memory for the weights of the ranks of this host from 1; empty for none.
    shared_weights: descriptions of their contents; None if they have none.

    Raises OSError if a process cannot be started, and ConfigError if the ranks cannot meet, are missing, or differ.
    """

    def __init__(
        self,
        config: ServerConfig,
        folder: str,
        weights: Sequence[int] = (),
        shared_weights: Sequence[dict[str, Any] | None] | None = None,
    ):
        from npuserve.npu.parallel import Group, MissingRanks, serve, wait_for_ranks

        size = config.tensor_parallel_size
        world = read_world(config, os.environ)
        local = len(world.ranks(config)) if world else size
        if world:
            world.resolve(join_seconds(config))
        try:
            store, address = serve(world.address if world else "127.0.0.1:0", size, join_seconds(config))
        except RuntimeError as error:
            raise (world.explain(error) if world else error) from None
        memory = -1 if world else os.memfd_create("npuserve-ranks")
        files = weights or [-1] * (local - 1)
        contents = shared_weights or [None] * (local - 1)
        self._stopping = False
        self._has_other_hosts = local < size
        self._next_check = 0.0
        self._processes = [
            self._start(RankArgs(config, folder, rank, address, local, memory, file, content))
            for rank, file, content in zip(range(1, local), files, contents, strict=True)]
        try:
            wait_for_ranks(store, 0, size, join_seconds(config))
        except MissingRanks as error:
            raise ConfigError(f"tensor_parallel_size: {error}") from None
        self.group: Group = Group(0, size, store, memory, local)
        check_same(self.group, config, Path(folder))

    def shared_weights(self) -> list[dict[str, Any] | None]:
        """Wait until the ranks of this host are ready. Return the descriptions of their weights in memory."""
        for process in self._processes:
            process.ready.wait()  # this process ends if that one does
        return [process.shared_weights for process in self._processes]

    def _start(self, args: RankArgs) -> RankProcess:
        process = RankProcess(args)
        watcher = threading.Thread(target=self._watch, args=(process,), name=f"rank-{args.rank}", daemon=True)
        _watchers.append(watcher)
        watcher.start()
        return process

    def _watch(self, process: RankProcess) -> None:
        """Wait for the end of a rank's process, and end this one with it."""
        code = process.run()
        if self._stopping:
            return
        logs.event(log, "a rank ended", level=logging.ERROR, rank=process.rank, code=code)
        if process.error:
            child.report(process.error["event"], error=process.error["error"])
        logging.shutdown()
        os._exit(code if code > 0 else 1)

    def check(self) -> None:
        """Raise RuntimeError if a rank of another host is lost. Do nothing within CHECK_SECONDS of the last check."""
        if self._has_other_hosts and (now := time.monotonic()) >= self._next_check:
            self._next_check = now + CHECK_SECONDS
            check_followers(self.group)

    def stop(self) -> None:
        """End the ranks, at most STOP_SECONDS from now."""
        self._stopping = True
        try:
            stop_followers(self.group)
        except RuntimeError as error:
            logs.event(log, "a rank was lost before the end", level=logging.WARNING, error=str(error))
        end_processes(self._processes, STOP_SECONDS)
