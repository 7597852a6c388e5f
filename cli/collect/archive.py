"""Archive of bounded size with a manifest that says what became of each part."""

from __future__ import annotations

import io
import json
import os
import stat
import tarfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from npuserve.service import clock

Status = Literal["complete", "truncated", "missing", "absent", "failed", "timeout", "skipped"]


@dataclass(frozen=True, slots=True)
class Part:
    """Content of one member.

    status: quality of the content.
        - "truncated": the beginning or the end of something larger.
        - "missing": the machine lacks the program or file.
        - "absent": the machine lacks the device to which the programs or files belong.
        - "failed", "timeout": the command failed, or took too long. The content is its output so far.
        - "skipped": the archive was full, or the time was over.
    detail: the reason of another status than "complete".
    """

    data: bytes
    status: Status = "complete"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """Line of the manifest."""

    name: str
    status: Status
    bytes: int
    detail: str


class Archive:
    """`.tar.gz` file, readable by its owner only. The manifest is its last member.

    max_bytes: maximum bytes of all members together, before compression.
    """

    MANIFEST = "manifest.json"

    def __init__(self, path: Path, max_bytes: int):
        self.lines: list[Line] = []
        self._left = max_bytes
        self._when = int(clock.unix_time())
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.fchmod(descriptor, 0o600)  # of a file that existed
        self._file = os.fdopen(descriptor, "wb")
        self._tar = tarfile.open(fileobj=self._file, mode="w:gz")  # noqa: SIM115

    def add(self, name: str, part: Part) -> None:
        """Add a part; an empty one is a line of the manifest only. A part that does not fit is cut."""
        data = part.data[: self._left]
        status = part.status
        detail = part.detail
        if len(data) < len(part.data):
            status = "truncated"
            detail = f"{len(part.data) - len(data)} bytes are left out, the archive is full"
        if data:
            self._write(name, data)
            self._left -= len(data)
        self.lines.append(Line(name, status, len(data), detail))

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write(self.MANIFEST, json.dumps([asdict(line) for line in self.lines], indent=1).encode())
        self._tar.close()
        self._file.close()

    def _write(self, name: str, data: bytes) -> None:
        member = tarfile.TarInfo(f"npuserve-collect/{name}")
        member.size = len(data)
        member.mtime = self._when
        member.mode = 0o600
        self._tar.addfile(member, io.BytesIO(data))
