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
        count = sum(row.samples for row in step_rows)
        arrays["drafts"][:samples] = -1
        arrays["sample_begins"][:samples] = np.arange(samples)
        arrays["sample_tokens"][count:samples] = np.arange(count, samples) if pads_rows else 0
        sampling = [(place, row) for place, row in enumerate(step_rows) if row.samples]
        widths = [row.samples for _, row in sampling]
        begins = np.cumsum([0, *widths])[:-1]
        arrays["sample_begins"][:count] = np.repeat(begins, widths)
        for begin, (_, row) in zip(begins, sampling, strict=True):
            arrays["drafts"][begin : begin + row.samples - 1] = row.drafts
        ends = np.array([row.start + len(row.token_ids) for _, row in sampling])
        limits = np.repeat([row.num_positions for _, row in sampling], widths)
        positions = np.arange(count) - np.repeat(begins + widths - ends, widths)
        places = np.repeat([place for place, _ in sampling], widths)
        lengths = [row.samples for row in step_rows] + [0] * (rows - len(step_rows))
        contexts = [row.start + len(row.token_ids) if row.samples else 0 for row in step_rows]
        contexts += [0] * (rows - len(step_rows))
        beyond = samples - count
        if pads_rows:
            lengths[len(step_rows) :] = [1] * beyond
            contexts[len(step_rows) :] = [1] * beyond
        elif self._has_padding and beyond:
            lengths[len(step_rows)] = contexts[len(step_rows)] = beyond
        starts = [0, *accumulate(lengths)]
        arrays["following_ends"][: rows + 1] = starts
        result: list[RowLengths] = []
        for token in range(following):
            after = positions + 1 + token
            is_within = after < limits
            after[~is_within] = 0
            slots = self._padding[:samples].copy()
            written = table[places, after // self._block_size].astype(np.int64) * self._block_size
            written += after % self._block_size
            slots[:count][is_within] = written[is_within]
            of_rows = [min(context + 1 + token, row.num_positions) if row.samples else 0
                       for row, context in zip(step_rows, contexts, strict=False)]
            of_rows += contexts[len(step_rows) :]
            self._by_token(arrays, "following_positions")[token, :samples] = 0
            self._by_token(arrays, "following_positions")[token, :count] = after
            self._by_token(arrays, "following_slots")[token, :samples] = slots
            self._by_token(arrays, "following_contexts")[token, :rows] = of_rows
            result.append((of_rows, starts))
        return result

    def sampled(
        self, on: Mapping[str, Tensor], tables: Tensor, samples: int, rows: int, lengths: Sequence[RowLengths]
    ) -> SampledTokens:
        """Return the first `samples` samples of `rows` rows. lengths: of `fill`, or of padding."""
        following = [
            Following(
                on["following_positions"].view(self._tokens, -1)[token, :samples],
                on["following_slots"].view(self._tokens, -1)[token, :samples],
                AttentionMetadata(
                    tables[:rows], on["following_contexts"].view(self._tokens, -1)[token, :rows],
                    on["following_ends"][: rows + 1], list(contexts), list(starts)))
            for token, (contexts, starts) in enumerate(lengths)]
        return SampledTokens(on["sample_tokens"][:samples], on["drafts"][:samples], on["sample_begins"][:samples],
                             on["padding_slots"][:samples], following)

    def _by_token(self, arrays: Mapping[str, Array], name: str) -> Array:
        """Return a section as [tokens, samples] or [tokens, rows]."""
        width = self._rows if name == "following_contexts" else self._max_samples
        return arrays[name].reshape(self._tokens, width)
