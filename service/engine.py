"""The engine: one loop that turns requests into tokens.

1. `receive` takes what the front ends sent: new requests go to the scheduler's queue, cancelled ones leave it and
   their blocks are free at once.
2. `schedule` plans one step: which requests compute how many tokens.
3. `launch` hands the step to the runner, which has the device compute it after the one before.
4. `collect` waits for the sampled ids of the step before, while the device is at work on this one: two steps are in
   flight then. (Without double buffering one is, and it is this step that is waited for.)
5. `apply` appends them to their requests, ends those that are done, and frees their blocks.
6. `send` tells each front end, in one message, what that step made for its requests.

The scheduler owns the requests, the block manager the KV cache's blocks, the runner the device. The engine owns only
who is live under which name, so that each request ends in exactly one Output with a finish or an error, or in a
Cancel that asked for none.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from typing import Any, Protocol

from npuserve.npu.step import Step, StepResult
from npuserve.service.engine_metrics import EngineMetrics
from npuserve.service.engine_socket import EngineSocket
from npuserve.service.errors import DuplicateRequest, ServeError, to_wire
from npuserve.service.messages import (
    Abort,
    Cancel,
    Finish,
    FlushPrefixCache,
    Hello,
    ModelInfo,
    Output,
    Outputs,
    Ready,
    Reply,
    Submit,
    ToEngine,
)
from npuserve.service.scheduler import Scheduler
from npuserve.service.sequence import Sequence

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5


class Runner(Protocol):
    """What the engine needs of npuserve.npu.runner.Runner."""

    def launch(self, step: Step) -> Any: ...
    def collect(self, handle: Any) -> StepResult: ...


class Engine:
    """Serves the front ends of `socket` until `stop`. epoch: of this engine's life, on every message that it sends.
    double_buffering: a step is launched before the one before it is collected."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, socket: EngineSocket, model: ModelInfo, epoch: int,
        double_buffering: bool = True,
    ):
        self._scheduler = scheduler
        self._runner = runner
        self._socket = socket
        self._model = model
        self._epoch = epoch
        self._depth = 2 if double_buffering else 1
        self._flying: deque[tuple[Step, Any, float]] = deque()  # (step, the runner's handle, when it was launched)
        self._metrics = EngineMetrics(scheduler)
        self._live: dict[tuple[bytes, int], Sequence] = {}
        self._names: dict[str, tuple[bytes, int]] = {}
        self._frontends: set[bytes] = set()
        self._outputs: defaultdict[bytes, list[Output]] = defaultdict(list)
        self._last_heartbeat = 0.0
        self._idle = False  # nothing is in flight, nothing was to be launched, and all was found in order
        self._stopping = False

    def stop(self) -> None:
        """End `run` once what is in flight is applied. Safe to call from a signal handler."""
        self._stopping = True

    def run(self) -> None:
        while not self._stopping:
            self.receive(HEARTBEAT_SECONDS if self._idle else 0.0)
            step = self._scheduler.schedule(time.monotonic())
            if step.rows:
                self.launch(step)
            if self._flying and (not step.rows or len(self._flying) == self._depth):
                self.collect()
            elif not self._flying and not self._idle:
                self._scheduler.check_integrity()
                self._idle = True
                self._last_heartbeat = 0.0  # all front ends hear now that nothing runs
            self.send()
        while self._flying:
            self.collect()

    def launch(self, step: Step) -> None:
        handle = self._runner.launch(step)
        self._flying.append((step, handle, self._metrics.launched(step)))
        self._idle = False

    def collect(self) -> None:
        """Wait for the oldest step in flight, and apply it."""
        step, handle, launched = self._flying.popleft()
        result = self._runner.collect(handle)
        collected = time.monotonic()
        made = self.apply(step, result, collected)
        self._metrics.stepped(step, result, made, launched, collected)

    def receive(self, timeout: float) -> None:
        """Handle all messages that are there, after waiting at most `timeout` seconds for the first."""
        for frontend, message in self._socket.receive(timeout):
            self._handle(frontend, message)

    def apply(self, step: Step, result: StepResult, now: float) -> int:
        """How many tokens it made for requests that are still there."""
        made = 0
        for progress in self._scheduler.apply(step, result, now):
            made += len(progress.token_ids)
            sequence = progress.sequence
            frontend, key = sequence.origin
            finish = sequence.finish(progress.reason) if progress.reason else None
            self._outputs[frontend].append(
                Output(key, progress.token_ids, finish, None, progress.logprobs, progress.prompt_logprobs))
            if progress.reason:
                self._forget(sequence)
        return made

    def send(self) -> None:
        """What there is for each front end; a heartbeat to all of them now and then."""
        now = time.monotonic()
        if now - self._last_heartbeat >= HEARTBEAT_SECONDS:
            self._last_heartbeat = now
            self._metrics.heartbeat()
            for frontend in self._frontends:
                self._outputs[frontend]  # an entry without outputs is a heartbeat
        outputs, self._outputs = self._outputs, defaultdict(list)
        for frontend, made in outputs.items():
            self._send(frontend, Outputs(self._epoch, self._metrics.load, made))

    def _handle(self, frontend: bytes, message: ToEngine) -> None:
        match message:
            case Submit():
                self._submit(frontend, message)
            case Cancel(key=key, keep=keep, sent=sent):
                sequence = self._live.get((frontend, key))
                if sequence:
                    self._end(sequence, None if keep is None else sequence.finish("stop_string", keep))
                    self._metrics.cancelled(time.monotonic() - sent)
            case Abort(call=call, request_id=request_id):
                origin = self._names.get(request_id)
                if origin:
                    sequence = self._live[origin]
                    self._end(sequence, sequence.finish("aborted"))
                self._send(frontend, Reply(self._epoch, call, int(origin is not None)))
            case FlushPrefixCache(call=call):
                self._send(frontend, Reply(self._epoch, call, self._scheduler.blocks.flush_prefix_cache()))
            case Hello():
                self._frontends.add(frontend)
                self._send(frontend, Ready(self._epoch, self._model))

    def _submit(self, frontend: bytes, message: Submit) -> None:
        origin, request = (frontend, message.key), message.request
        try:
            if request.request_id in self._names:
                raise DuplicateRequest(f"request_id: {request.request_id} is that of a live request")
            sequence = self._scheduler.add(request, origin, time.monotonic())
        except ServeError as error:
            self._metrics.rejected(error)
            self._outputs[frontend].append(Output(message.key, error=to_wire(error)))
        else:
            self._live[origin] = sequence
            self._names[request.request_id] = origin

    def _end(self, sequence: Sequence, finish: Finish | None) -> None:
        """Take a live request out of the scheduler. finish: what its front end is told; None if nobody waits."""
        self._scheduler.cancel(sequence.id)
        self._forget(sequence)
        if finish:
            frontend, key = sequence.origin
            self._outputs[frontend].append(Output(key, finish=finish))

    def _forget(self, sequence: Sequence) -> None:
        del self._live[sequence.origin]
        del self._names[sequence.request.request_id]

    def _send(self, frontend: bytes, message: Ready | Outputs | Reply) -> None:
        """Send, or take the front end for lost: nobody waits for its requests any more."""
        if self._socket.send(frontend, message):
            return
        self._frontends.discard(frontend)
        for sequence in [s for origin, s in self._live.items() if origin[0] == frontend]:
            self._end(sequence, None)
