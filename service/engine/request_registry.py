"""Which requests are live, for whom and under which name, and what is kept of those that may be resumed.

    begin ──► live ──► its own end, an error, or `end` ──► (its record, for resume_seconds) ──► resume: live again
                └──── resume: another reads it ────┘

Only what the engine tells of comes here; nothing is sent. An origin is a front end's name and its key.
"""

from __future__ import annotations

import msgspec

from npuserve.service.engine.blame import Blame
from npuserve.service.errors import DuplicateRequest, EngineKiller, InvalidField, StreamNotFound
from npuserve.service.ipc.messages import Finish, Output, Record, Request, Resume
from npuserve.service.ipc.resumable_streams import Records
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.sequence import Sequence

Origin = tuple[bytes, int]


class Ledger:
    """Every live sequence of the scheduler, and their records. `now` is time.monotonic() seconds."""

    def __init__(self, scheduler: Scheduler, records: Records, blame: Blame):
        self.records = records
        self.live: dict[Origin, Sequence] = {}
        self._names: dict[tuple[str, str], Origin] = {}  # by client and request_id
        self._scheduler = scheduler
        self._blame = blame

    def begin(self, request: Request, origin: Origin, now: float, record: Record | None = None) -> None:
        """Queue a request. record: what is known of it already. Raises DuplicateRequest, EngineKiller and what
        Scheduler.add does."""
        if _name(request) in self._names:
            raise DuplicateRequest(f"request_id: {request.request_id} is that of a live request")
        try:
            trial = self._blame.judge(request, len(request.output_ids)) if record else None
        except EngineKiller:
            self.records.drop(request.resume_token)
            raise
        self.live[origin] = sequence = self._scheduler.add(request, origin, now)
        if trial:
            self._scheduler.quarantine.add(sequence.id, trial.deaths, trial.trial)
        self._names[_name(request)] = origin
        if request.resume_token:
            self.records.begin(record or Record(request))

    def named(self, request_id: str, client: str = "") -> list[Sequence]:
        """Return the live requests of that id. client: whose; "" for all clients."""
        return [self.live[origin] for name, origin in self._names.items()
                if name[1] == request_id and client in ("", name[0])]

    def of(self, frontend: bytes) -> list[Sequence]:
        return [sequence for origin, sequence in self.live.items() if origin[0] == frontend]

    def made(self, sequence: Sequence, output: Output, now: float) -> None:
        """What a step made of it; with a finish, the scheduler has let it go."""
        record = self._record(sequence)
        if record:
            record.add(output)
        if output.finish:
            self._forget(sequence, record, now)

    def end(self, sequence: Sequence, now: float, finish: Finish | None = None) -> None:
        """Take it out of the scheduler. finish: None if it is left, and may be resumed."""
        record = self._record(sequence)
        if record and finish:
            record.add(Output(0, finish=finish))
        elif record:
            _note(record, sequence)
        self._scheduler.cancel(sequence.id)
        self._forget(sequence, record, now)

    def refuse(self, sequence: Sequence, now: float) -> None:
        """The scheduler let it go with an error, before it had a token: nothing of it is kept."""
        self._forget(sequence, None, now)
        self.records.drop(sequence.request.resume_token)

    def resume(self, ask: Resume, origin: Origin, now: float) -> tuple[Record, Origin | None]:
        """Give a stream to a new reader: its record, and whom it was taken from. A request that was left is queued
        again. Raises StreamNotFound, InvalidField if the reader claims more tokens than there are, and what `begin`
        does."""
        record = self.records.find(ask.token, ask.owner, now)
        if record is None:
            raise StreamNotFound("resume_token: no such stream; it was never here, or ended or was left too long ago")
        made = len(record.token_ids)
        if ask.token_offset > made:
            raise InvalidField("token_offset", f"must be in [0, {made}], got {ask.token_offset}")
        before = None
        if record.ended is None:
            before = self._names[_name(record.request)]
            sequence = self.live.pop(before)
            _note(record, sequence)
            self._scheduler.adopt(sequence, origin, ask.deadline)
            self.live[origin] = sequence
            self._names[_name(record.request)] = origin
        record.request = msgspec.structs.replace(record.request, deadline=ask.deadline)
        if before is None and record.finish is None:
            self.begin(record.rest(accepted=False), origin, now, record)
        return record, before

    def restore(self, record: Record, origin: Origin, now: float) -> Origin | None:
        """Go on with what a dead engine left; whom it was taken from, if two front ends read it. Raises what `begin`
        does."""
        twin = self.records.live.get(record.request.resume_token)
        before = self._names[_name(twin.request)] if twin else None
        if before:
            self.end(self.live[before], now)
        self.begin(record.rest(accepted=True), origin, now, record)
        return before

    def check_integrity(self) -> None:
        """Raise AssertionError unless names, live requests and records are each other's."""
        assert {_name(s.request): o for o, s in self.live.items()} == self._names, "names are not of the live"
        assert all(s.origin == origin for origin, s in self.live.items()), "a sequence is live under another's origin"
        tokens = {s.request.resume_token for s in self.live.values()} - {""}
        assert self.records.live.keys() <= tokens, "a record is live whose request is not"
        self.records.check_integrity()

    def _record(self, sequence: Sequence) -> Record | None:
        token = sequence.request.resume_token
        return self.records.live.get(token) if token else None

    def _forget(self, sequence: Sequence, record: Record | None, now: float) -> None:
        del self.live[sequence.origin]
        del self._names[_name(sequence.request)]
        if record:
            self.records.end(record, now)


def _name(request: Request) -> tuple[str, str]:
    """Return what names a live request: a request_id is its client's own."""
    return request.client, request.request_id


def _note(record: Record, sequence: Sequence) -> None:
    """What the sequence alone knows."""
    record.timing = sequence.timing
    if sequence.met:
        record.cached_tokens = sequence.cached_tokens
