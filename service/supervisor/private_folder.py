"""Private folder of the supervisor, its check, and removal of the folders of killed supervisors."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from npuserve.service.config import ConfigError

MIN_FREE_BYTES = 16 << 20
"""Minimum free space for the metrics files and the step log."""
PREFIX = "npuserve-"
SOCKET = "engine.sock"
"""Socket in the folder that the engine binds."""
MAX_SOCKET_PATH = 100
"""Maximum length of the socket's path."""
LOCK = "supervisor.lock"
"""File in the folder that the supervisor locks while it runs."""


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Create a folder under TMPDIR with access for this user only, and remove it at the end.

    First, folders of dead supervisors are removed. Raises ConfigError if no folder can be created.
    """
    with contextlib.ExitStack() as stack:
        try:
            for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
                _remove_if_abandoned(folder)
            name = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True))  # mode 0700
            lock = _lock_new(Path(name))
        except OSError as error:
            path = f" {error.filename}" if error.filename else ""
            raise ConfigError(f"TMPDIR: a folder{path} cannot be created: {error.strerror}") from None
        if lock >= 0:
            stack.callback(os.close, lock)
        yield Path(name)


def check_folder(folder: Path) -> None:
    """Raise ConfigError if the folder has too little space, or too long a path for the engine's socket."""
    if len(f"{folder}/{SOCKET}") > MAX_SOCKET_PATH:
        raise ConfigError(f"TMPDIR: {folder} is too long for a socket's path of {MAX_SOCKET_PATH} characters")
    if (free := shutil.disk_usage(folder).free) < MIN_FREE_BYTES:
        missing = f"{free >> 10} KiB free; {MIN_FREE_BYTES >> 20} MiB are needed"
        raise ConfigError(f"TMPDIR: {folder.parent} has {missing}")


def is_held(folder: Path) -> bool:
    """Return whether a running process holds the folder's lock. Raises OSError for a folder without a lock, or of
    another user."""
    descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return not _try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _lock_new(folder: Path) -> int:
    """Lock the folder and return the lock's descriptor; -1 if the file system has no locks.

    The lock file appears under its final name only once it is locked.
    """
    new = folder / f"{LOCK}.new"
    descriptor = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    if not _try_lock(descriptor):
        os.close(descriptor)
        return -1
    new.rename(folder / LOCK)
    return descriptor


def _remove_if_abandoned(folder: Path) -> None:
    """Remove a folder of this user whose lock nobody holds."""
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if _try_lock(descriptor):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Return whether the lock was acquired. False also if the file system has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
