"""The parent of `npuserve serve`.

1. It makes a private folder for the engine's socket and the metrics' files, and spawns the front ends, then the
   engine. It imports neither grpc nor torch, and never forks. A model of the hub is downloaded by one more process;
   the front ends, which answer health meanwhile, and the engine get its folder.
2. Each child reads one JSON line on stdin, which stays open for orders: its end tells the child that the parent is
   gone. Each says on stdout, in JSON lines, what the parent waits for: a front end its port, all that they are ready.
3. A child that dies is started again after a growing pause. So is one whose main loop stands still for hang_seconds
   (heartbeat.py), after a SIGKILL. The engine finds its weights in memory again, where it can (npu/shared.py). Exit
   code 2 is a wrong configuration or model, 4 a device at fault, which no restart mends: everything stops.
4. SIGTERM, Ctrl-C or AdminService.Drain drains: the front ends end what runs, then the engine is asked to leave. A
   second signal kills.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from npuserve.service import logs, probe, settings
from npuserve.service.child import FRONTEND_MARGIN, NODE_FAULT, UNUSABLE
from npuserve.service.config import ConfigError, ServerConfig, endpoint
from npuserve.service.heartbeat import Watch
from npuserve.service.metrics_page import MetricsPage
from npuserve.service.model_folder import fetch, local, served_as

log = logging.getLogger(__name__)

FRONTEND = (sys.executable, "-m", "npuserve.service.frontend")
ENGINE = (sys.executable, "-m", "npuserve.service.engine_process")
ENGINE_PATIENCE = 10.0  # seconds from SIGTERM to SIGKILL: a step must fit
ROOM_BYTES = 16 << 20  # for the metrics, which are mapped: a process that finds none dies by SIGBUS
LOOK_SECONDS = 1.0  # how often hangs are looked for
DOUBTS = 30  # short lives after which the engine's memory, whatever became of it, is not used again
STUCK_SECONDS = 30.0  # from SIGKILL on: a process that is still there waits in a driver, and has its device
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
    """Pauses in seconds before a child is started again, by the number of its short lives: a life of `healthy` seconds
    starts the count anew.

    Of lives that never were ready, or hung, in a row: `first`, doubling up to `longest`, and after `deaths` there is no
    further start. Others died at work: most likely of a request, which is found (suspects.py), or by somebody's hand.
    To start again is likely to help, and streams wait for it: `again` times their number, up to `again_longest`, and
    after `deaths_at_work` there is no further start.
    """

    first: float = 0.5
    longest: float = 30.0
    healthy: float = 60.0
    deaths: int = 10
    again: float = 0.1
    again_longest: float = 5.0
    deaths_at_work: int = 100

    def pause(self, stillborn: int, at_work: int) -> float | None:
        """None: give up. stillborn: 0 after a life that was ready and did not hang."""
        if stillborn >= self.deaths or at_work >= self.deaths_at_work:
            return None
        if stillborn:
            return float(min(self.first * 2 ** (stillborn - 1), self.longest))
        return min(self.again * at_work, self.again_longest)


class Child:
    """One process at a time of one kind, in a session of its own, so that the terminal's Ctrl-C does not reach it.

    arguments: its first line on stdin, made anew at each start. heard: called with each JSON line of its stdout.
    pulse: its sign of life. files: open ones that it gets under the same numbers. `starts` counts its lives; `stopping`
    is set once it must not live again; `silence` is for how many seconds its main loop has stood still; `hung` is
    whether this life was killed for that.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        arguments: Callable[[], Mapping[str, object]],
        heard: Callable[[Child, dict[str, Any]], None],
        pulse: Watch,
        files: Sequence[int] = (),
    ):
        self.name = name
        self.starts = 0
        self.silence = 0.0
        self.hung = False
        self.pulse = pulse
        self.stopping = asyncio.Event()
        self.pid = 0
        self._command = command
        self._environment = environment
        self._arguments = arguments
        self._heard = heard
        self._files = files
        self._process: asyncio.subprocess.Process | None = None

    async def live(self) -> int:
        """One life, from its start to its exit code; negative for a signal."""
        self.starts += 1
        self.silence = 0.0
        self.hung = False
        self.pulse.reset()
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command, env=self._environment, start_new_session=True, pass_fds=self._files,
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
        self._send(number)

    def drain(self, seconds: float) -> None:
        """Ends it for good, once its requests have ended, or so many seconds are over."""
        self.stopping.set()
        self.order(drain=seconds)

    def order(self, **order: object) -> None:
        """Write an order on its stdin; lost if it has ended."""
        if self._process and self._process.stdin:
            with contextlib.suppress(OSError, RuntimeError):
                self._process.stdin.write(msgspec.json.encode(order) + b"\n")

    @property
    def lives(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def look(self, seconds: float) -> None:
        """To be called every so many seconds."""
        self.silence = self.silence + seconds if self.pulse.missed() and self.lives else 0.0

    def kill_hung(self) -> None:
        """Kill the process because it hangs; the next life may start."""
        self.hung = True
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self._process and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


class Supervisor:
    """One server: its children and its metrics page. `run` once. Raises ConfigError if there is no such model.

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
        self._model = local(config.model)  # None until it is downloaded
        self._port = config.port
        self._commands = (frontend, engine)
        self._restarts = restarts
        self._lives: dict[Child, asyncio.Task[int]] = {}
        self._up: dict[Child, dict[str, Any]] = {}
        self._left: dict[str, Any] | None = None  # what the engine left in its memory when it was ready last
        self._kernels: dict[str, Any] | None = None  # what the first engine that was ready chose; later ones keep it
        self._wrong = ""  # why a child cannot be used, of the first that said so
        self._signals = 0
        self._drain_seconds = config.drain_seconds
        self._began = time.monotonic()

    @property
    def address(self) -> str:
        """host:port of gRPC."""
        return endpoint(self._config.host, self._port)

    async def run(self) -> int:
        """Serve until a signal, `stop`, or a child's end for good; return the exit code.

        Raises ConfigError, once no child is left, if the configuration or the model cannot be used.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        self._over: asyncio.Future[int] = loop.create_future()
        with tempfile.TemporaryDirectory(prefix="npuserve-") as folder:  # mode 0700
            self._folder = Path(folder)
            self._make_children()
            tasks: list[asyncio.Task[None]] = []
            try:
                for child in self._frontends if self._port else self._frontends[:1]:
                    self._start(child)
                await asyncio.sleep(0)  # the front ends are under way before anything else is imported
                self._page = MetricsPage(self._folder, self._config, self._processes)
                tasks = [asyncio.create_task(self._start_engine()), asyncio.create_task(self._look())]
                code = await self._over
                clean = await self._drain(0.0 if code else self._drain_seconds)
                self._page.close()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await self._kill()
        if self._wrong:
            raise ConfigError(self._wrong)
        return code or (0 if clean else 1)

    def stop(self) -> None:
        """Drain and leave; the second time, leave at once. What a signal calls."""
        self._signals += 1
        if self._signals == 1:
            self.drain(self._config.drain_seconds)
        else:
            for child in self._lives:
                child.signal(signal.SIGKILL)

    def drain(self, seconds: float) -> None:
        """Leave, once what runs has ended or so many seconds are over. The first call decides."""
        if not self._over.done():
            self._drain_seconds = seconds
            logs.event(log, "stopping", drain_seconds=seconds)
            self._finish(0)

    def _make_children(self) -> None:
        _check_addresses(self._config)
        socket = f"{self._folder}/engine.sock"
        if len(socket) > 100:
            raise ConfigError(f"TMPDIR: {self._folder} is too long for a socket's path of 100 characters")
        if (free := shutil.disk_usage(self._folder).free) < ROOM_BYTES:
            room = f"{free >> 10} KiB free; {ROOM_BYTES >> 20} MiB are needed"
            raise ConfigError(f"TMPDIR: {self._folder.parent} has {room}")
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(self._folder)}

        def watch(name: str) -> Watch:
            return Watch(f"{self._folder}/{name}.pulse")

        def frontend(index: int) -> Child:
            pulse = watch(f"frontend-{index}")
            return Child(f"frontend-{index}", self._commands[0], environment, lambda: {
                "config": self._config, "index": index, "engine_address": socket, "port": self._port,
                "pulse": pulse.path, "folder": self._model and str(self._model),
            }, self._hear, pulse)

        self._frontends = [frontend(index) for index in range(self._config.frontends)]
        memory = _memory()
        self._engine = Child("engine", self._commands[1], {**ENGINE_ENV, **environment}, lambda: {
            "config": self._config, "folder": str(self._model), "address": socket, "epoch": self._engine.starts,
            "pulse": self._engine.pulse.path, "memory": memory, "left": self._left,
            "kernels": self._kernels,
        }, self._hear, watch("engine"), [memory] if memory >= 0 else [])

    def _processes(self) -> dict[str, int]:
        """Return name -> pid of the living children; called by the thread of the metrics page."""
        return {child.name: child.pid for child in [*self._frontends, self._engine] if child.lives}

    async def _start_engine(self) -> None:
        """Start the engine once the model is here, and tell the front ends where."""
        config = self._config
        if self._model is None:
            try:
                self._model = await fetch(config.model)
            except Exception as error:
                if not self._over.done():
                    self._over.set_exception(error)
                return
            for child in self._frontends:
                child.order(folder=str(self._model))
        self._name = served_as(self._model, config.model, config.served_name)
        self._start(self._engine)

    def _hear(self, child: Child, line: dict[str, Any]) -> None:
        """Handle a child's event.

        listening: a front end's port. drain: AdminService's. unusable: the configuration or the model is at fault.
        ready: a front end or the engine is; the server is ready when all of them are.
        """
        if line.get("event") == "listening" and not self.listening.is_set():
            self._port = line["port"]
            self.listening.set()
            logs.event(log, f"listening on {self.address}", metrics=self._page.url)
            for other in self._frontends:
                if other not in self._lives:
                    self._start(other)
        elif line.get("event") == "drain":
            self.drain(line["seconds"])
        elif line.get("event") == "unusable":
            self._wrong = self._wrong or line["error"]
        elif line.get("event") == "ready" and child not in self._up:
            self._up[child] = line
            if child is self._engine:
                self._left = line.get("leaves")
                self._kernels = self._kernels or line.get("kernels")
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
        stillborn = at_work = 0
        while True:
            began = time.monotonic()
            code = await child.live()
            if child.stopping.is_set():
                return 0
            self._page.forget(child.pid)
            worked = child in self._up and not child.hung
            # Without the engine no front end is ready, and each says so again.
            self._up = {} if child is self._engine else {up: line for up, line in self._up.items() if up is not child}
            if code in (UNUSABLE, NODE_FAULT):
                return code
            lived = time.monotonic() - began - (child.silence if child.hung else 0.0)
            if lived >= self._restarts.healthy:
                stillborn = at_work = 0
            stillborn, at_work = (0, at_work + 1) if worked else (stillborn + 1, at_work)
            pause = self._restarts.pause(stillborn, at_work)
            if pause is None:
                logs.event(log, f"{child.name} keeps dying, giving up", level=logging.ERROR, code=code,
                           deaths=stillborn + at_work)
                return 1
            logs.event(log, f"{child.name} died, starting it again", level=logging.WARNING, code=code, pause=pause)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(child.stopping.wait(), pause)
                return 0
            self._began = time.monotonic()
            if child is self._engine:
                self._left = self._left if stillborn + at_work < DOUBTS else None
                self._page.engine_restarted()

    def _finish(self, code: int) -> None:
        if not self._over.done():
            self._over.set_result(code)

    async def _look(self) -> None:
        """Finds who hangs, and kills it. Its `live` ends then, and it is started again as any other that died."""
        limit = self._config.hang_seconds
        every = min(LOOK_SECONDS, limit / 4)
        while True:
            await asyncio.sleep(every)
            for child in self._lives:
                child.look(every)
                if child.stopping.is_set() or child.silence < limit:
                    continue
                if child.silence < limit + every:
                    logs.event(log, f"{child.name} hangs, killing it", level=logging.ERROR, seconds=child.silence)
                    child.kill_hung()
                elif child.silence >= limit + STUCK_SECONDS:
                    logs.event(log, f"{child.name} cannot be killed, giving up", level=logging.CRITICAL, pid=child.pid)
                    self._finish(NODE_FAULT)
                    return

    async def _drain(self, seconds: float) -> bool:
        """The front ends leave, then the engine. True if nobody had to be killed."""
        clean = True
        for children, patience in ((self._frontends, seconds + FRONTEND_MARGIN), ([self._engine], ENGINE_PATIENCE)):
            lives = {child: self._lives[child] for child in children if child in self._lives}
            for child in lives:
                if child is self._engine:
                    child.signal(signal.SIGTERM)
                else:
                    child.drain(seconds)
            late = (await asyncio.wait(lives.values(), timeout=patience))[1] if lives else set()
            clean = clean and not late
            for child in lives:
                child.signal(signal.SIGKILL)
        return clean and self._signals < 2

    async def _kill(self) -> None:
        """Nobody outlives the supervisor, whatever happened."""
        for child in self._lives:
            child.signal(signal.SIGKILL)
        if self._lives:  # one that waits in a driver is left behind
            await asyncio.wait(self._lives.values(), timeout=ENGINE_PATIENCE)


def _check_addresses(config: ServerConfig) -> None:
    """Raise ConfigError, before a process is started, if there is no listening on the host or on gRPC's port."""
    shared = config.frontends > 1
    for setting, port, name in (("host", 0, config.host), ("port", config.port, endpoint(config.host, config.port))):
        if error := probe.cannot_listen(config.host, port, shared):
            raise ConfigError(f"{setting}: cannot listen on {name}: {error.strerror}")


def _memory() -> int:
    """A file in memory for what the engine's lives leave to each other, to be held as long as this process lives; -1
    where the system has no such files."""
    return os.memfd_create("npuserve-engine") if hasattr(os, "memfd_create") else -1
