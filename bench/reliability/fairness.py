"""First token of one tenant's short requests while other tenants fill the server with long streams.

    python bench/reliability/fairness.py [MODEL] [--tenants 2] [--streams 64] [--prompt 16] [--output 400]
        [--context 0] [--seconds 12] [--rounds 3] [--before PYTHON] [--together] [--json FILE] [-- FLAGS]

All tenants but one run `--streams` streams each in a closed loop. The last one sends requests of 8 tokens one after the
other, with a pause of 0.2 s. It gives up after `--seconds`, which then counts as its time to first token. Each round
is a server of its own. With `--before`, the interpreter of another checkout's environment, each round measures that
checkout and this one, in an order that is reversed from round to round. The ratio of all tokens per second is printed
with its range, also of those per second of the engine's processor time, on which other programs have less influence.
With `--together` both servers run at the same time: other programs slow down both alike, and times to first token are
longer. A prompt counts when its first step is launched, so a round should be long compared with a prompt.

MODEL is a folder; the built-in model by default. `--context` is a new max_position_embeddings of a copy of it: its
answers mean nothing beyond its own context, and cost the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from npuserve.cli import main as cli
from npuserve.client.channel import auth_metadata
from npuserve.npu.storyteller import FOLDER
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc as rpc

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.serving.server import Serving, arguments, cpu_seconds, engine_of, report, serving

NEWCOMER_TOKENS = 8
PAUSE_SECONDS = 0.2
WARM_UP_SECONDS = 3.0
HERE = ("-m", "npuserve.cli")


@dataclass
class Window:
    """What clients measured in one round. Seconds, sorted.

    first_tokens: of the newcomer. gaps: between messages of the other tenants' streams. errors: calls that failed.
    """

    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    errors: int = 0


def request(prompt: int, tokens: int, vocabulary: int = 2000) -> pb.GenerateRequest:
    made = pb.GenerateRequest()
    made.token_ids.ids.extend(random.randrange(3, vocabulary) for _ in range(prompt))
    made.sampling.temperature = 0.0
    made.stopping.max_tokens = tokens
    made.stopping.ignore_eos = True
    return made


async def run_stream(stub: rpc.InferenceServiceAsyncStub, key: str, args: argparse.Namespace, window: Window) -> None:
    """Send long requests one after the other until cancelled."""
    while True:
        last = 0.0
        prompt = request(args.prompt, random.randint(args.output * 3 // 4, args.output))
        try:
            async for _ in stub.StreamGenerate(prompt, metadata=auth_metadata(key)):
                now = time.monotonic()
                if last:
                    window.gaps.append(now - last)
                last = now
        except grpc.RpcError:
            window.errors += 1
            await asyncio.sleep(0.1)


async def run_newcomer(stub: rpc.InferenceServiceAsyncStub, key: str, seconds: float, window: Window) -> None:
    """Send short requests one after the other for `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        first = 0.0
        try:
            async for _ in stub.StreamGenerate(
                    request(8, NEWCOMER_TOKENS), metadata=auth_metadata(key), timeout=seconds):
                first = first or time.monotonic() - began
        except grpc.RpcError:
            window.errors += 1
            first = first or seconds
        window.first_tokens.append(first)
        await asyncio.sleep(PAUSE_SECONDS)


async def measure(server: Serving, keys: list[str], args: argparse.Namespace) -> dict[str, Any]:
    window = Window()
    async with contextlib.AsyncExitStack() as stack:
        stubs = [rpc.InferenceServiceStub(await stack.enter_async_context(grpc.aio.insecure_channel(
            server.target, options=[("grpc.use_local_subchannel_pool", 1)]))) for _ in keys]
        streams = [asyncio.create_task(run_stream(stub, key, args, window))
                   for stub, key in zip(stubs[1:], keys[1:], strict=True) for _ in range(args.streams)]
        await asyncio.sleep(WARM_UP_SECONDS)
        window.gaps.clear()
        names = ("generation_tokens_total", "prompt_tokens_total", "preemptions_total")
        before = [server.metric(name) for name in names]
        engine = engine_of(server.pid)
        began, cpu_before = time.monotonic(), cpu_seconds(engine)
        await run_newcomer(stubs[0], keys[0], args.seconds, window)
        seconds, cpu = time.monotonic() - began, cpu_seconds(engine) - cpu_before
        generated, prompts, preemptions = (server.metric(name) - count
                                           for name, count in zip(names, before, strict=True))
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    window.first_tokens.sort()
    window.gaps.sort()
    return {
        "ttft_ms": [round(1000 * quantile(window.first_tokens, share)) for share in (0.5, 0.99)],
        "requests": len(window.first_tokens), "heavy_itl_ms_p99": round(1000 * quantile(window.gaps, 0.99), 1),
        "heavy_itl_ms_max": round(1000 * window.gaps[-1]), "generated_per_second": round(generated / seconds),
        "tokens_per_second": round((generated + prompts) / seconds), "preemptions": round(preemptions),
        "tokens_per_cpu_second": round((generated + prompts) / cpu), "errors": window.errors,
    }


async def measure_all(
    servers: dict[str, Serving], keys: list[str], args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Measure servers at the same time, by name."""
    return dict(zip(servers, await asyncio.gather(*(measure(server, keys, args) for server in servers.values())),
                    strict=True))


def quantile(ordered: list[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]


@contextlib.contextmanager
def prepared(args: argparse.Namespace) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the model's folder, the file of the keys, and the keys."""
    with tempfile.TemporaryDirectory(prefix="npuserve-tenants-") as folder:
        model = args.model
        if args.context:
            model = str(shutil.copytree(model, Path(folder, "model")))
            path = Path(model, "config.json")
            path.write_text(json.dumps(
                {**json.loads(path.read_text()), "max_position_embeddings": args.context}))
        file = str(Path(folder, "keys.toml"))
        keys: list[str] = []
        for number in range(args.tenants):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                cli.main(["keys", "add", file, f"tenant-{number}"])
            keys.append(out.getvalue().strip())
        yield model, file, keys


def main() -> int:
    parser = argparse.ArgumentParser(description="see the top of this file")
    parser.add_argument("model", nargs="?", default=str(FOLDER))
    parser.add_argument("--tenants", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--streams", type=int, default=64, help="of each other tenant (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of their prompts (default: %(default)s)")
    parser.add_argument("--output", type=int, default=400, help="tokens of their answers (default: %(default)s)")
    parser.add_argument("--context", type=int, default=0, help="of a copy of the model; 0: the model's own")
    parser.add_argument("--seconds", type=float, default=12, help="length of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--before", metavar="PYTHON", help="interpreter of another checkout to compare with")
    parser.add_argument("--together", action="store_true", help="run both checkouts at the same time")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args, flags = arguments(parser)
    if args.together and not args.before:
        parser.error("--together needs --before")
    programs = {"now": HERE}
    if args.before:
        replace = f"import os, sys; os.execv({args.before!r}, [{args.before!r}, *{HERE!r}, *sys.argv[1:]])"
        programs = {"before": ("-c", replace), "now": HERE}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in programs}
    with prepared(args) as (model, file, keys):
        for number in range(args.rounds):
            order = list(programs.items())[:: -1 if number % 2 else 1]
            for group in [order] if args.together else [[pair] for pair in order]:
                with contextlib.ExitStack() as stack:
                    servers = {name: stack.enter_context(serving(model, ["--api-keys", file, *flags], program))
                               for name, program in group}
                    measured = asyncio.run(measure_all(servers, keys, args))
                for name, figures_of_round in measured.items():
                    rounds[name].append(figures_of_round)
                    print(name, json.dumps(figures_of_round), file=sys.stderr, flush=True)
    figures: dict[str, Any] = {"rounds": rounds}
    if args.before:
        for unit in ("tokens_per_second", "tokens_per_cpu_second"):
            ratios = sorted(
                now[unit] / before[unit] for before, now in zip(rounds["before"], rounds["now"], strict=True))
            figures[f"ratio_of_{unit}"] = [round(ratio, 3) for ratio in (
                statistics.median(ratios), ratios[0], ratios[-1])]
    figures["ttft_ms_p50_p99"] = {name: [
        statistics.median(one["ttft_ms"][index] for one in of) for index in range(2)] for name, of in rounds.items()}
    report(figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
