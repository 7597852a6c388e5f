"""Calls that generate no token: Embed and Rank.

An embedding is one request in the engine, and each document of a Rank call is one. They enter the same queue as
requests that generate, and their rows the same steps. Their last step ends them with their values
(npu/execution/pooler.py).

Of a Rank call, MAX_CONCURRENT documents are in the engine at a time. The first one decides whether the call is
accepted. A later one that finds the queue full waits and tries again, until the call's deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from array import array
from typing import TYPE_CHECKING, Any

import msgspec

from npuserve.service import metrics
from npuserve.service.errors import Aborted, DeadlineExceeded, QueueFull
from npuserve.service.frontend.generation import REQUEST_ID, Generation
from npuserve.service.frontend.samples import run_together
from npuserve.service.ipc.messages import Finish, Request
from npuserve.service.requests import validation
from npuserve.service.requests.pooling import check_embed, check_rank
from npuserve.service.rpc.call import Context, arrival
from npuserve.service.streams.engine_client import EngineClient
from npuserve.v1 import generate_pb2, pooling_pb2

if TYPE_CHECKING:
    from npuserve.service.rpc.tracing import Trace

MAX_CONCURRENT = 16


class PooledCalls:
    """Embed and Rank for the servicers of one front end."""

    def __init__(self, engine: EngineClient, generation: Generation):
        self._engine = engine
        self._generation = generation

    async def embed(
        self, message: pooling_pb2.EmbedRequest, context: Context, fields: dict[str, Any], trace: Trace | None,
        service: str = "", max_request_id_characters: int = validation.MAX_REQUEST_ID_CHARACTERS,
    ) -> pooling_pb2.EmbedResponse:
        """Return the embedding of an input.

        fields: of the call's log line.
        service: of the request, see `messages.Request`.
        max_request_id_characters: see `validation.Policy`.

        Raises ServeError for a bad field, a model of another task, and if the engine refuses or ends the request.
        """
        call = self._generation.begin(message, context, fields, max_request_id_characters)
        checked = await self._generation.prepare(
            context, "embed", message, check_embed, message, call.folder, call.info, call.name, arrival(), call.policy)
        request = msgspec.structs.replace(call.owned(checked), service=service)
        usage = _PooledUsage(fields, call.folder.name, trace)
        response = pooling_pb2.EmbedResponse(values=await self._values(request, usage))
        response.usage.CopyFrom(usage.message())
        await context.send_initial_metadata(((REQUEST_ID, call.name),))
        context.set_trailing_metadata(())
        return response

    async def rank(
        self, message: pooling_pb2.RankRequest, context: Context, fields: dict[str, Any], trace: Trace | None
    ) -> pooling_pb2.RankResponse:
        """Return the scores of documents. Arguments and errors as of `embed`."""
        call = self._generation.begin(message, context, fields, validation.MAX_REQUEST_ID_CHARACTERS)
        checked = await self._generation.prepare(
            context, "rank", message, check_rank, message, call.folder, call.info, call.name, arrival(), call.policy)
        requests = [call.owned(request) for request in checked]
        usage = _PooledUsage(fields, call.folder.name, trace)
        scores = await self._scores(requests, usage)
        response = pooling_pb2.RankResponse(scores=scores)
        response.usage.CopyFrom(usage.message())
        await context.send_initial_metadata(((REQUEST_ID, call.name),))
        context.set_trailing_metadata(())
        return response

    async def _scores(self, requests: list[Request], usage: _PooledUsage) -> list[float]:
        """Return the score of each document."""
        scores = [0.0] * len(requests)
        waiting = iter(enumerate(requests))

        async def work() -> None:
            for index, request in waiting:
                (scores[index],) = await self._values(request, usage, may_wait=index > 0)

        limit = requests[0].client_limit or MAX_CONCURRENT
        await run_together(work() for _ in range(min(MAX_CONCURRENT, limit, len(requests))))
        return scores

    async def _values(self, request: Request, usage: _PooledUsage, may_wait: bool = False) -> array[float]:
        """Return the values of a request. may_wait: try again if a queue is full."""
        while True:
            try:
                with contextlib.closing(self._engine.submit(request)) as stream:
                    async for outputs in stream:
                        if (finish := outputs[-1].finish) is not None:
                            usage.add(finish, request)
                            return _floats(outputs[-1].values)
                raise Aborted("the request was closed")
            except QueueFull as error:
                if not may_wait:
                    raise
                seconds = error.retry_seconds
            await asyncio.sleep(seconds)


class _PooledUsage:
    """Usage of a call, its metrics and its trace.

    model: name of the served model.
    """

    def __init__(self, fields: dict[str, Any], model: str, trace: Trace | None):
        self._fields = fields
        self._model = model
        self._trace = trace
        self._prompt_tokens = 0
        self._cached_tokens = 0

    def add(self, finish: Finish, request: Request) -> None:
        """Count a request that has ended. Raises DeadlineExceeded or Aborted for one without values."""
        metrics.request_finish_total.labels(finish.reason).inc()
        if finish.reason == "deadline":
            raise DeadlineExceeded("deadline: it came before the whole input was computed")
        if finish.reason != "pooled":
            raise Aborted("the request was aborted")
        self._prompt_tokens += finish.prompt_tokens
        self._cached_tokens += finish.cached_tokens
        seconds = time.monotonic() - request.arrival
        metrics.request_prompt_tokens.observe(finish.prompt_tokens)
        metrics.prefill_time_seconds.observe(sum(finish.timing.prefill_chunks))
        metrics.e2e_request_latency_seconds.observe(seconds)
        self._fields.update(
            reason=finish.reason, prompt_tokens=self._prompt_tokens, cached_tokens=self._cached_tokens,
            e2e=round(seconds, 6))
        if self._trace:
            self._trace.finished(finish.timing, self._model, None)

    def message(self) -> generate_pb2.Usage:
        return generate_pb2.Usage(prompt_tokens=self._prompt_tokens, cached_tokens=self._cached_tokens)


def _floats(data: bytes) -> array[float]:
    """Return the values of an output; see `messages.Output`."""
    values = array("f", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
