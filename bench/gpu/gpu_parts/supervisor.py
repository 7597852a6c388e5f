"""Parent process of the parts: runs child processes, kills hanging ones, and updates the report. Imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GRACE = 30.0
"""Seconds beyond a part's budget after which its process is killed, because it hangs."""

Row = dict[str, Any]


START = 90.0
"""Maximum seconds from a process's start to its first part: it imports torch and opens the device."""


_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}

PARALLEL = {"numbers", "candidates"}
"""Parts without timings that compile many kernels; several processes share them."""


@dataclass
class Report:
    """Results so far, and the two files written from them. notes: (part, unit, event). Thread-safe."""

    folder: Path
    arguments: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    notes: list[tuple[str, str, str]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def wrong(self) -> list[str]:
        """Rows and units with errors."""
        return [*(f"{row['part']}: {line(row)}" for row in self.rows if row.get("ok") is False),
                *(f"{part}/{unit}: {said.strip().splitlines()[-1]}" for part, unit, said in self.notes
                  if not said.startswith("left out"))]

    def write(self) -> None:
        with self._lock:
            self._write()

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        whole = {"arguments": self.arguments, "rows": self.rows, "seconds": self.seconds, "wrong": self.wrong,
                 "notes": [dict(zip(("part", "unit", "said"), note, strict=True)) for note in self.notes]}
        for name, text in (("cuda.json", json.dumps(whole, indent=1) + "\n"), ("cuda.md", markdown(self))):
            part = self.folder / f".{name}"
            part.write_text(text, encoding="utf-8")
            part.replace(self.folder / name)


def run(args: argparse.Namespace, command: list[str], environment: dict[str, str]) -> int:
    """Run all parts; return 1 if anything is wrong, otherwise 0."""
    shown = {name: value for name, value in vars(args).items() if name not in ("worker", "budget")}
    report = Report(args.out.resolve(), json.loads(json.dumps(shown, default=str)))
    print(f"seed {args.seed}", flush=True)
    ends = time.monotonic() + args.seconds
    for parallel, parts in itertools.groupby(args.parts, PARALLEL.__contains__):
        named = list(parts)
        shards = args.shards if parallel else 1
        with ThreadPoolExecutor(shards) as pool:
            list(pool.map(lambda i: _parts(args, command, environment, report, list(named), [i, shards], ends),  # noqa: B023
                          range(shards)))
    for said in report.wrong:
        print(f"WRONG {said}", flush=True)
    print(f"{len(report.rows)} rows, {len(report.wrong)} wrong; {report.folder / 'cuda.md'}", flush=True)
    return 1 if report.wrong else 0


def _parts(args: argparse.Namespace, command: list[str], environment: dict[str, str], report: Report, left: list[str],
           shard: list[int], ends: float) -> None:
    """Run processes until no part is left. shard: (number, count) of the processes that share the parts."""
    done: list[str] = []
    while left:
        before = len(done), len(left)
        _worker(args, command, environment, report, left, done, shard, ends)
        if (len(done), len(left)) == before:
            report.notes.append((left.pop(0), "all", "its process ended before it began: see what it printed"))
        report.write()


def _worker(args: argparse.Namespace, command: list[str], environment: dict[str, str], report: Report,
            left: list[str], done: list[str], shard: list[int], ends: float) -> None:
    """Run one process for the parts in `left`; remove finished parts from it, and add finished units to `done`."""
    order = json.dumps({"parts": left, "done": done, "seconds": ends - time.monotonic(), "out": str(report.folder),
                        "shard": shard})
    process = subprocess.Popen([*command, "--worker", order], stdout=subprocess.PIPE, env=environment, text=True,
                               **_GROUP)
    events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(process, events.put), daemon=True).start()
    unit, began, limit = "", time.monotonic(), ends + GRACE
    try:
        while True:
            try:
                event = events.get(timeout=max(0.0, limit - time.monotonic()))
            except queue.Empty:
                report.notes.append((left[0], unit or "its start", f"did not end within {limit - began:.0f} s"))
                if time.monotonic() >= ends:
                    report.notes += [(part, "all", "left out: the run's time is over") for part in left[1:]]
                    left.clear()
                return
            if event is None:
                if left and unit:
                    report.notes.append((left[0], unit, f"its process ended, exit code {process.wait()}"))
                return
            kind, part = event.pop("event"), event.pop("part", "")
            if kind == "start":
                limit = min(time.monotonic() + START, ends + GRACE)
            elif kind == "part":
                began, unit = time.monotonic(), ""
                limit = min(began + args.budgets[part], ends) + GRACE
                if shard[0] == 0:
                    print(f"== {part}", flush=True)
            elif kind == "begin":
                unit = event["unit"]
                done.append(f"{part}/{unit}")
            elif kind == "row":
                report.rows.append({"part": part, **event})
                print(line(event), flush=True)
            elif kind == "note":
                report.notes.append((part, event["unit"], event["said"]))
                print(f"{event['unit']}: {event['said']}", flush=True)
            elif kind == "end":
                report.seconds[part] = max(report.seconds.get(part, 0), round(time.monotonic() - began, 1))
                unit = ""
                left.remove(part)
            report.write()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # including a server that it started
        process.wait()


def _read(process: subprocess.Popen[str], put: Callable[[dict[str, Any] | None], None]) -> None:
    assert process.stdout
    for text in process.stdout:
        put(json.loads(text))
    put(None)


def line(row: Row) -> str:
    """Return a row as one readable line."""
    return ", ".join(f"{name} {cell(value)}" for name, value in row.items() if name not in ("table", "part"))


def cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.1e}" if value and not 1e-3 <= abs(value) < 1e6 else f"{value:.0f}" if abs(value) >= 1000 else (
            f"{value:.3g}")
    return "" if value is None else str(value)


def markdown(report: Report) -> str:
    tables: dict[str, list[Row]] = {}
    for row in report.rows:
        tables.setdefault(row.get("table", row["part"]), []).append(row)
    seed, shape = report.arguments["seed"], report.arguments["shape"]
    said = ["### On a GPU: `bench/gpu/gpu.py`", "", f"Seed {seed}, shape {shape}."]
    for title, rows in tables.items():
        columns = list(dict.fromkeys(name for row in rows for name in row if name not in ("table", "part")))
        said += ["", f"#### {title}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        said += ["| " + " | ".join(cell(row.get(name)).replace("|", "/") for name in columns) + " |" for row in rows]
    if report.notes:
        said += ["", "#### Failed or left out", ""]
        said += [f"- {part}, {unit}: {text.strip().splitlines()[-1]}" for part, unit, text in report.notes]
    said += ["", "Seconds: " + ", ".join(f"{part} {seconds}" for part, seconds in report.seconds.items()), ""]
    return "\n".join(said)
