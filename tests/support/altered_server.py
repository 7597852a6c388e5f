"""Parts of programs that are `npuserve serve` with processes which a test alters."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import NoReturn

from npuserve.service import logs, settings
from npuserve.service.config import ServerConfig


def load_config(arguments: list[str]) -> ServerConfig:
    """Return the settings of the arguments of `npuserve serve` and of the environment, and set up the logs."""
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    config = settings.load(parser.parse_args(arguments), os.environ)
    logs.setup(config, "supervisor")
    return config


def exit_as_engine(code: int) -> NoReturn:
    """End the process as the engine process ends."""
    sys.stdout.flush()
    logging.shutdown()
    os._exit(code)
