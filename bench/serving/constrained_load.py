"""Cost of constraints: streams of which none, half or all have a JSON schema, of equal length.

    python bench/serving/constrained_load.py [MODEL] [--shares 0 50 100] [--streams 32] [--tokens 128] [--vary 0]
        [--requests 2] [--rounds 3] [--vocabulary N] [--schema people|order|report] [--worker-urls grpc://HOST:PORT ...]
        [--smg response_format tool_choice] [--json FILE] [-- FLAGS]

One server is started. Each of the streams sends `--requests` requests, one after the other, over VllmEngine/Generate.
A running server of vLLM (`--worker-urls`) gets the same requests. A round measures each share of constrained requests
once at each server, and begins with another one each time. Prompts are random ids. Answers are sampled at temperature 1
and have exactly `--tokens` tokens: the schema (schemas.py) has a list with more elements than fit. With `--vary` the
length of each answer is up to that many percent from `--tokens`, the same in each share. Without it the streams that
have no schema begin and end in step, and their prompts are computed together. Streams with a schema get forced tokens,
and are soon out of step.

With `--smg` smg is started in front of each server, and gets chats over POST /v1/chat/completions in the same rounds:

    response_format   the constrained ones have a `response_format` of the type json_schema.
    tool_choice       all have a tool, and the constrained ones the `tool_choice` "required"; the others have "none".

ITL is the gap between two messages of a stream. smg sends parts of a tool call less often than tokens.

Reported by route and share, as medians of the rounds: tokens per second, ITL and TTFT (p50, p99). `ratios` divide by
the figures of share 0 of the same route in the same round: median, least and greatest. Needs `pip install
'npuserve[gateway]'`, and smg for `--smg`. FLAGS are settings of the server.
"""

from __future__ import annotations

import npuserve.cli.bench.grpc_threads  # noqa: F401

# isort: split
import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from npuserve.cli.bench.load_generator import Outcome
from npuserve.client.channel import open_aio_channel
from npuserve.service.arguments import number

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.engine.schemas import PROPERTIES, endless_list
from bench.serving import completions
from bench.serving.gateway_overhead import (
    FIGURES,
    RATIOS,
    TEXT,
    figures,
    now,
    read_vllm,
    recorded,
    vllm_request,
    worker,
)
from bench.serving.server import arguments, report, serving
from tests.e2e.gateway.smg import CHAT_TEMPLATE, Gateway, find_program, gateway

SECONDS = 600.0
"""Deadline of a call."""

Send = Callable[[str, random.Random, int, bool], Awaitable[Outcome]]
"""Sends a request. Arguments: its name, a source of random ids for the prompt, the number of tokens of its answer, and
whether it is constrained."""


def tool(schema: str) -> dict[str, Any]:
    """Return a tool with an argument of a schema."""
    return {"type": "function", "function": {"name": "people", "parameters": {
        "type": "object", "additionalProperties": False, "required": ["people"],
        "properties": {"people": json.loads(endless_list(schema))}}}}


async def through_grpc(
    stub: Any, args: argparse.Namespace, name: str, chooser: random.Random, tokens: int, is_constrained: bool
) -> Outcome:
    prompt = [chooser.randrange(args.vocabulary) for _ in range(args.prompt)]
    request = vllm_request(name, prompt, tokens, temperature=1)
    if is_constrained:
        request.sampling_params.json_schema = endless_list(args.schema)
    return await recorded(partial(read_vllm, stub.Generate(request, timeout=SECONDS)))


async def through_smg(
    gate: Gateway, model: str, field: str, args: argparse.Namespace, name: str, chooser: random.Random, tokens: int,
    is_constrained: bool,
) -> Outcome:
    """Send a chat to smg. field: of the request, which constrains it."""
    fields: dict[str, Any] = {"temperature": 1}
    if field == "tool_choice":
        fields |= {"tools": [tool(args.schema)], "tool_choice": "required" if is_constrained else "none"}
    elif is_constrained:
        fields["response_format"] = {
            "type": "json_schema", "json_schema": {
                "name": "people", "schema": json.loads(endless_list(args.schema)), "strict": True}}
    body = completions.chat(model, TEXT.format(chooser.randrange(10**6)), tokens, **fields)
    return await completions.stream(gate.url, body, now, timeout=SECONDS, path=completions.CHAT)


async def measure(send: Send, share: int, round_name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one route with a share of constrained requests, in percent."""
    outcomes: list[tuple[Outcome, int]] = []
    spread = args.tokens * args.vary // 100
    chooser = random.Random(round_name)

    async def stream(place: int) -> None:
        for turn in range(args.requests):
            count = place * args.requests + turn
            is_constrained = (count + 1) * share // 100 > count * share // 100
            tokens = args.tokens + random.Random(count).randint(-spread, spread)
            name = f"bench-{os.getpid()}-{round_name}-{count}"
            outcomes.append((await send(name, chooser, tokens, is_constrained), tokens))

    began = now()
    await asyncio.gather(*(stream(place) for place in range(args.streams)))
    seconds = now() - began
    for outcome, tokens in outcomes:
        if not outcome.ok or outcome.generated_tokens != tokens:
            raise SystemExit(f"{round_name}: a stream ended with {outcome.code} after {outcome.generated_tokens} of "
                             f"{tokens} tokens: {outcome.detail}")
    return figures([outcome for outcome, _ in outcomes], seconds, {})


async def run(
    addresses: Mapping[str, str], gates: Mapping[str, Gateway], args: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Return the figures of each round by route and share, as "name 50 %".

    addresses: name -> host:port. gates: smg in front of the servers, by the same names.
    """
    from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

    async with contextlib.AsyncExitStack() as stack:
        routes: dict[str, Send] = {}
        for name, address in addresses.items():
            stub = VllmEngineStub(await stack.enter_async_context(open_aio_channel(address)))
            routes[name] = partial(through_grpc, stub, args)
            for field in args.smg:
                model = gates[name].get("/v1/models")["data"][0]["id"]
                routes[f"smg:{field}@{name}"] = partial(through_smg, gates[name], model, field, args)
        kinds = list(itertools.product(routes, args.shares))
        found: dict[str, list[dict[str, Any]]] = {f"{name} {share} %": [] for name, share in kinds}
        for place in range(args.rounds + 1):
            first = place % len(kinds)
            for name, share in [*kinds[first:], *kinds[:first]]:
                measured = await measure(routes[name], share, f"{name}-{share}-{place}", args)
                if place:  # the first round compiles the schema and does not count
                    found[f"{name} {share} %"].append(measured)
        return found


def summary(rounds: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the medians by route and share, and the ratios to share 0 where it was measured."""
    medians = {kind: {figure: round(statistics.median(f[figure] for f in found), 3) for figure in FIGURES}
               for kind, found in rounds.items()}
    ratios: dict[str, dict[str, list[float]]] = {}
    for kind, found in rounds.items():
        base = rounds.get(f"{kind.split()[0]} 0 %")
        if base is None or base is found:
            continue
        ratios[kind] = {}
        for figure in RATIOS:
            values = sorted(a[figure] / b[figure] for a, b in zip(found, base, strict=True))
            ratios[kind][figure] = [
                round(value, 3) for value in (statistics.median(values), values[0], values[-1])]
    return {"medians": medians, "ratios": ratios}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", nargs="?", default="", help="model to serve (default: the built-in model)")
    made.add_argument("--shares", type=number(int, 0, 100), nargs="+", default=[0, 50, 100], metavar="PERCENT",
                      help="shares of constrained requests (default: 0 50 100)")
    made.add_argument("--schema", choices=PROPERTIES, default="people", help="(default: %(default)s)")
    for name, value, low, text in (
        ("streams", 32, 1, "concurrent streams"), ("tokens", 128, 2, "tokens of each answer"),
        ("prompt", 32, 1, "tokens of each prompt"), ("requests", 2, 1, "requests of each stream in a measurement"),
        ("rounds", 3, 1, "rounds, of which medians are reported"),
        ("vocabulary", 2000, 1, "upper bound of the ids of prompts"),
    ):
        made.add_argument(f"--{name}", type=number(int, low), default=value, help=f"{text} (default: %(default)s)")
    made.add_argument("--vary", type=number(int, 0, 90), default=0, metavar="PERCENT",
                      help="largest difference of an answer's length from --tokens (default: %(default)s)")
    made.add_argument("--worker-urls", type=worker, nargs="+", default=[], metavar="grpc://HOST:PORT",
                      help="running servers of VllmEngine, measured in the same rounds")
    made.add_argument("--smg", choices=("response_format", "tool_choice"), nargs="+", default=[],
                      help="fields of chats through smg, measured in the same rounds")
    made.add_argument("--json", type=Path, metavar="FILE", help="write all figures, with those of each round")
    return made


def main() -> None:
    made = parser()
    args, flags = arguments(made)
    if args.smg and not find_program():
        made.error("--smg: smg is not installed: pip install smg")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(args.model, flags))
        addresses = {"npuserve": server.target, **{address: address for address in args.worker_urls}}
        gates = {}
        if args.smg:
            template = Path(stack.enter_context(tempfile.TemporaryDirectory()), "chat.jinja")
            template.write_text(CHAT_TEMPLATE)
            gates = {name: stack.enter_context(gateway([address], "--chat-template", str(template)))
                     for name, address in addresses.items()}
        rounds = asyncio.run(run(addresses, gates, args))
    options = {name: getattr(args, name) for name in ("schema", "streams", "tokens", "vary", "prompt", "requests")}
    report({**options, **summary(rounds), "rounds": rounds}, args.json)


if __name__ == "__main__":
    main()
