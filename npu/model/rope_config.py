"""Configuration of rotary position embeddings. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from npuserve.npu.model.families.config_json import ModelError, flag, number, whole

RopeKind = Literal["default", "linear", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. The fields apply to the kinds in parentheses.

    theta: base of the frequencies (all).
    factor: context extension (linear, llama3, yarn).
    original_context: tokens of the pre-training context (llama3, yarn).
    low_freq_factor, high_freq_factor: (llama3).
    beta_fast, beta_slow, truncate: (yarn).
    attention_factor: factor of cos and sin (yarn).
    partial_rotary_factor: part of a head that is rotated, above 0 and at most 1 (all).
    """

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    partial_rotary_factor: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many numbers of a head are rotated: the first ones."""
        return int(head_dim * self.partial_rotary_factor)


def parse_rope(data: Mapping[str, Any], context: int, *, partial_of: int = 0) -> RopeConfig:
    """Parse rope_theta and rope_scaling (transformers 4), or rope_parameters (5), which contain both.

    context: max_position_embeddings.
    partial_of: size of a head for a family that can rotate a part of it; 0 for families that rotate all, whatever
        partial_rotary_factor is (transformers' modules of Llama, Qwen2 and Qwen3).
    """
    rope = _parse(data, context)
    factor = _partial_rotary_factor(data)
    if factor == 1:
        return rope
    if not partial_of:
        raise ModelError(f"config.json: partial_rotary_factor: {factor} is not supported; supported: 1")
    rope = replace(rope, partial_rotary_factor=factor)
    rotary_dim = rope.rotary_dim(partial_of)
    if not 0 < factor < 1 or rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(f"config.json: partial_rotary_factor: must be above 0, at most 1, and rotate an even number "
                         f"of the {partial_of} dimensions of a head, got {factor}")
    return rope


def _partial_rotary_factor(data: Mapping[str, Any]) -> float:
    for values in (data.get("rope_scaling"), data.get("rope_parameters"), data):
        if isinstance(values, Mapping) and values.get("partial_rotary_factor") is not None:
            return number(values, "partial_rotary_factor")
    return 1.0


def _parse(data: Mapping[str, Any], context: int) -> RopeConfig:
    key = "rope_scaling" if data.get("rope_scaling") else "rope_parameters"
    values = data.get(key) or {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise ModelError(f"config.json: {key}: one object for all layers is supported, got {values}")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ModelError(f"config.json: {key}: rope_type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    theta = number(values, "rope_theta", number(data, "rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(kind, theta)
    original = whole(data, "original_max_position_embeddings", values.get("original_max_position_embeddings"), context)
    factor = number(values, "factor", context / original if kind == "yarn" else None)
    if kind == "linear":
        return RopeConfig(kind, theta, factor)
    if kind == "llama3":
        low = number(values, "low_freq_factor")
        high = number(values, "high_freq_factor")
        if low == high:
            raise ModelError(f"config.json: {key}: low_freq_factor and high_freq_factor must differ, both are {low}")
        return RopeConfig(kind, theta, factor, original, low_freq_factor=low, high_freq_factor=high)
    if theta == 1.0:
        raise ModelError("config.json: rope_theta: must not be 1 under yarn")
    attention = _yarn_mscale(factor, 1.0)
    if values.get("mscale") and values.get("mscale_all_dim"):
        attention = _yarn_mscale(factor, number(values, "mscale")) / _yarn_mscale(
            factor, number(values, "mscale_all_dim"))
    return RopeConfig(
        kind,
        theta,
        factor,
        original,
        beta_fast=number(values, "beta_fast", 32.0),
        beta_slow=number(values, "beta_slow", 1.0),
        truncate=flag(values, "truncate", True),
        attention_factor=number(values, "attention_factor", attention),
    )


def _yarn_mscale(scale: float, weight: float) -> float:
    """Return the attention temperature of YaRN (Peng et al. 2023, equation 22), weighted as in DeepSeek-V2."""
    return 0.1 * weight * math.log(scale) + 1.0 if scale > 1 else 1.0
