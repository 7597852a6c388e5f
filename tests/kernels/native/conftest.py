"""Fixture of the tests of the native kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from npuserve.kernels import native
from tests.kernels.variants import EACH_ISA


@pytest.fixture(params=EACH_ISA)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of the instruction set in use: each of this processor's in turn. The thread count is restored."""
    threads = native.library().threads
    with native.using(request.param):
        yield request.param
    native.library().set_threads(threads)
