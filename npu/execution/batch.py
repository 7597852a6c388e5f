"""A step's rows as device tensors: the only place where host values become device inputs.

All inputs of a step are packed in one host buffer and copied to the device in one copy. The copy may be queued behind
the previous step, so there are two host buffers: `fill` writes one while the other may still be read. The device has
one buffer; the device's queue orders its uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from npuserve.kernels.attention import AttentionMetadata
from npuserve.npu.backends.base import Backend, RowLengths
from npuserve.npu.execution.draft_buffers import DraftBuffers, SampledTokens
from npuserve.npu.execution.masks import Array
from npuserve.npu.execution.sampling_state import NUM_FLOATS, HostSampling, SamplingInputs
from npuserve.npu.execution.staged import ALIGNMENT, Part, Staged, aligned, divided, head_context_lens
from npuserve.npu.step import PENDING, Row

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
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._max_blocks = max_blocks
        self._max_samples = max_rows + max_drafts
        self._block_size = block_size
        self._reads_host_lengths = backend.capabilities.host_lengths
        self._num_slots = num_slots
        self._has_mtp = has_mtp
        self._context_sections = ("contexts", "head_contexts") if has_mtp else ("contexts",)
        self._vocabulary = vocabulary if backend.capabilities.sampler_filters else 0
        max_padding = 0 if padding_block is None else max_rows
        tokens = max_tokens + max_padding
        rows = max_rows + max_padding
        self._padding_block = padding_block or 0
        num_padding_slots = max(1, backend.capabilities.padding_blocks) * block_size
        self._padding_slots = self._padding_block * block_size + np.arange(tokens) % num_padding_slots
        self.drafting = None if following is None else DraftBuffers(
            following, self._max_samples, rows + 1, block_size,
            self._padding_slots if self._reads_host_lengths else None)
        sections = self._section_sizes(tokens, rows, rows + max_drafts)
        self._sections_bytes = sum(aligned(length * dtype.itemsize) for length, dtype in sections.values())
        # Block tables on the device, and those of the head; the uploaded ones are narrower and are copied into it.
        self._tables = backend.empty((1 + has_mtp, rows, max_blocks), torch.int32).fill_(self._padding_block)
        parameters = (rows + max_drafts) * _PARAMETER_BYTES + _MAX_PARAMETER_ARRAYS * ALIGNMENT
        prompt_ids = tokens * torch.int64.itemsize + rows * ALIGNMENT  # of prompt_logprobs, an array for each row
        nbytes = self._sections_bytes + self._tables.nbytes + parameters + prompt_ids
        self._device = backend.empty((nbytes,), torch.uint8)
        self._hosts = [backend.host_buffer(nbytes, dtype=torch.uint8) for _ in range(2)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._device_sections = divided(self._device, sections)
        self._host_sections = [
            {name: section.numpy() for name, section in divided(host, sections).items()} for host in self._hosts]
        self._current = 0
        # Each row's blocks as they were written last, with the version and the number of blocks of that row.
        self._table = np.zeros((rows, max_blocks), np.int32)
        self._written = [(0, 0)] * rows
        self._write_first_padding(tokens, rows, self._padding_block * block_size + num_padding_slots)

    def _section_sizes(self, tokens: int, rows: int, sample_tokens: int) -> dict[str, tuple[int, torch.dtype]]:
        """Return the length and dtype of each section of the buffers, by its name.

        tokens, rows, sample_tokens: most of a step, those of padding among them.
        """
        sections: dict[str, tuple[int, torch.dtype]] = {
            "ids": (tokens, torch.int64), "positions": (tokens, torch.int64), "slots": (tokens, torch.int64),
            "sample_tokens": (sample_tokens, torch.int64), "contexts": (rows, torch.int32),
            "cu_seqlens": (rows + 2, torch.int32),  # of two parts (`_ends`)
        }
        if self._num_slots:
            sections["state_slots"] = (rows, torch.int64)
        if self._has_mtp:
            sections |= {"next_ids": (tokens, torch.int64), "head_contexts": (rows, torch.int32)}
        if self._vocabulary:
            samples = self._max_samples
            sections |= {"penalty_slots": (samples, torch.int64), "top_k": (samples, torch.int32),
                         "sampling": (NUM_FLOATS * samples, torch.float32)}
        if self.drafting:
            sections |= self.drafting.sections
        return sections

    def _write_first_padding(self, tokens: int, rows: int, num_slots: int) -> None:
        """Write padding for captures of decode rows, which may use all `num_slots` slots of the cache."""
        arrays = self._host_sections[0]
        self._hosts[0][: self._sections_bytes].zero_()
        self._pad_rows(arrays, 0, 0, rows)
        arrays["slots"][:] = num_slots - 1 - np.arange(tokens) % num_slots
        if self._vocabulary:
            self.host_sampling(self._max_samples).clear()
        if self.drafting:
            for sections in self._host_sections:
                self.drafting.clear(sections)
        self._device[: self._sections_bytes].copy_(self._hosts[0][: self._sections_bytes])

    # Batches, in the memory of the device

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest step that the buffers and the cache can hold."""
        blocks = self._max_rows * self._max_blocks
        cached_blocks = min(blocks, self._padding_block) if self._padding_block else blocks
        return min(self._max_tokens, cached_blocks * self._block_size)

    @property
    def _captured_rows(self) -> int:
        """Rows of `tokens`: if attention reads lengths from the host, there is one more, for the padding tokens."""
        return self._max_rows + 1 if self._reads_host_lengths else self._max_rows

    def decode(self, rows: int) -> Batch:
        """Return the batch of `rows` rows of one token each."""
        attention = self._attention(0, rows, [1] * rows, list(range(rows + 1)))
        return self._batch(0, rows, rows, attention, self._head_attention(attention))

    def tokens(self, tokens: int) -> Batch:
        """Return the batch of `tokens` tokens of any rows.

        If attention reads lengths from the host, it has one more row, for the padding. As long as no step was filled,
        the tokens are spread over the rows, in the padding block.
        """
        rows = self._captured_rows
        context_lens: list[int] = []
        cu_seqlens: list[int] = []
        if self._reads_host_lengths:
            max_context = self._max_blocks * self._block_size
            context_lens = [min(max_context, max(0, tokens - max_context * row)) for row in range(rows)]
            cu_seqlens = [0, *accumulate(context_lens)]
        attention = self._attention(0, rows, context_lens, cu_seqlens)
        return self._batch(0, tokens, self._max_rows, attention, self._head_attention(attention))

    def batch(self, part: Part) -> Batch:
        """Return the batch of a part without padding."""
        rows = len(part.rows)
        attention = self._attention(part.first, rows, part.context_lens[:rows], part.cu_seqlens[: rows + 1])
        return self._batch(
            part.first, part.tokens, len(part.samples), attention, self._head_attention(attention, part))

    def sample_tokens(self, rows: int) -> Tensor:
        """Return the indexes of the first `rows` tokens of `tokens` after which one is sampled, and padding."""
        return self._device_sections["sample_tokens"][:rows]

    def sampling(self, rows: int) -> SamplingInputs:
        """Return the sampling parameters of the first `rows` samples, in memory that does not move."""
        sections = self._device_sections
        floats = sections["sampling"].view(NUM_FLOATS, -1)[:, :rows]
        return SamplingInputs(sections["penalty_slots"][:rows], sections["top_k"][:rows], *floats)

    def sampled_tokens(self, samples: int, following: int, *, is_decode: bool) -> SampledTokens:
        """Return the first `samples` samples of `decode` or of `tokens`, with `following` tokens after each."""
        if is_decode:
            lengths = [([2 + token] * samples, list(range(samples + 1))) for token in range(following)]
            return self._sampled(samples, samples, lengths)
        attention = self.tokens(samples).attention
        lengths = [(attention.host_context_lens, attention.host_cu_seqlens_q)] * following
        return self._sampled(samples, self._captured_rows, lengths)

    def samples_of(self, lengths: Sequence[RowLengths], samples: int) -> SampledTokens:
        """Return what `fill_samples` wrote, which returned `lengths`, for kernels that are called one by one."""
        rows = len(lengths[0][0]) if lengths else 0
        return self._sampled(samples, rows, lengths)

    def clear(self) -> None:
        """Make the batch of `tokens` consist of tokens that belong to no row on the device, or of padding."""
        of_drafts = ("following_contexts", "following_ends") if self.drafting else ()
        for name in (*self._context_sections, "cu_seqlens", *of_drafts):
            self._device_sections[name].zero_()
        if self._reads_host_lengths:
            self._device_sections["sample_tokens"].zero_()
        else:
            self._device_sections["slots"].fill_(-1)

    def _batch(
        self, first: int, tokens: int, samples: int, attention: AttentionMetadata, head: AttentionMetadata | None
    ) -> Batch:
        """Return the batch of `tokens` tokens and of the rows of `attention`, at row and token `first`."""
        sections = self._device_sections
        batch_tokens = slice(first, first + tokens)
        batch_rows = slice(first, first + len(attention.context_lens))
        return Batch(
            ids=sections["ids"][batch_tokens],
            positions=sections["positions"][batch_tokens],
            slot_mapping=sections["slots"][batch_tokens],
            attention=attention,
            state_slots=sections["state_slots"][batch_rows] if self._num_slots else None,
            sample_tokens=sections["sample_tokens"][first : first + samples],
            next_ids=sections["next_ids"][batch_tokens] if self._has_mtp else None,
            head=head,
        )

    def _attention(
        self, first: int, rows: int, context_lens: list[int], cu_seqlens: list[int]
    ) -> AttentionMetadata:
        """Return the queries and keys of `rows` rows from row `first` on, with their lengths on the host."""
        return AttentionMetadata(
            block_tables=self._tables[0, first : first + rows],
            context_lens=self._device_sections["contexts"][first : first + rows],
            cu_seqlens_q=self._device_sections["cu_seqlens"][_ends(first, rows)],
            host_context_lens=context_lens,
            host_cu_seqlens_q=cu_seqlens,
        )

    def _head_attention(self, attention: AttentionMetadata, part: Part | None = None) -> AttentionMetadata | None:
        """Return the queries and keys in the layers of a head; None without a head.

        attention: of the same rows in the model's layers.
        part: part with these rows; None for a captured step, which reads the head's own tables.
        """
        if not self._has_mtp:
            return None
        num_rows = len(attention.context_lens)
        first = 0
        table = -1
        host_context_lens = attention.host_context_lens
        if part is not None:
            first = part.first
            table = -1 if self._has_head_table(part.rows) else 0
            host_context_lens = part.head_context_lens[:num_rows]
        rows = slice(first, first + num_rows)
        return replace(
            attention, block_tables=self._tables[table, rows],
            context_lens=self._device_sections["head_contexts"][rows], host_context_lens=host_context_lens)

    def _sampled(self, samples: int, rows: int, lengths: Sequence[RowLengths]) -> SampledTokens:
        assert self.drafting is not None
        return self.drafting.sampled(self._device_sections, self._tables[-1], samples, rows, lengths)

    # Inputs of a step, on the host

    def fill(self, parts: Sequence[tuple[Sequence[Row], int]], sampled: Mapping[int, int] | None = None) -> Staged:
        """Write the inputs of a step to the next host buffer.

        parts: one or two pairs (rows, size): at least one row, padded to `size` rows if that is more. If there are two,
            each row of the first has one token.
        sampled: request -> index among the ids that the previous step sampled; PENDING tokens refer to them.

        Raises KeyError for a PENDING token of a request not in `sampled`, ValueError for a PENDING token that is not
        alone in its row and for more than the buffers hold. The inputs of the step before the previous one must have
        reached the device.
        """
        self._current = 1 - self._current
        arrays = self._host_sections[self._current]
        staged = Staged(
            self._hosts[self._current], self._arrays[self._current], self._device, self._sections_bytes)
        first = 0
        num_samples = 0
        width = 0
        for rows, size in parts:
            lengths = _Lengths.of(rows, self._block_size)
            part = self._fill_part(arrays, rows, lengths, max(size, len(rows)), first, sampled or {})
            if self._has_mtp:
                arrays["next_ids"][first : first + part.tokens] = _next_ids(rows, num_samples)
            staged.parts.append(part)
            first += part.padded
            num_samples += len(part.samples)
            width = max(width, max(lengths.blocks))
        tables = self._table[None, :first, :width]
        if self._has_mtp and any(self._has_head_table(part.rows) for part in staged.parts):
            tables = np.concatenate((tables, self._head_tables(staged.parts, width)))
        staged.put_tables(tables, self._tables)
        return staged

    def pad_tokens(self, part: Part, tokens: int) -> None:
        """Make `self.tokens(tokens)` the step that was filled last, whose first part is `part`.

        Tokens beyond the part belong to no row and are not cached; further rows have neither queries nor keys. If
        attention reads lengths from the host, the tokens belong to the row after the part's, and are cached in the
        padding block. All rows beyond the part's have the padding slot of fixed state.
        """
        arrays = self._host_sections[self._current]
        rows = len(part.rows)
        padding_tokens = slice(part.tokens, tokens)
        padding_rows = slice(rows, self._captured_rows)
        arrays["ids"][padding_tokens] = 0
        arrays["positions"][padding_tokens] = 0
        if self._has_mtp:
            arrays["next_ids"][padding_tokens] = 0
        if self._num_slots:
            arrays["state_slots"][padding_rows] = self._num_slots
        for name in self._context_sections:
            arrays[name][padding_rows] = 0
        cu_seqlens = arrays["cu_seqlens"][_ends(0, self._captured_rows)]
        if not self._reads_host_lengths:
            arrays["slots"][padding_tokens] = -1
            cu_seqlens[rows + 1 :] = part.tokens
            return
        num_padding = tokens - part.tokens
        arrays["slots"][padding_tokens] = self._padding_slots[:num_padding]
        arrays["sample_tokens"][len(part.samples) : self._max_samples] = 0
        for name in self._context_sections:
            arrays[name][rows] = num_padding
        cu_seqlens[rows + 1 :] = tokens
        part.context_lens[rows:] = [num_padding, *[0] * (self._captured_rows - rows - 1)]
        part.cu_seqlens[rows + 1 :] = [tokens] * (self._captured_rows - rows)

    def fill_samples(self, part: Part, samples: int, following: int, *, is_decode: bool) -> Sequence[RowLengths]:
        """Write the samples of a part, the only one of the step that was filled last, for `sampled_tokens`.

        Return the lengths of its rows in the batch of each following token.
        """
        assert self.drafting is not None
        rows = part.padded if is_decode else self._captured_rows
        return self.drafting.fill(
            self._host_sections[self._current], part.rows, self._table, samples, rows, following, pads_rows=is_decode)

    def host_sampling(self, rows: int) -> HostSampling:
        """Return the host's side of `sampling` in the buffer of the step that was filled last."""
        arrays = self._host_sections[self._current]
        floats = arrays["sampling"].reshape(NUM_FLOATS, -1)[:, :rows]
        return HostSampling(arrays["penalty_slots"][:rows], arrays["top_k"][:rows], floats, self._vocabulary)

    def _fill_part(
        self, arrays: dict[str, Array], rows: Sequence[Row], lengths: _Lengths, size: int, first: int,
        sampled: Mapping[int, int],
    ) -> Part:
        """Write the rows at row and token `first`, padded to `size` rows."""
        tokens = lengths.ends[-1]
        self._check_limits(tokens, size, max(lengths.blocks), sum(row.samples for row in rows))
        self._write_tables(rows, lengths.blocks, first)
        arrays["ids"][first : first + tokens] = _ids(rows, lengths.ends, sampled)
        self._write_positions(arrays, rows, lengths, first)
        self._write_rows(arrays, rows, lengths, first)
        if size > len(rows):
            self._pad_rows(arrays, first, len(rows), size)
        return Part(
            rows=rows,
            first=first,
            tokens=tokens,
            decodes=sum(row.is_decode for row in rows),
            samples=[(row.request_id, position) for row, context in zip(rows, lengths.contexts, strict=True)
                     for position in range(context - row.samples + 1, context + 1)],
            cu_seqlens=arrays["cu_seqlens"][_ends(first, size)].tolist(),
            context_lens=arrays["contexts"][first : first + size].tolist(),
            constrained=[index for index, row in enumerate(row for row in rows for _ in range(row.samples))
                         if row.is_constrained],
        )

    def _check_limits(self, tokens: int, rows: int, blocks: int, samples: int) -> None:
        """Raise ValueError if the buffers cannot hold a part. blocks: of its longest row."""
        limits = self._max_tokens, self._max_rows, self._max_blocks, self._max_samples
        if any(number > limit for number, limit in zip((tokens, rows, blocks, samples), limits, strict=True)):
            raise ValueError(f"a step of {tokens} tokens, {rows} rows, {blocks} blocks a row and {samples} samples, "
                             f"while the buffers hold at most {', '.join(map(str, limits))}")

    def _write_tables(self, rows: Sequence[Row], blocks: Sequence[int], first: int) -> None:
        """Write the first blocks[r] blocks of each row r."""
        for place, (row, used) in enumerate(zip(rows, blocks, strict=True), first):
            version, count = self._written[place]
            if row.block_version != version or not version:
                count = 0
            if used > count:
                self._table[place, count:used] = row.block_ids[count:used]
                self._written[place] = row.block_version, used

    def _write_positions(self, arrays: dict[str, Array], rows: Sequence[Row], lengths: _Lengths, first: int) -> None:
        """Write the position and the slot of each token. The rows' tables must be written."""
        block_size = self._block_size
        tokens = slice(first, first + lengths.ends[-1])
        if lengths.ends[-1] == len(rows):  # one token each
            arrays["positions"][tokens] = lengths.starts
            arrays["slots"][tokens] = [
                row.block_ids[start // block_size] * block_size + start % block_size
                for row, start in zip(rows, lengths.starts, strict=True)]
            return
        shifts = np.subtract(lengths.contexts, lengths.ends)  # from an index in the part to a position
        positions = np.arange(lengths.ends[-1]) + np.repeat(shifts, lengths.tokens)
        table_rows = np.repeat(np.arange(first, first + len(rows)), lengths.tokens)
        blocks = self._table[table_rows, positions // block_size].astype(np.int64)
        arrays["positions"][tokens] = positions
        arrays["slots"][tokens] = blocks * block_size + positions % block_size

    def _write_rows(self, arrays: dict[str, Array], rows: Sequence[Row], lengths: _Lengths, first: int) -> None:
        """Write the lengths, the slots of fixed state and the samples of the rows."""
        places = slice(first, first + len(rows))
        arrays["contexts"][places] = lengths.contexts
        if self._has_mtp:
            arrays["head_contexts"][places] = head_context_lens(lengths.contexts, rows)
        if self._num_slots:
            arrays["state_slots"][places] = [row.state_slot for row in rows]
        arrays["cu_seqlens"][_ends(first, len(rows))] = [0, *lengths.ends]
        sample_tokens = [index for row, end in zip(rows, lengths.ends, strict=True)
                         for index in range(end - row.samples, end)]
        arrays["sample_tokens"][first : first + len(sample_tokens)] = sample_tokens

    def _pad_rows(self, arrays: dict[str, Array], first: int, begin: int, end: int) -> None:
        """Make rows [begin, end) of the part at `first` padding of one token each.

        Their results are not read, and they write to the padding blocks. The rows before them have one token each.
        """
        rows = slice(first + begin, first + end)
        arrays["ids"][rows] = 0
        arrays["positions"][rows] = 0
        if self._has_mtp:
            arrays["next_ids"][rows] = 0
        arrays["slots"][rows] = self._padding_slots[: end - begin]
        if self._num_slots:
            arrays["state_slots"][rows] = self._num_slots
        for name in self._context_sections:
            arrays[name][rows] = 1
        arrays["sample_tokens"][rows] = np.arange(begin, end)
        arrays["cu_seqlens"][_ends(first, end)][begin + 1 :] = np.arange(begin + 1, end + 1)
        self._table[rows, 0] = self._padding_block
        self._written[rows] = [(0, 0)] * (end - begin)

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


class _Lengths(NamedTuple):
    """Lengths of the rows of a part.

    starts: position of the first token of each row.
    tokens: tokens of each row.
    contexts: tokens of the context of each row, those of the step among them.
    ends: tokens of the part up to the end of each row.
    blocks: blocks of each row.
    """

    starts: list[int]
    tokens: list[int]
    contexts: list[int]
    ends: list[int]
    blocks: list[int]

    @classmethod
    def of(cls, rows: Sequence[Row], block_size: int) -> _Lengths:
        starts = [row.start for row in rows]
        tokens = [len(row.token_ids) for row in rows]
        contexts = [start + count for start, count in zip(starts, tokens, strict=True)]
        blocks = [-(-row.num_positions // block_size) for row in rows]
        return cls(starts, tokens, contexts, list(accumulate(tokens)), blocks)


def _ends(first: int, rows: int) -> slice:
    """Return the place of the cumulative tokens of `rows` rows of the part at row `first`, in "cu_seqlens".

    A part has one number more than rows. So the numbers of the second part, which is not at row 0, begin one later.
    """
    begin = first + (first > 0)
    return slice(begin, begin + rows + 1)


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
