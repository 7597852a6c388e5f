"""`npuserve top`: show a server's load, latencies and slowest kernels, live from its metrics page.

The key q or Ctrl-C ends it. All figures cover the time between two scrapes. Kernels are timed on about every 32nd step
only, so their figures cover the time since the server's start if no step was timed between the scrapes.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from npuserve.cli.metrics_reader import Page, Unreadable, Window, page_url, read_page
from npuserve.service.arguments import number

LATENCIES = {
    "time to first token": "time_to_first_token", "between tokens": "inter_token_latency",
    "per output token": "time_per_output_token", "end to end": "e2e_request_latency", "queue": "queue_time",
}
NOT_ERRORS = ("OK", "CANCELLED", "ABORTED")
"""Status codes that are not counted as errors. CANCELLED: the client left. ABORTED: the client read nothing for too
long, or resumed its stream by another call."""
MAX_KERNELS = 12
DROPPED_FIRST = ("backend", "calls", "p50", "tokens", "per s", "p90", "phase", "mean", "share")
"""Order in which a narrow screen drops columns."""
START = Page(0.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", type=_url, default="127.0.0.1:9090", metavar="HOST:PORT",
        help="metrics port of the server, or the URL that serve prints (default: %(default)s)")
    add("--interval", type=number(float, 0.1, 3600), default=2.0, metavar="SECONDS",
        help="time between two scrapes (default: %(default)s)")
    add("--once", action="store_true", help="show one interval and exit")
    add("--json", action="store_true", help="print one interval as a JSON object, with times in seconds, and exit")


def _url(text: str) -> str:
    """Return the page's URL; the argparse type of --target."""
    try:
        return page_url(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be HOST:PORT or a URL, got {text!r}") from None


def run(args: argparse.Namespace) -> int:
    """Return 1 if the first scrape fails, 0 after q or Ctrl-C. Later failures are shown, and scraping continues."""
    url = args.target
    shown = urlsplit(args.target).netloc
    console = Console()
    try:
        before = read_page(url)
        if args.once or args.json:
            time.sleep(args.interval)
            now = figures(Window(before, read_page(url)))
            if args.json:
                print(json.dumps(now))
            else:
                console.print(view(now, shown))
            return 0
    except Unreadable as error:
        print(f"npuserve top: {error}", file=sys.stderr)
        return 1
    with suppress(KeyboardInterrupt):
        _refresh(url, before, args.interval, console)
    return 0


def _refresh(url: str, before: Page, interval: float, console: Console) -> None:
    """Show each interval until the user presses q."""
    first = Text(f"{url}: waiting {interval:g} s for the first interval …")
    with _keyboard() as keyboard, Live(first, console=console, auto_refresh=False, screen=True) as live:
        hint = Text("q ends" if keyboard is not None else "Ctrl-C ends", "dim")
        while not _is_ended(keyboard, interval):
            try:
                after = read_page(url)
            except Unreadable as error:
                live.update(Panel(Text(str(error), "bold red"), title="npuserve top"), refresh=True)
                continue
            live.update(Group(view(figures(Window(before, after)), urlsplit(url).netloc), hint), refresh=True)
            before = after


@contextmanager
def _keyboard() -> Iterator[int | None]:
    """Let the terminal send each key at once, and yield its descriptor; None without a terminal in the foreground."""
    if sys.stdin is None or not sys.stdin.isatty() or os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp():
        yield None
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _is_ended(keyboard: int | None, seconds: float) -> bool:
    """Wait, and return True as soon as the user presses q."""
    deadline = time.monotonic() + seconds
    while keyboard is not None and (left := deadline - time.monotonic()) > 0:
        if select.select([keyboard], [], [], left)[0]:
            keys = os.read(keyboard, 1024)
            if b"q" in keys.lower():
                return True
            if not keys:
                break
    time.sleep(max(0.0, deadline - time.monotonic()))
    return False


def figures(window: Window) -> dict[str, Any]:
    """Return the figures to show: times in seconds, rates per second, shares of 1; None without observations."""
    now = window.after
    rate = window.rate
    build: dict[str, str] = next((dict(labels) for labels, _ in now.samples.get("npuserve_build_info", ())), {})
    ended = rate("npuserve_requests_total")
    kernels = _kernels(window)
    return {
        "model": build.get("model"), "backend": build.get("backend"), "version": build.get("version"),
        "seconds": window.seconds,
        "heartbeat_age": now.sum("npuserve_engine_heartbeat_age_seconds"),
        "engine_restarts": now.sum("npuserve_engine_restarts_total"),
        "running": now.sum("npuserve_requests_running"), "waiting": now.sum("npuserve_requests_waiting"),
        "kv_cache_usage": now.sum("npuserve_kv_cache_usage_ratio"),
        "buffered_tokens": now.sum("npuserve_stream_buffered_tokens"),
        "answers": rate("npuserve_request_finish_total"), "goodput": rate("npuserve_requests_on_target_total"),
        "errors": ended - sum(rate("npuserve_requests_total", code=code) for code in NOT_ERRORS),
        "rejections": rate("npuserve_queue_rejections_total"), "preemptions": rate("npuserve_preemptions_total"),
        "prompt_tokens": rate("npuserve_prompt_tokens_total"),
        "generated_tokens": rate("npuserve_generation_tokens_total"),
        "drafted_tokens": rate("npuserve_draft_tokens_total"),
        "draft_acceptance": window.ratio("npuserve_accepted_draft_tokens_total", "npuserve_draft_tokens_total"),
        "head_steps": _head_share(window),
        "prefix_hits": window.ratio("npuserve_prefix_cache_hits_total", "npuserve_prefix_cache_queries_total"),
        "latencies": {name: _spread(window, f"npuserve_{metric}_seconds") for name, metric in LATENCIES.items()},
        "steps": {phase: {
            "rate": rate("npuserve_step_seconds_count", phase=phase),
            "tokens": window.mean("npuserve_step_tokens", phase=phase),
            **_spread(window, "npuserve_step_seconds", phase=phase),
        } for phase in ("decode", "mixed", "prefill")},
        "host_gap": _spread(window, "npuserve_step_host_gap_seconds"),
        "kernels_since_start": not kernels,
        "kernels": kernels or _kernels(Window(START, now)),
    }


def _head_share(window: Window) -> float | None:
    """Return the share of steps that computed the model's head for drafts, or a smaller model; None without one."""
    computed, stopped = (window.increase("npuserve_head_steps_total", head=state) for state in ("computed", "stopped"))
    return computed / (computed + stopped) if computed + stopped else None


def _spread(window: Window, histogram: str, **labels: str) -> dict[str, float | None]:
    quantiles = {f"p{round(100 * q)}": window.quantile(q, histogram, **labels) for q in (0.5, 0.9, 0.99)}
    return {"mean": window.mean(histogram, **labels), **quantiles}


def _kernels(window: Window) -> list[dict[str, Any]]:
    """Return the figures of each kernel, the largest share first. share: share of the time of all kernels."""
    name = "npuserve_kernel_latency_seconds"
    total = window.increase(f"{name}_sum")
    rows = []
    for labels, _ in window.after.samples.get(f"{name}_count", ()):
        if calls := window.increase(f"{name}_count", **labels):
            share = window.increase(f"{name}_sum", **labels) / total
            rows.append({**labels, "calls": calls, "share": share, **_spread(window, name, **labels)})
    return sorted(rows, key=lambda kernel: -kernel["share"])


def view(now: dict[str, Any], target: str) -> Group:
    """Return the screen for `figures`."""
    head = Text.assemble(
        (now["model"] or "no model yet", "bold"), f"  {now['backend'] or ''}  npuserve {now['version'] or ''}  "
        f"{target}  over {now['seconds']:.1f} s")
    age = now["heartbeat_age"]
    if age > 5:
        head.append(f"\nno heartbeat of the engine for {age:.0f} s", "bold red")
    load = _Cells([
        _cell("running", f"{now['running']:.0f}"), _cell("waiting", f"{now['waiting']:.0f}", now["waiting"] > 0),
        _cell("KV cache", f"{now['kv_cache_usage']:.0%}", now["kv_cache_usage"] > 0.95),
        _cell("prefix hits", _share(now["prefix_hits"])),
        _cell("answers", f"{now['answers']:.2f}/s"), _cell("goodput", f"{now['goodput']:.2f}/s"),
        _cell("errors", f"{now['errors']:.2f}/s", now["errors"] > 0),
        _cell("rejected", f"{now['rejections']:.2f}/s", now["rejections"] > 0),
        _cell("generated", f"{now['generated_tokens']:.0f} tok/s"),
        _cell("prompts", f"{now['prompt_tokens']:.0f} tok/s"),
        _cell("drafted", f"{now['drafted_tokens']:.0f} tok/s, {_share(now['draft_acceptance'])} accepted"),
        *([] if now["head_steps"] is None else [_cell("draft head", f"{_share(now['head_steps'])} of steps")]),
        _cell("preempted", f"{now['preemptions']:.2f}/s", now["preemptions"] > 0),
        _cell("restarts", f"{now['engine_restarts']:.0f}", now["engine_restarts"] > 0),
    ])
    latencies = _Table("latency", ("mean", "p50", "p90", "p99"), [
        [name, *map(_time, spread.values())]
        for name, spread in (*now["latencies"].items(), ("host gap", now["host_gap"]))])
    steps = _Table("steps", ("per s", "tokens", "mean", "p50", "p99"), [
        [phase, f"{step['rate']:.1f}", "–" if step["tokens"] is None else f"{step['tokens']:.1f}",
         *(_time(step[key]) for key in ("mean", "p50", "p99"))]
        for phase, step in now["steps"].items()])
    title = "kernels, since the start" if now["kernels_since_start"] else "kernels"
    kernels = _Table(title, ("phase", "backend", "share", "calls", "mean", "p50", "p99"), [
        [kernel["kernel"], kernel["phase"], kernel["backend"], f"{kernel['share']:.1%}", f"{kernel['calls']:.0f}",
         *(_time(kernel[key]) for key in ("mean", "p50", "p99"))]
        for kernel in now["kernels"][:MAX_KERNELS]])
    return Group(head, load, latencies, steps, kernels)


@dataclass(frozen=True)
class _Cells:
    """Grid of names with their values: at most four columns, and fewer on a narrow screen."""

    cells: list[Text]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for count in (4, 3, 2, 1):
            widths = [max(cell.cell_len for cell in self.cells[i::count]) for i in range(count)]
            if sum(widths) + 3 * (count - 1) <= options.max_width:
                break
        grid = Table.grid(padding=(0, 3))
        for _ in range(count):
            grid.add_column(no_wrap=True)
        for row in range(0, len(self.cells), count):
            grid.add_row(*self.cells[row : row + count])
        yield grid


@dataclass(frozen=True)
class _Table:
    """Table of text cells, whose first column holds the row names.

    A narrow screen drops whole columns and names them, because a truncated number looks like another number.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = [[self.title, *self.columns], *self.rows]
        widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
        wide = [max(22, widths[0]), *(max(7, width) for width in widths[1:])]
        kept = list(range(len(widths)))
        dropped = []
        while len(kept) > 1 and sum(widths[i] for i in kept) + len(kept) - 1 > options.max_width:
            name = next((name for name in DROPPED_FIRST if name in self.columns and name not in dropped), None)
            if name is None:
                break
            dropped.append(name)
            kept.remove(1 + self.columns.index(name))
        gap = 2 if sum(widths[i] for i in kept) + 2 * (len(kept) - 1) <= options.max_width else 1
        if sum(wide[i] for i in kept) + gap * (len(kept) - 1) <= options.max_width:
            widths = wide
        table = Table(box=None, header_style="bold", padding=(0, gap, 0, 0), pad_edge=False)
        for i in kept:
            left = cells[0][i] in (self.title, "phase", "backend")
            table.add_column(
                cells[0][i], justify="left" if left else "right", min_width=widths[i], no_wrap=True)
        for row in self.rows:
            table.add_row(*(row[i] for i in kept))
        yield table
        if dropped:
            yield Text(f"a wider screen shows {', '.join(dropped)}", "dim")


def _cell(name: str, value: str, alarming: bool = False) -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, "bold red" if alarming else "bold"))


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
