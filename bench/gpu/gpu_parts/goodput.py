"""Goodput through gRPC: `npuserve serve` with random weights under streams at once, and under a trace of arrivals."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_parts.served import NO_SPACE, refusal
from gpu_parts.shapes import place_of, random_folder
from gpu_parts.worker import Context, Units

if TYPE_CHECKING:
    from npuserve.cli.bench.workload import TimedRequest

TITLE = "Goodput through gRPC"
TTFT_MS, TPOT_MS = 1000, 50

SKIPPED_SECONDS = 60
"""Beginning of the trace that is not replayed, since its arrival rate rises there."""

RATES, ARRIVAL_SECONDS = (1, 2, 3, 4), 20
"""Multiples of the trace's arrival rate, and the seconds of arrivals at each."""

MARGIN_SECONDS = 10
"""Seconds that a load takes beside its arrivals: start of the client, and answers after the last arrival."""

GRACE_SECONDS = 15
"""Seconds beyond the part's budget after which a load is killed."""

Row = dict[str, Any]


def units(context: Context) -> Units:
    if context.args.trace:
        yield context.args.shape, lambda: _goodput(context)


def _goodput(context: Context) -> Iterator[Row]:
    shape = context.args.shape
    if said := refusal():
        yield {"table": TITLE, "model": shape, "said": said}
        return
    if (place := place_of(shape)) is None:
        yield {"table": TITLE, "model": shape, "said": NO_SPACE}
        return
    sys.path.append(str(Path(__file__).resolve().parents[3]))  # the root of the repository
    from bench.serving.served import server

    with tempfile.TemporaryDirectory(dir=place) as base:
        folder = random_folder(shape, Path(base, shape), context.backend, context.args.seed)
        context.release()
        flags = ["--device", context.args.device, *(["--emulate"] if context.args.emulate else []),
                 "--max-model-len", "256" if context.toy else "8192", "--max-num-seqs", "4" if context.toy else "128",
                 "--max-num-batched-tokens", "16" if context.toy else "512"]
        with server(str(folder), flags) as address:
            for row in loads(context, address):
                yield {"table": TITLE, "model": shape, **row}


def loads(context: Context, address: str) -> Iterator[Row]:
    """Yield a row for each load. A rate that would not end within the part's budget is a row that says so."""
    # The prompts of two loads differ, since the server's prefix cache holds the earlier ones.
    seeds = itertools.count(context.args.seed)
    prompt, few, many, most = (16, 4, 8, 2) if context.toy else (512, 128, 256, 64)
    report: dict[str, Any] = {}
    for name, streams, count, output in (
            ("the first request", 1, 1, few), ("1 stream", 1, 4, few), (f"{most} streams", most, 2 * most, many)):
        report = bench_serve(
            address, context.deadline, "--concurrency", str(streams), "--requests", str(count), "--prompt-tokens",
            str(prompt), "--output-tokens", str(output), "--seed", str(next(seeds)))
        yield {"load": f"{name}, {prompt} + {output} tokens", **_row(report)}
    speed, requests = report["total_tokens_per_second"], read(context.args.trace, 0.1 if context.toy else 1.0)
    for rate in (50,) if context.toy else RATES:
        sent = [replace(request, arrival=request.arrival / rate) for request in requests
                if request.arrival <= rate * ARRIVAL_SECONDS]
        name = f"trace at {rate} times its rate"
        seconds = max(sent[-1].arrival, sum(each.prompt_tokens + each.output_tokens for each in sent) / speed)
        if time.monotonic() + seconds + MARGIN_SECONDS > context.deadline:
            yield {"load": name, "said": f"left out: it would take about {seconds + MARGIN_SECONDS:.0f} s"}
            continue
        with tempfile.TemporaryDirectory() as base:
            file = Path(base, "trace.jsonl")
            write(file, sent)
            report = bench_serve(
                address, context.deadline, "--trace", str(file), "--requests", "0", "--seed", str(next(seeds)))
        yield {"load": name, **_row(report)}


def read(trace: Path, length_scale: float) -> list[TimedRequest]:
    """Return the requests after SKIPPED_SECONDS, the first at 0; all requests of a shorter trace."""
    from npuserve.cli.bench.workload import read_trace

    requests = read_trace(trace, 0, length_scale=length_scale)
    kept = [request for request in requests if request.arrival >= SKIPPED_SECONDS] or requests
    return [replace(request, arrival=request.arrival - kept[0].arrival) for request in kept]


def write(file: Path, requests: Sequence[TimedRequest]) -> None:
    """Write a trace in the format of Mooncake's, which keeps shared prefixes."""
    file.write_text("".join(json.dumps({
        "timestamp": 1000 * request.arrival, "input_length": request.prompt_tokens,
        "output_length": request.output_tokens, "hash_ids": request.hashes}) + "\n" for request in requests))


def bench_serve(address: str, deadline: float, *arguments: str) -> dict[str, Any]:
    """Return the report of `npuserve bench serve`. Raises subprocess.TimeoutExpired well after the deadline."""
    with tempfile.TemporaryDirectory() as base:
        file = Path(base, "report.json")
        subprocess.run(
            [sys.executable, "-m", "npuserve.cli", "bench", "serve", "--target", address, "--slo-ttft-ms",
             str(TTFT_MS), "--slo-tpot-ms", str(TPOT_MS), "--json", str(file), *arguments],
            check=True, stdout=subprocess.DEVNULL, timeout=max(1.0, deadline + GRACE_SECONDS - time.monotonic()))
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def _row(report: dict[str, Any]) -> Row:
    requests, latencies = report["requests"], report["latency_ms"]
    failed = ", ".join(f"{count} {code}" for code, count in requests["failed"].items())
    row = {"requests": requests["ok"], "failed": failed or "none", "at once": report["peak_running"],
           "seconds": report["seconds"], "requests/s": report["requests_per_second"],
           "goodput/s": report["goodput_per_second"], "output tokens/s": report["output_tokens_per_second"]}
    for kind, points in (("TTFT", ("p50", "p90", "p99")), ("TPOT", ("p50", "p90", "p99")), ("ITL", ("p50", "p99")),
                         ("lag", ("p99",))):
        row |= {f"{kind} {point} ms": (latencies[kind.lower()] or {}).get(point) for point in points}
    return row | {"ok": not failed}
