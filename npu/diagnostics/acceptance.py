"""Measurements of `npuserve check --accept` on a device, beside kernels (kernels/bench/measure.py) and tokens."""

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
from npuserve.kernels.kv_cache import QUANTIZED
from npuserve.kernels.registry import KernelSet, Span
from npuserve.npu.backends.base import Backend, Captured
from npuserve.npu.backends.cpu import CpuBackend
from npuserve.npu.diagnostics.differences import norm_of
from npuserve.npu.diagnostics.machine import capture_bucket
from npuserve.npu.execution.batch import BatchBuffers, make_batch
from npuserve.npu.execution.decoder import Model
from npuserve.npu.execution.memory_plan import predict
from npuserve.npu.execution.runner import Runner
from npuserve.npu.execution.state_store import StateStore
from npuserve.npu.model.config import HeadDtype, ModelConfig
from npuserve.npu.model.loader import load_weights
from npuserve.npu.model.rope import cos_sin_table
from npuserve.npu.step import Row

REPEATS = 5
READ_BYTES = 1 << 30

MAX_PROMPT_TOKENS = 8
"""Maximum tokens of the prompts of the rows on which captures are compared: neighbouring rows differ in length."""


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
    config = ModelConfig.from_folder(folder, lm_head_dtype)
    plan = predict(config, backend, dtype=dtype, max_model_len=max_model_len, block_size=block_size,
                   kv_cache_dtype=kv_cache_dtype, kv_cache_memory=kv_cache_memory, max_num_seqs=max_num_seqs,
                   max_num_batched_tokens=max_num_batched_tokens)
    plan.require_fit()
    weights = load_weights(folder, config, getattr(torch, plan.dtype), backend)
    runner = Runner(
        backend, weights, config, plan.num_blocks, plan.block_size, max_model_len=plan.max_model_len,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, kv_cache_dtype=kv_cache_dtype)
    cos_sin = cos_sin_table(config.rope, config.rotary_dim, plan.max_model_len, backend.device)
    return Loaded(runner, Model(config, weights, cos_sin, KernelSet(backend.kernels)), backend)


def load_reference(
    folder: Path, of: Backend, dtype: str, max_model_len: int, threads: int, lm_head_dtype: HeadDtype = "auto",
    kv_cache_dtype: str = "auto",
) -> tuple[Model, Backend]:
    """Load the same model on the CPU, with the int8 levels and the cache's scales of the device `of`.

    It uses the native kernels, or only golden functions if `of` is the CPU, or if the native kernels do not take the
    model's float8 layers or the device's quantized KV cache. Raises ModelError if the host has not enough memory.
    """
    config, cached = ModelConfig.from_folder(folder, lm_head_dtype), QUANTIZED.get(kv_cache_dtype)
    float8 = config.quantization is not None and config.quantization.has_float8
    other = cached and (cached not in CpuBackend.cache_dtypes or of.scale_dtype != CpuBackend.scale_dtype)
    backend = CpuBackend(native=False) if isinstance(of, CpuBackend) or other or float8 else CpuBackend()
    backend.float8 = float8
    backend.set_threads(threads)
    backend.int8_levels, backend.scale_dtype, backend.cache_dtypes = of.int8_levels, of.scale_dtype, of.cache_dtypes
    predict(config, backend, dtype=dtype, max_model_len=max_model_len, max_num_seqs=1).require_fit()
    weights = load_weights(folder, config, getattr(torch, dtype), backend)
    cos_sin = cos_sin_table(config.rope, config.rotary_dim, max_model_len, backend.device)
    return Model(config, weights, cos_sin, KernelSet(backend.kernels)), backend


def reference_runner(
    model: Model, backend: Backend, rows: int, tokens: int, kv_cache_dtype: str = "auto"
) -> Runner:
    """Return a runner of a reference for steps of `rows` rows and `tokens` tokens, with the reference's weights."""
    length = min(len(model.cos_sin), tokens)
    blocks = rows * -(-length // backend.block_size)
    return Runner(
        backend, model.weights, model.config, blocks, backend.block_size, max_model_len=length, max_num_seqs=rows,
        max_num_batched_tokens=tokens, kv_cache_dtype=kv_cache_dtype)


def bandwidth(backend: Backend) -> float:
    """Return the bandwidth of the device's memory in bytes per second.

    It is the best of several copies (reads and writes) and of several sums in plain torch; on the CPU that of
    `Ceilings`.
    """
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
    """Captured decode step compared with single kernel calls.

    rows: number of rows of the bucket.
    seconds: duration of the capture.
    nbytes: device memory that the capture took.
    difference: || captured - single || / || single || of the hidden states; 0 if bit-identical, infinite for NaN.
    padded_difference: `difference` with one padding row in the captured step.
    replay_seconds, single_seconds: decoder time as one dispatch and kernel by kernel, on the device's clock.
    """

    rows: int
    seconds: float
    nbytes: int
    difference: float
    padded_difference: float
    replay_seconds: float
    single_seconds: float


def buckets(loaded: Loaded, largest: int) -> Iterator[Bucket]:
    """Yield the buckets that the backend captures for up to `largest` rows, one at a time, largest first.

    Yields none if the backend captures nothing, and only the largest if a dispatch serves any number of rows. Raises
    BackendError as `Backend.capture` does.
    """
    model, backend = loaded.model, loaded.backend
    size = backend.block_size
    cache = StateStore.allocate(model.config, largest, size, loaded.runner.cache_dtype, backend)
    buffers = BatchBuffers(largest, largest, 1, size, largest if backend.padding_blocks else None, backend)

    def step(rows: int) -> Tensor:
        return model.hidden(buffers.decode(rows), cache)

    with torch.inference_mode():
        captured = backend.capture(step, largest, decode=True)
    if captured is None:
        return
    sizes = sorted({captured.size(rows) for rows in range(1, captured.largest + 1)})
    if len(sizes) == captured.largest:
        sizes = [captured.largest]
    rows = _decode_rows(model, backend, cache, sizes[-1])
    del captured
    for count in reversed(sizes):
        began, free = time.perf_counter(), backend.memory_available()
        captured = capture_bucket(backend, step, count)
        assert captured
        seconds, nbytes = time.perf_counter() - began, max(0, free - backend.memory_available())
        compared = [
            backend.enqueue(partial(_compare, captured, rows[:n], loaded, buffers, cache, captured.size(n))).wait()
            for n in (count, max(1, count - 1))]
        backend.synchronize()
        replays, singles = zip(*compared[0][1], strict=True)
        yield Bucket(count, seconds, nbytes, compared[0][0], compared[1][0],
                     *(statistics.median(span.read() for span in spans) for spans in (replays, singles)))


def _decode_rows(model: Model, backend: Backend, cache: StateStore, count: int) -> list[Row]:
    """Return decode rows after prompts of 1 to MAX_PROMPT_TOKENS tokens, whose keys and values are in the cache."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (count, MAX_PROMPT_TOKENS + 1), generator=generator).tolist()
    lengths = [1 + row % MAX_PROMPT_TOKENS for row in range(count)]
    prompts = [Row(row, ids[row][: lengths[row]], 0, [row], True) for row in range(count)]

    def prefill() -> None:
        model.hidden(make_batch(prompts, backend.block_size, backend), cache)

    backend.enqueue(prefill).wait()
    backend.synchronize()
    return [Row(row, ids[row][-1:], lengths[row], [row], True) for row in range(count)]


def _compare(
    captured: Captured, rows: list[Row], loaded: Loaded, buffers: BatchBuffers, cache: StateStore, size: int
) -> tuple[float, list[tuple[Span, Span]]]:
    """Return the difference, and the spans of replays and of single calls."""
    staged = buffers.fill([(rows, size)])
    staged.upload()
    part = staged.parts[0]
    got = captured.replay(part.tokens, part.context_lens, part.cu_seqlens).to("cpu", copy=True)
    batch = buffers.batch(part)
    want = loaded.model.hidden(batch, cache)
    spans = [(_spanned(loaded.backend, lambda: captured.replay(part.tokens, part.context_lens, part.cu_seqlens)),
              _spanned(loaded.backend, lambda: loaded.model.hidden(batch, cache))) for _ in range(REPEATS)]
    return norm_of(got, want), spans


def _spanned(backend: Backend, run: Callable[[], Tensor]) -> Span:
    span = backend.span()
    run()
    span.stop()
    return span
