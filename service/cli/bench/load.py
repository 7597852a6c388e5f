"""The load generator: sends asks over StreamGenerate when they are due and notes when each message came.

Open loop: an ask is due and sent at its time however many are still running, so that a slow server meets the queue that
its users would make. Closed loop: a fixed number of clients, each sending its next ask when the last one ended; an ask
has no time of its own there, so it is due when it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from npuserve.service.cli import client
from npuserve.service.cli.bench.workload import Ask, Prompts
from npuserve.v1 import generate_pb2, inference_service_pb2_grpc, model_pb2, prompt_pb2

INTERRUPTED = "INTERRUPTED"
NO_FINISH = "NO_FINISH"


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it. Times are seconds since the start of the run.

    due: scheduled time; in a closed loop the time of sending.
    sent, end: time of sending, and of the stream's end.
    code: gRPC's status name; INTERRUPTED if the run was stopped first, NO_FINISH if it ended OK without a Finish.
    arrivals: (time, tokens carried) of each message with tokens.
    reason, prompt_tokens, cached_tokens, generated_tokens: from the Finish.
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
    """One run against `target` over `channels` connections. `outcomes` grows by one as each request ends. timeout: each
    request's deadline, in seconds from when it goes; None for none."""

    def __init__(
        self, target: str, channels: int, temperature: float, seed: int,
        timeout: Callable[[Ask], float | None] = lambda ask: None, security: client.Security = client.PLAIN,
    ):
        options = [*client.OPTIONS, ("grpc.use_local_subchannel_pool", 1)]  # else channels share one connection
        self._channels = [
            grpc.aio.secure_channel(target, security.credentials, options) if security.credentials
            else grpc.aio.insecure_channel(target, options) for _ in range(channels)]
        self._sent = security.sent
        self._stubs = [inference_service_pb2_grpc.InferenceServiceStub(c) for c in self._channels]
        self._temperature = temperature
        self._seed = seed
        self._timeout = timeout
        self._start = 0.0
        self.outcomes: list[Outcome] = []

    async def model_info(self, timeout: float = 10.0) -> model_pb2.GetModelInfoResponse:
        """What is served, asked over every connection, so that all are there. Raises grpc.aio.AioRpcError."""
        ask = model_pb2.GetModelInfoRequest()
        infos = [stub.GetModelInfo(ask, timeout=timeout, metadata=self._sent) for stub in self._stubs]
        return (await asyncio.gather(*infos))[0]  # type: ignore[no-any-return]

    async def close(self) -> None:
        await asyncio.gather(*(channel.close(None) for channel in self._channels))

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _message(self, number: int, ask: Ask, prompts: Prompts) -> generate_pb2.GenerateRequest:
        return generate_pb2.GenerateRequest(
            token_ids=prompt_pb2.TokenIds(ids=prompts.token_ids(number, ask)),
            sampling=generate_pb2.SamplingParams(temperature=self._temperature, seed=self._seed + number),
            stopping=generate_pb2.StoppingParams(max_tokens=ask.output_tokens, ignore_eos=True),
            output=generate_pb2.OutputParams(return_token_ids=True),
        )

    async def _send(
        self, number: int, due: float, message: generate_pb2.GenerateRequest, timeout: float | None
    ) -> None:
        outcome = Outcome(due, self._now())
        try:
            call = self._stubs[number % len(self._stubs)].StreamGenerate(message, timeout=timeout, metadata=self._sent)
            async for answer in call:
                if answer.token_ids:
                    outcome.arrivals.append((self._now(), len(answer.token_ids)))
                if answer.HasField("finish"):
                    usage = answer.finish.usage
                    outcome.reason = generate_pb2.FinishReason.Name(answer.finish.reason)
                    outcome.prompt_tokens, outcome.cached_tokens = usage.prompt_tokens, usage.cached_tokens
                    outcome.generated_tokens = usage.generated_tokens
            outcome.code = "OK" if outcome.reason else NO_FINISH
        except grpc.aio.AioRpcError as error:
            outcome.code, outcome.detail = error.code().name, error.details() or ""
        except asyncio.CancelledError:
            outcome.code = INTERRUPTED  # the run's end, not an error: the task ends well
        finally:
            outcome.end = self._now()
            self.outcomes.append(outcome)

    async def _open(self, asks: Sequence[Ask], prompts: Prompts) -> None:
        tasks = []
        try:
            for number, ask in enumerate(asks):
                message = self._message(number, ask, prompts)  # made ahead of its time
                await asyncio.sleep(max(0.0, ask.at - self._now()))
                tasks.append(asyncio.create_task(self._send(number, ask.at, message, self._timeout(ask))))
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended

    async def _closed(self, asks: Sequence[Ask], prompts: Prompts, concurrency: int, stop: asyncio.Event) -> None:
        numbers = iter(range(len(asks)))

        async def client() -> None:
            for number in numbers:
                message = self._message(number, asks[number], prompts)
                await self._send(number, self._now(), message, self._timeout(asks[number]))
                if stop.is_set():
                    return

        await asyncio.gather(*(client() for _ in range(concurrency)))

    async def run(
        self, asks: Sequence[Ask], prompts: Prompts, stop: asyncio.Event, concurrency: int = 0,
        progress: Callable[[int], None] = lambda ended: None,
    ) -> float:
        """Send all asks: at their times, or as `concurrency` clients if it is above 0. Setting `stop` sends no more and
        cancels what runs. Returns the run's seconds. progress(requests ended) is called some times a second."""
        self._start = time.perf_counter()
        sending = self._closed(asks, prompts, concurrency, stop) if concurrency else self._open(asks, prompts)
        work, stopped = asyncio.create_task(sending), asyncio.create_task(stop.wait())
        while not work.done() and not stopped.done():
            await asyncio.wait({work, stopped}, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
            progress(len(self.outcomes))
        stopped.cancel()
        if not work.done():
            work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        return self._now()
