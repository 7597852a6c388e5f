"""`EngineArgs`: flags of a script for the settings of its `LLM`, with vLLM's name."""

from __future__ import annotations

import argparse
from typing import TypeVar

from npuserve.service import settings

Parser = TypeVar("Parser", bound=argparse._ActionsContainer)


class EngineArgs:
    """Flags of `LLM`: `LLM(**vars(parser.parse_args()))`, without the script's own flags."""

    @staticmethod
    def add_cli_args(parser: Parser) -> Parser:
        """Add `--model` and a flag for every other setting that `LLM` accepts, and return the parser.

        parser: an argparse.ArgumentParser, or one of its groups. An absent flag adds nothing to the namespace.
        """
        parser.add_argument("--model", default=argparse.SUPPRESS, help="folder of a model, or its name on the hub")
        settings.add_arguments(parser, leave_out=("model", *settings.CHOSEN_BY_PRIVATE_SERVER))
        return parser
