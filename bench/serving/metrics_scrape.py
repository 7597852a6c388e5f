"""Cost and age of the metrics page for an endpoint picker that scrapes it every 50 ms.

    python bench/serving/metrics_scrape.py [MODEL] [--streams 8] [--seconds 60] [--interval 0.05] [--age-seconds 20]
        [--json FILE] [-- FLAGS]

cost: a closed loop of streams loads the server. The supervisor's CPU time is measured without scrapes, for a sixth of
the time, and with them. The cost of a scrape is the difference over the number of scrapes. It includes the HTTP
connection.

age: on a second server one request computes, half the model's context as prompt and half as answer. Others are sent one
by one to its queue. If a client received the acceptance of a request before the scrape, and the page does not count the
request, then the page is older than that acceptance. The age since the sending of a request includes the time until the
engine receives it. Scrapes count until the first request ends, since the moment of its end in the engine is not known.
A model with a short context, such as the built-in one, has too few scrapes.

Exit code 1 if the mean cost is not below 2 ms, or the 99th percentile of the age is not below 50 ms. FLAGS are settings
of both servers.
"""

from __future__ import annotations

import npuserve.cli.bench.grpc_threads  # noqa: F401

# isort: split
import argparse
import asyncio
import contextlib
import itertools
import math
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from npuserve.cli.bench.load_generator import Load
from npuserve.cli.bench.workload import Prompts, TimedRequest
from npuserve.v1 import generate_pb2, inference_service_pb2_grpc

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.serving.server import Serving, arguments, report, serving

PROMPT, OUTPUT = 32, 200
WARM_UP = 3.0  # seconds
SUBMIT_SECONDS = 0.113  # not a multiple of the interval
MIN_SCRAPES = 50
MAX_COST_SECONDS, MAX_AGE_SECONDS = 0.002, 0.05
LOAD = re.compile(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} (\S+)$", re.MULTILINE)


class Scraper:
    """Scraper of one page, with a connection for each scrape.

    scrapes: (time of the request, its duration in seconds, requests that run or wait) of each scrape; the times are
        time.perf_counter() seconds.
    size: bytes of the last page.
    """

    def __init__(self, server: Serving, interval: float):
        self.scrapes: list[tuple[float, float, float]] = []
        self.size = 0
        self._address = server.metrics_address
        self._interval = interval

    async def run(self, stop: asyncio.Event) -> None:
        """Scrape until `stop`, at fixed times: a slow page does not put off the next."""
        due = time.perf_counter()
        while not stop.is_set():
            began = time.perf_counter()
            page = await self._get()
            counts = [float(value) for value in LOAD.findall(page)]
            if len(counts) != 2:
                raise SystemExit(f"the page has no load:\n{page[:1000]}")
            self.scrapes.append((began, time.perf_counter() - began, sum(counts)))
            self.size = len(page)
            due += self._interval
            await asyncio.sleep(max(0.0, due - time.perf_counter()))

    async def _get(self) -> str:
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            # As Go's HTTP client asks, which the endpoint picker uses.
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: pod\r\nAccept-Encoding: gzip\r\n\r\n")
            return (await reader.read()).decode()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all living threads of a process. The supervisor's threads live as long as it does."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


async def cost(server: Serving, streams: int, seconds: float, interval: float) -> dict[str, Any]:
    """Return the cost of a scrape under load."""
    load, stop = Load(server.target, 1, 0.0, 0), asyncio.Event()
    try:
        model = await load.model_info()
        prompts = Prompts(model.vocabulary_size, model.eos_token_ids, 0)
        running = asyncio.ensure_future(load.run(
            [TimedRequest(0.0, PROMPT, OUTPUT)] * 1_000_000, prompts, stop, streams))
        await asyncio.sleep(WARM_UP)
        before, began = cpu_seconds(server.pid), time.perf_counter()
        await asyncio.sleep(seconds / 6)
        idle = (cpu_seconds(server.pid) - before) / (time.perf_counter() - began)
        scraper, over = Scraper(server, interval), asyncio.Event()
        before, began = cpu_seconds(server.pid), time.perf_counter()
        scraping = asyncio.ensure_future(scraper.run(over))
        await asyncio.sleep(seconds)
        over.set()
        await scraping
        used, took = cpu_seconds(server.pid) - before, time.perf_counter() - began
        stop.set()
        await running
    finally:
        await load.close()
    durations = sorted(duration for _, duration, _ in scraper.scrapes)
    tokens = sum(count for outcome in load.outcomes for _, count in outcome.arrivals)
    return {
        "scrapes": len(durations), "page_bytes": scraper.size,
        "tokens_per_second": tokens / (seconds * 7 / 6 + WARM_UP),
        "cpu_ms_per_scrape": 1e3 * (used - idle * took) / len(durations),
        "supervisor_ms_per_second_without_scrapes": 1e3 * idle,
        "page_ms_p50": 1e3 * statistics.median(durations),
        "page_ms_p99": 1e3 * durations[int(0.99 * len(durations))]}


class Requests:
    """Requests of the age's part: when they were sent, accepted by the engine as their clients see it, and ended."""

    def __init__(self, stub: inference_service_pb2_grpc.InferenceServiceStub):
        self.sent: list[float] = []
        self.accepted: list[float] = []
        self.ended: list[float] = []
        self._stub = stub

    async def send(self, message: generate_pb2.GenerateRequest) -> None:
        """Send a request, and read its answer."""
        self.sent.append(time.perf_counter())
        call = self._stub.StreamGenerate(message)
        await call.initial_metadata()
        self.accepted.append(time.perf_counter())
        async for _ in call:
            pass
        self.ended.append(time.perf_counter())

    def ages(self, scraper: Scraper, times: list[float]) -> list[float]:
        """Return the age of each page, sorted: how long before the scrape the first request was that it lacks.

        times: times of `sent` or `accepted`.
        """
        end = min(self.ended, default=math.inf) - 0.5
        return sorted(max(0.0, began - times[int(shown)]) if shown < len(times) else 0.0
                      for began, duration, shown in scraper.scrapes if began + duration < end)


async def age(server: Serving, seconds: float, interval: float) -> dict[str, Any]:
    """Return the age of the page while a queue grows behind one request."""
    load, stop = Load(server.target, 1, 0.0, 0), asyncio.Event()
    try:
        model = await load.model_info()
        prompts = Prompts(model.vocabulary_size, model.eos_token_ids, 0)
        half = model.max_model_len // 2
        sizes = itertools.chain(  # long answers, so that few requests end
            [TimedRequest(0.0, half, half)], itertools.repeat(TimedRequest(0.0, PROMPT, model.max_model_len - PROMPT)))
        # The engine reads no messages in a long first step: it knows no duration yet.
        await load._send(0, 0.0, load._message(0, TimedRequest(0.0, min(half, 1024), 4), prompts), None)
        requests, scraper = Requests(load._stubs[0]), Scraper(server, interval)
        scraping, calls = asyncio.ensure_future(scraper.run(stop)), []
        began = time.perf_counter()
        for number, size in enumerate(sizes):
            calls.append(asyncio.ensure_future(requests.send(load._message(number, size, prompts))))
            await asyncio.sleep(SUBMIT_SECONDS)
            if time.perf_counter() - began >= seconds:
                break
        stop.set()
        await scraping
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    finally:
        await load.close()
    ages, with_way = requests.ages(scraper, requests.accepted), requests.ages(scraper, requests.sent)
    if len(ages) < MIN_SCRAPES:
        return {"scrapes": len(ages)}
    return {
        "scrapes": len(ages), "requests": len(requests.sent),
        "largest_queue": max(shown for *_, shown in scraper.scrapes), "age_ms_p50": 1e3 * statistics.median(ages),
        "age_ms_p99": 1e3 * ages[int(0.99 * len(ages))], "age_ms_max": 1e3 * ages[-1],
        "age_since_sent_ms_p50": 1e3 * statistics.median(with_way),
        "age_since_sent_ms_p99": 1e3 * with_way[int(0.99 * len(with_way))]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="model to serve (default: the built-in model)")
    parser.add_argument("--streams", type=int, default=8, help="concurrent streams (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60, help="time with scrapes (default: %(default)s)")
    parser.add_argument("--interval", type=float, default=0.05, help="seconds between scrapes (default: %(default)s)")
    parser.add_argument("--age-seconds", type=float, default=20, help="time of the age's part (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args, flags = arguments(parser)
    figures: dict[str, Any] = {}
    with serving(args.model, flags) as one:
        figures["cost"] = asyncio.run(cost(one, args.streams, args.seconds, args.interval))
    with serving(args.model, [*flags, "--max-num-seqs", "1", "--max-queue", "4096"]) as one:
        figures["age"] = asyncio.run(age(one, args.age_seconds, args.interval))
    report(figures, args.json)
    missed = [name for name, is_met in (
        ("cost", figures["cost"]["cpu_ms_per_scrape"] < 1e3 * MAX_COST_SECONDS),
        ("age", figures["age"].get("age_ms_p99", 0.0) < 1e3 * MAX_AGE_SECONDS)) if not is_met]
    if missed:
        raise SystemExit(f"FAILED: {', '.join(missed)}")


if __name__ == "__main__":
    main()
