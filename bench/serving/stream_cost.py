"""CPU time per streamed token, and throughput left by streaming beside the device's work.

    python bench/serving/stream_cost.py [--steps 1,2,5] [--streams 1,8,32] [--seconds 3] [--rounds 3] [--busy]
        [--json FILE]

A real server (supervisor, front end, engine process, sockets, gRPC) with a runner that computes nothing: a step lasts a
chosen time. Each stream is one request. Reported are microseconds of CPU time per token of all threads of a process:

    engine      the host side only, since the runner sleeps
    frontend    one front end
    client      a grpc.aio client that only keeps the bytes
    bench       the load of `npuserve bench serve`
    bare        per message: a grpc.aio server that sends messages of the same size as fast as it can
    bare_paced  per message: the same, with one message per stream and step

`served` is tokens received per second, divided by tokens per second of the same runner called in a loop, in the same
run. With --busy a step is work shared by two threads instead of a sleep. Other work on those cores slows the step.
`served` is then the share that a CPU engine with two threads would keep. The engine's CPU time is not reported.
"""

from __future__ import annotations

import npuserve.cli.bench.grpc_threads  # noqa: F401

# isort: split
import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio

from npuserve.cli.bench.load_generator import Load
from npuserve.cli.bench.workload import Prompts, TimedRequest
from npuserve.npu.step import Step, StepResult
from npuserve.npu.storyteller import FOLDER
from npuserve.service import logs
from npuserve.service.config import ServerConfig
from npuserve.service.engine.loop import Engine
from npuserve.service.engine.process import EngineArgs
from npuserve.service.ipc.engine_socket import EngineSocket
from npuserve.service.ipc.messages import ModelInfo
from npuserve.service.processes import child
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.supervisor import supervisor
from npuserve.v1 import generate_pb2 as pb

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.serving.server import children, cpu_seconds
from tests.support.counting_runner import FakeRunner

METHOD = "/npuserve.v1.InferenceService/StreamGenerate"
VOCABULARY = 4096
WARMUP = 0.5
OUTPUT = 1500
CHUNK = bytes(1 << 14)


class BusyRunner(FakeRunner):
    """Runner whose step is `chunks` pieces of work, which two threads claim one by one; steps run in order."""

    def __init__(self, chunks: int):
        super().__init__(VOCABULARY)
        self.chunks = chunks
        self._go, self._done, self._steps = threading.Semaphore(0), threading.Semaphore(0), threading.Semaphore(0)
        self._ended = threading.Semaphore(0)
        self._claims: Iterator[int] = iter(())
        for work in (self._lead, self._help):
            threading.Thread(target=work, daemon=True).start()

    def launch(self, step: Step) -> tuple[StepResult, float]:
        handle = super().launch(step)
        self._steps.release()
        return handle

    def collect(self, handle: tuple[StepResult, float]) -> StepResult:
        self._ended.acquire()
        return super().collect(handle)

    def _lead(self) -> None:
        while True:
            self._steps.acquire()
            self._claims = iter(range(self.chunks))
            self._go.release()
            self._work()
            self._done.acquire()
            self._ended.release()

    def _help(self) -> None:
        while True:
            self._go.acquire()
            self._work()
            self._done.release()

    def _work(self) -> None:
        for _ in self._claims:
            hashlib.sha256(CHUNK)


def runner_of(step_ms: float, chunks: int) -> FakeRunner:
    return BusyRunner(chunks) if chunks else FakeRunner(VOCABULARY, step_ms / 1000)


def steps_per_second(runner: FakeRunner, seconds: float) -> float:
    """Return steps per second of the runner alone, with two steps in flight."""
    began = time.perf_counter()
    in_flight = runner.launch(Step([]))
    for done in itertools.count(1):
        before, in_flight = in_flight, runner.launch(Step([]))
        runner.collect(before)
        if (now := time.perf_counter()) - began > seconds:
            return done / (now - began)
    raise AssertionError


def chunks_of(step_ms: float) -> int:
    """Return the number of chunks that take `step_ms` on this machine."""
    return max(1, round(1000 * steps_per_second(BusyRunner(1000), 0.5) * step_ms / 1000))


# The processes


def engine(step_ms: float, chunks: int) -> None:
    """Run the engine process with a runner of this benchmark."""
    args = child.read_arguments(EngineArgs)
    logs.setup(args.config, "engine")
    child.listen()
    scheduler = Scheduler(BlockManager(1024, 64, True), max_num_seqs=64, max_num_batched_tokens=512, max_queue=256,
                          aging_seconds=10)
    model = ModelInfo("Fake", VOCABULARY, 32768, "float32", "none", "float32", "cpu", 64, 256, 65536, 0, True)
    made = Engine(scheduler, runner_of(step_ms, chunks), EngineSocket(args.address), model, args.epoch)
    child.report("ready", seconds=0.0, kv_cache_tokens=65536, backend="cpu")
    made.run()


def serve(step_ms: str, chunks: str) -> None:
    config = ServerConfig(model=str(FOLDER), port=0, metrics_port=0, drain_seconds=0.1, log_level="warning")
    logs.setup(config, "supervisor")
    command = (sys.executable, __file__, "engine", step_ms, chunks)

    async def run() -> None:
        server = supervisor.Supervisor(config, engine=command)
        running = asyncio.ensure_future(server.run())
        await server.ready.wait()
        print(server.address, flush=True)
        await running

    asyncio.run(run())


async def bare(size: int, step_ms: float) -> None:
    """Stream messages of `size` bytes while a client reads: without pause, or to all streams at each step."""
    message = bytes(size)
    tick = asyncio.Event()

    async def ticker() -> None:
        nonlocal tick
        due = time.monotonic()
        while True:
            due += step_ms / 1000
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            passed, tick = tick, asyncio.Event()
            passed.set()

    async def stream(request: bytes, context: Any) -> None:
        while True:
            if step_ms:
                await tick.wait()
            await context.write(message)

    server = grpc.aio.server()
    handlers = {"StreamGenerate": grpc.unary_stream_rpc_method_handler(stream)}
    server.add_registered_method_handlers("npuserve.v1.InferenceService", handlers)
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    await server.start()
    if step_ms:
        await ticker()
    await server.wait_for_termination()


async def client(target: str, streams: int, seconds: float) -> None:
    """Receive streams as bytes, and count their tokens after the window."""
    request = pb.GenerateRequest()
    request.token_ids.ids.extend([300, 301, 302])
    request.stopping.ignore_eos = True
    request.stopping.max_tokens = OUTPUT
    request.output.return_token_ids = True
    ask = request.SerializeToString()
    received: list[bytes] = []

    async def read(method: Any) -> None:
        while True:
            async for message in method(ask):
                received.append(message)

    async with grpc.aio.insecure_channel(target) as channel:
        tasks = [asyncio.ensure_future(read(channel.unary_stream(METHOD))) for _ in range(streams)]
        await asyncio.sleep(WARMUP)
        print("begin", flush=True)
        begin = len(received)
        await asyncio.sleep(seconds)
        print("end", flush=True)
        window = received[begin:]
        for task in tasks:
            task.cancel()
    size = sum(map(len, window)) / max(1, len(window))
    tokens = 0 if not any(window[0]) else sum(len(pb.StreamGenerateResponse.FromString(m).token_ids) for m in window)
    print(json.dumps({"messages": len(window), "tokens": tokens, "size": round(size)}), flush=True)


async def bench(target: str, streams: int, seconds: float) -> None:
    """Run the load of `npuserve bench serve --concurrency STREAMS`."""
    load = Load(target, 1, 0.0, 0)
    stop = asyncio.Event()
    prompts = Prompts(VOCABULARY, (), 0)
    running = asyncio.ensure_future(load.run([TimedRequest(0.0, 3, OUTPUT)] * 100_000, prompts, stop, streams))
    await asyncio.sleep(WARMUP)
    print("begin", flush=True)
    begin = load._now()
    await asyncio.sleep(seconds)
    print("end", flush=True)
    end = load._now()
    stop.set()
    await running
    await load.close()
    window = [tokens for outcome in load.outcomes for at, tokens in outcome.arrivals if begin <= at < end]
    print(json.dumps({"messages": len(window), "tokens": sum(window), "size": 0}), flush=True)


# The measurement


@contextlib.contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run one of the processes above while the block runs."""
    command = [sys.executable, __file__, *map(str, arguments)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield running
    finally:
        running.terminate()
        running.wait(20)


def said(running: subprocess.Popen[str]) -> str:
    assert running.stdout
    if text := running.stdout.readline().strip():
        return text
    raise SystemExit("a process of the benchmark died")


def window(role: str, target: str, streams: int, seconds: float, pids: dict[str, int]) -> dict[str, float]:
    """Load a server; return tokens per second, and microseconds of CPU per token (or message) by process."""
    with process(role, target, streams, seconds) as running:
        pids = {**pids, role: running.pid}
        marks = []
        for _ in range(2):
            said(running)
            marks.append((time.perf_counter(), {name: cpu_seconds(pid) for name, pid in pids.items()}))
        counted = json.loads(said(running))
    (began, before), (ended, after) = marks
    count = counted["tokens"] or counted["messages"]
    cost = {name: 1e6 * (after[name] - before[name]) / max(1, count) for name in pids}
    return {**cost, "per_second": count / (ended - began), "size": counted["size"],
            "tokens_per_message": counted["tokens"] / max(1, counted["messages"])}


def measure(step_ms: float, streams: int, seconds: float, busy: bool) -> dict[str, float]:
    """Measure one round of one case."""
    chunks = chunks_of(step_ms) if busy else 0
    own = streams * steps_per_second(runner_of(step_ms, chunks), min(1.0, seconds))
    with process("serve", step_ms, chunks) as server:
        target = said(server)
        pids = {kind: pid for pid, kind in children(server.pid).items()}
        thin = window("client", target, streams, seconds, pids)
        full = window("bench", target, streams, seconds, pids)
    figures = {**thin, "bench": full["bench"], "served": thin["per_second"] / own, "own": own,
               "served_bench": full["per_second"] / own}
    for name, pace in (("bare", 0.0), ("bare_paced", step_ms)):
        with process("bare", round(thin["size"]), pace) as server:
            figures[name] = window("client", said(server), streams, seconds, {name: server.pid})[name]
    return figures


COLUMNS = ("engine", "frontend", "client", "bench", "bare", "bare_paced", "tokens_per_message", "own", "per_second",
           "served", "served_bench")


def main() -> None:
    parser = argparse.ArgumentParser(description="see the top of this file")
    parser.add_argument("--steps", default="1,2,5", help="milliseconds per step (default: %(default)s)")
    parser.add_argument("--streams", default="1,8,32", help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3, help="of a window (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, median reported (default: %(default)s)")
    parser.add_argument("--busy", action="store_true", help="make a step the work of two threads instead of a sleep")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    cases = [(float(step), int(streams)) for step in args.steps.split(",") for streams in args.streams.split(",")]
    rounds: dict[tuple[float, int], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(args.rounds):
        for case in cases:
            rounds[case].append(measure(*case, args.seconds, args.busy))
    columns = [c for c in COLUMNS if not args.busy or c != "engine"]
    print(" ".join(f"{name:>10.10}" for name in ("step ms", "streams", *columns)))
    for (step, streams), found in rounds.items():
        medians = [statistics.median(figures[column] for figures in found) for column in columns]
        print(" ".join(f"{value:>10.5g}" for value in (step, streams, *medians)))
    if args.json:
        whole = [{"step_ms": step, "streams": streams, "rounds": found} for (step, streams), found in rounds.items()]
        args.json.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["engine", step_ms, chunks]:
            engine(float(step_ms), int(chunks))
        case ["serve", step_ms, chunks]:
            serve(step_ms, chunks)
        case ["bare", size, step_ms]:
            asyncio.run(bare(int(size), float(step_ms)))
        case ["client" | "bench" as role, target, streams, seconds]:
            asyncio.run((client if role == "client" else bench)(target, int(streams), float(seconds)))
        case _:
            main()
