"""Distribution of tests to the workers of pytest-xdist: one worker runs all tests of a file.

The tests of a file share a server or a model, which each further worker would have to start again. So do the files of a
folder whose fixtures have the scope `package`. Files whose tests start processes come first, since they take longest.

In a new clone every worker would compile every test, which takes 15 s. So each worker begins its imports elsewhere, and
finds the other modules in the cache of bytecode.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.selection import WHOLE_SERVERS

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import all tests in this worker's own order, if all are to be collected. Errors are those of the collection."""
    config = session.config
    if not hasattr(config, "workerinput") or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    files = sorted(path for path in WHOLE_SERVERS.parent.rglob("test_*.py") if WHOLE_SERVERS not in path.parents)
    names = [".".join(path.relative_to(config.rootpath).with_suffix("").parts) for path in files]
    worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    first = worker * len(names) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    for name in names[first:] + names[:first]:
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the files that take longest to the front."""
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    return next((rank for rank, folder in enumerate(FIRST) if item.nodeid.startswith(folder)), len(FIRST))
