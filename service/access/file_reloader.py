"""Value of a setting that is read from files, and reloaded when the files change."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from npuserve.service import logs, metrics
from npuserve.service.config import ConfigError

log = logging.getLogger(__name__)

Value = TypeVar("Value")


class FileReloader(Generic[Value]):
    """Reader of a setting's files. `value` is the result of the last read without an error.

    setting: name of the setting, for messages.
    files: paths of the files.
    read: reads the files. If it raises ConfigError or OSError, the constructor raises ConfigError, while
        `reload_if_changed` keeps the value and logs the error. After an OSError the next call reads again, since the
        cause may pass without a change of the files. The same error is logged again only after a change.
    read_copy: returns the value if the first read fails; None to raise its error.
    """

    def __init__(
        self, setting: str, files: Sequence[str], read: Callable[[], Value],
        read_copy: Callable[[], Value | None] = lambda: None,
    ):
        self._setting = setting
        self._files = files
        self._read = read
        self._version = self._stat()
        self._failure: ConfigError | OSError | None = None  # error of the last read
        try:
            self.value = read()
        except (ConfigError, OSError) as error:
            if (copied := read_copy()) is None:
                makes = isinstance(error, FileNotFoundError) and setting == "api_keys"
                advice = "; npuserve keys add FILE NAME makes it" if makes else ""
                raise error if isinstance(error, ConfigError) else ConfigError(
                    f"{setting}: {error.filename} cannot be read: {error.strerror}{advice}") from None
            self.value = copied
            self._failure = error
            self._report("not read, the last good one stays", error)

    def reload_if_changed(self) -> bool:
        """Read the files if they have changed. Return whether `value` is new. Call it from one thread."""
        version = self._stat()  # before the read, so that a change during the read is found at the next check
        if version == self._version and not isinstance(self._failure, OSError):
            return False
        is_changed = version != self._version
        self._version = version
        try:
            self.value = self._read()
        except (ConfigError, OSError) as error:
            if is_changed or str(error) != str(self._failure):
                self._report("not read again, the last good one stays", error)
            self._failure = error
            return False
        self._failure = None
        logs.event(log, "read again", setting=self._setting)
        return True

    def _report(self, message: str, error: Exception) -> None:
        metrics.settings_not_read_total.labels(self._setting).inc()
        logs.event(log, message, level=logging.ERROR, setting=self._setting, error=str(error))

    def _stat(self) -> list[tuple[int, int, int] | None]:
        """Return the version of each file. Follow symbolic links: Kubernetes updates a secret by replacing a link."""
        return [_stat(name) for name in self._files]


def _stat(name: str) -> tuple[int, int, int] | None:
    """Return ctime in nanoseconds, inode and size; None if the file cannot be accessed.

    A change of the mode or the owner changes ctime, not mtime.
    """
    try:
        status = os.stat(name)
    except OSError:
        return None
    return status.st_ctime_ns, status.st_ino, status.st_size
