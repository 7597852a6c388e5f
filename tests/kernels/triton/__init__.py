"""Tests of the Triton kernels; `.ci/triton` runs them.

CACHE keeps the results of compilers by the digest of their inputs. `.ci/triton` deletes those older than two weeks.
"""

import os
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npuserve" / "compiled"
