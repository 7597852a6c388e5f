"""Long run with cancels, lost connections, kills and bad requests: completeness of answers, leaks, growth of memory.

    python bench/reliability/soak.py [MODEL] [--minutes 60] [--trace FILE] [--gap 20,90] [--json FILE] [-- FLAGS]

A server with two front ends receives a trace's arrivals (`npuserve bench serve --trace`; a Poisson process without a
trace) through npuserve.client. Some requests are cancelled after some tokens, some streams are dropped and resumed by
another client, and some have a deadline. At random moments the engine or a front end is killed. Meanwhile bad requests
are sent (hostile.py), the server's health is checked, and open files are counted. Exit code 1 if one of these does not
hold:

    requests    each is complete, or cancelled by its client, or has a documented status
    text        a complete answer equals the undisturbed one, and an incomplete one is its beginning. Half of the
                requests are greedy, half are seeded
    end         nothing runs or holds a block, and the log has no bug and no IntegrityError (the engine checks its state
                when it is idle)
    memory      resident memory, by its slope within the processes' lives, grows no more than its noise allows
    bad ones    each bad request gets its documented status
    files       the number of open files does not grow
    health      99 % of the checks take less than 50 ms, apart from those after the kill of a front end
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import re
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from npuserve.client import AsyncClient, ClientError, DeadlineExceeded, Overloaded, StreamLost
from npuserve.service.cli.bench.workload import Prompts, TimedRequest, cut_to_context, poisson, read_trace
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc, model_pb2, prompt_pb2

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.reliability.hostile import BadRequests, FileCount, HealthProbe
from bench.serving.server import arguments, children, report, serving

POOL = 192
"""Number of different requests; the trace's rows use them in turn."""
CLIENTS = 6
SAMPLE_SECONDS = 5.0
YOUNG_SECONDS = 90.0
"""Samples in this time after a process's start do not count: caches fill, and ended streams are kept for
`resume_seconds`."""
SMALL = ["--frontends", "2", "--max-num-seqs", "16", "--max-queue", "64", "--kv-cache-memory", "64MiB"]
"""A small KV cache, which is soon full; until then the prefix cache's tables grow with each new block."""
TOLERATED = 32.0
"""Allowed growth of a process in the whole run, in MiB above the slope's noise: caches, records of streams."""
HEALTH_MILLISECONDS = 50.0
MORE_FILES = 8
"""Allowed excess of the largest file count in the last third over that in the first third."""
BUGS = re.compile(r"internal error|IntegrityError|Traceback|giving up|no message; connecting")


@dataclass
class Tally:
    """Results. ends: kind of end -> requests. wrong: violations. resumed: streams resumed by another client."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    resumed: int = 0
    calls: int = 0
    tokens: int = 0


class Load:
    """Load of requests of the pool, whose answers are checked."""

    def __init__(self, target: str, pool: Sequence[pb.GenerateRequest], seed: int):
        self.tally = Tally()
        self._pool = pool
        self._chance = random.Random(seed)
        self._clients = [AsyncClient(target, patience=60) for _ in range(CLIENTS)]
        self._whole: list[pb.GenerateResponse] = []

    async def undisturbed(self) -> None:
        """Record the undisturbed answer of each request."""
        limit = asyncio.Semaphore(8)

        async def one(request: pb.GenerateRequest) -> pb.GenerateResponse:
            async with limit:
                return await self._clients[0].generate(request)

        self._whole = await asyncio.gather(*map(one, self._pool))

    async def run(self, arrivals: Sequence[TimedRequest], seconds: float) -> None:
        """Send the arrivals for `seconds`, repeating a short trace; return when all requests have ended."""
        began, tasks, number = time.monotonic(), set[asyncio.Task[None]](), 0
        span = arrivals[-1].at + 1.0
        while (at := arrivals[number % len(arrivals)].at + number // len(arrivals) * span) < seconds:
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            task = asyncio.create_task(self._one(number))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            number += 1
        await asyncio.gather(*tasks)

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients))

    async def _one(self, number: int) -> None:
        which, fate = number % len(self._pool), self._chance.random()
        whole, tally = self._whole[which], self.tally
        leave = self._chance.randint(0, whole.finish.usage.generated_tokens) if fate < 0.2 else None
        timeout = self._chance.uniform(0.3, 10.0) if 0.2 <= fate < 0.25 else None
        client = self._clients[number % CLIENTS]
        stream, text, finish = client.stream(self._pool[which], timeout=timeout), "", None
        try:
            async with stream:
                async for delta in stream:
                    text += delta.text
                    finish = delta.finish if delta.HasField("finish") else None
                    if leave is not None and stream.attempts.tokens >= leave:
                        break
            if leave is not None and finish is None:
                if fate < 0.1 or not stream.attempts.resume_token:
                    end = "left"
                else:
                    await asyncio.sleep(self._chance.uniform(0.0, 3.0))
                    tally.resumed += 1
                    other = self._clients[(number + 1) % CLIENTS]
                    async for delta in other.resume(stream.attempts.resume_token, stream.attempts.tokens):
                        text += delta.text
                        finish = delta.finish if delta.HasField("finish") else None
            if finish is not None:
                end = pb.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_")
        except (Overloaded, DeadlineExceeded) as error:
            end = error.code.name
        except StreamLost as error:
            end = "LOST"
            tally.wrong.append(f"request {number}: {error}")
        except ClientError as error:
            end = error.code.name
            # A request with a deadline may have no time for a retry: a documented status.
            if timeout is None or error.code is not grpc.StatusCode.UNAVAILABLE:
                tally.wrong.append(f"request {number}: {error} {error.reason}")
        tally.calls += stream.attempts.calls
        tally.tokens += finish.usage.generated_tokens if finish else stream.attempts.tokens
        tally.ends[end] += 1
        complete = finish is not None and finish.reason == whole.finish.reason
        if text != whole.text if complete else not whole.text.startswith(text):
            tally.wrong.append(f"request {number} ({end}): {text!r} is not {whole.text!r}")


@dataclass
class Killer:
    """Kills the engine and front ends of a supervisor in turn. killed: (seconds since the start, kind)."""

    supervisor: int
    gaps: tuple[float, float]
    seed: int
    killed: list[tuple[float, str]] = field(default_factory=list)

    async def run(self, seconds: float) -> None:
        chance, began = random.Random(self.seed), time.monotonic()
        while (wait := chance.uniform(*self.gaps)) < seconds - (time.monotonic() - began):
            await asyncio.sleep(wait)
            kind = ("engine", "frontend")[len(self.killed) % 2]
            found = [pid for pid, name in children(self.supervisor).items() if name == kind]
            if found:  # otherwise the process is being restarted
                os.kill(chance.choice(found), signal.SIGKILL)
                self.killed.append((round(time.monotonic() - began, 1), kind))


@dataclass
class Memory:
    """Resident memory of a supervisor and its children. lives: (kind, pid) -> [(age in seconds, MiB)]."""

    supervisor: int
    lives: defaultdict[tuple[str, int], list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    async def run(self) -> None:
        born: dict[int, float] = {}
        while True:
            now = time.monotonic()
            for pid, kind in {self.supervisor: "supervisor", **children(self.supervisor)}.items():
                born.setdefault(pid, now)
                if size := resident(pid):
                    self.lives[kind, pid].append((now - born[pid], size))
            await asyncio.sleep(SAMPLE_SECONDS)

    def growth(self) -> dict[str, dict[str, float]]:
        """Return, for each kind of process, slope, noise and largest size.

        The slope is in MiB a minute over the kind's lives, each about its own mean. The noise is twice the standard
        error, from the lives' halves, since successive samples are correlated. The largest size is in MiB.
        """
        found = {}
        for kind in sorted({kind for kind, _ in self.lives}):
            lives = [[(age / 60, size) for age, size in life if age > YOUNG_SECONDS]
                     for (name, _), life in self.lives.items() if name == kind]
            lives = [life for life in lives if len(life) >= 6]
            largest = max(size for (name, _), life in self.lives.items() if name == kind for _, size in life)
            if not lives:
                found[kind] = {"largest": round(largest, 1)}
                continue
            halves = [part for life in lives for part in (life[: len(life) // 2], life[len(life) // 2 :])]
            spread = statistics.stdev([slope([part]) for part in halves]) / len(halves) ** 0.5
            found[kind] = {"slope": round(slope(lives), 3), "noise": round(2 * spread, 3), "largest": round(largest, 1),
                           "lives": len(lives)}
        return found


def resident(pid: int) -> float:
    """Return the resident MiB of a process, 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (OSError, IndexError):
        return 0.0


def slope(lives: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Return the least-squares slope, with every life about its own mean."""
    over = under = 0.0
    for life in lives:
        x, y = (statistics.fmean(values) for values in zip(*life, strict=True))
        over += sum((a - x) * (b - y) for a, b in life)
        under += sum((a - x) ** 2 for a, _ in life)
    return over / under if under else 0.0


def requests(timed: Sequence[TimedRequest], prompts: Prompts) -> list[pb.GenerateRequest]:
    """Return greedy and seeded requests in turn; every third one shares a prefix."""
    shared = prompts.token_ids(10**6, TimedRequest(0.0, 64, 1))
    made = []
    for number, ask in enumerate(timed):
        ids = prompts.token_ids(number, ask)
        if number % 3 == 0:
            ids = (shared + ids)[: len(ids)]
        made.append(pb.GenerateRequest(
            token_ids=prompt_pb2.TokenIds(ids=ids),
            sampling=pb.SamplingParams(temperature=0.9 * (number % 2), seed=number),
            stopping=pb.StoppingParams(max_tokens=ask.output_tokens, ignore_eos=number % 5 > 0)))
    return made


async def settle(target: str) -> list[str]:
    """Return what still runs or holds blocks after the load, as text."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        for _ in range(50):
            load = await stub.GetLoad(model_pb2.GetLoadRequest(), wait_for_ready=True, timeout=30)
            if not load.running and not load.waiting and load.free_kv_ratio == 1:
                return []
            await asyncio.sleep(0.2)
    return [f"left over: {load.running} running, {load.waiting} waiting, {load.free_kv_ratio:.4f} of the KV cache free"]


async def soak(args: argparse.Namespace, target: str, supervisor: int) -> dict[str, Any]:
    async with AsyncClient(target) as client:
        info = await client.model_info()
    seconds = args.minutes * 60
    arrivals = read_trace(args.trace, 0, args.time_scale) if args.trace else poisson(
        int(args.rate * seconds) + 1, args.rate, args.max_prompt, args.max_output, args.seed)
    shapes = cut_to_context(arrivals[:POOL], args.max_prompt, args.max_output, info.max_model_len)[0]
    load = Load(target, requests(shapes, Prompts(info.vocabulary_size, info.eos_token_ids, args.seed)), args.seed)
    low, high = map(float, args.gap.split(","))
    killer, memory = Killer(supervisor, (low, high), args.seed), Memory(supervisor)
    bad, health, files = BadRequests(target, info, args.bad_rate, args.seed), HealthProbe(target), FileCount(supervisor)
    try:
        await load.undisturbed()
        began = time.monotonic()
        watching = [asyncio.ensure_future(watch.run()) for watch in (memory, health, files)]
        disturbing = [asyncio.ensure_future(cause.run(seconds)) for cause in (killer, bad)]
        await load.run(arrivals, seconds)
        await asyncio.gather(*disturbing)
        wrong = load.tally.wrong + bad.wrong + await settle(target)
        for watch in watching:
            watch.cancel()
    finally:
        await load.close()
    growth, counts = memory.growth(), files.largest()
    probes = health.milliseconds([began + at for at, kind in killer.killed if kind == "frontend"])
    wrong += [f"{name}: {first} grew to {last}" for name, (first, last) in counts.items() if last > first + MORE_FILES]
    if probes.get("p99", math.inf) >= HEALTH_MILLISECONDS:
        wrong.append(f"health: {probes}")
    wrong += [f"{kind} grows by {one['slope']} MiB a minute" for kind, one in growth.items()
              if one.get("slope", 0.0) > one.get("noise", 0.0) + TOLERATED / args.minutes]
    return {"minutes": args.minutes, "requests": sum(load.tally.ends.values()), "tokens": load.tally.tokens,
            "calls": load.tally.calls, "taken_up_by_another": load.tally.resumed, "ends": dict(load.tally.ends),
            "kills": dict(Counter(kind for _, kind in killer.killed)), "memory_mib_per_minute": growth,
            "bad_requests": dict(sorted(bad.ends.items())), "health_ms": probes,
            "files_first_and_last_third": counts, "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="model to serve (default: the built-in model)")
    parser.add_argument("--minutes", type=float, default=60.0, help="length of the run (default: %(default)s)")
    parser.add_argument("--trace", type=Path, help="Azure or Mooncake trace")
    parser.add_argument("--time-scale", type=float, default=1.0, help="of the trace (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=6.0, help="per second without a trace (default: %(default)s)")
    parser.add_argument("--max-prompt", type=int, default=192, help="tokens (default: %(default)s)")
    parser.add_argument("--max-output", type=int, default=160, help="tokens (default: %(default)s)")
    parser.add_argument("--gap", default="20,90", help="least and most seconds between kills (default: %(default)s)")
    parser.add_argument("--bad-rate", type=float, default=4.0, help="bad requests per second (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the verdict to FILE")
    args, flags = arguments(parser)
    with serving(args.model, [*SMALL, *flags]) as server:
        verdict = asyncio.run(soak(args, server.target, server.pid))
        said = server.log.splitlines()
    bugs = [line for line in said if BUGS.search(line)]
    verdict["bugs"] = len(bugs)
    report(verdict, args.json)
    print("\n".join(line[:300] for line in bugs[:40]), file=sys.stderr)
    return int(bool(verdict["wrong"] or bugs))


if __name__ == "__main__":
    sys.exit(main())
