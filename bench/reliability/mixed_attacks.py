"""Streams of honest clients during all attacks at once, compared with a control under the same CPU load.

    python bench/reliability/mixed_attacks.py [--minutes 30] [--control-minutes 10] [--streams 16] [--connections 32]
        [--json FILE] [-- FLAGS]

The server has API keys. One process of honest clients, of the tenant `client`, keeps `--streams` streams running. The
attackers are a process of lower priority. Each of its connections sends, one call after the other, a random kind of
ATTACKS (attacks.py) or of KINDS, with the key of another tenant or with none. Some connections are idle ones to the
metrics port. The control is another server with the same streams, beside a process of the attackers' priority that uses
as much CPU time per second as they did.

Every honest stream must end with the text that it has without load. Reported are the milliseconds between an honest
stream's messages, the ratio of their 99th percentiles, the statuses of hostile calls by kind, and the resident memory
of the server's processes. The exit code is 1 if a stream is lost or differs, or if the ratio is above RATIO. It is also
1 if a process grows by more than GROWTH_MIB between the first and the last third of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import math
import multiprocessing
import os
import random
import resource
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc.aio

from npuserve.v1 import admin_service_pb2 as admin_pb2
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.reliability.attacks import ATTACKS, NO_KEY, attack, prepared
from bench.reliability.hostile import CompressedCalls
from bench.serving.server import Serving, arguments, report, serving

RATIO = 2.0
GROWTH_MIB = 32.0
SAMPLE_SECONDS = 5.0
TOKENS = 96
PROMPTS = ("Once upon a time", "One day, a little girl named Lily", "The cat and the dog", "Tim wanted a new toy.")
NAMED = "the-same-id"
SERVICE, ADMIN = "/npuserve.v1.InferenceService/", "/npuserve.v1.AdminService/"
COMPRESSED = ("compressed", "tokenize", "detokenize")
"""Attacks that send an already compressed message."""
IDLE_CONNECTIONS = 64
Call = tuple[str, bytes]


def urgent() -> Call:
    """Return a call with the highest priority."""
    ask = pb.GenerateRequest(text="x")
    ask.scheduling.priority = -100
    return SERVICE + "Generate", ask.SerializeToString()


def large_record() -> Call:
    """Return a call whose record for ResumeStream has the largest possible size."""
    ask = pb.GenerateRequest(text="x")
    ask.sampling.logit_bias.update(dict.fromkeys(range(1000), 1.0))
    ask.stopping.max_tokens = 1
    return SERVICE + "StreamGenerate", ask.SerializeToString()


def same_id() -> Call:
    """Return a call with the request id of the honest clients."""
    ask = pb.GenerateRequest(text="x", request_id=NAMED)
    ask.stopping.max_tokens = 1
    return SERVICE + "Generate", ask.SerializeToString()


def abort() -> Call:
    """Return a call that aborts an honest client's request."""
    return ADMIN + "Abort", admin_pb2.AbortRequest(request_id=NAMED).SerializeToString()


def drain() -> Call:
    return ADMIN + "Drain", admin_pb2.DrainRequest().SerializeToString()


def malformed() -> Call:
    return SERVICE + "Generate", pb.GenerateRequest(text="x").SerializeToString() + b"\xff"


KINDS: dict[str, Callable[[], Call]] = {
    "priority": urgent, "large record": large_record, "same id": same_id, "abort": abort, "drain": drain,
    "malformed": malformed,
}


class Attackers:
    """Hostile connections of one process. ends: (kind and status) -> number of calls."""

    def __init__(self, target: str, key: str, connections: int, until: float):
        self.ends: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._target = target
        self._key = key
        self._connections = connections
        self._until = until
        self._bodies: dict[str, tuple[str, bytes]] = {}
        for kind in ATTACKS:
            method, data, gzipped = attack(kind, 1.0)
            self._bodies[kind] = SERVICE + method, gzip.compress(data) if gzipped else data
        for kind, make in KINDS.items():
            self._bodies[kind] = make()

    async def run(self) -> None:
        await asyncio.gather(*(self._connection(number) for number in range(self._connections)))

    async def _connection(self, number: int) -> None:
        """Send calls of random kinds, some without a key; reconnect after some of them."""
        chance = random.Random(number)
        while time.monotonic() < self._until:
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):
                if number % 4 == 0:
                    await self._compressed(chance)
                else:
                    await self._plain(chance)

    def _metadata(self, kind: str, chance: random.Random) -> tuple[tuple[str, str], ...]:
        bare = kind in NO_KEY or chance.random() < 0.2
        return () if bare else (("authorization", f"Bearer {self._key}"),)

    async def _compressed(self, chance: random.Random) -> None:
        kind = chance.choice(COMPRESSED)
        path, data = self._bodies[kind]
        calls = CompressedCalls(self._target, path, data, self._metadata(kind, chance))
        await calls.open()
        try:
            for _ in range(20):
                self.ends[kind][await calls.call()] += 1
        finally:
            calls.close()

    async def _plain(self, chance: random.Random) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(self._target, options=options) as channel:
            for _ in range(50):
                kind = chance.choice([name for name in self._bodies if name not in COMPRESSED])
                path, data = self._bodies[kind]
                call = channel.unary_stream(path)(data, metadata=self._metadata(kind, chance), timeout=60)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for _ in call:
                        pass
                self.ends[kind][(await call.code()).name] += 1
                if time.monotonic() > self._until:
                    return


async def idle_connections(host: str, port: int) -> None:
    """Keep idle connections to the metrics port open; replace each one that the server closes."""

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, port)
                with contextlib.closing(writer):
                    await reader.read()
            await asyncio.sleep(0.5)

    await asyncio.gather(*(one() for _ in range(IDLE_CONNECTIONS)))


def attackers(target: str, metrics: tuple[str, int], key: str, connections: int, pipe: Connection) -> None:
    """Run the attackers' process: receive the seconds through `pipe`, attack, and send the CPU seconds used and the
    statuses."""
    os.nice(10)

    async def run(seconds: float) -> Attackers:
        made = Attackers(target, key, connections, time.monotonic() + seconds)
        idle = asyncio.ensure_future(idle_connections(*metrics))
        await made.run()
        idle.cancel()
        return made

    seconds = pipe.recv()
    before = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    made = asyncio.run(run(seconds))
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - before
    pipe.send((used, {kind: dict(ends) for kind, ends in sorted(made.ends.items())}))


def burner(share: float, pipe: Connection) -> None:
    """Run the control's process: use `share` CPU seconds per second, in as many processes as that needs."""
    os.nice(10)
    seconds = pipe.recv()
    children = [multiprocessing.get_context("spawn").Process(target=burn, args=(share / math.ceil(share), seconds))
                for _ in range(math.ceil(share))]
    for child in children:
        child.start()
    for child in children:
        child.join()
    pipe.send((share * seconds, {}))


def burn(share: float, seconds: float) -> None:
    """Compute for `share` of every 20 ms, and sleep for the rest."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        busy = time.thread_time() + 0.02 * share
        while time.thread_time() < busy:
            pass
        time.sleep(0.02 * (1 - share))


class Honest:
    """Streams of the honest tenant. gaps: seconds between successive messages of a stream."""

    def __init__(self, target: str, key: str):
        self.gaps: list[float] = []
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._target = target
        self._metadata = (("authorization", f"Bearer {key}"),)
        self._whole: dict[int, str] = {}

    async def run(self, streams: int, pipe: Connection) -> None:
        """Record each stream's text without load, send "ready", and stream for the seconds received through `pipe`."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self._target, options=options) as channel:
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            for number in range(streams):
                self._whole[number] = await self._stream(stub, number, "")
            self.gaps.clear()
            self.ends.clear()
            pipe.send("ready")
            until = time.monotonic() + await asyncio.to_thread(pipe.recv)
            await asyncio.gather(*(self._again(stub, number, until) for number in range(streams)))

    async def _again(self, stub: inference_service_pb2_grpc.InferenceServiceStub, number: int, until: float) -> None:
        while time.monotonic() < until:
            text = await self._stream(stub, number, NAMED if number == 0 else "")
            if text != self._whole[number]:
                self.wrong.append(f"stream {number}: {text!r} is not {self._whole[number]!r}")

    async def _stream(
        self, stub: inference_service_pb2_grpc.InferenceServiceStub, number: int, request_id: str
    ) -> str:
        ask = pb.GenerateRequest(
            text=PROMPTS[number % len(PROMPTS)], request_id=request_id or None,
            sampling=pb.SamplingParams(temperature=0.8, seed=number),
            stopping=pb.StoppingParams(max_tokens=TOKENS, ignore_eos=True))
        text, last = "", 0.0
        try:
            async for message in stub.StreamGenerate(ask, metadata=self._metadata, timeout=120):
                now = time.monotonic()
                if last:
                    self.gaps.append(now - last)
                last = now
                text += message.text
            self.ends["OK"] += 1
        except grpc.aio.AioRpcError as error:
            self.ends[error.code().name] += 1
            self.wrong.append(f"stream {number}: {error.code().name}: {error.details()}")
        return text


def honest(target: str, key: str, streams: int, pipe: Connection) -> None:
    """Run the honest clients' process: `Honest.run`, then send its results through `pipe`."""
    made = Honest(target, key)
    asyncio.run(made.run(streams, pipe))
    gaps = sorted(made.gaps)
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999, "largest": 1.0}
    pipe.send({
        "gaps": len(gaps), "ends": dict(made.ends), "wrong": made.wrong,
        "gap_ms": {name: round(1000 * gaps[int(share * (len(gaps) - 1))], 2) for name, share in shares.items()}})


def watch(server: Serving, stopped: threading.Event, sizes: list[dict[str, float]]) -> None:
    while not stopped.wait(SAMPLE_SECONDS):
        sizes.append(server.rss())


def phase(
    server: Serving, key: str, streams: int, seconds: float, disturb: Callable[..., None], *args: Any
) -> dict[str, Any]:
    """Run honest streams beside `disturb`; return the reports of both, and the largest memory in each third."""
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for target, arguments_ in (honest, (server.target, key, streams)), (disturb, args):
        mine, other = context.Pipe()
        processes.append(context.Process(target=target, args=(*arguments_, other)))
        ends.append(mine)
        processes[-1].start()
    ends[0].recv()
    stopped, sizes = threading.Event(), list[dict[str, float]]()
    watcher = threading.Thread(target=watch, args=(server, stopped, sizes))
    before = server.rss()
    watcher.start()
    for end in ends:
        end.send(seconds)
    seen, (used, statuses) = (end.recv() for end in ends)
    stopped.set()
    watcher.join()
    for process in processes:
        process.join()
    third = max(1, len(sizes) // 3)
    memory = {
        name: {"before": round(size, 1),
               **{part: round(max(sample[name] for sample in some), 1) for part, some in
                  (("first third", sizes[:third]), ("last third", sizes[-third:]))}}
        for name, size in before.items()}
    return {**seen, "cpu_seconds_a_second": round(used / seconds, 3), "hostile": statuses, "memory_mib": memory}


def main() -> int:
    parser = argparse.ArgumentParser(description="see the top of this file")
    parser.add_argument("--minutes", type=float, default=30, help="minutes of attacks (default: %(default)s)")
    parser.add_argument("--control-minutes", type=float, default=10, help="(default: %(default)s)")
    parser.add_argument("--streams", type=int, default=16, help="honest streams (default: %(default)s)")
    parser.add_argument("--connections", type=int, default=32, help="hostile connections (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args, flags = arguments(parser)
    with prepared() as (folder, file, (hostile_key, key)):
        settings = ["--api-keys", str(file), *flags]
        with serving(str(folder), settings) as server:
            metrics = server.metrics_address
            attacked = phase(server, key, args.streams, 60 * args.minutes, attackers,
                             server.target, metrics, hostile_key, args.connections)
        print(json.dumps(attacked), file=sys.stderr, flush=True)
        with serving(str(folder), settings) as server:
            control = phase(server, key, args.streams, 60 * args.control_minutes, burner,
                            attacked["cpu_seconds_a_second"])
    ratio = attacked["gap_ms"]["p99"] / control["gap_ms"]["p99"]
    wrong = attacked["wrong"] + control["wrong"]
    wrong += [f"the gaps' p99 is {ratio:.2f} times that of the control"] if ratio > RATIO else []
    wrong += [f"{name} grew: {sizes}" for name, sizes in attacked["memory_mib"].items()
              if sizes["last third"] - sizes["first third"] > GROWTH_MIB]
    report({"attacked": attacked, "control": control, "p99_ratio": round(ratio, 2), "wrong": wrong}, args.json)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
