"""Settings and fixtures of all tests. Imports no torch, since most tests are of processes without it."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.outcomes import VARIABLE, Recorder
from tests.support.processes import free_port

pytest_plugins = ["tests.selection", "tests.distribution", "tests.processor_time"]

# Set before torch is imported: workers of pytest-xdist and the servers of tests share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
# As in npuserve.npu: torch must not import an installed torch_npu without CANN.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

# Workers import the same tests, and servers the same modules: without cached bytecode each start compiles them again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def _import_iri_parsers_at_first_use() -> None:
    """Delay the import of rfc3987_syntax, which jsonschema imports for IRIs: it builds 38 parsers, in a second."""
    name = "rfc3987_syntax"
    if importlib.util.find_spec(name):
        stand_in = types.ModuleType(name)

        def is_valid_syntax(rule: str, text: str) -> bool:
            if sys.modules[name] is stand_in:
                del sys.modules[name]
            valid: bool = importlib.import_module(name).is_valid_syntax(rule, text)
            return valid

        vars(stand_in)["is_valid_syntax"] = is_valid_syntax
        sys.modules[name] = stand_in


_import_iri_parsers_at_first_use()

# In CI the examples are the same in each run, so that a failure is caused by the change.
settings.register_profile("default", deadline=None, max_examples=25, derandomize=bool(os.environ.get("CI")))
settings.register_profile("full", settings.get_profile("default"), max_examples=150)


# Collection makes many objects and hardly any garbage: passes of the collector would be a fifth of its time.
gc.disable()


def pytest_collection_finish() -> None:
    """Let the garbage collector run again, without the objects of the collection. Let all loggers propagate: pytest
    would attach itself to torch's 60 loggers that do not, six times for each test."""
    gc.freeze()
    gc.enable()
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_configure(config: pytest.Config) -> None:
    """Choose the number of examples, and record outcomes for CI in the process that gets all workers' reports."""
    settings.load_profile("full" if config.getoption("--full") else "default")
    if (file := os.environ.get(VARIABLE)) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(file)))


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers of `-n auto`: one more than the cores, since tests of servers often wait."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.fixture(name="free_port")
def free_port_function() -> Callable[[], int]:
    """Function that returns a free TCP port of 127.0.0.1."""
    return free_port


@pytest.fixture
def without_nohup() -> Iterator[None]:
    """Let processes of the test inherit a SIGHUP that is not ignored, even if the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
