"""A running server for benchmarks: start, metrics, log, child processes, stop. Requests to it, command-line arguments,
reports."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from npuserve.v1 import generate_pb2 as pb


class Serving:
    """A server that is ready.

    target: host:port. pid: process id of the supervisor. processes: kind and number, as in "frontend 0" -> process id,
    of the children at readiness.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path):
        self._log = log
        self.pid = process.pid
        while '"ready"' not in log.read_text() and "ready in" not in log.read_text():
            if process.poll() is not None:
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.05)
        text = log.read_text()
        self.target = re.findall(r"listening on ([\w.:\[\]]+:\d+)", text)[0]
        self._page = re.findall(r"http://\S+/metrics", text)[0]
        born = list(children(process.pid).items())
        self.processes = {f"{name} {sum(other == name for _, other in born[:place])}": pid
                          for place, (pid, name) in enumerate(born)}

    @property
    def metrics_address(self) -> tuple[str, int]:
        """Host and port of the metrics page."""
        parts = urllib.parse.urlsplit(self._page)
        return parts.hostname or "", parts.port or 0

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of the log that are JSON objects."""
        found = []
        for line in self._log.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def samples(self, name: str) -> dict[str, float]:
        """Return labels, as written on the page -> value, of a metric."""
        with urllib.request.urlopen(self._page, timeout=10) as page:
            text = page.read().decode()
        return {labels or "": float(value)
                for labels, value in re.findall(rf"^npuserve_{name}(\{{.*\}})? (\S+)$", text, re.MULTILINE)}

    def metric(self, name: str) -> float:
        return sum(self.samples(name).values())

    def histogram(self, name: str) -> dict[float, float]:
        """Return upper bound -> cumulative count of a histogram."""
        found = {float(re.findall(r'le="([^"]+)"', labels)[0]): count
                 for labels, count in self.samples(f"{name}_bucket").items()}
        return dict(sorted(found.items()))

    def rss(self) -> dict[str, float]:
        """Return the resident MiB of each process."""
        page = os.sysconf("SC_PAGE_SIZE") / 2**20
        return {name: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
                for name, pid in self.processes.items()}


def children(supervisor: int) -> dict[int, str]:
    """Return process id -> kind of a process's children that are not zombies: "engine", "frontend", or "ranks" of an
    engine.

    The programs of tests that replace a child end their command line with the kind.
    """
    kind = re.compile(r".*(?: -m npuserve\.service\.| )(engine|frontend|ranks)(?:\.process|\.follower)?(?: |$)")
    found = {pid: kind.match(args) for pid, args in sorted(descendants(supervisor))}  # a zombie's command line is empty
    return {pid: match[1] for pid, match in found.items() if match}


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Yield (process id, command line) of the children of a process; the command line of a zombie is empty."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                stat = Path(f"/proc/{entry}/stat").read_text(errors="replace")
                if int(stat.rpartition(")")[2].split()[1]) == pid:
                    yield int(entry), Path(f"/proc/{entry}/cmdline").read_text(errors="replace").replace("\0", " ")


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all living threads of a process."""
    nanoseconds = 0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since
            nanoseconds += int(file.read_text().split()[0])
    return nanoseconds / 1e9


def ranks_of(supervisor: int) -> list[int]:
    """Return the process ids of the other ranks of the engine; [] without tensor parallelism or an engine."""
    return [pid for pid, kind in children(engine_of(supervisor)).items() if kind == "ranks"]


def engine_of(supervisor: int) -> int:
    """Return the process id of the engine, 0 while there is none."""
    return next((pid for pid, kind in children(supervisor).items() if kind == "engine"), 0)


def percentile(histogram: dict[float, float], share: float) -> float:
    """Return the upper bound of the bucket that holds the given share of the samples."""
    counts = list(histogram.values())
    return next((bound for bound, count in histogram.items() if count >= share * counts[-1]), float("inf"))


@contextlib.contextmanager
def serving(
    model: str, flags: Sequence[str], program: Sequence[str] = ("-m", "npuserve.cli"),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Serving]:
    """Run `npuserve serve` with JSON logs, and yield it once it is ready.

    program: arguments of Python that take the place of `-m npuserve.cli`.
    environment: further variables.
    """
    with tempfile.TemporaryDirectory(prefix="npuserve-bench-") as folder:
        log = Path(folder, "log")
        command = [sys.executable, *program, "serve", *([model] if model else []), *flags,
                   "--port", "0", "--metrics-port", "0", "--log-format", "json"]
        with log.open("w") as out:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                       env={**os.environ, **environment})
        try:
            yield Serving(process, log)
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def arguments(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """Return the parsed arguments before `--`, and the arguments after it, which are settings of the server."""
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    return parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]


def greedy_request(prompt: Sequence[int], tokens: int) -> pb.GenerateRequest:
    """Return a greedy request of token ids that generates `tokens` tokens and returns their ids."""
    request = pb.GenerateRequest()
    request.token_ids.ids.extend(prompt)
    request.sampling.temperature = 0.0
    request.stopping.max_tokens = tokens
    request.stopping.ignore_eos = True
    request.output.return_token_ids = True
    return request


def report(figures: dict[str, Any], file: Path | None) -> None:
    """Print the figures except single rounds, and write all figures to `file` if given."""
    def text(shown: dict[str, Any]) -> str:
        return json.dumps(shown, indent=1, ensure_ascii=False)

    print(text({name: value for name, value in figures.items() if name != "rounds"}))
    if file:
        file.write_text(text(figures) + "\n")
