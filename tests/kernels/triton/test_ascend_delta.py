"""Kernels of linear attention for Ascend, interpreted and lowered, against the golden functions."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from npuserve.kernels.attention import AttentionMetadata
from npuserve.kernels.causal_conv_silu import causal_conv_silu
from npuserve.kernels.gated_delta_rule import NORM_EPS, gated_delta_rule
from npuserve.kernels.gated_rms_norm import gated_rms_norm
from tests.kernels.comparison import randn

Rows = list[tuple[int, int]]
"""(tokens, context) of each row."""

DECODE: Rows = [(1, 9), (1, 1), (1, 3)]
MIXED: Rows = [(11, 11), (0, 4), (2, 6), (1, 1), (2, 2), (8, 40)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Relative and absolute tolerance: a few roundings of the dtype for values of about 1."""


def metadata_of(rows: Rows, captured: bool = False) -> AttentionMetadata:
    """captured: the host does not know the lengths."""
    made = AttentionMetadata.from_lengths(
        torch.zeros(len(rows), 1, dtype=torch.int32), [c for _, c in rows], [n for n, _ in rows])
    return AttentionMetadata(made.block_tables, made.context_lens, made.cu_seqlens_q, [], []) if captured else made


def slots_of(rows: Rows) -> Tensor:
    return torch.tensor([4, 1, 6, 2, 0, 5][: len(rows)])


def near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """Return the largest absolute error, within the tolerance of `dtype`."""
    torch.testing.assert_close(got.double(), expected.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    return float((got.double() - expected.double()).abs().max())


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def convolved(
    launch: ModuleType, rows: Rows, dtype: torch.dtype, channels: int, taps: int = 4, padding: int = 0,
) -> float:
    """Return the largest error of results and states, whose slots of fresh rows held NaN. padding: tokens of no row."""
    tokens = sum(n for n, _ in rows)
    x = randn(tokens + padding, channels + 3, seed=1, dtype=dtype)[:, :channels]
    weight = randn(channels, taps, seed=2, dtype=dtype)
    state = randn(7, channels, taps - 1, seed=3, dtype=dtype)
    slots = slots_of(rows)
    state[[slot for slot, (n, context) in zip(slots.tolist(), rows, strict=True) if n and n == context]] = torch.nan
    memory = state.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    out = launch.causal_conv_silu(x, weight, memory.view(state.shape), metadata_of(rows, padding > 0), slots)
    assert not out[tokens:].any()
    wide = state.double()
    expected = causal_conv_silu(x.double()[:tokens], weight.double(), wide, metadata_of(rows), slots)
    torch.testing.assert_close(memory.transpose(1, 2).double(), wide, rtol=0, atol=0, equal_nan=True)
    return near(out[:tokens], expected, dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
def test_convolution_equals_golden(launch: ModuleType, rows: Rows, dtype: torch.dtype) -> None:
    convolved(launch, rows, dtype, 70)


@pytest.mark.parametrize("taps", [2, 6])
def test_convolution_over_other_numbers_of_tokens(launch: ModuleType, taps: int) -> None:
    convolved(launch, MIXED, torch.float32, 40, taps)


def test_convolution_of_captured_lengths_clears_tokens_of_no_row(launch: ModuleType) -> None:
    convolved(launch, MIXED, torch.float32, 70, padding=9)


def test_convolution_by_few_programs(launch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels in several blocks, of which the last is partial."""
    monkeypatch.setattr(launch, "CONVOLUTION", 128)
    monkeypatch.setattr(launch, "PROGRAMS", 4)
    convolved(launch, MIXED, torch.float32, 70)


def gate_inputs(tokens: int, heads: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return a, b, a_log, dt_bias; rows of a and b lie apart. Values of a reach both ends of softplus."""
    both = randn(tokens, 2 * heads, seed=4, dtype=dtype)
    both[:, :heads] *= 20
    return both[:, :heads], both[:, heads:], randn(heads, seed=5), randn(heads, seed=6)


@pytest.mark.parametrize("forgets", [True, False])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 2), (19, 6), (8, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_equal_golden(launch: ModuleType, dtype: torch.dtype, tokens: int, heads: int, forgets: bool) -> None:
    a, b, a_log, dt_bias = gate_inputs(tokens, heads, dtype)
    forget = torch.where(torch.arange(tokens) % 2 > 0, -1e4, 0.0).unsqueeze(1) if forgets else None
    decay, beta = launch.delta_gates(a, b, a_log, dt_bias, forget)
    expected = -a_log.double().exp() * torch.nn.functional.softplus(a.double() + dt_bias.double(), threshold=1000)
    if forget is not None:
        expected += forget
    assert decay.dtype == torch.float32
    torch.testing.assert_close(decay.double(), expected, rtol=1e-5, atol=1e-7)
    near(beta, b.double().sigmoid(), dtype)


def rule_inputs(
    tokens: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    a, b = randn(2, tokens, value_heads, seed=8, dtype=dtype)
    width = 2 * key_heads * key_dim + value_heads * value_dim
    return randn(tokens, width, seed=7, dtype=dtype), a, b, randn(value_heads, seed=9), randn(value_heads, seed=10)


def advanced(
    launch: ModuleType, rows: Rows, sizes: tuple[int, int, int, int], dtype: torch.dtype, state_dtype: torch.dtype,
    padding: int = 0,
) -> float:
    """Return the largest error of results. States are near the golden ones, and other slots unchanged."""
    tokens, (key_heads, value_heads, key_dim, value_dim) = sum(n for n, _ in rows), sizes
    qkv, a, b, *weights = rule_inputs(tokens + padding, *sizes, dtype)
    slots = slots_of(rows)
    state = randn(7, value_heads, key_dim, value_dim, seed=11).mul(0.3).to(state_dtype)
    state[[slot for slot, (n, context) in zip(slots.tolist(), rows, strict=True) if n and n == context]] = torch.nan
    memory = state.transpose(2, 3).clone(memory_format=torch.contiguous_format)
    out = launch.gated_delta_rule(
        qkv, a, b, *weights, memory.view(state.shape), metadata_of(rows, padding > 0), slots, key_heads, NORM_EPS)
    assert not out[tokens:].any()
    wide = state.double()
    expected = gated_delta_rule(
        qkv.double()[:tokens], a.double()[:tokens], b.double()[:tokens], *(x.double() for x in weights), wide,
        metadata_of(rows), slots, key_heads)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2**-7}[state_dtype]
    torch.testing.assert_close(
        memory.transpose(2, 3).double(), wide, rtol=tolerance, atol=tolerance, equal_nan=True)
    return near(out[:tokens], expected, dtype)


@pytest.mark.parametrize(("dtype", "state_dtype"), [
    (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32)], ids=str)
@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
def test_rule_equals_golden(
    launch: ModuleType, rows: Rows, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    advanced(launch, rows, (1, 3, 24, 40), dtype, state_dtype)


def test_rule_of_captured_lengths_clears_tokens_of_no_row(launch: ModuleType) -> None:
    advanced(launch, MIXED, (2, 4, 16, 16), torch.float32, torch.float32, padding=9)


def test_rule_by_few_programs(launch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "STATE", 256)
    monkeypatch.setattr(launch, "PROGRAMS", 5)
    advanced(launch, MIXED, (2, 4, 16, 24), torch.float32, torch.float32)


@pytest.mark.parametrize("wide_gamma", [True, False])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_gated_norm_equals_golden(
    launch: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, wide_gamma: bool
) -> None:
    """Also in several launches, of rows that lie apart."""
    monkeypatch.setattr(launch, "BLOCK", 64)
    monkeypatch.setattr(launch, "PROGRAMS", 8)
    both = randn(9, 2 * 5 * 32, seed=12, dtype=dtype)
    gamma = randn(32, seed=13).add(1)
    gamma = gamma if wide_gamma else gamma.to(dtype)
    x, z = both[:, :160], both[:, 160:]
    near(launch.gated_rms_norm(x, z, gamma, 1e-6), gated_rms_norm(x.double(), z.double(), gamma.double(), 1e-6), dtype)


@pytest.mark.parametrize("rows", [DECODE, [(9, 9), (0, 4), (1, 9)]], ids=["decode", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_the_sizes_of_qwen35(
    launch: ModuleType, note: Callable[[str, float], None], dtype: torch.dtype, rows: Rows
) -> None:
    """Heads of 128: 16 of keys and 48 of values as in 27B for the gates and the norm.

    The convolution takes a fourth of the channels and the rule a 16th of the heads, with the same block in a program.
    The state is in the dtype of the activations, as on a device.
    """
    kind = f"{name_of(dtype)}, {'decode rows' if rows is DECODE else 'chunks'}"
    note(f"conv_silu 2560 channels {kind}", convolved(launch, rows, dtype, 2560))
    note(f"delta_rule 1 and 3 heads of 128 {kind}", advanced(launch, rows, (1, 3, 128, 128), dtype, dtype))
    a, b, a_log, dt_bias = gate_inputs(11, 48, dtype)
    decay, _ = launch.delta_gates(a, b, a_log, dt_bias, None)
    expected = -a_log.double().exp() * torch.nn.functional.softplus(a.double() + dt_bias.double(), threshold=1000)
    torch.testing.assert_close(decay.double(), expected, rtol=1e-5, atol=1e-7)
    note(f"delta_gates 48 heads {kind}", float((decay.double() / expected - 1).abs().max()))
    x, z = randn(2, 3, 48 * 128, seed=14, dtype=dtype)
    gamma = randn(128, seed=15).add(1)
    error = near(launch.gated_rms_norm(x, z, gamma, 1e-6),
                 gated_rms_norm(x.double(), z.double(), gamma.double(), 1e-6), dtype)
    note(f"gated_rms_norm 48 groups of 128 {kind}", error)


@pytest.mark.parametrize(("kernel", "changed", "message"), [
    ("causal_conv_silu", {"weight": randn(70, 1)}, "^weight: .* is not .channels, at least 2"),
    ("causal_conv_silu", {"weight": randn(60, 4)}, "^weight: not a contiguous"),
    ("causal_conv_silu", {"state": randn(7, 70, 4)}, "^state: not a contiguous"),
    ("causal_conv_silu", {"state_slots": slots_of(DECODE).int()}, "^state_slots: not a contiguous .* of int64"),
    ("delta_gates", {"b": randn(3, 5)}, "^b: .* is not as a"),
    ("delta_gates", {"a_log": randn(5)}, "^a_log: not a contiguous"),
    ("delta_gates", {"forget": randn(3)}, "^forget: not a contiguous"),
    ("gated_delta_rule", {"key_heads": 3}, "^key_heads: 3 is not from 1 to 2"),
    ("gated_delta_rule", {"state": randn(7, 2, 8, 8).half()}, "^state: not a contiguous"),
    ("gated_rms_norm", {"z": randn(3, 31)}, "^z: .* is not"),
    ("gated_rms_norm", {"gamma": randn(7)}, "^x: 32 columns are not groups of 7")])
def test_wrong_arguments_are_refused(
    interpreted: ModuleType, kernel: str, changed: dict[str, Any], message: str
) -> None:
    qkv, a, b, a_log, dt_bias = rule_inputs(3, 1, 2, 8, 8, torch.float32)
    given: dict[str, Any] = {
        "causal_conv_silu": {"x": randn(3, 70), "weight": randn(70, 4), "state": randn(7, 70, 3)},
        "delta_gates": {"a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias, "forget": None},
        "gated_delta_rule": {"qkv": qkv, "a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias,
                             "state": randn(7, 2, 8, 8), "key_heads": 1, "eps": NORM_EPS},
        "gated_rms_norm": {"x": randn(3, 32), "z": randn(3, 32), "gamma": randn(8), "eps": 1e-6}}[kernel]
    if kernel in ("causal_conv_silu", "gated_delta_rule"):
        given |= {"metadata": metadata_of(DECODE), "state_slots": slots_of(DECODE)}
    with pytest.raises(ValueError, match=message):
        getattr(interpreted, kernel)(**given | changed)
