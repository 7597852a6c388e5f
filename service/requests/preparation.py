"""Bounded thread pool for work before the engine: parsing, validation, tokenizing, detokenizing, chat templates.

Small and large jobs have a lane each, with its own threads, so that small jobs never wait behind large ones. A lane
serves the callers round-robin, regardless of the number of their jobs. The number of waiting jobs in a lane and their
bytes are bounded, and one caller may have half of each. If a lane is full, a new job displaces the newest job of the
caller with the most bytes. It is refused if its own caller would then have at least as many.

A message to parse enters the large lane only while there is room for it and for the work on it that follows. Until
then it waits, round-robin over the callers; the reader bounds such messages (reader.py). So a caller's large messages
are not refused because they arrive at the same time.

A job that waits in a lane longer than MAX_WAIT_SECONDS is refused. A job of a cancelled call is removed at once. A
running job keeps its thread until it ends: its input was bounded before (validation.py, message_limits.py,
template_process.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar

from npuserve.service import metrics
from npuserve.service.client_queue import ClientQueue, ClientShares, refusal
from npuserve.service.errors import ServeError, Unavailable
from npuserve.service.rpc.refusal_throttle import add_work

P = ParamSpec("P")
T = TypeVar("T")
Kind = Literal["parse", "generate", "embed", "rank", "tokenize", "detokenize"]

MAX_SMALL_JOB_BYTES = 32 << 10
"""Largest input of a job in the small lane, which takes some 15 ms to tokenize."""
MAX_SMALL_LANE_BYTES = 4 << 20
MAX_LARGE_LANE_BYTES = 8 << 20
"""Limit of the input of all jobs that wait in a lane; a single job may exceed it."""
MAX_WAIT_SECONDS = 120.0
"""Far above what the bytes that may wait take on a slow processor, so that an idle server refuses none of its own
clients. A client with less patience sets a deadline."""


@dataclass(eq=False)
class _Job:
    """One function call in a thread.

    size: bytes of input.
    work: the function with its input; None once it was called or is not to be called.
    result: future of its result or error.
    limit: timer of the longest wait in a lane.
    seconds: CPU time of the call; 0 until it has ended.
    """

    owner: str
    kind: Kind
    size: int
    work: Callable[[], Any] | None
    result: asyncio.Future[Any]
    limit: asyncio.TimerHandle | None = None
    seconds: float = 0.0

    def call(self) -> Any:
        """Call `work`, if it is still to be called, and measure its CPU time."""
        work = self.work
        self.work = None
        if work is None:
            return None
        began = time.thread_time()
        try:
            return work()
        except Exception:
            raise
        except BaseException as error:  # a panic of a library in Rust, which would end no call
            raise RuntimeError("a library panicked") from error
        finally:
            self.seconds = time.thread_time() - began


class Preparation:
    """Thread pool of one front end. Use it from one event loop.

    max_waiting: limit of the number of waiting jobs in a lane.
    """

    def __init__(self, max_waiting: int):
        large = max(1, min(4, (os.cpu_count() or 1) // 4))
        self._small = _Lane("small", 2, max_waiting, MAX_SMALL_LANE_BYTES)
        self._large = _Lane("large", large, max_waiting, MAX_LARGE_LANE_BYTES)
        self._pending: set[asyncio.Future[Any]] = set()
        self._shutdown_error: ServeError | None = None

    @property
    def count(self) -> int:
        """Number of calls with waiting or running work."""
        return len(self._pending)

    async def run(
        self, owner: str, kind: Kind, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call the function in a thread, after the waiting jobs before it, and return its result.

        owner: name of the caller.
        kind: kind of work, for metrics.
        size: bytes of input.

        Raises QueueFull if the lane is full or the wait is too long, Unavailable if the system has no thread, and the
        exceptions of the function.
        """
        lane = self._small if size <= MAX_SMALL_JOB_BYTES else self._large
        loop = asyncio.get_running_loop()
        job = _Job(owner, kind, size, functools.partial(function, *args, **kwargs), loop.create_future())
        if lane is self._large and kind == "parse":
            lane.add_when_roomy(job)
        else:
            lane.add(job)
        self._pending.add(job.result)
        metrics.requests_preparing.set(len(self._pending))
        try:
            result: T = await job.result
        except asyncio.CancelledError:
            # The traceback of each error refers to the frames of one call.
            raise copy.copy(self._shutdown_error) or asyncio.CancelledError from None
        finally:
            lane.discard(job)
            add_work(job.seconds)
            self._pending.remove(job.result)
            metrics.requests_preparing.set(len(self._pending))
            del job  # breaks a cycle of the job, its error and this frame, which would keep the input in memory
        return result

    def fail_all(self, error: ServeError) -> None:
        """End all calls with waiting or running work with this error."""
        self._shutdown_error = error
        for result in self._pending:
            result.cancel()

    def close(self) -> None:
        """Start no more work. Do not wait for running threads."""
        for lane in (self._small, self._large):
            lane.close()


class _Lane:
    """Jobs that share threads. If there are several threads, one caller runs on all but one of them at most."""

    def __init__(self, name: str, threads: int, max_jobs: int, max_bytes: int):
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"prepare-{name}")
        self._free = threads
        self._closed = False
        self._max_running = max(1, threads - 1)
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._waiting: ClientQueue[_Job] = ClientQueue(max_jobs, max_bytes)
        self._outside: ClientQueue[_Job] = ClientQueue()  # the reader bounds it
        self._running = ClientShares()

    def add(self, job: _Job) -> None:
        """Queue the job, and start it if a thread is free. Raise QueueFull if the lane is full."""
        shares = self._waiting.shares
        jobs = shares.items(job.owner)
        size = shares.bytes(job.owner)
        while bound := shares.exceeded(job.owner, job.size):
            if bound == "client_limit":
                raise refusal(job.kind, bound, (
                    f"client limit: {jobs} requests of this client with {size} bytes wait to be prepared; a "
                    f"client may have half of {self._limits()}"))
            waiting = f"{shares.total_items} requests with {shares.total_bytes} bytes wait to be prepared"
            owner, newest = self._waiting.largest()
            if (shares.bytes(owner), shares.items(owner)) <= (size + job.size, jobs + 1):
                raise refusal(job.kind, bound, f"queue full: {waiting}; the limits are {self._limits()}")
            self._fail(newest, "displaced", (
                f"displaced by a client with fewer requests: {waiting}; the limits are {self._limits()}"))
        self._waiting.append(job.owner, job, job.size)
        job.limit = asyncio.get_running_loop().call_later(MAX_WAIT_SECONDS, self.expire, job)
        self._start()

    def add_when_roomy(self, job: _Job) -> None:
        """Add the job once the lane has room for it and for a later job of the same size."""
        self._outside.append(job.owner, job)
        self._let_in()

    def _let_in(self) -> None:
        """Add jobs from outside while there is room, round-robin over their callers."""
        while job := next((job for _, job in self._outside.firsts() if self._has_caller_room(job)), None):
            shares = self._waiting.shares
            has_room = (shares.total_items < self._max_jobs // 2
                        and shares.total_bytes + job.size <= self._max_bytes // 2)
            if shares and not has_room:
                return
            self._outside.take(job.owner, job)
            self.add(job)

    def _has_caller_room(self, job: _Job) -> bool:
        """Return whether half of the caller's part is free, the running jobs counted, or all of it."""
        counts = (self._waiting.shares, self._running)
        jobs = sum(shares.items(job.owner) for shares in counts)
        size = sum(shares.bytes(job.owner) for shares in counts) + job.size
        return not jobs or (jobs < self._max_jobs // 4 and size <= self._max_bytes // 4)

    def discard(self, job: _Job) -> None:
        """Remove the job of a call that has ended, wherever it waits."""
        self._outside.remove(job.owner, job)
        if job.limit:
            job.limit.cancel()
        self._waiting.remove(job.owner, job)
        self._let_in()

    def expire(self, job: _Job) -> None:
        """Refuse the job if it still waits."""
        if self._waiting.has(job.owner, job):
            self._fail(job, "timeout", (
                f"timeout: the request waited {MAX_WAIT_SECONDS:g} s, the limit, for the work on others before it; "
                "more front ends (frontends) do more of it at a time"))

    def _limits(self) -> str:
        return f"{self._max_jobs} requests (max_preparing) and {self._max_bytes} bytes for each front end (frontends)"

    def close(self) -> None:
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fail(self, job: _Job, why: str, reason: str) -> None:
        """Remove a waiting job, and refuse it unless its call has just been cancelled."""
        if job.limit:
            job.limit.cancel()
        self._waiting.remove(job.owner, job)
        if not job.result.done():
            job.result.set_exception(refusal(job.kind, why, reason))

    def _start(self) -> None:
        """Start jobs on the free threads, round-robin over the callers."""
        while self._free and not self._closed:
            job = next((job for owner, job in self._waiting.firsts()
                        if self._running.items(owner) < self._max_running), None)
            if job is None:
                return
            if job.limit:
                job.limit.cancel()
            self._waiting.take(job.owner, job)
            loop = asyncio.get_running_loop()
            try:
                work = self._threads.submit(job.call)
            except RuntimeError:  # the system has no further thread; the pool keeps the call for a later one
                job.work = None
                if not job.result.done():
                    job.result.set_exception(Unavailable("the front end cannot start a thread to prepare the request"))
                continue
            self._free -= 1
            self._running.add(job.owner, job.size)
            work.add_done_callback(functools.partial(self._from_thread, loop, job))

    def _from_thread(self, loop: asyncio.AbstractEventLoop, job: _Job, work: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed after the front end has ended
            loop.call_soon_threadsafe(self._end, job, work)

    def _end(self, job: _Job, work: Future[Any]) -> None:
        self._free += 1
        self._running.remove(job.owner, job.size)
        if not job.result.done():
            if work.cancelled():
                job.result.cancel()
            elif error := work.exception():
                job.result.set_exception(error)
            else:
                job.result.set_result(work.result())
        self._start()
        self._let_in()
