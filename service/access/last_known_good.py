"""Copy of the last valid version of a settings file, for a process that starts while the file is invalid."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from npuserve.service import logs, metrics
from npuserve.service.config import ConfigError

log = logging.getLogger(__name__)

Value = TypeVar("Value")


class LastKnownGoodFile(Generic[Value]):
    """Reader of a settings file that copies each valid version. If the first read fails, it reads the copy, and
    `failure` is the error of the file.

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
        self._is_first = True
        self.failure: ConfigError | OSError | None = None

    def read(self) -> Value:
        """Return the value of the file, or at the first read of its copy. Raises the error of the file."""
        is_first, self._is_first = self._is_first, False
        try:
            value = self._read(self._file)
        except (ConfigError, OSError) as error:
            if not is_first or not self._copy or not self._copy.exists():
                raise
            value = self._read(str(self._copy))
            self.failure = error
            metrics.settings_not_read_total.labels(self._setting).inc()
            logs.event(log, "not read, the last good one stays", level=logging.ERROR, setting=self._setting,
                       error=str(error))
            return value
        if self._copy:
            self._save(self._copy)
        return value

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
