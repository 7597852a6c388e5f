"""What `npuserve check --accept` measures on a device, beside the kernels (kernels/bench/measure.py) and the tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from npuserve.kernels.bench.ceilings import Ceilings
from npuserve.kernels.registry import KernelSet, Span
from npuserve.npu.backends.base import Backend, Captured
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.execution.batch import BatchBuffers, make_batch
from npuserve.npu.execution.decoder import Model
from npuserve.npu.execution.kv_cache import KVCache
from npuserve.npu.execution.memory_plan import predict
from npuserve.npu.execution.runner import Runner
from npuserve.npu.model.config import HeadDtype, ModelConfig
from npuserve.npu.model.loader import load_weights
from npuserve.npu.model.rope import cos_sin_table
from npuserve.npu.step import Row

REPEATS = 5
READ_BYTES = 1 << 30

LONGEST_PROMPT = 8
"""Tokens of the rows with which graphs are tried: each row's context is another than its neighbours'."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on a device: to be served, and its layers by themselves, with the same weights."""

    runner: Runner
    model: Model
    backend: Backend


def load(
    folder: Path, backend: Backend, dtype: str, *, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int,
    block_size: int = 0, kv_cache_dtype: str = "auto", kv_cache_memory: int = 0, lm_head_dtype: HeadDtype = "auto",
) -> Loaded:
    """As `load_runner` does, and raises. The KV cache is for so many requests of that length, or less if it does not
    fit."""
    config = ModelConfig.from_folder(folder, lm_head_dtype)
    plan = predict(config, backend, dtype=dtype, max_model_len=max_model_len, block_size=block_size,
                   kv_cache_dtype=kv_cache_dtype, kv_cache_memory=kv_cache_memory, max_num_seqs=max_num_seqs,
                   max_num_batched_tokens=max_num_batched_tokens)
    plan.require_fit()
    weights = load_weights(folder, config, getattr(torch, plan.dtype), backend)
    runner = Runner(
        backend, weights, config, plan.num_blocks, plan.block_size, max_model_len=plan.max_model_len,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, kv_cache_dtype=kv_cache_dtype)
    cos_sin = cos_sin_table(config.rope, config.head_dim, plan.max_model_len, backend.device)
    return Loaded(runner, Model(config, weights, cos_sin, KernelSet(backend.kernels)), backend)


def load_reference(
    folder: Path, of: Backend, dtype: str, max_model_len: int, threads: int, lm_head_dtype: HeadDtype = "auto"
) -> tuple[Model, Backend]:
    """The same model on the CPU, int8 being of the device's levels: with its native kernels, and with the golden
    functions alone where `of` is the CPU itself. Raises ModelError where the host has no memory for it."""
    backend = CpuBackend(native=False) if isinstance(of, CpuBackend) else CpuBackend()
    backend.set_threads(threads)
    backend.int8_levels = of.int8_levels
    config = ModelConfig.from_folder(folder, lm_head_dtype)
    predict(config, backend, dtype=dtype, max_model_len=max_model_len, max_num_seqs=1).require_fit()
    weights = load_weights(folder, config, getattr(torch, dtype), backend)
    cos_sin = cos_sin_table(config.rope, config.head_dim, max_model_len, backend.device)
    return Model(config, weights, cos_sin, KernelSet(backend.kernels)), backend


def bandwidth(backend: Backend) -> float:
    """Bytes a second of the device's memory: the best of several copies, which read and write, and of several sums, by
    plain torch; on the CPU that of `Ceilings`."""
    size = min(READ_BYTES, backend.memory_available() // 16)
    if isinstance(backend, CpuBackend):
        ceilings = Ceilings(size)
        return max(ceilings.read() for _ in range(REPEATS))

    def work() -> list[tuple[int, Span]]:
        source = torch.ones(size // 4, dtype=torch.float32, device=backend.device)
        target = torch.zeros_like(source)
        passes: tuple[tuple[int, Callable[[], Tensor]], ...] = (
            (2 * source.nbytes, lambda: target.copy_(source)), (source.nbytes, source.sum))
        return [(nbytes, _spanned(backend, run)) for nbytes, run in passes * (REPEATS + 1)]

    spans = backend.enqueue(work).wait()[2:]
    backend.synchronize()
    return max(nbytes / span.read() for nbytes, span in spans)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A decode step captured for so many rows.

    seconds, nbytes: what the capture took. difference: || captured - kernel by kernel || / || kernel by kernel || of
    hidden states, 0 where they are the same to the last bit; padded_difference: where one row is padding, which the
    single kernels do without. replay_seconds, single_seconds: of the decoder, as one dispatch and kernel by kernel, on
    the device's clock.
    """

    rows: int
    seconds: float
    nbytes: int
    difference: float
    padded_difference: float
    replay_seconds: float
    single_seconds: float


def buckets(loaded: Loaded, largest: int) -> Iterator[Bucket]:
    """The buckets that the backend captures for so many rows, one by one, the largest first; none where it captures
    nothing. A dispatch for any number of rows is one of the largest. Raises BackendError as `Backend.capture` does."""
    model, backend = loaded.model, loaded.backend
    size, chosen = backend.block_size, backend.decode_buckets
    cache = KVCache.allocate(model.config, largest, size, loaded.runner.cache_dtype, backend)
    buffers = BatchBuffers(largest, largest, 1, size, largest if backend.padding_blocks else None, backend)

    def capture(rows: int) -> Captured | None:
        with torch.inference_mode():
            return backend.capture(lambda n: model.hidden(buffers.decode(n), cache), rows, decode=True)

    captured = capture(largest)
    if captured is None:
        return
    sizes = sorted({captured.size(rows) for rows in range(1, captured.largest + 1)})
    if len(sizes) == captured.largest:
        sizes = [captured.largest]
    rows = _decode_rows(model, backend, cache, sizes[-1])
    del captured
    try:
        for count in reversed(sizes):
            backend.decode_buckets = (count,)
            began, free = time.perf_counter(), backend.memory_available()
            captured = capture(count)
            assert captured
            seconds, nbytes = time.perf_counter() - began, max(0, free - backend.memory_available())
            compared = [
                backend.enqueue(partial(_compare, captured, rows[:n], loaded, buffers, cache, captured.size(n))).wait()
                for n in (count, max(1, count - 1))]
            backend.synchronize()
            replays, singles = zip(*compared[0][1], strict=True)
            yield Bucket(count, seconds, nbytes, compared[0][0], compared[1][0],
                         *(statistics.median(span.read() for span in spans) for spans in (replays, singles)))
    finally:
        backend.decode_buckets = chosen


def _decode_rows(model: Model, backend: Backend, cache: KVCache, count: int) -> list[Row]:
    """Rows of one token after prompts of 1 to LONGEST_PROMPT tokens, whose keys and values are in the cache."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (count, LONGEST_PROMPT + 1), generator=generator).tolist()
    lengths = [1 + row % LONGEST_PROMPT for row in range(count)]
    prompts = [Row(row, ids[row][: lengths[row]], 0, [row], True) for row in range(count)]

    def prefill() -> None:
        model.hidden(make_batch(prompts, backend.block_size, backend), cache)

    backend.enqueue(prefill).wait()
    backend.synchronize()
    return [Row(row, ids[row][-1:], lengths[row], [row], True) for row in range(count)]


def _compare(
    captured: Captured, rows: list[Row], loaded: Loaded, buffers: BatchBuffers, cache: KVCache, size: int
) -> tuple[float, list[tuple[Span, Span]]]:
    """(difference, spans of replays and of single calls)."""
    staged = buffers.fill([(rows, size)])
    staged.upload()
    part = staged.parts[0]
    got = captured.replay(part.tokens, part.context_lens).to("cpu", torch.float64, copy=True)
    batch = buffers.batch(part)
    want = loaded.model.hidden(batch, cache).to("cpu", torch.float64)
    spans = [(_spanned(loaded.backend, lambda: captured.replay(part.tokens, part.context_lens)),
              _spanned(loaded.backend, lambda: loaded.model.hidden(batch, cache))) for _ in range(REPEATS)]
    return float((got - want).norm() / want.norm()), spans


def _spanned(backend: Backend, run: Callable[[], Tensor]) -> Span:
    span = backend.span()
    run()
    span.stop()
    return span
