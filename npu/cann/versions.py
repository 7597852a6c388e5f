"""Versions of torch_npu, torch and CANN that fit together, and how well each pair is proved."""

from __future__ import annotations

import re
from typing import NamedTuple


class Pair(NamedTuple):
    """Version of torch_npu with what it needs.

    torch: its only torch, since torch_npu uses internals of torch.
    cann: oldest and newest version of CANN's toolkit.
    proof: how this project has checked its use of the version.
    """

    torch: str
    cann: tuple[str, str]
    proof: str


PAIRS: dict[str, Pair] = {
    "2.10.0.post4": Pair("2.10.0", ("9.1", "9.1"), "the tests run on it, on the emulator"),
    "2.13.0": Pair("2.13.0", ("8.5", "9.2"), "the tests run on it, on the emulator"),
}
"""The first is the default of the extra `npu` and of the image.

Sources: release notes of TorchNPU (gitcode.com/Ascend/pytorch); for 2.10.0.post4 with CANN 9.1.0 the versions that
vllm-ascend pins."""


TORCH = "2.10", "2.14"
"""Oldest version of torch that npuserve accepts, and the first later one that it refuses, as in pyproject.toml."""


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, as (9, 1, 0) of 9.1.0 and (25, 0) of 25.0.rc1."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def is_before(version: str, other: str) -> bool:
    """Return True if `version` is older than `other`. A release candidate is older than its release."""
    ours = numbers(version)
    theirs = numbers(other)
    width = max(len(ours), len(theirs))
    ours, theirs = (part + (0,) * (width - len(part)) for part in (ours, theirs))
    is_candidate = re.search(r"rc|beta|alpha", version, re.IGNORECASE) is not None
    return ours < theirs or (ours == theirs and is_candidate)


def is_accepted(torch: str) -> bool:
    """Return True if npuserve accepts a version of torch."""
    return not is_before(torch, TORCH[0]) and numbers(torch) < numbers(TORCH[1])


def pair_of(torch_npu: str) -> Pair | None:
    """Return the pair of a version of torch_npu, by major and minor version; None for an unknown one."""
    pairs = (pair for name, pair in PAIRS.items() if numbers(name)[:2] == numbers(torch_npu)[:2])
    return next(pairs, None)


def fits_cann(pair: Pair, cann: str) -> bool:
    """Return True if a toolkit's version is in the pair's range, compared by major and minor version."""
    low, high = (numbers(bound)[:2] for bound in pair.cann)
    return low <= numbers(cann)[:2] <= high
