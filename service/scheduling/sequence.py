"""The engine's side of one request: its tokens, how far they are computed, its blocks and its clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from npuserve.npu.step import TokenLogprobs
from npuserve.service.ipc.messages import Finish, FinishReason, Request, Timing
from npuserve.service.scheduling.block_manager import BlockTable

if TYPE_CHECKING:
    from npuserve.service.scheduling.fair_queue import Account


class Sequence:
    """The mutable state of one Request. Only the Scheduler changes it; the engine reads.

    id: rises with every request added; never used twice. origin: front end's identity and its key.
    rank: its age, the place among the requests with a seat. turn: the place among its client's requests that wait, by
    age and priority. Lower is earlier; both are constant (see scheduler.py). account: its client's.
    token_ids: prompt, then answer, as far as it is on the host. Steps in flight sample num_pending_tokens more.
    num_computed_tokens: positions below it are in the KV cache, or will be once the steps in flight have run.
    cached_tokens: prompt tokens that the prefix cache held at the first admission.
    waits: holds no block; not yet admitted, or preempted. paused: its reader is slow, so it gets no row.
    met: the runner knows it.
    in_flight: steps planned and not yet applied that have a row of it.

    Time in seconds since the request's arrival is cut into disjoint phases, each closed at `clock`:

        arrival ──queue──► admitted ──chunk──►│──chunk──►│──decode──►│ preempted ──queue──► admitted ──chunk──► ...
                                           (each │ is the end of a step that it had a row in)

    Of a request that goes on (Request.past) they begin with those so far; unshared: seconds of computing of which it is
    not known how device and host shared them.
    """

    __slots__ = (
        "account", "blocks", "cached_tokens", "clock", "decode", "device", "id", "in_flight", "met",
        "num_computed_tokens", "num_pending_tokens", "num_prefill_tokens", "num_prompt_tokens", "num_reported_tokens",
        "origin", "paused", "prefill_chunks", "queue", "rank", "request", "token_ids", "turn", "unshared", "waits",
    )

    def __init__(
        self, id: int, origin: tuple[bytes, int], request: Request, aging_seconds: float, account: Account
    ) -> None:
        self.id = id
        self.origin = origin
        self.request = request
        self.rank = (request.arrival, id)
        self.turn = (request.priority * aging_seconds + request.arrival, id)
        self.account = account
        self.token_ids = [*request.prompt_ids, *request.output_ids]
        self.num_prompt_tokens = len(request.prompt_ids)
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.num_prefill_tokens = 0  # tokens that were known at the last admission
        past = request.past
        # Prompt tokens that need no log-probability report any more; the first has none.
        self.num_reported_tokens = 1 + past.num_reported
        self.cached_tokens = past.cached_tokens or 0
        self.blocks = BlockTable(request.cache_salt)
        self.waits = True
        self.paused = False
        self.met = False
        self.in_flight = 0
        timing = past.timing or Timing(0.0, [], 0.0, 0.0, 0.0, request.arrival)
        self.clock = timing.last_step_end
        self.queue = timing.queue
        self.prefill_chunks = list(timing.prefill_chunks)
        self.decode = timing.decode
        self.device = timing.device
        self.unshared = sum(timing.prefill_chunks) + timing.decode - timing.device - timing.host

    @property
    def block_ids(self) -> list[int]:
        return self.blocks.block_ids

    @property
    def num_tokens(self) -> int:
        """Those of the steps in flight included."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def may_go_on(self) -> bool:
        """It may sample one more token: there would not be too many of them, and the one before is on the host or the
        first that is not."""
        pending = self.num_pending_tokens
        return pending < 2 and (
            not pending or len(self.token_ids) + pending - self.num_prompt_tokens < self.request.max_tokens)

    @property
    def had_turn(self) -> bool:
        """It ran, here or in the engine before, and goes on before those that did not."""
        return self.met or (self.request.past.accepted and bool(self.request.output_ids))

    @property
    def uses_prefix_cache(self) -> bool:
        """False: it computes its whole prompt, since it was asked to or since every position must be reported."""
        return not self.request.bypass_prefix_cache and self.request.sampling.prompt_logprobs is None

    def admit(self, num_cached_tokens: int, now: float) -> None:
        """It has blocks for all its tokens, of which the first `num_cached_tokens` are computed."""
        if not self.met:
            self.met = True
            if self.request.past.cached_tokens is None:
                self.cached_tokens = min(num_cached_tokens, self.num_prompt_tokens)
        self.waits = False
        self.num_computed_tokens = num_cached_tokens
        self.num_prefill_tokens = len(self.token_ids)
        self.queue += now - self.clock
        self.clock = now

    def preempt(self) -> None:
        """Back to the queue, to be computed again from the beginning; its tokens stay."""
        self.waits = True
        self.num_computed_tokens = 0

    def go_on(self, now: float) -> None:
        """After a pause, with its blocks. What it waited is queue."""
        self.queue += now - self.clock
        self.clock = now

    def end_step(self, start: int, device_seconds: float, now: float) -> None:
        """A step with its row from position `start` on ended `now`."""
        elapsed = now - self.clock
        self.clock = now
        self.device += min(device_seconds, elapsed)
        if start < self.num_prefill_tokens:
            self.prefill_chunks.append(elapsed)
        else:
            self.decode += elapsed

    def finish_reason(self) -> FinishReason | None:
        """What its last token ends it for, if anything."""
        request, generated = self.request, len(self.token_ids) - self.num_prompt_tokens
        if generated >= request.sampling.min_tokens:
            if self.token_ids[-1] in request.eos_token_ids:
                return "eos"
            if self.token_ids[-1] in request.stop_token_ids:
                return "stop_token"
        return "length" if generated >= request.max_tokens else None

    @property
    def timing(self) -> Timing:
        """The phases so far: queue + sum(prefill_chunks) + decode == last_step_end - arrival, and of the last two
        device + host are all but what is unshared. What it waits since is not in them."""
        computing = sum(self.prefill_chunks) + self.decode
        return Timing(
            queue=self.queue, prefill_chunks=list(self.prefill_chunks), decode=self.decode, device=self.device,
            host=max(0.0, computing - self.device - self.unshared), last_step_end=self.clock,
        )

    def finish(self, reason: FinishReason, keep: int | None = None) -> Finish:
        """How it ended, with all its generated tokens or, where the front end cut the answer, `keep` of them."""
        generated = self.num_generated_tokens if keep is None else keep
        return Finish(reason, self.num_prompt_tokens, self.cached_tokens, generated, self.timing)


class Progress(msgspec.Struct, frozen=True):
    """What one step made for one request. reason: set if it ended with this step.

    logprobs: one per token of token_ids, where asked for. prompt_logprobs: the reports of prompt tokens that follow
    those reported before; recomputed ones are not repeated.
    """

    sequence: Sequence
    token_ids: list[int]
    reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
