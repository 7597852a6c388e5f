"""Store of resumable streams.

The engine holds a record of each stream from its start. A front end holds the records of streams that ended, to send
them to the next engine. A resume token is random, cannot be guessed, and contains nothing of the request.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator

import msgspec

from npuserve.service.ipc.messages import MAX_RESTORE_BYTES, EndedRecord, Record, Request, Restore

MAX_RECORDS = 4096
MAX_BYTES = 64 << 20
"""Limits of the ended records, whatever resume_seconds is. The oldest are dropped first."""
MAX_RECORD_BYTES = 8 << 20
"""Maximum size of one record. A stream whose record may exceed it gets no resume token."""
# Largest msgpack encodings: token id, floating-point number, head of a list or string.
_ID_BYTES = 5
_FLOAT_BYTES = 9
_HEAD_BYTES = 5
_RECORD_BYTES = 4096
"""Maximum size of the fields that hold no list: names have at most 512 characters, and there are field heads."""
_OVERHEAD_BYTES = 512
"""Memory of a record besides its data."""


def new_token() -> str:
    """Return 192 random bits as text, safe in metadata and URLs."""
    return secrets.token_urlsafe(24)


def max_size(request: Request, tokens: int, reports: int, prompt_reports: int) -> int:
    """Return an upper bound of a record's encoded size in bytes.

    tokens: number of tokens of the answer.
    reports, prompt_reports: number of positions with log-probabilities, in the answer and in the prompt.
    """
    sampling = request.sampling
    ids = (len(request.prompt_ids) + len(sampling.allowed_token_ids) + len(sampling.ending_ids)
           + len(request.stop_token_ids) + len(request.eos_token_ids) + tokens)
    constraint = len(request.constraint.text.encode()) if request.constraint else 0
    return (_RECORD_BYTES + len(request.options) + constraint + _ID_BYTES * ids
            + (_ID_BYTES + _FLOAT_BYTES) * len(sampling.logit_bias) + reports * _report_size(sampling.logprobs)
            + prompt_reports * _report_size(sampling.prompt_logprobs))


def _report_size(top: int | None) -> int:
    """Return an upper bound of the encoded log-probabilities of one position, in bytes."""
    return 4 * _HEAD_BYTES + 2 * _ID_BYTES + _FLOAT_BYTES + (_ID_BYTES + _FLOAT_BYTES) * (top or 0)


def is_resumable(request: Request) -> bool:
    """Return whether the request's largest possible record fits MAX_RECORD_BYTES."""
    sampling = request.sampling
    reports = 0 if sampling.logprobs is None else request.max_tokens
    prompt_reports = 0 if sampling.prompt_logprobs is None else len(request.prompt_ids)
    return max_size(request, request.max_tokens, reports, prompt_reports) <= MAX_RECORD_BYTES


def restore_messages(live: Iterable[tuple[int, Record]], ended: Callable[[], list[EndedRecord]]) -> Iterator[Restore]:
    """Yield the Restore messages of a front end, each of about MAX_RESTORE_BYTES or of one record.

    live: read while the messages are built, so that streams that end meanwhile may be left out.
    ended: called after all of `live` is read.
    """
    some: list[tuple[int, Record]] = []
    size = 0
    for key, record in live:
        some.append((key, record))
        size += max_size(record.request, len(record.token_ids), len(record.logprobs), len(record.prompt_logprobs))
        if size >= MAX_RESTORE_BYTES:
            yield Restore(some, [], is_last=False)
            some = []
            size = 0
    others: list[EndedRecord] = []
    for kept in ended():
        others.append(kept)
        size += len(kept.data)
        if size >= MAX_RESTORE_BYTES:
            yield Restore(some, others, is_last=False)
            some = []
            others = []
            size = 0
    yield Restore(some, others)


class Records:
    """Records by resume token: live ones, and ended ones for `seconds`. With 0 nothing is kept.

    max_records, max_bytes: limits of the ended records. They are kept encoded, so that their size is known.

    `now` is time.monotonic() seconds in all methods.
    """

    def __init__(self, seconds: float, max_records: int = MAX_RECORDS, max_bytes: int = MAX_BYTES):
        self.live: dict[str, Record] = {}
        self._seconds = seconds
        self._limits = max_records, max_bytes
        self._ended: dict[str, EndedRecord] = {}  # the oldest first
        self._bytes = 0

    def begin(self, record: Record) -> None:
        """Register the record of a stream that has a reader."""
        token = record.request.resume_token
        if token and self._seconds:
            self._drop(token)
            record.ended = None
            self.live[token] = record

    def end(self, record: Record, now: float) -> None:
        """Keep the record of a stream that finished or lost its reader."""
        token = record.request.resume_token
        self.live.pop(token, None)
        if token and self._seconds:
            record.ended = now
            self._keep(EndedRecord(token, record.request.owner, record.finish is not None, len(record.token_ids), now,
                                   _encode(record)))
            self.expire(now)

    def drop(self, token: str) -> None:
        """Remove the record of a stream that cannot be resumed any more."""
        self.live.pop(token, None)
        self._drop(token)

    def restore(self, copies: Iterable[EndedRecord], now: float) -> None:
        """Add a front end's copies of ended records, except where the known record is more complete."""
        for kept in copies:
            known = self._ended.get(kept.token)
            more = known and (known.is_finished, known.tokens) >= (kept.is_finished, kept.tokens)
            if kept.token and self._seconds and kept.token not in self.live and not more:
                self._keep(msgspec.structs.replace(kept, ended=min(kept.ended, now)))
        # Several front ends send copies.
        self._ended = dict(sorted(self._ended.items(), key=lambda item: item[1].ended))
        self.expire(now)

    def find(self, token: str, owner: str, now: float) -> Record | None:
        """Return the record of a token; None if there is none, or if it belongs to another owner."""
        self.expire(now)
        record = self.live.get(token)
        kept = None if record else self._ended.get(token)
        holder = record.request.owner if record else kept.owner if kept else ""
        if holder not in ("", owner):
            return None
        return _decode(kept.data) if kept else record

    def expire(self, now: float) -> None:
        """Drop ended records that are too old or exceed the limits, oldest first."""
        max_records, max_bytes = self._limits
        while self._ended:
            oldest = next(iter(self._ended.values()))
            late = now - oldest.ended >= self._seconds
            if not late and len(self._ended) <= max_records and self._bytes <= max_bytes:
                return
            self._drop(oldest.token)

    def ended(self, now: float) -> list[EndedRecord]:
        """Return the ended records that are still valid, oldest first."""
        self.expire(now)
        return list(self._ended.values())

    def check_integrity(self) -> None:
        """Raise AssertionError unless each token is stored once and the byte count is right."""
        assert not self.live.keys() & self._ended.keys(), "a record is live and ended"
        assert self._bytes == sum(map(_memory, self._ended.values())), "bytes of records do not add up"
        assert all(record.ended is None for record in self.live.values()), "a live record has ended"

    def _keep(self, kept: EndedRecord) -> None:
        self._drop(kept.token)
        self._ended[kept.token] = kept
        self._bytes += _memory(kept)

    def _drop(self, token: str) -> None:
        kept = self._ended.pop(token, None)
        if kept:
            self._bytes -= _memory(kept)


def _memory(kept: EndedRecord) -> int:
    """Return the memory of an ended record in bytes."""
    return _OVERHEAD_BYTES + len(kept.data)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode
