"""Selection of tests: by default a choice in two minutes, with `pytest --slow` one for every change, with `--full` all.

Of a test function with two or more parameters a choice of the cases runs: every value of each parameter occurs in one
of them. Of tests of kernels, whose code differs with each pair, every pair of values of two parameters does with
`--slow`, since most defects need at most two values at once (Kuhn, Wallace and Gallo 2004). Tests marked `slow` need
`--slow` or `--full`, those marked `full` need `--full`: further variants of what a test for every change shows, and
tests of what changes rarely. A test named by `::` on the command line runs all its cases. `.ci/run` runs tests with
`--slow`, and every night with `--full`.

Tests of whole servers (tests/e2e) take most of the time. Without `--slow` only the smoke test of that folder runs,
unless the command line names the folder, or something in it. Of the tests that are skipped for the same reason, such as
a program that is not installed, one is left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

Values = tuple[tuple[str, int], ...]
"""Names of one or two parameters, each with the id of its value."""

WHOLE_SERVERS = Path(__file__).parent / "e2e"
SMOKE_TEST = WHOLE_SERVERS / "test_smoke.py"
KERNELS = Path(__file__).parent / "kernels"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests marked slow, too")
    parser.addoption("--full", action="store_true", help="run every combination of parameters, and tests marked full")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the tests of whole servers but the smoke test, unless they are asked for."""
    if config.getoption("--slow") or config.getoption("--full"):
        return None
    if WHOLE_SERVERS not in collection_path.parents or collection_path == SMOKE_TEST:
        return None
    named = (config.invocation_params.dir / argument.partition("::")[0] for argument in config.args)
    return None if any(path.is_relative_to(WHOLE_SERVERS) for path in named) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests and cases that only the full run has."""
    if config.getoption("--full"):
        return
    left_out = ("full",) if config.getoption("--slow") else ("full", "slow")
    named = {argument.rpartition("::")[2] for argument in config.args if "::" in argument}
    groups: defaultdict[tuple[Any, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[item.parent, _function(item)].append(item)
    chosen: set[pytest.Item] = set()
    for (_, function), group in groups.items():
        if function not in named:
            cases = [item for item in group if not any(map(item.get_closest_marker, left_out))]
            pairs = config.getoption("--slow") and KERNELS in group[0].path.parents
            chosen.update(covering(cases, 2 if pairs else 1))
    if not config.getoption("--slow"):
        chosen -= set(repeated_skips(item for item in items if item in chosen))
    chosen.update(item for item in items if item.name in named or _function(item) in named)
    if left := [item for item in items if item not in chosen]:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item in chosen]


def covering(items: list[pytest.Item], size: int) -> list[pytest.Item]:
    """Return a subset of one test's cases, in their order, that contains every value, or pair of values, of all cases.

    size: 1 for values, 2 for pairs.
    """
    sets = {item: _values(item, size) for item in items}
    missing = set().union(*sets.values())
    if not missing:
        return items
    chosen = set()
    while missing:
        # The first case with most missing values. No case has more than it had in an earlier round.
        best, most = items[0], 0
        for item in items:
            if len(sets[item]) > most:
                sets[item] &= missing
                if len(sets[item]) > most:
                    best, most = item, len(sets[item])
        chosen.add(best)
        missing -= sets[best]
    return [item for item in items if item in chosen]


def repeated_skips(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that a mark `skipif` skips for the same reason as an earlier one."""
    reasons: set[str] = set()
    repeated = []
    for item in items:
        for mark in item.iter_markers("skipif"):
            if mark.args[0]:
                if mark.kwargs["reason"] in reasons:
                    repeated.append(item)
                reasons.add(mark.kwargs["reason"])
                break
    return repeated


def _function(item: pytest.Item) -> str:
    return getattr(item, "originalname", item.name)


def _values(item: pytest.Item, size: int) -> set[Values]:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    # Equal values of a test's cases are the same objects.
    return set(combinations(((name, id(params[name])) for name in sorted(params)), size))
