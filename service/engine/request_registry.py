"""Live requests of the engine, by front end and by name, and the records of the streams that may be resumed.

    add ──► live ──► finish, error or `end` ──► (its record, for resume_seconds) ──► resume: live again
              └──── resume: another front end reads it ────┘

The engine reports here all that happens to a request. The registry sends nothing.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec

from npuserve.service.engine.crash_tracker import CrashRecord, CrashTracker
from npuserve.service.engine.request_history import RequestHistory
from npuserve.service.errors import DuplicateRequest, EngineKiller, InvalidField, StreamNotFound
from npuserve.service.ipc.messages import Finish, Output, Record, Request, Resume
from npuserve.service.scheduling.deadlines import DroppedRequest
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.sequence import Sequence
from npuserve.service.streams.records import Records
from npuserve.service.structured_output.answer_matcher import AnswerMatcher
from npuserve.service.structured_output.manager import StructuredOutputManager

Origin = tuple[bytes, int]
"""A front end's identity and its key for a request."""
Name = tuple[str, str, str]
"""Client, service and request_id of a call. All its samples have it."""


class Resumption(NamedTuple):
    """A stream with a new reader.

    record: the answer so far.
    previous: origin that read the stream until now; None if none did.
    displaced: request that left the full queue for this one, if any.
    """

    record: Record
    previous: Origin | None
    displaced: DroppedRequest | None


class RequestRegistry:
    """All live sequences of the scheduler, and the records of the streams. `now` is time.monotonic() seconds."""

    def __init__(
        self,
        scheduler: Scheduler,
        records: Records,
        crashes: CrashTracker,
        structured_output: StructuredOutputManager,
        history: RequestHistory | None = None,
    ):
        self.history = history or RequestHistory()
        self.records = records
        self.live: dict[Origin, Sequence] = {}
        self._calls: dict[Name, dict[int, Origin]] = {}  # the live samples of each call, by index
        self._scheduler = scheduler
        self._crashes = crashes
        self._structured_output = structured_output
        self._quarantines: dict[int, CrashRecord] = {}  # which begin when the grammar of a sequence is compiled

    def add(self, request: Request, origin: Origin, now: float, record: Record | None = None) -> DroppedRequest | None:
        """Queue a request, or let it wait for its grammar. Return the request that was displaced from the full queue.

        record: record of a continued stream; None for a new request.

        Raises DuplicateRequest, EngineKiller and the errors of Scheduler.add and PendingGrammar.submit.
        """
        samples = self._calls.get(_name(request), {})
        if samples and not self._is_further_sample(request, samples):
            raise DuplicateRequest(f"request_id: {request.request_id} is that of a live request")
        try:
            crashes = self._crashes.assess(request, len(request.output_ids))
        except EngineKiller:
            self.records.drop(request.resume_token)
            raise
        grammar = self._structured_output.pending(request, request.progress.accepted)
        sequence, displaced = self._scheduler.add(request, origin, now, grammar.submit if grammar else None)
        self.live[origin] = sequence
        sequence.timer.received = now
        if grammar:
            self._structured_output.watch(sequence.id, grammar)
            if crashes:
                self._quarantines[sequence.id] = crashes
        elif crashes:
            self._scheduler.isolate(sequence, crashes.crashes, crashes.quarantine_tokens)
        self._calls.setdefault(_name(request), {})[request.index] = origin
        if request.resume_token:
            self.records.begin(record or Record(request))
        return displaced

    def constrain(self, sequence: Sequence, matcher: AnswerMatcher) -> None:
        """Queue a request whose grammar is compiled."""
        self._scheduler.constrain(sequence, matcher)
        sequence.timer.compiled = time.monotonic()
        crashes = self._quarantines.pop(sequence.id, None)
        if crashes and not sequence.is_paused:
            self._scheduler.isolate(sequence, crashes.crashes, crashes.quarantine_tokens)

    def find(self, request_id: str, client: str = "", service: str | None = None) -> list[list[Sequence]]:
        """Return the live samples of each call with that id. client, service: see messages.Abort."""
        return [[self.live[origin] for origin in samples.values()] for name, samples in self._calls.items()
                if name[2] == request_id and client in ("", name[0]) and service in (None, name[1])]

    def of_frontend(self, frontend: bytes) -> list[Sequence]:
        return [sequence for origin, sequence in self.live.items() if origin[0] == frontend]

    def record_output(self, sequence: Sequence, output: Output, now: float) -> None:
        """Append a step's output to the record of a request. With a finish, the scheduler has ended the request."""
        record = self._record(sequence)
        if record:
            record.add(output)
        if output.finish:
            self._forget(sequence, record, now)

    def end(self, sequence: Sequence, now: float, finish: Finish | None = None) -> None:
        """End a request in the scheduler. finish: None if its reader has left; the stream may be resumed then."""
        record = self._record(sequence)
        if record and finish:
            record.add(Output(0, finish=finish))
        elif record:
            _copy_progress(sequence, record)
        self._scheduler.cancel(sequence.id)
        self._forget(sequence, record, now)

    def discard(self, sequence: Sequence, now: float) -> None:
        """Forget a request that the scheduler ended with an error, and its record."""
        self._forget(sequence, None, now)
        self.records.drop(sequence.request.resume_token)

    def resume(self, message: Resume, origin: Origin, now: float) -> Resumption:
        """Give a stream to a new reader. A request without a reader is queued again.

        Raises StreamNotFound, InvalidField if the reader claims more tokens than there are, and the errors of `add`.
        """
        record = self.records.find(message.token, message.owner, now)
        if record is None:
            raise StreamNotFound("resume_token: no such stream; it was never here, or ended or was left too long ago")
        num_tokens = len(record.token_ids)
        if message.token_offset > num_tokens:
            raise InvalidField("token_offset", f"must be in [0, {num_tokens}], got {message.token_offset}")
        previous = displaced = None
        if record.ended is None:
            samples = self._calls[_name(record.request)]
            previous = samples[record.request.index]
            sequence = self.live.pop(previous)
            _copy_progress(sequence, record)
            self._scheduler.change_reader(sequence, origin, message.deadline)
            self.live[origin] = sequence
            samples[record.request.index] = origin
        record.request = msgspec.structs.replace(record.request, deadline=message.deadline)
        if previous is None and record.finish is None:
            displaced = self.add(record.continuation(accepted=False), origin, now, record)
        return Resumption(record, previous, displaced)

    def restore(self, record: Record, origin: Origin, now: float) -> None:
        """Continue a stream of an earlier engine, after `end_previous`. Raises the errors of `add`.

        No request is displaced for it, since that engine had accepted it.
        """
        self.add(record.continuation(accepted=True), origin, now, record)

    def end_previous(self, record: Record, now: float) -> Origin | None:
        """End the live request of a stream that another front end has restored. Return its origin; None if none has."""
        live = self.records.live.get(record.request.resume_token)
        if live is None:
            return None
        previous = self._calls[_name(live.request)][live.request.index]
        self.end(self.live[previous], now)
        return previous

    def check_integrity(self) -> None:
        """Raise AssertionError unless names, live requests, records and the scheduler agree."""
        calls: dict[Name, dict[int, Origin]] = {}
        for origin, sequence in self.live.items():
            calls.setdefault(_name(sequence.request), {})[sequence.request.index] = origin
        assert calls == self._calls, "calls are not of the live requests"
        assert all(s.origin == origin for origin, s in self.live.items()), "a sequence is live under another's origin"
        scheduled = self._scheduler.num_running + self._scheduler.num_waiting + self._scheduler.num_paused
        assert len(self.live) == scheduled, f"{len(self.live)} requests are live, but the scheduler has {scheduled}"
        tokens = {s.request.resume_token for s in self.live.values()} - {""}
        assert self.records.live.keys() <= tokens, "a record is live whose request is not"
        self.records.check_integrity()

    def _is_further_sample(self, request: Request, samples: dict[int, Origin]) -> bool:
        """Return whether a request is of the same call as the live `samples` of its name, and is not one of them."""
        other = self.live[next(iter(samples.values()))].request
        is_of_call = request.samples == other.samples and request.arrival == other.arrival
        return is_of_call and request.index not in samples

    def _record(self, sequence: Sequence) -> Record | None:
        token = sequence.request.resume_token
        return self.records.live.get(token) if token else None

    def _forget(self, sequence: Sequence, record: Record | None, now: float) -> None:
        del self.live[sequence.origin]
        self.history.end(sequence, now)
        self._structured_output.cancel(sequence.id)
        self._quarantines.pop(sequence.id, None)
        samples = self._calls[_name(sequence.request)]
        del samples[sequence.request.index]
        if not samples:
            del self._calls[_name(sequence.request)]
        if record:
            self.records.end(record, now)


def _name(request: Request) -> Name:
    """Return the name of a live call: a request_id is unique per client and service."""
    return request.client, request.service, request.request_id


def _copy_progress(sequence: Sequence, record: Record) -> None:
    """Copy to the record what outputs do not carry: the timing, and the cached tokens of the first admission."""
    record.timing = sequence.timer.timing
    if sequence.was_admitted:
        record.cached_tokens = sequence.cached_tokens
