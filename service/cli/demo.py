"""`npuserve demo`: the whole way once, on this machine: a server with the built-in model, a client, an answer."""

from __future__ import annotations

import argparse
import asyncio
import sys

from npuserve.service import logs
from npuserve.service.config import ServerConfig
from npuserve.service.supervisor.supervisor import Supervisor

PROMPT = "Once upon a time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", default=PROMPT, help="(default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="(default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """0 if the answer came and the server stopped cleanly."""
    config = logs.with_format(ServerConfig(port=0, metrics_port=0, log_level="warning"))
    logs.setup(config, "supervisor")
    return asyncio.run(demonstrate(Supervisor(config), args.prompt, args.max_tokens))


async def demonstrate(supervisor: Supervisor, prompt: str, max_tokens: int) -> int:
    """Starts the server, runs `npuserve generate` against it, and stops it."""
    print("Starting a server with the built-in model ...", file=sys.stderr)
    serving = asyncio.create_task(supervisor.run())
    up = asyncio.create_task(_up(supervisor))
    await asyncio.wait({serving, up}, return_when=asyncio.FIRST_COMPLETED)
    if not up.done():
        up.cancel()
        return await serving or 1
    print(f"Serving on {supervisor.address}. Asking: {prompt}\n", file=sys.stderr)
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "npuserve.service.cli", "generate", "--target", supervisor.address, "--wait", "30",
        "--stats", "--max-tokens", str(max_tokens), "--", prompt)
    answered = asyncio.create_task(client.wait())
    await asyncio.wait({serving, answered}, return_when=asyncio.FIRST_COMPLETED)
    if not answered.done():
        client.terminate()
    code = await answered
    if not serving.done():
        supervisor.stop()
    return await serving or code


async def _up(supervisor: Supervisor) -> None:
    await supervisor.listening.wait()
    await supervisor.ready.wait()
