"""Checks of single fields. A bad field is added to `Violations` with its path in the message and its allowed range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from npuserve.npu.profile import MAX_PROFILE_SECONDS, MAX_PROFILE_STEPS, NAME
from npuserve.service.errors import InvalidField, Violations
from npuserve.service.text.model_folder import Range

Number = TypeVar("Number", int, float)


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
