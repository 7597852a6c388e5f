"""A value that is read from files, and read again when they change."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from npuserve.service import logs, metrics
from npuserve.service.config import ConfigError

log = logging.getLogger(__name__)

Value = TypeVar("Value")


class Watched(Generic[Value]):
    """`value` is what `read` made of the files when they were last whole. One thread calls `look`.

    setting: that names the files, for messages. read: raises ConfigError, or OSError; then the constructor raises
    ConfigError, while `look` logs it, once for each change, and the last good value stays.
    """

    def __init__(self, setting: str, files: Sequence[str], read: Callable[[], Value]):
        self._setting = setting
        self._files = files
        self._read = read
        self._seen = self._stamp()
        try:
            self.value = read()
        except OSError as error:
            raise ConfigError(f"{setting}: {error.filename} cannot be read: {error.strerror}") from None

    def look(self) -> bool:
        """Whether `value` is a new one."""
        stamp = self._stamp()  # before it is read: what changes in between is a change at the next look
        if stamp == self._seen:
            return False
        self._seen = stamp
        try:
            self.value = self._read()
        except (ConfigError, OSError) as error:
            metrics.settings_not_read_total.labels(self._setting).inc()
            logs.event(log, "not read again, the last good one stays", level=logging.ERROR, setting=self._setting,
                       error=str(error))
            return False
        logs.event(log, "read again", setting=self._setting)
        return True

    def _stamp(self) -> list[tuple[int, int, int] | None]:
        """Of what the names lead to, so that a link which is set anew is a change: Kubernetes mounts secrets so."""
        return [_stamp(name) for name in self._files]


def _stamp(name: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
