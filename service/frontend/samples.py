"""Samples of one call with n above 1.

Each sample is a request of its own in the engine, with its own seed and stream. Here it has a task of its own, which
reads the stream, so that each sample has its own backpressure. The tasks write to the client one at a time. The first
error ends all of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

import msgspec

from npuserve.service.requests.validation import CheckedRequest
from npuserve.service.streams.stream import Stream
from npuserve.v1 import generate_pb2 as pb

Send = Callable[[pb.StreamGenerateResponse], Awaitable[None]]
SEEDS = 1 << 64
"""Number of seeds; seeds are below it."""


def split(checked: CheckedRequest) -> list[CheckedRequest]:
    """Return the request of each sample, in order of index.

    Sample i has seed + i, so that it equals the answer to a request with one sample and that seed. Only the first
    sample has prompt_logprobs, which are the same for all.
    """
    replace = msgspec.structs.replace
    request = checked.request
    samples = [checked]
    for index in range(1, request.samples):
        sampling = replace(request.sampling, seed=(request.sampling.seed + index) % SEEDS, prompt_logprobs=None)
        samples.append(dataclasses.replace(checked, request=replace(request, index=index, sampling=sampling)))
    return samples


class SendOrder:
    """Order of the messages of several samples: one is sent at a time.

    send: sends one message.
    is_pending: a message is being sent, or its send failed or was cancelled, so that gRPC may still hold it.
    """

    def __init__(self, send: Send):
        self.is_pending = False
        self._send = send
        self._lock = asyncio.Lock()

    def of(self, stream: Stream) -> Send:
        """Return a function that sends a message of `stream` when its turn comes.

        The wait does not count as slow reading: the client reads the message of another sample meanwhile. Raises
        CancelledError after a failed or cancelled send: the call is ending.
        """

        async def send_in_turn(message: pb.StreamGenerateResponse) -> None:
            stream.suspend_check()
            async with self._lock:
                if self.is_pending:
                    raise asyncio.CancelledError
                stream.restart_check()
                self.is_pending = True
                await self._send(message)
                self.is_pending = False

        return send_in_turn


async def run_together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run the coroutines concurrently until all have ended. The first exception cancels the others and is raised.

    A coroutine that raises CancelledError has ended; the others decide the result. If this task is cancelled, all
    coroutines are.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in sorted(done, key=asyncio.Task.cancelled):
        task.result()
