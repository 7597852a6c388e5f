"""Load generator: sends requests over StreamGenerate at their due times and records the arrival of each message.

Open loop: a request is due and sent at its scheduled time, regardless of the number of running requests. A slow server
therefore builds the queue that its users would build.
Closed loop: a fixed number of clients, each of which sends its next request when the previous one ends. A request has
no scheduled time there, so it is due when it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from npuserve.cli.bench.workload import Prompts, TimedRequest
from npuserve.client import Tls
from npuserve.client.channel import auth_metadata, open_aio_channel
from npuserve.common.answer import value_name
from npuserve.service.rpc.poller import joined_wakeups
from npuserve.v1 import generate_pb2, inference_service_pb2_grpc, model_pb2, prompt_pb2

INTERRUPTED = "INTERRUPTED"
NO_FINISH = "NO_FINISH"


@dataclass(slots=True)
class Outcome:
    """Result of one request, as its client observed it. Times are seconds since the start of the run.

    due: scheduled time; in a closed loop the time of sending.
    sent: time of sending.
    end: time of the stream's end.
    code: name of the gRPC status; INTERRUPTED if the run was stopped first, NO_FINISH for status OK without a Finish.
    detail: details of the gRPC status.
    arrivals: (time, number of tokens) of each message with tokens.
    reason, prompt_tokens, cached_tokens, generated_tokens: fields of the Finish.
    """

    due: float
    sent: float
    end: float = 0.0
    code: str = ""
    detail: str = ""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    @property
    def ok(self) -> bool:
        return self.code == "OK"


class Load:
    """One run against `target` (host:port) over `channels` connections.

    temperature, seed: sampling parameters; request number n samples with seed + n.
    timeout: function from a request to its deadline in seconds after sending; None for no deadline.
    tls, api_key: see npuserve.client.Client.
    outcomes: one entry for each ended request.
    """

    def __init__(
        self, target: str, channels: int, temperature: float, seed: int,
        timeout: Callable[[TimedRequest], float | None] = lambda request: None,
        tls: Tls | None = None, api_key: str | None = None,
    ):
        with joined_wakeups():
            self._channels = [open_aio_channel(target, tls) for _ in range(channels)]
        self._metadata = auth_metadata(api_key)
        self._stubs = [inference_service_pb2_grpc.InferenceServiceStub(c) for c in self._channels]
        self._temperature = temperature
        self._seed = seed
        self._timeout = timeout
        self._start = 0.0
        self.outcomes: list[Outcome] = []

    async def model_info(self, timeout: float = 10.0) -> model_pb2.GetModelInfoResponse:
        """Return the served model's properties. Request them over each connection, which opens all connections.

        Raise grpc.aio.AioRpcError.
        """
        request = model_pb2.GetModelInfoRequest()
        infos = [stub.GetModelInfo(request, timeout=timeout, metadata=self._metadata) for stub in self._stubs]
        return (await asyncio.gather(*infos))[0]  # type: ignore[no-any-return]

    async def close(self) -> None:
        await asyncio.gather(*(channel.close(None) for channel in self._channels))

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _message(self, number: int, request: TimedRequest, prompts: Prompts) -> generate_pb2.GenerateRequest:
        return generate_pb2.GenerateRequest(
            token_ids=prompt_pb2.TokenIds(ids=prompts.token_ids(number, request)),
            sampling=generate_pb2.SamplingParams(temperature=self._temperature, seed=self._seed + number),
            stopping=generate_pb2.StoppingParams(max_tokens=request.output_tokens, ignore_eos=True),
            output=generate_pb2.OutputParams(return_token_ids=True),
        )

    async def _send(
        self, number: int, due: float, message: generate_pb2.GenerateRequest, timeout: float | None
    ) -> None:
        outcome = Outcome(due, self._now())
        try:
            stub = self._stubs[number % len(self._stubs)]
            call = stub.StreamGenerate(message, timeout=timeout, metadata=self._metadata)
            async for answer in call:
                if answer.token_ids:
                    outcome.arrivals.append((self._now(), len(answer.token_ids)))
                if answer.HasField("finish"):
                    usage = answer.finish.usage
                    outcome.reason = value_name(generate_pb2.FinishReason, answer.finish.reason)
                    outcome.prompt_tokens = usage.prompt_tokens
                    outcome.cached_tokens = usage.cached_tokens
                    outcome.generated_tokens = usage.generated_tokens
            outcome.code = "OK" if outcome.reason else NO_FINISH
        except grpc.aio.AioRpcError as error:
            outcome.code = error.code().name
            outcome.detail = error.details() or ""
        except asyncio.CancelledError:
            outcome.code = INTERRUPTED  # the run is over, which is no error of the task
        finally:
            outcome.end = self._now()
            self.outcomes.append(outcome)

    async def _open(self, requests: Sequence[TimedRequest], prompts: Prompts) -> None:
        tasks = []
        try:
            for number, request in enumerate(requests):
                message = self._message(number, request, prompts)  # built before the request is due
                await asyncio.sleep(max(0.0, request.arrival - self._now()))
                tasks.append(asyncio.create_task(self._send(number, request.arrival, message, self._timeout(request))))
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended

    async def _closed(
        self, requests: Sequence[TimedRequest], prompts: Prompts, concurrency: int, stop: asyncio.Event
    ) -> None:
        numbers = iter(range(len(requests)))

        async def client() -> None:
            for number in numbers:
                message = self._message(number, requests[number], prompts)
                await self._send(number, self._now(), message, self._timeout(requests[number]))
                if stop.is_set():
                    return

        await asyncio.gather(*(client() for _ in range(concurrency)))

    async def run(
        self, requests: Sequence[TimedRequest], prompts: Prompts, stop: asyncio.Event, concurrency: int = 0,
        progress: Callable[[int], None] = lambda ended: None,
    ) -> float:
        """Send all requests and return the duration of the run in seconds.

        stop: event that ends the run: no more requests are sent, and running requests are cancelled.
        concurrency: number of clients of a closed loop; 0 for an open loop.
        progress: called several times a second with the number of ended requests.
        """
        self._start = time.perf_counter()
        sending = self._closed(requests, prompts, concurrency, stop) if concurrency else self._open(requests, prompts)
        work = asyncio.create_task(sending)
        stopped = asyncio.create_task(stop.wait())
        while not work.done() and not stopped.done():
            await asyncio.wait({work, stopped}, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
            progress(len(self.outcomes))
        stopped.cancel()
        if not work.done():
            work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        return self._now()
