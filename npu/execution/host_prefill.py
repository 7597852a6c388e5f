"""Prompts computed on the host, for a device that is too small or too slow for them.

The host has the decoder in its own form, and a mirror of the KV cache: the same blocks, in its own layout.

1. A step's chunks go to the host's queue (`launch`), its decode rows to the device's: both work at the same time.
2. What the device wrote of a chunk's context (tokens that were generated, and are now part of a prompt or of a request
   that begins anew) is copied to the mirror first.
3. The chunk's keys and values, and the hidden states that are sampled from, go to memory that the device copies from.
4. `Chunk.upload` queues these copies. All later work of the device finds its cache as if it had computed the chunk; LM
   head and sampler are the device's own.

The mirror holds the first `held[b]` slots of block b. Rows write ever higher positions, and a block's new owner begins
at its first slot:

    block     |0 ......... held[b] .......... block_size|
    mirror    |--- valid -----|                             a chunk of slots [m, n):         held[b] = n
    device    |--- valid -----|--- decoded ---|             a decode row that writes slot n: held[b] = min(held[b], n)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from npuserve.kernels.registry import KernelSet, Observe, Timings
from npuserve.npu.backends.base import Backend, Event, Pending
from npuserve.npu.execution.batch import BatchBuffers, Part, Phase, Staged
from npuserve.npu.execution.decoder import Model
from npuserve.npu.execution.kv_cache import KVCache
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.rope import cos_sin_table
from npuserve.npu.model.weights import ModelWeights
from npuserve.npu.step import Row

TURNS = 2
"""Chunks that may be on their way: a buffer is written anew when the step before the last was collected."""


@dataclass(frozen=True, slots=True)
class Run:
    """Slots [first, last) of a block."""

    block: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """What the host has computed, in memory from where a copy to `device` need not be waited for.

    staged: [layers, 2, T, Hkv, W], the keys and values for the slots of `runs`, one run after the other. hidden:
    [n, H]. timings: of the host's kernels, in a timed step.
    """

    staged: Tensor
    runs: list[Run]
    hidden: Tensor
    cache: KVCache
    device: torch.device
    timings: list[Timings]

    def upload(self) -> Tensor:
        """The hidden states on the device. Call it within enqueued work; the memory is in use until that is done."""
        begin = 0
        for run in self.runs:
            end = begin + run.last - run.first
            for staged, layer in zip(self.staged, self.cache.plain, strict=True):
                for source, target in zip(staged, layer, strict=True):
                    target[run.block, run.first : run.last].copy_(source[begin:end], non_blocking=True)
            begin = end
        return self.hidden.to(self.device, non_blocking=True)


def staging_bytes(config: ModelConfig, width: int, tokens: int, itemsize: int) -> int:
    """Of host memory for chunks of so many tokens on their way. width: numbers of a head in the device's cache."""
    return TURNS * tokens * (2 * config.num_layers * config.num_kv_heads * width + config.hidden_size) * itemsize


class HostPrefill:
    """The host's side of a `Runner`. host: the backend that computes, with the decoder's `weights`. device: that of the
    runner; cache: its KV cache, not int8, of `Backend.cache_shapes` as base.py has them, heads padded or not. The rest
    is as `Runner` has it; max_rows: of a step."""

    def __init__(
        self, host: Backend, weights: ModelWeights, device: Backend, cache: KVCache, config: ModelConfig,
        num_blocks: int, block_size: int, *, max_model_len: int, max_rows: int, max_tokens: int,
        observe: Observe | None,
    ):
        dtype = weights.norm.dtype
        self._host, self._device = host, device
        self._block_size, self._head_dim = block_size, config.head_dim
        self._cache = cache
        self._held = [0] * num_blocks
        self._kernels = KernelSet(host.kernels, observe, host.span)
        cos_sin = cos_sin_table(config.rope, config.head_dim, max_model_len, host.device)
        self._model = Model(config, weights, cos_sin, self._kernels)
        self._mirror = KVCache.allocate(config, num_blocks, block_size, dtype, host)
        self._buffers = BatchBuffers(max_tokens, max_rows, -(-max_model_len // block_size), block_size, None, host)
        width = cache.plain[0][0].shape[-1]
        self._staged = [
            device.host_buffer(config.num_layers, 2, max_tokens, config.num_kv_heads, width, dtype=dtype).zero_()
            for _ in range(TURNS)]
        self._hidden = [
            device.host_buffer(max_tokens, config.hidden_size, dtype=dtype) for _ in range(TURNS)]
        self._turn = 0
        with torch.inference_mode():
            self._captured = host.capture(
                lambda tokens: self._model.hidden(self._buffers.tokens(tokens), self._mirror), max_tokens, decode=False)

    def written(self, rows: Sequence[Row]) -> None:
        """The device computes these rows, launched before what is launched later."""
        for row in rows:
            for run in self._runs(row, row.start, row.start + len(row.token_ids)):
                self._held[run.block] = min(self._held[run.block], run.first)

    def launch(self, rows: Sequence[Row], *, all_hidden: bool, phase: Phase | None) -> Pending[Chunk]:
        """Have rows of known tokens computed. all_hidden: not only the hidden states of the rows that sample.

        Returns at once, unless the mirror lacks something: that the device has come so far is waited for then. Of two
        chunks on their way the first step must be collected before a third is launched."""
        missing = [run for row in rows for run in self._missing(row)]
        staged = self._buffers.fill([(rows, len(rows))])
        staged.seal()
        for runs in _portions(missing, self._staged[0].shape[2]):
            self._restore(runs)
        runs = [run for row in rows for run in self._runs(row, row.start, row.start + len(row.token_ids))]
        for run in runs:
            self._held[run.block] = run.last
        self._turn = (self._turn + 1) % TURNS
        work = partial(self._compute, staged, staged.parts[0], runs, all_hidden, phase, self._turn)
        return self._host.enqueue(work)

    def _runs(self, row: Row, begin: int, end: int) -> Iterator[Run]:
        """The slots of a row's positions [begin, end)."""
        size = self._block_size
        for index in range(begin // size, -(-end // size)):
            yield Run(row.block_ids[index], max(begin - index * size, 0), min(end - index * size, size))

    def _missing(self, row: Row) -> Iterator[Run]:
        """What the mirror lacks of a row's context; from then on it has it."""
        for run in self._runs(row, 0, row.start):
            if (held := self._held[run.block]) < run.last:
                self._held[run.block] = run.last
                yield Run(run.block, held, run.last)

    def _slots(self, runs: Sequence[Run]) -> Tensor:
        return torch.cat([torch.arange(run.first, run.last) + run.block * self._block_size for run in runs])

    def _restore(self, runs: Sequence[Run]) -> None:
        """Copy slots from the device to the mirror: in both queues, after what is there."""
        fetched, events = self._device.enqueue(partial(self._fetch, runs)).wait()
        for event in events:
            event.wait()
        slots = self._slots(runs)

        def write() -> None:
            for mirrored, (keys, values) in zip(self._mirror.plain, fetched, strict=True):
                self._host.write_cache(
                    *mirrored, slots, keys[..., : self._head_dim], values[..., : self._head_dim])

        self._host.enqueue(write)

    def _fetch(self, runs: Sequence[Run]) -> tuple[list[list[Tensor]], list[Event]]:
        """Each layer's keys and values of the slots, on the host once the events have come."""
        fetched: list[list[Tensor]] = []
        events: list[Event] = []
        for layer in self._cache.plain:
            fetched.append([])
            for cached in layer:
                slots = torch.cat([cached[run.block, run.first : run.last] for run in runs])
                fetched[-1].append(self._device.host_buffer(*slots.shape, dtype=slots.dtype))
                events.append(self._device.fetch(slots, fetched[-1][-1]))
        return fetched, events

    def _compute(
        self, staged: Staged, part: Part, runs: list[Run], all_hidden: bool, phase: Phase | None, turn: int
    ) -> Chunk:
        staged.upload()
        timings: list[Timings] = []
        if phase is None:
            computed = self._decode(part)
        else:
            with self._kernels.timed(phase) as timed:
                computed = self._decode(part, timed)
            timings.append(timed)
        if not all_hidden:
            computed = computed[self._buffers.batch(part).sample_tokens]
        hidden = self._hidden[turn][: len(computed)].copy_(computed)
        to, slots = self._staged[turn][:, :, : part.tokens], self._slots(runs)
        for target, layer in zip(to, self._mirror.plain, strict=True):
            for into, own in zip(target, self._host.read_cache(*layer, slots, self._head_dim), strict=True):
                into[..., : self._head_dim] = own
        return Chunk(to, runs, hidden, self._cache, self._device.device, timings)

    def _decode(self, part: Part, timings: Timings | None = None) -> Tensor:
        """[T, H] of the part's tokens; their keys and values are in the mirror then."""
        if self._captured is None:
            return self._model.hidden(self._buffers.batch(part), self._mirror)
        if timings is None:
            return self._captured.replay(part.tokens, part.context_lens)
        if (replayed := self._captured.replay_timed(part.tokens, part.context_lens)) is None:
            return self._model.hidden(self._buffers.batch(part), self._mirror)
        timings.add(replayed[1])
        return replayed[0]


def _portions(runs: Sequence[Run], slots: int) -> Iterator[list[Run]]:
    """The runs in portions of at most so many slots, or of one run."""
    portion: list[Run] = []
    count = 0
    for run in runs:
        if portion and count + run.last - run.first > slots:
            yield portion
            portion, count = [], 0
        portion.append(run)
        count += run.last - run.first
    if portion:
        yield portion
