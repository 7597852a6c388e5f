"""Command line `npuserve COMMAND`.

Each command is a module with `add_arguments(parser)` and `run(args) -> exit code`. Only the requested command is
imported, so that the server starts fast.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from npuserve.npu.large_import import TorchError
from npuserve.service import settings
from npuserve.service.arguments import did_you_mean
from npuserve.service.config import ConfigError
from npuserve.service.equivalents import client_flag_for, setting_for
from npuserve.service.processes.process_control import is_hangup_ignored

# command: (module, help)
COMMANDS = {
    "demo": ("demo", "start a server with the built-in model, stream one answer, stop"),
    "serve": ("serve", "serve a model over gRPC"),
    "generate": ("generate", "send one prompt to a server and stream the answer"),
    "chat": ("chat", "hold a conversation with a served model"),
    "embed": ("embed", "print the embeddings of texts"),
    "rank": ("rank", "order documents by their relevance to a query"),
    "top": ("top", "show a server's load, latencies and slowest kernels"),
    "profile": ("profile", "record the kernels of a server's next steps as a trace"),
    "explain": ("explain", "say where the time of a request went"),
    "bench serve": ("bench.serve", "send load to a running server and report latencies and throughput"),
    "bench kernels": ("bench.kernels", "time each kernel and compare it with the machine's ceilings"),
    "bench step": ("bench.step", "time the engine's step without gRPC"),
    "keys": ("keys", "add, list and remove the API keys of a server"),
    "check": ("check", "report this machine's devices, and whether a model fits"),
    "collect": ("collect.command", "write an archive for a bug report, without prompts and keys"),
    "quantize": ("quantize", "write a checkpoint of a model in int8 or 4 bits"),
}

OTHER_NAMES = {
    "run": "serve", "start": "serve", "server": "serve", "api_server": "serve", "launch": "serve",
    "launch_server": "serve", "complete": "generate", "completions": "generate", "client": "generate",
    "prompt": "generate", "benchmark": "bench", "monitor": "top", "why": "explain", "convert": "quantize",
    "doctor": "check", "info": "check", "embeddings": "embed", "rerank": "rank", "score": "rank",
    "env": "collect", "collect-env": "collect", "version": "--version", "help": "--help",
}
"""Commands by names that other programs have for them."""

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Errors of an output that accepts no more data. EBADF means a closed stdout: see `_open_standard_streams`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for invalid usage, an invalid setting or an unusable torch, 130
    for Ctrl-C.

    SIGTERM exits with 143 after the command has cleaned up, and SIGHUP of a closed terminal with 129.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    _open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model can write characters that the terminal's encoding lacks
    try:
        try:
            with _exit_on_signals():
                return _run(argv)
        finally:
            sys.stdout.flush()
    except (ConfigError, TorchError) as error:
        print(f"npuserve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _discard_stdout()
        return 1
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        _discard_stdout()
        print(f"npuserve: cannot write the output: {error.strerror}", file=sys.stderr)
        return 1


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, and on SIGHUP unless nohup ignores it, so that a command ends its processes and
    removes unfinished files. A terminal may send SIGHUP twice; the second one interrupts nothing."""
    if threading.current_thread() is not threading.main_thread():  # signals have handlers there only
        yield
        return

    def leave(number: int, _: object) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        sys.exit(128 + number)

    numbers = (signal.SIGTERM,) if is_hangup_ignored() else (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _open_standard_streams() -> None:
    """Open /dev/null in place of closed standard streams, so that no other file gets their descriptors.

    Such a stdin is empty, and such a stderr is discarded. A write to such a stdout fails with EBADF, because it is open
    for reading.
    """
    for name, flag, mode in (("stdin", os.O_RDONLY, "r"), ("stdout", os.O_RDONLY, "w"), ("stderr", os.O_WRONLY, "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, flag)  # the lowest free descriptor
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: SIM115  open until exit


def _run(argv: Sequence[str]) -> int:
    for argument in argv:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"argument {ascii(os.fsencode(argument))[1:]} is not UTF-8") from None
    # gRPC logs to stderr. Servers log its errors; a client command prints the error itself.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR" if argv[:1] in (["serve"], ["demo"]) else "NONE")
    commands = _parser(argv)
    if argv and argv[0].startswith("-") and argv[0] not in commands._option_string_actions:
        commands.refuse(argv[:1])
    args, unknown = commands.parse_known_args(argv)
    parser: _Parser = vars(args).pop("parser")
    if unknown:
        parser.refuse(unknown)
    code: int = args.run(args)
    return code


def _discard_stdout() -> None:
    """Redirect stdout to /dev/null, so that the interpreter's flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


PHRASES = (
    (r"invalid int value: ", "must be a whole number, got "), (r"invalid float value: ", "must be a number, got "),
    (r"ignored explicit argument ", "takes no value, got "))
"""Phrases of argparse, and what they mean."""


class _Parser(argparse.ArgumentParser):
    """Parser that reports an error as one sentence, and prints its help without a command."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.set_defaults(run=self._help, parser=self)

    def error(self, message: str) -> NoReturn:
        for pattern, text in PHRASES:
            message = re.sub(pattern, text, message)
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit with an error for arguments that the command does not have, and what to write in their place."""
        flags = list(dict.fromkeys(word.partition("=")[0] for word in unknown if word.startswith("-")))
        hints = {flag: hint for flag in flags if (hint := self._hint(flag))}
        if len(flags) > 1:
            hints = {flag: f"; {flag}: {hint.removeprefix('; ')}" for flag, hint in hints.items()}
        hint = "".join(hints.values()) if flags else self._quote_hint()
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")

    def _hint(self, flag: str) -> str:
        """Return the end of a sentence: what to write in place of an unknown flag."""
        flags = [name[2:] for action in self._actions for name in action.option_strings]
        instead = None
        if "max-num-seqs" in flags:
            instead = setting_for(flag, settings.flag)
        elif "target" in flags:
            instead = client_flag_for(flag)
        if instead:
            return instead
        if flag in ("-v", "-V"):
            return "; did you mean --version?"
        otherwise = "; a command stands before its flags" if self._subparsers else ""
        return did_you_mean(flag[2:].replace("_", "-"), flags, prefix="--", otherwise=otherwise)

    def _quote_hint(self) -> str:
        """Return the end of a sentence: the positional argument that may have lost its quotes."""
        free = [action for action in self._get_positional_actions() if action.choices is None]
        return f"; {free[-1].metavar or free[-1].dest} is one argument: quote it if it has spaces" if free else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check the value as argparse does, and suggest the most similar choice."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            names = list(map(str, action.choices or ()))
            other = OTHER_NAMES.get(str(value)) if isinstance(action, argparse._SubParsersAction) else None
            error.message += f"; did you mean {other}?" if other else did_you_mean(str(value), names)
            raise

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write the message, but unlike argparse raise OSError if that fails."""
        (file or sys.stderr).write(message or "")

    def _help(self, _: argparse.Namespace) -> int:
        self.print_help()
        return 0


def _parser(argv: Sequence[str]) -> _Parser:
    parser = _Parser(
        prog="npuserve", description="Serves Qwen3-class language models over gRPC with streaming tokens.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND")
    benches = None
    for command, (module, text) in COMMANDS.items():
        group, _, name = command.rpartition(" ")
        if group and benches is None:
            benches = commands.add_parser(group, help="measure performance").add_subparsers(metavar="WHAT")
        within = benches if group and benches else commands
        child = within.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        if list(argv[: len(command.split())]) == command.split():
            loaded = importlib.import_module(f"npuserve.cli.{module}")
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
