"""Long run of many faults at once: completeness of answers, leaks, growth of memory.

    python bench/reliability/soak.py [MODEL] [--minutes 60] [--trace FILE] [--gap 20,90] [--without PART ...]
                                     [--json FILE] [-- FLAGS]

A server with two front ends and API keys receives a trace's arrivals (`npuserve bench serve --trace`; a Poisson process
without a trace) through npuserve.client. Some requests are cancelled after some tokens, some streams are dropped and
resumed by another client of the tenant, and some have a deadline. Open files are counted, and the server's health is
checked. Each PART can be left out:

    remote        two thirds of the clients are 20 to 100 ms away, each way
    tenants       one tenant fills all slots with long streams; three small ones request 8 tokens once a second
    constraints   each seventh request has a schema of a string of at least 300 characters, four schemas for all tenants
    kills         at random moments the engine or a front end is killed
    bad-requests  hostile.py
    full-disk     the file system of TMPDIR, a small one that is mounted for the server, is full for a minute

It prints a table with what was counted and what failed. Exit code 1 if one of these does not hold:

    requests    each ends once: complete, or cancelled by its client, or with a documented status
    text        a complete answer equals the undisturbed one, and an incomplete one is its beginning. Half of the
                requests are greedy, half are seeded. A complete answer with a schema satisfies it
    wait        99 % of the first tokens of small tenants arrive within --first-token, apart from those after a kill
    end         nothing runs or holds a block, and the log has no bug and no IntegrityError (the engine checks its state
                when it is idle)
    disk        no process but the killed ones ends, and after a full disk metrics are written again
    memory      resident memory, by its slope within the processes' lives, grows no more than its noise allows
    bad ones    each bad request gets its documented status
    files       the number of open files does not grow
    health      99 % of the checks take less than 50 ms, apart from those after the kill of a front end
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from npuserve.cli.bench.workload import Prompts, TimedRequest, cut_to_context, poisson, read_trace
from npuserve.client import AsyncClient, ClientError, DeadlineExceeded, Overloaded, StreamLost
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc, model_pb2, prompt_pb2

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.reliability.full_disk import Filler, small_disk
from bench.reliability.hostile import BadRequests, FileCount, HealthProbe
from bench.reliability.remote import DelayProxy
from bench.reliability.tenants import GreedyTenant, SmallTenant, wait_percentiles, write_keys
from bench.serving.server import Serving, arguments, children, serving

POOL = 192
"""Number of different requests; the trace's rows use them in turn."""
PARTS = ("remote", "tenants", "constraints", "kills", "bad-requests", "full-disk")
TENANTS = ("alpha", "beta", "gamma")
"""Tenants of the load's clients."""
DELAYS = (0.0, 0.02, 0.04, 0.1, 0.0, 0.02)
"""Delay of each client of the load, in seconds each way."""
SMALL_TENANTS = ("small-1", "small-2", "small-3")
GREEDY = "greedy"
GREEDY_STREAMS = 24
GREEDY_TOKENS = 400
MIN_STRING, MAX_STRING = 300, 320
"""Characters of a string of a constraint's schema."""
CONSTRAINED_PROMPT, CONSTRAINED_TOKENS = 96, 340
"""Tokens of the prompt and, at most, of the answer of a request with a schema."""
FULL_SECONDS = 60.0
MIN_GAP_SECONDS = 12.0
"""Minimum time between two kills, in which the next engine is ready again."""
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
    """Results.

    ends: kind of end -> requests. wrong: violations. resumed: streams resumed by another client.
    started: requests. equal: complete answers that equal the undisturbed ones. satisfied: those with a schema.
    """

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    resumed: int = 0
    started: int = 0
    equal: int = 0
    satisfied: int = 0
    calls: int = 0
    tokens: int = 0


class Load:
    """Load of requests of the pool, whose answers are checked.

    targets: host:port for each client.
    keys: API key of each tenant. Client i is of tenant i modulo their number.
    """

    def __init__(self, targets: Sequence[str], keys: Sequence[str], pool: Sequence[pb.GenerateRequest], seed: int):
        self.tally = Tally()
        self._pool = pool
        self._chance = random.Random(seed)
        self._tenants = len(keys)
        self._clients = [AsyncClient(target, api_key=keys[index % len(keys)], patience=60)
                         for index, target in enumerate(targets)]
        self._whole: list[pb.GenerateResponse] = []

    async def undisturbed(self) -> None:
        """Record the undisturbed answer of each request. A request without one is left out, and is a violation."""
        limit = asyncio.Semaphore(8)

        async def record(request: pb.GenerateRequest) -> pb.GenerateResponse | None:
            async with limit:
                try:
                    return await self._clients[0].generate(request)
                except ClientError as error:
                    self.tally.wrong.append(f"undisturbed request: {error} {error.reason}")
                    return None

        answers = await asyncio.gather(*map(record, self._pool))
        recorded = [(request, answer) for request, answer in zip(self._pool, answers, strict=True) if answer]
        self._pool, self._whole = [request for request, _ in recorded], [answer for _, answer in recorded]

    async def run(self, arrivals: Sequence[TimedRequest], seconds: float) -> None:
        """Send the arrivals for `seconds`, repeating a short trace; return when all requests have ended."""
        began, tasks, number = time.monotonic(), set[asyncio.Task[None]](), 0
        span = arrivals[-1].arrival + 1.0
        while (at := arrivals[number % len(arrivals)].arrival + number // len(arrivals) * span) < seconds:
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
        client = self._clients[number % len(self._clients)]
        tally.started += 1
        stream, text, finish = client.stream(self._pool[which], timeout=timeout), "", None
        try:
            async with stream:
                async for delta in stream:
                    text += delta.text
                    finish = self._finish(number, finish, delta)
                    if leave is not None and stream.attempts.tokens >= leave:
                        break
            if leave is not None and finish is None:
                if fate < 0.1 or not stream.attempts.resume_token:
                    end = "left"
                else:
                    await asyncio.sleep(self._chance.uniform(0.0, 3.0))
                    tally.resumed += 1
                    other = self._clients[(number + self._tenants) % len(self._clients)]
                    async for delta in other.resume(stream.attempts.resume_token, stream.attempts.tokens):
                        text += delta.text
                        finish = self._finish(number, finish, delta)
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
        elif complete:
            tally.equal += 1
            if finish and finish.reason == pb.FINISH_REASON_EOS and self._pool[which].json_schema:
                tally.satisfied += 1
                if not satisfies(self._pool[which].json_schema, text):
                    tally.wrong.append(f"request {number}: {text!r} does not satisfy its schema")

    def _finish(self, number: int, finish: pb.Finish | None, delta: pb.StreamGenerateResponse) -> pb.Finish | None:
        """Return the finish of an answer after one more message. A message behind the finish is a violation."""
        if finish is not None:
            self.tally.wrong.append(f"request {number}: a message behind the finish")
        return delta.finish if delta.HasField("finish") else finish


@dataclass
class Killer:
    """Kills the engine and front ends of a supervisor in turn. killed: (time.monotonic(), kind)."""

    supervisor: int
    gaps: tuple[float, float]
    seed: int
    killed: list[tuple[float, str]] = field(default_factory=list)

    async def run(self, seconds: float) -> None:
        chance, began = random.Random(self.seed), time.monotonic()
        while (wait := chance.uniform(*self.gaps)) < seconds - (time.monotonic() - began):
            await asyncio.sleep(wait)
            self.kill(("engine", "frontend")[len(self.killed) % 2])

    def kill(self, kind: str) -> bool:
        """Kill one process of a kind and return True.

        Return False while all are being restarted, and within MIN_GAP_SECONDS after another kill: a stream whose front
        end and engine die before it is resumed is lost.
        """
        running = [pid for pid, name in children(self.supervisor).items() if name == kind]
        is_early = self.killed and time.monotonic() - self.killed[-1][0] < MIN_GAP_SECONDS
        if is_early or not running:
            return False
        os.kill(running[len(self.killed) // 2 % len(running)], signal.SIGKILL)
        self.killed.append((time.monotonic(), kind))
        return True


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


def requests(timed: Sequence[TimedRequest], prompts: Prompts, has_schemas: bool) -> list[pb.GenerateRequest]:
    """Return greedy and seeded requests in turn; every third one shares a prefix, every seventh may have a schema."""
    shared = prompts.token_ids(10**6, TimedRequest(0.0, 64, 1))
    pool = []
    for number, ask in enumerate(timed):
        ids = prompts.token_ids(number, ask)
        if number % 3 == 0:
            ids = (shared + ids)[: len(ids)]
        request = pb.GenerateRequest(
            token_ids=prompt_pb2.TokenIds(ids=ids),
            sampling=pb.SamplingParams(temperature=0.9 * (number % 2), seed=number),
            stopping=pb.StoppingParams(max_tokens=ask.output_tokens, ignore_eos=number % 5 > 0))
        if has_schemas and number % 7 == 0:
            del request.token_ids.ids[CONSTRAINED_PROMPT:]
            request.json_schema = schema(number // 7 % 4)
            request.stopping.max_tokens, request.stopping.ignore_eos = CONSTRAINED_TOKENS, False
        pool.append(request)
    return pool


def schema(number: int) -> str:
    """Return the JSON schema of an object with one long string."""
    lengths = {"minLength": MIN_STRING + number, "maxLength": MAX_STRING + number}
    return json.dumps({"type": "object", "properties": {"text": {"type": "string", **lengths}}, "required": ["text"],
                       "additionalProperties": False})


def satisfies(text_schema: str, text: str) -> bool:
    """Return whether a text is an object of `schema`."""
    lengths = json.loads(text_schema)["properties"]["text"]
    try:
        answer = json.loads(text)
    except ValueError:
        return False
    return bool(answer.keys() == {"text"} and lengths["minLength"] <= len(answer["text"]) <= lengths["maxLength"])


async def settle(target: str, metadata: Sequence[tuple[str, str]]) -> list[str]:
    """Return what still runs or holds blocks after the load, as text."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        for _ in range(50):
            load = await stub.GetLoad(model_pb2.GetLoadRequest(), metadata=metadata, wait_for_ready=True, timeout=30)
            if not load.running and not load.waiting and load.free_kv_ratio == 1:
                return []
            await asyncio.sleep(0.2)
    return [f"left over: {load.running} running, {load.waiting} waiting, {load.free_kv_ratio:.4f} of the KV cache free"]


@dataclass
class FullDisk:
    """Fills the server's temporary folder from the middle of the run, for FULL_SECONDS or a fifth of the run.

    killer: kills the engine and a front end while the disk is full; None to kill nothing.
    filled: seconds for which the disk was full.
    """

    folder: Path
    killer: Killer | None
    filled: float = 0.0

    async def run(self, seconds: float) -> None:
        await asyncio.sleep(0.4 * seconds)
        filler, began = Filler(self.folder), time.monotonic()
        end = began + min(FULL_SECONDS, seconds / 5)
        kinds = ["engine", "frontend"] if self.killer else []
        try:
            await asyncio.to_thread(filler.start)
            while time.monotonic() < end:
                if kinds and self.killer and self.killer.kill(kinds[0]):
                    del kinds[0]
                await asyncio.sleep(0.5)
        finally:
            await asyncio.to_thread(filler.stop)
        self.filled = round(time.monotonic() - began, 1)


class Soak:
    """One run. lines: its table, each line with the check, what was counted, and the violations."""

    def __init__(self, args: argparse.Namespace, server: Serving, keys: dict[str, str], disk: Path | None):
        self._args = args
        self._server = server
        self._keys = keys
        self._parts = set(PARTS) - set(args.without)
        low, high = map(float, args.gap.split(","))
        self._killer = Killer(server.pid, (low, high), args.seed)
        self._disk = FullDisk(disk, self._killer if "kills" in self._parts else None) if disk else None
        self._metadata = [("authorization", f"Bearer {keys[TENANTS[0]]}")]
        self._checks: dict[str, tuple[object, list[str]]] = {}

    async def run(self) -> dict[str, Any]:
        """Run for the given time and return the verdict."""
        args, server, seconds = self._args, self._server, self._args.minutes * 60
        async with AsyncClient(server.target, api_key=self._keys[TENANTS[0]]) as client:
            info = await client.model_info()
        arrivals = read_trace(args.trace, 0, args.time_scale) if args.trace else poisson(
            int(args.rate * seconds) + 1, args.rate, args.max_prompt, args.max_output, args.seed)
        shapes = cut_to_context(arrivals[:POOL], args.max_prompt, args.max_output, info.max_model_len)[0]
        prompts = Prompts(info.vocabulary_size, info.eos_token_ids, args.seed)
        pool = requests(shapes, prompts, "constraints" in self._parts)
        killer, memory = self._killer, Memory(server.pid)
        bad = BadRequests(server.target, info, args.bad_rate, args.seed, self._metadata)
        health, files = HealthProbe(server.target), FileCount(server.pid)
        async with contextlib.AsyncExitStack() as stack:
            targets = [server.target] * len(DELAYS)
            if "remote" in self._parts:
                targets = [await self._proxied(stack, delay) for delay in DELAYS]
            load = Load(targets, [self._keys[name] for name in TENANTS], pool, args.seed)
            stack.push_async_callback(load.close)
            greedy = GreedyTenant(await self._client(stack, GREEDY), GREEDY_STREAMS, GREEDY_TOKENS)
            small = [SmallTenant(name, await self._client(stack, name), args.seed) for name in SMALL_TENANTS]
            tenants: list[GreedyTenant | SmallTenant] = [greedy, *small] if "tenants" in self._parts else []
            await asyncio.gather(load.undisturbed(), *(tenant.record() for tenant in tenants))
            began = time.monotonic()
            watching = [asyncio.ensure_future(watch.run()) for watch in (memory, health, files)]
            causes = [*tenants, *([self._disk] if self._disk else ()), *([killer] if "kills" in self._parts else ()),
                      *([bad] if "bad-requests" in self._parts else ())]
            disturbing = [asyncio.ensure_future(cause.run(seconds)) for cause in causes]
            await load.run(arrivals, seconds)
            await asyncio.gather(*disturbing)
            left = await settle(server.target, self._metadata)
            for watch in watching:
                watch.cancel()
        tally, kills = load.tally, [moment for moment, _ in killer.killed]
        self._check_load(tally)
        self._check_tenants(greedy, small, kills)
        self._check_processes(killer, left)
        self._check_bad_requests(bad)
        self._check_health(health, [moment for moment, kind in killer.killed if kind == "frontend"])
        self._check_resources(memory, files)
        self._check_log()
        return {"minutes": args.minutes, "seconds": round(time.monotonic() - began, 1), "without": sorted(args.without),
                "ends": dict(tally.ends), "tokens": tally.tokens, "calls": tally.calls, **{
                    name: figures for name, (figures, _) in self._checks.items()},
                "wrong": Counter(violation for _, violations in self._checks.values() for violation in violations)}

    def table(self) -> str:
        """Return the checks as a table."""
        lines = [f"{'check':<17} {'failures':>8}  counted"]
        for name, (figures, violations) in self._checks.items():
            lines.append(f"{name:<17} {len(violations):>8}  {json.dumps(figures)}")
        return "\n".join(lines)

    async def _proxied(self, stack: contextlib.AsyncExitStack, delay: float) -> str:
        """Return an address of the server with a delay in seconds each way."""
        if not delay:
            return self._server.target
        proxy = DelayProxy(self._server.target, delay)
        await proxy.start()
        stack.push_async_callback(proxy.close)
        return proxy.target

    async def _client(self, stack: contextlib.AsyncExitStack, name: str) -> AsyncClient:
        return await stack.enter_async_context(AsyncClient(self._server.target, api_key=self._keys[name], patience=120))

    def _check_load(self, tally: Tally) -> None:
        ended = sum(tally.ends.values())
        if ended != tally.started:
            tally.wrong.append(f"{tally.started} requests were sent, {ended} ended")
        self._checks["requests"] = ({"sent": tally.started, "ended": ended, "complete and equal": tally.equal,
                                     "schema satisfied": tally.satisfied, "resumed by another client": tally.resumed,
                                     "ends": dict(tally.ends)}, tally.wrong)

    def _check_tenants(self, greedy: GreedyTenant, small: Sequence[SmallTenant], kills: Sequence[float]) -> None:
        if "tenants" not in self._parts:
            self._checks["tenants"] = "left out", []
            return
        self._checks["greedy tenant"] = ({"streams": greedy.ended, "refused": greedy.refused}, greedy.wrong)
        waits, wrong = wait_percentiles([wait for tenant in small for wait in tenant.waits], kills), []
        if waits.get("p99", math.inf) > self._args.first_token:
            wrong.append(f"first tokens of small tenants: {waits}, more than {self._args.first_token} s")
        for tenant in small:
            wrong += tenant.wrong
        self._checks["small tenants"] = {**waits, "bound": self._args.first_token}, wrong

    def _check_processes(self, killer: Killer, left: list[str]) -> None:
        kills = Counter(kind for _, kind in killer.killed)
        deaths = Counter(line["message"].partition(" died")[0].partition("-")[0] for line in self._server.lines()
                         if "died, starting it again" in line["message"])
        if deaths != kills:
            left.append(f"deaths of processes: {dict(deaths)}, but {dict(kills)} were killed")
        self._checks["processes"] = {"kills": dict(kills), "deaths": dict(deaths)}, left
        if self._disk:
            counts = Counter(line["message"] for line in self._server.lines())
            full, written = counts["no space for metrics, which wait in memory"], counts["metrics are written again"]
            wrong = [] if not self._disk.killer or full else ["the disk was not full for any process"]
            self._checks["full disk"] = {
                "seconds": self._disk.filled, "processes without space": full, "written again": written}, wrong

    def _check_bad_requests(self, bad: BadRequests) -> None:
        self._checks["bad requests"] = dict(sorted(bad.ends.items())), bad.wrong

    def _check_health(self, health: HealthProbe, kills: Sequence[float]) -> None:
        probes = health.milliseconds(kills)
        self._checks["health, ms"] = probes, (
            [f"health: {probes}"] if probes.get("p99", math.inf) >= HEALTH_MILLISECONDS else [])

    def _check_resources(self, memory: Memory, files: FileCount) -> None:
        counts, growth = files.largest(), memory.growth()
        self._checks["files, thirds"] = counts, [
            f"{name}: {first} grew to {last}" for name, (first, last) in counts.items() if last > first + MORE_FILES]
        self._checks["memory, MiB/min"] = growth, [
            f"{kind} grows by {figures['slope']} MiB a minute" for kind, figures in growth.items()
            if figures.get("slope", 0.0) > figures.get("noise", 0.0) + TOLERATED / self._args.minutes]

    def _check_log(self) -> None:
        bugs = [line[:300] for line in self._server.log.splitlines() if BUGS.search(line)]
        self._checks["log"] = {"bugs": len(bugs)}, bugs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="model to serve (default: the built-in model)")
    parser.add_argument("--minutes", type=float, default=60.0, help="length of the run (default: %(default)s)")
    parser.add_argument("--trace", type=Path, help="Azure or Mooncake trace")
    parser.add_argument("--time-scale", type=float, default=1.0, help="of the trace (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=4.0, help="per second without a trace (default: %(default)s)")
    parser.add_argument("--max-prompt", type=int, default=192, help="tokens (default: %(default)s)")
    parser.add_argument("--max-output", type=int, default=160, help="tokens (default: %(default)s)")
    parser.add_argument("--gap", default="20,90", help="least and most seconds between kills (default: %(default)s)")
    parser.add_argument("--bad-rate", type=float, default=4.0, help="bad requests per second (default: %(default)s)")
    parser.add_argument("--first-token", type=float, default=5.0, metavar="SECONDS",
                        help="bound of 99 %% of the waits of small tenants (default: %(default)s)")
    parser.add_argument("--without", nargs="*", choices=PARTS, default=[], help="parts to leave out")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the verdict to FILE")
    args, flags = arguments(parser)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="npuserve-soak-")))
        keys = write_keys(folder / "keys.toml", [*TENANTS, GREEDY, *SMALL_TENANTS])
        disk = None
        if "full-disk" not in args.without:
            (folder / "disk").mkdir()
            disk = stack.enter_context(small_disk(folder / "disk"))
        server = stack.enter_context(serving(
            args.model, [*SMALL, "--api-keys", str(folder / "keys.toml"), *flags],
            environment={"TMPDIR": str(disk)} if disk else {}))
        run = Soak(args, server, keys, disk)
        verdict = asyncio.run(run.run())
    print(run.table())
    for violation, count in verdict["wrong"].items():
        print(f"{count} x {violation}", file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps(verdict, indent=1, ensure_ascii=False) + "\n")
    return int(bool(verdict["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
