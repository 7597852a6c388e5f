"""Replies and outputs for the front ends, collected until each gets one message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from npuserve.npu.execution.pooler import Pooler
from npuserve.service import metrics
from npuserve.service.engine.metrics import EngineMetrics
from npuserve.service.engine.request_registry import Origin, RequestRegistry
from npuserve.service.errors import ServeError, TakenOver, to_wire
from npuserve.service.ipc.messages import Finish, Output, Outputs, ToFrontend
from npuserve.service.scheduling.deadlines import DroppedRequest
from npuserve.service.scheduling.sequence import Progress, Sequence


class Outbox:
    """Outputs and acceptances that are not sent yet. It reports each output to the registry.

    registry: live requests.
    epoch: number of the run of the engine, in every message.
    send: sends a message to a front end, which may be lost then.
    pooler: None for a model that generates text.
    """

    def __init__(
        self,
        registry: RequestRegistry,
        engine_metrics: EngineMetrics,
        epoch: int,
        send: Callable[[bytes, ToFrontend], None],
        pooler: Pooler | None = None,
    ):
        self._registry = registry
        self._metrics = engine_metrics
        self._epoch = epoch
        self._send = send
        self._pooler = pooler
        self._outputs: defaultdict[bytes, list[Output]] = defaultdict(list)
        self._accepted: defaultdict[bytes, list[int]] = defaultdict(list)

    def accept(self, origin: Origin) -> None:
        """Report that a request is queued. In one message, acceptances count before outputs."""
        frontend, key = origin
        self._outputs[frontend]  # an entry, so that a message is sent
        self._accepted[frontend].append(key)

    def take_accepted(self, frontend: bytes) -> list[int]:
        """Return the keys of accepted requests that are not reported yet. The caller reports them."""
        return self._accepted.pop(frontend, [])

    def refuse(self, origin: Origin, error: ServeError, count: bool = True) -> None:
        if count:
            self._metrics.rejected(error)
        self._outputs[origin[0]].append(Output(origin[1], error=to_wire(error)))

    def finish(self, sequence: Sequence, finish: Finish) -> Output:
        """Send the finish of a request that made no token in this step. Clients are accepted before their finish."""
        frontend, key = sequence.origin
        if sequence.needs_matcher:
            self.accept(sequence.origin)
        output = Output(key, finish=finish)
        self._outputs[frontend].append(output)
        return output

    def fail(self, sequence: Sequence, error: ServeError, now: float) -> None:
        """Report the error of a request's constraint. The scheduler has ended the request."""
        self._registry.discard(sequence, now)
        metrics.grammar_errors_total.labels("answer" if sequence.matcher else "compile").inc()
        self.refuse(sequence.origin, error, count=False)

    def drop(self, dropped: Iterable[DroppedRequest], now: float) -> None:
        """Reply to requests that the scheduler dropped."""
        for sequence, error in dropped:
            if error:
                self._registry.discard(sequence, now)
                self.refuse(sequence.origin, error)
            else:
                output = self.finish(sequence, sequence.finish("deadline"))
                self._registry.record_output(sequence, output, now)

    def take_over(self, previous: Origin | None) -> None:
        """Send an error to the previous reader of a stream, if there is one."""
        if previous:
            self.refuse(previous, TakenOver("the stream was resumed by another call"), count=False)

    def add(self, increments: Iterable[Progress], now: float) -> int:
        """Add the progress of a step. Return the number of its tokens."""
        tokens = 0
        for progress in increments:
            tokens += len(progress.token_ids)
            sequence = progress.sequence
            frontend, key = sequence.origin
            if progress.error:
                self.fail(sequence, progress.error, now)
                continue
            finish = sequence.finish(progress.reason) if progress.reason else None
            output = Output(key, progress.token_ids, finish, None, progress.logprobs, progress.prompt_logprobs,
                            self._values(progress))
            self._outputs[frontend].append(output)
            self._registry.record_output(sequence, output, now)
        return tokens

    def _values(self, progress: Progress) -> bytes:
        """Return the values of a request that pools and ends with this step; b"" of other requests."""
        params = progress.sequence.request.pooling
        if progress.hidden is None or params is None or self._pooler is None:
            return b""
        return self._pooler.values(progress.hidden, params.dimensions, params.is_normalized)

    def add_heartbeats(self, frontends: Iterable[bytes]) -> None:
        for frontend in frontends:
            self._outputs[frontend]  # an entry without outputs is a heartbeat

    def flush(self) -> None:
        """Send everything, with the engine's load."""
        outputs_of = self._outputs
        self._outputs = defaultdict(list)
        for frontend, outputs in outputs_of.items():
            accepted = self.take_accepted(frontend)
            self._send(frontend, Outputs(self._epoch, self._metrics.load, outputs, [], accepted))
