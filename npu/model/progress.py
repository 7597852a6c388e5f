"""Progress of long operations at start, on stderr."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Takes (bytes done, total bytes)."""

FIRST_REPORT_SECONDS = 1.0
REPORT_SECONDS = 5.0
"""Time to the first log line of progress, and between further lines."""


@contextmanager
def reporting(what: str) -> Iterator[Progress]:
    """Show progress on stderr: a bar on a terminal, otherwise a log line after a second and then every few seconds."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return

    due = time.monotonic() + FIRST_REPORT_SECONDS

    def line(done: int, total: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + REPORT_SECONDS
            log.info("%s: %d of %d MiB", what, done >> 20, total >> 20)

    yield line
