"""A step's rows as device tensors: the only place where host values become device inputs.

All inputs of a step are packed in one host buffer and copied to the device in one copy. The copy may be queued behind
the previous step, so there are two host buffers: `fill` writes one while the other may still be read. The device has
one buffer; the device's queue orders its uses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from npuserve.kernels.attention import AttentionMetadata
from npuserve.npu.backends.base import Backend, RowLengths
from npuserve.npu.execution.draft_buffers import DraftBuffers, SampledTokens
from npuserve.npu.execution.masks import Array
from npuserve.npu.execution.sampling_state import NUM_FLOATS, HostSampling, SamplingInputs
from npuserve.npu.step import PENDING, Row

_DTYPES = {
    torch.empty(0, dtype=dtype).numpy().dtype: dtype
    for dtype in (torch.bool, torch.int32, torch.int64, torch.float32, torch.float64)}

_ALIGNMENT = 64
_PARAMETER_BYTES = 96
"""Bytes of a row's sampling parameters that `Staged.put` can add to a step's own inputs; `Sampler.plan` puts 64."""
_MAX_PARAMETER_ARRAYS = 64
"""Arrays of sampling parameters of a step; `Sampler.plan` puts 12 for each part."""


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of R rows, concatenated.

    ids: [T] int64. A negative id refers to an id that the previous step sampled (`take_ids`).
    positions: [T] int64.
    slot_mapping: [T] int64, block * block_size + offset.
    attention: queries and keys of each row.
    state_slots: [R] int64, slot of each row's fixed state; None if the model has none.
    sample_tokens: [S] int64, index of each token after which one is sampled.
    next_ids: [T] int64, the token after each one, for a model's head for drafts. A negative id refers to an id that
        this step samples. None without such a head.
    head: queries and keys of each row in the layers of such a head, which has keys of the row's last positions
        (`Row.head_start`). None without such a head.
    """

    ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    attention: AttentionMetadata
    state_slots: Tensor | None
    sample_tokens: Tensor
    next_ids: Tensor | None = None
    head: AttentionMetadata | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a step that are computed together, at row and token `first` of the buffers.

    tokens: number of tokens.
    decodes: number of decode rows.
    samples: (request_id, index of the sampled token in prompt + output) of each token to sample.
    cu_seqlens, context_lens: host values of `padded` rows. The padding rows follow the step's own.
    constrained: index in `samples` of each token that is sampled under a mask.
    """

    rows: Sequence[Row]
    first: int
    tokens: int
    decodes: int
    samples: list[tuple[int, int]]
    cu_seqlens: list[int]
    context_lens: list[int]
    constrained: list[int]

    @property
    def padded(self) -> int:
        return len(self.context_lens)

    @property
    def has_head(self) -> bool:
        """Whether the model's head for drafts computes the rows. It computes all rows of a step, or none."""
        return self.rows[0].head_start >= 0

    @property
    def head_context_lens(self) -> list[int]:
        """Lengths of the contexts of the `padded` rows in the layers of the model's head."""
        count = len(self.rows)
        return _head_context_lens(self.context_lens[:count], self.rows) + self.context_lens[count:]


def _head_context_lens(context_lens: Sequence[int], rows: Sequence[Row]) -> list[int]:
    """Return the lengths of the rows' contexts in the layers of the model's head, which begin at `Row.head_start`."""
    return [context - max(0, row.head_start) for context, row in zip(context_lens, rows, strict=True)]


class Staged:
    """Inputs of a step on the host. parts: in the order of their rows."""

    def __init__(self, host: Tensor, array: Array, device: Tensor, used: int) -> None:
        self.parts: list[Part] = []
        self._host = host
        self._array = array
        self._device = device
        self._used = used
        self._tables: tuple[Tensor, Tensor] | None = None
        self._copies: list[tuple[Tensor, Tensor]] = []

    def put(self, values: Array) -> Tensor:
        """Append values of any shape and dtype; return the tensor that will hold them on the device."""
        begin = self._used
        end = self._used + values.nbytes
        self._array[begin:end].view(values.dtype).reshape(values.shape)[...] = values
        self._used = _aligned(end)
        return _view(self._device, begin, _DTYPES[values.dtype], values.shape)

    def put_tables(self, tables: Array, to: Tensor) -> None:
        """Append tables [N, R, W] int32, to be copied to to[:N, :R, :W]; columns beyond W are not transferred."""
        number, rows, width = tables.shape
        self._tables = to[:number, :rows, :width], self.put(tables)

    def seal(self) -> None:
        """Prepare the copies, so that this is done before the device waits for them. Nothing may be appended after."""
        self._copies = [(self._device[: self._used], self._host[: self._used])]
        if self._tables:
            self._copies.append(self._tables)

    def upload(self) -> None:
        """Queue the copies to the device. Call it within enqueued work."""
        if not self._copies:
            self.seal()
        for to, source in self._copies:
            to.copy_(source, non_blocking=True)


class BatchBuffers:
    """Memory for steps of at most max_tokens tokens, max_rows rows and max_blocks blocks per row.

    padding_block: first of the `Capabilities.padding_blocks` blocks at the end of the KV cache, which padding rows and
        tokens write; None if no batch is padded. Each has a slot of its own if the blocks have as many.
    vocabulary: ids that captured steps sample from, if the backend captures the sampler; 0 for no sampling.
    num_slots: slots of fixed state, after which padding rows have one of their own; 0 if the model has no such state.
    max_drafts: most drafts of a step; each is one more token to sample.
    has_mtp: the model has a head for multi-token prediction.
    following: number of tokens after each sample that are computed to draft further ones; None for no such inputs.

    drafting: sections for these tokens; None for none.

    `tokens` and `decode` return the memory of the first part, so that a step captured on it reads the inputs uploaded
    last. Before the first upload it holds padding for `decode`, and after `clear` padding for `tokens`. This padding
    writes to any slots of the cache, since captures of all sizes precede the first request.
    """

    def __init__(
        self, max_tokens: int, max_rows: int, max_blocks: int, block_size: int, padding_block: int | None,
        backend: Backend, vocabulary: int = 0, num_slots: int = 0, max_drafts: int = 0, *, has_mtp: bool = False,
        following: int | None = None,
    ):
        self._limits = max_tokens, max_rows, max_blocks
        self._max_samples = max_samples = max_rows + max_drafts
        self._block_size = block_size
        self._host_lengths = backend.capabilities.host_lengths
        self._padding = padding_block or 0
        more = 0 if padding_block is None else max_rows
        tokens = max_tokens + more
        rows = max_rows + more
        slots = max(1, backend.capabilities.padding_blocks) * block_size
        first = self._padding * block_size
        self._padding_slots = first + np.arange(tokens) % slots
        sections: dict[str, tuple[int, torch.dtype]] = {
            "ids": (tokens, torch.int64), "positions": (tokens, torch.int64), "slots": (tokens, torch.int64),
            "sample_tokens": (rows + max_drafts, torch.int64), "contexts": (rows, torch.int32),
            "cu_seqlens": (rows + 2, torch.int32),
        }
        self._num_slots = num_slots
        if num_slots:
            sections["state_slots"] = (rows, torch.int64)
        self._has_mtp = has_mtp
        self._context_names = ("contexts", "head_contexts") if has_mtp else ("contexts",)
        if has_mtp:
            sections |= {"next_ids": (tokens, torch.int64), "head_contexts": (rows, torch.int32)}
        self._vocabulary = vocabulary if backend.capabilities.sampler_filters else 0
        if self._vocabulary:
            sections |= {"penalty_slots": (max_samples, torch.int64), "top_k": (max_samples, torch.int32),
                         "sampling": (NUM_FLOATS * max_samples, torch.float32)}
        self.drafting = None if following is None else DraftBuffers(
            following, max_samples, rows + 1, block_size, self._padding_slots if self._host_lengths else None)
        if self.drafting:
            sections |= self.drafting.sections
        self._fixed = sum(_aligned(n * dtype.itemsize) for n, dtype in sections.values())
        # Block tables on the device, and those of the head; the uploaded ones are narrower and are copied into it.
        self._tables = backend.empty((1 + has_mtp, rows, max_blocks), torch.int32).fill_(self._padding)
        parameters = (rows + max_drafts) * _PARAMETER_BYTES + _MAX_PARAMETER_ARRAYS * _ALIGNMENT
        prompt_ids = tokens * torch.int64.itemsize + rows * _ALIGNMENT  # of prompt_logprobs, an array for each row
        nbytes = self._fixed + self._tables.nbytes + parameters + prompt_ids
        self._device = backend.empty((nbytes,), torch.uint8)
        self._hosts = [backend.host_buffer(nbytes, dtype=torch.uint8) for _ in range(2)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._on: dict[str, Tensor] = {}
        self._at: list[dict[str, Array]] = [{}, {}]
        begin = 0
        for name, (n, dtype) in sections.items():
            self._on[name] = _view(self._device, begin, dtype, (n,))
            for arrays, host in zip(self._at, self._hosts, strict=True):
                arrays[name] = _view(host, begin, dtype, (n,)).numpy()
            begin += _aligned(n * dtype.itemsize)
        self._current = 0
        # Each row's blocks as they were written last, with the version and the number of blocks of that row.
        self._table = np.zeros((rows, max_blocks), np.int32)
        self._written = [(0, 0)] * rows
        self._hosts[0][: self._fixed].zero_()
        self._pad(self._at[0], 0, 0, rows)
        self._at[0]["slots"][:] = first + slots - 1 - np.arange(tokens) % (first + slots)
        if self._vocabulary:
            self.host_sampling(max_samples).clear()
        if self.drafting:
            for arrays in self._at:
                self.drafting.clear(arrays)
        self._device[: self._fixed].copy_(self._hosts[0][: self._fixed])

    def decode(self, rows: int) -> Batch:
        """Return the batch of `rows` rows of one token each."""
        return self._batch(0, rows, rows, rows, list(range(rows + 1)), [1] * rows, 0)

    def sample_tokens(self, rows: int) -> Tensor:
        """Return the indexes of the first `rows` tokens of `tokens` after which one is sampled, and padding."""
        return self._on["sample_tokens"][:rows]

    def sampling(self, rows: int) -> SamplingInputs:
        """Return the sampling parameters of the first `rows` samples, in memory that does not move."""
        floats = self._on["sampling"].view(NUM_FLOATS, -1)[:, :rows]
        return SamplingInputs(self._on["penalty_slots"][:rows], self._on["top_k"][:rows], *floats)

    def host_sampling(self, rows: int) -> HostSampling:
        """Return the host's side of `sampling` in the buffer of the step that was filled last."""
        arrays = self._at[self._current]
        floats = arrays["sampling"].reshape(NUM_FLOATS, -1)[:, :rows]
        return HostSampling(arrays["penalty_slots"][:rows], arrays["top_k"][:rows], floats, self._vocabulary)

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest step that the buffers and the cache can hold."""
        max_tokens, rows, blocks = self._limits
        cached_blocks = min(rows * blocks, self._padding) if self._padding else rows * blocks
        return min(max_tokens, cached_blocks * self._block_size)

    def tokens(self, tokens: int) -> Batch:
        """Return the batch of `tokens` tokens of any rows.

        If attention reads lengths from the host, it has one more row, for the padding. As long as no step was filled,
        the tokens are spread over the rows, in the padding block.
        """
        rows = self._limits[1]
        if not self._host_lengths:
            return self._batch(0, tokens, rows, rows, [], [], 0)
        max_context = self._limits[2] * self._block_size
        lengths = [min(max_context, max(0, tokens - max_context * row)) for row in range(rows + 1)]
        return self._batch(0, tokens, rows + 1, rows, [0, *accumulate(lengths)], lengths, 0)

    def sampled_tokens(self, samples: int, following: int, *, is_decode: bool) -> SampledTokens:
        """Return the first `samples` samples of `decode` or of `tokens`, with `following` tokens after each."""
        assert self.drafting is not None
        if is_decode:
            lengths = [([2 + token] * samples, list(range(samples + 1))) for token in range(following)]
            return self.drafting.sampled(self._on, self._tables[-1], samples, samples, lengths)
        attention = self.tokens(samples).attention
        lengths = [(attention.host_context_lens, attention.host_cu_seqlens_q)] * following
        return self.drafting.sampled(self._on, self._tables[-1], samples, len(attention.context_lens), lengths)

    def fill_samples(self, part: Part, samples: int, following: int, *, is_decode: bool) -> Sequence[RowLengths]:
        """Write the samples of a part, the only one of the step that was filled last, for `sampled_tokens`.

        Return the lengths of its rows in the batch of each following token.
        """
        assert self.drafting is not None
        rows = part.padded if is_decode else self._limits[1] + (1 if self._host_lengths else 0)
        return self.drafting.fill(
            self._at[self._current], part.rows, self._table, samples, rows, following, pads_rows=is_decode)

    def samples_of(self, lengths: Sequence[RowLengths], samples: int) -> SampledTokens:
        """Return what `fill_samples` wrote, which returned `lengths`, for kernels that are called one by one."""
        assert self.drafting is not None
        rows = len(lengths[0][0]) if lengths else 0
        return self.drafting.sampled(self._on, self._tables[-1], samples, rows, lengths)

    def batch(self, part: Part) -> Batch:
        """Return the batch of a part without padding."""
        rows = len(part.rows)
        index = int(part.first > 0)
        head_context_lens = part.head_context_lens[:rows] if self._has_mtp else None
        return self._batch(
            part.first, part.tokens, rows, len(part.samples), part.cu_seqlens[: rows + 1], part.context_lens[:rows],
            index, head_context_lens, head_table=-1 if self._has_head_table(part.rows) else 0)

    def clear(self) -> None:
        """Make the batch of `tokens` consist of tokens that belong to no row on the device, or of padding."""
        of_drafts = ("following_contexts", "following_ends") if self.drafting else ()
        for name in (*self._context_names, "cu_seqlens", *of_drafts):
            self._on[name].zero_()
        if self._host_lengths:
            self._on["sample_tokens"].zero_()
        else:
            self._on["slots"].fill_(-1)

    def pad(self, part: Part, tokens: int) -> None:
        """Make `self.tokens(tokens)` the step that was filled last, whose first part is `part`.

        Tokens beyond the part belong to no row and are not cached; further rows have neither queries nor keys. If
        attention reads lengths from the host, the tokens belong to the row after the part's, and are cached in the
        padding block. All rows beyond the part's have the padding slot of fixed state.
        """
        arrays = self._at[self._current]
        rows = len(part.rows)
        beyond = slice(part.tokens, tokens)
        largest = self._limits[1] + (1 if self._host_lengths else 0)
        arrays["ids"][beyond] = arrays["positions"][beyond] = 0
        if self._has_mtp:
            arrays["next_ids"][beyond] = 0
        if self._num_slots:
            arrays["state_slots"][rows:largest] = self._num_slots
        if self._host_lengths:
            arrays["slots"][beyond] = self._padding_slots[: tokens - part.tokens]
            arrays["sample_tokens"][len(part.samples) : self._max_samples] = 0
            more = largest - rows
            part.cu_seqlens[rows + 1 :] = [tokens] * more
            part.context_lens[rows:] = [tokens - part.tokens, *[0] * (more - 1)]
            for name in self._context_names:
                arrays[name][rows:largest] = part.context_lens[rows:]
            arrays["cu_seqlens"][rows + 1 : largest + 1] = tokens
            return
        arrays["slots"][beyond] = -1
        for name in self._context_names:
            arrays[name][rows:largest] = 0
        arrays["cu_seqlens"][rows + 1 : largest + 1] = part.tokens

    def fill(self, parts: Sequence[tuple[Sequence[Row], int]], sampled: Mapping[int, int] = {}) -> Staged:
        """Write the inputs of a step to the next host buffer.

        parts: one or two pairs (rows, size): at least one row, padded to `size` rows if that is more. If there are two,
            each row of the first has one token.
        sampled: request -> index among the ids that the previous step sampled; PENDING tokens refer to them.

        Raises KeyError for a PENDING token of a request not in `sampled`, ValueError for a PENDING token that is not
        alone in its row and for more than the buffers hold. The inputs of the step before the previous one must have
        reached the device.
        """
        self._current = 1 - self._current
        staged = Staged(self._hosts[self._current], self._arrays[self._current], self._device, self._fixed)
        first = width = num_samples = 0
        for rows, size in parts:
            part, blocks = self._fill(self._at[self._current], rows, max(size, len(rows)), first, sampled)
            if self._has_mtp:
                here = slice(first, first + part.tokens)
                self._at[self._current]["next_ids"][here] = _next_ids(rows, num_samples)
            num_samples += len(part.samples)
            staged.parts.append(part)
            first = first + part.padded
            width = max(width, blocks)
        tables = self._table[None, :first, :width]
        if self._has_mtp and any(self._has_head_table(part.rows) for part in staged.parts):
            tables = np.concatenate((tables, self._head_tables(staged.parts, width)))
        staged.put_tables(tables, self._tables)
        return staged

    def _has_head_table(self, rows: Sequence[Row]) -> bool:
        """Return whether the head reads a table of its own for these rows.

        Kernels that are called one by one read the model's where it has the same blocks. Captured ones read one place.
        """
        return any(row.head_start > 0 for row in rows) or (self.drafting is not None and rows[0].head_start == 0)

    def _head_tables(self, parts: Sequence[Part], width: int) -> Array:
        """Return the tables [1, R, W] of the rows of a step from the first blocks on that the head reads."""
        tables = self._table[: parts[-1].first + parts[-1].padded, :width].copy()
        for part in parts:
            for place, row in enumerate(part.rows, part.first):
                if begin := row.head_start // self._block_size:
                    tables[place, : width - begin] = self._table[place, begin:width]
        result: Array = tables[None]
        return result

    def _fill(
        self, arrays: dict[str, Array], rows: Sequence[Row], size: int, first: int, sampled: Mapping[int, int]
    ) -> tuple[Part, int]:
        """Return the part and the number of blocks of its longest row."""
        count = len(rows)
        block_size = self._block_size
        lengths = [len(row.token_ids) for row in rows]
        starts = [row.start for row in rows]
        contexts = [start + length for start, length in zip(starts, lengths, strict=True)]
        ends = list(accumulate(lengths))
        blocks = [-(-row.num_positions // block_size) for row in rows]
        total = ends[-1]
        width = max(blocks)
        num_samples = sum(row.samples for row in rows)
        limits = *self._limits, self._max_samples
        if any(n > limit for n, limit in zip((total, size, width, num_samples), limits, strict=True)):
            raise ValueError(f"a step of {total} tokens, {size} rows, {width} blocks a row and {num_samples} samples, "
                             f"while the buffers hold at most {', '.join(map(str, limits))}")
        self._write_tables(rows, blocks, first)

        here = slice(first, first + total)
        arrays["ids"][here] = self._ids(rows, ends, sampled)
        if total == count:  # one token each
            arrays["positions"][here] = starts
            arrays["slots"][here] = [
                row.block_ids[start // block_size] * block_size + start % block_size
                for row, start in zip(rows, starts, strict=True)]
        else:
            positions = np.arange(total) + np.repeat(np.subtract(contexts, ends), lengths)
            place = np.repeat(np.arange(first, first + count), lengths)
            arrays["positions"][here] = positions
            arrays["slots"][here] = (
                self._table[place, positions // block_size].astype(np.int64) * block_size + positions % block_size)
        if self._num_slots:
            arrays["state_slots"][first : first + count] = [row.state_slot for row in rows]
        arrays["contexts"][first : first + count] = contexts
        if self._has_mtp:
            arrays["head_contexts"][first : first + count] = _head_context_lens(contexts, rows)
        cu_seqlens = arrays["cu_seqlens"][first + (first > 0) :]
        cu_seqlens[: count + 1] = [0, *ends]
        last = [index for row, end in zip(rows, ends, strict=True) for index in range(end - row.samples, end)]
        arrays["sample_tokens"][first : first + len(last)] = last
        if size > count:
            self._pad(arrays, first, count, size)
        samples = [(row.request_id, position) for row, context in zip(rows, contexts, strict=True)
                   for position in range(context - row.samples + 1, context + 1)]
        constrained = [i for i, row in enumerate(row for row in rows for _ in range(row.samples)) if row.is_constrained]
        return Part(
            rows, first, total, sum(row.is_decode for row in rows), samples, cu_seqlens[: size + 1].tolist(),
            arrays["contexts"][first : first + size].tolist(), constrained), width

    @staticmethod
    def _ids(rows: Sequence[Row], ends: Sequence[int], sampled: Mapping[int, int]) -> list[int]:
        """Return the rows' tokens, concatenated; -1 - i in place of a PENDING token that is the i-th sampled id."""
        ids = list(chain.from_iterable(row.token_ids for row in rows))
        for row, end in zip(rows, ends, strict=True):
            if PENDING in row.token_ids:
                if len(row.token_ids) > 1:
                    raise ValueError(
                        f"request {row.request_id}: a token that is being sampled must be alone in its row")
                ids[end - 1] = -1 - sampled[row.request_id]
        return ids

    def _write_tables(self, rows: Sequence[Row], blocks: Sequence[int], first: int) -> None:
        """Write the first blocks[r] blocks of each row r."""
        for place, (row, used) in enumerate(zip(rows, blocks, strict=True), first):
            version, count = self._written[place]
            if row.block_version != version or not version:
                count = 0
            if used > count:
                self._table[place, count:used] = row.block_ids[count:used]
                self._written[place] = row.block_version, used

    def _pad(self, arrays: dict[str, Array], first: int, begin: int, end: int) -> None:
        """Make rows [begin, end) of the part at `first` padding of one token each.

        Their results are not read, and they write to the padding blocks. The rows before them have one token each.
        """
        rows = slice(first + begin, first + end)
        arrays["ids"][rows] = arrays["positions"][rows] = 0
        if self._has_mtp:
            arrays["next_ids"][rows] = 0
        arrays["slots"][rows] = self._padding_slots[: end - begin]
        if self._num_slots:
            arrays["state_slots"][rows] = self._num_slots
        for name in self._context_names:
            arrays[name][rows] = 1
        arrays["sample_tokens"][rows] = np.arange(begin, end)
        arrays["cu_seqlens"][rows.start + (first > 0) + 1 : rows.stop + (first > 0) + 1] = np.arange(begin + 1, end + 1)
        self._table[rows, 0] = self._padding
        self._written[rows] = [(0, 0)] * (end - begin)

    def _batch(
        self, first: int, tokens: int, rows: int, samples: int, cu_seqlens: list[int], context_lens: list[int],
        index: int, head_context_lens: list[int] | None = None, head_table: int = -1,
    ) -> Batch:
        """Return a part's batch. index: number of the part. A part has one more number in cu_seqlens than rows.

        head_context_lens: in the layers of a head; None for `context_lens`.
        head_table: index of its tables; 0 for those of the model.
        """
        on = self._on
        here = slice(first, first + tokens)
        ends = on["cu_seqlens"][first + index : first + index + rows + 1]
        head = AttentionMetadata(
            self._tables[head_table, first : first + rows], on["head_contexts"][first : first + rows], ends,
            head_context_lens or context_lens, cu_seqlens) if self._has_mtp else None
        return Batch(
            ids=on["ids"][here],
            positions=on["positions"][here],
            slot_mapping=on["slots"][here],
            attention=AttentionMetadata(
                block_tables=self._tables[0, first : first + rows],
                context_lens=on["contexts"][first : first + rows],
                cu_seqlens_q=ends,
                host_context_lens=context_lens,
                host_cu_seqlens_q=cu_seqlens,
            ),
            state_slots=on["state_slots"][first : first + rows] if self._num_slots else None,
            sample_tokens=on["sample_tokens"][first : first + samples],
            next_ids=on["next_ids"][here] if self._has_mtp else None,
            head=head,
        )


def _next_ids(rows: Sequence[Row], first: int) -> list[int]:
    """Return the token after each of the rows' tokens, concatenated; -1 - i in place of the i-th sample of the step.

    first: number of samples of the step before these rows.
    """
    ids: list[int] = []
    for row in rows:
        ids += row.token_ids[1 : len(row.token_ids) - max(0, row.samples - 1)]
        if row.samples:
            ids += range(-1 - first, -1 - first - row.samples, -1)
        else:
            ids.append(row.next_id)
        first += row.samples
    return ids


def make_batch(rows: Sequence[Row], block_size: int, backend: Backend, num_slots: int = 0) -> Batch:
    """Return a batch of at least one row, of known tokens, in memory of its own. Call it within enqueued work."""
    tokens = sum(len(row.token_ids) for row in rows)
    blocks = max(-(-(row.start + len(row.token_ids)) // block_size) for row in rows)
    drafts = sum(row.samples - 1 for row in rows if row.samples)
    buffers = BatchBuffers(
        tokens, len(rows), blocks, block_size, None, backend, num_slots=num_slots, max_drafts=drafts)
    staged = buffers.fill([(rows, len(rows))])
    staged.upload()
    return buffers.batch(staged.parts[0])


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _view(memory: Tensor, begin: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return a view of memory [n] uint8 from byte `begin` on."""
    return memory[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)
