"""Inputs of drafting whose shapes and lengths the host knows, though the device alone knows which drafts are right.

A row with W samples has W - 1 drafts. Which of its samples is the last valid one follows from the samples. So for each
further draft the row computes W tokens, one after each sample, as if that sample were the last valid one:

    samples               s1     s2     s3     s4         valid: s1 and s2, since s2 differs from its draft
    tokens of draft 2     d1     d1'    d1''   d1'''      d1': draft 1 after s2
    positions             p + 1  p + 2  p + 3  p + 4

Attention is causal, and the queries of a row are its last ones: the i-th reads all keys up to its position. So the
token after the last valid sample reads the keys of valid tokens alone, whatever follows. Its keys and values are
written to the request's blocks. Those of the other tokens are written to padding, and what is drafted after them is
dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from npuserve.kernels.attention import AttentionMetadata
from npuserve.npu.backends.base import RowLengths
from npuserve.npu.execution.masks import Array
from npuserve.npu.step import Row

MAX_DRAFTED_SAMPLES = 128
"""Samples of the largest captured step that drafts: the slots of a block for padding."""


@dataclass(frozen=True, slots=True)
class Following:
    """One token after each of S samples.

    slots: [S] int64, slot of each token if the sample before it is the last valid one.
    """

    positions: Tensor
    slots: Tensor
    attention: AttentionMetadata


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """S samples of a step. Tokens may be drafted after each.

    tokens: [S] int64, index of the batch's token before each sample.
    drafts: [S] int64, the draft that each sample is compared with; -1 for none.
    begins: [S] int64, first sample of each sample's row.
    padding: [S] int64, slot for what no request needs.
    following: the tokens 1, 2, ... after each sample.
    """

    tokens: Tensor
    drafts: Tensor
    begins: Tensor
    padding: Tensor
    following: Sequence[Following]


class DraftBuffers:
    """Sections of a step's buffers for `SampledTokens`.

    tokens: number of tokens after each sample that are computed.
    max_samples: most samples of a step.
    rows: most rows of a step, those of padding among them.
    padding_slots: slots of padding, MAX_DRAFTED_SAMPLES different ones; None if a slot of -1 is not written.
    """

    def __init__(self, tokens: int, max_samples: int, rows: int, block_size: int, padding_slots: Array | None) -> None:
        self._tokens = tokens
        self._max_samples = max_samples
        self._rows = rows
        self._block_size = block_size
        self._has_padding = padding_slots is not None
        self._padding = np.full(max_samples, -1) if padding_slots is None else padding_slots[:max_samples]

    @property
    def most_samples(self) -> int:
        """Samples of the largest step that drafts: each sample needs a padding slot of its own."""
        return min(self._max_samples, MAX_DRAFTED_SAMPLES) if self._has_padding else self._max_samples

    def drafted_samples(self, tokens: int) -> int:
        """Return the number of samples after which a captured step of `tokens` tokens of any rows drafts."""
        return min(tokens, self.most_samples)

    @property
    def sections(self) -> dict[str, tuple[int, torch.dtype]]:
        """The sections by name: number of their elements, and dtype."""
        samples = self._max_samples
        return {"drafts": (samples, torch.int64), "sample_begins": (samples, torch.int64),
                "padding_slots": (samples, torch.int64),
                "following_positions": (self._tokens * samples, torch.int64),
                "following_slots": (self._tokens * samples, torch.int64),
                "following_contexts": (self._tokens * self._rows, torch.int32),
                "following_ends": (self._rows + 1, torch.int32)}

    def clear(self, arrays: Mapping[str, Array]) -> None:
        """Write decode rows of padding."""
        arrays["drafts"][:] = -1
        arrays["sample_begins"][:] = np.arange(self._max_samples)
        arrays["padding_slots"][:] = self._padding
        self._by_token(arrays, "following_slots")[:] = self._padding
        self._by_token(arrays, "following_positions")[:] = np.arange(1, self._tokens + 1)[:, None]
        self._by_token(arrays, "following_contexts")[:] = np.arange(2, self._tokens + 2)[:, None]
        arrays["following_ends"][:] = np.arange(self._rows + 1)

    def fill(
        self, arrays: dict[str, Array], step_rows: Sequence[Row], table: Array, samples: int, rows: int, following: int,
        *, pads_rows: bool,
    ) -> list[RowLengths]:
        """Write the samples of a step. Return the lengths of its rows in each batch.

        table: blocks of the step's rows.
        samples, rows: sizes of the batches, to which the step is padded.
        following: number of tokens after each sample.
        pads_rows: each padding sample has a row of its own. Otherwise those of a device that needs padding slots have
            one row together, and others have none.
        """
        self._fill_samples(arrays, step_rows, samples, pads_rows=pads_rows)
        starts, contexts = self._row_lengths(step_rows, samples, rows, pads_rows=pads_rows)
        arrays["following_ends"][: rows + 1] = starts
        limits = [row.num_positions if row.samples else 0 for row in step_rows]
        places = np.repeat(np.arange(len(step_rows)), [row.samples for row in step_rows])
        sampled_positions = _sampled_positions(step_rows)
        result: list[RowLengths] = []
        for token in range(following):
            positions = sampled_positions + 1 + token
            positions[positions >= np.array(limits)[places]] = -1
            self._by_token(arrays, "following_positions")[token, :samples] = 0
            self._by_token(arrays, "following_positions")[token, : len(places)] = np.maximum(positions, 0)
            self._by_token(arrays, "following_slots")[token, :samples] = self._following_slots(
                table, places, positions, samples)
            contexts_after = [min(context + 1 + token, max(0, limit - row.head_start))
                              for context, limit, row in zip(contexts, limits, step_rows, strict=False)
                              ] + contexts[len(step_rows) :]
            self._by_token(arrays, "following_contexts")[token, :rows] = contexts_after
            result.append((contexts_after, starts))
        return result

    def _fill_samples(
        self, arrays: Mapping[str, Array], step_rows: Sequence[Row], samples: int, *, pads_rows: bool
    ) -> None:
        """Write the draft that each sample is compared with, the first sample of its row, and the tokens of padding."""
        widths = [row.samples for row in step_rows]
        count = sum(widths)
        arrays["drafts"][:samples] = -1
        arrays["drafts"][:count] = [draft for row in step_rows if row.samples for draft in (*row.drafts, -1)]
        arrays["sample_begins"][:samples] = np.arange(samples)
        arrays["sample_begins"][:count] = np.repeat(np.cumsum(widths) - widths, widths)
        arrays["sample_tokens"][count:samples] = np.arange(count, samples) if pads_rows else 0

    def _row_lengths(
        self, step_rows: Sequence[Row], samples: int, rows: int, *, pads_rows: bool
    ) -> tuple[list[int], list[int]]:
        """Return the cumulative samples of `rows` rows from 0 on, and the positions of each that are read."""
        num_padding_rows = rows - len(step_rows)
        num_padding = samples - sum(row.samples for row in step_rows)
        padding = [0] * num_padding_rows
        if pads_rows:
            padding = [1] * num_padding_rows
        elif self._has_padding and num_padding:
            padding[0] = num_padding
        contexts = [row.start + len(row.token_ids) - row.head_start if row.samples else 0 for row in step_rows]
        return [0, *accumulate([row.samples for row in step_rows] + padding)], contexts + padding

    def _following_slots(self, table: Array, places: Array, positions: Array, samples: int) -> Array:
        """Return the slots of one token after each sample, padding among them.

        places: row of each sample in `table`. positions: of the tokens; -1 beyond the blocks of the row.
        """
        slots: Array = self._padding[:samples].copy()
        blocks = table[places, np.maximum(positions, 0) // self._block_size].astype(np.int64)
        slots[: len(places)] = np.where(
            positions >= 0, blocks * self._block_size + positions % self._block_size, slots[: len(places)])
        return slots

    def sampled(
        self, device_sections: Mapping[str, Tensor], tables: Tensor, samples: int, rows: int,
        lengths: Sequence[RowLengths],
    ) -> SampledTokens:
        """Return the first `samples` samples of `rows` rows. lengths: of `fill`, or of padding."""
        following: list[Following] = []
        for token, (contexts, starts) in enumerate(lengths):
            positions, slots, context_lens = (
                device_sections[name].view(self._tokens, -1)[token]
                for name in ("following_positions", "following_slots", "following_contexts"))
            attention = AttentionMetadata(
                tables[:rows], context_lens[:rows], device_sections["following_ends"][: rows + 1], list(contexts),
                list(starts))
            following.append(Following(positions[:samples], slots[:samples], attention))
        return SampledTokens(
            tokens=device_sections["sample_tokens"][:samples],
            drafts=device_sections["drafts"][:samples],
            begins=device_sections["sample_begins"][:samples],
            padding=device_sections["padding_slots"][:samples],
            following=following,
        )

    def _by_token(self, arrays: Mapping[str, Array], name: str) -> Array:
        """Return a section as [tokens, samples] or [tokens, rows]."""
        width = self._rows if name == "following_contexts" else self._max_samples
        return arrays[name].reshape(self._tokens, width)


def _sampled_positions(rows: Sequence[Row]) -> Array:
    """Return the position of the token before each sample."""
    widths = np.array([row.samples for row in rows])
    ends = np.array([row.start + len(row.token_ids) for row in rows])
    begins = np.cumsum(widths) - widths
    positions: Array = np.arange(widths.sum()) + np.repeat(ends - widths - begins, widths)
    return positions
