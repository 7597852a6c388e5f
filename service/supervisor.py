"""The parent of `npuserve serve`.

1. It makes a private folder for the engine's socket and the metrics' files, and spawns the front ends, then the
   engine. It imports neither grpc nor torch, and never forks.
2. Each child reads one JSON line on stdin, which stays open: its end tells the child that the parent is gone. Each
   says on stdout, in JSON lines, what the parent waits for: a front end its port, all that they are ready.
3. A child that dies is started again after a growing pause. Exit code 2 is a wrong configuration or model, 4 a device
   at fault, which no restart mends: everything stops.
4. SIGTERM or Ctrl-C drains: the front ends end what runs, then the engine is asked to leave. A second one kills.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from npuserve.service import logs, settings
from npuserve.service.child import NODE_FAULT, UNUSABLE
from npuserve.service.config import ConfigError, ServerConfig, endpoint
from npuserve.service.metrics_page import MetricsPage

log = logging.getLogger(__name__)

FRONTEND = (sys.executable, "-m", "npuserve.service.frontend")
ENGINE = (sys.executable, "-m", "npuserve.service.engine_process")
ENGINE_PATIENCE = 10.0  # seconds from SIGTERM to SIGKILL: a step must fit
FRONTEND_MARGIN = 5.0  # seconds beyond drain_seconds
# OpenMP's threads wait for each other many times a step: so briefly that to sleep costs several times the step, yet
# where front ends want the cores, a long spin stalls it. A thousand turns, a few microseconds, serve both.
ENGINE_ENV = {"GOMP_SPINCOUNT": "1000"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    settings.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """`npuserve serve`: 0 after a clean drain, 1 after giving up or having to kill, 2 for a wrong configuration, 4 for
    a device that is at fault."""
    config = settings.load(args, os.environ)
    logs.setup(config, "supervisor")
    return asyncio.run(Supervisor(config).run())


@dataclass(frozen=True)
class Restarts:
    """Pauses in seconds before a child is started again: `first`, doubling up to `longest`. A life of `healthy`
    seconds starts the count anew; after `deaths` shorter ones in a row there is no further start."""

    first: float = 0.5
    longest: float = 30.0
    healthy: float = 60.0
    deaths: int = 10

    def pause(self, quick_deaths: int) -> float | None:
        """None: give up."""
        if quick_deaths >= self.deaths:
            return None
        return float(min(self.first * 2 ** max(0, quick_deaths - 1), self.longest))


class Child:
    """One process at a time of one kind, in a session of its own, so that the terminal's Ctrl-C does not reach it.

    arguments: its first line on stdin, made anew at each start. heard: called with each JSON line of its stdout.
    `starts` counts its lives; `stopping` is set once it must not live again.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        arguments: Callable[[], Mapping[str, object]],
        heard: Callable[[Child, dict[str, Any]], None],
    ):
        self.name = name
        self.starts = 0
        self.stopping = asyncio.Event()
        self.pid = 0
        self._command = command
        self._environment = environment
        self._arguments = arguments
        self._heard = heard
        self._process: asyncio.subprocess.Process | None = None

    async def live(self) -> int:
        """One life, from its start to its exit code; negative for a signal."""
        self.starts += 1
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command, env=self._environment, start_new_session=True,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 20)
        self.pid = process.pid
        assert process.stdin
        assert process.stdout
        if self.stopping.is_set():
            self.signal(signal.SIGTERM)
        process.stdin.write(msgspec.json.encode(self._arguments()) + b"\n")
        async for line in process.stdout:
            try:
                self._heard(self, msgspec.json.decode(line, type=dict[str, Any]))
            except msgspec.DecodeError:
                logs.event(log, f"{self.name} said", text=line.decode(errors="replace").rstrip())
        code = await process.wait()
        process.stdin.close()
        return code

    def signal(self, number: signal.Signals) -> None:
        """Ends it for good: SIGTERM asks, SIGKILL does not. A pause between two lives ends too."""
        self.stopping.set()
        if self._process and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


class Supervisor:
    """One server: its children and its metrics page. `run` once.

    `listening` is set when `address` is known and answers health, `ready` when it takes requests.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        frontend: Sequence[str] = FRONTEND,
        engine: Sequence[str] = ENGINE,
        restarts: Restarts = Restarts(),
    ):
        self.listening = asyncio.Event()
        self.ready = asyncio.Event()
        self._config = config
        self._port = config.port
        self._commands = (frontend, engine)
        self._restarts = restarts
        self._lives: dict[Child, asyncio.Task[int]] = {}
        self._up: dict[Child, dict[str, Any]] = {}
        self._signals = 0
        self._began = time.monotonic()

    @property
    def address(self) -> str:
        """host:port of gRPC."""
        return endpoint(self._config.host, self._port)

    async def run(self) -> int:
        """Serves until a signal, `stop`, or a child's end for good; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        self._over: asyncio.Future[int] = loop.create_future()
        with tempfile.TemporaryDirectory(prefix="npuserve-") as folder:  # mode 0700
            self._folder = Path(folder)
            self._make_children()
            try:
                for child in self._frontends if self._port else self._frontends[:1]:
                    self._start(child)
                await asyncio.sleep(0)  # the front ends are under way before anything else is imported
                self._page = MetricsPage(self._folder, self._config)
                threading.Thread(target=self._find_model, args=(loop,), name="model", daemon=True).start()
                code = await self._over
                clean = await self._drain()
                self._page.close()
                return code or (0 if clean else 1)
            finally:
                await self._kill()

    def stop(self) -> None:
        """Drain and leave; the second time, leave at once. What a signal calls."""
        self._signals += 1
        if self._signals == 1:
            logs.event(log, "stopping", drain_seconds=self._config.drain_seconds)
            self._finish(0)
        else:
            for child in self._lives:
                child.signal(signal.SIGKILL)

    def _make_children(self) -> None:
        socket = f"{self._folder}/engine.sock"
        if len(socket) > 100:
            raise ConfigError(f"TMPDIR: {self._folder} is too long for a socket's path of 100 characters")
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(self._folder)}

        def frontend(index: int) -> Child:
            return Child(f"frontend-{index}", self._commands[0], environment, lambda: {
                "config": self._config, "index": index, "engine_address": socket, "port": self._port,
            }, self._hear)

        self._frontends = [frontend(index) for index in range(self._config.frontends)]
        self._engine = Child("engine", self._commands[1], {**ENGINE_ENV, **environment}, lambda: {
            "config": self._config, "folder": self._model, "address": socket, "epoch": self._engine.starts,
        }, self._hear)

    def _find_model(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the engine once the model's folder is here. A thread that nobody waits for, since it may download."""
        from npuserve.service.model_folder import resolve, served_as

        config = self._config
        try:
            folder, error = resolve(config.model), None
        except Exception as wrong:
            folder, error = Path(), wrong

        def found() -> None:
            if error is None:
                self._model, self._name = str(folder), served_as(folder, config.model, config.served_name)
                self._start(self._engine)
            elif not self._over.done():
                self._over.set_exception(error)

        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(found)

    def _hear(self, child: Child, line: dict[str, Any]) -> None:
        """listening: a front end's port. ready: a front end or the engine; the server is when all of them are."""
        if line.get("event") == "listening" and not self.listening.is_set():
            self._port = line["port"]
            self.listening.set()
            logs.event(log, f"listening on {self.address}", metrics=self._page.url)
            for other in self._frontends:
                if other not in self._lives:
                    self._start(other)
        elif line.get("event") == "ready" and child not in self._up:
            self._up[child] = line
            if len(self._up) == len(self._frontends) + 1:
                facts = self._up[self._engine]
                self._page.built(facts["backend"], self._name)
                self.ready.set()
                seconds, tokens = time.monotonic() - self._began, facts["kv_cache_tokens"]
                logs.event(log, f"ready in {seconds:.1f} s", seconds=seconds, kv_cache_tokens=tokens)

    def _start(self, child: Child) -> None:
        def ended(task: asyncio.Task[int]) -> None:
            if not task.cancelled() and (error := task.exception()):
                if not self._over.done():
                    self._over.set_exception(error)
            elif not task.cancelled():
                self._finish(task.result())

        if not self._over.done():
            self._lives[child] = asyncio.create_task(self._keep(child))
            self._lives[child].add_done_callback(ended)

    async def _keep(self, child: Child) -> int:
        """A child's lives, one after the other; returns the server's exit code."""
        quick = 0
        while True:
            began = time.monotonic()
            code = await child.live()
            if child.stopping.is_set():
                return 0
            self._page.forget(child.pid)
            # Without the engine no front end is ready, and each says so again.
            self._up = {} if child is self._engine else {up: line for up, line in self._up.items() if up is not child}
            if code in (UNUSABLE, NODE_FAULT):
                return code
            quick = 1 if time.monotonic() - began >= self._restarts.healthy else quick + 1
            pause = self._restarts.pause(quick)
            if pause is None:
                logs.event(log, f"{child.name} keeps dying, giving up", level=logging.ERROR, code=code, deaths=quick)
                return 1
            logs.event(log, f"{child.name} died, starting it again", level=logging.WARNING, code=code, pause=pause)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(child.stopping.wait(), pause)
                return 0
            self._began = time.monotonic()
            if child is self._engine:
                self._page.engine_restarted()

    def _finish(self, code: int) -> None:
        if not self._over.done():
            self._over.set_result(code)

    async def _drain(self) -> bool:
        """The front ends leave, then the engine. True if nobody had to be killed."""
        clean, front_patience = True, self._config.drain_seconds + FRONTEND_MARGIN
        for children, patience in ((self._frontends, front_patience), ([self._engine], ENGINE_PATIENCE)):
            lives = {child: self._lives[child] for child in children if child in self._lives}
            for child in lives:
                child.signal(signal.SIGTERM)
            late = (await asyncio.wait(lives.values(), timeout=patience))[1] if lives else set()
            clean = clean and not late
            for child in lives:
                child.signal(signal.SIGKILL)
        return clean and self._signals < 2

    async def _kill(self) -> None:
        """Nobody outlives the supervisor, whatever happened."""
        for child in self._lives:
            child.signal(signal.SIGKILL)
        await asyncio.gather(*self._lives.values(), return_exceptions=True)
