"""Part of a step with the plan of its computation: what is sampled, reported and drafted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from npuserve.npu.execution.dispatch import Selection
from npuserve.npu.execution.sampler import Plan, Put
from npuserve.npu.execution.staged import Part
from npuserve.npu.execution.step_drafting import PlannedDrafts
from npuserve.npu.step import NewRequest


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Hidden states from `begin` on that predict prompt tokens of a request.

    next_ids: [n] int64, the predicted tokens.
    n: number of most likely tokens per report.
    """

    request_id: int
    begin: int
    next_ids: Tensor
    n: int


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Rows whose last hidden states are wanted.

    requests: ids of their requests.
    tokens: [n] int64, index of the last token of each row within its part.
    """

    requests: list[int]
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class Work:
    """Part of a step as the device computes it.

    first: index of its first token among the tokens that the step samples.
    selection: the captured step that computes it; None for kernel by kernel, or if the host does.
    pooled: None if no row pools.
    drafts: drafting after it; None if nothing drafts.
    times_drafts: the time of drafting is measured.
    """

    part: Part
    first: int
    plan: Plan
    selection: Selection | None
    prompt: list[PromptRows]
    pooled: PooledRows | None = None
    drafts: PlannedDrafts | None = None
    times_drafts: bool = False

    @property
    def needs_all_hidden(self) -> bool:
        """True if hidden states of other tokens than those that are sampled from are needed."""
        return bool(self.prompt or self.pooled)


def pooled_rows(part: Part, put: Put) -> PooledRows | None:
    """Return the rows of a part that pool; None if there are none."""
    rows = [(row.request_id, end - 1) for row, end in zip(part.rows, part.cu_seqlens[1:], strict=False) if row.pools]
    if not rows:
        return None
    requests, tokens = zip(*rows, strict=True)
    return PooledRows(list(requests), put(np.array(tokens)))


def prompt_rows(part: Part, prompts: Mapping[int, NewRequest], put: Put) -> list[PromptRows]:
    """Return the rows that predict prompt tokens of `prompts`, the requests with prompt_logprobs.

    A row at positions [a, b) predicts the prompt's tokens [a + 1, min(b + 1, its length)).
    """
    rows = []
    for row, begin in zip(part.rows, part.cu_seqlens, strict=False):
        request = prompts.get(row.request_id)
        if request is None or request.sampling.prompt_logprobs is None:
            continue
        following = request.prompt_ids[row.start + 1 : row.start + 1 + len(row.token_ids)]
        if following:
            rows.append(
                PromptRows(row.request_id, begin, put(np.array(following)), request.sampling.prompt_logprobs))
    return rows
