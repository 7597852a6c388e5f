"""Tests of the Triton kernels; `.ci/triton` runs them.

CACHE keeps the results of compilers by the digest of their inputs. `.ci/triton` deletes those older than two weeks.
"""

import os
from pathlib import Path

import pytest

from npuserve.kernels import triton

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npuserve" / "compiled"

needs_triton = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or not triton.available(),
    reason="needs triton and TRITON_INTERPRET=1: see .ci/triton")
"""Mark of tests whose kernels are interpreted."""
