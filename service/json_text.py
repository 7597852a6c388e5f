"""JSON texts in fields of requests: schemas, structural tags, tools and tool calls."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from npuserve.service.errors import InvalidField, quoted

MAX_JSON_DEPTH = 256
"""Nesting depth of objects and lists in a JSON text: a schema, a structural tag, a tool or a tool call."""
MAX_JSON_DIGITS = 4000
"""Digits of a whole number in a JSON text. Python converts at most 4300."""


def parse_json(text: str, field: str, types: tuple[type, ...] = (dict,), name: str = "a JSON object") -> Any:
    """Return the plain values of a JSON text, with the keys of objects in their order.

    types, name: what the text must be, and its name for the error.

    Raises InvalidField, naming `field`, for a text that is not JSON or of another type, that is nested too deeply, that
    escapes a lone surrogate, or that has a number too large for a float.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    def parse_float(number: str) -> float:
        value = float(number)
        if math.isinf(value):
            raise ValueError(f"{quoted(number)} is too large")
        return value

    def parse_int(number: str) -> int:
        if len(number) > MAX_JSON_DIGITS:
            raise ValueError(f"{quoted(number)} has more than {MAX_JSON_DIGITS} digits")
        return int(number)

    unescaped = ""
    try:
        value = json.loads(text, parse_constant=refuse, parse_float=parse_float, parse_int=parse_int)
        _check_depth(value, field)
        if "\\u" in text:
            unescaped = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise InvalidField(field, f"must be the text of {name}: {error}") from error
    check_unicode(unescaped, field)
    if not isinstance(value, types):
        raise InvalidField(field, f"must be the text of {name}, got {type(value).__name__}")
    return value


def _check_depth(value: Any, field: str) -> None:
    """Raise InvalidField for a value that is nested too deeply."""
    depth = 0
    level = _containers([value])
    while level:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise InvalidField(field, f"must be nested at most {MAX_JSON_DEPTH} deep")
        level = _containers(item for inner in level for item in (inner.values() if isinstance(inner, dict) else inner))


def _containers(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, (dict, list))]


def check_unicode(text: str, field: str) -> None:
    """Raise InvalidField for a text with a lone surrogate: JSON can escape one, but UTF-8 cannot encode it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        raise InvalidField(field, f"must be valid Unicode, got the lone surrogate {code}") from None
