"""Cost of a gateway: the same streams over StreamGenerate, over VllmEngine.Generate, and through smg's HTTP API.

    python bench/serving/gateway_overhead.py [MODEL] [--streams 8] [--tokens 200] [--requests 4]
        [--rounds 16] [--worker-urls grpc://HOST:PORT ...] [--worker-pids PID ...] [--json FILE] [-- FLAGS]

One server is started, with smg in front of it. A round measures each route once, with new prompts, and every round
begins with another route. Each of the streams sends `--requests` requests, one after the other. Answers are greedy and
have exactly `--tokens` tokens:

    grpc              InferenceService/StreamGenerate: prompts as token ids, answers as text.
    vllm              VllmEngine/Generate: prompts and answers as token ids.
    smg               POST /v1/completions. smg tokenizes, calls VllmEngine/Generate and detokenizes.
    vllm@HOST:PORT    VllmEngine/Generate of a running server of --worker-urls, such as vLLM's.
    smg@HOST:PORT     smg in front of that server.

Reported by route, as medians of the rounds: tokens per second, ITL and TTFT (p50, p99), tokens per message, and
microseconds of CPU time per token and process. ITL is the gap between two messages of a stream that have tokens or
text. TTFT begins when the request is sent. Processes are:

    engine, frontend  of the server.
    worker            of a server of --worker-urls: the process of --worker-pids, and its descendants.
    smg               with its descendants.
    client            this program.

`ratios` are one route's figure divided by another's in the same round: median, least and greatest. Clients and servers
share the machine, so each process that a route adds also takes CPU time from an engine on the CPU. Needs smg, and
`pip install 'npuserve[gateway]'`. FLAGS are settings of the server.
"""

from __future__ import annotations

import npuserve.cli.bench.grpc_threads  # noqa: F401

# isort: split
import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import math
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from npuserve.cli.bench.load_generator import NO_FINISH, Outcome
from npuserve.cli.bench.report import latencies
from npuserve.client.channel import open_aio_channel
from npuserve.service.arguments import number, target
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import prompt_pb2
from npuserve.v1.inference_service_pb2_grpc import InferenceServiceStub

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.serving import completions
from bench.serving.server import Serving, arguments, cpu_seconds, report, serving
from tests.e2e.gateway.smg import Gateway, find_program, gateway

SECONDS = 300.0
"""Deadline of a call."""
SETTLE_SECONDS = 1.0
"""Pause before a measurement: the threads of the server that was measured before may wait for work without sleeping."""
FIGURES = ("tokens_per_second", "itl_p50_ms", "itl_p99_ms", "ttft_p50_ms", "ttft_p99_ms", "tokens_per_message")
RATIOS = FIGURES[:5]
TEXT = "{:06d} Once upon a time there was a little girl named Lily. She liked to play with her"
"""A prompt. Its number is the beginning, so that no prompt has a cached prefix."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as text, and as the token ids that smg makes of it."""

    text: str
    ids: list[int]


Send = Callable[[Prompt], Awaitable[Outcome]]


@dataclass(frozen=True)
class Route:
    """One route to a server.

    gate, model: smg in front of the server, and the name of the served model.
    send: sends a request and reads its answer.
    pids: processes on this machine by name.
    """

    name: str
    gate: Gateway
    model: str
    send: Send
    pids: Mapping[str, Sequence[int]]

    def cpu(self) -> dict[str, float]:
        """Return the CPU seconds so far by process name; `client` is this process."""
        found = {name: sum(map(cpu_seconds, pids)) for name, pids in self.pids.items()}
        return {**found, "client": cpu_seconds(os.getpid())}


def now() -> float:
    return time.perf_counter()


# The calls


async def recorded(reading: Callable[[Outcome], Awaitable[None]]) -> Outcome:
    """Run a call that fills its outcome; a gRPC error becomes the outcome's code."""
    outcome = Outcome((began := now()), began)
    try:
        await reading(outcome)
        outcome.code = "OK" if outcome.reason else NO_FINISH
    except grpc.aio.AioRpcError as error:
        outcome.code, outcome.detail = error.code().name, error.details() or ""
    outcome.end = now()
    return outcome


async def stream_generate(stub: InferenceServiceStub, tokens: int, prompt: Prompt) -> Outcome:
    request = pb.GenerateRequest(
        token_ids=prompt_pb2.TokenIds(ids=prompt.ids), sampling=pb.SamplingParams(temperature=0),
        stopping=pb.StoppingParams(max_tokens=tokens, ignore_eos=True))

    async def read(outcome: Outcome) -> None:
        async for answer in stub.StreamGenerate(request, timeout=SECONDS):
            if answer.text:
                outcome.arrivals.append((now(), 1))
            if answer.HasField("finish"):
                outcome.reason = pb.FinishReason.Name(answer.finish.reason)
                usage = answer.finish.usage
                outcome.prompt_tokens, outcome.generated_tokens = usage.prompt_tokens, usage.generated_tokens

    return await recorded(read)


def vllm_request(name: str, ids: Sequence[int], tokens: int, temperature: float) -> Any:
    """Return a request of VllmEngine for an answer of `tokens` tokens."""
    from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

    return vllm.GenerateRequest(
        request_id=name, stream=True, tokenized=vllm.TokenizedInput(input_ids=ids),
        sampling_params=vllm.SamplingParams(
            temperature=temperature, top_p=1, repetition_penalty=1, n=1, max_tokens=tokens, ignore_eos=True,
            skip_special_tokens=True, spaces_between_special_tokens=True))


async def vllm_generate(stub: Any, tokens: int, names: Iterator[int], prompt: Prompt) -> Outcome:
    request = vllm_request(f"bench-{os.getpid()}-{next(names)}", prompt.ids, tokens, temperature=0)
    return await recorded(partial(read_vllm, stub.Generate(request, timeout=SECONDS)))


async def read_vllm(call: Any, outcome: Outcome) -> None:
    """Read a stream of VllmEngine. The last message of vLLM's own server counts only the tokens of its last step."""
    async for answer in call:
        if answer.HasField("complete"):
            outcome.reason, outcome.prompt_tokens = answer.complete.finish_reason, answer.complete.prompt_tokens
        elif answer.chunk.token_ids:
            outcome.arrivals.append((now(), 1))
            outcome.generated_tokens += len(answer.chunk.token_ids)


async def through_smg(url: str, model: str, tokens: int, prompt: Prompt) -> Outcome:
    body = completions.completion(model, prompt.text, tokens)
    return await completions.stream(url, body, now, timeout=SECONDS)


# The measurement


def descendants(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    listing = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    for line in listing.splitlines():
        child, parent = map(int, line.split())
        children[parent].append(child)
    found = [pid]
    for each in found:
        found += children[each]
    return found


def figures(outcomes: Sequence[Outcome], seconds: float, cpu: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures of one route in one round.

    seconds: from the first request to the end of the last answer.
    cpu: CPU seconds by process in that time.
    """
    tokens = sum(o.generated_tokens for o in outcomes)
    samples = latencies(outcomes)
    percentiles = {f"{name}_p{p}_ms": float(1000 * np.percentile(samples[name], p)) if samples[name].size else math.nan
                   for name in ("itl", "ttft") for p in (50, 99)}
    return {
        "tokens_per_second": tokens / seconds, **percentiles,
        "tokens_per_message": tokens / max(1, sum(len(o.arrivals) for o in outcomes)),
        "prompt_tokens": statistics.fmean(o.prompt_tokens for o in outcomes),
        "cpu_us_per_token": {name: 1e6 * used / tokens for name, used in cpu.items()},
    }


async def measure(route: Route, prompts: Sequence[Prompt], streams: int, tokens: int) -> dict[str, Any]:
    """Measure a route once. Raise SystemExit if a request failed or has another number of tokens."""
    outcomes: list[Outcome] = []

    async def stream(mine: Sequence[Prompt]) -> None:
        for prompt in mine:
            outcomes.append(await route.send(prompt))

    before, began = route.cpu(), now()
    await asyncio.gather(*(stream(prompts[place::streams]) for place in range(streams)))
    seconds, after = now() - began, route.cpu()
    for outcome in outcomes:
        if not outcome.ok or outcome.generated_tokens != tokens:
            raise SystemExit(f"{route.name}: a stream ended with {outcome.code} after {outcome.generated_tokens} of "
                             f"{tokens} tokens: {outcome.detail}")
    return figures(outcomes, seconds, {name: after[name] - before[name] for name in after})


def prompts_of(route: Route, numbers: Iterator[int], count: int) -> list[Prompt]:
    """Return the next prompts, tokenized by smg as it tokenizes a completion's prompt."""
    found = []
    for _ in range(count):
        text = TEXT.format(next(numbers))
        status, answer = route.gate.post("/v1/tokenize", {"model": route.model, "prompt": text})
        if status != 200:
            raise SystemExit(f"smg does not tokenize: {status} {answer}")
        found.append(Prompt(text, answer["tokens"]))
    return found


async def alternate(routes: Sequence[Route], args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Measure all routes in each round, after a round that does not count. Return the figures of each by route."""
    numbers = itertools.count()
    found: dict[str, list[dict[str, Any]]] = {route.name: [] for route in routes}
    for place in range(args.rounds + 1):
        first = place % len(routes)
        for route in [*routes[first:], *routes[:first]]:
            prompts = prompts_of(route, numbers, args.streams * args.requests)
            await asyncio.sleep(SETTLE_SECONDS)
            measured = await measure(route, prompts, args.streams, args.tokens)
            if place:
                found[route.name].append(measured)
    return found


def routes_to(
    channel: grpc.aio.Channel, gate: Gateway, tokens: int, names: Iterator[int], pids: Mapping[str, Sequence[int]],
    suffix: str,
) -> list[Route]:
    """Return the routes to a server over VllmEngine and through smg.

    names: numbers for request ids. suffix: of the routes' names.
    """
    from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

    model: str = gate.get("/v1/models")["data"][0]["id"]
    direct = partial(vllm_generate, VllmEngineStub(channel), tokens, names)
    return [
        Route(f"vllm{suffix}", gate, model, direct, pids),
        Route(f"smg{suffix}", gate, model, partial(through_smg, gate.url, model, tokens),
              {**pids, "smg": descendants(gate.process.pid)}),
    ]


async def run(
    args: argparse.Namespace, server: Serving, gate: Gateway, others: Mapping[str, Gateway]
) -> dict[str, list[dict[str, Any]]]:
    """Open the channels and measure. others: smg by host:port of the server of --worker-urls behind it."""
    own: dict[str, list[int]] = defaultdict(list)
    for process, pid in server.processes.items():
        own[process.split()[0]].append(pid)
    names = itertools.count()
    async with contextlib.AsyncExitStack() as stack:
        channel = await stack.enter_async_context(open_aio_channel(server.target))
        direct = partial(stream_generate, InferenceServiceStub(channel), args.tokens)
        routes = routes_to(channel, gate, args.tokens, names, own, "")
        routes.insert(0, Route("grpc", gate, routes[0].model, direct, own))
        for (address, its_gate), pid in itertools.zip_longest(others.items(), args.worker_pids):
            channel = await stack.enter_async_context(open_aio_channel(address))
            pids = {"worker": descendants(pid)} if pid else {}
            routes += routes_to(channel, its_gate, args.tokens, names, pids, f"@{address}")
        return await alternate(routes, args)


def pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the routes whose figures are divided: all by grpc, and each smg by the same server's vllm."""
    return [*((name, "grpc") for name in names if name != "grpc"),
            *((name, name.replace("smg", "vllm", 1)) for name in names if name.startswith("smg"))]


def summary(rounds: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the medians by route, and the ratios [median, least, greatest] of the rounds by pair of routes."""
    medians = {}
    for name, found in rounds.items():
        cpu = {process: round(statistics.median(f["cpu_us_per_token"][process] for f in found), 1)
               for process in found[0]["cpu_us_per_token"]}
        medians[name] = {
            **{figure: round(statistics.median(f[figure] for f in found), 3) for figure in (*FIGURES, "prompt_tokens")},
            "cpu_us_per_token": cpu}
    ratios: dict[str, dict[str, list[float]]] = {}
    for name, other in pairs(list(rounds)):
        ratios[f"{name} / {other}"] = {}
        for figure in RATIOS:
            values = sorted(a[figure] / b[figure] for a, b in zip(rounds[name], rounds[other], strict=True))
            ratios[f"{name} / {other}"][figure] = [
                round(value, 3) for value in (statistics.median(values), values[0], values[-1])]
    return {"routes": medians, "ratios": ratios}


def worker(text: str) -> str:
    """Return host:port of a server's URL; an argparse type."""
    if not text.startswith("grpc://"):
        raise argparse.ArgumentTypeError(f"must be like grpc://127.0.0.1:50051, got {text!r}")
    return target(text.removeprefix("grpc://"))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", nargs="?", default="", help="model to serve (default: the built-in model)")
    for name, value, low, text in (
        ("streams", 8, 1, "concurrent streams"), ("tokens", 200, 2, "tokens of each answer"),
        ("requests", 4, 1, "requests of each stream in a round"),
        ("rounds", 16, 1, "rounds, of which medians are reported"),
    ):
        made.add_argument(f"--{name}", type=number(int, low), default=value, help=f"{text} (default: %(default)s)")
    made.add_argument("--worker-urls", type=worker, nargs="+", default=[], metavar="grpc://HOST:PORT",
                      help="running servers of VllmEngine, measured in the same rounds")
    made.add_argument("--worker-pids", type=number(int, 1), nargs="+", default=[], metavar="PID",
                      help="processes of those servers, in the same order, for their CPU time")
    made.add_argument("--json", type=Path, metavar="FILE", help="write all figures, with those of each round")
    return made


def main() -> None:
    made = parser()
    args, flags = arguments(made)
    if args.worker_pids and len(args.worker_pids) != len(args.worker_urls):
        made.error(f"--worker-pids: {len(args.worker_pids)} for {len(args.worker_urls)} servers")
    if not (find_program() and importlib.util.find_spec("smg_grpc_proto")):
        made.error("smg or its stubs are not installed: pip install smg 'npuserve[gateway]'")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(args.model, flags))
        gate = stack.enter_context(gateway([server.target]))
        others = {address: stack.enter_context(gateway([address])) for address in args.worker_urls}
        rounds = asyncio.run(run(args, server, gate, others))
    options = {name: getattr(args, name) for name in ("streams", "tokens", "requests")}
    report({**options, **summary(rounds), "rounds": rounds}, args.json)


if __name__ == "__main__":
    main()
