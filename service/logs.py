"""Structured logs on stderr: one line per record, as text on a terminal and as JSON otherwise.

Modules log with `event(log, "request done", id=..., tokens=...)`: a constant message and fields. Prompts are logged
only if ServerConfig.log_prompts is set. Lines go through a bounded queue (log_queue.py), so that no call waits for
stderr. Lines are dropped and counted when the queue is full.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from types import TracebackType
from typing import Any

import msgspec

from npuserve.service.config import ServerConfig
from npuserve.service.log_queue import LogQueue

FLUSH_SECONDS = 1.0
"""Maximum wait for a blocked stderr when the process exits."""

_prompts = False
"""Value of ServerConfig.log_prompts."""
_queue: LogQueue | None = None
"""Queue of this process's stderr; None before `setup`."""
_is_ending = False
"""Whether an exception ends the process, so that a line may block it."""
_PLAIN = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+")


def setup(config: ServerConfig, process: str) -> None:
    """Send this process's logs to stderr, also the exception that ends it.

    process: process name for every line, such as supervisor or frontend-0.
    """
    global _prompts, _queue
    _prompts = config.log_prompts
    _queue = LogQueue(sys.stderr)
    handler = _Handler(_queue)
    is_text = with_format(config).log_format == "text"
    handler.setFormatter(TextFormatter(process) if is_text else JsonFormatter(process))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    for ours in ("npuserve", "__main__"):  # the module that runs as a process is named __main__
        logging.getLogger(ours).setLevel(config.log_level.upper())
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Log the exception that ends the process. A replacement of sys.excepthook."""
    global _is_ending
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        _is_ending = True
        bug(logging.getLogger("npuserve"), "the process ends by an exception", error)


def with_format(config: ServerConfig) -> ServerConfig:
    """Resolve log_format `auto`: text if stderr is a terminal, else JSON.

    The supervisor also decides for its children, because their stderr is a pipe to the supervisor.
    """
    if config.log_format != "auto":
        return config
    return msgspec.structs.replace(config, log_format="text" if sys.stderr.isatty() else "json")


def forward(line: bytes) -> None:
    """Queue a line of another process, including its line end. Before `setup`, write it at once."""
    if _queue:
        _queue.put(line)
    else:
        sys.stderr.write(line.decode(errors="replace"))


def take_dropped() -> int:
    """Return the number of lines that this process dropped since the last call."""
    return _queue.take_dropped() if _queue else 0


def event(log: logging.Logger, message: str, /, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log a constant message, with variable data in fields."""
    log.log(level, message, extra={"fields": fields}, stacklevel=2)


def bug(log: logging.Logger, message: str, error: BaseException, /, **fields: Any) -> None:
    """Log an unexpected exception. Its text may quote a prompt and is left out unless prompts are logged."""
    kinds: list[str] = []
    frames: list[str] = []
    cause: BaseException | None = error
    while cause:
        kinds.append(type(cause).__qualname__)
        frames = [*traceback.format_tb(cause.__traceback__), *frames]
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    text = {"text": str(error)} if _prompts else {}
    fields |= {"exception_type": " from ".join(kinds), "traceback": "".join(frames), **text}
    log.error(message, extra={"fields": fields}, stacklevel=2)


class _Handler(logging.Handler):
    """Handler that formats in the caller's thread and queues the line for writing."""

    def __init__(self, queue: LogQueue):
        super().__init__()
        self._queue = queue

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record).encode(errors="backslashreplace") + b"\n"
        except Exception:  # like logging's handlers: a bad record must not end the caller
            line = f"log record of {record.name} cannot be formatted\n".encode()
        if not self._queue.put(line) and _is_ending:
            self._queue.write_without_thread(line)

    def flush(self) -> None:
        """Wait until all lines are written. Called by logging.shutdown."""
        self._queue.flush(FLUSH_SECONDS)


class TextFormatter(logging.Formatter):
    """Formatter of text lines in local time: `2026-11-20 06:54:41.123 INFO supervisor: listening
    address=127.0.0.1:50051`.
    """

    def __init__(self, process: str):
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {key}={_text(value)}" for key, value in _fields(record).items())
        line = f"{when}.{int(record.msecs):03d} {record.levelname} {self._process}: {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """Formatter of JSON lines: time (UTC, ISO 8601), level, process, logger, message, the fields, exception."""

    def __init__(self, process: str):
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{when}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "process": self._process,
            "logger": record.name, "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        for key, value in _fields(record).items():
            line[f"{key}_" if key in line else key] = value
        return json.dumps(line, ensure_ascii=False, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _text(value: Any) -> str:
    """Return a value as one word: quoted unless it is plain."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
