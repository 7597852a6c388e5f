"""Which requests are let into the queue.

1. One that could never fit the KV cache is the client's mistake.
2. A client has a limit of its own, if it was given one.
3. A deadline that the first token would miss, as far as anything was measured (deadlines.py), ends a request before
   anything is queued or computed for it.
4. If the queue is full, the newest request of the client with the most makes room for that of a client with fewer;
   otherwise the newcomer is refused. Either is told when to try again.

What an engine before this one had accepted is let in.
"""

from __future__ import annotations

from collections.abc import Collection

from npuserve.service.errors import DeadlineExceeded, InvalidField, QueueFull
from npuserve.service.ipc.messages import Request
from npuserve.service.scheduling.block_manager import BlockManager
from npuserve.service.scheduling.deadlines import Pace
from npuserve.service.scheduling.fair_queue import Account, FairQueue
from npuserve.service.scheduling.sequence import Sequence


class Admission:
    """Owns nothing: reads what the scheduler has. running, paused: those that hold blocks."""

    def __init__(
        self, queue: FairQueue, running: Collection[Sequence], paused: dict[int, Sequence], blocks: BlockManager,
        pace: Pace, max_num_seqs: int, max_queue: int,
    ):
        self._queue = queue
        self._running = running
        self._paused = paused
        self._blocks = blocks
        self._pace = pace
        self._max_num_seqs = max_num_seqs
        self._max_queue = max_queue

    def displaced_by(self, request: Request, account: Account, now: float) -> tuple[Sequence, QueueFull] | None:
        """Who must leave the queue for this request of this client, and what it is told; None if there is room.

        Raises InvalidField, QueueFull, DeadlineExceeded for a request that is not let in.
        """
        self._check(request)
        if request.past.accepted:
            return None
        if request.client_limit and account.live >= request.client_limit:
            raise QueueFull(
                f"client limit: max_requests_per_client or the key's own limit is {request.client_limit}, and "
                f"{account.live} requests of this client have not ended",
                self._pace.retry(now, account.live), "client_limit")
        if request.deadline is not None:
            self._check_deadline(request, account, now)
        running, waiting = len(self._running), len(self._queue)
        if running + waiting + len(self._paused) < self._max_num_seqs + self._max_queue:
            return None
        retry = self._pace.retry(now, running)
        displaced = self._queue.displaced_by(account)
        if displaced is None:
            raise QueueFull(f"queue full: max_queue is {self._max_queue}, and {waiting} requests wait", retry)
        why = f"displaced: max_queue is {self._max_queue}, and a client with fewer requests took the place"
        return displaced, QueueFull(why, retry, "displaced")

    def _check(self, request: Request) -> None:
        if not request.prompt_ids:
            raise InvalidField("prompt", "must have at least 1 token")
        if len(request.output_ids) >= request.max_tokens:
            raise InvalidField(
                "stopping.max_tokens", f"must be more than the {len(request.output_ids)} tokens generated before, "
                f"got {request.max_tokens}")
        # The last token is sampled, never computed, so it needs no room.
        prompt, room = len(request.prompt_ids), self._blocks.capacity + 1
        if prompt >= room:
            raise InvalidField("prompt", f"must be at most {room - 1} tokens, what the KV cache holds, got {prompt}")
        if prompt + request.max_tokens > room:
            raise InvalidField(
                "stopping.max_tokens", f"must be at most {room - prompt} after a prompt of {prompt} tokens, since the "
                f"KV cache holds {room - 1}; got {request.max_tokens}")

    def _check_deadline(self, request: Request, account: Account, now: float) -> None:
        assert request.deadline is not None
        left, wait = max(0.0, request.deadline - now), self.wait(request, account)
        if wait + self._pace.margin > left:
            raise DeadlineExceeded(
                f"deadline: in {left:.3f} s; the first token would take about {wait:.3f} s, and the margin before a "
                f"deadline is {self._pace.margin:.3f} s")

    def wait(self, request: Request, account: Account) -> float:
        """About how many seconds until its first token: until there is a seat and room for it, or until the prompts
        before it are computed, and then its own."""
        pace, running, known = self._pace, len(self._running), len(request.prompt_ids) + len(request.output_ids)
        requests, tokens = self._queue.ahead(account, request.priority, pace.answer)
        counts = self._blocks.counts
        held = sum(len(sequence.block_ids) for sequence in self._paused.values())
        room = max(0, counts.free + counts.cached + held - running) * self._blocks.block_size
        fitting = min(self._max_num_seqs - running, (requests + 1) * room / (tokens + known))
        begun = sum(n for s in self._running if (n := s.num_uncomputed_tokens) > 1)
        seat = pace.drained(max(0.0, requests + 1 - fitting), running)
        return max(seat, pace.seconds(tokens + begun)) + pace.seconds(known)
