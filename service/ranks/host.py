"""`npuserve serve` on a host other than the first of a group: it runs the host's ranks, and serves nothing.

The ranks end when one of the group ends. They are then started again and wait for the new group, until SIGTERM. Their
weights stay in memory meanwhile. If one could not use captured steps, the next group captures none.

After SIGTERM the ranks compute until the group ends, since the first host still drains its streams.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal

from npuserve.service import logs
from npuserve.service.config import ServerConfig
from npuserve.service.processes.child import EXIT_NODE_FAULT, UNUSABLE
from npuserve.service.processes.process_control import is_hangup_ignored
from npuserve.service.ranks.faults import CAPTURE_FAILED
from npuserve.service.ranks.processes import RankArgs, RankProcess, create_shared_memory, end_processes
from npuserve.service.ranks.world import World, join_seconds

log = logging.getLogger(__name__)

PAUSE_SECONDS = 0.5
"""Pause before the ranks are started again."""
DRAIN_MARGIN_SECONDS = 10.0
"""Time beyond drain_seconds that the first host needs to stop its engine."""
END_SECONDS = 1.0
"""Time for the other ranks of this host to end by themselves, once one has ended."""
MAX_MEMORY_REUSES = 30
"""Number of short runs after which a new process does not reuse the weights in memory: they may be the cause."""
SHORT_SECONDS = 60.0
"""A run is short if it ends earlier."""


class Host:
    """The ranks of this host. Call `run` once."""

    def __init__(self, config: ServerConfig, folder: Path, world: World):
        self._config = config
        self._folder = folder
        self._world = world
        self._ranks = world.ranks(config)
        self._files = [create_shared_memory() for _ in self._ranks]
        self._contents: list[dict[str, Any] | None] = [None] * len(self._ranks)
        self._capture: Literal["", "decoder", "off"] = ""  # replaces the setting after a rank's failed capture
        self._processes: list[RankProcess] = []
        self._stopped = threading.Event()

    def run(self) -> int:
        """Run groups of ranks, one after another, until a signal, or until they are unusable. Return the exit code.

        0: signal. 2: the model or the group is unusable. 4: device fault.

        Raises ConfigError if the address of the first host does not resolve.
        """
        signals = SimpleQueue[None]()
        received = list[int]()

        def handle(number: int, _: object = None) -> None:
            # SIGHUP is not counted, see the supervisor. Python handles it before a SIGTERM of the same moment.
            received.append(number)
            is_second = sum(number != signal.SIGHUP for number in received) > 1
            if is_second or len(received) == 1:
                signals.put(None)  # no lock that the interrupted code may have

        for number in (signal.SIGTERM, signal.SIGINT, *(() if is_hangup_ignored() else (signal.SIGHUP,))):
            signal.signal(number, handle)
        threading.Thread(target=self._stop, args=(signals,), name="signals", daemon=True).start()
        world = self._world
        ranks = self._ranks
        logs.event(log, "ranks of a group", ranks=f"{ranks[0]} to {ranks[-1]}", address=world.address)
        short_runs = 0
        while not self._stopped.is_set():
            world.resolve(join_seconds(self._config), self._stopped)
            began = time.monotonic()
            code, error = self._run_group()
            if self._stopped.is_set():
                break
            if code in (UNUSABLE, EXIT_NODE_FAULT):
                logs.event(log, "ranks cannot be used", level=logging.ERROR, error=error, code=code)
                return code
            short_runs = short_runs + 1 if time.monotonic() - began < SHORT_SECONDS else 0
            if short_runs >= MAX_MEMORY_REUSES:
                self._contents = [None] * len(ranks)
            logs.event(log, "ranks ended, starting them again", level=logging.WARNING, code=code,
                       **{"error": error} if error else {})
            self._stopped.wait(PAUSE_SECONDS)
        return 0

    def _run_group(self) -> tuple[int, str]:
        """Start the ranks and run them until one ends. Return the largest exit code, and the error reported, or ""."""
        address = self._world.address
        local = len(self._ranks)
        self._processes = []
        runs = dict[Future[int], RankProcess]()
        with ThreadPoolExecutor(local) as threads:
            try:
                for rank, file, content in zip(self._ranks, self._files, self._contents, strict=True):
                    self._processes.append(process := RankProcess(RankArgs(
                        self._config, str(self._folder), rank, address, local, weights=file, shared_weights=content,
                        capture=self._capture)))
                    runs[threads.submit(process.run)] = process
            except (OSError, RuntimeError) as error:  # RuntimeError: the system has no further thread
                end_processes(self._processes, 0)
                return 1, f"a rank cannot be started: {error}"
            if self._stopped.is_set():  # during the start
                self._kill()
            wait(runs, return_when=FIRST_COMPLETED)
            end_processes(self._processes, END_SECONDS)
        for index, process in enumerate(self._processes):
            self._contents[index] = process.shared_weights or self._contents[index]
            if process.error.get("event") == CAPTURE_FAILED:
                self._capture = "decoder" if process.error["next_mode"] == "decoder" else "off"
        # A rank that is unusable ends the others, which then end with 1.
        code, process = max(((run.result(), process) for run, process in runs.items()), key=lambda end: end[0])
        return code, process.error.get("error", "")

    def _stop(self, signals: SimpleQueue[None]) -> None:
        """Stop after a signal, once the group has ended: at most drain_seconds and a margin later.

        A second signal, or one without a complete group, stops at once. Runs in a thread.
        """
        signals.get()
        self._stopped.set()
        if all(process.ready.is_set() for process in self._processes):
            with contextlib.suppress(Empty):
                signals.get(timeout=self._config.drain_seconds + DRAIN_MARGIN_SECONDS)
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
