"""`npuserve chat`: a conversation with a served model."""

from __future__ import annotations

import argparse
import contextlib
import sys

from npuserve.cli import connection
from npuserve.cli.generate import add_sampling_arguments, add_server_arguments, sampling_options
from npuserve.client import Client, ClientError
from npuserve.client.request_builder import Options

HELP = "/reset clears the conversation, /exit or Ctrl-D ends the chat, Ctrl-C stops an answer."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 after /exit or the end of input, 1 without a server or a chat template.

    Raise ConfigError for invalid arguments.
    """
    options = sampling_options(args)
    try:
        with connection.open_client(args) as client:
            info = client.model_info()
            if not info.has_chat_template:
                raise connection.ConnectionFailed(f"{info.name} has no chat template; use npuserve generate")
            interactive = sys.stdin.isatty()
            if interactive:
                print(f"{info.name} at {args.target}. {HELP}")
            converse(client, options, args, "> " if interactive else "")
    except (ClientError, connection.ConnectionFailed) as error:
        return connection.print_error(error, args)
    return 0


def converse(client: Client, options: Options, args: argparse.Namespace, prompt: str) -> None:
    """Read and answer messages until the user leaves. A failed message is reported and removed from the conversation.

    prompt: text before each input line; "" if the input is not a terminal.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  editing and history in input()
    start = [{"role": "system", "content": args.system}] if args.system is not None else []
    messages = list(start)
    while True:
        try:
            line = _read_line(prompt).strip()
        except EOFError:
            if prompt:
                print()
            return
        except UnicodeError:
            print("npuserve: the line is not UTF-8", file=sys.stderr)
            continue
        except KeyboardInterrupt:
            print()
            continue
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(start)
            print("(cleared)")
        elif line == "/help":
            print(HELP)
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                answer = _answer(client, asked, options, args.timeout)
            except ClientError as error:
                connection.print_error(error, args)
                continue
            messages = [*asked, {"role": "assistant", "content": answer}]


def _read_line(prompt: str) -> str:
    """Return an input line. Raise UnicodeError for bytes that are not UTF-8."""
    line = input(prompt)
    line.encode()  # input() can return such bytes as lone surrogates
    return line


def _answer(client: Client, messages: list[dict[str, str]], options: Options, timeout: float | None) -> str:
    """Print the answer while it arrives, and return it. Ctrl-C ends it early."""
    text = ""
    stream = client.stream(messages, timeout=timeout, **options)
    try:
        for message in stream:
            text += message.text
            print(message.text, end="", flush=True)
    except KeyboardInterrupt:
        print(" (stopped)", end="")
    finally:
        stream.cancel()
        print(flush=True)
    return text
