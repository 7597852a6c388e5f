"""Bounded queue of log lines. A separate thread writes them, so that a blocked pipe never blocks a caller."""

from __future__ import annotations

import io
import os
import select
import threading
import time
from collections import deque
from typing import TextIO

MAX_QUEUED_BYTES = 1 << 20
"""Maximum number of queued bytes. Further lines are dropped."""


class LogQueue:
    """Queue of lines for one stream. Thread-safe.

    A stream with a file descriptor is written by os.write. The lock of Python's stream, held by a blocked thread, would
    block the interpreter's exit.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        try:
            self._descriptor = stream.fileno()
        except (OSError, ValueError, AttributeError, io.UnsupportedOperation):
            self._descriptor = -1
        self._lines: deque[bytes] = deque()
        self._bytes = 0  # queued or being written
        self._dropped = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, line: bytes) -> bool:
        """Queue a line with its line end. Return False and count the line if it is dropped."""
        with self._changed:
            if self._bytes >= MAX_QUEUED_BYTES or not self._has_thread():
                self._dropped += 1
                return False
            self._lines.append(line)
            self._bytes += len(line)
            self._changed.notify_all()
            return True

    def write_without_thread(self, line: bytes) -> None:
        """Write a line in the calling thread if the system has no thread for the queue. The caller is about to end."""
        if self._thread is None:
            self._write(line)

    def take_dropped(self) -> int:
        """Return the number of lines dropped since the last call, and reset it."""
        with self._changed:
            dropped = self._dropped
            self._dropped = 0
            return dropped

    def flush(self, seconds: float) -> None:
        """Wait until all lines are written, at most `seconds`."""
        end = time.monotonic() + seconds
        with self._changed:
            while self._bytes and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)

    def _has_thread(self) -> bool:
        """Start the writer thread if needed. Return False if the system cannot start one."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="log", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._lines:
                    self._changed.wait()
                line = self._lines.popleft()
            written = self._write(line)
            with self._changed:
                self._bytes -= len(line)
                self._dropped += not written
                self._changed.notify_all()

    def _write(self, line: bytes) -> bool:
        """Write a line. Return False if the reader has closed the stream."""
        try:
            if self._descriptor < 0:
                self._stream.write(line.decode(errors="replace"))
                self._stream.flush()
            else:
                rest = memoryview(line)
                while rest:
                    try:
                        rest = rest[os.write(self._descriptor, rest):]
                    except BlockingIOError:  # another process made the shared pipe non-blocking
                        select.select((), (self._descriptor,), ())
        except (OSError, ValueError):
            return False
        return True
