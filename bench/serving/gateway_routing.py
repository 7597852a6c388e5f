"""Routing of a gateway: share of prompts from the prefix caches of several servers, by smg's policy.

    python bench/serving/gateway_routing.py [MODEL] --trace mooncake_conversation_trace.jsonl [--servers 3]
        [--requests 600] [--seconds 30] [--rounds 1] [--policies round_robin,cache_aware,cache_aware+events]
        [--cache-memory 32MiB] [--length-scale 0] [--json FILE] [-- FLAGS]

Whole conversations of the trace, drawn at random, are sent through smg as streamed completions (POST /v1/completions),
each request at its scheduled time. The whole trace lasts `--seconds`. Prompts are random words of one token each: equal
leading hashes of the trace become equal words. `--length-scale` 0 scales lengths by the power of 1/2 at which nine
tenths of the requests fit the model's context; longer ones are cut.

Each run of a policy has fresh servers and a fresh smg. All runs send the same requests at the same times. Each round
begins with another policy:

    round_robin          without regard to caches
    cache_aware          smg remembers which server received which prompts
    cache_aware+events   the same, and the servers publish the changes of their caches (--kv-events grpc)

Reported by policy, as medians of the rounds: prefix-hit share by the servers' metrics, TTFT from the scheduled time
(p50, p99), tokens per second, requests by server, and errors by code. The prefix-hit share is the share of prompt
tokens that were in the prefix cache of the server that received the request. `endless_cache` is this share for one
server with a cache without limit, if no two requests overlapped. `ratios` are a policy's figure divided by the first
policy's in the same round: median, least and greatest. `lag_p99_ms` is the time from schedule to sending, which is part
of TTFT: a run with a lag near its TTFT measures this program.

Each server has one thread, blocks of 16 tokens, and `--cache-memory` for its KV cache, which should hold less than the
prompts do. Needs smg and `pip install 'npuserve[gateway]'`. FLAGS are further settings of the servers.
"""

from __future__ import annotations

import npuserve.cli.bench.grpc_threads  # noqa: F401

# isort: split
import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from npuserve.cli.bench.load_generator import Load, Outcome
from npuserve.cli.bench.report import latencies
from npuserve.cli.bench.workload import Prompts, TimedRequest, TraceError, cut_to_context, read_trace
from npuserve.service.arguments import number
from npuserve.service.text.model_path import resolve

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.serving import completions
from bench.serving.server import Serving, arguments, report, serving
from tests.e2e.gateway.smg import find_program, gateway

POLICIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "round_robin": ("round_robin", ()),
    "cache_aware": ("cache_aware", ()),
    "cache_aware+events": ("cache_aware", ("--kv-events", "grpc")),
}
"""Name -> smg's policy, and settings of the servers."""
BLOCK_SIZE = 16
MARGIN_TOKENS = 8
"""Tokens of the context that remain free: special tokens, and a word that is not one token at a prompt's beginning."""
FITTING = 0.9
"""Share of the requests that fit the context with `--length-scale` 0."""
MAX_WORDS = 4096
CONVERSATION_HASHES = 2
"""Leading hashes that requests of one conversation have in common; the first one is common to all requests."""
RATIOS = ("hit_share", "ttft_p50_ms", "ttft_p99_ms", "tokens_per_second")


# The workload


@dataclass(frozen=True)
class HttpRequest:
    """Request to send. at: seconds after the start. body: of the HTTP request."""

    at: float
    body: bytes


def conversations(requests: Sequence[TimedRequest], count: int, seed: int) -> list[TimedRequest]:
    """Return the requests of conversations drawn at random, at least `count` requests or all of them, in order."""
    sizes = Counter(request.hashes[:CONVERSATION_HASHES] for request in requests)
    names = sorted(sizes)
    random.Random(seed).shuffle(names)
    totals = itertools.accumulate((sizes[name] for name in names), initial=0)
    chosen = {name for name, before in zip(names, totals, strict=False) if before < count}
    return [request for request in requests if request.hashes[:CONVERSATION_HASHES] in chosen]


def fitting_scale(requests: Sequence[TimedRequest], context: int) -> float:
    """Return the greatest power of 1/2, at most 1, at which FITTING of the requests fit the context."""
    lengths = [request.prompt_tokens + request.output_tokens for request in requests]
    scale = 1.0
    while np.quantile(lengths, FITTING) * scale > context:
        scale /= 2
    return scale


def lasting(requests: Sequence[TimedRequest], seconds: float) -> list[TimedRequest]:
    """Return the requests with their times scaled, the first at 0 and the last at `seconds`."""
    first, last = requests[0].arrival, requests[-1].arrival
    return [replace(r, arrival=(r.arrival - first) * seconds / max(last - first, 1e-9)) for r in requests]


def single_token_words(tokenizer: Tokenizer) -> list[str]:
    """Return words with a leading space that are one token wherever they stand, at most MAX_WORDS."""
    ids = sorted(tokenizer.get_vocab().values())
    tokens = (tokenizer.id_to_token(i) for i in ids)
    words = [f" {match[1]}" for token in tokens if token and (match := re.fullmatch(r"[Ġ▁]([a-z]{2,})", token))]
    words = words[:MAX_WORDS]
    found = tokenizer.encode_batch([word * 3 for word in words], add_special_tokens=False)
    return [word for word, encoded in zip(words, found, strict=True) if len(encoded.ids) == 3]


def endless_cache(prompts: Iterable[Sequence[int]], block: int = BLOCK_SIZE) -> float:
    """Return the share of the prompts' tokens in leading whole blocks that an earlier prompt has as well."""
    known: dict[tuple[int, tuple[int, ...]], int] = {}  # number of the parent, and the block's tokens -> number
    total = cached = 0
    for prompt in prompts:
        total += len(prompt)
        parent = 0
        for end in range(block, len(prompt) + 1, block):
            key = parent, tuple(prompt[end - block : end])
            cached += block if key in known else 0
            parent = known.setdefault(key, len(known) + 1)
    return cached / max(1, total)


def workload(
    args: argparse.Namespace, words: Sequence[str], context: int, model: str
) -> tuple[list[HttpRequest], dict[str, Any]]:
    """Return the requests, and a description of them. Raise TraceError.

    words: words of one token each. context: tokens of prompt and answer. model: name in the requests.
    """
    traced = read_trace(args.trace, 0)
    if not all(request.hashes for request in traced):
        raise TraceError(f"{args.trace}: hash_ids: there are none, so no request shares a prefix")
    scale = args.length_scale or fitting_scale(traced, context)
    chosen = conversations(read_trace(args.trace, 0, length_scale=scale), args.requests, args.seed)
    fit, cut = cut_to_context(lasting(chosen, args.seconds), 0, 0, context)
    drawn = Prompts(len(words), (), args.seed)
    prompts = [drawn.token_ids(place, request) for place, request in enumerate(fit)]
    requests = [
        HttpRequest(
            request.arrival, completions.completion(model, "".join(words[i] for i in prompt), request.output_tokens))
        for request, prompt in zip(fit, prompts, strict=True)]
    return requests, {
        "requests": len(fit), "length_scale": scale, "cut": cut, "context": context, "words": len(words),
        "prompt_tokens": sum(map(len, prompts)), "output_tokens": sum(r.output_tokens for r in fit),
        "endless_cache": round(endless_cache(prompts), 4)}


# The measurement


async def max_model_len(server: Serving) -> int:
    """Return the tokens of prompt and answer that a server accepts."""
    load = Load(server.target, 1, 0.0, 0)
    try:
        return (await load.model_info()).max_model_len
    finally:
        await load.close()


async def send(url: str, requests: Sequence[HttpRequest]) -> tuple[list[Outcome], float]:
    """Send each request at its time. Return the outcomes, and the seconds until the last one ended."""
    start = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - start

    async def one(request: HttpRequest) -> Outcome:
        await asyncio.sleep(max(0.0, request.at - now()))
        return await completions.stream(url, request.body, now, due=request.at)

    outcomes = await asyncio.gather(*(one(request) for request in requests))
    return outcomes, now()


def figures(outcomes: Sequence[Outcome], seconds: float, servers: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the figures of one run.

    servers: `queries` and `hits` of each server, in prompt tokens, and its `requests`.
    """
    samples = latencies(outcomes)
    ttft = samples["ttft"] if samples["ttft"].size else np.array([np.nan])
    queries = sum(server["queries"] for server in servers)
    return {
        "hit_share": sum(server["hits"] for server in servers) / max(1.0, queries),
        "ttft_p50_ms": float(1000 * np.percentile(ttft, 50)), "ttft_p99_ms": float(1000 * np.percentile(ttft, 99)),
        "tokens_per_second": sum(o.generated_tokens for o in outcomes) / seconds,
        "requests_by_server": [round(server["requests"]) for server in servers],
        "ok": sum(o.ok for o in outcomes), "errors": dict(Counter(o.code for o in outcomes if not o.ok)),
        "details": sorted({o.detail for o in outcomes if o.detail})[:5],
        "seconds": seconds, "lag_p99_ms": float(1000 * np.percentile(samples["lag"], 99)),
    }


def counts(server: Serving) -> dict[str, float]:
    """Return a server's counters, see `figures`."""
    requests = server.samples("requests_total")
    return {"queries": server.metric("prefix_cache_queries_total"), "hits": server.metric("prefix_cache_hits_total"),
            "requests": sum(value for labels, value in requests.items() if 'rpc="vllm.Generate"' in labels)}


def run(
    args: argparse.Namespace, flags: Sequence[str], words: Sequence[str], name: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a policy with fresh servers. Return its figures, and the description of the workload."""
    policy, events = POLICIES[name]
    settings = ["--threads", "1", "--block-size", str(BLOCK_SIZE), "--kv-cache-memory", args.cache_memory, *events]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving(args.model, [*settings, *flags])) for _ in range(args.servers)]
        gate = stack.enter_context(gateway([server.target for server in servers], policy=policy))
        model = gate.get("/v1/models")["data"][0]["id"]
        context = asyncio.run(max_model_len(servers[0]))
        requests, described = workload(args, words, context - MARGIN_TOKENS, model)
        outcomes, seconds = asyncio.run(send(gate.url, requests))
        return figures(outcomes, seconds, [counts(server) for server in servers]), described


def summary(rounds: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the medians by policy, and the ratios [median, least, greatest] to the first policy."""
    first, *others = rounds
    medians = {}
    for name, found in rounds.items():
        errors: Counter[str] = Counter()
        for one in found:
            errors.update(one["errors"])
        medians[name] = {
            **{figure: round(statistics.median(f[figure] for f in found), 4) for figure in (*RATIOS, "lag_p99_ms")},
            "requests_by_server": [f["requests_by_server"] for f in found], "ok": sum(f["ok"] for f in found),
            "errors": dict(errors), "details": sorted({detail for f in found for detail in f["details"]})[:5]}
    ratios: dict[str, dict[str, list[float]]] = {}
    for name in others:
        pairs = list(zip(rounds[name], rounds[first], strict=True))
        quotients = {figure: sorted(a[figure] / b[figure] for a, b in pairs if b[figure]) for figure in RATIOS}
        ratios[f"{name} / {first}"] = {
            figure: [round(value, 3) for value in (statistics.median(values), values[0], values[-1])]
            for figure, values in quotients.items() if values}
    return {"policies": medians, "ratios": ratios}


def policies(text: str) -> list[str]:
    """Return the names in a comma-separated list; an argparse type."""
    names = text.split(",")
    if unknown := [name for name in names if name not in POLICIES]:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(POLICIES)}, got {unknown[0]!r}")
    return list(dict.fromkeys(names))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", nargs="?", default="", help="model to serve (default: the built-in model)")
    made.add_argument("--trace", type=Path, required=True, help="Mooncake trace (JSON lines with hash_ids)")
    for name, kind, value, low, text in (
        ("servers", int, 3, 1, "npuserve servers behind smg"), ("requests", int, 600, 1, "requests of a run"),
        ("seconds", float, 30.0, 0, "time from the first request of a run to its last"),
        ("rounds", int, 1, 1, "runs of each policy"),
        ("length-scale", float, 0.0, 0, "factor of prompts and answers; 0: fitting the context"),
        ("seed", int, 0, 0, "seed of the conversations and of the words"),
    ):
        made.add_argument(f"--{name}", type=number(kind, low), default=value, help=f"{text} (default: %(default)s)")
    made.add_argument("--policies", type=policies, default=list(POLICIES), help="comma-separated (default: all)")
    made.add_argument("--cache-memory", default="32MiB", metavar="SIZE",
                      help="KV cache of each server (default: %(default)s)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write all figures, with those of each run")
    return made


def main() -> int:
    made = parser()
    args, flags = arguments(made)
    if not (find_program() and importlib.util.find_spec("smg_grpc_proto")):
        made.error("smg or its stubs are not installed: pip install smg 'npuserve[gateway]'")
    words = single_token_words(Tokenizer.from_file(str(resolve(args.model) / "tokenizer.json")))
    if len(words) < 2:
        made.error("the model's tokenizer has no words of one token")
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in args.policies}
    described: dict[str, Any] = {}
    try:
        for place in range(args.rounds):
            first = place % len(args.policies)
            for name in [*args.policies[first:], *args.policies[:first]]:
                found, described = run(args, flags, words, name)
                rounds[name].append(found)
                print(name, found, file=sys.stderr, flush=True)
    except TraceError as error:
        raise SystemExit(str(error)) from None
    report({"servers": args.servers, "workload": described, **summary(rounds), "rounds": rounds}, args.json)
    return 0 if all(found["ok"] for runs in rounds.values() for found in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
