"""Folder of the traces that a server keeps: their number, their bytes, and their names are bounded."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import shutil
import stat
from pathlib import Path

from npuserve.npu.profile import NAME, ProfileError

SUFFIX = ".trace.json"
MAX_TRACES = 20
"""Traces that are kept; the oldest are removed."""
MAX_TRACES_BYTES = 1 << 30
"""Bytes of all traces that are kept; the oldest are removed."""
MAX_TRACE_BYTES = 256 << 20
"""Bytes of one trace before its compression. A larger one is not written."""
PLAIN_BYTES = 1 << 20
"""Traces up to this size are not compressed."""


class TraceFolder:
    """Traces in `path`, in files NAME.trace.json or NAME.trace.json.gz. Other files of the folder stay as they are.

    OSError if the folder cannot be created or written.
    """

    def __init__(self, path: Path):
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(f"{path}: not writable")
        for left in path.glob(".*.part"):  # of a process that was killed
            self._remove(left)

    def reserve(self, name: str) -> str:
        """Return the name of a new profile. The folder is created again if something has removed it.

        name: "" for profile-N.

        Raises ProfileError if the name is invalid or taken, and OSError if the folder cannot be used.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not name:
            taken = [int(match[1]) for file in self._files() if (match := re.match(r"profile-(\d{1,9})\.", file.name))]
            return f"profile-{max(taken, default=0) + 1}"
        if not NAME.fullmatch(name):
            raise ProfileError("name: must be letters, digits, - and _, at most 64, and begin with a letter or digit")
        if any(file.name.partition(".")[0] == name for file in self._files()):
            raise ProfileError("name: a trace of this name is kept in profile_dir")
        return name

    def scratch(self, name: str) -> Path:
        """Create and return an empty folder for the files of a device's profiler. Remove it with `discard`."""
        folder = self.path / f".{name}.part"
        self._remove(folder)
        folder.mkdir(mode=0o700)
        return folder

    def discard(self, name: str) -> None:
        """Remove the folder of `scratch`."""
        self._remove(self.path / f".{name}.part")

    def write(self, name: str, trace: bytes) -> Path:
        """Write a trace, and remove the oldest ones beyond the bounds. Return its file.

        Raises ProfileError if the trace is too large, and OSError.
        """
        if len(trace) > MAX_TRACE_BYTES:
            raise ProfileError(f"the trace has {len(trace)} bytes, more than {MAX_TRACE_BYTES}: record fewer steps")
        compressed = len(trace) > PLAIN_BYTES
        data = gzip.compress(trace, 6) if compressed else trace
        part = self.path / f".{name}{SUFFIX}.part"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            path = self.path / f"{name}{SUFFIX}{'.gz' if compressed else ''}"
            os.replace(part, path)
        except OSError:
            self._remove(part)
            raise
        self._prune(path)
        return path

    def _files(self) -> list[Path]:
        """Return the traces, the oldest first."""
        traces: list[tuple[int, str, Path]] = []
        for file in self.path.iterdir():
            if file.name.endswith((SUFFIX, f"{SUFFIX}.gz")) and NAME.fullmatch(file.name.partition(".")[0]):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    status = file.lstat()
                    if stat.S_ISREG(status.st_mode):
                        traces.append((status.st_mtime_ns, file.name, file))
        return [file for *_, file in sorted(traces)]

    def _prune(self, newest: Path) -> None:
        kept = 1
        nbytes = newest.stat().st_size
        for file in reversed([file for file in self._files() if file != newest]):
            kept = kept + 1
            nbytes = nbytes + file.stat().st_size
            if kept > MAX_TRACES or nbytes > MAX_TRACES_BYTES:
                self._remove(file)

    @staticmethod
    def _remove(path: Path) -> None:
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
