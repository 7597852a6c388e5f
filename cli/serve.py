"""`npuserve serve`: serve a model over gRPC."""

from __future__ import annotations

import argparse
import os

from npuserve.service import settings
from npuserve.service.supervisor.supervisor import serve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [settings]"
    parser.add_argument("--private", action="store_true",
                        help="serve one program: on a free port of 127.0.0.1, with a random key, both as a JSON line "
                             "on stdout, until the end of stdin")
    settings.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    is_private = vars(args).pop("private")
    config = settings.load(args, os.environ, is_private=is_private)
    if is_private:
        from npuserve.cli.private_server import serve_privately

        return serve_privately(config)
    return serve(config)
