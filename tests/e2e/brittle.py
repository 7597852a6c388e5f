"""`npuserve serve` that starts its engine again at once and as often as it takes, and whose engine dies of one token.

    python -m tests.e2e.brittle serve [SETTINGS]     the supervisor
    python -m tests.e2e.brittle engine               its engine process

The engine kills itself when it is to compute what a request with the token POISON in its prompt has after its first
SPARED tokens. While the file exists that the environment variable SLOW names, each step takes as many seconds more as
the file says, SLOW_SECONDS if it is empty. RATES names a file of the rates, as JSON, that an engine measures of its CPU
kernels in place of this machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

POISON = 511
SPARED = 3
SLOW = "BRITTLE_SLOW"
SLOW_SECONDS = 0.1
RATES = "BRITTLE_RATES"
PROGRAM = (sys.executable, "-m", "tests.e2e.brittle")


def serve(arguments: list[str]) -> int:
    from npuserve.service import logs, settings, supervisor

    parser = argparse.ArgumentParser()
    supervisor.add_arguments(parser)
    config = settings.load(parser.parse_args(arguments), os.environ)
    logs.setup(config, "supervisor")
    restarts = supervisor.Restarts(first=0.01, longest=0.01, again=0.01, again_longest=0.01)
    return asyncio.run(supervisor.Supervisor(config, engine=(*PROGRAM, "engine"), restarts=restarts).run())


def engine() -> int:
    from npuserve.kernels.native import choice
    from npuserve.npu.runner import Runner
    from npuserve.service import engine_process

    poisoned: dict[int, int] = {}
    slow = os.environ.get(SLOW)
    if rates := os.environ.get(RATES):
        choice.measure_rates = lambda: json.loads(Path(rates).read_text())
    launch = Runner.launch

    def launch_or_die(self: Runner, step: Any) -> Any:
        for new in step.new:
            if POISON in new.prompt_ids:
                poisoned[new.request_id] = len(new.prompt_ids) + SPARED
        for row in step.rows:
            if row.start + len(row.token_ids) > poisoned.get(row.request_id, 1 << 30):
                os.kill(os.getpid(), signal.SIGKILL)
        if slow and os.path.exists(slow):
            time.sleep(float(Path(slow).read_text() or SLOW_SECONDS))
        return launch(self, step)

    Runner.launch = launch_or_die  # type: ignore[method-assign]
    return engine_process.main()


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    if kind == "engine":
        code = engine()
        sys.stdout.flush()
        os._exit(code)
    sys.exit(serve(rest))
