"""Values of a config.json, checked. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class ModelError(ValueError):
    """The model cannot be served with these settings; the message says what is wrong and what is supported."""


def whole(data: Mapping[str, Any], key: str, *defaults: int | None) -> int:
    """Return an integer >= 1. An absent key takes the first of `defaults` that is not None, a null the last of them."""
    value = data.get(key)
    if value is None and defaults:
        value = defaults[-1] if key in data else next((d for d in defaults if d is not None), None)
    if value is None:
        raise ModelError(f"config.json: {key}: is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key}: must be a whole number of at least 1, got {value!r}")
    return value


def number(data: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a number > 0; the default if the key is absent or null."""
    value = data.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json: {key}: is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"config.json: {key}: must be a number above 0, got {value!r}")
    return float(value)


def flag(data: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return a boolean; the default if the key is absent or null."""
    value = data.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {key}: must be true or false, got {value!r}")
    return value
