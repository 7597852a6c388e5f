"""Comparison of the Triton kernel qk_norm_rope_kv_write with the operators that it replaces, at the start."""

from __future__ import annotations

from typing import Any

import torch

from npuserve.kernels import ascend
from npuserve.kernels.qk_norm_rope_kv_write import by_operators

TOLERANCE = 0.06
"""Largest difference in bfloat16 of values up to about 5: the operators round cosines, sines and the norm's result."""


SIZES = (128, 128), (256, 64)
"""Sizes of heads with the number of each that is rotated: Qwen3's and Qwen3.5's."""


def agrees(launch: ascend.FusedHeads, device: torch.device) -> bool:
    """Return True if `launch` gives the operators' results for heads of `SIZES`."""
    return all(_agrees(launch, device, *sizes) for sizes in SIZES)


def _agrees(launch: ascend.FusedHeads, device: torch.device, dim: int, rotary_dim: int) -> bool:
    """Compare three tokens in two blocks."""
    generator = torch.Generator().manual_seed(0)
    heads = 4
    kv_heads = 2

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device)

    angles = torch.rand(16, rotary_dim // 2, generator=generator) * 6.28
    table = torch.cat([angles.cos(), angles.sin()], 1).to(device)
    positions, slots = (torch.tensor(values).to(device) for values in ([0, 9, 15], [3, 200, 128]))
    qkv = normal(3, (heads + 2 * kv_heads) * dim)
    q_gamma = normal(dim)
    k_gamma = normal(dim)

    def run(function: Any) -> list[torch.Tensor]:
        caches = [torch.zeros(2, ascend.BLOCK, kv_heads, dim, dtype=torch.bfloat16, device=device) for _ in range(2)]
        q = function(qkv, q_gamma, k_gamma, 1e-6, table, positions, slots, *caches, heads)
        return [tensor.float().cpu() for tensor in (q, *caches)]

    return all(bool(((a - b).abs() <= TOLERANCE * (1 + b.abs())).all())
               for a, b in zip(run(launch), run(by_operators), strict=True))
