"""Explanations of requests on the local socket: where the time of a request went."""

from __future__ import annotations

from typing import Literal

import msgspec

from npuserve.service.ipc.framing import Wire

Cause = Literal[
    "preparation", "grammar", "queue", "preemption", "slow_reader", "prefill", "neighbour_prefill", "masks", "host",
    "slow_steps", "decode"]
"""What a request spent time on.

preparation: until the engine received it: its message, chat template and tokenizer.
grammar: until the grammar of its constraint was compiled.
queue: then until its first step.
preemption: without KV blocks, which others had; it waited to be computed again.
slow_reader: paused, since its client did not read.
prefill: steps that computed chunks of its own prompt, also again after a preemption.
neighbour_prefill: what chunks of other prompts added to its decode steps.
masks: what token masks added to its decode steps: waits for them, and rows computed again.
host: decode steps whose device waited for the host.
slow_steps: what its decode steps took longer than such steps usually do.
decode: its decode steps otherwise.
"""


class Delay(msgspec.Struct, frozen=True, array_like=True):
    """Time of one cause. steps: number of steps in which it showed; 0 outside of steps. detail: figures in words."""

    cause: Cause
    seconds: float
    steps: int = 0
    detail: str = ""


class KernelComparison(msgspec.Struct, frozen=True, array_like=True):
    """Mean seconds of a kernel's calls in the timed steps of a request, and in other timed steps; 0: there was none.

    kernel: with the phase, as in "linear, decode".
    """

    kernel: str
    calls: int
    mean_seconds: float
    usual_seconds: float


class Explanation(msgspec.Struct, frozen=True, array_like=True):
    """Where the time of one request went.

    index: number of the sample of its call.
    is_live: the request has not ended; the times are those until now.
    seconds: from its arrival.
    num_steps: steps from its first one on, without those while it was preempted or paused.
    is_complete: all its steps are known. False: the first ones are no longer, and their time is missing.
    delays: the longest first.
    kernels: of the timed steps among them, the longest first.
    """

    request_id: str
    client: str
    index: int
    is_live: bool
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    num_steps: int
    is_complete: bool
    delays: list[Delay]
    kernels: list[KernelComparison]


class ExplainRequest(Wire, frozen=True):
    """Explain the requests of this id, live or ended, of all samples. The reply is an ExplainReply.

    client: of the request; "" for any.
    """

    call: int
    request_id: str
    client: str = ""


class ExplainReply(Wire, frozen=True):
    """Reply to an ExplainRequest. Empty: no such request is known."""

    epoch: int
    call: int
    explanations: list[Explanation]
