"""What the commands' options have in common."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterable

SIMILAR = 0.75
"""Least ratio of difflib at which a name is suggested for another."""

_GRPC_NAME = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock|xds):\D")
"""Beginning of a target in gRPC's own syntax (https://github.com/grpc/grpc/blob/master/doc/naming.md)."""


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


def did_you_mean(name: str, names: Iterable[str], *, prefix: str = "", otherwise: str = "") -> str:
    """Return the end of a sentence that suggests the most similar of `names`; `otherwise` if none is similar.

    prefix: begins all names and is no part of `name` and `names`, so that it does not make them similar.
    """
    near = similar(name, names)
    return f"; did you mean {prefix}{near}?" if near else otherwise


def similar(name: str, names: Iterable[str]) -> str | None:
    """Return the most similar of `names`; None if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(names), 1, SIMILAR)), None)


def target(text: str) -> str:
    """Argparse type of a gRPC server's address: HOST:PORT, or a name in gRPC's own syntax."""
    if _GRPC_NAME.match(text) or split_target(text):
        return text
    raise argparse.ArgumentTypeError(f"must be HOST:PORT, such as 127.0.0.1:50051, got {text!r}")


def split_target(text: str) -> tuple[str, int] | None:
    """Return the host and the port of HOST:PORT, an IPv6 address being in brackets; None for any other text."""
    match = re.fullmatch(r"(?:\[([^\[\]/]+)\]|([^:\[\]/\s]+)):(\d{1,5})", text)
    if not match or not 0 < int(match[3]) < 1 << 16:
        return None
    return match[1] or match[2], int(match[3])
