"""The engine: one loop that turns requests into tokens.

1. `receive` takes what the front ends sent: new requests go to the scheduler's queue, cancelled ones leave it and
   their blocks are free at once.
2. `schedule` plans one step: which requests compute how many tokens. `announce` tells the front ends who is new in it.
3. `launch` hands the step to the runner, which has the device compute it after the one before. The step's requests are
   noted before, for the next life to know which of them the engine died of (blame.py).
4. `collect` waits for the sampled ids of the step before, while the device is at work on this one: two steps are in
   flight then. (Without double buffering one is, and it is this step that is waited for.) Through a long one it goes on
   listening, so that cancels, refusals and deadlines do not wait for it.
5. `apply` appends them to their requests, ends those that are done, and frees their blocks.
6. `send` tells each front end, in one message, what that step made for its requests.

The scheduler owns the requests, the block manager the KV cache's blocks, the runner the device, the ledger who is live
for whom and what may be resumed. Each request ends in exactly one Output with a finish or an error, or in a Cancel that
asked for none.

An engine that is not the first begins with what the one before left: `gather` waits for the front ends, which hand it
over, so that all go on in their old order.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict

from npuserve.npu.step import Step
from npuserve.service.engine.blame import Blame
from npuserve.service.engine.metrics import EngineMetrics
from npuserve.service.engine.pipeline import AppliedStep, Runner, StepPipeline
from npuserve.service.engine.request_registry import Ledger, Origin
from npuserve.service.errors import EngineKiller, QueueFull, ServeError, TakenOver, to_wire
from npuserve.service.ipc.engine_socket import EngineSocket
from npuserve.service.ipc.heartbeat import Pulse
from npuserve.service.ipc.messages import (
    Abort,
    Cancel,
    Finish,
    FlushPrefixCache,
    Hello,
    ModelInfo,
    Output,
    Outputs,
    Pause,
    Ready,
    Reply,
    Restore,
    Resume,
    Resumed,
    Started,
    Submit,
    ToEngine,
    ToFrontend,
    Unpause,
)
from npuserve.service.ipc.records import Records
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.sequence import Sequence

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
AUDIT_SECONDS = 10.0
"""Minimum time between two audits of the scheduler's state."""
GATHER_SECONDS = 2.0
"""Maximum time without a message of theirs that a restarted engine waits for the front ends, which connect within some
50 ms."""
LONG_STEP = 0.004
"""Seconds that a step must be expected to take for the engine to listen meanwhile."""
LATE_SECONDS = 1.0
"""After which a step that should have ended is waited for in silence: it may never end, and front ends are to know."""


class Engine:
    """Serves the front ends of `socket` until `stop`. epoch: of this engine's life, on every message that it sends.
    double_buffering: a step is launched before the one before it is collected. pulse: beats with each turn. records: of
    streams that may be resumed. frontends: so many have something to hand over. blame: what is known of the lives
    before."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, socket: EngineSocket, model: ModelInfo, epoch: int,
        double_buffering: bool = True, pulse: Pulse | None = None, records: Records | None = None, frontends: int = 0,
        blame: Blame | None = None,
    ):
        self._scheduler = scheduler
        self._runner = runner
        self._socket = socket
        self.model = model
        self._epoch = epoch
        self._pipeline = StepPipeline(scheduler, runner, 2 if double_buffering else 1, time.monotonic)
        self._pulse = pulse or Pulse("")
        self._metrics = EngineMetrics(scheduler)
        self._blame = blame or Blame()
        self.ledger = Ledger(scheduler, records or Records(0), self._blame)
        self._frontends: set[bytes] = set()
        self._awaited = frontends
        self._gather_until = math.inf
        self._early: list[tuple[bytes, Resume]] = []  # came before all was gathered that they may ask for
        self._outputs: defaultdict[bytes, list[Output]] = defaultdict(list)
        self._accepted: defaultdict[bytes, list[int]] = defaultdict(list)
        self._collected = 0.0  # when a step was last
        self._last_heartbeat = -math.inf
        self._next_audit = -math.inf
        self._idle = False  # nothing is in flight, and nothing was to be launched
        self._stopping = False

    def stop(self) -> None:
        """End `run` once what is in flight is applied. Safe to call from a signal handler."""
        self._stopping = True

    def run(self) -> None:
        self.gather()
        while not self._stopping:
            self._pulse.beat()
            self.receive(self._patience() if self._idle else 0.0)
            step = self._pipeline.plan()
            self._settle()
            if step.rows:
                self.announce(step)
                self.launch(step)
                self._send_outputs()  # acceptances and refusals do not wait for the step
            if self._pipeline.must_collect:
                self.collect()
            elif not self._pipeline and not self._idle:
                self._idle = True
                self._blame.idle()
                self._last_heartbeat = -math.inf  # send all front ends a heartbeat now: nothing runs
            self.send()
            if self._idle:
                self.audit()
        while self._pipeline:
            self.collect()

    def gather(self) -> None:
        """Wait for what the front ends have of the engine before."""
        self._gather_until = time.monotonic() + GATHER_SECONDS
        while self._awaited > 0 and not self._stopping and time.monotonic() < self._gather_until:
            self._pulse.beat()
            self.receive(HEARTBEAT_SECONDS / 10)
            self.send()
        self._awaited = 0
        for frontend, message in self._early:
            self._resume(frontend, message)
        self._early.clear()
        self._blame.save()

    def audit(self) -> None:
        """Check the scheduler's counts, and at most once in AUDIT_SECONDS its whole state. Stop as soon as a message
        arrives or a deadline is due."""
        parts, now = self._scheduler.audit(), time.monotonic()
        next(parts)
        if now < self._next_audit:
            return
        self._next_audit = now + AUDIT_SECONDS
        for _ in parts:
            if self._stopping or self._socket.has_input() or not self._patience():
                return

    def announce(self, step: Step) -> None:
        """Tell the front ends who is new in a step."""
        started: defaultdict[bytes, list[Started]] = defaultdict(list)
        for new in step.new:
            sequence = self._scheduler.sequence(new.request_id)
            frontend, key = sequence.origin
            started[frontend].append(Started(key, sequence.cached_tokens))
        for frontend, those in started.items():
            # A front end that is gone is lost with the next message: now its requests are in the step.
            self._socket.send(frontend, Outputs(self._epoch, self._metrics.load, [], those))

    def launch(self, step: Step) -> None:
        self._blame.launched(step, self._scheduler.sequence, not self._pipeline)
        self._metrics.launched(step, self._pipeline.launch(step).launched)
        self._idle = False

    def collect(self) -> None:
        """Wait for the oldest step in flight, and apply it."""
        self.listen()
        done = self._pipeline.collect()
        self._collected = done.collected
        made = self.report(done)
        self._send_outputs()
        self._metrics.stepped(done.step, done.result, made, done.launched, done.collected)

    def listen(self) -> None:
        """Until the oldest step ends, if it takes long, or is late: handle what comes."""
        expected = self._scheduler.expected_seconds
        if expected < LONG_STEP:
            return
        oldest = self._pipeline.oldest
        end = max(oldest.launched, self._collected) + expected
        while not self._runner.ready(oldest.handle) and (left := end - time.monotonic()) > -LATE_SECONDS:
            self.receive(min(max(left - 0.001, expected / 8), 0.02))  # to ask the device costs it and us a call
            self._send_outputs()

    def receive(self, timeout: float) -> None:
        """Handle all messages that are there, after waiting at most `timeout` seconds for the first."""
        for frontend, message in self._socket.receive(timeout):
            if message is None:
                self._lose(frontend)
            else:
                self._handle(frontend, message)
                self._settle()
        self._scheduler.expire(time.monotonic())
        self._settle()

    def report(self, done: AppliedStep) -> int:
        """Put what a step made into the messages to the front ends; return the number of its tokens."""
        made, now = 0, done.collected
        for progress in done.progress:
            made += len(progress.token_ids)
            sequence = progress.sequence
            frontend, key = sequence.origin
            finish = sequence.finish(progress.reason) if progress.reason else None
            output = Output(key, progress.token_ids, finish, None, progress.logprobs, progress.prompt_logprobs)
            self._outputs[frontend].append(output)
            self.ledger.made(sequence, output, now)
        return made

    def send(self) -> None:
        """What there is for each front end; a heartbeat to all of them now and then."""
        now = time.monotonic()
        if now - self._last_heartbeat >= HEARTBEAT_SECONDS:
            self._last_heartbeat = now
            self._metrics.heartbeat()
            for frontend in self._frontends:
                self._outputs[frontend]  # an entry without outputs is a heartbeat
        self._send_outputs()

    def _send_outputs(self) -> None:
        outputs, self._outputs = self._outputs, defaultdict(list)
        for frontend, made in outputs.items():
            accepted = self._accepted.pop(frontend, [])
            self._send(frontend, Outputs(self._epoch, self._metrics.load, made, [], accepted))

    def _handle(self, frontend: bytes, message: ToEngine) -> None:
        match message:
            case Submit(key=key, request=request):
                try:
                    self.ledger.begin(request, (frontend, key), time.monotonic())
                except ServeError as error:
                    self._refuse((frontend, key), error)
                else:
                    self._accept((frontend, key))
            case Cancel(key=key, keep=keep, sent=sent):
                sequence = self.ledger.live.get((frontend, key))
                if sequence:
                    self._end(sequence, None if keep is None else sequence.finish("stop_string", keep))
                    self._metrics.cancelled(time.monotonic() - sent)
            case Pause(key=key) | Unpause(key=key):
                sequence = self.ledger.live.get((frontend, key))
                if sequence:
                    turn = self._scheduler.pause if isinstance(message, Pause) else self._scheduler.unpause
                    turn(sequence.id)
            case Abort(call=call, request_id=request_id, client=client):
                named = self.ledger.named(request_id, client)
                if len(named) == 1:
                    self._end(named[0], named[0].finish("aborted"))
                self._send(frontend, Reply(self._epoch, call, len(named)))
            case FlushPrefixCache(call=call):
                self._send(frontend, Reply(self._epoch, call, self._scheduler.blocks.flush_prefix_cache()))
            case Hello():
                self._frontends.add(frontend)
                self._send(frontend, Ready(self._epoch, self.model))
            case Restore():
                self._restore(frontend, message)
            case Resume() if self._awaited > 0:
                self._early.append((frontend, message))
            case Resume():
                self._resume(frontend, message)

    def _restore(self, frontend: bytes, message: Restore) -> None:
        now = time.monotonic()
        for kept in message.ended:
            self.ledger.records.restore(kept, now)
        for key, record in message.live:
            origin = frontend, key
            try:
                self._take_over(self.ledger.restore(record, origin, now))
            except ServeError as error:
                self._refuse(origin, error, count=not isinstance(error, EngineKiller))
            else:
                self._accept(origin)
        self._gather_until = now + GATHER_SECONDS  # a front end with much to hand over is waited for
        self._awaited -= message.is_last
        if self._awaited <= 0:
            self._blame.save()

    def _resume(self, frontend: bytes, message: Resume) -> None:
        origin = frontend, message.key
        try:
            record, before = self.ledger.resume(message, origin, time.monotonic())
        except ServeError as error:
            self._refuse(origin, error, count=isinstance(error, QueueFull))
        else:
            self._blame.save()
            self._take_over(before)
            self._send(frontend, Resumed(self._epoch, message.key, record))
            sequence = self.ledger.live.get(origin)
            if sequence and not sequence.waits:
                started = [Started(message.key, sequence.cached_tokens)]
                self._send(frontend, Outputs(self._epoch, self._metrics.load, [], started))

    def _patience(self) -> float:
        """How long to wait for a message when there is nothing to do."""
        deadline = self._scheduler.next_deadline
        return HEARTBEAT_SECONDS if deadline is None else min(max(0.0, deadline - time.monotonic()), HEARTBEAT_SECONDS)

    def _settle(self) -> None:
        """Tell of the requests that the scheduler has dropped."""
        for sequence, error in self._scheduler.dropped():
            if error:
                self.ledger.refuse(sequence, time.monotonic())
                self._refuse(sequence.origin, error)
                continue
            output = Output(sequence.origin[1], finish=sequence.finish("deadline"))
            self.ledger.made(sequence, output, time.monotonic())
            self._outputs[sequence.origin[0]].append(output)

    def _take_over(self, before: Origin | None) -> None:
        """Who read a stream until now hears that another does."""
        if before:
            error = TakenOver("the stream was resumed by another call")
            self._outputs[before[0]].append(Output(before[1], error=to_wire(error)))

    def _accept(self, origin: Origin) -> None:
        frontend, key = origin
        self._outputs[frontend]  # an entry, so that a message is sent
        self._accepted[frontend].append(key)

    def _refuse(self, origin: Origin, error: ServeError, count: bool = True) -> None:
        if count:
            self._metrics.rejected(error)
        self._outputs[origin[0]].append(Output(origin[1], error=to_wire(error)))

    def _end(self, sequence: Sequence, finish: Finish | None) -> None:
        """Take a live request out of the scheduler. finish: what its front end is told; None if nobody waits."""
        self.ledger.end(sequence, time.monotonic(), finish)
        if finish:
            frontend, key = sequence.origin
            self._outputs[frontend].append(Output(key, finish=finish))

    def _send(self, frontend: bytes, message: ToFrontend) -> None:
        """Send, or take the front end for lost."""
        if not self._socket.send(frontend, message):
            self._lose(frontend)

    def _lose(self, frontend: bytes) -> None:
        """Nobody waits for its requests any more."""
        self._frontends.discard(frontend)
        self._outputs.pop(frontend, None)
        self._accepted.pop(frontend, None)
        for sequence in self.ledger.of(frontend):
            self._end(sequence, None)
