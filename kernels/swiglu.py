"""SwiGLU, the gated unit of the feed-forward layer (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.ascend import torch_npu
from npuserve.kernels.registry import Case, kernel


def _case(tokens: int, intermediate: int, benchmark: bool = False) -> Case:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor]:
        return (torch.randn(tokens, 2 * intermediate, generator=generator).mul(2).to(dtype),)

    return Case(f"{tokens}x{intermediate}", make, benchmark)


@kernel("swiglu", cases=[_case(1, 8), _case(5, 33), *(_case(t, 3072, True) for t in (1, 32, 512))])
def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [T, I]; gate_up: [T, 2 I], gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@native.implementation(swiglu)
def _(gate_up: Tensor) -> Tensor:
    tokens, intermediate = len(gate_up), gate_up.shape[1] // 2
    out = native.empty(tokens, intermediate, dtype=gate_up.dtype)
    native.call("swiglu", ("swiglu", gate_up.dtype, [gate_up, out], [tokens, intermediate]))
    return out


@ascend.implementation(swiglu)
def _(gate_up: Tensor) -> Tensor:
    out: Tensor = torch_npu.npu_swiglu(gate_up, dim=-1)
    return out


@triton.implementation(swiglu)
def _(gate_up: Tensor) -> Tensor:
    from npuserve.kernels.triton import launch_rows

    return launch_rows.swiglu(gate_up)
