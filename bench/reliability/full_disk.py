"""A small file system, and a thread that fills it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

SUDO = [] if os.geteuid() == 0 else ["sudo", "-n"]
BLOCK = bytes(4096)
POLL_SECONDS = 0.002


class CannotMount(Exception):
    """This user may not mount a file system."""


@contextlib.contextmanager
def small_disk(folder: Path, mebibytes: int = 24) -> Iterator[Path]:
    """Mount a file system of this size at an empty folder, and unmount it at the end. Raises CannotMount."""
    options = f"size={mebibytes}m,mode=0700,uid={os.geteuid()}"
    command = [*SUDO, "mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotMount(f"{' '.join(command)}: {error}") from None
    try:
        yield folder
    finally:
        subprocess.run([*SUDO, "umount", "-l", str(folder)], check=True)


class Filler:
    """Thread that takes all space of a folder's file system from `start` to `stop`, also what becomes free."""

    def __init__(self, folder: Path):
        self._file = folder / "filler"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def is_full(self) -> bool:
        return os.statvfs(self._file.parent).f_bavail == 0

    def start(self) -> None:
        """Start, and return once the file system is full."""
        self._thread.start()
        while not self.is_full:
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Free the space. Nothing if it was not started or was stopped before."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self._file.unlink(missing_ok=True)

    def _run(self) -> None:
        with self._file.open("wb", buffering=0) as file:
            while not self._stopped.wait(POLL_SECONDS):
                with contextlib.suppress(OSError):
                    while file.write(BLOCK):
                        pass
