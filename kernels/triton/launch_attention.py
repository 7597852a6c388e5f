"""Calls of the Triton kernels of attention and of the cache write: checks of arguments, and division into programs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from npuserve.kernels import triton
from npuserve.kernels.kv_cache import QUANTIZED, Cache, setting_of
from npuserve.kernels.quantized import Quantized
from npuserve.kernels.triton.common import (
    FLOATS,
    INT32,
    check,
    matrix,
    power,
    processors,
    rotary_dim,
    shared_memory,
    within,
)
from npuserve.kernels.triton.dependent import dependent
from npuserve.kernels.triton.kv_write import kv_write_kernel
from npuserve.kernels.triton.linear_tiles import SHARED_BYTES
from npuserve.kernels.triton.paged_attention import paged_attention_kernel

_MERGED = 8192
"""Float32 numbers that a program merges at a time: 64 registers for each of 128 threads."""

_LARGE = 144 << 10
"""Bytes of shared memory with which a program may take every configuration of `config`."""

_INTERPRETED_PROCESSORS = 4
"""Multiprocessors among which the work is divided if Triton interprets, which takes time for each program."""

_ARRIVED = 1 << 14
"""Counters of a device: the maximum number of parts of a launch."""


@dataclass(frozen=True, slots=True)
class Config:
    """Configuration of a launch.

    queries: rows of a tile, which are queries times the query heads of a KV head. A power of two.
    keys: keys processed at a time. A power of two, at least 16.

    programs: programs per multiprocessor among which the work is divided.
    least: minimum tokens of a part.
    warps, stages: warps and pipeline stages of a program.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    programs: int
    least: int


def config(
    chunks: bool, head_dim: int, activations: torch.dtype, cached: torch.dtype, tokens: int, shared: int = SHARED_BYTES
) -> Config:
    """Return the configuration of a call: the fastest of `CONFIGS` for Qwen3-14B's heads on an H200.

    shared: bytes of shared memory that a program may take. Ada has 99 KiB, with which fewer blocks are in flight.

    Exception: for more than 32 rows over a cache in bytes it is the configuration whose loop has the fewest
    instructions for a key. The block number is loaded before the block, so five stages have two iterations in flight,
    and seven stages three.

    Decode: few rows need many parts, and all of their bytes in flight. About 16 rows of 8 KV heads are one part for
    each multiprocessor. More rows have enough parts.

    Chunks: 128 rows make the two groups of four warps that wgmma takes. Few tokens use smaller tiles, to have more
    tiles.

    With as many keys as threads, a thread copies one scale of keys. With fewer, Triton gives each thread all the scales
    that its part of the scores takes: 16 copies for 64 keys and 256 threads.
    """
    wide, exact = power(max(head_dim, 16)), activations == torch.float32
    keys = max(16, min(128, (2048 if exact else 8192) // wide))
    small = shared < _LARGE and cached.itemsize > 1
    if not chunks:
        if exact:
            return Config(queries=16, keys=keys, warps=4, stages=3, programs=2, least=128)
        if tokens <= 8:
            return Config(queries=16, keys=keys, warps=4, stages=5 if small else 7, programs=2, least=64)
        if tokens <= 32 and wide == 128 and not small:
            return Config(queries=16, keys=128, warps=8, stages=5, programs=1, least=128)
        if cached.itemsize == 1:
            return Config(queries=16, keys=min(128, 2 * keys), warps=4, stages=5, programs=2, least=128)
        stages = 7 if tokens <= 128 and not small else 5
        return Config(queries=16, keys=keys, warps=4, stages=stages, programs=2, least=128)
    if exact:
        return Config(queries=16, keys=keys, warps=4, stages=2, programs=2, least=256)
    if wide > 128:
        return Config(queries=64, keys=keys, warps=8, stages=3, programs=1, least=256)
    if cached.itemsize == 1:
        return Config(queries=64, keys=128, warps=4, stages=2, programs=1, least=256)
    if tokens > 256:
        return Config(queries=128, keys=64, warps=8, stages=3 if small else 5, programs=1, least=256)
    return Config(queries=64, keys=64, warps=4, stages=3, programs=2, least=256)


CONFIGS = {
    False: [Config(16, *numbers) for numbers in (  # keys, warps, stages, programs, least
        (64, 4, 5, 2, 128), (64, 4, 5, 2, 64), (64, 4, 7, 2, 64), (64, 4, 7, 2, 128), (64, 4, 7, 3, 128),
        (32, 4, 5, 4, 128), (32, 4, 7, 4, 128), (64, 2, 5, 4, 128), (32, 2, 5, 6, 128), (32, 1, 5, 8, 128),
        (128, 8, 5, 1, 128), (128, 4, 5, 1, 128), (128, 4, 5, 2, 128), (64, 8, 7, 2, 128))],
    True: [Config(*numbers, 256) for numbers in (  # queries, keys, warps, stages, programs
        (64, 64, 4, 3, 2), (64, 64, 4, 4, 2), (64, 32, 4, 3, 3), (64, 32, 4, 5, 3), (64, 128, 4, 2, 1),
        (64, 128, 4, 3, 2), (128, 64, 8, 4, 1), (128, 64, 8, 5, 1), (128, 64, 8, 7, 1), (128, 128, 8, 3, 1))],
}
"""By `chunks`: candidates for `config` that are worth measuring, for heads of 128 in two bytes or one."""


def _check(
    q: Tensor, k_cache: Cache, v_cache: Cache, block_tables: Tensor, context_lens: Tensor, cu_seqlens_q: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Return keys, their scales, values, and their scales; None for scales of caches that are not quantized.

    Raises ValueError for a shape, dtype or device that the kernel `paged_attention` does not take.
    """
    if q.dim() != 3:
        raise ValueError(f"q: {list(q.shape)} is not [tokens, query heads, head_dim]")
    tokens, q_heads, dim = q.shape
    check("q", q, q.shape, FLOATS, q.device)
    (keys, k_scale), (values, v_scale) = _parts("k_cache", k_cache, q), _parts("v_cache", v_cache, q)
    if values.shape != keys.shape or values.dtype != keys.dtype:
        raise ValueError(f"v_cache: {list(values.shape)} {values.dtype} is not {list(keys.shape)} {keys.dtype}")
    size, kv_heads, cached_dim = keys.shape[1:]
    if cached_dim != dim:
        raise ValueError(f"k_cache: heads of {cached_dim} beside queries of {dim}")
    if dim % 2 or not 8 <= dim <= 256:
        raise ValueError(f"q: heads of {dim} are not even, from 8 to 256")
    if not q_heads or q_heads % kv_heads:
        raise ValueError(f"q: {q_heads} heads are not a multiple of {kv_heads} KV heads")
    if k_scale is not None and size % 2:
        raise ValueError(f"k_cache: blocks of {size} are not even: scales are read in pairs")
    group = q_heads // kv_heads
    within("query heads of a KV head", group, 1, 64)
    rows = len(context_lens)
    within("rows", rows, 0, 1 << 14)
    within("tokens", tokens, 0, INT32 // q_heads)
    check("context_lens", context_lens, (rows,), (torch.int32,), q.device)
    check("cu_seqlens_q", cu_seqlens_q, (rows + 1,), (torch.int32,), q.device)
    if (block_tables.dim() != 2 or len(block_tables) != rows or block_tables.dtype != torch.int32
            or (block_tables.shape[1] > 1 and block_tables.stride(1) != 1) or block_tables.device != q.device):
        raise ValueError(f"block_tables: not {rows} rows of int32 on {q.device}, each contiguous: "
                         f"{list(block_tables.shape)} {block_tables.dtype} on {block_tables.device}")
    return keys, k_scale, values, v_scale


def paged_attention(
    q: Tensor, k_cache: Cache, v_cache: Cache, block_tables: Tensor, context_lens: Tensor, cu_seqlens_q: Tensor,
    scale: float, one_each: bool, decode: Config | None = None, chunks: Config | None = None,
) -> Tensor:
    """Launch the kernel `paged_attention`.

    one_each: True if each row has one query and each query a row.
    decode, chunks: replace `config`.

    Raises ValueError.
    """
    keys, k_scale, values, v_scale = _check(q, k_cache, v_cache, block_tables, context_lens, cu_seqlens_q)
    (tokens, q_heads, dim), rows = q.shape, len(context_lens)
    size, kv_heads = keys.shape[1:3]
    group = q_heads // kv_heads
    if not (0 < scale < math.inf):
        raise ValueError(f"scale: {scale} is not above 0 and finite")
    if one_each and tokens != rows:
        raise ValueError(f"one_each: {tokens} queries of {rows} rows")
    out = torch.empty(tokens, q_heads * dim, dtype=q.dtype, device=q.device)
    if not rows:
        return out.zero_()

    scales = [None if scale is None else scale.view(-1).view(torch.int32) for scale in (k_scale, v_scale)]
    for chunked, chosen in ((False, decode), (True, chunks)):
        if not tokens or (chunked and one_each):
            continue
        chosen = chosen or config(chunked, dim, q.dtype, keys.dtype, tokens, shared_memory(q.device))
        made = plan_launch(chosen, chunked, tokens, rows, q_heads, kv_heads, dim, size, block_tables.shape[1] * size,
                           processors(q.device) if q.is_cuda else _INTERPRETED_PROCESSORS)
        lines = made.constants["BLOCK_M"] // group * group if chunked else group
        partial = torch.empty(made.slots, lines, dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(made.slots, 2, lines, dtype=torch.float32, device=q.device)
        kind = words_of(keys.dtype, chunked, dim)
        parts = [cache.view(torch.int32) if kind else cache for cache in (keys, values)]
        paged_attention_kernel[(made.programs,)](
            q, *parts, *scales, block_tables, context_lens, cu_seqlens_q, out, partial, stats,
            _arrived(q.device, made.slots), tokens, rows, block_tables.stride(0), scale * math.log2(math.e),
            BYTES=kind, **made.constants, **made.options, **dependent(q))
    return out


def words_of(cached: torch.dtype, chunks: bool, dim: int) -> str:
    """Return the kernel's BYTES: the setting of a cache that is read in words of four numbers, or "".

    Chunks read single numbers, since their products take keys and values from shared memory.
    """
    return "" if chunks or dim % 4 or dim <= 32 or setting_of(cached) == "auto" else setting_of(cached)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Grid of a launch, slots for the parts to merge, and compile-time constants."""

    programs: int
    slots: int
    constants: dict[str, Any]
    options: dict[str, int]


def plan_launch(
    chosen: Config, chunks: bool, tokens: int, rows: int, q_heads: int, kv_heads: int, dim: int, size: int, reach: int,
    processors: int,
) -> LaunchPlan:
    """Divide a launch into programs, by shapes only.

    reach: maximum context that the blocks of a row can hold, in tokens.
    """
    group, wide = q_heads // kv_heads, power(max(dim, 16))
    height = max(16, chosen.queries if chunks else 0, power(group))
    a_tile = height // group if chunks else 1
    parts = chosen.programs * processors
    longer = min(rows, tokens // 2)
    tiles = (tokens + longer * (a_tile - 1)) // a_tile if chunks else min(rows, tokens)
    # A tile has at most the parts of its share of the work, plus one; none is far below `least`.
    items = min(parts // kv_heads + tiles, tiles * max(1, (reach + chosen.least // 2) // chosen.least))
    merged_rows = min(8, power(a_tile * group))
    return LaunchPlan(
        (items + chunks) * kv_heads, min(4 * parts // 3, items * kv_heads),
        {"CHUNKS": chunks, "KV_HEADS": kv_heads, "GROUP": group, "D": dim, "D_BLOCK": wide, "SIZE": size,
         "ROWS": _rows(rows), "BLOCK_M": height, "BLOCK_N": chosen.keys, "PROGRAMS": parts,
         "LEAST_PART": chosen.least, "MERGED_ROWS": merged_rows, "MERGED": max(1, _MERGED // (merged_rows * wide)),
         "WIDE": triton.DEVICE == "cpu"},
        {"num_warps": chosen.warps, "num_stages": chosen.stages})


def qk_norm_rope_kv_write(
    qkv: Tensor,
    q_gamma: Tensor | None,
    k_gamma: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Cache,
    v_cache: Cache,
    num_q_heads: int,
) -> Tensor:
    """Launch the kernel `qk_norm_rope_kv_write`; positions and slots are not range-checked. Raises ValueError."""
    matrix("qkv", qkv, qkv.device)
    tokens, width = qkv.shape
    (keys, k_scale), (values, v_scale) = _parts("k_cache", k_cache, qkv), _parts("v_cache", v_cache, qkv)
    if values.shape != keys.shape or values.dtype != keys.dtype:
        raise ValueError(f"v_cache: {list(values.shape)} {values.dtype} is not {list(keys.shape)} {keys.dtype}")
    kv_heads, dim = keys.shape[2:]
    within("columns of qkv", width, 1, INT32 // 4)
    within("num_q_heads", num_q_heads, 1, width)
    if dim % 2 or not 2 <= dim <= 256:
        raise ValueError(f"k_cache: heads of {dim} are not even, from 2 to 256")
    if width != (num_q_heads + 2 * kv_heads) * dim:
        raise ValueError(f"qkv: {width} columns are not ({num_q_heads} + 2 * {kv_heads}) heads of {dim}")
    for name, gamma in (("q_gamma", q_gamma), ("k_gamma", k_gamma)):
        if gamma is not None:
            check(name, gamma, (dim,), (qkv.dtype, torch.float32), qkv.device)
    rotary = rotary_dim("cos_sin", cos_sin, dim, qkv.device)
    for name, tensor in (("positions", positions), ("slot_mapping", slot_mapping)):
        check(name, tensor, (tokens,), (torch.int64,), qkv.device)
    # A thread has 16 bytes of each half of a head of 128. Many tokens need fewer programs each.
    heads = 4 if tokens <= 64 else 8
    programs = -(-num_q_heads // heads) + 2 * -(-kv_heads // heads)
    within("tokens of qkv", tokens, 0, INT32 // programs)
    q = torch.empty(tokens, num_q_heads, dim, dtype=qkv.dtype, device=qkv.device)
    if tokens:
        kv_write_kernel[(tokens * programs,)](
            qkv, q_gamma, k_gamma, cos_sin, positions, slot_mapping, keys, values, k_scale, v_scale, q,
            eps, qkv.stride(0), Q_HEADS=num_q_heads, KV_HEADS=kv_heads, HALF=rotary // 2,
            HALF_BLOCK=power(rotary // 2), REST=dim - rotary, REST_BLOCK=power(max(1, dim - rotary)), HEADS=heads,
            num_warps=heads // 4, **dependent(qkv))
    return q


_counters: dict[torch.device, Tensor] = {}


def _arrived(device: torch.device, count: int) -> Tensor:
    """Return zeros, which each launch leaves at zero; a device runs one launch at a time."""
    within("parts of a launch", count, 0, _ARRIVED)
    if device not in _counters:
        _counters[device] = torch.zeros(_ARRIVED, dtype=torch.int32, device=device)
    return _counters[device]


def _rows(rows: int) -> int:
    """Return a power of two that is at least `rows`. It takes few values, since each is compiled."""
    return next((n for n in (1, 16, 64, 256) if rows <= n), power(rows))


def _parts(name: str, cache: Cache, q: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return (numbers, scales or None) of a cache after checking them."""
    numbers, scale = (cache.values, cache.scale) if isinstance(cache, Quantized) else (cache, None)
    if numbers.dim() != 4:
        raise ValueError(f"{name}: {list(numbers.shape)} is not [blocks, block_size, KV heads, head_dim]")
    check(name, numbers, tuple(numbers.shape), tuple(QUANTIZED.values()) if scale is not None else (q.dtype,), q.device)
    if scale is not None:
        check(f"scale of {name}", scale, tuple(numbers.shape[:3]), (torch.bfloat16,), q.device)
    return numbers, scale
