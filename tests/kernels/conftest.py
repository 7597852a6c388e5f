"""Quicker interpretation of the Triton kernels where they are interpreted (.ci/triton)."""

from __future__ import annotations

import os

from npuserve.kernels import triton
from npuserve.npu.backends.cuda.interpreter import quicken

if os.environ.get("TRITON_INTERPRET") == "1" and triton.available():
    quicken()
