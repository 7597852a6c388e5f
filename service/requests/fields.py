"""Checks of single fields. A bad field is added to `Violations` with its path in the message and its allowed range."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from npuserve.npu.profile import MAX_PROFILE_SECONDS, MAX_PROFILE_STEPS, NAME
from npuserve.service.errors import InvalidField, Violations, quoted
from npuserve.service.text.model_folder import Range

Number = TypeVar("Number", int, float)

MAX_JSON_DEPTH = 256
"""Nesting depth of objects and lists in a JSON text: a schema, a structural tag, a tool or a tool call."""
MAX_JSON_DIGITS = 4000
"""Digits of a whole number in a JSON text. Python converts at most 4300."""


def check_number(path: str, value: Number, allowed: Range, bad: Violations) -> Number:
    """Return the value; report it if it is outside the range."""
    if value not in allowed:
        text = str(value) if isinstance(value, int) else format(value, "g")
        if float(text) in allowed:  # it is so near the range that rounding has moved it inside
            text = format(value, ".9g")
        bad.add(path, f"must be in {allowed}, got {text}")
    return value


def check_token_ids(
    path: str, ids: Sequence[int], vocabulary_size: int, bad: Violations, max_ids: int | None = None
) -> frozenset[int]:
    """Return the set of ids; report each id outside the vocabulary.

    max_ids: number of ids that are allowed, None for any. If there are more, report that and return an empty set.
    """
    if max_ids is not None and len(ids) > max_ids:
        bad.add(path, f"must be at most {max_ids} ids, got {len(ids)}")
        return frozenset()
    for index, token in enumerate(ids):
        if token >= vocabulary_size:
            bad.add(f"{path}[{index}]", f"token id must be in [0, {vocabulary_size - 1}], got {token}")
    return frozenset(ids)


def check_profile_name(field: str, name: str) -> str:
    """Return the name of a profile. Raises InvalidField."""
    if not NAME.fullmatch(name):
        raise InvalidField(field, "must be up to 64 letters, digits, - and _, the first a letter or digit")
    return name


def check_profile_steps(field: str, steps: int) -> int:
    """Return the steps of a profile. Raises InvalidField."""
    if not 1 <= steps <= MAX_PROFILE_STEPS:
        raise InvalidField(field, f"must be in [1, {MAX_PROFILE_STEPS}], got {steps}")
    return steps


def check_profile_seconds(field: str, seconds: float) -> float:
    """Return the maximum duration of a profile. Raises InvalidField."""
    if not 0 < seconds <= MAX_PROFILE_SECONDS:
        raise InvalidField(field, f"must be in (0, {MAX_PROFILE_SECONDS:g}] seconds, got {seconds:.15g}")
    return seconds


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
