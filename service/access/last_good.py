"""Copy of a setting's file as it was last read without an error, for a process that starts while the file is broken."""

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


class LastGood(Generic[Value]):
    """Reader of a file. Each good version is copied; if the first read of this process fails, the copy is read.

    setting: that names the file, for messages. copy: path in a folder for this user alone, absent until a process of
    this server has read the file; None for no copy. read: takes a path; raises ConfigError or OSError for a file that
    is unusable.
    """

    def __init__(self, setting: str, file: str, copy: Path | None, read: Callable[[str], Value]):
        self._setting = setting
        self._file = file
        self._copy = copy
        self._read = read
        self._is_first = True

    def read(self) -> Value:
        """Return the value of the file, or of the copy. Raises what `read` raises for the file."""
        is_first, self._is_first = self._is_first, False
        try:
            value = self._read(self._file)
        except (ConfigError, OSError) as error:
            if not is_first or not self._copy or not self._copy.exists():
                raise
            value = self._read(str(self._copy))
            metrics.settings_not_read_total.labels(self._setting).inc()
            logs.event(log, "not read, the last good one stays", level=logging.ERROR, setting=self._setting,
                       error=str(error))
            return value
        if self._copy:
            self._keep(self._copy)
        return value

    def _keep(self, copy: Path) -> None:
        """Copy the file if it is still good: it may have changed after it was read."""
        made = copy.with_name(f"{copy.name}.{os.getpid()}")
        try:
            made.touch(mode=0o600)
            shutil.copyfile(self._file, made)
            self._read(str(made))
            made.replace(copy)
        except (ConfigError, OSError) as error:
            made.unlink(missing_ok=True)
            logs.event(log, "no copy for other processes", level=logging.WARNING, setting=self._setting,
                       error=str(error))
