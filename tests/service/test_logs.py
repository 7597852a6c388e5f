"""Log lines in text and JSON."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from npuserve.service import log_queue, logs, metrics
from npuserve.service.config import ServerConfig

log = logging.getLogger("npuserve.service.somewhere")


Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, hook = root.handlers, sys.excepthook
    levels = {name: logging.getLogger(name).level for name in ("root", "npuserve", "__main__")}
    logging.captureWarnings(False)  # else `setup` captures nothing in pytest's block for warnings
    yield
    root.handlers, sys.excepthook = handlers, hook
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    logging.captureWarnings(False)


def written(capsys: Capture) -> str:
    """Return stderr, once the queue's thread has written all lines."""
    (handler,) = logging.getLogger().handlers
    handler.flush()
    return capsys.readouterr().err


def lines(capsys: Capture) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written(capsys).splitlines()]


def test_json_formatter_has_record_and_fields(capsys: Capture) -> None:
    logs.setup(ServerConfig(log_format="json"), "frontend-0")
    logs.event(log, "request done", id="a b", tokens=3, seconds=0.5, none=None)
    (line,) = lines(capsys)
    when = datetime.fromisoformat(line.pop("time").replace("Z", "+00:00"))
    assert abs(datetime.now(timezone.utc) - when) < timedelta(minutes=1)
    assert line == {
        "level": "info", "process": "frontend-0", "logger": "npuserve.service.somewhere", "message": "request done",
        "id": "a b", "tokens": 3, "seconds": 0.5, "none": None,
    }


def test_json_formatter_keeps_colliding_field(capsys: Capture) -> None:
    logs.setup(ServerConfig(log_format="json"), "engine")
    logs.event(log, "x", message="mine", time=7)
    (line,) = lines(capsys)
    assert line["message"] == "x"
    assert (line["message_"], line["time_"]) == ("mine", 7)


def test_json_formatter_includes_exception(capsys: Capture) -> None:
    logs.setup(ServerConfig(log_format="json"), "engine")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("broken")
    (line,) = lines(capsys)
    assert line["level"] == "error"
    assert line["exception"].endswith("ValueError: why")


def test_bug_names_the_exceptions_that_led_to_it(capsys: Capture) -> None:
    logs.setup(ServerConfig(log_format="json"), "engine")
    error = ValueError()
    error.__context__ = KeyError()
    logs.bug(log, "bug", error)
    error.__suppress_context__ = True  # raise … from None
    logs.bug(log, "bug", error)
    error.__cause__ = OSError()
    logs.bug(log, "bug", error)
    found = [line["exception_type"] for line in lines(capsys)]
    assert found == ["ValueError from KeyError", "ValueError", "ValueError from OSError"]


def test_dropped_lines_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    logs.setup(ServerConfig(log_format="json"), "engine")
    metrics.flush()
    before = metrics.log_lines_dropped_total._value.get()
    monkeypatch.setattr(log_queue, "MAX_QUEUED_BYTES", 0)
    logs.event(log, "lost")
    logs.forward(b"lost\n")
    for _ in range(2):
        metrics.flush()
        assert metrics.log_lines_dropped_total._value.get() == before + 2


def test_warnings_are_lines(capsys: Capture) -> None:
    logs.setup(ServerConfig(log_format="json"), "engine")
    warnings.warn("careful", stacklevel=1)
    (line,) = lines(capsys)
    assert (line["level"], line["logger"]) == ("warning", "py.warnings")
    assert "careful" in line["message"]


def test_exception_that_ends_the_process_is_one_json_line_without_its_text() -> None:
    program = ("from npuserve.service import logs\n"
               "from npuserve.service.config import ServerConfig\n"
               "logs.setup(ServerConfig(log_format='json'), 'engine')\n"
               "raise ValueError('a prompt')\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    (line,) = map(json.loads, done.stderr.splitlines())
    assert done.returncode == 1
    assert (line["process"], line["message"], line["exception_type"]) == (
        "engine", "the process ends by an exception", "ValueError")
    assert "a prompt" not in line["traceback"]
    assert "line 4" in line["traceback"]


def test_exception_that_ends_a_process_without_threads_is_logged() -> None:
    program = """
import threading
from npuserve.service import logs
from npuserve.service.config import ServerConfig

def fail(thread):
    raise RuntimeError("can't start new thread")

threading.Thread.start = fail
logs.setup(ServerConfig(log_format="json"), "engine")
threading.Thread().start()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    line = json.loads(done.stderr)
    assert (line["message"], line["exception_type"]) == ("the process ends by an exception", "RuntimeError")
    assert "in fail" in line["traceback"]


def test_text_formatter_quotes_special_characters(capsys: Capture) -> None:
    logs.setup(ServerConfig(log_format="text"), "engine")
    logs.event(log, "done", id="x=1\nINFO forged", plain="a/b:c", seconds=0.123456789, empty="")
    (line,) = written(capsys).splitlines()
    assert line.endswith(r'INFO engine: done id="x=1\nINFO forged" plain=a/b:c seconds=0.123457 empty=""')


def test_setup_auto_format_is_text_only_on_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    logs.setup(ServerConfig(), "engine")
    logs.event(log, "to a file")
    assert lines(capsys)[0]["message"] == "to a file"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    logs.setup(ServerConfig(), "engine")
    logs.event(log, "to a terminal")
    assert written(capsys).rstrip().endswith("INFO engine: to a terminal")


def test_setup_level_filters_records(capsys: Capture) -> None:
    logs.setup(ServerConfig(log_format="json", log_level="warning"), "engine")
    logs.event(log, "quiet")
    logs.event(log, "loud", level=logging.WARNING)
    logging.getLogger("somebody.else").info("foreign chatter")
    assert [line["message"] for line in lines(capsys)] == ["loud"]
