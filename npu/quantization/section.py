"""Checks of the values in the quantization section of a config.json. Each raises ValueError with the key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def mapping(data: Any, where: str) -> dict[str, Any]:
    """Return an object of the section."""
    if not isinstance(data, dict):
        raise ValueError(f"{where}: must be an object, got {data!r}")
    return data


def patterns(data: Any, where: str) -> tuple[str, ...]:
    """Return a list of targets of `Quantization`."""
    if not isinstance(data, list) or not all(isinstance(entry, str) for entry in data):
        raise ValueError(f"{where}: must be a list of names, got {data!r}")
    for entry in data:
        if entry.startswith("re:"):
            try:
                re.compile(entry[3:])
            except re.error as error:
                raise ValueError(f"{where}: {entry!r} is not a regular expression: {error}") from None
    return tuple(data)


def refuse_others(data: Mapping[str, Any], where: str, known: set[str]) -> None:
    """Raise ValueError for an unknown key whose value is neither None, False nor empty."""
    unknown = sorted(str(key) for key, value in data.items() if key not in known and value not in (None, {}, [], False))
    if unknown:
        raise ValueError(f"{where}: {', '.join(unknown)} is not supported; supported: {', '.join(sorted(known))}")


def one_of(data: Mapping[str, Any], where: str, key: str, *supported: Any) -> None:
    """Raise ValueError unless the value of `key` (None if absent) is one of `supported`."""
    value = data.get(key)
    if not any(type(value) is type(each) and value == each for each in supported):
        kinds = ", ".join(str(each) for each in supported)
        raise ValueError(f"{where}: {key}: {value!r} is not supported; supported: {kinds}")
