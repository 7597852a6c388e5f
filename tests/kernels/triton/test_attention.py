"""Attention and cache write on CUDA, interpreted, against the golden functions in float64."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from npuserve.kernels.attention import AttentionMetadata, paged_attention
from npuserve.kernels.bench.tensors import QUANTIZED as TYPES
from npuserve.kernels.bench.tensors import widened
from npuserve.kernels.kv_cache import LARGEST, QUANTIZED, Cache, quantize_heads, quantized_as
from npuserve.kernels.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from npuserve.kernels.quantized import Quantized
from tests.kernels.triton.hopper import Launch, compiled

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
GARBAGE = (2**31 - 1, -(2**31), -7)
"""Block numbers far outside of any cache."""


@pytest.fixture
def launch(interpreted: ModuleType) -> ModuleType:
    from npuserve.kernels.triton import launch_attention

    return launch_attention


class Step:
    """Rows of (queries, context), and queries of no row. Memory outside the contexts is NaN, and table entries past a
    context are invalid block numbers, so that any access to them shows."""

    def __init__(
        self, rows: list[tuple[int, int]], heads: tuple[int, int], dim: int, size: int = 16,
        dtype: torch.dtype = torch.float32, cached: str = "", beyond: int = 0, seed: int = 0,
    ):
        g = torch.Generator().manual_seed(seed)
        (q_heads, kv_heads), self.beyond = heads, beyond
        lengths, contexts = zip(*rows, strict=True)
        used = [-(-context // size) for context in contexts]
        width = max(used) + 2
        order = torch.randperm(sum(used) + 1, generator=g).tolist()
        tables = torch.tensor([[GARBAGE[(r + i) % 3] for i in range(width)] for r in range(len(rows))]).int()
        inside = torch.zeros(len(order), size, dtype=torch.bool)
        for row, (count, context) in enumerate(zip(used, contexts, strict=True)):
            blocks = [order.pop() for _ in range(count)]
            tables[row, :count] = torch.tensor(blocks, dtype=torch.int32)
            for place in range(context):
                inside[blocks[place // size], place % size] = True
        shape = (2, len(inside), size, kv_heads, dim)
        caches: tuple[Cache, Cache] = quantized_as(cached, torch.randn(shape, generator=g).to(dtype))
        for cache in caches:
            (cache.scale if isinstance(cache, Quantized) else cache)[~inside] = torch.nan
        self.tokens = sum(lengths)
        self.q = torch.randn(self.tokens + beyond, q_heads, dim, generator=g).to(dtype)
        self.metadata = AttentionMetadata.from_lengths(tables, contexts, lengths)
        self.args = self.q, *caches, self.metadata, dim**-0.5

    def run(self, launch: ModuleType, one_each: bool = False, **configs: Any) -> Tensor:
        q, k_cache, v_cache, m, scale = self.args
        out: Tensor = launch.paged_attention(
            q, k_cache, v_cache, m.block_tables, m.context_lens, m.cu_seqlens_q, scale, one_each, **configs)
        assert not launch._arrived(q.device, 0).any()
        return out

    def check(self, out: Tensor) -> None:
        expected = paged_attention(*(widened(x) for x in self.args))
        tolerance = TOLERANCE[self.q.dtype]
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
        assert not out[self.tokens :].any()


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(8, 14))])
def test_paged_attention_any_rows(launch: ModuleType, seed: int) -> None:
    """Rows of no query, of one and of many; queries of no row; heads and blocks of any size; tiles in parts."""
    r = random.Random(seed)
    size, dtype = r.choice([16, 32, 48]), r.choice(list(TOLERANCE))
    rows = []
    for _ in range(r.randint(1, 5)):
        queries = r.choice([0, 1, 1, 2, r.randint(3, 40)])
        rows.append((queries, queries + r.choice([0, 1, size, r.randint(0, 200)]) if queries else r.choice([0, 9])))
    kv_heads, group = r.randint(1, 3), r.choice([1, 2, 3, 5, 8, 17])
    step = Step(rows or [(1, 1)], (kv_heads * group, kv_heads), r.choice([8, 10, 16, 64, 96]), size, dtype,
                r.choice(["", "int8", "fp8"]), r.choice([0, 0, 1, 7]), seed)
    least = r.choice([16, 64, 128])
    cut = {"keys": r.choice([16, 32]), "warps": 4, "stages": 2, "programs": r.randint(1, 6), "least": least}
    step.check(step.run(launch, decode=launch.Config(queries=16, **cut),
                        chunks=launch.Config(queries=r.choice([16, 32]), **cut)))


@pytest.mark.parametrize(("programs", "cached"), [(1, ""), (3, "int8"), (6, "fp8"), (12, "")])
def test_contexts_around_the_borders_of_parts(launch: ModuleType, programs: int, cached: str) -> None:
    """The maximum number of parts, of 16 keys; in one launch one long row is cut and short ones are not."""
    rows = [(1, context) for context in (1, 15, 16, 17, 32, 33, 65, 200)]
    step = Step(rows, (2, 1), 16, cached=cached)
    config = launch.Config(16, 16, 4, 2, programs, 16)
    out = step.run(launch, True, decode=config)
    step.check(out)
    assert torch.equal(out, step.run(launch, True, decode=config))
    if programs == 1:
        assert torch.equal(out, step.run(launch, False, decode=config))


@pytest.mark.parametrize("dim", [128, 256])
def test_chunk_with_parts_invisible_to_a_query(launch: ModuleType, dim: int) -> None:
    step = Step([(33, 40)], (2, 1), dim, seed=dim)
    step.check(step.run(launch, chunks=launch.Config(64, 16, 4, 2, 8, 16)))


def test_host_lengths_only_select_one_query_per_row(
    launch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's other numbers are the padding of a captured step. If each row has one query, one launch suffices."""
    kernel, launches = launch.paged_attention_kernel, []

    class Counting:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., Any]:
            def call(*args: Any, **named: Any) -> None:
                launches.append(named["CHUNKS"])
                kernel[grid](*args, **named)

            return call

    monkeypatch.setattr(launch, "paged_attention_kernel", Counting())
    attend = paged_attention.implementations["cuda"].function
    for rows, ones in (([(1, 20), (1, 3)], True), ([(2, 20), (0, 3)], False), ([(5, 9), (1, 40)], False)):
        step = Step(rows, (2, 1), 8)
        q, k_cache, v_cache, metadata, scale = step.args
        starts = [0, 1, 2] if ones else []
        padding = dataclasses.replace(metadata, host_context_lens=[], host_cu_seqlens_q=starts)
        launches.clear()
        step.check(attend(q, k_cache, v_cache, padding, scale))
        assert launches == ([False] if ones else [False, True])


def test_grids_depend_on_shapes_and_hold_all_parts(launch: ModuleType) -> None:
    """The kernel's counts on the device, repeated here for rows of any lengths."""
    r = random.Random(0)
    for _ in range(300):
        rows, chunks = r.choice([1, 2, 17, 64, 256]), r.random() < 0.5
        longest = r.choice([64, 4096, 131072])
        contexts = [r.choice([1, longest, r.randint(1, longest)]) for _ in range(rows)]
        queries = [min(c, r.choice([0, 1, 2, 9, 300])) for c in contexts]
        tokens = max(1, sum(queries) + r.choice([0, 0, 3]))
        kv_heads, group = r.choice([1, 2, 8]), r.choice([1, 2, 5])
        config = launch.config(chunks, 128, torch.bfloat16, torch.bfloat16, tokens)
        made = launch.plan_launch(config, chunks, tokens, rows, kv_heads * group, kv_heads, 128, 32, longest, 132)
        c = made.constants
        a_tile = c["BLOCK_M"] // group if chunks else 1
        tiles = [-(-n // a_tile) if (n > 1 if chunks else n == 1) else 0 for n in queries]
        work = sum(t * n for t, n in zip(tiles, contexts, strict=True)) * kv_heads
        share = max(-(-work // c["PROGRAMS"]), c["LEAST_PART"])
        parts = [max((n + share // 2) // share, 1) for n in contexts]
        items = sum(t * p for t, p in zip(tiles, parts, strict=True))
        merged = sum(t * p for t, p in zip(tiles, parts, strict=True) if p > 1)
        assert (items + chunks) * kv_heads <= made.programs
        assert merged * kv_heads <= made.slots
        assert made.programs <= (config.programs * 132 + kv_heads * (tokens + 1))


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (0, torch.zeros(3, 8), "q: "),
        (0, torch.zeros(3, 4, 8, dtype=torch.float64), "q: "),
        (0, torch.zeros(3, 4, 10), "k_cache: heads of 8 beside"),
        (0, torch.zeros(3, 5, 8), "q: 5 heads"),
        (1, torch.zeros(4, 16, 2, 8, dtype=torch.bfloat16), "k_cache: "),
        (1, torch.zeros(4, 16, 8), "k_cache: "),
        (1, Quantized(torch.zeros(4, 16, 2, 8, dtype=torch.int8), torch.zeros(4, 16, 2)), "scale of k_cache: "),
        (2, torch.zeros(4, 32, 2, 8), "v_cache: "),
        (3, torch.zeros(2, 4, dtype=torch.int64), "block_tables: "),
        (3, torch.zeros(4, 2, dtype=torch.int32).T, "block_tables: "),
        (4, torch.ones(3, dtype=torch.int32), "cu_seqlens_q: "),
        (5, torch.zeros(3, dtype=torch.int64), "cu_seqlens_q: "),
        (2, torch.zeros(4, 16, 2, 8, dtype=torch.float16), "v_cache: "),
        (6, 0.0, "scale: 0.0 is not above 0"),
        (7, True, "one_each: 3 queries of 2 rows"),
    ],
)
def test_paged_attention_invalid_argument_raises(launch: ModuleType, place: int, value: Any, named: str) -> None:
    args: list[Any] = [
        torch.zeros(3, 4, 8), torch.zeros(4, 16, 2, 8), torch.zeros(4, 16, 2, 8), torch.zeros(2, 4, dtype=torch.int32),
        torch.tensor([2, 3]).int(), torch.tensor([0, 1, 3]).int(), 0.3, False]
    launch.paged_attention(*args)
    args[place] = value
    with pytest.raises(ValueError, match=f"^{named}"):
        launch.paged_attention(*args)


def test_paged_attention_invalid_heads_raise(launch: ModuleType) -> None:
    for dim in (6, 9, 258):
        cache = torch.zeros(1, 16, 1, dim)
        one = torch.ones(1, dtype=torch.int32)
        with pytest.raises(ValueError, match=f"^q: heads of {dim} are not even, from 8 to 256"):
            launch.paged_attention(
                torch.zeros(1, 1, dim), cache, cache, one.view(1, 1) - 1, one, torch.tensor([0, 1]).int(), 1.0, True)


# Cache write


def heads(tokens: int, q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype, cached: str) -> list[Any]:
    g = torch.Generator().manual_seed(dim)
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * dim, generator=g).to(dtype)
    gammas = [torch.rand(dim, generator=g).add(0.5).to(dtype) for _ in "qk"]
    angles = torch.arange(99)[:, None] * 1e4 ** (-torch.arange(0, dim, 2) / dim)
    slots = torch.randperm(64, generator=g)[:tokens] + 16
    slots[1::4] = -1
    caches = torch.randn(2, 6, 16, kv_heads, dim, generator=g).to(dtype)
    return [qkv, *gammas, 1e-6, torch.cat([angles.cos(), angles.sin()], dim=-1),
            torch.randint(99, (tokens,), generator=g), slots,
            *quantized_as(cached, caches), q_heads]


@pytest.mark.parametrize("cached", ["", *QUANTIZED])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim", "dtype"),
    [(5, 1, 128, torch.bfloat16), (9, 5, 16, torch.float16), (9, 3, 10, torch.float32), (4, 2, 256, torch.float32)])
def test_kv_write_changes_only_its_slots(
    launch: ModuleType, q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype, cached: str
) -> None:
    args = heads(5, q_heads, kv_heads, dim, dtype, cached)
    wide = [widened(x) for x in args]
    before = [dataclasses.replace(x, values=x.values.clone(), scale=x.scale.clone()) if isinstance(x, Quantized)
              else x.clone() for x in args[7:9]]
    # Rows that are not adjacent, as in a slice.
    apart = torch.zeros(5, args[0].shape[1] + 8, dtype=dtype)[:, :-8]
    q = launch.qk_norm_rope_kv_write(apart.copy_(args[0]), *args[1:])
    expected = qk_norm_rope_kv_write(*wide)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(q.double(), expected, rtol=tolerance, atol=tolerance)
    others = torch.ones(96, dtype=torch.bool)
    others[args[6][args[6] >= 0]] = False
    for got, want, was in zip(args[7:9], wide[7:9], before, strict=True):
        for a, b, c in zip(*((x.values, x.scale) if isinstance(x, Quantized) else (x,) for x in (got, want, was)),
                           strict=True):
            step, least = TYPES.get(a.dtype, (0.0, tolerance))
            a, b, c = a.double(), b.double(), c.double()
            assert torch.equal(a.flatten(0, 1)[others], c.flatten(0, 1)[others])
            torch.testing.assert_close(a, b, rtol=max(tolerance, step), atol=least)


@pytest.mark.parametrize("size", [0.0, 1e-20, 1.0, 8e3])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("cached", list(QUANTIZED))
def test_kv_write_equals_quantize_heads(launch: ModuleType, cached: str, dtype: torch.dtype, size: float) -> None:
    """Without norm and rotation; with halves, in a row whose scale is 1."""
    args = heads(6, 2, 4, 64, dtype, cached)
    args[0] = (args[0] * size).to(dtype)
    if size == 1.0:
        args[0] = torch.arange(args[0].numel()).remainder(255).sub(127).view(args[0].shape).div(2).to(dtype)
        args[0].view(6, -1, 64)[..., 0] = LARGEST[QUANTIZED[cached]]
    args[1] = args[2] = None
    args[5].zero_()
    launch.qk_norm_rope_kv_write(*args)
    written = args[6] >= 0
    for cache, part in zip(args[7:9], args[0].view(6, -1, 64)[:, 2:].split(4, dim=1), strict=True):
        want = quantize_heads(part[written], values=QUANTIZED[cached])
        assert torch.equal(cache.values.flatten(0, 1)[args[6][written]].float(), want.values.float())
        assert torch.equal(cache.scale.flatten(0, 1)[args[6][written]], want.scale)


def test_kv_write_many_tokens_and_none(launch: ModuleType) -> None:
    """More than 64 tokens use more heads a program."""
    args = heads(5, 9, 3, 16, torch.float32, "int8")
    args[0], args[5], args[6] = args[0].repeat(13, 1), args[5].repeat(13), torch.cat([args[6], -torch.ones(60).long()])
    wide = [widened(x) for x in args]
    q = launch.qk_norm_rope_kv_write(*args)
    torch.testing.assert_close(q.double(), qk_norm_rope_kv_write(*wide), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(args[7].scale.double(), wide[7].scale.double(), rtol=1e-2, atol=0)
    args[0], args[5], args[6] = (args[i][:0] for i in (0, 5, 6))
    assert launch.qk_norm_rope_kv_write(*args).shape == (0, 9, 16)


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (0, torch.zeros(3, 40), "qkv: 40 columns are not"),
        (1, torch.zeros(7), "q_gamma"),
        (4, torch.zeros(64, 10), "cos_sin"),
        (4, torch.zeros(64, 7), "cos_sin"),
        (5, torch.zeros(3, dtype=torch.int32), "positions"),
        (6, torch.zeros(4, dtype=torch.int64), "slot_mapping"),
        (7, torch.zeros(4, 8, 8), "k_cache"),
        (7, torch.zeros(4, 16, 2, 8, dtype=torch.int8), "k_cache"),
        (8, quantize_heads(torch.zeros(4, 16, 2, 8)), "v_cache"),
        (9, 0, "num_q_heads: 0 is not from 1"),
    ],
)
def test_kv_write_invalid_argument_raises(launch: ModuleType, place: int, value: Any, named: str) -> None:
    args: list[Any] = [
        torch.zeros(3, 64), torch.ones(8), torch.ones(8), 1e-6, torch.zeros(64, 8), torch.zeros(3, dtype=torch.int64),
        torch.arange(3), torch.zeros(4, 16, 2, 8), torch.zeros(4, 16, 2, 8), 4]
    launch.qk_norm_rope_kv_write(*args)
    args[place] = value
    with pytest.raises(ValueError, match=f"^{named}"):
        launch.qk_norm_rope_kv_write(*args)


# Compiled code

ATTENTION = {"block_tables": "*i32", "context_lens": "*i32", "cu_seqlens_q": "*i32", "partial": "*fp32",
             "stats": "*fp32", "arrived": "*i32", "tokens": "i32", "rows": "i32", "tables_stride": "i32",
             "scale": "fp32"}
HEADS = {"q_gamma": "*bf16", "k_gamma": "*bf16", "cos_sin": "*fp32", "positions": "*i64", "slot_mapping": "*i64",
         "qkv": "*bf16", "q_out": "*bf16", "eps": "fp32", "qkv_stride": "i64/16"}
QWEN3_14B, QWEN3_06B, SMOL = (40, 8, 128), (16, 8, 128), (32, 8, 64)


def caches(cached: str, scale: str, activations: str = "*bf16") -> tuple[dict[str, str], dict[str, Any]]:
    """Return (types, constants) of the arguments."""
    types = dict.fromkeys(("k_cache", "v_cache"), {"": activations, "int8": "*i8", "fp8": "*fp8e4nv"}[cached])
    scales = "k_scale", "v_scale"
    return (types | dict.fromkeys(scales, scale), {}) if cached else (types, dict.fromkeys(scales))


def of_call(
    launch: ModuleType, heads: tuple[int, int, int], kind: tuple[bool, int], cached: str, shared: int = 227 << 10,
    activations: torch.dtype = torch.bfloat16,
) -> Launch:
    """Return the launch of a call with (query heads, KV heads, head_dim), (chunks, tokens) and a cache."""
    (q_heads, kv_heads, dim), (chunks, tokens) = heads, kind
    dtype = QUANTIZED.get(cached, activations)
    config = launch.config(chunks, dim, activations, dtype, tokens, shared)
    made = launch.plan_launch(config, chunks, tokens, 256, q_heads, kv_heads, dim, 32, 32768, 132)
    number = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[activations]
    types, scales = caches(cached, "*i32", number)
    if words := launch.words_of(dtype, chunks, dim):
        types |= dict.fromkeys(("k_cache", "v_cache"), "*i32")
    return Launch(
        "paged_attention", "paged_attention_kernel", ATTENTION | types | {"q": number, "out": number},
        made.constants | scales | {"BYTES": words, "WIDE": False, "PDL": True}, made.options)


@pytest.mark.timeout(900)
def test_hopper_attention_hardly_spills_and_uses_tensor_cores(launch: ModuleType) -> None:
    """At the shapes of real models, with the arguments of their calls."""
    decode, some, few, many = (False, 256), (False, 16), (True, 256), (True, 4096)
    chosen = [(QWEN3_14B, decode, ""), (QWEN3_14B, decode, "int8"), (QWEN3_14B, decode, "fp8"),
              (QWEN3_14B, some, ""), (QWEN3_14B, some, "int8"), (QWEN3_14B, few, ""),
              (QWEN3_14B, few, "int8"), (QWEN3_14B, few, "fp8"), (QWEN3_14B, many, ""), (QWEN3_14B, many, "int8"),
              (QWEN3_14B, many, "fp8"), (QWEN3_06B, decode, "int8"), (SMOL, decode, "int8")]
    launches = [of_call(launch, *call) for call in chosen]
    for what, made in zip(chosen, compiled(launches), strict=True):
        # A few bytes where the measured time is the best nevertheless.
        assert made.local <= (48 if what[1] == some else 192 if what[1][0] and what[2] else 0), what
        assert made.shared <= 227 << 10, what
        assert "cp.async.cg.shared.global" in made.ptx, what
        assert ("wgmma.mma_async" if what[1][0] else "mma.sync") in made.ptx, what
        early, _, late = made.ptx.partition("griddepcontrol.wait")
        assert "cp.async.c" not in early, what  # only a prefetch into the L2 cache
        assert "st.global" not in early, what
        assert "atom.global.gpu.acq_rel" in late, what
        assert "ld.global.b16" not in made.ptx, what  # scales are prefetched too


@pytest.mark.parametrize("activations", [torch.float16, torch.float32])
def test_attention_compiles_for_quantized_caches(launch: ModuleType, activations: torch.dtype) -> None:
    launches = [of_call(launch, SMOL, kind, cached, activations=activations)
                for kind in ((False, 16), (True, 256)) for cached in QUANTIZED]
    assert all(made.shared <= 227 << 10 for made in compiled(launches))


@pytest.mark.full
def test_attention_fits_the_shared_memory_of_ada(launch: ModuleType) -> None:
    kinds = [(False, 1), (False, 16), (False, 64), (False, 256), (True, 256), (True, 4096)]
    launches = [of_call(launch, QWEN3_14B, kind, cached, 99 << 10) for kind in kinds for cached in ("", "int8", "fp8")]
    assert all(made.shared <= 99 << 10 for made in compiled(launches))


def test_hopper_writes_heads_16_bytes_at_a_time(interpreted: ModuleType) -> None:
    launches = []
    for cached, heads in itertools.product(["", *QUANTIZED], [4, 8]):
        types, scales = caches(cached, "*bf16")
        whole = {"Q_HEADS": 40, "KV_HEADS": 8, "HALF": 64, "HALF_BLOCK": 64, "REST": 0, "REST_BLOCK": 1}
        part = {"Q_HEADS": 24, "KV_HEADS": 4, "HALF": 32, "HALF_BLOCK": 32, "REST": 192, "REST_BLOCK": 256}
        launches += [
            Launch("kv_write", "kv_write_kernel", HEADS | types, sizes | scales | {"HEADS": heads, "PDL": True},
                   {"num_warps": heads // 4}) for sizes in (whole, part)]
    for made in compiled(launches):
        assert made.local == 0
        assert "ld.global.v4.b32" in made.ptx.partition("griddepcontrol.wait")[2]
        assert "st.global.v4.b32" in made.ptx
