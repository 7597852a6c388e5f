"""Rotary position embeddings: the table of cosines and sines.

Arithmetic, its order and its precision (float32) follow transformers' rotary embedding modules
(modeling_rope_utils.py), so that the table equals theirs bit for bit and greedy answers agree.

Sources of the methods: RoFormer (Su et al. 2021); linear: position interpolation (Chen et al. 2023); llama3: the Llama
3.1 release; yarn: YaRN (Peng et al. 2023).
"""

from __future__ import annotations

import math

import torch

from npuserve.npu.model.rope_config import RopeConfig


def cos_sin_table(rope: RopeConfig, head_dim: int, length: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return [length, R] float32: row p has the cosines (first half) and sines (second half) of position p.

    R, the rotated numbers of a head, is `rope.rotary_dim(head_dim)`.
    """
    rotary_dim = rope.rotary_dim(head_dim)
    half = rotary_dim // 2
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse_frequencies(rope, rotary_dim)
    table = torch.empty(length, rotary_dim)
    torch.cos(angles, out=table[:, :half])
    torch.sin(angles, out=table[:, half:])
    if rope.attention_factor != 1.0:
        table *= rope.attention_factor
    return table.to(device)


def inverse_frequencies(rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """Return [rotary_dim / 2] float32: radians per position of each pair of dimensions."""
    powers = rope.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    plain = 1.0 / powers
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            kept = 1 - _yarn_ramp(rope, rotary_dim)
            return 1.0 / (rope.factor * powers) * (1 - kept) + plain * kept


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Divide the frequencies of long wavelengths by the factor, keep short ones, and interpolate between."""
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    kept = (rope.original_context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    mixed = (1 - kept) * plain / rope.factor + kept * plain
    stretched = torch.where(wavelength > longest, plain / rope.factor, plain)
    return torch.where((wavelength >= shortest) & (wavelength <= longest), mixed, stretched)


def _yarn_ramp(rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """Return [rotary_dim / 2]: 0 for pairs with more than beta_fast rotations in the original context, 1 for pairs with
    fewer than beta_slow, linear between."""

    def pair(rotations: float) -> float:
        return rotary_dim * math.log(rope.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = pair(rope.beta_fast)
    high = pair(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    return ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
