"""`npuserve embed TEXT…`: print the embeddings of texts."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor

from npuserve.cli import connection
from npuserve.cli.generate import add_server_arguments
from npuserve.client import Client, ClientError
from npuserve.client.request_builder import EmbedOptions
from npuserve.service.arguments import number
from npuserve.service.config import ConfigError

MAX_CONCURRENT = 32
MAX_DIMENSIONS = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="texts to embed; - reads one from each line of stdin")
    parser.add_argument("--prompt-name", metavar="NAME", help="prompt of the model that precedes each text, as query")
    parser.add_argument("--dimensions", type=number(int, 1, MAX_DIMENSIONS), metavar="N",
                        help="number of values, normalized after the cut (default: all)")
    parser.add_argument("--truncate", action="store_true", help="cut a text that is longer than the context")
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print one JSON array a text. Return 0, or 1 after an error, which is printed."""
    texts = read_texts(args.texts)
    options = EmbedOptions()
    if args.prompt_name is not None:
        options["prompt_name"] = args.prompt_name
    if args.dimensions is not None:
        options["dimensions"] = args.dimensions
    if args.truncate:
        options["truncate"] = True
    try:
        with connection.open_client(args) as client, ThreadPoolExecutor(min(MAX_CONCURRENT, len(texts))) as threads:
            for line in threads.map(lambda text: _embedding(client, text, args.timeout, options), texts):
                print(line, flush=True)
    except (ClientError, connection.ConnectionFailed) as error:
        return connection.print_error(error, args)
    return 0


def _embedding(client: Client, text: str, timeout: float | None, options: EmbedOptions) -> str:
    return json.dumps([round(value, 8) for value in client.embed(text, timeout, **options).values])


def read_texts(texts: list[str]) -> list[str]:
    """Return the texts, and the lines of stdin in place of "-". Raise ConfigError if they are not UTF-8."""
    if texts != ["-"]:
        return texts
    try:
        lines = sys.stdin.buffer.read().decode().splitlines()
    except UnicodeDecodeError:
        raise ConfigError("stdin: is not UTF-8") from None
    if not lines:
        raise ConfigError("stdin: is empty")
    return lines
