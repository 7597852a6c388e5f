"""Argument types and name suggestions that the commands share."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterable

SIMILAR = 0.75
"""Minimum difflib ratio for a name to be suggested."""

_GRPC_NAME = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock|xds):\D")
"""Prefix of a target in gRPC's name syntax (https://github.com/grpc/grpc/blob/master/doc/naming.md)."""


def number(kind: type[int] | type[float], low: float, high: float = math.inf) -> Callable[[str], float]:
    """Return an argparse type that accepts a number in [low, high]."""

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


def did_you_mean(name: str, names: Iterable[str], *, prefix: str = "", otherwise: str = "") -> str:
    """Return the end of a sentence that suggests the most similar of `names`; `otherwise` if none is similar.

    prefix: common prefix of all names, absent from `name` and `names`. It is left out of the comparison.
    """
    near = similar(name, names)
    return f"; did you mean {prefix}{near}?" if near else otherwise


def similar(name: str, names: Iterable[str]) -> str | None:
    """Return the most similar of `names`; None if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(names), 1, SIMILAR)), None)


def target(text: str) -> str:
    """Check the address of a gRPC server, HOST:PORT or a name in gRPC's syntax, and return it. An argparse type."""
    if _GRPC_NAME.match(text) or split_host_port(text):
        return text
    raise argparse.ArgumentTypeError(f"must be HOST:PORT, such as 127.0.0.1:50051, got {text!r}")


def split_host_port(text: str) -> tuple[str, int] | None:
    """Split HOST:PORT into host and port; None for any other text. An IPv6 address must be in brackets."""
    match = re.fullmatch(r"(?:\[([^\[\]/]+)\]|([^:\[\]/\s]+)):(\d{1,5})", text)
    if not match or not 0 < int(match[3]) < 1 << 16:
        return None
    return match[1] or match[2], int(match[3])
