"""Copy of the last valid version of a settings file, for a process that starts while the file is invalid."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from npuserve.service import logs
from npuserve.service.config import ConfigError

log = logging.getLogger(__name__)

Value = TypeVar("Value")


class LastKnownGoodFile(Generic[Value]):
    """Reader of a settings file, and of a copy of its last valid version.

    setting: name of the setting, for messages.
    file: path of the file.
    copy: path of the copy, in a folder of this user alone. It does not exist until a process of this server has read
        the file. None: no copy.
    read: reads a path. Raises ConfigError or OSError for an invalid file.
    """

    def __init__(self, setting: str, file: str, copy: Path | None, read: Callable[[str], Value]):
        self._setting = setting
        self._file = file
        self._copy = copy
        self._read = read

    def read(self) -> Value:
        """Return the value of the file, and copy the file. Raises ConfigError and OSError."""
        value = self._read(self._file)
        if self._copy:
            self._save(self._copy)
        return value

    def read_copy(self) -> Value | None:
        """Return the value of the copy; None if there is none."""
        with contextlib.suppress(OSError):
            return self._read(str(self._copy)) if self._copy else None
        return None

    def _save(self, copy: Path) -> None:
        """Replace the copy. The new copy is read first: the file may have changed since it was read."""
        fresh = copy.with_name(f"{copy.name}.{os.getpid()}")
        try:
            fresh.touch(mode=0o600)
            shutil.copyfile(self._file, fresh)
            self._read(str(fresh))
            fresh.replace(copy)
        except (ConfigError, OSError) as error:
            fresh.unlink(missing_ok=True)
            logs.event(log, "no copy for other processes", level=logging.WARNING, setting=self._setting,
                       error=str(error))
