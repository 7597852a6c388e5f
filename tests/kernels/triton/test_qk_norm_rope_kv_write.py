"""Norm, rotary embedding and cache write, against the golden function in float64."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from npuserve.kernels.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from npuserve.kernels.registry import Case
from tests.kernels.comparison import generator

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Relative and absolute tolerance: a few roundings of the dtype for values of about 1."""


def compare(launch: ModuleType, arguments: tuple[Any, ...]) -> float:
    """Return the largest absolute error of results and writes, within the tolerance. Check that other slots, and memory
    around the caches, are unchanged."""
    keys, values = arguments[7:9]
    # One block before and one after each cache.
    held = [torch.cat([cache[:1] + 1, cache, cache[:1] + 2]) for cache in (keys, values)]
    before = [cache.clone() for cache in held]
    inner = [cache[1:-1] for cache in held]
    q = launch.qk_norm_rope_kv_write(*arguments[:7], *inner, *arguments[9:])

    wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]
    wide[7:9] = [cache[1:-1].double() for cache in before]
    expected = qk_norm_rope_kv_write(*wide)
    tolerance = TOLERANCE[q.dtype]
    worst = 0.0
    for got, want in ((q, expected), *zip(inner, wide[7:9], strict=True)):
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
        worst = max(worst, float((got.double() - want).abs().max()))
    slots = arguments[6]
    untouched = torch.ones(inner[0].shape[:2], dtype=torch.bool)
    untouched.view(-1)[slots[slots >= 0]] = False
    for cache, old in zip(held, before, strict=True):
        assert torch.equal(cache[0], old[0])
        assert torch.equal(cache[-1], old[-1])
        assert torch.equal(cache[1:-1][untouched], old[1:-1][untouched])
        assert not torch.equal(cache, old) or untouched.all()
    return worst


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    "case", [c for c in qk_norm_rope_kv_write.cases if not (c.benchmark or c.cache)], ids=lambda c: c.name)
def test_cases(launch: ModuleType, case: Case, dtype: torch.dtype) -> None:
    compare(launch, case.make(generator(), dtype))


@pytest.mark.parametrize("which", [1, 2])
def test_queries_or_keys_alone_are_normalized(launch: ModuleType, which: int) -> None:
    arguments = list(qk_norm_rope_kv_write.cases[2].make(generator(), torch.float32))
    arguments[which] = None
    compare(launch, tuple(arguments))


def test_tokens_sharing_programs_and_apart(launch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also heads and values in several blocks, of which the last is partial."""
    monkeypatch.setattr(launch, "BLOCK", 16)
    monkeypatch.setattr(launch, "PROGRAMS", 4)
    qkv, *others = qk_norm_rope_kv_write.cases[2].make(generator(), torch.float32)
    apart = torch.zeros(len(qkv), qkv.shape[1] + 3)[:, :-3]
    compare(launch, (apart.copy_(qkv), *others))


def test_no_tokens(interpreted: ModuleType) -> None:
    qkv, *others = qk_norm_rope_kv_write.cases[0].make(generator(), torch.float32)
    positions, slots = (x[:0] for x in others[4:6])
    q = interpreted.qk_norm_rope_kv_write(qkv[:0], *others[:4], positions, slots, *others[6:])
    assert q.shape == (0, 4, 8)


@pytest.mark.parametrize(
    "heads", [(16, 8, 128, 128), (40, 8, 128, 128), (64, 4, 128, 128), (5, 1, 128, 128), (24, 4, 256, 64),
              (4, 1, 256, 64)], ids=lambda heads: "{}of{}x{}".format(*heads))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_the_widths_of_qwen3(
    launch: ModuleType, note: Callable[[str, float], None], dtype: torch.dtype, heads: tuple[int, int, int, int]
) -> None:
    """The shapes of 0.6B, 14B, 235B-A22B, and 14B divided among 8 devices; of Qwen3.5-27B, and 9B divided among 4.

    Blocks of 128.
    """
    (q_heads, kv_heads, dim, rotary), tokens, g = heads, 9, generator()
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * dim, generator=g).to(dtype)
    gammas = [torch.rand(dim, generator=g).add(0.5).to(dtype) for _ in "qk"]
    angles = torch.arange(512)[:, None] * 1e6 ** (-torch.arange(0, rotary, 2) / rotary)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.randint(512, (tokens,), generator=g)
    slots = torch.randperm(3 * 128, generator=g)[:tokens]
    slots[4] = -1
    keys, values = torch.randn(2, 3, 128, kv_heads, dim, generator=g).to(dtype)
    error = compare(launch, (qkv, *gammas, 1e-6, cos_sin, positions, slots, keys, values, q_heads))
    note(f"qk_norm_rope_kv_write {q_heads} and {kv_heads} heads of {dim} {str(dtype).removeprefix('torch.')}", error)


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (0, torch.zeros(3, 40), "qkv: 40 columns are not"),
        (0, torch.zeros(3, 32, dtype=torch.float64), "qkv"),
        (1, torch.zeros(7), "q_gamma"),
        (2, torch.zeros(8, dtype=torch.bfloat16), "k_gamma"),
        (4, torch.zeros(64, 10), "cos_sin"),
        (4, torch.zeros(64, 7), "cos_sin"),
        (4, torch.zeros(64, 0), "cos_sin"),
        (4, torch.zeros(64, 8, dtype=torch.float64), "cos_sin"),
        (5, torch.zeros(3, dtype=torch.int32), "positions"),
        (6, torch.zeros(4, dtype=torch.int64), "slot_mapping"),
        (7, torch.zeros(4, 8, 8), "k_cache"),
        (7, torch.zeros(3, 16, 2, 7), "k_cache: heads of 7"),
        (7, torch.zeros(3, 2, 16, 8).transpose(1, 2), "k_cache"),
        (8, torch.zeros(4, 16, 2, 8), "v_cache"),
        (9, 0, "num_q_heads: 0 is not from 1"),
    ],
)
def test_invalid_argument_raises(interpreted: ModuleType, place: int, value: Any, named: str) -> None:
    arguments: list[Any] = [
        torch.zeros(3, 64), torch.ones(8), torch.ones(8), 1e-6, torch.zeros(64, 8), torch.zeros(3, dtype=torch.int64),
        torch.arange(3), torch.zeros(3, 16, 2, 8), torch.zeros(3, 16, 2, 8), 4]
    interpreted.qk_norm_rope_kv_write(*arguments)
    arguments[place] = value
    with pytest.raises(ValueError, match=f"^{named}"):
        interpreted.qk_norm_rope_kv_write(*arguments)
