"""A step on its way through the runner, from its rows on the host to its results there."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from npuserve.kernels.registry import Span, Timings
from npuserve.npu.backends.base import Captured, Event, Pending
from npuserve.npu.execution.batch import Part, Phase
from npuserve.npu.execution.host_prefill import Chunk
from npuserve.npu.execution.sampler import Logprobs, Plan


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Hidden states from `begin` on that predict prompt tokens of a request. next_ids: [n] int64. n: how many likeliest
    tokens each report names."""

    request_id: int
    begin: int
    next_ids: Tensor
    n: int


@dataclass(frozen=True, slots=True)
class Work:
    """A part of a step as the device is to do it. first: of its tokens among those that the step samples. captured:
    the dispatch that serves it, None for kernel by kernel."""

    part: Part
    first: int
    plan: Plan
    captured: Captured | None
    prompt: list[PromptRows]


@dataclass(slots=True)
class Ran:
    """What is left of a step when its work is queued. span: of its kernels. reports: of sampled tokens, by their
    request, and of prompt tokens, in the order of the positions; on the host once `fetched` has come. The rest is as in
    `StepResult`."""

    span: Span
    reports: list[tuple[list[int], Logprobs]] = field(default_factory=list)
    prompt: list[tuple[int, Logprobs]] = field(default_factory=list)
    captured: bool = False
    captured_decodes: int = 0
    fetched: Event | None = None
    timings: list[Timings] = field(default_factory=list)


@dataclass(slots=True)
class Launched:
    """A step on its way. `runner.collect` it once. requests: that it samples for; ids: [those] int64, on the host. ran:
    None if it has no rows, and until all its work is queued."""

    requests: list[int]
    ids: Tensor
    ran: Pending[Ran] | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A step whose decode rows are queued, and whose chunks the host computes. work: what follows on the device."""

    launched: Launched
    begun: Pending[Ran]
    chunk: Pending[Chunk]
    work: Work
    last: Tensor
    phase: Phase | None
