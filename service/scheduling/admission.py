"""Decision whether a new request may enter the queue.

1. A request that could never fit the KV cache or max_model_len is invalid. Front ends refuse such new requests. A
   stream that is resumed may be of an earlier server with larger limits.
2. A client has at most `client_limit` live requests, if it has a limit. Each sample of a call is a request. The first
   one is refused unless all of them are within the limit.
3. A request whose first token would miss its deadline, as far as anything was measured (latency_estimator.py), is
   refused before anything is queued or computed for it.
4. If the queue is full, a request of a client with fewer requests displaces the newest request of the client with the
   most. Otherwise the new request is refused. Both errors carry a time to retry.

A request that an earlier engine had accepted is always accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain
from typing import NamedTuple

from npuserve.service.errors import DeadlineExceeded, InvalidField, QueueFull
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.deadlines import DroppedRequest
from npuserve.service.scheduling.fair_queue import FairQueue
from npuserve.service.scheduling.latency_estimator import LatencyEstimator
from npuserve.service.scheduling.preemption import Share
from npuserve.service.scheduling.sample_groups import SampleGroups
from npuserve.service.scheduling.sequence import Account, Sequence


class AddedRequest(NamedTuple):
    """A queued request, and the request that was displaced from a full queue for it, if any."""

    sequence: Sequence
    displaced: DroppedRequest | None


class Occupancy(NamedTuple):
    """Admitted and paused requests at one moment.

    running, paused: number of requests.
    prefill_tokens: uncomputed prompt tokens of the running requests.
    paused_blocks: blocks that the paused requests hold.
    share: what other clients are expected to yield to the new request's client.
    """

    running: int
    paused: int
    prefill_tokens: int = 0
    paused_blocks: int = 0
    share: Share = Share(0, 0)

    @classmethod
    def of(cls, running: Collection[Sequence], paused: Collection[Sequence], with_sums: bool) -> Occupancy:
        """Count the requests, and sum their tokens and blocks if `with_sums`: that takes a pass over all of them."""
        if not with_sums:
            return cls(len(running), len(paused))
        return cls(
            len(running), len(paused), sum(n for s in running if (n := s.num_uncomputed_tokens) > 1),
            sum(len(s.block_ids) for s in paused))


class Admission:
    """Checks of new requests. Reads the scheduler's queue, block counts and latency estimator; changes none of them."""

    def __init__(
        self, queue: FairQueue, samples: SampleGroups, compiling: Mapping[int, Sequence], blocks: BlockManager,
        estimator: LatencyEstimator, max_num_seqs: int, max_queue: int, max_model_len: int | None,
    ):
        self._queue = queue
        self._samples = samples
        self._compiling = compiling
        self._blocks = blocks
        self._estimator = estimator
        self._max_num_seqs = max_num_seqs
        self._max_queue = max_queue
        self._max_model_len = max_model_len

    def check(self, request: Request, account: Account, occupancy: Occupancy, now: float) -> DroppedRequest | None:
        """Return the request that must leave the queue for the new one, with its error; None if there is space.

        account: account of the request's client.
        occupancy: `prefill_tokens`, `paused_blocks` and `share` are read only if the request has a deadline.

        Raises InvalidField, QueueFull or DeadlineExceeded for a request that may not enter.
        """
        self._check_size(request)
        if request.prior.accepted:
            return None
        if request.client_limit and account.live + request.samples - request.index > request.client_limit:
            raise QueueFull(
                f"client limit: max_requests_per_client or the key's own limit is {request.client_limit}, and "
                f"{account.live} requests of this client have not ended{_more(request)}",
                self._estimator.retry_seconds(now, account.live, account), "client_limit")
        if request.deadline is not None:
            self._check_deadline(request, request.deadline - now, account, occupancy)
        waiting = len(self._queue) + len(self._samples) + len(self._compiling)
        if occupancy.running + waiting + occupancy.paused < self._max_num_seqs + self._max_queue:
            return None
        retry = self._estimator.retry_seconds(now, occupancy.running)
        displaced = self._queue.displaced_by(account, chain(self._samples, self._compiling.values()))
        if displaced is None:
            raise QueueFull(f"queue full: max_queue is {self._max_queue}, and {waiting} requests wait", retry)
        reason = f"displaced: max_queue is {self._max_queue}, and a client with fewer requests took the place"
        return DroppedRequest(displaced, QueueFull(reason, retry, "displaced"))

    def _check_size(self, request: Request) -> None:
        if not request.prompt_ids:
            raise InvalidField("prompt", "must have at least 1 token")
        if len(request.output_ids) >= request.max_tokens:
            raise InvalidField(
                "stopping.max_tokens", f"must be more than the {len(request.output_ids)} tokens generated before, "
                f"got {request.max_tokens}")
        # The last token is sampled, never computed, so it needs no slot.
        prompt, slots = len(request.prompt_ids), self._blocks.capacity
        if prompt > slots:
            raise InvalidField("prompt", f"must be at most {slots} tokens, what the KV cache holds, got {prompt}")
        if prompt + request.max_tokens > slots + 1:
            raise InvalidField(
                "stopping.max_tokens", f"must be at most {slots + 1 - prompt} after a prompt of {prompt} tokens, since "
                f"the KV cache holds {slots}; got {request.max_tokens}")
        length = self._max_model_len
        if length and prompt >= length:
            raise InvalidField(
                "prompt", f"must be at most {length - 1} tokens, as max_model_len is {length}, got {prompt}")
        if length and prompt + request.max_tokens > length:
            raise InvalidField(
                "stopping.max_tokens", f"must be in [1, {length - prompt}], as max_model_len is {length} and the "
                f"prompt has {prompt} tokens, got {request.max_tokens}")

    def _check_deadline(self, request: Request, left: float, account: Account, occupancy: Occupancy) -> None:
        wait = self._first_token_seconds(request, account, occupancy)
        if wait + self._estimator.margin > left:
            raise DeadlineExceeded(
                f"deadline: in {max(0.0, left):.3f} s; the first token would take about {wait:.3f} s, and the margin "
                f"before a deadline is {self._estimator.margin:.3f} s")

    def _first_token_seconds(self, request: Request, account: Account, occupancy: Occupancy) -> float:
        """Estimate the time to a new request's first token.

        It waits until enough running requests have ended or yielded for its blocks and for max_num_seqs, or until the
        prompts before it are computed, whichever is later; then its own prompt is computed. A sample of a call waits
        for the followers before it, too, and computes only the part of the prompt that it does not share.
        """
        followers, shared = self._samples.sharing(request)
        estimator, running = self._estimator, occupancy.running
        known = len(request.prompt_ids) + len(request.output_ids) - shared
        requests, tokens = self._queue.ahead(account, request.priority, estimator.answer_tokens)
        requests += followers
        blocks = max(0, self._blocks.num_available + occupancy.paused_blocks - running)  # one is left to each running
        share = occupancy.share

        def drain_seconds(free_slots: int, free_blocks: int) -> float:
            positions = free_blocks * self._blocks.block_size
            fitting = min(free_slots, (requests + 1) * positions / (tokens + known))
            return estimator.drain_seconds(max(0.0, requests + 1 - fitting), running)

        drain = drain_seconds(self._max_num_seqs - running, blocks)
        if drain:
            after_yield = drain_seconds(self._max_num_seqs - running + share.slots, blocks + share.blocks)
            drain = min(drain, after_yield)
        prefill = estimator.prefill_seconds(tokens + occupancy.prefill_tokens)
        return max(drain, prefill) + estimator.prefill_seconds(known)


def _more(request: Request) -> str:
    """Return the end of a sentence about the further requests of a call with several samples."""
    return f"; the call needs {request.samples - request.index} more" if request.samples > 1 else ""
