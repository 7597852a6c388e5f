"""The supervisor's private folder, and the removal of folders that supervisors left when they were killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "npuserve-"
LOCK = "supervisor.lock"
"""A file in the folder that the supervisor has locked for as long as it lives."""


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder under TMPDIR for this user alone, and remove it at the end.

    Folders of this kind whose supervisor is dead are removed first.
    """
    parent = Path(tempfile.gettempdir())
    for folder in parent.glob(f"{PREFIX}*"):
        _remove_if_abandoned(folder)
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:  # mode 0700
        lock = _lock_new(Path(name))
        try:
            yield Path(name)
        finally:
            if lock >= 0:
                os.close(lock)


def _lock_new(folder: Path) -> int:
    """Return the descriptor of the folder's lock, which appears under its name when it is locked already; -1 where the
    file system has no locks."""
    made = folder / f"{LOCK}.new"
    descriptor = os.open(made, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    if not _try_lock(descriptor):
        os.close(descriptor)
        return -1
    made.rename(folder / LOCK)
    return descriptor


def _remove_if_abandoned(folder: Path) -> None:
    """Remove a folder of this user that has a lock which nobody holds."""
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if _try_lock(descriptor):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Return False if another process holds the lock, or the file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
