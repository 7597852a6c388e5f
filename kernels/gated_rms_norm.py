"""Root-mean-square normalization of groups, times SiLU of a gate (Qwen3-Next's gated delta net).

Rounding matches Hugging Face's models: the input's dtype after the norm, the wider dtype of that and gamma after the
product with gamma, then float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from npuserve.kernels import ascend, native, triton
from npuserve.kernels.ascend import torch_npu
from npuserve.kernels.norm import native_gamma
from npuserve.kernels.registry import Case, kernel


def _case(tokens: int, groups: int, size: int, wide_gamma: bool = False, benchmark: bool = False) -> Case:
    """Return a case. wide_gamma: gamma is in float32."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[Tensor | float, ...]:
        x, z = torch.randn(2, tokens, groups * size, generator=generator).to(dtype)
        gamma = torch.rand(size, generator=generator).add(0.5)
        return x, z, gamma if wide_gamma else gamma.to(dtype), 1e-6

    return Case(f"{tokens}x{groups}x{size}{' float32 gamma' if wide_gamma else ''}", make, benchmark)


@kernel("gated_rms_norm", by_layer=True, cases=[
    *(_case(*shape, wide) for wide in (False, True) for shape in ((1, 1, 8), (3, 2, 33), (7, 4, 128))),
    *(_case(tokens, 16, 128, benchmark=True) for tokens in (1, 32, 512))])
def gated_rms_norm(x: Tensor, z: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Normalize each D numbers of x [T, N], multiply by gamma [D] and by silu(z [T, N]): [T, N].

    gamma: in x's dtype or float32.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    groups = x.to(wide).unflatten(1, (-1, len(gamma)))
    normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    scaled = (gamma * normed.to(x.dtype)).flatten(1)
    result: Tensor = (scaled * F.silu(z.to(wide))).to(x.dtype)
    return result


@native.implementation(gated_rms_norm)
def _(x: Tensor, z: Tensor, gamma: Tensor, eps: float) -> Tensor:
    out = native.empty(*x.shape, dtype=x.dtype)
    narrow, wide = native_gamma(gamma, x.dtype)
    native.call("gated_rms_norm", ("gated_rms_norm", x.dtype, [x, z, narrow, out, wide], [*x.shape, len(gamma)], [eps]))
    return out


@ascend.implementation(gated_rms_norm)
def _(x: Tensor, z: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """Compute silu(z) times the norm by npu_swiglu, which rounds once. The norm is rounded once, too, with gamma."""
    groups = x.unflatten(1, (-1, len(gamma)))
    normed = torch_npu.npu_rms_norm(groups, gamma, epsilon=eps)[0].flatten(1)
    return torch_npu.npu_swiglu(torch.cat([z, normed], 1), dim=-1)  # type: ignore[no-any-return]


@triton.implementation(gated_rms_norm)
def _(x: Tensor, z: Tensor, gamma: Tensor, eps: float) -> Tensor:
    from npuserve.kernels.triton import launch_rows

    return launch_rows.gated_rms_norm(x, z, gamma, eps)
