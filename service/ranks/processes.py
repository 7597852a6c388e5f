"""Processes of the ranks other than 0, as rank 0 starts and watches them.

They are children of the engine process, in its process group. If the engine ends, the kernel ends them; if one of them
ends, the engine ends at once, and the supervisor starts the group again.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec

from npuserve.service import logs
from npuserve.service.config import ServerConfig
from npuserve.service.ipc import child
from npuserve.service.ranks.lead import stop_followers

if TYPE_CHECKING:
    from npuserve.npu.parallel import Group

log = logging.getLogger(__name__)

PROCESS = (sys.executable, "-m", "npuserve.service.ranks.process")
STOP_SECONDS = 5.0
"""Time for the ranks to end by themselves."""


class RankArgs(msgspec.Struct, frozen=True):
    """Arguments of a rank's process, from rank 0.

    config: of the server.
    folder: of the model.
    rank: number of the rank, from 1.
    address: host:port where the ranks meet.
    memory: descriptor of the file in memory that the ranks share.
    """

    config: ServerConfig
    folder: str
    rank: int
    address: str
    memory: int


class RankProcesses:
    """The other ranks of this machine.

    group: of the ranks.

    Raises OSError if a process cannot be started.
    """

    def __init__(self, config: ServerConfig, folder: str):
        from npuserve.npu.parallel import Group, serve

        size = config.tensor_parallel_size
        store, address = serve(size)
        memory = os.memfd_create("npuserve-ranks")
        self._stopping = False
        self._processes = [
            self._start(RankArgs(config, folder, rank, address, memory)) for rank in range(1, size)]
        self.group: Group = Group(0, size, store, memory)

    def _start(self, args: RankArgs) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(PROCESS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[args.memory])
        assert process.stdin
        process.stdin.write(msgspec.json.encode(args) + b"\n")
        process.stdin.flush()
        threading.Thread(target=self._watch, args=(args.rank, process), name=f"rank-{args.rank}", daemon=True).start()
        return process

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Wait for the end of a rank's process, and end this one with it."""
        assert process.stdout
        reason = ""
        for line in process.stdout:
            event = json.loads(line)
            reason = event["error"] if event.get("event") == "unusable" else reason
        code = process.wait()
        if self._stopping:
            return
        logs.event(log, "a rank ended", level=logging.ERROR, rank=rank, code=code)
        if reason:
            child.report("unusable", error=reason)
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
