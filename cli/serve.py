"""`npuserve serve`: serve a model over gRPC."""

from __future__ import annotations

import argparse
import os

from npuserve.service import settings
from npuserve.service.supervisor.supervisor import serve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [settings]"
    settings.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return serve(settings.load(args, os.environ))
