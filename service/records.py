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
from pathlib import Path

import msgspec

from npuserve.service.messages import ModelInfo, Record

MOST = 4096
MOST_BYTES = 64 << 20
"""Of records that ended, so that they stay few however many end within resume_seconds. The oldest go first."""
FILE = "streams.msgpack"
# What an object of the interpreter takes, and the slot that holds it.
_TOKEN_BYTES, _REPORT_BYTES, _RECORD_BYTES = 36, 300, 2000


def new_token() -> str:
    """192 random bits, safe in metadata and URLs."""
    return secrets.token_urlsafe(24)


def size(record: Record) -> int:
    """About how many bytes of memory it takes."""
    request, reports = record.request, record.logprobs + record.prompt_logprobs
    numbers = len(request.prompt_ids) + len(record.token_ids) + sum(2 * len(report.top_ids) for report in reports)
    return _RECORD_BYTES + len(request.ask) + _TOKEN_BYTES * numbers + _REPORT_BYTES * len(reports)


class Records:
    """By resume token: the live ones, and for `seconds` those that ended or were left, in that order. 0: none at all.
    `now` is time.monotonic() seconds."""

    def __init__(self, seconds: float, most: int = MOST, most_bytes: int = MOST_BYTES):
        self.live: dict[str, Record] = {}
        self._seconds = seconds
        self._limits = most, most_bytes
        self._ended: dict[str, tuple[Record, int]] = {}
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
            self._drop(token)
            record.ended = now
            self._ended[token] = record, size(record)
            self._bytes += self._ended[token][1]
            self.expire(now)

    def drop(self, token: str) -> None:
        """Nobody may resume it."""
        self.live.pop(token, None)
        self._drop(token)

    def restore(self, record: Record, now: float) -> None:
        """What a front end knows of one that ended: it counts unless more is known here."""
        token = record.request.resume_token
        known = self._ended.get(token)
        if token not in self.live and not (known and _told(known[0]) >= _told(record)):
            self.end(record, now if record.ended is None else min(record.ended, now))

    def find(self, token: str, owner: str, now: float) -> Record | None:
        """Return the record of that token. One that has an owner is found by its owner alone."""
        self.expire(now)
        ended = self._ended.get(token)
        record = self.live.get(token) or (ended[0] if ended else None)
        return record if record and record.request.owner in ("", owner) else None

    def expire(self, now: float) -> None:
        most, most_bytes = self._limits
        while self._ended:
            oldest, (record, _) = next(iter(self._ended.items()))
            late = record.ended is not None and now - record.ended >= self._seconds
            if not late and len(self._ended) <= most and self._bytes <= most_bytes:
                return
            self._drop(oldest)

    def ended(self, now: float) -> list[Record]:
        self.expire(now)
        return [record for record, _ in self._ended.values()]

    def check_integrity(self) -> None:
        """Raise AssertionError unless each token is in one place and the bytes add up."""
        assert not self.live.keys() & self._ended.keys(), "a record is live and ended"
        assert self._bytes == sum(size for _, size in self._ended.values()), "bytes of records do not add up"
        assert all(record.ended is None for record in self.live.values()), "a live record has ended"

    def _drop(self, token: str) -> None:
        found = self._ended.pop(token, None)
        if found:
            self._bytes -= found[1]


def _told(record: Record) -> tuple[bool, int]:
    return record.finish is not None, len(record.token_ids)


class _File(msgspec.Struct, array_like=True):
    """model: whose token ids these are."""

    model: str
    records: list[Record]


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
            file.write(msgspec.msgpack.encode(_File(_identity(model, name), kept)))
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
    for record in saved.records:
        if record.request.arrival > now:  # the machine was started anew, and its clock with it
            record.request = msgspec.structs.replace(record.request, arrival=now)
            record.timing = None
        record.ended = now
        records.restore(record, now)
    return len(saved.records)


def _identity(model: ModelInfo, name: str) -> str:
    return f"{name} {model.family} {model.vocabulary_size} {model.parameters}"
