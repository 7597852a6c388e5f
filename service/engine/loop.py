"""The engine: one loop that turns requests into tokens.

1. `receive` reads the messages of the front ends. New requests enter the scheduler's queue; cancelled ones leave it,
   and their blocks are free at once.
2. `_launch_next` plans one step, which names the requests that compute and how many tokens. It reports requests that
   start to their front ends, logs the step for the search for crashes (crash_tracker.py), and launches the step. The
   device computes it after the one before.
3. `collect` waits for the oldest step, while the device computes the next: two steps are in flight then. Without double
   buffering one is, and it is the one to wait for. During a long step the engine continues to read messages, so
   that cancels, refusals and deadlines do not wait for it. The scheduler appends the sampled tokens to their requests,
   ends the complete ones, and frees their blocks. If no step is in flight then, the next one is launched at once, so
   that the device does not wait for 4 and 1: without double buffering, and where drafts need the step's tokens.
4. `send` sends each front end, in one message, the step's output for its requests.

The scheduler owns the requests, the block manager the KV cache's blocks, the runner the device, the pipeline the steps
in flight. The registry knows the live requests of each front end and the streams that may be resumed. Each request ends
in exactly one Output with a finish or an error, or in a Cancel that requested none.

A restarted engine first receives the unfinished requests from the front ends (`restore`), so that they continue in
their old order.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from npuserve.npu.execution.pooler import Pooler
from npuserve.npu.step import Step
from npuserve.service.engine.crash_tracker import CrashTracker
from npuserve.service.engine.kv_event_stream import KvEventStream
from npuserve.service.engine.metrics import EngineMetrics
from npuserve.service.engine.outbox import Outbox
from npuserve.service.engine.pipeline import Runner, StepPipeline
from npuserve.service.engine.profiles import Profiles
from npuserve.service.engine.request_history import RequestHistory
from npuserve.service.engine.request_registry import Origin, RequestRegistry
from npuserve.service.errors import QueueFull, ServeError
from npuserve.service.ipc.engine_socket import EngineSocket
from npuserve.service.ipc.explanations import ExplainReply, ExplainRequest
from npuserve.service.ipc.kv_events import ReadKvEvents, SubscribeKvEvents, UnsubscribeKvEvents
from npuserve.service.ipc.messages import (
    Abort,
    Cancel,
    Finish,
    FlushPrefixCache,
    Hello,
    ModelInfo,
    Outputs,
    Pause,
    Ready,
    Reply,
    Request,
    Restore,
    Resume,
    Resumed,
    Started,
    Submit,
    ToEngine,
    ToFrontend,
    Unpause,
)
from npuserve.service.ipc.profile_messages import StartProfile, StopProfile
from npuserve.service.processes.child import Heartbeat
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.sequence import Progress, Sequence
from npuserve.service.streams.records import Records
from npuserve.service.structured_output.manager import MASK_WAIT_SECONDS, BuiltCompiler, StructuredOutputManager

if TYPE_CHECKING:
    from npuserve.npu.profiling.session import Profiler

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
AUDIT_SECONDS = 10.0
"""Minimum time between two audits of the scheduler's state."""
RESTORE_SECONDS = 2.0
"""Maximum time between messages that a restarted engine waits for the front ends. They connect within about 50 ms."""
LONG_STEP_SECONDS = 0.004
"""Minimum expected duration of a step for the engine to read messages during it."""
LOAD_POLL_SECONDS = 0.001
"""Time between two polls of the loads from host memory while nothing runs, and during a long step."""
MAX_EARLY_SECONDS = 0.005
"""Most time before the expected end of a step at which the engine stops reading messages, if the next step needs its
tokens. The time is a quarter of a short step."""
LATE_SECONDS = 1.0
"""Stop reading messages when a step is late by this, or by its expected duration if longer, so that front ends detect
the stall: it may never end. If masks need the step's tokens, reading stops before its expected end."""


class Engine:
    """Engine that serves the front ends of `socket` until `stop`.

    epoch: number of this run of the engine, in every message that it sends.
    double_buffering: launch a step before the one before it is collected.
    heartbeat: sent in each iteration of the loop; None for none.
    records: records of streams that may be resumed; None for none.
    frontends: number of front ends that restore the requests of an earlier engine.
    crashes: requests of the steps that crashed earlier engines; None for no search.
    kv_events: stream of the prefix cache's changes; None for none.
    build_compiler: see StructuredOutputManager; None refuses constraints.
    profiler: makes profiles; None refuses them.
    on_idle: called about every HEARTBEAT_SECONDS while nothing runs; None for nothing.
    pooler: of an embedding model or a reranker; None for a model that generates text.
    history: gets the times of the runner's kernels; None without them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        socket: EngineSocket,
        model: ModelInfo,
        epoch: int,
        double_buffering: bool = True,
        heartbeat: Heartbeat | None = None,
        records: Records | None = None,
        frontends: int = 0,
        crashes: CrashTracker | None = None,
        kv_events: KvEventStream | None = None,
        build_compiler: Callable[[Callable[[], None]], BuiltCompiler] | None = None,
        profiler: Profiler | None = None,
        on_idle: Callable[[], None] | None = None,
        pooler: Pooler | None = None,
        history: RequestHistory | None = None,
    ):
        self._scheduler = scheduler
        self._runner = runner
        self._socket = socket
        self.model = model
        self._epoch = epoch
        self._history = history or RequestHistory()
        self.structured_output = StructuredOutputManager(
            build_compiler, socket.wake, model.vocabulary_size, MASK_WAIT_SECONDS, self._history.observe_masks)
        self._pipeline = StepPipeline(
            scheduler, runner, 2 if double_buffering else 1, time.monotonic, self.structured_output)
        self._heartbeat = heartbeat or Heartbeat(is_enabled=False)
        self._metrics = EngineMetrics(scheduler, self._history)
        self._crashes = crashes or CrashTracker()
        self._kv_events = kv_events
        self.profiles = Profiles(profiler, epoch)
        self.registry = RequestRegistry(
            scheduler, records or Records(0), self._crashes, self.structured_output, self._history)
        self._outbox = Outbox(self.registry, self._metrics, epoch, self._send, pooler)
        self._frontends: set[bytes] = set()
        self._restoring = frontends  # front ends that have not sent all their records
        self._restore_until = math.inf
        self._early: list[tuple[bytes, Resume | Abort]] = []  # arrived before all requests that they may name
        self._last_heartbeat = -math.inf
        self._next_audit = -math.inf
        self._is_idle = False  # no step is in flight, and the last plan was empty
        self._is_stopping = False
        self._on_idle = on_idle

    def stop(self) -> None:
        """End `run` after the steps in flight are applied. Safe to call from any thread."""
        self._is_stopping = True
        self._socket.wake()

    def run(self) -> None:
        """Serve until `stop`."""
        self.restore()
        while not self._is_stopping:
            self._heartbeat.beat()
            self.receive(self._idle_timeout() if self._is_idle else 0.0)
            if not self._pipeline.must_collect:
                self._launch_next()
            if self._pipeline.must_collect:
                self.collect()
            elif not self._pipeline:
                self._become_idle()
            self.send()
            if self._kv_events:
                self._kv_events.publish(self._send)
            if self.profiles.is_active:
                self.profiles.poll(self._send)
            if self._is_idle:
                self.audit()
                if self._on_idle:
                    self._on_idle()
        while self._pipeline:
            self.collect()

    def restore(self) -> None:
        """Wait for the requests and records that the front ends have from an earlier engine."""
        self._restore_until = time.monotonic() + RESTORE_SECONDS
        while self._restoring > 0 and not self._is_stopping and time.monotonic() < self._restore_until:
            self._heartbeat.beat()
            self.receive(HEARTBEAT_SECONDS / 10)
            self.send()
        self._restoring = 0
        for frontend, message in self._early:
            self._handle(frontend, message)
        self._early.clear()
        self._crashes.save()

    def audit(self) -> None:
        """Check the scheduler's counts, and at most once in AUDIT_SECONDS its whole state. Stop as soon as a message
        arrives or a deadline is due."""
        parts = self._scheduler.audit()
        next(parts)
        now = time.monotonic()
        if now < self._next_audit:
            return
        self._next_audit = now + AUDIT_SECONDS
        for _ in parts:
            if self._is_stopping or self._socket.has_input() or not self._idle_timeout():
                return

    def collect(self) -> None:
        """Wait for the oldest step in flight, and send its output. The next step may be launched before that."""
        self._receive_during_step()
        done = self._pipeline.collect()
        tokens = self._outbox.add(done.progress, done.collected)
        if self._launches_before_output(done.progress):
            self._launch_next()
        self._outbox.flush()
        self._metrics.stepped(done.step, done.result, tokens, done.launched, done.collected)

    def _launches_before_output(self, progress: Iterable[Progress]) -> bool:
        """Return whether the next step is launched before the output of the collected one is sent: no other step is in
        flight, so that the device is idle meanwhile.

        Not if messages have arrived, which may change the step, nor if its launch may wait for masks.
        """
        if self._pipeline or self._is_stopping or self._socket.has_input():
            return False
        return all(part.sequence.matcher is None for part in progress)

    def receive(self, timeout: float) -> None:
        """Handle all messages that have arrived, after waiting at most `timeout` seconds for the first. Then drop the
        requests that expire, and accept or refuse those whose constraint is compiled."""
        for frontend, message in self._socket.receive(timeout):
            if message is None:
                self._on_disconnect(frontend)
            else:
                self._handle(frontend, message)
        if self.structured_output:
            self._report_compiled()
        now = time.monotonic()
        self._outbox.drop(self._scheduler.expire(now), now)
        self._metrics.refresh(now)

    def send(self) -> None:
        """Send the output of each front end, and a heartbeat to all of them every HEARTBEAT_SECONDS."""
        now = time.monotonic()
        if now - self._last_heartbeat >= HEARTBEAT_SECONDS:
            self._last_heartbeat = now
            self._metrics.heartbeat()
            self._outbox.add_heartbeats(self._frontends)
        self._outbox.flush()

    def _launch_next(self) -> None:
        """Plan the next step. Unless it is empty, report it and launch it."""
        plan = self._pipeline.plan()
        step = plan.step
        self._outbox.drop(plan.dropped, time.monotonic())
        if step.rows:
            self._send_started(step)
            self._crashes.before_launch(step, self._scheduler.sequence, is_first=not self._pipeline)
            self._metrics.launched(step, self._pipeline.launch(step).launched)
            self._is_idle = False
            self._outbox.flush()  # acceptances and refusals do not wait for the step

    def _become_idle(self) -> None:
        """Report to all front ends that nothing runs, with a heartbeat in the next `send`. Nothing if idle already."""
        if self._is_idle:
            return
        self._is_idle = True
        self._crashes.mark_idle()
        self._last_heartbeat = -math.inf

    def _receive_during_step(self) -> None:
        """Handle messages until the oldest step ends or is too late. Nothing if a short step is expected.

        If the next step is sampled under masks, return before the oldest is expected to end: the device may be idle
        until its tokens are taken in. The caller then waits for the step, however late it is. Before a step was
        measured, any step may be long.
        """
        expected = self._scheduler.expected_seconds
        if 0.0 < expected < LONG_STEP_SECONDS:
            return
        oldest = self._pipeline.oldest
        end = self._pipeline.oldest_began + expected
        wake_up = end - 0.001
        last = end + max(LATE_SECONDS, expected)
        if expected and self._pipeline.needs_tokens:
            last = end - min(expected / 4, MAX_EARLY_SECONDS)
            wake_up = last
        while not self._runner.ready(oldest.handle) and (now := time.monotonic()) < last:
            longest = LOAD_POLL_SECONDS if self._scheduler.loads.has_loads else 0.02
            self.receive(min(max(wake_up - now, expected / 8, 0.001), longest))  # `ready` is a call on the device
            self._scheduler.loads.poll()
            self._outbox.flush()

    def _idle_timeout(self) -> float:
        """Return how long to wait for a message when there is nothing to compute, in seconds."""
        if self._kv_events and self._kv_events.has_work:
            return 0.0
        if self._scheduler.loads.has_loads:
            return LOAD_POLL_SECONDS
        now = time.monotonic()
        deadline = self._scheduler.deadlines.next(now)
        return HEARTBEAT_SECONDS if deadline is None else min(max(0.0, deadline - now), HEARTBEAT_SECONDS)

    def _send_started(self, step: Step) -> None:
        """Report the requests that a step runs first to their front ends."""
        started: defaultdict[bytes, list[Started]] = defaultdict(list)
        for new in step.new:
            sequence = self._scheduler.sequence(new.request_id)
            frontend, key = sequence.origin
            started[frontend].append(Started(key, sequence.cached_tokens))
        for frontend, requests in started.items():
            accepted = self._outbox.take_accepted(frontend)  # the load counts them
            if not self._socket.send(frontend, Outputs(self._epoch, self._metrics.load, [], requests, accepted)):
                # The next flush handles the loss, after the launch: the step's requests must not end before it.
                self._outbox.add_heartbeats([frontend])

    def _handle(self, frontend: bytes, message: ToEngine) -> None:
        match message:
            case Submit(key=key, request=request):
                self._submit((frontend, key), request)
            case Cancel(key=key, keep=keep, sent=sent):
                sequence = self.registry.live.get((frontend, key))
                if sequence:
                    self._end(sequence, None if keep is None else sequence.finish("stop_string", keep))
                    self._metrics.cancelled(time.monotonic() - sent)
            case Pause(key=key):
                if sequence := self.registry.live.get((frontend, key)):
                    self._scheduler.pause(sequence.id)
            case Unpause(key=key):
                if sequence := self.registry.live.get((frontend, key)):
                    self._scheduler.unpause(sequence.id)
            case Abort() | Resume() if self._restoring > 0:
                self._early.append((frontend, message))
            case Abort(call=call, request_id=request_id, client=client, service=service):
                calls = self.registry.find(request_id, client, service)
                for sequence in calls[0] if len(calls) == 1 else ():
                    self._end(sequence, sequence.finish("aborted"))
                self._send(frontend, Reply(self._epoch, call, len(calls)))
            case FlushPrefixCache(call=call):
                self._send(frontend, Reply(self._epoch, call, self._scheduler.memory.flush_prefix_cache()))
            case ExplainRequest(call=call, request_id=request_id, client=client):
                self._metrics.count_steps()
                explanations = self._history.explain(self.registry.live.values(), request_id, client, time.monotonic())
                self._send(frontend, ExplainReply(self._epoch, call, explanations))
            case SubscribeKvEvents() | ReadKvEvents() | UnsubscribeKvEvents():
                if self._kv_events:
                    self._kv_events.handle(frontend, message, self._send)
            case StartProfile() | StopProfile():
                self.profiles.handle(frontend, message, self._send)
            case Hello():
                self._frontends.add(frontend)
                self._send(frontend, Ready(self._epoch, self.model))
            case Restore():
                self._restore(frontend, message)
            case Resume():
                self._resume(frontend, message)

    def _submit(self, origin: Origin, request: Request) -> None:
        try:
            displaced = self.registry.add(request, origin, time.monotonic())
        except ServeError as error:
            self._outbox.refuse(origin, error)
        else:
            self._crashes.save()  # a front end may have lost the acceptance of a request that crashed the last engine
            self._accept_compiled(origin)
            if displaced:
                self._outbox.drop([displaced], time.monotonic())

    def _restore(self, frontend: bytes, message: Restore) -> None:
        now = time.monotonic()
        self.registry.records.restore(message.ended, now)
        for key, record in message.live:
            origin = frontend, key
            try:
                self._outbox.take_over(self.registry.end_previous(record, now))
                self.registry.restore(record, origin, now)
            except ServeError as error:
                self._outbox.refuse(origin, error)
            else:
                self._accept_compiled(origin)
        self._restore_until = now + RESTORE_SECONDS  # a front end may send many messages
        self._restoring -= message.is_last
        if self._restoring <= 0:
            self._crashes.save()

    def _resume(self, frontend: bytes, message: Resume) -> None:
        origin = frontend, message.key
        try:
            record, previous, displaced = self.registry.resume(message, origin, time.monotonic())
        except ServeError as error:
            self._outbox.refuse(origin, error, count=isinstance(error, QueueFull))
        else:
            if displaced:
                self._outbox.drop([displaced], time.monotonic())
            self._crashes.save()
            self._outbox.take_over(previous)
            self._send(frontend, Resumed(self._epoch, message.key, record))
            sequence = self.registry.live.get(origin)
            if sequence and sequence.holds_blocks:
                started = [Started(message.key, sequence.cached_tokens)]
                self._send(frontend, Outputs(self._epoch, self._metrics.load, [], started))

    def _report_compiled(self) -> None:
        """Reply to the requests whose constraints were compiled or refused."""
        for sequence_id, result in self.structured_output.poll():
            sequence = self._scheduler.sequence(sequence_id)
            if isinstance(result, ServeError):
                self._scheduler.cancel(sequence_id)
                self._outbox.fail(sequence, result, time.monotonic())
                continue
            self.registry.constrain(sequence, result)
            self._outbox.accept(sequence.origin)
            if result.has_ended:  # in an earlier engine
                self._end(sequence, sequence.finish("eos"))

    def _accept_compiled(self, origin: Origin) -> None:
        """Accept a new request, unless it waits for its grammar."""
        if not self.registry.live[origin].needs_matcher:
            self._outbox.accept(origin)

    def _end(self, sequence: Sequence, finish: Finish | None) -> None:
        """End a live request. finish: to send to its front end; None if no reader waits for it."""
        self.registry.end(sequence, time.monotonic(), finish)
        if finish:
            self._outbox.finish(sequence, finish)

    def _send(self, frontend: bytes, message: ToFrontend) -> None:
        """Send a message. If that fails, the front end is lost."""
        if not self._socket.send(frontend, message):
            self._on_disconnect(frontend)

    def _on_disconnect(self, frontend: bytes) -> None:
        """End the requests of a front end that has disconnected."""
        self._frontends.discard(frontend)
        if self._kv_events:
            self._kv_events.on_disconnect(frontend)
        self.profiles.on_disconnect(frontend)
        for sequence in self.registry.of_frontend(frontend):
            self._end(sequence, None)
