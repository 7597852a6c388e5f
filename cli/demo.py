"""`npuserve demo`: start a server with the built-in model, stream one answer to a client process, stop.

With --openai the server also serves the OpenAI API, and runs until Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from functools import partial

from npuserve.service.config import ServerConfig
from npuserve.service.supervisor.openai_gateway import OpenAIGateway
from npuserve.service.supervisor.supervisor import Supervisor, serve

PROMPT = "Once upon a time"
OPENAI_PORT = 8000
INTERRUPTED = 130
"""Exit code of a server that Ctrl-C ends before it was ready. `npuserve generate` ends with the same code."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", default=PROMPT,
                        help="text to continue (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N",
                        help="maximum number of generated tokens (default: %(default)s)")
    parser.add_argument("--openai", type=int, nargs="?", const=OPENAI_PORT, default=0, metavar="PORT",
                        help="serve the OpenAI API too, on this port (default: %(const)s), until Ctrl-C; needs "
                             "pip install 'npuserve[gateway]'")


def run(args: argparse.Namespace) -> int:
    """Return 0 if the answer was received and the server stopped cleanly, 130 after Ctrl-C."""
    config = ServerConfig(port=0, metrics_port=0, log_level="warning", openai_port=args.openai)
    return serve(config, partial(demonstrate, prompt=args.prompt, max_tokens=args.max_tokens))


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
    if supervisor.openai and not code and not serving.done():
        await _show_openai(supervisor.openai, serving, prompt)
    if not serving.done():
        supervisor.drain(0.0)  # nothing after Ctrl-C, which has reached the server too
    return await serving or code


async def _show_openai(gateway: OpenAIGateway, serving: asyncio.Task[int], prompt: str) -> None:
    """Print a call of the OpenAI API once it is ready, and wait until the server ends."""
    ready = asyncio.create_task(gateway.ready.wait())
    await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    if serving.done():
        return
    body = json.dumps({"model": "storyteller", "prompt": prompt, "max_tokens": 32, "stream": True}, ensure_ascii=False)
    print(f"\nThe OpenAI API is at {gateway.url} until Ctrl-C:\n\n"
          f"    curl -N {gateway.url}/completions -H 'content-type: application/json' \\\n"
          f"        -d {shlex.quote(body)}\n", file=sys.stderr)
    await asyncio.wait({serving})
