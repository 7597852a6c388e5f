"""What all tests share. Nothing here imports torch: most tests are of processes that do not."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from tests.outcomes import VARIABLE, Recorder

pytest_plugins = ["tests.selection"]

# Before anything imports torch: workers of pytest-xdist run side by side, and so do the servers that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
# As npuserve.npu does: an installed torch_npu is not to be imported where there is no CANN.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

# In CI the examples are the same at each run, so that a failure is the change's own.
settings.register_profile("default", deadline=None, max_examples=25, derandomize=bool(os.environ.get("CI")))
settings.register_profile("full", settings.get_profile("default"), max_examples=150)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the number of examples. Record the outcomes where CI asks for them, in the process that has the reports of
    all workers."""
    settings.load_profile("full" if config.getoption("--full") else "default")
    if (file := os.environ.get(VARIABLE)) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(file)))


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers of `-n auto`: one more than the cores, since tests of servers mostly wait."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A function that names a TCP port of 127.0.0.1 that nobody listens on."""

    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            return port

    return find
