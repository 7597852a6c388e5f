"""Capture part of the acceptance check: each captured step compared with the same kernels one by one.

Decode steps are compared after short prompts. Steps with chunks are compared as in `replays`: the cache holds random
numbers, and the first layers of the model serve.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from npuserve.cli.acceptance.latency import spanned
from npuserve.cli.acceptance.reference import Loaded, SavedSlots
from npuserve.cli.acceptance.replays import randomize, shortened
from npuserve.cli.acceptance.report import Finding
from npuserve.cli.bench.differences import norm_of
from npuserve.kernels.registry import Span
from npuserve.npu.backends.base import Backend, Captured
from npuserve.npu.backends.machine import capture_bucket
from npuserve.npu.execution.batch import BatchBuffers, make_batch
from npuserve.npu.execution.decoder import Model
from npuserve.npu.execution.state_store import StateStore
from npuserve.npu.step import Row

CAPTURE_TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""Maximum difference of a bucket's hidden states by dtype: the effect of other tilings of the same kernels. Wrong
lengths cause far larger differences."""

REPEATS = 5
"""Timed replays of a bucket."""

MAX_PROMPT_TOKENS = 8
"""Maximum tokens of the prompts of the rows on which captures are compared: neighbouring rows differ in length."""

CHUNK_TOKENS = 512
"""Tokens of the largest step."""

SHORT = (2, 2)
LONG = (1100, 960)
"""Context of the decode row, and tokens before the chunk. A wrong length changes attention most over a short context.
From 1,024 tokens on CANN chooses other tilings."""


def check_captures(loaded: Loaded, largest: int) -> Iterator[Finding]:
    """Yield a finding for each bucket that the backend captures for up to `largest` rows: time, memory, difference.
    Then yield the difference of each captured size of steps with chunks."""
    tolerance = CAPTURE_TOLERANCE[loaded.runner.dtype_name]
    for bucket in buckets(loaded, largest):
        yield Finding(
            "capture", f"{bucket.rows} rows",
            f"{bucket.seconds:.2f} s, {bucket.nbytes / 2**20:.1f} MiB; {_equality(bucket.difference)}, padded "
            f"{bucket.padded_difference:.1e}; {bucket.replay_seconds * 1e3:.3f} ms, kernel by kernel "
            f"{bucket.single_seconds * 1e3:.3f} ms",
            max(bucket.difference, bucket.padded_difference) <= tolerance,
            {name: getattr(bucket, name) for name in bucket.__slots__},
            "the captured step and its kernels compute different results: serve with --decode-buckets without this "
            "size, and send this report")
    for mixed in chunk_buckets(loaded):
        yield Finding(
            "capture", f"{mixed.tokens} tokens",
            f"a decode row and a chunk: {_equality(mixed.difference)}, over 1,100 tokens and padded "
            f"{mixed.long_difference:.1e}", max(mixed.difference, mixed.long_difference) <= tolerance,
            {name: getattr(mixed, name) for name in mixed.__slots__},
            "the captured step and its kernels compute different results: serve with --no-capture-chunks, and send "
            "this report")


def _equality(difference: float) -> str:
    return f"difference {difference:.1e}" if difference else "the same bits"


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
    model = loaded.model
    backend = loaded.backend
    size = backend.capabilities.block_size
    slots = model.config.slots_of(largest)
    cache = StateStore.allocate(
        model.config, largest, size, loaded.runner.cache_dtype, backend, slots, model.weights.dtype)
    buffers = BatchBuffers(
        largest, largest, 1, size, largest if backend.capabilities.padding_blocks else None, backend, num_slots=slots)

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
        began = time.perf_counter()
        free = backend.memory.available()
        captured = capture_bucket(backend, step, count)
        assert captured
        seconds = time.perf_counter() - began
        nbytes = max(0, free - backend.memory.available())
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
    prompts = [Row(row, ids[row][: lengths[row]], 0, [row], 1, state_slot=row) for row in range(count)]

    def prefill() -> None:
        model.hidden(make_batch(prompts, backend.capabilities.block_size, backend, model.config.slots_of(count)), cache)

    backend.enqueue(prefill).wait()
    backend.synchronize()
    return [Row(row, ids[row][-1:], lengths[row], [row], 1, state_slot=row) for row in range(count)]


def _compare(
    captured: Captured, rows: list[Row], loaded: Loaded, buffers: BatchBuffers, cache: StateStore, size: int
) -> tuple[float, list[tuple[Span, Span]]]:
    """Return the difference, and the spans of replays and of single calls."""
    staged = buffers.fill([(rows, size)])
    staged.upload()
    part = staged.parts[0]
    before = SavedSlots(cache)
    got = captured.replay(part.tokens, part.context_lens, part.cu_seqlens).to("cpu", copy=True)
    before.restore()
    batch = buffers.batch(part)
    want = loaded.model.hidden(batch, cache).clone()
    spans = [(spanned(loaded.backend, lambda: captured.replay(part.tokens, part.context_lens, part.cu_seqlens)),
              spanned(loaded.backend, lambda: loaded.model.hidden(batch, cache))) for _ in range(REPEATS)]
    before.restore()
    return norm_of(got, want), spans


@dataclass(frozen=True, slots=True)
class ChunkBucket:
    """Captured step of any rows compared with single kernel calls.

    tokens: number of tokens of the bucket.
    difference: largest || captured - single || / || single || of a token's hidden states, over short contexts; 0 if
        bit-identical.
    long_difference: `difference` over long contexts, with padding tokens in the captured step.
    """

    tokens: int
    difference: float
    long_difference: float


def chunk_buckets(loaded: Loaded) -> Iterator[ChunkBucket]:
    """Yield the sizes of captured steps with chunks, smallest first. A step is a decode row and a chunk.

    Yields none if the backend captures no steps with chunks, or if they need no padding: one dispatch then serves steps
    of any size. Raises BackendError as `Backend.capture` does.
    """
    backend = loaded.backend
    size = loaded.runner.block_size
    if not (backend.capabilities.padding_blocks and backend.captures_chunks(loaded.runner.cache_dtype)):
        return
    longest = max(LONG) + CHUNK_TOKENS
    model = shortened(loaded, longest)
    per_row = -(-longest // size)
    slots = model.config.slots_of(2)
    cache = StateStore.allocate(
        model.config, 2 * per_row + backend.capabilities.padding_blocks, size, loaded.runner.cache_dtype, backend,
        slots, model.weights.dtype)
    backend.enqueue(partial(randomize, cache)).wait()
    buffers = BatchBuffers(CHUNK_TOKENS, 2, per_row, size, 2 * per_row, backend, num_slots=slots)
    with torch.inference_mode():
        buffers.clear()
        captured = backend.capture(lambda n: model.hidden(buffers.tokens(n), cache), CHUNK_TOKENS, decode=False)
    if captured is None:
        return
    for tokens in sorted({captured.size(n) for n in range(1, captured.largest + 1)}):
        steps = (_chunk_rows(model, tokens, per_row, *SHORT), _chunk_rows(model, max(2, tokens - 5), per_row, *LONG))
        differences = [
            backend.enqueue(partial(_chunk_difference, model, captured, buffers, cache, rows)).wait() for rows in steps]
        backend.synchronize()
        yield ChunkBucket(tokens, *differences)


def _chunk_rows(model: Model, tokens: int, per_row: int, context: int, start: int) -> list[Row]:
    """Return a decode row, and a chunk of the other tokens."""
    ids = torch.randint(model.config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()
    blocks = list(range(2 * per_row))
    return [Row(0, ids[:1], context - 1, blocks[:per_row], 1, state_slot=0),
            Row(1, ids[1:], start, blocks[per_row:], 1, state_slot=1)]


def _chunk_difference(
    model: Model, captured: Captured, buffers: BatchBuffers, cache: StateStore, rows: list[Row]
) -> float:
    staged = buffers.fill([(rows, len(rows))])
    part = staged.parts[0]
    buffers.pad_tokens(part, captured.size(part.tokens))
    staged.upload()
    before = SavedSlots(cache)
    replayed = captured.replay(part.tokens, part.context_lens, part.cu_seqlens)
    got = replayed[: part.tokens].to("cpu", copy=True)
    before.restore()
    return norm_of(got, model.hidden(buffers.batch(part), cache), dim=1)
