"""Goodput of a server at several times its capacity.

    python bench/serving/overload.py MODEL --trace FILE [--seconds 25] [--times 5] [--rounds 1] [--json FILE] [-- FLAGS]

The capacity is measured first: requests per second of a trace in a closed loop with as many clients as the server has
seats. A second server gets a queue in which a request waits at most WORTH of the accepted time to first token. It then
receives the trace at the capacity and at `--times` the capacity, in turn. Every client sets a deadline: the accepted
time to first token, plus the accepted time per token for each token of its answer.

Goodput is the number of complete answers per second that kept both times. Exit code 1 if one of these is missed:

    goodput        under overload, at least 0.9 of the goodput at the capacity
    refusals       less than 10 ms at the 99th percentile, from the call's arrival to its status, by the server's log
    in vain        at most 0.001 of the computed tokens are of requests that ended without an answer
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from npuserve.cli.bench import report as bench_report
from npuserve.cli.bench.load_generator import Load, Outcome
from npuserve.cli.bench.workload import Prompts, TimedRequest, cut_to_context, read_trace

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.serving.server import Serving, arguments, report, serving

TTFT, TPOT = 2.0, 0.2
"""Accepted seconds: the defaults of target_ttft_seconds and target_itl_seconds."""
WORTH = 0.5
"""Share of TTFT that a request may wait in the queue; the rest is for its prompt and for errors of the estimate."""
GOODPUT, REFUSAL_SECONDS, VAIN = 0.9, 0.01, 0.001
REFUSED = ("queue full", "deadline: in")

_seeds = itertools.count(1)
"""Seed of each load's prompts. A seed used twice would find the prompts of the first load in the prefix cache."""


def deadline(ask: TimedRequest) -> float:
    return TTFT + TPOT * ask.output_tokens


def good(outcomes: Sequence[Outcome]) -> int:
    return sum(bench_report.meets(o, TTFT, TPOT) and o.reason == "FINISH_REASON_LENGTH" for o in outcomes)


async def run(
    server: Serving, requests: Sequence[TimedRequest], concurrency: int, seconds: float, patient: bool = False
) -> tuple[list[Outcome], float]:
    """Send the requests for `seconds`, wait until all have ended, and return their outcomes and the seconds taken."""
    seed = next(_seeds)
    load = Load(server.target, 4, 0.0, seed, (lambda ask: None) if patient else deadline)
    info = await load.model_info()
    fitting = cut_to_context(requests, 0, 0, info.max_model_len)[0]
    stop = asyncio.Event()
    if concurrency:
        asyncio.get_running_loop().call_later(seconds, stop.set)
    taken = await load.run(fitting, Prompts(info.vocabulary_size, info.eos_token_ids, seed), stop, concurrency)
    await load.close()
    return load.outcomes, taken


def arrivals(requests: Sequence[TimedRequest], rate: float, seconds: float) -> list[TimedRequest]:
    """Return the first requests of the trace, sped up to `rate` per second, for `seconds`. A short trace repeats."""
    count, length = max(2, round(rate * seconds)), requests[-1].arrival
    times = [requests[n % len(requests)].arrival + n // len(requests) * length for n in range(count)]
    return [replace(requests[n % len(requests)], arrival=at * seconds / times[-1]) for n, at in enumerate(times)]


def refusals(server: Serving, before: int) -> list[float]:
    """Return the seconds that each refusal took, ascending, from line `before` of the log on."""
    return sorted(
        line["seconds"] for line in server.lines()[before:]
        if line.get("message") == "request" and str(line.get("error", "")).startswith(REFUSED))


def one(server: Serving, requests: Sequence[TimedRequest], rate: float, seconds: float) -> dict[str, Any]:
    before = len(server.lines())
    counted = ("tokens_in_vain_total", "generation_tokens_total", "prompt_tokens_total")
    counts = [server.metric(name) for name in counted]
    outcomes, taken = asyncio.run(run(server, arrivals(requests, rate, seconds), 0, seconds))
    vain, *computed = (server.metric(name) - count for name, count in zip(counted, counts, strict=True))
    seconds_refused = refusals(server, before)
    lag = sorted(o.sent - o.due for o in outcomes)
    return {
        "rate": round(len(outcomes) / seconds, 2), "seconds": round(taken, 1), "requests": len(outcomes),
        "goodput": round(good(outcomes) / taken, 3), "codes": dict(Counter(o.code for o in outcomes)),
        "reasons": dict(Counter(o.reason for o in outcomes if o.ok)),
        "refused": len(seconds_refused),
        "refusal_ms_p50_p99": [round(1000 * q, 2) for q in (
            seconds_refused[len(seconds_refused) // 2], seconds_refused[int(0.99 * (len(seconds_refused) - 1))])]
        if seconds_refused else None,
        "tokens_in_vain_share": round(vain / max(1.0, sum(computed)), 5),
        "client_lag_ms_p99": round(1000 * lag[int(0.99 * (len(lag) - 1))], 1),
    }


def measure(args: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    requests = read_trace(args.trace, 0, length_scale=args.length_scale)
    seats = ["--max-num-seqs", str(args.seats)]
    with serving(args.model, [*seats, *flags]) as server:
        outcomes, taken = asyncio.run(run(server, requests, args.seats, args.seconds, patient=True))
    ended = [o for o in outcomes if o.ok and o.end <= args.seconds]
    capacity = len(ended) / min(taken, args.seconds)
    queue = max(1, round(capacity * TTFT * WORTH))
    rounds: dict[str, list[dict[str, Any]]] = {"once": [], "overload": []}
    with serving(args.model, [*seats, "--max-queue", str(queue), *flags]) as server:
        asyncio.run(run(server, requests, args.seats, 5.0))  # so that the server has measured its pace
        for _ in range(args.rounds):
            for name, times in (("once", 1.0), ("overload", args.times)):
                rounds[name].append(one(server, requests, times * capacity, args.seconds))
                print(name, json.dumps(rounds[name][-1]), file=sys.stderr, flush=True)
    once, over = (statistics.median(figures["goodput"] for figures in rounds[name]) for name in ("once", "overload"))
    worst = max((f["refusal_ms_p50_p99"][1] for f in rounds["overload"] if f["refusal_ms_p50_p99"]), default=0.0)
    vain = max(f["tokens_in_vain_share"] for f in rounds["overload"])
    return {
        "capacity_per_second": round(capacity, 2), "max_queue": queue, "goodput_once": once, "goodput_overload": over,
        "ratio": round(over / once, 3), "refusal_ms_p99": worst, "tokens_in_vain_share": vain, "rounds": rounds,
        "kept": over >= GOODPUT * once and worst < 1000 * REFUSAL_SECONDS and vain <= VAIN,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="see the top of this file")
    parser.add_argument("model")
    parser.add_argument("--trace", type=Path, required=True, help="Azure or Mooncake trace, see npuserve bench serve")
    parser.add_argument("--seconds", type=float, default=25, help="length of each load (default: %(default)s)")
    parser.add_argument("--times", type=float, default=5, help="multiple of the capacity (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--seats", type=int, default=16, help="max_num_seqs (default: %(default)s)")
    parser.add_argument("--length-scale", type=float, default=0.25, help="of the trace (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args, flags = arguments(parser)
    figures = measure(args, flags)
    report(figures, args.json)
    return 0 if figures["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
