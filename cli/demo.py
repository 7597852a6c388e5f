"""`npuserve demo`: start a server with the built-in model, stream one answer to a client process, stop."""

from __future__ import annotations

import argparse
import asyncio
import sys

from npuserve.service import logs
from npuserve.service.config import ServerConfig
from npuserve.service.supervisor.supervisor import Supervisor

PROMPT = "Once upon a time"
INTERRUPTED = 130
"""Exit code of a server that Ctrl-C ends before it was ready. `npuserve generate` ends with the same code."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", default=PROMPT,
                        help="text to continue (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N",
                        help="maximum number of generated tokens (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Return 0 if the answer was received and the server stopped cleanly, 130 after Ctrl-C."""
    config = logs.with_format(ServerConfig(port=0, metrics_port=0, log_level="warning"))
    logs.setup(config, "supervisor")
    return asyncio.run(demonstrate(Supervisor(config), args.prompt, args.max_tokens))


async def demonstrate(supervisor: Supervisor, prompt: str, max_tokens: int) -> int:
    """Start the server, run `npuserve generate` against it, and stop it. Return the exit code.

    The client is a process, because the supervisor's process does not load gRPC.
    """
    print("Starting a server with the built-in model ...", file=sys.stderr)
    serving = asyncio.create_task(supervisor.run())
    ready = asyncio.create_task(supervisor.ready.wait())
    await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
    if not ready.done():
        ready.cancel()
        return await serving or INTERRUPTED
    print(f"Serving on {supervisor.address}. Prompt: {prompt}\n", file=sys.stderr)
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "npuserve.cli", "generate", "--target", supervisor.address, "--wait", "30",
        "--stats", "--max-tokens", str(max_tokens), "--", prompt)
    answered = asyncio.create_task(client.wait())
    await asyncio.wait({serving, answered}, return_when=asyncio.FIRST_COMPLETED)
    if not answered.done():
        client.terminate()
    code = await answered
    if not serving.done():
        supervisor.drain(0.0)  # nothing after Ctrl-C, which has reached the server too
    return await serving or code
