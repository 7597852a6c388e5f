"""`npuserve top`: a server's load, latencies and slowest kernels, live from its metrics page.

Everything is of the time between two scrapes, but for the kernels: those are timed on every 32nd step or so, and where
there was none in between, since the server's start.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any, NoReturn

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from npuserve.service.arguments import number
from npuserve.service.metrics_reader import Page, Unreadable, Window, read_page

LATENCIES = {
    "time to first token": "time_to_first_token", "between tokens": "inter_token_latency",
    "per output token": "time_per_output_token", "end to end": "e2e_request_latency", "queue": "queue_time",
}
GIVEN_UP = ("OK", "CANCELLED")
"""Codes that are no error of anybody's: a client may leave."""
KERNELS = 12
START = Page(0.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", default="127.0.0.1:9090", help="host:port of the server's metrics (default: %(default)s)")
    add("--interval", type=number(float, 0.1, 3600), default=2.0, metavar="SECONDS",
        help="between two scrapes (default: %(default)s)")
    add("--once", action="store_true", help="show one interval and leave")
    add("--json", action="store_true", help="with --once: as one JSON object, times in seconds")


def run(args: argparse.Namespace) -> int:
    """1 if there is no server at first; one that leaves later is waited for. Ctrl-C is no error: 0."""
    url = f"http://{args.target}/metrics"
    console = Console()
    try:
        before = read_page(url)
    except Unreadable as error:
        print(f"npuserve top: {error}", file=sys.stderr)
        return 1
    if args.once or args.json:
        time.sleep(args.interval)
        try:
            found = figures(Window(before, read_page(url)))
        except Unreadable as error:
            print(f"npuserve top: {error}", file=sys.stderr)
            return 1
        if args.json:
            print(json.dumps(found))
        else:
            console.print(view(found, args.target))
        return 0
    try:
        _watch(url, before, args, console)
    except KeyboardInterrupt:
        return 0


def _watch(url: str, before: Page, args: argparse.Namespace, console: Console) -> NoReturn:
    first = Text(f"{url}: the first {args.interval:g} s …")
    with Live(first, console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(args.interval)
            try:
                after = read_page(url)
            except Unreadable as error:
                live.update(Panel(Text(str(error), "bold red"), title="npuserve top"), refresh=True)
                continue
            live.update(view(figures(Window(before, after)), args.target), refresh=True)
            before = after


def figures(window: Window) -> dict[str, Any]:
    """What there is to show. Times in seconds, rates per second, shares of 1; None where nothing happened."""
    now, rate = window.after, window.rate
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
        "errors": ended - sum(rate("npuserve_requests_total", code=code) for code in GIVEN_UP),
        "rejections": rate("npuserve_queue_rejections_total"), "preemptions": rate("npuserve_preemptions_total"),
        "prompt_tokens": rate("npuserve_prompt_tokens_total"),
        "generated_tokens": rate("npuserve_generation_tokens_total"),
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


def _spread(window: Window, histogram: str, **labels: str) -> dict[str, float | None]:
    quantiles = {f"p{round(100 * q)}": window.quantile(q, histogram, **labels) for q in (0.5, 0.9, 0.99)}
    return {"mean": window.mean(histogram, **labels), **quantiles}


def _kernels(window: Window) -> list[dict[str, Any]]:
    """Those that took the most of the timed steps first. share: of the time of all kernels."""
    name = "npuserve_kernel_latency_seconds"
    whole = window.grown(f"{name}_sum")
    found = []
    for labels, _ in window.after.samples.get(f"{name}_count", ()):
        if calls := window.grown(f"{name}_count", **labels):
            share = window.grown(f"{name}_sum", **labels) / whole
            found.append({**labels, "calls": calls, "share": share, **_spread(window, name, **labels)})
    return sorted(found, key=lambda kernel: -kernel["share"])


def view(found: dict[str, Any], target: str) -> Group:
    """The screen."""
    head = Text.assemble(
        (found["model"] or "no model yet", "bold"), f"  {found['backend'] or ''}  npuserve {found['version'] or ''}  "
        f"{target}  over {found['seconds']:.1f} s")
    age = found["heartbeat_age"]
    if age > 5:
        head.append(f"\nthe engine has been silent for {age:.0f} s", "bold red")
    load = Table.grid(padding=(0, 3))
    for _ in range(4):
        load.add_column()
    cells = [
        _cell("running", f"{found['running']:.0f}"), _cell("waiting", f"{found['waiting']:.0f}", found["waiting"] > 0),
        _cell("KV cache", f"{found['kv_cache_usage']:.0%}", found["kv_cache_usage"] > 0.95),
        _cell("prefix hits", _share(found["prefix_hits"])),
        _cell("answers", f"{found['answers']:.2f}/s"), _cell("goodput", f"{found['goodput']:.2f}/s"),
        _cell("errors", f"{found['errors']:.2f}/s", found["errors"] > 0),
        _cell("rejected", f"{found['rejections']:.2f}/s", found["rejections"] > 0),
        _cell("generated", f"{found['generated_tokens']:.0f} tok/s"),
        _cell("prompts", f"{found['prompt_tokens']:.0f} tok/s"),
        _cell("preempted", f"{found['preemptions']:.2f}/s", found["preemptions"] > 0),
        _cell("restarts", f"{found['engine_restarts']:.0f}", found["engine_restarts"] > 0),
    ]
    for row in range(0, len(cells), 4):
        load.add_row(*cells[row : row + 4])
    latencies = _table("latency", "mean", "p50", "p90", "p99")
    for name, spread in found["latencies"].items():
        latencies.add_row(name, *map(_time, spread.values()))
    latencies.add_row("host gap", *map(_time, found["host_gap"].values()))
    steps = _table("steps", "per s", "tokens", "mean", "p50", "p99")
    for phase, step in found["steps"].items():
        tokens = "–" if step["tokens"] is None else f"{step['tokens']:.1f}"
        steps.add_row(phase, f"{step['rate']:.1f}", tokens, *(_time(step[key]) for key in ("mean", "p50", "p99")))
    title = "kernels, since the start" if found["kernels_since_start"] else "kernels"
    kernels = _table(title, "phase", "backend", "share", "calls", "mean", "p50", "p99")
    for kernel in found["kernels"][:KERNELS]:
        kernels.add_row(
            kernel["kernel"], kernel["phase"], kernel["backend"], f"{kernel['share']:.1%}", f"{kernel['calls']:.0f}",
            *(_time(kernel[key]) for key in ("mean", "p50", "p99")))
    return Group(head, load, latencies, steps, kernels)


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(first, min_width=22, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="left" if column in ("phase", "backend") else "right", min_width=7)
    return table


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
