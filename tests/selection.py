"""Which of the collected tests run: enough for each change by default, all with `pytest --full`.

By default a test function with two parameters or more runs only as many of its cases as it takes for every pair of
values of two parameters to be in one of them (pairwise testing: most defects need no more than two values at once;
Kuhn, Wallace and Gallo 2004). A test or a case marked `full` does not run at all. What the command line names by `::`
runs whole.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from typing import Any

import pytest

Pair = tuple[tuple[str, int], tuple[str, int]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="every combination of parameters, and tests marked full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what belongs to the full run alone."""
    if config.getoption("--full"):
        return
    named = {argument.rpartition("::")[2] for argument in config.args if "::" in argument}
    groups: defaultdict[tuple[Any, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[item.parent, _function(item)].append(item)
    chosen: set[pytest.Item] = set()
    for (_, function), group in groups.items():
        if function in named:
            chosen.update(group)
        else:
            chosen.update(pairwise([item for item in group if item.get_closest_marker("full") is None]))
    chosen.update(item for item in items if item.name in named)
    if left := [item for item in items if item not in chosen]:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item in chosen]


def pairwise(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of the cases of one test, some that hold every pair of values which all of them hold; in their order."""
    pairs = {item: _pairs(item) for item in items}
    missing = set().union(*pairs.values())
    if not missing:
        return items
    chosen = set()
    while missing:
        best = max(items, key=lambda item: len(pairs[item] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [item for item in items if item in chosen]


def _function(item: pytest.Item) -> str:
    return getattr(item, "originalname", item.name)


def _pairs(item: pytest.Item) -> set[Pair]:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    # The cases of a test share the objects that are their values.
    return set(combinations(((name, id(params[name])) for name in sorted(params)), 2))
