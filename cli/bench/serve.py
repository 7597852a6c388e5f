"""`npuserve bench serve`: send load to a running server; report latencies and throughput."""

from __future__ import annotations

import npuserve.cli.bench.grpc_threads  # noqa: F401

# isort: split
import argparse
import asyncio
import importlib.util
import json
import math
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from npuserve.cli import connection
from npuserve.cli.bench import report as bench_report
from npuserve.cli.bench.load_generator import Load
from npuserve.cli.bench.workload import Prompts, TimedRequest, TraceError, cut_to_context, poisson, read_trace
from npuserve.client.rpc_errors import from_rpc
from npuserve.service.arguments import number
from npuserve.v1 import model_pb2

MAX_SCALE = 1e6
MAX_REQUESTS = 1_000_000


class BenchError(Exception):
    """The run cannot start; the message gives the reason."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `npuserve bench serve`."""
    count = number(int, 1)
    positive = number(float, 1e-9)
    scale = number(float, 0, MAX_SCALE)
    requests = number(int, 0, MAX_REQUESTS)
    add = parser.add_argument
    connection.add_target_argument(parser)
    arrivals = parser.add_mutually_exclusive_group()
    arrivals.add_argument("--trace", type=Path, metavar="FILE", help=(
        "take arrivals and lengths from an Azure LLM inference trace (CSV) or a Mooncake trace (JSON lines with shared "
        "prefixes)"))
    arrivals.add_argument("--rate", type=positive, help="Poisson arrivals per second; inf sends all at once")
    arrivals.add_argument("--concurrency", type=count, help=(
        "closed loop of this many clients, each sending its next request when the previous one ends (default: 8, "
        "without --trace and --rate)"))
    add("--requests", type=requests, default=200, help=(
        "number of requests; 0 sends the whole --trace (default: %(default)s)"))
    add("--time-scale", type=scale, default=1.0, help=(
        "factor of the trace's arrival times; 0.5 doubles the rate (default: %(default)s)"))
    add("--length-scale", type=scale, default=1.0, help=(
        "factor of the trace's prompts, answers and shared prefixes, for small models (default: %(default)s)"))
    add("--prompt-tokens", type=count, default=128, help="tokens of a prompt, without --trace (default: %(default)s)")
    add("--output-tokens", type=count, default=64, help="tokens of an answer, without --trace (default: %(default)s)")
    add("--max-prompt", type=number(int, 0), default=0, help="maximum tokens of a prompt (default: model's context)")
    add("--max-output", type=number(int, 0), default=0, help="maximum tokens of an answer (default: model's context)")
    add("--temperature", type=number(float, 0, 100), default=0.0, help="0 is greedy (default: %(default)s)")
    add("--channels", type=number(int, 1, 1024), default=1, help="number of connections (default: %(default)s)")
    add("--seed", type=number(int, 0, 2**32), default=0, help=(
        "seed of arrivals, prompts and sampling (default: %(default)s)"))
    add("--slo-ttft-ms", type=positive, help="goodput target: time to first token")
    add("--slo-tpot-ms", type=positive, help="goodput target: time per output token")
    add("--json", type=Path, metavar="FILE", help="write all figures and the outcome of each request")
    add("--plot", type=Path, metavar="FILE", help="draw latencies and a timeline (needs pip install 'npuserve[bench]')")
    connection.add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 if a request ended OK, 1 if none did or the run could not start, 130 after Ctrl-C, 143 after SIGTERM."""
    try:
        _check_outputs(args)
        return asyncio.run(_run(args, _requests(args)))
    except (BenchError, TraceError, connection.ConnectionFailed) as error:
        print(f"npuserve bench serve: {error}", file=sys.stderr)
        return 1


def _check_outputs(args: argparse.Namespace) -> None:
    """Raise BenchError if --json or --plot cannot be written, before a run whose results would be lost."""
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib: pip install 'npuserve[bench]'")
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        try:
            if path:
                _check_writable(option, path)
        except OSError as error:
            raise BenchError(f"{option}: {path} cannot be written: {error.strerror}") from None
    if args.plot and (kind := args.plot.suffix.removeprefix(".").lower()):
        from matplotlib.backend_bases import FigureCanvasBase

        if kind not in (known := FigureCanvasBase.get_supported_filetypes()):
            raise BenchError(f"--plot: unknown image format {kind!r}; known: {', '.join(sorted(known))}")
    if not args.trace and not args.requests:
        raise BenchError("--requests: must be at least 1 without --trace")


def _check_writable(option: str, path: Path) -> None:
    """Raise BenchError or OSError unless a file can be written. A file that did not exist is removed again."""
    if not path.absolute().parent.is_dir():
        raise BenchError(f"{option}: there is no folder {path.absolute().parent}")
    if path.is_dir():
        raise BenchError(f"{option}: {path} is a folder")
    file = Path(os.path.realpath(path))  # what a symbolic link names
    is_new = not file.exists()
    if is_new or file.is_file():  # not a pipe, whose reader would see its end
        file.open("ab").close()
    if is_new:
        file.unlink()


def _requests(args: argparse.Namespace) -> list[TimedRequest]:
    if args.trace:
        return read_trace(args.trace, args.requests, args.time_scale, args.length_scale)
    return poisson(args.requests, args.rate or math.inf, args.prompt_tokens, args.output_tokens, args.seed)


async def _run(args: argparse.Namespace, requests: list[TimedRequest]) -> int:
    tls, api_key = connection.read_credentials(args)
    load = Load(args.target, args.channels, args.temperature, args.seed, tls=tls, api_key=api_key)
    console = Console(stderr=True)
    try:
        try:
            model = await load.model_info()
        except grpc.aio.AioRpcError as error:
            raise BenchError(connection.explain(from_rpc(error), args.target, tls=bool(tls))) from None
        requests, cut = cut_to_context(requests, args.max_prompt, args.max_output, model.max_model_len)
        if cut:
            limit = model.max_model_len
            console.print(f"{cut} of {len(requests)} requests are cut to the limits or the context of {limit}")
        stop = asyncio.Event()
        signals = list[int]()

        def end(number: int) -> None:
            signals.append(number)
            stop.set()

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, end, number)
        concurrency = 0 if args.trace or args.rate else args.concurrency or 8
        seconds = await _run_with_progress(
            load, requests, Prompts(model.vocabulary_size, model.eos_token_ids, args.seed), stop, concurrency, console)
    finally:
        await load.close()
    slos = [None if ms is None else ms / 1000 for ms in (args.slo_ttft_ms, args.slo_tpot_ms)]
    identity = {"name": model.name, "family": model.family, "dtype": model.dtype, "backend": model.backend}
    figures = {"model": identity, **bench_report.summary(load.outcomes, seconds, len(requests), *slos)}
    try:
        _print(args, model, figures, load, console)
    finally:
        _write(args, figures, load)  # also if nothing reads the output
    if signals:
        return 128 + signals[0]
    return 0 if figures["requests"]["ok"] else 1


async def _run_with_progress(
    load: Load, requests: list[TimedRequest], prompts: Prompts, stop: asyncio.Event, concurrency: int, console: Console
) -> float:
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("requests", total=len(requests))
        return await load.run(requests, prompts, stop, concurrency, lambda ended: bar.update(task, completed=ended))


def _print(
    args: argparse.Namespace, model: model_pb2.GetModelInfoResponse, figures: dict[str, Any], load: Load,
    console: Console
) -> None:
    """Print the figures on stdout, and warnings and errors on `console`."""
    out = Console()
    out.print(f"{model.name} ({model.family}, {model.dtype}, {model.backend}) at {args.target}", markup=False,
              highlight=False)
    bench_report.show(figures, out)
    if warning := bench_report.lag_warning(figures):
        console.print(warning)
    for code, detail in {o.code: o.detail for o in load.outcomes if o.detail}.items():
        console.print(f"{code}: {detail}", markup=False)


def _write(args: argparse.Namespace, figures: dict[str, Any], load: Load) -> None:
    if args.json:
        options = {name: str(value) if isinstance(value, Path) or value == math.inf else value
                   for name, value in vars(args).items() if name != "run"}
        result = {"options": options, **figures, "outcomes": bench_report.rows(load.outcomes)}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        bench_report.plot(load.outcomes, figures["seconds"], args.plot)
