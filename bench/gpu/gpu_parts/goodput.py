"""Goodput through gRPC of a trace of arrivals: `npuserve serve` with random weights and `npuserve bench serve`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_parts.served import refusal
from gpu_parts.shapes import random_folder
from gpu_parts.worker import Context, Units

MEMORY = Path("/dev/shm")
"""File system in memory: a checkpoint of 30 GB is written there faster than to a disk."""

SCALES = (0.33, 0.25)
"""Factors of the trace's times of arrival."""

REQUESTS, TTFT_MS, TPOT_MS = 240, 1000, 50


def units(context: Context) -> Units:
    if context.args.trace:
        yield context.args.shape, lambda: _goodput(context)


def _goodput(context: Context) -> Iterator[dict[str, Any]]:
    shape, title = context.args.shape, "Goodput of a trace through gRPC"
    if said := refusal():
        yield {"table": title, "model": shape, "said": said}
        return
    sys.path.append(str(Path(__file__).resolve().parents[3]))  # the root of the repository
    from bench.serving.served import server

    needed = 2 << 20 if context.toy else 34 << 30
    place = MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > needed else None
    with tempfile.TemporaryDirectory(dir=place) as base:
        folder = random_folder(shape, Path(base, shape), context.backend, context.args.seed)
        context.release()
        flags = ["--device", context.args.device, *(["--emulate"] if context.args.emulate else []),
                 "--max-model-len", "256" if context.toy else "8192", "--max-num-seqs", "4" if context.toy else "128",
                 "--max-num-batched-tokens", "16" if context.toy else "1024"]
        with server(str(folder), flags) as address:
            for scale in (0.01,) if context.toy else SCALES:
                yield {"table": title, "model": shape, "arrivals": f"{1 / scale:.1f} times as fast",
                       **_replayed(context, address, scale)}


def _replayed(context: Context, address: str, scale: float) -> dict[str, Any]:
    count, lengths = (4, 0.1) if context.toy else (REQUESTS, 1.0)
    with tempfile.TemporaryDirectory() as base:
        file = Path(base, "report.json")
        subprocess.run(
            [sys.executable, "-m", "npuserve.service.cli", "bench", "serve", "--target", address, "--trace",
             str(context.args.trace), "--requests", str(count), "--time-scale", str(scale), "--length-scale",
             str(lengths), "--slo-ttft-ms", str(TTFT_MS), "--slo-tpot-ms", str(TPOT_MS), "--json", str(file)],
            check=True, stdout=subprocess.DEVNULL)
        report = json.loads(file.read_text())
    times = report["latency_ms"]
    return {
        "requests": report["requests"]["ok"], "failed": report["requests"]["failed"],
        "at once": report["peak_running"], "requests/s": report["requests_per_second"],
        "goodput/s": report["goodput_per_second"], "tokens/s": report["output_tokens_per_second"],
        "TTFT p50 ms": times["ttft"]["p50"], "TTFT p99 ms": times["ttft"]["p99"], "TPOT p50 ms": times["tpot"]["p50"],
        "TPOT p99 ms": times["tpot"]["p99"], "ok": not report["requests"]["failed"]}
