"""What is kept of streams that may be resumed, and the file in which it outlasts a drain.

The engine has a record of each from its start; a front end has those that ended or were left there, to hand them to the
next engine when one dies. A token says nothing of a request: it is random and long enough that nobody guesses it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from npuserve.service.ipc.messages import MAX_RESTORE_BYTES, EndedRecord, ModelInfo, Record, Request, Restore

MAX_RECORDS = 4096
MAX_BYTES = 64 << 20
"""Limits of the records that ended, however many end within resume_seconds. The oldest are dropped first."""
MAX_RECORD_BYTES = 8 << 20
"""Limit of one record. A stream whose record may exceed it has no resume token."""
FILE = "streams.msgpack"
# msgpack's largest forms: of a token id, of a floating-point number, and of a list's or string's head.
_ID_BYTES, _FLOAT_BYTES, _HEAD_BYTES = 5, 9, 5
_RECORD_BYTES = 4096
"""For the fields that hold no list: names are at most 128 characters, keys' names and the fields' heads beside them."""
_OVERHEAD_BYTES = 512
"""Memory that a record takes beside its data."""


def new_token() -> str:
    """192 random bits, safe in metadata and URLs."""
    return secrets.token_urlsafe(24)


def max_size(request: Request, tokens: int, reports: int, prompt_reports: int) -> int:
    """Return a bound of the encoded bytes of a record.

    tokens: of the answer.
    reports, prompt_reports: positions with log-probabilities, of the answer and of the prompt.
    """
    sampling = request.sampling
    ids = (len(request.prompt_ids) + len(sampling.allowed_token_ids) + len(sampling.ending_ids)
           + len(request.stop_token_ids) + len(request.eos_token_ids) + tokens)
    return (_RECORD_BYTES + len(request.ask) + _ID_BYTES * ids + (_ID_BYTES + _FLOAT_BYTES) * len(sampling.logit_bias)
            + reports * _report_size(sampling.logprobs) + prompt_reports * _report_size(sampling.prompt_logprobs))


def _report_size(top: int | None) -> int:
    return 4 * _HEAD_BYTES + 2 * _ID_BYTES + _FLOAT_BYTES + (_ID_BYTES + _FLOAT_BYTES) * (top or 0)


def is_resumable(request: Request) -> bool:
    """Return whether the largest record that the request may come to can be kept."""
    sampling = request.sampling
    reports = 0 if sampling.logprobs is None else request.max_tokens
    prompt_reports = 0 if sampling.prompt_logprobs is None else len(request.prompt_ids)
    return max_size(request, request.max_tokens, reports, prompt_reports) <= MAX_RECORD_BYTES


def restore_messages(live: Iterable[tuple[int, Record]], ended: Callable[[], list[EndedRecord]]) -> Iterator[Restore]:
    """Yield what a front end hands over, in messages of about MAX_RESTORE_BYTES or of one record.

    live: read as the messages are made, so that a stream that ends meanwhile may be left out.
    ended: called when all of `live` were read.
    """
    some: list[tuple[int, Record]] = []
    size = 0
    for key, record in live:
        some.append((key, record))
        size += max_size(record.request, len(record.token_ids), len(record.logprobs), len(record.prompt_logprobs))
        if size >= MAX_RESTORE_BYTES:
            yield Restore(some, [], is_last=False)
            some, size = [], 0
    others: list[EndedRecord] = []
    for kept in ended():
        others.append(kept)
        size += len(kept.data)
        if size >= MAX_RESTORE_BYTES:
            yield Restore(some, others, is_last=False)
            some, others, size = [], [], 0
    yield Restore(some, others)


class Records:
    """Records by resume token: the live ones, and for `seconds` the ones that ended or were left. 0: none at all.

    Records that ended are kept encoded, so that their size is known. `now` is time.monotonic() seconds.
    """

    def __init__(self, seconds: float, most: int = MAX_RECORDS, most_bytes: int = MAX_BYTES):
        self.live: dict[str, Record] = {}
        self._seconds = seconds
        self._limits = most, most_bytes
        self._ended: dict[str, EndedRecord] = {}
        self._bytes = 0

    def begin(self, record: Record) -> None:
        """Somebody reads it."""
        token = record.request.resume_token
        if token and self._seconds:
            self._drop(token)
            record.ended = None
            self.live[token] = record

    def end(self, record: Record, now: float) -> None:
        """It finished, or nobody reads it any more."""
        token = record.request.resume_token
        self.live.pop(token, None)
        if token and self._seconds:
            record.ended = now
            self._keep(EndedRecord(token, record.request.owner, record.finish is not None, len(record.token_ids), now,
                                   _encode(record)))
            self.expire(now)

    def drop(self, token: str) -> None:
        """Nobody may resume it."""
        self.live.pop(token, None)
        self._drop(token)

    def restore(self, kept: EndedRecord, now: float) -> None:
        """What a front end knows of one that ended: it counts unless more is known here."""
        known = self._ended.get(kept.token)
        more = known and (known.is_finished, known.tokens) >= (kept.is_finished, kept.tokens)
        if kept.token and self._seconds and kept.token not in self.live and not more:
            self._keep(msgspec.structs.replace(kept, ended=min(kept.ended, now)))
            self.expire(now)

    def find(self, token: str, owner: str, now: float) -> Record | None:
        """Return the record of that token. One that has an owner is found by its owner alone."""
        self.expire(now)
        record = self.live.get(token)
        kept = None if record else self._ended.get(token)
        holder = record.request.owner if record else kept.owner if kept else ""
        if holder not in ("", owner):
            return None
        return _decode(kept.data) if kept else record

    def expire(self, now: float) -> None:
        most, most_bytes = self._limits
        while self._ended:
            oldest = next(iter(self._ended.values()))
            late = now - oldest.ended >= self._seconds
            if not late and len(self._ended) <= most and self._bytes <= most_bytes:
                return
            self._drop(oldest.token)

    def ended(self, now: float) -> list[EndedRecord]:
        self.expire(now)
        return list(self._ended.values())

    def check_integrity(self) -> None:
        """Raise AssertionError unless each token is in one place and the bytes add up."""
        assert not self.live.keys() & self._ended.keys(), "a record is live and ended"
        assert self._bytes == sum(map(_memory, self._ended.values())), "bytes of records do not add up"
        assert all(record.ended is None for record in self.live.values()), "a live record has ended"

    def _keep(self, kept: EndedRecord) -> None:
        self._drop(kept.token)
        self._ended[kept.token] = kept
        self._bytes += _memory(kept)

    def _drop(self, token: str) -> None:
        found = self._ended.pop(token, None)
        if found:
            self._bytes -= _memory(found)


def _memory(kept: EndedRecord) -> int:
    return _OVERHEAD_BYTES + len(kept.data)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class _File(msgspec.Struct, array_like=True):
    """model: whose token ids these are. records: each a Record."""

    model: str
    records: list[msgspec.Raw]


def save(folder: Path, model: ModelInfo, name: str, records: Records) -> int:
    """Write what there is to the folder, all or nothing, for its owner alone, since it holds prompts. How many. name:
    of the model's folder. OSError where that fails; then nothing is left there."""
    now = time.monotonic()
    for record in list(records.live.values()):
        records.end(record, now)
    kept = records.ended(now)
    if not kept:
        return 0
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, path = tempfile.mkstemp(dir=folder, prefix=f".{FILE}-")  # mode 0600
    try:
        with open(handle, "wb") as file:
            file.write(msgspec.msgpack.encode(_File(_identity(model, name), [msgspec.Raw(one.data) for one in kept])))
            file.flush()
            os.fsync(file.fileno())
        os.replace(path, folder / FILE)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    return len(kept)


def load(folder: Path, model: ModelInfo, name: str, records: Records) -> int:
    """Take in what was saved, for `seconds` from now, and remove it. How many: 0 if there is none, or of another model.
    OSError where it cannot be read or removed, msgspec.MsgspecError where it is no such file; it is removed then."""
    path = folder / FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    path.unlink()
    saved = msgspec.msgpack.decode(data, type=_File)
    if saved.model != _identity(model, name):
        return 0
    now = time.monotonic()
    for data in saved.records:
        record = _decode(data)
        if record.request.arrival > now:  # the machine was started anew, and its clock with it
            record.request = msgspec.structs.replace(record.request, arrival=now)
            record.timing = None
        records.end(record, now)
    return len(saved.records)


def _identity(model: ModelInfo, name: str) -> str:
    return f"{name} {model.family} {model.vocabulary_size} {model.parameters}"
