"""Rules by which a new request may enter the queue, and the estimate of its time to first token.

`Scheduler.add` applies them in this order:

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

from collections.abc import Callable
from typing import NamedTuple

from npuserve.service.errors import DeadlineExceeded, InvalidField, QueueFull
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.deadlines import DroppedRequest
from npuserve.service.scheduling.latency_estimator import LatencyEstimator
from npuserve.service.scheduling.preemption import Share
from npuserve.service.scheduling.sequence import Account, Sequence


class Load(NamedTuple):
    """What the scheduler has to do when a request arrives.

    running, waiting, paused: numbers of requests.
    free_slots: number of further requests that may run.
    free_blocks: blocks that they can get; one is left to each running request.
    prompt_tokens: prompt tokens of running requests that are not computed.
    """

    running: int
    waiting: int
    paused: int
    free_slots: int
    free_blocks: int
    prompt_tokens: int


class Admission:
    """Rules for new requests.

    max_num_seqs, max_queue, max_model_len: see `Scheduler`.
    """

    def __init__(
        self, estimator: LatencyEstimator, blocks: BlockManager, max_num_seqs: int, max_queue: int,
        max_model_len: int | None,
    ):
        self._estimator = estimator
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._max_queue = max_queue
        self._max_model_len = max_model_len

    def check_size(self, request: Request) -> None:
        """Raise InvalidField if a request never fits the KV cache or max_model_len."""
        num_slots = self._blocks.capacity
        max_model_len = self._max_model_len
        if not request.prompt_ids:
            raise InvalidField("prompt", "must have at least 1 token")
        if request.pooling is not None:
            _check_pooled_size(len(request.prompt_ids), num_slots, max_model_len)
            return
        if len(request.output_ids) >= request.max_tokens:
            raise InvalidField(
                "stopping.max_tokens", f"must be more than the {len(request.output_ids)} tokens generated before, "
                f"got {request.max_tokens}")
        num_prompt_tokens = len(request.prompt_ids)
        if num_prompt_tokens > num_slots:
            raise InvalidField(
                "prompt", f"must be at most {num_slots} tokens, what the KV cache holds, got {num_prompt_tokens}")
        # The last token is sampled, never computed, so it needs no slot.
        if num_prompt_tokens + request.max_tokens > num_slots + 1:
            raise InvalidField(
                "stopping.max_tokens", f"must be at most {num_slots + 1 - num_prompt_tokens} after a prompt of "
                f"{num_prompt_tokens} tokens, since the KV cache holds {num_slots}; got {request.max_tokens}")
        if max_model_len is None:
            return
        if num_prompt_tokens >= max_model_len:
            raise InvalidField(
                "prompt", f"must be at most {max_model_len - 1} tokens, as max_model_len is {max_model_len}, "
                f"got {num_prompt_tokens}")
        if num_prompt_tokens + request.max_tokens > max_model_len:
            raise InvalidField(
                "stopping.max_tokens", f"must be in [1, {max_model_len - num_prompt_tokens}], as max_model_len is "
                f"{max_model_len} and the prompt has {num_prompt_tokens} tokens, got {request.max_tokens}")

    def check_client(self, request: Request, account: Account, now: float) -> None:
        """Raise QueueFull if the client of a request, with its account, has as many as it may have."""
        num_samples = max(1, request.samples - request.index)  # a document counts as one
        if request.client_limit and account.live + num_samples > request.client_limit:
            samples = f"; the call needs {num_samples} more" if request.samples > 1 else ""
            raise QueueFull(
                f"client limit: max_requests_per_client or the key's own limit is {request.client_limit}, and "
                f"{account.live} requests of this client have not ended{samples}",
                self._estimator.retry_seconds(now, account.live, account), "client_limit")

    def check_deadline(self, wait: float, seconds_left: float) -> None:
        """Raise DeadlineExceeded if a first token in `wait` seconds is later than `seconds_left`, less the margin."""
        margin = self._estimator.margin
        if wait + margin > seconds_left:
            raise DeadlineExceeded(
                f"deadline: in {max(0.0, seconds_left):.3f} s; the first token would take about {wait:.3f} s, and the "
                f"margin before a deadline is {margin:.3f} s")

    def is_full(self, num_requests: int) -> bool:
        """Return True if a further request needs the place of another.

        num_requests: running, waiting and paused ones.
        """
        return num_requests >= self._max_num_seqs + self._max_queue

    def check_place(self, displaced: Sequence | None, waiting: int, retry_seconds: float | None) -> DroppedRequest:
        """Return the request that must leave a full queue for a new one, with its error. Raise QueueFull without one.

        displaced: None if all others have a better right to their places.
        waiting: number of requests that wait.
        retry_seconds: of both errors.
        """
        if displaced is None:
            raise QueueFull(f"queue full: max_queue is {self._max_queue}, and {waiting} requests wait", retry_seconds)
        reason = f"displaced: max_queue is {self._max_queue}, and a client with fewer requests took the place"
        return DroppedRequest(displaced, QueueFull(reason, retry_seconds, "displaced"))

    def first_token_seconds(
        self, load: Load, requests: float, tokens: int, num_own_tokens: int, share: Callable[[], Share] | None = None
    ) -> float:
        """Estimate the time to the first token of a new request behind `requests` others with `tokens` tokens.

        It waits until enough running requests have ended or yielded for its blocks and for max_num_seqs, or until the
        prompts before it are computed, whichever is later; then its own prompt of `num_own_tokens` is computed.

        share: returns what running requests yield to its client; None if none does.
        """

        def drain_seconds(slots: int, blocks: int) -> float:
            positions = blocks * self._blocks.block_size
            fitting = min(slots, (requests + 1) * positions / max(tokens + num_own_tokens, 1))
            return self._estimator.drain_seconds(max(0.0, requests + 1 - fitting), load.running)

        drain = drain_seconds(load.free_slots, load.free_blocks)
        if drain and share:
            yielded = share()
            drain = min(drain, drain_seconds(load.free_slots + yielded.slots, load.free_blocks + yielded.blocks))
        prefill = self._estimator.prefill_seconds(tokens + load.prompt_tokens)
        return max(drain, prefill) + self._estimator.prefill_seconds(num_own_tokens)


def _check_pooled_size(num_prompt_tokens: int, num_slots: int, max_model_len: int | None) -> None:
    """Raise InvalidField if the prompt of a request that generates no token never fits."""
    limit = num_slots if max_model_len is None else min(num_slots, max_model_len)
    if num_prompt_tokens > limit:
        raise InvalidField("prompt", f"must be at most {limit} tokens, got {num_prompt_tokens}")
