"""Steps in flight: a step's state between its launch and its collection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from npuserve.kernels.registry import Span, Timings
from npuserve.npu.backends.base import Captured, Event, Pending
from npuserve.npu.execution.batch import Part, Phase
from npuserve.npu.execution.host_prefill import Chunk
from npuserve.npu.execution.masks import Constrained, StagedMasks
from npuserve.npu.execution.sampler import Logprobs, Plan
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
class Work:
    """Part of a step as the device computes it.

    first: index of its first token among the tokens that the step samples.
    captured: the dispatch that serves it; None for kernel by kernel.
    whole: the dispatch includes LM head and sampler.
    """

    part: Part
    first: int
    plan: Plan
    captured: Captured | None
    whole: bool
    prompt: list[PromptRows]


@dataclass(slots=True)
class Ran:
    """Results of a step whose work is queued.

    spans: device times of its kernels. The device may wait for the host between them.
    unsampled: parts whose sampling is not queued yet, with their hidden states.
    reports: reports of sampled tokens, with their requests.
    prompt: reports of prompt tokens by request, in the order of their positions.

    Both kinds of reports are on the host once `fetched` is complete. The other fields are as in `StepResult`.
    """

    spans: list[Span]
    unsampled: list[tuple[Work, Tensor]] = field(default_factory=list)
    reports: list[tuple[list[int], Logprobs]] = field(default_factory=list)
    prompt: list[tuple[int, Logprobs]] = field(default_factory=list)
    captured: bool = False
    captured_decodes: int = 0
    decoder_decodes: int = 0
    fetched: Event | None = None
    timings: list[Timings] = field(default_factory=list)


@dataclass(slots=True)
class Launched:
    """Launched step; `runner.collect` takes it once.

    requests: requests that it samples for.
    ids: their sampled ids [n] int64 on the host.
    ran: None if the step has no rows, or while part of its work is not queued.
    """

    requests: list[int]
    ids: Tensor
    ran: Pending[Ran] | None = None


@dataclass(slots=True)
class Waiting:
    """Step of which the device's queue has only the beginning, since the rest needs results of the host.

    begun: the queued part. It has the forward pass of `Ran.unsampled` if masks are needed.
    constrained: rows whose masks are not given yet.
    hosted: part whose hidden states the host computes; None if the device computes all.
    masks: of the constrained rows; None if they have none.
    """

    launched: Launched
    begun: Pending[Ran]
    constrained: list[Constrained]
    last: Tensor
    phase: Phase | None
    hosted: tuple[Work, Pending[Chunk]] | None = None
    masks: StagedMasks | None = None


def prompt_rows(
    part: Part, prompts: Mapping[int, NewRequest], put: Callable[[np.ndarray[Any, Any]], Tensor]
) -> list[PromptRows]:
    """Return the rows that predict prompt tokens of `prompts`, the requests with prompt_logprobs.

    A row at positions [a, b) predicts the prompt's tokens [a + 1, min(b + 1, its length)).
    """
    found = []
    for row, begin in zip(part.rows, part.cu_seqlens, strict=False):
        request = prompts.get(row.request_id)
        if request is None or request.sampling.prompt_logprobs is None:
            continue
        following = request.prompt_ids[row.start + 1 : row.start + 1 + len(row.token_ids)]
        if following:
            found.append(PromptRows(row.request_id, begin, put(np.array(following)), request.sampling.prompt_logprobs))
    return found
