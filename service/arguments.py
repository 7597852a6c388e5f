"""What the commands' options have in common."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def number(kind: type[int] | type[float], low: float, high: float = math.inf) -> Callable[[str], float]:
    """An argparse type: a number of [low, high]."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            allowed = f"at least {low}" if high == math.inf else f"in [{low}, {high}]"
            raise argparse.ArgumentTypeError(f"must be {allowed}, got {text!r}")
        return value

    return parse
