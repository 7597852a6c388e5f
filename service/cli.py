"""The command line: `npuserve COMMAND`.

Each command is a module with `add_arguments(parser)` and `run(args) -> exit code`; only the one that is asked for is
imported, so that the server is up early.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from npuserve.service.config import ConfigError

# command: (module, help)
COMMANDS = {
    "demo": ("demo", "start with the built-in model, send it a prompt, stream the answer, stop"),
    "serve": ("supervisor", "serve a model over gRPC"),
    "generate": ("generate", "send one prompt to a server and stream the answer"),
    "chat": ("chat", "talk with a served model"),
    "top": ("top", "watch a server's load, latencies and slowest kernels"),
    "bench serve": ("bench_serve", "load a running server and report latencies and throughput"),
    "bench kernels": ("bench_kernels", "time each kernel beside what the machine can do at most"),
    "bench step": ("bench_step", "time the engine's step without the wire"),
    "keys": ("keys", "make, list and remove the API keys of a server"),
    "check": ("check", "what this machine offers, and whether a model fits"),
    "quantize": ("quantize", "make a W8A8 checkpoint of a model"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; 2 for a wrong setting, 130 for Ctrl-C."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        args = _parser(argv).parse_args(argv)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        print(f"npuserve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output left; the interpreter's own flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="npuserve", description="Serves Qwen3-class language models over gRPC with streaming tokens.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and leave")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    benches = None
    for command, (module, text) in COMMANDS.items():
        group, _, name = command.rpartition(" ")
        if group and benches is None:
            benches = commands.add_parser(group, help="measure").add_subparsers(metavar="WHAT", required=True)
        within = benches if group and benches else commands
        child = within.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        if list(argv[: len(command.split())]) == command.split():
            loaded = importlib.import_module(f"npuserve.service.{module}")
            loaded.add_arguments(child)
            child.set_defaults(run=loaded.run)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"npuserve {version('npuserve')}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
