"""Supervisor of one server, the parent process of `npuserve serve`.

1. It creates a private folder for the engine's socket and the metrics files (private_folder.py), then the metrics page
   (metrics_page.py). It spawns the front ends, then the engine (child_process.py). It imports neither grpc nor torch,
   and never forks. A further process downloads a model from the hub. Front ends answer health checks meanwhile; they
   and the engine then get its folder.
2. Each child reads one JSON line on stdin, which stays open for orders, and reports events as JSON lines on stdout
   (processes/child.py). Front ends report their port, and all children report that they are ready. When the supervisor
   dies, the kernel kills the children.
3. A child that dies is restarted after a growing pause (restart_policy.py). The watchdog (watchdog.py) kills a child
   whose main loop sends no heartbeat for hang_seconds, and an engine that reloads for longer than `load_limit`. A
   restarted engine reuses the weights in shared memory if possible (npu/execution/load.py). Exit code 4 is a
   device fault that no restart cures: the server stops. It also stops at exit code 2, an unusable configuration or
   model, before it was ready for the first time. Later it retries until the cause is repaired.
4. SIGTERM, Ctrl-C or AdminService.Drain starts a drain: the OpenAI API (openai_gateway.py), then the front ends finish
   their requests, then the engine stops. A second signal kills the children. SIGHUP, which a closed terminal sends,
   drains too, but never as a second signal: a terminal may send it twice, and systemd after SIGTERM. It is ignored
   under nohup. If the engine fails for good during a drain, the front ends end their requests at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from npuserve.service import clock, logs, probe
from npuserve.service.config import ConfigError, ServerConfig, endpoint
from npuserve.service.processes import process_control
from npuserve.service.processes.child import EXIT_NODE_FAULT, FRONTEND_STOP_SECONDS, UNUSABLE
from npuserve.service.ranks.host import MAX_MEMORY_REUSES, Host
from npuserve.service.ranks.processes import create_shared_memory
from npuserve.service.ranks.world import join_seconds, local_ranks, read_world
from npuserve.service.supervisor.child_process import ChildProcess
from npuserve.service.supervisor.metrics_page import MetricsPage
from npuserve.service.supervisor.openai_gateway import OPENAI_STOP_SECONDS, OpenAIGateway
from npuserve.service.supervisor.private_folder import SOCKET, check_folder, private_folder
from npuserve.service.supervisor.restart_policy import RESTARTS, RestartPolicy, Restarts, RunEnd
from npuserve.service.supervisor.running_servers import write_description
from npuserve.service.supervisor.watchdog import MIN_LOAD_SECONDS, Watchdog
from npuserve.service.text.model_folder import served_as
from npuserve.service.text.model_path import fetch, local, resolve

log = logging.getLogger(__name__)

FRONTEND = (sys.executable, "-m", "npuserve.service.frontend.process")
ENGINE = (sys.executable, "-m", "npuserve.service.engine.process")
ENGINE_STOP_SECONDS = 10.0
"""Seconds from the order to stop to SIGKILL of the engine. A step must fit."""
MIN_OPEN_FILES = 88
MIN_OPEN_FILES_PER_FRONTEND = 8
"""Minimum limit of open files, for the supervisor: pipes and metrics files of its children, scrapers, and the start of
a child."""
ENGINE_ENV = {"GOMP_SPINCOUNT": "1000"}
"""OpenMP threads wait for each other many times per step. Sleeping costs several times the step, and a long spin delays
front ends that need the cores. 1000 spins, a few microseconds, are a compromise."""


def serve(config: ServerConfig, run: Callable[[Supervisor], Coroutine[Any, Any, int]] | None = None) -> int:
    """Run a server until it ends, and return its exit code. Every server is started here.

    0: clean drain. 1: the supervisor gave up or had to kill a child. 2: unusable configuration. 4: device fault.

    run: runs the supervisor, and returns the exit code; None for `Supervisor.run`.

    Raises ConfigError if the model does not exist.
    """
    config = logs.with_format(config)
    logs.setup(config, "supervisor")
    _check_open_files(config.frontends)
    process_control.set_dumpable(config.debuggable)
    world = read_world(config, os.environ)
    if world and world.host > 0:
        return Host(config, resolve(config.model), world).run()
    return asyncio.run((run or Supervisor.run)(Supervisor(config)))


class Supervisor:
    """Supervisor of one server: its child processes and its metrics page. Call `run` once.

    listening: set when `address` is known and answers health checks.
    ready: set when the server accepts requests.
    openai: the OpenAI API; None without the setting `openai_port`.

    Raises ConfigError if the model does not exist.
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
        self.openai: OpenAIGateway | None = None
        self._config = config
        self._join_seconds = join_seconds(config) if read_world(config, os.environ) else 0.0  # 0: no other hosts
        self._model = local(config.model)  # None until it is downloaded
        self._port = config.port
        self._name = ""  # name of the model for clients; known once it is downloaded
        self._commands = (frontend, engine)
        self._restarts = restarts
        self._tasks: dict[ChildProcess, asyncio.Task[Any]] = {}  # of the children that were started
        self._shared_weights: dict[str, Any] | None = None  # reported by the last engine that was ready
        self._kernels: dict[str, Any] | None = None  # chosen by the first engine that was ready; later ones keep it
        self._capture_failed = ""  # why an engine could not use captured steps
        self._capture = ""  # mode of later engines then, which replaces the setting
        self._unusable = ""  # first reason why a child was unusable before the server was ready
        self._signals = 0
        self._drain_code = 0  # exit code of an engine that failed for good during the drain
        self._drain_seconds = config.drain_seconds
        self._start_date = clock.unix_time()
        self._started = self._start_began = time.monotonic()
        # Created by `run`, before it starts a child.
        self._folder: Path
        self._exit_code: asyncio.Future[int]  # of the server; done once it has to end
        self._frontends: list[ChildProcess]
        self._engine: ChildProcess
        self._watchdog: Watchdog
        self._page: MetricsPage

    @property
    def address(self) -> str:
        """Return host:port of gRPC."""
        return endpoint(self._config.host, self._port)

    async def run(self) -> int:
        """Serve until a signal, `stop`, or the final exit of a child. Return the server's exit code.

        Raises ConfigError, after all children have exited, if the configuration or the model is unusable.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        if not process_control.is_hangup_ignored():
            loop.add_signal_handler(signal.SIGHUP, self.drain, self._config.drain_seconds)
        self._exit_code = loop.create_future()
        with private_folder() as folder:
            _check_addresses(self._config)
            check_folder(folder)
            self._create_parts(folder)
            process_control.adopt_orphans()
            for child in self._frontends if self._port else self._frontends[:1]:
                self._start(child)
            tasks = [asyncio.create_task(self._start_engine()), asyncio.create_task(self._watch())]
            try:
                code = await self._exit_code
                clean = await self._drain(0.0 if code else self._drain_seconds)
                self._page.close()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await self._kill()
        if self._unusable:
            raise ConfigError(self._unusable)
        return code or self._drain_code or (0 if clean else 1)

    def stop(self) -> None:
        """Drain and exit; at the second call, kill the children. Called by signals."""
        self._signals += 1
        if self._signals == 1:
            self.drain(self._config.drain_seconds)
        else:
            for child in self._tasks:
                child.signal(signal.SIGKILL)

    def drain(self, seconds: float) -> None:
        """Exit once the running requests have ended, at most `seconds` from now. Further calls are ignored."""
        if not self._exit_code.done():
            self._drain_seconds = seconds
            logs.event(log, "stopping", drain_seconds=seconds)
            self._finish(0)

    def _create_parts(self, folder: Path) -> None:
        """Create the children, which are not started yet, their watchdog and the metrics page. Raises ConfigError."""
        self._folder = folder
        socket = f"{folder}/{SOCKET}"
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
        if self._config.openai_port:
            self.openai = OpenAIGateway(self._config, environment, self._restarts, self._admit_gateway,
                                        lambda why: self._page.failed("openai", why))

        def frontend(index: int) -> ChildProcess:
            return ChildProcess(f"frontend-{index}", self._commands[0], environment, lambda: {
                "gateway_pid": self.openai.child.pid if self.openai else 0,
                "gateway_port": self.openai.port_of(f"frontend-{index}") if self.openai else -1,
                "config": self._config, "index": index, "engine_address": socket, "port": self._port,
                "heartbeat": True, "folder": self._model and str(self._model), "last_good": str(folder),
                "start_date": self._start_date, "started": self._started,
            }, self._on_event)

        self._frontends = [frontend(index) for index in range(self._config.frontends)]
        memory, *others = [create_shared_memory() for _ in range(local_ranks(self._config, os.environ))]
        others = others if memory >= 0 else []
        self._engine = ChildProcess("engine", self._commands[1], {**ENGINE_ENV, **environment}, lambda: {
            "config": self._config, "folder": str(self._model), "address": socket, "epoch": self._engine.starts,
            "heartbeat": True, "memory": memory, "rank_memory": others, "shared_weights": self._shared_weights,
            "kernels": self._kernels, "served_name": self._name, "capture_failed": self._capture_failed,
            "start_date": self._start_date, "started": self._started,
            "capture": self._capture,
        }, self._on_event, [memory, *others] if memory >= 0 else [], defers_sigterm=True)
        self._watchdog = Watchdog(
            self._config, self._engine, self._tasks.keys, self._join_seconds or MIN_LOAD_SECONDS)
        self._page = MetricsPage(
            folder, self._config, self._processes, self.openai.metrics if self.openai else None)

    def _processes(self) -> dict[str, int]:
        """Return name -> pid of the running children. Called by the thread of the metrics page."""
        gateway = [self.openai.child] if self.openai else []
        return {child.name: child.pid for child in [*self._frontends, self._engine, *gateway] if child.is_running}

    def _admit_gateway(self, pid: int) -> None:
        """Let a process call the front ends as the OpenAI API."""
        for child in self._frontends:
            child.order(gateway_pid=pid)

    async def _start_engine(self) -> None:
        """Download the model if needed, send its folder to the front ends, and start the engine."""
        config = self._config
        try:
            if self._model is None:
                self._model = await fetch(config.model)
                for child in self._frontends:
                    child.order(folder=str(self._model))
            self._name = served_as(self._model, config.model, config.served_name)
            self._start(self._engine)
        except Exception as error:
            self._finish(error)

    def _on_event(self, child: ChildProcess, event: dict[str, Any]) -> None:
        """Handle an event of a child.

        listening: a front end listens on this port.
        drain: AdminService.Drain was called.
        unusable: the configuration or the model is unusable.
        capture_failed: the engine could not use captured steps, and ends.
        killer: the engine found the request that crashed its earlier runs, and ended it.
        ready: the child is ready. The server is ready when all children are.
        """
        name = event.get("event")
        if name == "listening" and self.openai:
            self.openai.frontend_listens(child.name, event["gateway_port"])
        if name == "listening" and not self.listening.is_set():
            self._port = event["port"]
            self.listening.set()
            logs.event(log, f"listening on {self.address}", metrics=self._page.url)
            write_description(self._folder, self._config, self.address, self._page.url, self._start_date)
            for other in self._frontends:
                if other not in self._tasks:
                    self._start(other)
        elif name == "drain":
            self.drain(event["seconds"])
        elif name == "killer":
            child.is_killer_found = True
        elif name == "capture_failed":
            self._capture_failed = event["error"]
            self._capture = event["next_mode"]
        elif name == "unusable" and self.ready.is_set():
            logs.event(log, f"{child.name} cannot be used", level=logging.ERROR, error=event["error"])
        elif name == "unusable":
            self._unusable = self._unusable or event["error"]
        elif name == "ready" and child.ready_event is None:
            self._on_ready(child, event)

    def _on_ready(self, child: ChildProcess, event: dict[str, Any]) -> None:
        child.ready_event = event
        child.ready_at = time.monotonic()
        if child is self._engine:
            self._shared_weights = event.get("shared_weights")
            self._kernels = self._kernels or event.get("kernels")
            self._watchdog.engine_ready()
        if (facts := self._engine.ready_event) and all(frontend.ready_event for frontend in self._frontends):
            self._page.built(facts["backend"], self._name)
            if self.openai and not self.ready.is_set() and not self._exit_code.done():
                self.openai.answers_have(self._frontends[0].ready_event or {})
                self._tasks[self.openai.child] = asyncio.create_task(self.openai.run())
            self.ready.set()
            seconds = time.monotonic() - self._start_began
            tokens = facts["kv_cache_tokens"]
            logs.event(log, f"ready in {seconds:.1f} s", seconds=seconds, kv_cache_tokens=tokens)

    def _start(self, child: ChildProcess) -> None:
        def ended(task: asyncio.Task[int]) -> None:
            if not task.cancelled():
                self._finish(task.exception() or task.result())

        if not self._exit_code.done():
            self._tasks[child] = asyncio.create_task(self._supervise(child))
            self._tasks[child].add_done_callback(ended)

    async def _supervise(self, child: ChildProcess) -> int:
        """Run and restart a child until it must not be restarted. Return the server's exit code."""
        is_engine = child is self._engine
        policy = RestartPolicy(self._restarts, self._join_seconds if is_engine else 0.0)
        while True:
            end = await self._run_child(child)
            if child.stopping.is_set():
                return 0
            self._page.forget(child.pid)
            child.ready_event = None
            if is_engine:
                for frontend in self._frontends:  # they report ready again once the next engine is
                    frontend.ready_event = None
            pause = policy.pause(end, self.ready.is_set())
            if pause is None:
                return self._give_up(child, end, policy)
            self._page.failed("engine" if is_engine else "frontend", end.why)
            cause = {"error": str(end.code)} if end.why == "not_started" else {"code": end.code}
            logs.event(log, f"{child.name} died, starting it again", level=logging.WARNING, why=end.why,
                       pause=round(pause, 3), **cause)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(child.stopping.wait(), pause)
                return 0
            self._start_began = time.monotonic()
            if is_engine:
                if policy.deaths >= MAX_MEMORY_REUSES:
                    self._shared_weights = None
                self._page.engine_restarted()

    async def _run_child(self, child: ChildProcess) -> RunEnd:
        try:
            code = await child.run()
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread for its end can be started
            return RunEnd(error)
        silence = child.silence if child.is_hung else 0.0
        end = time.monotonic() - silence
        was_ready = child.ready_event is not None
        ready_seconds = end - child.ready_at if was_ready else 0.0
        is_killer_found = child.is_killer_found
        child.is_killer_found = False
        return RunEnd(code, end - child.started_at, child.is_hung, was_ready, ready_seconds, is_killer_found)

    def _give_up(self, child: ChildProcess, end: RunEnd, policy: RestartPolicy) -> int:
        """Log why a child is not restarted, unless it reported that. Return the server's exit code.

        Raises ConfigError if the child cannot be started.
        """
        if isinstance(end.code, BaseException):
            raise ConfigError(f"{child.name} cannot be started: {end.code}") from end.code
        if policy.is_group_incomplete:
            logs.event(log, "the group is not complete again, giving up", level=logging.ERROR, why=end.why)
            return UNUSABLE
        if end.code in (UNUSABLE, EXIT_NODE_FAULT):
            return end.code
        logs.event(log, f"{child.name} keeps dying, giving up", level=logging.ERROR, code=end.code,
                   deaths=policy.deaths)
        return 1

    def _finish(self, end: int | BaseException) -> None:
        """End the server with an exit code or an exception. During a drain, a code other than 0 ends the drain."""
        if self._exit_code.done():
            if isinstance(end, int) and end:
                self._drain_code = end
                for frontend in self._frontends:
                    frontend.order(engine_failed=True)
        elif isinstance(end, BaseException):
            self._exit_code.set_exception(end)
        else:
            self._exit_code.set_result(end)

    async def _watch(self) -> None:
        """Run the watchdog, again after an unexpected exception. Stop the server if a child cannot be killed."""
        stuck = None
        while stuck is None:
            try:
                stuck = await self._watchdog.run(self._page)
            except Exception as error:
                logs.bug(log, "watchdog: failed, starting again", error)
        logs.event(log, f"{stuck.name} cannot be killed, giving up", level=logging.CRITICAL, pid=stuck.pid)
        self._finish(EXIT_NODE_FAULT)

    async def _drain(self, seconds: float) -> bool:
        """End the OpenAI API, then the front ends, then the engine. Return False if a child had to be killed.

        seconds: time for requests, of the first two together.
        """
        clean = True
        if self.openai:
            end = time.monotonic() + seconds
            clean = await self._end(
                [self.openai.child], lambda child: child.signal(signal.SIGTERM), seconds + OPENAI_STOP_SECONDS)
            seconds = max(0.0, end - time.monotonic())
        clean &= await self._end(
            self._frontends, lambda child: child.drain(seconds), seconds + FRONTEND_STOP_SECONDS)
        clean &= await self._end([self._engine], ChildProcess.stop, ENGINE_STOP_SECONDS)
        return clean and self._signals < 2

    async def _end(
        self, children: Sequence[ChildProcess], order_end: Callable[[ChildProcess], None], patience: float
    ) -> bool:
        """End children that were started, and kill those that are late. Return whether none is.

        order_end: asks a child to end.
        patience: seconds until a child is late.
        """
        tasks = {child: self._tasks[child] for child in children if child in self._tasks}
        for child in tasks:
            order_end(child)
        late = (await asyncio.wait(tasks.values(), timeout=patience))[1] if tasks else set()
        for child in tasks:
            child.signal(signal.SIGKILL)
        return not late

    async def _kill(self) -> None:
        """Kill all children, so that none outlives the supervisor."""
        for child in self._tasks:
            child.signal(signal.SIGKILL)
        if self._tasks:  # a child that is blocked in a driver is left behind
            await asyncio.wait(self._tasks.values(), timeout=ENGINE_STOP_SECONDS)


def _check_open_files(frontends: int) -> None:
    """Raise ConfigError if the limit of open files is too low to start children, and to start them again."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = MIN_OPEN_FILES + MIN_OPEN_FILES_PER_FRONTEND * frontends
    if 0 <= limit < needed:  # -1: unlimited
        raise ConfigError(f"open files: the limit (ulimit -n) is {limit}; at least {needed} are needed, and one "
                          "for each connection of a front end")


def _check_addresses(config: ServerConfig) -> None:
    """Raise ConfigError if listening on the host or on gRPC's port is impossible, before a process is started.

    Several front ends share the port, and could share it with another server without an error.
    """
    for setting, port, name in (
        ("host", 0, config.host), ("port", config.port, endpoint(config.host, config.port)),
        ("health_port", config.health_port, endpoint(config.host, config.health_port)),
        ("openai_port", config.openai_port, endpoint(config.host, config.openai_port)),
    ):
        if error := probe.cannot_listen(config.host, port):
            raise ConfigError(f"{setting}: {probe.listening_failure(name, error)}")
