"""Bounded queue of log lines: order, dropped lines, and full or closed pipes."""

from __future__ import annotations

import io
import os
import threading

import pytest

from npuserve.service import log_queue
from npuserve.service.log_queue import LogQueue


def test_log_queue_writes_lines_in_order() -> None:
    stream = io.StringIO()
    queue = LogQueue(stream)
    lines = [f"line {number} ü\n" for number in range(100)]
    assert all(queue.put(line.encode()) for line in lines)
    queue.flush(30)
    assert stream.getvalue() == "".join(lines)
    assert queue.take_dropped() == 0


def test_log_queue_full_pipe_drops_lines_then_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_queue, "MAX_QUEUED_BYTES", 1000)
    reading, writing = os.pipe()
    with open(writing, "w") as stream, open(reading, "rb") as reader:
        queue = LogQueue(stream)
        line = b"x" * 99 + b"\n"
        while queue.put(line):  # fill the pipe's buffer and the queue
            queue.flush(0.01)
        assert not queue.put(line)
        assert queue.take_dropped() == 2
        assert queue.take_dropped() == 0
        read = threading.Thread(target=lambda: [None for _ in reader])
        read.start()
        queue.flush(30)
        assert queue.put(line)
        queue.flush(30)
        stream.close()
        read.join(60)
        assert not read.is_alive()


def test_log_queue_closed_reader_counts_lines() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream:
        queue = LogQueue(stream)
        assert queue.put(b"lost\n")
        queue.flush(30)
        assert queue.take_dropped() == 1


def test_log_queue_without_thread_drops_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    stream = io.StringIO()
    queue = LogQueue(stream)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        assert not queue.put(b"a\n")
    assert queue.put(b"b\n")
    queue.flush(30)
    assert stream.getvalue() == "b\n"
    assert queue.take_dropped() == 1
