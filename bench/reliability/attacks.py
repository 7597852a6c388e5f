"""Memory of the front end, and latency of a well-behaved client, during attacks with large messages or headers, and
with connections that send nothing.

    python bench/reliability/attacks.py [--connections 32] [--seconds 5] [--mib 1] [--attacks A,B] [--keys on|off|both]
        [--json FILE] [-- FLAGS]

The model is the built-in one with a chat template and a context of CONTEXT tokens. Each attack runs against a server of
its own, with and without API keys. With keys, the attacks in NO_KEY send none, and the others send the key of another
tenant. Each hostile connection sends one call after the other. Meanwhile a client in a process of its own generates 4
tokens, fifty times a second. Reported are the growth of the front end's peak resident memory in MiB, the client's
seconds per call, and the statuses of the hostile calls. Exit code 1 if the memory grows by GROWTH_MIB or more, in
the attack "held" by HELD_GROWTH_MIB, if the client's p99 reaches STALL_SECONDS, or if one of its calls fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc.aio

from npuserve.npu import storyteller
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import inference_service_pb2_grpc

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from bench.reliability.hostile import CompressedCalls, hold_idle, send_headers
from bench.serving.server import Serving, arguments, report, serving

GROWTH_MIB = 64
STALL_SECONDS = 0.1
PROBE_SECONDS = 0.02
HELD = "held"
"""Attack with messages of HELD_BYTES, near the channel's limit, whose last byte never arrives. Each connection sends a
small message before."""
HELD_BYTES = 3 << 20
HELD_GROWTH_MIB = 100
"""Incomplete messages may take 48 MiB (service/requests/reader.py). Over loopback up to 20 MiB more arrive until the
reads above the limit have ended, and the allocator keeps a part of what these have freed."""
SETTLE_SECONDS = 1.0
CONTEXT = 8192
TEMPLATE = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")
ATTACKS = ("compressed", "messages", "tokenize", "tokenize-plain", "detokenize", "detokenize-plain", "chat")
RAW_ATTACKS = ("headers", "long-headers", "endless-headers", "idle")
"""Attacks on HTTP/2 and connections, which send no message."""
NO_KEY = ("compressed", "messages", *RAW_ATTACKS)
IDLE_CONNECTIONS = 1500


def field(number: int, payload: bytes) -> bytes:
    """Return a length-delimited protobuf field."""
    size, length = len(payload), b""
    while size > 0x7F:
        size, length = size >> 7, length + bytes([size & 0x7F | 0x80])
    return bytes([number << 3 | 2]) + length + bytes([size]) + payload


def attack(name: str, mib: float) -> tuple[str, bytes, bool]:
    """Return the method, the message, and whether it is sent with gzip. mib: size of a message without gzip."""
    size = int(mib * (1 << 20))
    turn = field(1, field(1, b"user") + field(2, b"a b c"))
    return {
        "compressed": lambda: ("Generate", field(5, b"\x0a\x00" * ((32 << 20) - 64)), True),
        "messages": lambda: ("Generate", field(5, b"\x0a\x00" * (size // 2)), False),
        "tokenize": lambda: ("Tokenize", field(2, b"a b " * (500 << 10)), True),
        "tokenize-plain": lambda: ("Tokenize", field(2, b"a b " * (size // 4)), False),
        "detokenize": lambda: ("Detokenize", field(2, bytes(30_000_000)), True),
        "detokenize-plain": lambda: ("Detokenize", field(2, bytes(size)), False),
        "chat": lambda: ("Tokenize", field(3, turn * 9999), False),
        HELD: lambda: ("Tokenize", b"", False),
    }[name]()


async def hostile(target: str, key: str, method: str, data: bytes, gzipped: bool, until: float) -> Counter[str]:
    """Send the call again and again on a connection of its own; return its statuses."""
    ends: Counter[str] = Counter()
    path = f"/npuserve.v1.InferenceService/{method}"
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    if gzipped:
        calls = CompressedCalls(target, path, data, metadata)
        try:
            await calls.open()
            while time.monotonic() < until:
                ends[await calls.call()] += 1
            calls.close()
        except (asyncio.IncompleteReadError, ConnectionError):
            ends["CLOSED"] += 1
        return ends
    if not data:
        return await hold(target, path, metadata, until)
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        call = channel.unary_unary(path)
        while time.monotonic() < until:
            try:
                await call(data, metadata=metadata, timeout=60)
                ends["OK"] += 1
            except grpc.aio.AioRpcError as error:
                ends[error.code().name] += 1
    return ends


async def hold(target: str, path: str, metadata: tuple[tuple[str, str], ...], until: float) -> Counter[str]:
    """Send messages that are never whole, on a connection of its own; return their statuses."""
    ends: Counter[str] = Counter()
    calls = CompressedCalls(target, path, b"", metadata)
    await calls.open()
    await calls.call()
    calls.hold(bytes(HELD_BYTES))
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.TimeoutError):
        while time.monotonic() < until:
            ends[await asyncio.wait_for(calls.call(), until - time.monotonic())] += 1
    calls.close()
    return ends


def raw_attack(name: str, target: str, until: float) -> Coroutine[None, None, Counter[str]]:
    """Return the attack of one of RAW_ATTACKS on one connection after the other."""
    return {
        "headers": lambda: send_headers(target, until),
        "long-headers": lambda: send_headers(target, until, calls=4, references=480_000),
        "endless-headers": lambda: send_headers(target, until, references=480_000, is_endless=True),
        "idle": lambda: hold_idle(target, until),
    }[name]()


def attackers(target: str, key: str, name: str, args: argparse.Namespace, pipe: Connection) -> None:
    """Run the hostile connections in this process, and send their statuses through `pipe`."""
    os.nice(10)
    method, data, gzipped = ("", b"", False) if name in RAW_ATTACKS else attack(name, args.mib)
    data = gzip.compress(data) if gzipped else data
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * IDLE_CONNECTIONS), hard))

    async def run() -> Counter[str]:
        until = time.monotonic() + args.seconds
        if name in RAW_ATTACKS:
            connections = IDLE_CONNECTIONS if name == "idle" else args.connections
            raw = (raw_attack(name, target, until) for _ in range(connections))
            return sum(await asyncio.gather(*raw), Counter[str]())
        calls = (hostile(target, key, method, data, gzipped, until) for _ in range(args.connections))
        return sum(await asyncio.gather(*calls), Counter[str]())

    pipe.send("made")
    pipe.recv()
    pipe.send((len(data), asyncio.run(run())))


async def probe(
    target: str, key: str, done: asyncio.Event, reconnects: bool = False
) -> tuple[list[float], Counter[str]]:
    """Generate a few tokens regularly until `done`; return the seconds of each call, ascending, and the statuses.

    reconnects: each call has a connection of its own.
    """
    taken, ends = [], Counter[str]()
    ask = pb.GenerateRequest(text="Once upon")
    ask.stopping.max_tokens = 4
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with contextlib.AsyncExitStack() as stack:
        shared = await stack.enter_async_context(grpc.aio.insecure_channel(target, options))
        while not done.is_set():
            began = time.monotonic()
            channel = grpc.aio.insecure_channel(target, options) if reconnects else shared
            try:
                stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
                await stub.Generate(ask, metadata=metadata, timeout=120)
                ends["OK"] += 1
            except grpc.aio.AioRpcError as error:
                ends[error.code().name] += 1
            taken.append(time.monotonic() - began)
            if reconnects:
                await channel.close()
            await asyncio.sleep(PROBE_SECONDS)
    return sorted(taken), ends


def peak_mib(pid: int, kind: str) -> float:
    """Return VmHWM or VmRSS of a process in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(kind))


def measure(server: Serving, name: str, hostile_key: str, key: str, args: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=attackers, args=(server.target, hostile_key, name, args, other))
    process.start()
    pipe.recv()
    pid = server.processes["frontend 0"]

    async def run() -> tuple[list[float], Counter[str], tuple[int, Counter[str]]]:
        warm = asyncio.Event()
        asyncio.get_running_loop().call_later(SETTLE_SECONDS, warm.set)
        await probe(server.target, key, warm)
        nonlocal before
        before = peak_mib(pid, "VmRSS")
        await asyncio.to_thread(Path(f"/proc/{pid}/clear_refs").write_text, "5")  # resets VmHWM
        done = asyncio.Event()
        probing = asyncio.ensure_future(probe(server.target, key, done, reconnects=name == "idle"))
        pipe.send("go")
        ended: tuple[int, Counter[str]] = await asyncio.to_thread(pipe.recv)
        done.set()
        return (*await probing, ended)

    before = 0.0
    taken, ends, (size, statuses) = asyncio.run(run())
    process.join()
    return {
        "attack": name, "keys": bool(key), "wire_bytes": size, "growth_mib": round(peak_mib(pid, "VmHWM") - before, 1),
        "client_ms": {f"p{p}": round(1000 * taken[int(p / 100 * (len(taken) - 1))], 1) for p in (50, 99, 100)},
        "client": dict(ends), "hostile": dict(statuses),
    }


@contextlib.contextmanager
def prepared() -> Iterator[tuple[Path, Path, tuple[str, str]]]:
    """Yield the model's folder, the file of API keys, and the keys of the hostile tenant and of the client."""
    with tempfile.TemporaryDirectory(prefix="npuserve-bench-") as name:
        folder = Path(shutil.copytree(storyteller.FOLDER, Path(name, "model")))
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
        file = Path(name, "keys")
        made = []
        for tenant in ("hostile", "client"):
            command = [sys.executable, "-m", "npuserve.cli", "keys", "add", str(file), tenant]
            made.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        yield folder, file, (made[0], made[1])


def main() -> int:
    parser = argparse.ArgumentParser(description="see the top of this file")
    parser.add_argument("--connections", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5, help="length of an attack (default: %(default)s)")
    parser.add_argument("--mib", type=float, default=1, help="size of a message without gzip (default: %(default)s)")
    parser.add_argument("--keys", choices=("on", "off", "both"), default="both")
    parser.add_argument("--attacks", default=",".join((*ATTACKS, HELD, *RAW_ATTACKS)), help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args, flags = arguments(parser)
    rounds = []
    with prepared() as (folder, file, (hostile_key, key)):
        for name in args.attacks.split(","):
            for keyed in (False, True):
                if args.keys not in ("both", "on" if keyed else "off"):
                    continue
                settings = ["--api-keys", str(file)] if keyed else []
                with serving(str(folder), [*settings, *flags]) as server:
                    used = hostile_key if keyed and name not in NO_KEY else ""
                    rounds.append(measure(server, name, used, key if keyed else "", args))
                print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
    wrong = [f"{found['attack']}, keys {found['keys']}: {what}" for found in rounds for what, missed in (
        (f"{found['growth_mib']} MiB",
         found["growth_mib"] >= (HELD_GROWTH_MIB if found["attack"] == HELD else GROWTH_MIB)),
        (f"p99 {found['client_ms']['p99']} ms", found["client_ms"]["p99"] >= 1000 * STALL_SECONDS),
        (f"the client had {found['client']}", set(found["client"]) != {"OK"})) if missed]
    report({"attacks": rounds, "wrong": wrong}, args.json)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
