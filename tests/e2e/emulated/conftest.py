"""The emulated libraries, built before a server is started."""

from __future__ import annotations

import pytest

from npuserve.npu.emulator.build import libraries
from tests.npu.emulator.child import missing


@pytest.fixture(scope="session", autouse=True)
def emulated_libraries() -> None:
    """Build the emulated libraries, which takes longer than a test waits for its server."""
    if missing() is None:
        libraries()
