"""Programmatic dependent launch (PDL): a kernel begins while the previous kernel on the stream still runs.

Rules for a kernel with PDL:
- It may let its successor begin at once (`gdc_launch_dependents`).
- Before `gdc_wait` it writes nothing. It reads only memory that no kernel of a step writes: weights, tables, data
  copied by the host. A prefetch into the L2 cache may touch other memory, since it uses no value (prefetch.py).
- All programs wait, including programs without work. Waiting for this kernel then implies waiting for all kernels
  before it.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def dependent(tensor: Tensor) -> dict[str, bool]:
    """Return the launch arguments that enable PDL if the tensor's device supports it (compute capability 9.0 or
    above)."""
    return {"PDL": True, "launch_pdl": True} if tensor.is_cuda and _has(tensor.device) else {"PDL": False}


@cache
def _has(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
