"""Programmatic dependent launch: a kernel begins while the one before it on the stream still runs.

What a kernel that takes PDL owes: it may let its own successor begin at once (`gdc_launch_dependents`), and before
`gdc_wait` it reads what no kernel of a step writes (weights, tables, what the host copied), and writes nothing. All of
its programs wait, those without work too, so that whoever waits for this kernel waits for all before it.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def dependent(tensor: Tensor) -> dict[str, bool]:
    """The arguments of a kernel on the tensor's device that say whether it is launched so: where the device has it, of
    compute capability 9.0 or above."""
    return {"PDL": True, "launch_pdl": True} if tensor.is_cuda and _has(tensor.device) else {"PDL": False}


@cache
def _has(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
