"""The parent of `npuserve serve`.

1. It makes a private folder for the engine's socket and the metrics' files (private_folder.py), and spawns the front
   ends, then the engine (child_process.py). It imports neither grpc nor torch, and never forks. A model of the hub is
   downloaded by one more process; the front ends, which answer health meanwhile, and the engine get its folder.
2. Each child reads one JSON line on stdin, which stays open for orders, and reports events in JSON lines on stdout
   (child.py): a front end its port, all that they are ready. The kernel kills the children when the supervisor dies.
3. A child that dies is started again after a growing pause (restarts.py). So is one whose main loop stands still for
   hang_seconds (heartbeat.py), and an engine that loads for longer than `load_limit` when the server has been ready
   before, after a SIGKILL. The engine finds its weights in memory again, where it can
   (npu/execution/shared_weights.py). Exit code 4 is a device at fault, which no restart mends: everything stops. So
   does everything at exit code 2, a wrong configuration or model, before the server was ready once; later it is retried
   until it is repaired.
4. SIGTERM, Ctrl-C or AdminService.Drain drains: the front ends end what runs, then the engine is asked to leave. A
   second signal kills.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from npuserve.service import logs, probe, settings
from npuserve.service.config import ConfigError, ServerConfig, endpoint
from npuserve.service.ipc import process_control
from npuserve.service.ipc.child import FRONTEND_MARGIN, NODE_FAULT, UNUSABLE
from npuserve.service.ipc.heartbeat import Watch
from npuserve.service.supervisor.child_process import Child
from npuserve.service.supervisor.metrics_page import MetricsPage, cpu_seconds, resident_bytes
from npuserve.service.supervisor.private_folder import private_folder
from npuserve.service.supervisor.restart_policy import RESTARTS, ExitPolicy, Life, Restarts
from npuserve.service.text.model_folder import fetch, local, served_as

log = logging.getLogger(__name__)

FRONTEND = (sys.executable, "-m", "npuserve.service.frontend.process")
ENGINE = (sys.executable, "-m", "npuserve.service.engine.process")
ENGINE_PATIENCE = 10.0  # seconds from SIGTERM to SIGKILL: a step must fit
ROOM_BYTES = 16 << 20  # for the metrics, which are mapped: a process that finds none dies by SIGBUS
LOOK_SECONDS = 1.0  # how often hangs are looked for
DOUBTS = 30  # short lives after which the engine's memory, whatever became of it, is not used again
STUCK_SECONDS = 30.0  # from SIGKILL on: a process that is still there waits in a driver, and has its device
MIN_LOAD_SECONDS = 60.0  # least limit of a load that is not the first, where load_seconds is 0
LOAD_FACTOR = 3  # else the limit is the first load's time, so many times
LOADING_LOG_SECONDS = 30.0  # between two log lines on an engine that still loads
# OpenMP's threads wait for each other many times a step: so briefly that to sleep costs several times the step, yet
# where front ends want the cores, a long spin stalls it. A thousand turns, a few microseconds, serve both.
ENGINE_ENV = {"GOMP_SPINCOUNT": "1000"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    settings.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """`npuserve serve`: 0 after a clean drain, 1 after giving up or having to kill, 2 for a wrong configuration, 4 for
    a device that is at fault."""
    config = logs.with_format(settings.load(args, os.environ))
    logs.setup(config, "supervisor")
    process_control.set_dumpable(config.debuggable)
    return asyncio.run(Supervisor(config).run())


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
        restarts: Restarts = RESTARTS,
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
        self._wrong = ""  # why a child could not be used before the server was ready, of the first that said so
        self._load_began = 0.0  # of the engine's life, time.monotonic() seconds
        self._first_load = 0.0  # seconds from the engine's start to its first ready; 0 before
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
        with private_folder() as self._folder:
            self._make_children()
            process_control.adopt_orphans()
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
                "pulse": pulse.path, "folder": self._model and str(self._model), "last_good": str(self._folder),
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
        killer: the engine's last lives died of one request, which it has ended.
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
        elif line.get("event") == "killer":
            child.forgiven = True
        elif line.get("event") == "unusable" and self.ready.is_set():
            logs.event(log, f"{child.name} cannot be used", level=logging.ERROR, error=line["error"])
        elif line.get("event") == "unusable":
            self._wrong = self._wrong or line["error"]
        elif line.get("event") == "ready" and child not in self._up:
            self._up[child] = line
            if child is self._engine:
                self._left = line.get("leaves")
                self._kernels = self._kernels or line.get("kernels")
                self._first_load = self._first_load or time.monotonic() - self._load_began
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
        """Run a child's lives, one after the other; return the server's exit code."""
        policy, kind = ExitPolicy(self._restarts), "engine" if child is self._engine else "frontend"
        while True:
            life = await self._live(child)
            if child.stopping.is_set():
                return 0
            self._page.forget(child.pid)
            # Without the engine no front end is ready, and each says so again.
            self._up = {} if child is self._engine else {up: line for up, line in self._up.items() if up is not child}
            pause = policy.pause(life, self.ready.is_set())
            error = life.code if isinstance(life.code, BaseException) else None
            if pause is None and error:
                raise error
            if pause is None and life.code in (UNUSABLE, NODE_FAULT):
                return int(life.code)
            if pause is None:
                logs.event(log, f"{child.name} keeps dying, giving up", level=logging.ERROR, code=life.code,
                           deaths=policy.deaths)
                return 1
            self._page.failed(kind, life.why)
            logs.event(log, f"{child.name} died, starting it again", level=logging.WARNING, why=life.why, pause=pause,
                       **{"error": str(error)} if error else {"code": life.code})
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(child.stopping.wait(), pause)
                return 0
            self._began = time.monotonic()
            if child is self._engine:
                self._left = self._left if policy.deaths < DOUBTS else None
                self._page.engine_restarted()

    async def _live(self, child: Child) -> Life:
        began = time.monotonic()
        if child is self._engine:
            self._load_began = began
        try:
            code = await child.live()
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started, to wait for its end
            return Life(error)
        silence = child.silence if child.hung else 0.0
        seconds, forgiven, child.forgiven = time.monotonic() - began - silence, child.forgiven, False
        return Life(code, seconds, child.hung, child in self._up and not child.hung, forgiven)

    def _finish(self, code: int) -> None:
        if not self._over.done():
            self._over.set_result(code)

    @property
    def load_limit(self) -> float:
        """Seconds that a load may take; infinite before the engine was ready once."""
        if not self._first_load:
            return math.inf
        return self._config.load_seconds or max(MIN_LOAD_SECONDS, LOAD_FACTOR * self._first_load)

    async def _look(self) -> None:
        """Find children that hang, and kill them. Their `live` ends then, and they are started again."""
        every = min(LOOK_SECONDS, self._config.hang_seconds / 4)
        orphans = process_control.OrphanReaper()
        while True:
            await asyncio.sleep(every)
            orphans.reap({child.pid for child in self._lives})
            for child in self._lives:
                child.look(every)
                if child.stopping.is_set():
                    continue
                if child.dying >= STUCK_SECONDS:
                    logs.event(log, f"{child.name} cannot be killed, giving up", level=logging.CRITICAL, pid=child.pid)
                    self._finish(NODE_FAULT)
                    return
                if child.lives and not child.hung:
                    self._kill_if_hung(child)
            self._report_load(every)

    def _kill_if_hung(self, child: Child) -> None:
        if child.silence >= self._config.hang_seconds:
            what, seconds = "hangs", child.silence
        elif child is self._engine and child not in self._up and child.age >= self.load_limit:
            what, seconds = "hangs while loading", child.age
        else:
            return
        logs.event(log, f"{child.name} {what}, killing it", level=logging.ERROR, seconds=seconds)
        child.kill_hung()

    def _report_load(self, every: float) -> None:
        """Publish for how long the engine has been loading, and log it every LOADING_LOG_SECONDS."""
        engine = self._engine
        loading = engine.age if engine.lives and engine not in self._up else 0.0
        self._page.loading(loading)
        if loading and loading % LOADING_LOG_SECONDS < every and loading >= LOADING_LOG_SECONDS:
            logs.event(log, "engine is still loading", seconds=loading, cpu_seconds=cpu_seconds(engine.pid),
                       resident_bytes=resident_bytes(engine.pid))

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
