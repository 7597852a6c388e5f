"""`npuserve serve` with an engine that fails as tests demand, and that restarts at once and without limit.

    python -m tests.e2e.brittle serve [SETTINGS]     the supervisor
    python -m tests.e2e.brittle engine               its engine process
    python -m tests.e2e.brittle count [SETTINGS]     the supervisor of an engine that counts
    python -m tests.e2e.brittle counting engine      its engine process

An engine that counts does not compute the model: a token is the one before plus one. It starts without torch, in a
quarter of the processor time, for tests of what surrounds the model. RATES does not apply to it.

A request with the token POISON in its prompt kills the engine after its first SPARED tokens. Environment variables name
files:

    SLOW    while it exists, each step takes longer by the seconds in the file, SLOW_SECONDS if it is empty
    RATES   rates of CPU kernels, as JSON, that the engine uses instead of measuring them
    LOAD    fault of the next load of the model: "hang" never ends it, "hold" delays it while the file exists,
            "slow:SECONDS" delays it, "memory" fails it for lack of memory, "helper" starts a process that has the
            engine's stdout open and writes its process id to FILE.pid, and "orphan" starts one whose parent ends at
            once and which runs until FILE.end exists
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npuserve.npu.step import Step

POISON = 511
SPARED = 3
SLOW = "BRITTLE_SLOW"
SLOW_SECONDS = 0.1
COUNTING_SECONDS = 0.002
"""Duration of a step of an engine that counts."""
RATES = "BRITTLE_RATES"
LOAD = "BRITTLE_LOAD"
LOAD_LIMIT = "BRITTLE_LOAD_LIMIT"
"""Seconds: the minimum limit of a second load, and the time between log lines on a load."""
PROGRAM = (sys.executable, "-m", "tests.e2e.brittle")
BRITTLE, COUNTING = ({"program": ("-m", "tests.e2e.brittle", kind)} for kind in ("serve", "count"))
"""Options of `tests.e2e.server.serving`."""


def serve(arguments: list[str], *engine: str) -> int:
    from npuserve.service.supervisor import supervisor, watchdog
    from tests.support.altered_server import load_config

    config = load_config(arguments)
    if limit := os.environ.get(LOAD_LIMIT):
        supervisor.MIN_LOAD_SECONDS = watchdog.LOADING_LOG_SECONDS = float(limit)
    restarts = supervisor.Restarts(start_pause=0.01, max_start_pause=0.01, crash_pause=0.01, max_crash_pause=0.01)
    return asyncio.run(supervisor.Supervisor(config, engine=(*PROGRAM, *engine), restarts=restarts).run())


def deadly(launch: Callable[[Any, Step], Any]) -> Callable[[Any, Step], Any]:
    """Return a runner's method `launch` that kills its process once a poisoned request has SPARED tokens."""
    poisoned: dict[int, int] = {}

    def launch_or_die(self: Any, step: Step) -> Any:
        for new in step.new:
            if POISON in new.prompt_ids:
                poisoned[new.request_id] = len(new.prompt_ids) + SPARED
        for row in step.rows:
            if row.start + len(row.token_ids) > poisoned.get(row.request_id, 1 << 30):
                os.kill(os.getpid(), signal.SIGKILL)
        return launch(self, step)

    return launch_or_die


def engine() -> int:
    from npuserve.kernels.native import choice
    from npuserve.npu.execution.runner import Runner
    from npuserve.service.engine import process as engine_process

    if rates := os.environ.get(RATES):
        choice.measure_rates = lambda: json.loads(Path(rates).read_text())
    launch = deadly(Runner.launch)

    def launch_slowly(self: Runner, step: Step) -> Any:
        time.sleep(slow_seconds())
        return launch(self, step)

    load_model = engine_process.load_model

    def load_or_fail(*args: Any, **options: Any) -> Any:
        fail_load()
        return load_model(*args, **options)

    Runner.launch = launch_slowly  # type: ignore[method-assign]
    engine_process.load_model = load_or_fail
    return engine_process.main()


def counting() -> int:
    from npuserve.npu.step import StepResult
    from npuserve.service.engine import process as engine_process
    from npuserve.service.engine.loop import Engine
    from tests.support.counting_runner import ServedRunner

    class Counting(ServedRunner):
        """Runner whose steps are slow while the file of SLOW exists."""

        def launch(self, step: Step) -> tuple[StepResult, float]:
            self.delay = slow_seconds() or COUNTING_SECONDS
            return super().launch(step)

    Counting.launch = deadly(Counting.launch)  # type: ignore[method-assign]

    def build(args: engine_process.EngineArgs) -> tuple[Engine, None]:
        publisher, began = engine_process.open_publisher(args), time.monotonic()
        fail_load()
        runner = Counting(
            Path(args.folder), COUNTING_SECONDS, args.config.block_size, args.config.kv_cache_memory)
        return engine_process.build_engine(args, runner, publisher, began), None  # type: ignore[arg-type]

    engine_process.build = build
    return engine_process.main()


def content(variable: str) -> str | None:
    """Return the text of the file that an environment variable names; None while there is none."""
    try:
        return Path(os.environ[variable]).read_text()
    except (KeyError, FileNotFoundError):
        return None


def slow_seconds() -> float:
    """Return the seconds in the file of SLOW; 0.0 while there is none."""
    seconds = content(SLOW)
    return 0.0 if seconds is None else float(seconds or SLOW_SECONDS)


def fail_load() -> None:
    """Execute the fault in the file of LOAD."""
    fault = content(LOAD)
    if fault is not None:
        fail(Path(os.environ[LOAD]), *fault.split(":"))


def fail(file: Path, kind: str, seconds: str = "1e6") -> None:
    """Execute the fault of a load."""
    if kind in ("hang", "slow"):
        time.sleep(float(seconds))
    elif kind == "hold":
        while file.exists():
            time.sleep(0.01)
    elif kind == "memory":
        raise MemoryError("kv_cache_memory: the memory is not free")
    else:
        helper, orphan = 'echo $$ > "$0.pid"; exec sleep 300', '(until [ -e "$0.end" ]; do sleep 0.1; done) &'
        process = subprocess.Popen(["sh", "-c", helper if kind == "helper" else orphan, file], start_new_session=True)
        if kind == "orphan":
            process.wait()


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    if kind in ("engine", "counting"):
        from tests.support.altered_server import exit_as_engine

        exit_as_engine(engine() if kind == "engine" else counting())
    sys.exit(serve(rest, "engine") if kind == "serve" else serve(rest, "counting", "engine"))
