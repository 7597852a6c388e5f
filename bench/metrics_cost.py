"""What metrics cost: a server under load, whose metrics are switched on and off in turn, some times a second.

    python bench/metrics_cost.py [MODEL] [--streams 8] [--rounds 300] [--seconds 0.25] [--json FILE] [-- FLAGS]

A real server and a closed loop of so many streams. A round is a window with metrics and one without, the first of them
in turn; neighbours on the machine, whose load changes more slowly than that, disturb both alike. `on` is the server as
it comes: every metric, kernels timed at the default sampling. In `off` counting does nothing and no kernel is timed.
Told are tokens per second and the server's processor time per token: the medians, the median of the rounds' ratios on /
off with its 95 % interval (bootstrap), and the middle half of the ratios. Afterwards the page is scraped some times,
and what that takes is told apart. What follows `--` are settings of the server.
"""

from __future__ import annotations

import npuserve.service.bench_threads  # noqa: F401

# isort: split
import argparse
import asyncio
import contextlib
import json
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from serving import arguments

from npuserve.service.bench_load import Load
from npuserve.service.bench_workload import Ask, Prompts

PROMPT, OUTPUT = 32, 200
WARM_UP = 3.0  # seconds
SCRAPES = 50
SETTLE = 0.02  # seconds of a window that do not count: what was under way when it began
ON, OFF = signal.SIGUSR1, signal.SIGUSR2


# The server


def child(module: str) -> None:
    """A child of the supervisor that counts from ON and does not from OFF."""
    from prometheus_client import Counter, Gauge, Histogram

    from npuserve.service import engine_process, frontend, metrics

    counting = [(kind, name, getattr(kind, name)) for kind, names in (
        (Counter, ("inc",)), (Gauge, ("set", "inc")), (Histogram, ("observe",)), (metrics.Tally, ("observe", "flush")),
    ) for name in names]
    runners = []
    load_model = engine_process.load_model

    def remembered(config: object, *rest: object) -> object:
        runners.append((load_model(config, *rest), config.kernel_sampling))
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
    from npuserve.service import logs, settings, supervisor

    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    config = settings.load(parser.parse_args(arguments), os.environ)
    logs.setup(config, "supervisor")
    commands = {module: (sys.executable, __file__, "child", module) for module in ("frontend", "engine")}
    sys.exit(asyncio.run(supervisor.Supervisor(config, **commands).run()))


@dataclass(frozen=True)
class Server:
    """target: its address. metrics: its page's. supervisor, children: pids."""

    target: str
    metrics: str
    supervisor: int
    children: list[int]

    def switch(self, number: signal.Signals) -> None:
        for pid in self.children:
            os.kill(pid, number)

    def cpu_seconds(self) -> float:
        """Of all living threads of the children, so far."""
        tasks = (task for pid in self.children for task in Path(f"/proc/{pid}/task").glob("*/schedstat"))
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def supervisor_seconds(self) -> float:
        """Of all its threads, the ended ones too, in ticks of the clock: each scrape has a thread of its own."""
        fields = Path(f"/proc/{self.supervisor}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def server(arguments: list[str]) -> Iterator[Server]:
    """Ready."""
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
                raise SystemExit(f"the server was in trouble: {last}")
        finally:
            process.terminate()
            process.wait()


# The measurement


Round = dict[str, dict[str, float]]


async def measure(server: Server, streams: int, rounds: int, seconds: float) -> list[Round]:
    """Of each round's two windows: rate, tokens per second, and cpu, microseconds of processor time per token."""
    load, stop = Load(server.target, 1, 0.0, 0), asyncio.Event()
    try:
        model = await load.model_info()
        prompts = Prompts(model.vocabulary_size, model.eos_token_ids, 0)
        running = asyncio.ensure_future(load.run([Ask(0.0, PROMPT, OUTPUT)] * 1_000_000, prompts, stop, streams))
        await asyncio.sleep(WARM_UP)
        windows = []
        for turn in range(rounds):
            for kind in (ON, OFF) if turn % 2 else (OFF, ON):
                server.switch(kind)
                await asyncio.sleep(SETTLE)
                began, before = load._now(), server.cpu_seconds()
                await asyncio.sleep(seconds)
                windows.append((turn, kind.name, began, load._now(), server.cpu_seconds() - before))
        stop.set()
        await running
    finally:
        await load.close()
    arrivals = sorted(arrival for outcome in load.outcomes for arrival in outcome.arrivals)
    found: list[Round] = [{} for _ in range(rounds)]
    times = [at for at, _ in arrivals]
    for turn, name, began, ended, cpu in windows:
        tokens = sum(count for _, count in arrivals[bisect_left(times, began) : bisect_left(times, ended)])
        key = "on" if name == ON.name else "off"
        found[turn][key] = {"rate": tokens / (ended - began), "cpu": 1e6 * cpu / max(1, tokens)}
    return found


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % of the medians of resampled rounds."""
    drawn = random.Random(0)
    medians = sorted(statistics.median(drawn.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="as of npuserve serve (default: the built-in model)")
    parser.add_argument("--streams", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=300, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.25, help="of a window (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args, flags = arguments(parser)
    with server([*([args.model] if args.model else []), *flags]) as one:
        rounds = asyncio.run(measure(one, args.streams, args.rounds, args.seconds))
        before = one.supervisor_seconds()
        for _ in range(SCRAPES):
            with urllib.request.urlopen(one.metrics) as page:
                page.read()
        scrape = (one.supervisor_seconds() - before) / SCRAPES
    print(f"{args.streams} streams, {args.rounds} rounds of two windows of {args.seconds:g} s")
    for name, unit in (("rate", "tokens/s"), ("cpu", "us of processor time a token")):
        on, off = (statistics.median(found[kind][name] for found in rounds) for kind in ("on", "off"))
        ratios = [found["on"][name] / found["off"][name] for found in rounds if found["off"][name]]
        low, high = interval(ratios)
        first, _, third = statistics.quantiles(ratios, n=4)
        print(f"{unit}: on {on:.5g}, off {off:.5g}; on / off {statistics.median(ratios):.4f} (95 %: {low:.4f} to "
              f"{high:.4f}; half of the rounds {first:.3f} to {third:.3f})")
    print(f"a scrape: {1e3 * scrape:.1f} ms of processor time")
    if args.json:
        args.json.write_text(json.dumps({"rounds": rounds, "scrape_seconds": scrape}, indent=1) + "\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["child", module]:
            child(module)
        case ["serve", *arguments]:
            serve(arguments)
        case _:
            main()
