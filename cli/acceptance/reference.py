"""Models beside the engine: the device's and the reference on the CPU, and their logits.

Logits are computed at every position of given sequences or steps as the engine does: in chunks, several sequences per
step, over a paged cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from npuserve.kernels.kv_cache import QUANTIZED
from npuserve.kernels.native import available
from npuserve.kernels.registry import KernelSet
from npuserve.npu.backends.base import Backend, DeviceSettings
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution.batch import make_batch
from npuserve.npu.execution.decoder import Model
from npuserve.npu.execution.load import chunk_obstacle
from npuserve.npu.execution.memory_plan import predict
from npuserve.npu.execution.runner import Runner
from npuserve.npu.execution.state_store import StateStore
from npuserve.npu.model.config import HeadDtype, ModelConfig
from npuserve.npu.model.loader import load_weights
from npuserve.npu.step import Row

SEQUENCES_PER_STEP = 4
"""Number of sequences per step, and in the cache."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Model on a device: its runner, and its decoder with the same weights."""

    runner: Runner
    model: Model
    backend: Backend


def load(
    folder: Path, backend: Backend, dtype: str, *, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int,
    block_size: int = 0, kv_cache_dtype: str = "auto", kv_cache_memory: int = 0, lm_head_dtype: HeadDtype = "auto",
) -> Loaded:
    """Load a model as `load_runner` does, with the same exceptions.

    The KV cache holds max_num_seqs requests of max_model_len tokens, or fewer if they do not fit.
    """
    can = backend.capabilities
    config = ModelConfig.from_folder(folder, lm_head_dtype, float8=can.float8, int4=can.int4, stacks=can.stacks)
    plan = predict(config, backend, dtype=dtype, max_model_len=max_model_len, block_size=block_size,
                   kv_cache_dtype=kv_cache_dtype, kv_cache_memory=kv_cache_memory, max_num_seqs=max_num_seqs,
                   max_num_batched_tokens=max_num_batched_tokens)
    plan.require_fit()
    weights = load_weights(folder, config, getattr(torch, plan.dtype), backend)
    runner = Runner(
        backend, weights, config, plan.num_blocks, plan.block_size, max_model_len=plan.max_model_len,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, kv_cache_dtype=kv_cache_dtype,
        num_slots=plan.num_slots, capture_chunks=not chunk_obstacle(config, backend, dtype, kv_cache_dtype))
    model = Model.of(config, weights, plan.max_model_len, KernelSet(backend.kernels, own=backend.own_kernels), backend)
    return Loaded(runner, model, backend)


def load_reference(
    folder: Path, of: Backend, dtype: str, max_model_len: int, threads: int, lm_head_dtype: HeadDtype = "auto",
    kv_cache_dtype: str = "auto",
) -> tuple[Model, Backend]:
    """Load the same model on the CPU, with int8 levels, scales of the cache and dtype of states of the device `of`.

    It uses the native kernels, or only golden functions if `of` is the CPU, or if the native kernels do not take the
    model's float8 layers, the device's quantized KV cache or its states: those of linear attention are then rounded at
    the ends of chunks, as on the device. Raises ModelError if the host has not enough memory.
    """
    config = ModelConfig.from_folder(folder, lm_head_dtype, float8=of.capabilities.float8, int4=of.capabilities.int4)
    cached = QUANTIZED.get(kv_cache_dtype)
    float8 = config.has_float8
    own = CpuBackend.capabilities
    other = cached and (cached not in own.cache_dtypes or of.capabilities.scale_dtype != own.scale_dtype)
    states = of.state_dtype(getattr(torch, dtype))
    other_states = config.has_fixed_state and states != torch.float32
    is_golden = isinstance(of, CpuBackend) or other or float8 or other_states
    state_dtype = str(states).removeprefix("torch.") if other_states else "float32"
    backend = CpuBackend(
        native=available() and not is_golden,
        settings=DeviceSettings(threads=threads, state_dtype=state_dtype, int8_levels=of.capabilities.int8_levels),
        capabilities=replace(
            own, float8=float8, scale_dtype=of.capabilities.scale_dtype, cache_dtypes=of.capabilities.cache_dtypes,
            state_dtypes=(state_dtype,)))
    predict(config, backend, dtype=dtype, max_model_len=max_model_len, max_num_seqs=1).require_fit()
    weights = load_weights(folder, config, getattr(torch, dtype), backend)
    kernels = KernelSet(backend.kernels, own=backend.own_kernels)
    return Model.of(config, weights, max_model_len, kernels, backend), backend


def reference_runner(
    model: Model, backend: Backend, rows: int, tokens: int, kv_cache_dtype: str = "auto"
) -> Runner:
    """Return a runner of a reference for steps of `rows` rows and `tokens` tokens, with the reference's weights."""
    length = min(len(model.cos_sin), tokens)
    block_size = backend.capabilities.block_size
    blocks = rows * -(-length // block_size)
    return Runner(
        backend, model.weights, model.config, blocks, block_size, max_model_len=length, max_num_seqs=rows,
        max_num_batched_tokens=tokens, kv_cache_dtype=kv_cache_dtype, num_slots=model.config.slots_of(rows))


class SavedSlots:
    """Fixed state of a store, from which a step can be computed again."""

    def __init__(self, store: StateStore):
        self._saved = [(tensor, tensor.clone()) for tensor in store.fixed]

    def restore(self) -> None:
        """Queue the copies of the saved state to the store."""
        for tensor, saved in self._saved:
            tensor.copy_(saved)


def forced_logits(
    model: Model, backend: Backend, sequences: Sequence[Sequence[int]], budget: int, block_size: int = 0,
    cache_dtype: torch.dtype | None = None,
) -> Iterator[Tensor]:
    """Yield the logits of each sequence in order, [tokens, vocabulary] float32 on the host.

    budget: maximum tokens per step.
    block_size: tokens of a block; 0 for the backend's default.
    cache_dtype: dtype of the KV cache; None for the weights' dtype.
    """
    size = block_size or backend.capabilities.block_size
    per_row = -(-max(map(len, sequences)) // size)
    cache = StateStore.allocate(
        model.config, per_row * SEQUENCES_PER_STEP, size, cache_dtype or model.weights.dtype, backend,
        model.config.slots_of(SEQUENCES_PER_STEP), model.weights.dtype)
    for first in range(0, len(sequences), SEQUENCES_PER_STEP):
        group = sequences[first : first + SEQUENCES_PER_STEP]
        parts: list[list[Tensor]] = [[] for _ in group]
        done = [0] * len(group)
        while rows := _rows(group, done, budget, per_row, size):
            logits = backend.enqueue(partial(_step, model, backend, rows, cache, size)).wait()
            for row, part in zip(rows, logits.split([len(r.token_ids) for r in rows]), strict=True):
                parts[row.request_id].append(part)
                done[row.request_id] += len(row.token_ids)
        yield from map(torch.cat, parts)


def step_logits(
    model: Model, backend: Backend, steps: Sequence[list[Row]], blocks: int, block_size: int,
    cache_dtype: torch.dtype | None = None,
) -> Iterator[Tensor]:
    """Yield the logits of each step's tokens, [tokens, vocabulary] float32 on the host.

    blocks: number of blocks of the cache, which the steps' rows name.
    cache_dtype: dtype of the KV cache; None for the weights' dtype.
    """
    slots = model.config.slots_of(1 + max(row.state_slot for rows in steps for row in rows))
    cache = StateStore.allocate(
        model.config, blocks, block_size, cache_dtype or model.weights.dtype, backend, slots, model.weights.dtype)
    for rows in steps:
        yield backend.enqueue(partial(_step, model, backend, rows, cache, block_size)).wait()


def _rows(group: Sequence[Sequence[int]], done: list[int], budget: int, per_row: int, size: int) -> list[Row]:
    rows = []
    for place, ids in enumerate(group):
        part = list(ids[done[place] : done[place] + budget])
        if part:
            end = done[place] + len(part)
            blocks = list(range(place * per_row, place * per_row + -(-end // size)))
            rows.append(Row(place, part, done[place], blocks, 0, state_slot=place))
            budget -= len(part)
    return rows


def _step(model: Model, backend: Backend, rows: list[Row], cache: StateStore, size: int) -> Tensor:
    cache.copy_slots([(row.state_source, row.state_slot) for row in rows if row.state_source >= 0], backend)
    batch = make_batch(rows, size, backend, model.config.slots_of(len(rows)))
    logits = model.logits(model.hidden(batch, cache))
    return logits[:, : model.config.vocab_size].to("cpu", torch.float32, copy=True)
