"""Cost of metrics: tokens per second of a server whose metrics are switched on and off several times a second.

    python bench/serving/metrics_cost.py [MODEL] [--streams 8] [--rounds 150] [--seconds 0.25] [--json FILE] [-- FLAGS]

The server runs under a closed loop of streams. A round is four windows, two with metrics and two without, in random
order. A fixed order could coincide with periodic work of the server or the machine, and favour one kind. Every window
begins with a signal to the processes, also where the kind does not change. In `on` windows every metric counts
and kernels are timed at the default sampling. In `off` windows nothing counts and no kernel is timed.

Prints tokens per second and the server's CPU time per token: medians, and the geometric mean of the rounds' ratios
on / off with its 95 % interval (bootstrap). The control is the ratio of the two windows of one kind; a cost smaller
than the control's distance from 1 is not resolved. The cost of a scrape of the page is measured at the end. FLAGS are
settings of the server.
"""

from __future__ import annotations

import npuserve.cli.bench.grpc_threads  # noqa: F401

# isort: split
import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from npuserve.cli.bench.load_generator import Load
from npuserve.cli.bench.workload import Prompts, TimedRequest
from npuserve.service.config import ServerConfig

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.serving.server import arguments

PROMPT, OUTPUT = 32, 200
WARM_UP = 3.0  # seconds
SCRAPES = 50
SETTLE = 0.02  # seconds at the begin of a window that do not count: work of the window before
ON, OFF = signal.SIGUSR1, signal.SIGUSR2


# The server


def child(module: str) -> None:
    """Run a child of the supervisor whose metrics count after the signal ON and stop after OFF."""
    from prometheus_client import Counter, Gauge, Histogram

    from npuserve.service import metrics
    from npuserve.service.engine import process as engine_process
    from npuserve.service.frontend import process as frontend

    counting = [(kind, name, getattr(kind, name)) for kind, names in (
        (Counter, ("inc",)), (Gauge, ("set", "inc")), (Histogram, ("observe",)), (metrics.Tally, ("observe", "flush")),
    ) for name in names]
    runners = []
    load_model = engine_process.load_model

    def remembered(config: ServerConfig, *rest: Any, **options: Any) -> Any:
        runners.append((load_model(config, *rest, **options), config.kernel_sampling))
        return runners[-1][0]

    def nothing(self: object, *_: object) -> None:
        return

    def switch(number: int, _: object) -> None:
        for kind, name, real in counting:
            setattr(kind, name, real if number == ON else nothing)
        for runner, sampling in runners:
            runner._kernel_sampling = sampling if number == ON else 0

    engine_process.load_model = remembered
    for number in (ON, OFF):
        signal.signal(number, switch)
    sys.exit((engine_process if module == "engine" else frontend).main())


def serve(arguments: list[str]) -> None:
    from npuserve.service import logs, settings
    from npuserve.service.supervisor import supervisor

    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    config = settings.load(parser.parse_args(arguments), os.environ)
    logs.setup(config, "supervisor")
    commands = {module: (sys.executable, __file__, "child", module) for module in ("frontend", "engine")}
    sys.exit(asyncio.run(supervisor.Supervisor(config, **commands).run()))


@dataclass(frozen=True)
class Server:
    """Running server. target: host:port. metrics: URL of the metrics page. supervisor, children: process ids."""

    target: str
    metrics: str
    supervisor: int
    children: list[int]

    def switch(self, number: signal.Signals) -> None:
        for pid in self.children:
            os.kill(pid, number)

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all living threads of the children."""
        tasks = (task for pid in self.children for task in Path(f"/proc/{pid}/task").glob("*/schedstat"))
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def supervisor_seconds(self) -> float:
        """Return the CPU seconds of the supervisor, in clock ticks. Ended threads count: each scrape has its own."""
        fields = Path(f"/proc/{self.supervisor}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def server(arguments: list[str]) -> Iterator[Server]:
    """Run a server and yield it once it is ready."""
    with tempfile.NamedTemporaryFile("w+") as log:
        command = [sys.executable, __file__, "serve", *arguments, "--port", "0", "--metrics-port", "0", "--log-format",
                   "text"]
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            while "ready in" not in (said := Path(log.name).read_text()):
                if process.poll() is not None:
                    raise SystemExit(said)
                time.sleep(0.1)
            found = re.search(r"listening on (\S+) metrics=(\S+)", said)
            assert found
            children = subprocess.run(
                ["ps", "-ww", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True)
            yield Server(found[1], found[2], process.pid, [int(pid) for pid in children.stdout.split()])
            if " INFO " not in (last := Path(log.name).read_text().splitlines()[-1]):
                raise SystemExit(f"the server logged an error: {last}")
        finally:
            process.terminate()
            process.wait()


# The measurement


@dataclass(frozen=True)
class Window:
    """One window. tokens: received. seconds: length. cpu: CPU seconds of the server."""

    tokens: int
    seconds: float
    cpu: float


Round = dict[str, list[Window]]
"""The windows of each kind, on and off, in the order in which they were measured."""

Figure = Callable[[Sequence[Window]], float]


def rate(windows: Sequence[Window]) -> float:
    """Return tokens per second of the windows together."""
    return sum(w.tokens for w in windows) / sum(w.seconds for w in windows)


def cpu(windows: Sequence[Window]) -> float:
    """Return microseconds of the server's CPU time per token of the windows together."""
    return 1e6 * sum(w.cpu for w in windows) / max(1, sum(w.tokens for w in windows))


FIGURES: dict[str, tuple[Figure, str]] = {
    "rate": (rate, "tokens/s"), "cpu": (cpu, "us of CPU time per token")}


def order(chance: random.Random) -> list[signal.Signals]:
    """Return the kinds of a round's windows, two of each, in random order."""
    return chance.sample([ON, ON, OFF, OFF], 4)


async def measure(server: Server, streams: int, rounds: int, seconds: float, chance: random.Random) -> list[Round]:
    load, stop = Load(server.target, 1, 0.0, 0), asyncio.Event()
    try:
        model = await load.model_info()
        prompts = Prompts(model.vocabulary_size, model.eos_token_ids, 0)
        endless = [TimedRequest(0.0, PROMPT, OUTPUT)] * 1_000_000
        running = asyncio.ensure_future(load.run(endless, prompts, stop, streams))
        await asyncio.sleep(WARM_UP)
        windows = []
        for turn in range(rounds):
            for kind in order(chance):
                server.switch(kind)
                await asyncio.sleep(SETTLE)
                began, before = load._now(), server.cpu_seconds()
                await asyncio.sleep(seconds)
                name = "on" if kind == ON else "off"
                windows.append((turn, name, began, load._now(), server.cpu_seconds() - before))
        stop.set()
        await running
    finally:
        await load.close()
    arrivals = sorted(arrival for outcome in load.outcomes for arrival in outcome.arrivals)
    found: list[Round] = [{"on": [], "off": []} for _ in range(rounds)]
    times = [at for at, _ in arrivals]
    for turn, kind, began, ended, used in windows:
        tokens = sum(count for _, count in arrivals[bisect_left(times, began) : bisect_left(times, ended)])
        found[turn][kind].append(Window(tokens, ended - began, used))
    return found


def ratios(rounds: Sequence[Round], figure: Figure) -> tuple[list[float], list[float]]:
    """Return on / off of each round, and the control: one / other window of each kind, in random order."""
    chance = random.Random(0)
    whole = [found for found in rounds if all(figure([window]) > 0 for kind in found.values() for window in kind)]
    costs = [figure(found["on"]) / figure(found["off"]) for found in whole]
    pairs = [chance.sample(windows, 2) for found in whole for windows in found.values()]
    return costs, [figure([one]) / figure([other]) for one, other in pairs]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the geometric mean, by resampling."""
    drawn, logs = random.Random(0), [math.log(value) for value in values]
    means = sorted(statistics.fmean(drawn.choices(logs, k=len(logs))) for _ in range(2000))
    return math.exp(means[50]), math.exp(means[1949])


def report(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the medians of both kinds, the ratio and the control with their intervals, by figure."""
    figures: dict[str, Any] = {}
    for name, (figure, _) in FIGURES.items():
        costs, control = ratios(rounds, figure)
        figures[name] = {
            **{kind: statistics.median(figure(found[kind]) for found in rounds) for kind in ("on", "off")},
            "ratio": statistics.geometric_mean(costs), "interval": interval(costs),
            "control": statistics.geometric_mean(control), "control_interval": interval(control)}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model to serve (default: the built-in model)")
    parser.add_argument("--streams", type=int, default=8, help="concurrent streams (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=150, help="rounds of four windows (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.25, help="length of a window (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the windows (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args, flags = arguments(parser)
    with server([*([args.model] if args.model else []), *flags]) as one:
        rounds = asyncio.run(measure(one, args.streams, args.rounds, args.seconds, random.Random(args.seed)))
        before = one.supervisor_seconds()
        for _ in range(SCRAPES):
            with urllib.request.urlopen(one.metrics) as page:
                page.read()
        scrape = (one.supervisor_seconds() - before) / SCRAPES
    figures = report(rounds)
    print(f"{args.streams} streams, {args.rounds} rounds of four windows of {args.seconds:g} s")
    for name, (_, unit) in FIGURES.items():
        found = figures[name]
        (low, high), (least, most) = found["interval"], found["control_interval"]
        print(f"{unit}: on {found['on']:.5g}, off {found['off']:.5g}; on / off {found['ratio']:.4f} (95 %: {low:.4f} "
              f"to {high:.4f}); control {found['control']:.4f} ({least:.4f} to {most:.4f})")
    print(f"a scrape: {1e3 * scrape:.1f} ms of CPU time")
    if args.json:
        windows = [{kind: [asdict(window) for window in found[kind]] for kind in found} for found in rounds]
        args.json.write_text(json.dumps(
            {"figures": figures, "scrape_seconds": scrape, "rounds": windows}, indent=1) + "\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["child", module]:
            child(module)
        case ["serve", *arguments]:
            serve(arguments)
        case _:
            main()
