"""Computation of prompts on the host, for a device that is too small or too slow for them.

The host holds a copy of the decoder in its own weight layout, and a mirror of the KV cache: the same blocks, in its own
layout.

A runner has a `HostPrefill`, or a `DevicePrefill` if the device computes the prompts too.

1. A step's chunks enter the host's queue (`launch`), its decode rows the device's queue: both run concurrently.
2. Before that, the part of a chunk's context that the device wrote is copied to the mirror. It consists of generated
   tokens that are now part of a prompt, or of a preempted request that is computed again.
3. The chunk's keys and values, and the hidden states that are sampled from, are written to host buffers.
4. `Chunk.upload` queues their copies to the device. All later work on the device finds its cache as if it had computed
   the chunk. LM head and sampler run on the device.

The mirror holds the first `held[b]` slots of block b. Rows write increasing positions, and a block's new owner starts
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
from npuserve.npu.backends.memory import DeviceMemory
from npuserve.npu.execution.batch import BatchBuffers
from npuserve.npu.execution.decoder import Model
from npuserve.npu.execution.dispatch import Dispatch, Rows, is_decode, replay
from npuserve.npu.execution.staged import Part, Staged
from npuserve.npu.execution.state_store import StateStore
from npuserve.npu.execution.work import Work
from npuserve.npu.model.config import ModelConfig
from npuserve.npu.model.layers.layer import Paged
from npuserve.npu.model.weights import ModelWeights
from npuserve.npu.step import Phase, Row

BUFFERS = 2
"""Chunks in flight: a buffer is reused once the step before the previous one is collected."""


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Slots [first, last) of a block."""

    block: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Chunk computed on the host, in memory that can be copied to `device` asynchronously.

    staged: [layers, 2, T, Hkv, W], the keys and values for the slots of `runs`, concatenated.
    hidden: [n, H].
    timings: times of the host's kernels, in a timed step.
    """

    staged: Tensor
    runs: list[SlotRange]
    hidden: Tensor
    cache: StateStore
    device: torch.device
    timings: list[Timings]

    def upload(self) -> Tensor:
        """Queue the copies; return the hidden states on the device.

        Call it within enqueued work. The host memory is in use until that work is complete.
        """
        begin = 0
        for run in self.runs:
            end = begin + run.last - run.first
            for staged, layer in zip(self.staged, self.cache.plain, strict=True):
                for source, target in zip(staged, layer, strict=True):
                    target[run.block, run.first : run.last].copy_(source[begin:end], non_blocking=True)
            begin = end
        return self.hidden.to(self.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class HostWork:
    """Part whose hidden states the host computes."""

    work: Work
    chunk: Pending[Chunk]


def staging_bytes(config: ModelConfig, width: int, tokens: int, itemsize: int) -> int:
    """Return the bytes of the host buffers for chunks of `tokens` tokens. width: of a head in the device's cache."""
    heads = sum(layer.state.heads for layer in config.local_layers if isinstance(layer.state, Paged))
    return BUFFERS * tokens * (2 * heads * width + config.hidden_size) * itemsize


class DevicePrefill:
    """Prompts of a `Runner` whose device computes whole steps.

    continues_answers: chunks may continue an answer, with forced tokens or drafts.
    """

    continues_answers = True

    @property
    def mirror(self) -> list[tuple[DeviceMemory, Tensor]]:
        """Tensors of the mirror of the KV cache, with the memory that they are in."""
        return []

    def parts(self, rows: Rows, dispatch: Dispatch) -> list[tuple[Rows, int]]:
        """Split a step into rows that are computed together; return them with the number that they are padded to."""
        return dispatch.parts(rows)

    def is_on_host(self, part: Part) -> bool:
        """Return True if the host computes a part of a step, which is the last one."""
        return False

    def written(self, works: Sequence[Work]) -> None:
        """Record that the device computes these parts, before any work that is launched later."""

    def launch(self, work: Work | None, phase: Phase | None) -> HostWork | None:
        """Compute a part on the host; return None if there is no such part."""
        return None


class HostPrefill(DevicePrefill):
    """Prompts of a `Runner` that the host computes. Parts of a step are its decode rows, and then its chunks.

    host: backend that computes the chunks, with the decoder's `weights`.
    device: backend of the runner.
    cache: KV cache of the runner, not quantized, in the shapes that `CacheLayout.shapes` documents; heads may be
        padded.
    max_rows: maximum rows of a step.
    The other parameters are as for `Runner`.
    """

    continues_answers = False  # a chunk's context would be copied to the host, and the chunk back

    def __init__(
        self, host: Backend, weights: ModelWeights, device: Backend, cache: StateStore, config: ModelConfig,
        num_blocks: int, block_size: int, *, max_model_len: int, max_rows: int, max_tokens: int,
        observe: Observe | None,
    ):
        dtype = weights.dtype
        self._host = host
        self._device = device
        (state,) = config.paged_states
        self._block_size = block_size
        self._head_dim = state.head_dim
        self._cache = cache
        self._held = [0] * num_blocks
        self._kernels = KernelSet(host.kernels, observe, host.span, own=host.own_kernels)
        self._model = Model.of(config, weights, max_model_len, self._kernels, host)
        self._mirror = StateStore.allocate(config, num_blocks, block_size, dtype, host)
        self._buffers = BatchBuffers(max_tokens, max_rows, -(-max_model_len // block_size), block_size, None, host)
        width = cache.plain[0][0].shape[-1]
        self._staged = [
            device.host_buffer(len(cache.plain), 2, max_tokens, state.heads, width, dtype=dtype).zero_()
            for _ in range(BUFFERS)]
        self._hidden = [
            device.host_buffer(max_tokens, config.hidden_size, dtype=dtype) for _ in range(BUFFERS)]
        self._next_buffer = 0
        with torch.inference_mode():
            self._captured = host.capture(
                lambda tokens: self._model.hidden(self._buffers.tokens(tokens), self._mirror), max_tokens, decode=False)

    @property
    def mirror(self) -> list[tuple[DeviceMemory, Tensor]]:
        return [(self._host.memory, tensor) for tensor in self._mirror.tensors]

    def parts(self, rows: Rows, dispatch: Dispatch) -> list[tuple[Rows, int]]:
        decodes: list[Row] = []
        chunks: list[Row] = []
        for row in rows:
            (decodes if is_decode(row) else chunks).append(row)
        parts = dispatch.parts(decodes) if decodes else []
        if chunks:
            parts.append((chunks, len(chunks)))
        return parts

    def is_on_host(self, part: Part) -> bool:
        return not is_decode(part.rows[0])

    def written(self, works: Sequence[Work]) -> None:
        for row in (row for work in works for row in work.part.rows):
            for run in self._runs(row, row.start, row.start + len(row.token_ids)):
                self._held[run.block] = min(self._held[run.block], run.first)

    def launch(self, work: Work | None, phase: Phase | None) -> HostWork | None:
        """Compute a part on the host; return None if there is no such part.

        Returns at once, unless the mirror lacks part of the context: then it waits until the device has computed it. At
        most two chunks may be in flight: the first step must be collected before a third is launched.
        """
        if work is None:
            return None
        rows = work.part.rows
        missing = [run for row in rows for run in self._missing(row)]
        staged = self._buffers.fill([(rows, len(rows))])
        staged.seal()
        for runs in _portions(missing, self._staged[0].shape[2]):
            self._restore(runs)
        runs = [run for row in rows for run in self._runs(row, row.start, row.start + len(row.token_ids))]
        for run in runs:
            self._held[run.block] = run.last
        self._next_buffer = (self._next_buffer + 1) % BUFFERS
        compute = partial(
            self._compute, staged, staged.parts[0], runs, work.needs_all_hidden, phase, self._next_buffer)
        return HostWork(work, self._host.enqueue(compute))

    def _runs(self, row: Row, begin: int, end: int) -> Iterator[SlotRange]:
        """Yield the slots of a row's positions [begin, end)."""
        size = self._block_size
        for index in range(begin // size, -(-end // size)):
            yield SlotRange(row.block_ids[index], max(begin - index * size, 0), min(end - index * size, size))

    def _missing(self, row: Row) -> Iterator[SlotRange]:
        """Yield the slots of a row's context that the mirror lacks, and mark them as held."""
        for run in self._runs(row, 0, row.start):
            if (held := self._held[run.block]) < run.last:
                self._held[run.block] = run.last
                yield SlotRange(run.block, held, run.last)

    def _slots(self, runs: Sequence[SlotRange]) -> Tensor:
        return torch.cat([torch.arange(run.first, run.last) + run.block * self._block_size for run in runs])

    def _restore(self, runs: Sequence[SlotRange]) -> None:
        """Copy slots from the device to the mirror, in the order of both queues."""
        fetched, events = self._device.enqueue(partial(self._fetch, runs)).wait()
        for event in events:
            event.wait()
        slots = self._slots(runs)

        def write() -> None:
            for mirrored, (keys, values) in zip(self._mirror.plain, fetched, strict=True):
                self._host.cache.write(
                    *mirrored, slots, keys[..., : self._head_dim], values[..., : self._head_dim])

        self._host.enqueue(write)

    def _fetch(self, runs: Sequence[SlotRange]) -> tuple[list[list[Tensor]], list[Event]]:
        """Copy each layer's keys and values of the slots to the host; complete once the events are."""
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
        self, staged: Staged, part: Part, runs: list[SlotRange], all_hidden: bool, phase: Phase | None, buffer: int
    ) -> Chunk:
        """Compute a part, with the hidden states of all tokens, or of those that are sampled from."""
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
        hidden = self._hidden[buffer][: len(computed)].copy_(computed)
        to = self._staged[buffer][:, :, : part.tokens]
        slots = self._slots(runs)
        for target, layer in zip(to, self._mirror.plain, strict=True):
            for into, cached in zip(target, self._host.cache.read(*layer, slots, self._head_dim), strict=True):
                into[..., : self._head_dim] = cached
        return Chunk(to, runs, hidden, self._cache, self._device.device, timings)

    def _decode(self, part: Part, timings: Timings | None = None) -> Tensor:
        """Return the hidden states [T, H] of a part; write its keys and values to the mirror."""
        hidden = replay(self._captured, part, timings) if self._captured else None
        return self._model.hidden(self._buffers.batch(part), self._mirror) if hidden is None else hidden


def _portions(runs: Sequence[SlotRange], slots: int) -> Iterator[list[SlotRange]]:
    """Group the runs into portions of at most `slots` slots, or of one run."""
    portion: list[SlotRange] = []
    count = 0
    for run in runs:
        if portion and count + run.last - run.first > slots:
            yield portion
            portion = []
            count = 0
        portion.append(run)
        count += run.last - run.first
    if portion:
        yield portion
