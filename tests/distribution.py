"""Distribution of tests to the workers of pytest-xdist: one worker runs all tests of a file.

The tests of a file share a server or a model, which each further worker would have to start again. So do the files of a
folder whose fixtures have the scope `package`. Files whose tests start processes come first, since they take longest.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

SHARING = ("tests/e2e/gateway/",)
"""Folders whose files share fixtures."""
FIRST = ("tests/e2e/", "tests/helm/", "tests/service/supervisor/", "tests/service/frontend/", "tests/cli/")
"""Folders whose tests start processes, in the order in which they run."""


class Distribution(LoadFileScheduling):
    """Queue of files, or of folders that share fixtures, in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        return next(filter(nodeid.startswith, SHARING), None) or super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Distribution:
    """Replace what `--dist` selects."""
    config.option.loadscopereorder = False
    return Distribution(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the files that take longest to the front."""
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    return next((rank for rank, folder in enumerate(FIRST) if item.nodeid.startswith(folder)), len(FIRST))
