"""Protocol of child processes: arguments, death of the parent, and heartbeats."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from npuserve.service.processes import child
from npuserve.service.processes.child import Heartbeat, is_transient

CHILD = """
import threading
from npuserve.service.processes import child
print(child.read_arguments(dict), flush=True)
child.listen(lambda order: print(order, flush=True))
threading.Event().wait()
"""


@pytest.mark.parametrize(("sent", "said"), [
    (b"", b""), (b'{"a": 1}\n', b"{'a': 1}\n"), (b'{"a": 1}\n{"b": 2}\n', b"{'a': 1}\n{'b': 2}\n"),
    (b'{}\n{"b": %s2}\n' % (b" " * (1 << 17)), b"{}\n{'b': 2}\n")], ids=["nothing", "arguments", "order", "long_order"])
def test_child_dead_parent_ends_child(sent: bytes, said: bytes) -> None:
    """The child sees only the end of file if the parent died before the child requested a signal from the kernel."""
    done = subprocess.run([sys.executable, "-c", CHILD], input=sent, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, said)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_child_asks_the_kernel_to_die_with_its_parent() -> None:
    script = ("import ctypes; from npuserve.service.processes import child; child.read_arguments(dict); "
              "found = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(found)); print(found.value)")
    done = subprocess.run([sys.executable, "-c", script], input=b"{}\n", capture_output=True, timeout=60, check=True)
    assert int(done.stdout) == signal.SIGKILL


@pytest.mark.parametrize(("error", "transient"), [
    (OSError(errno.ENOMEM, ""), True), (BlockingIOError(errno.EAGAIN, ""), True), (OSError(errno.EMFILE, ""), True),
    (FileNotFoundError(errno.ENOENT, ""), False), (MemoryError(), False), (ValueError(), False)])
def test_child_is_transient(error: BaseException, transient: bool) -> None:
    assert is_transient(error) is transient


LINE = b'{"event": "heartbeat"}\n'


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Replace the stdout of heartbeats by a pipe. Yield the end to read from, which does not block."""
    reading, writing = os.pipe()
    reopen = child._open_nonblocking
    monkeypatch.setattr(child, "_open_nonblocking", lambda descriptor: reopen(writing))
    os.set_blocking(reading, False)
    with open(writing, "wb", buffering=0) as stdout, open(reading, "rb", buffering=0):
        stdout_blocks = os.get_blocking(stdout.fileno())
        yield reading
        assert os.get_blocking(stdout.fileno()) is stdout_blocks is True  # events still wait for the parent


def read(pipe: int) -> bytes:
    try:
        return os.read(pipe, 1 << 20)
    except BlockingIOError:
        return b""


def test_heartbeat_is_sent_at_most_once_per_interval(pipe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(child.time, "monotonic", lambda: now)
    heartbeat = Heartbeat()
    sent = []
    for _ in range(20):
        heartbeat.beat()
        sent.append(read(pipe))
        now += child.HEARTBEAT_SECONDS / 4
    assert sent == [LINE, b"", b"", b""] * 5


def test_heartbeat_is_dropped_while_events_are_unread(pipe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent that reads nothing does not make heartbeats fill the pipe, where an event would then block."""
    monkeypatch.setattr(child, "HEARTBEAT_SECONDS", 0.0)
    heartbeat = Heartbeat()
    for _ in range(10_000):
        heartbeat.beat()
    assert read(pipe) == LINE
    heartbeat.beat()
    assert read(pipe) == LINE


@pytest.mark.parametrize("is_seen", [True, False])
def test_heartbeat_full_pipe_never_blocks(pipe: int, monkeypatch: pytest.MonkeyPatch, is_seen: bool) -> None:
    """Even if another writer fills the pipe after the check for unread events."""
    monkeypatch.setattr(child, "HEARTBEAT_SECONDS", 0.0)
    heartbeat = Heartbeat()
    if not is_seen:
        monkeypatch.setattr(child, "_unread_bytes", lambda descriptor: 0)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(heartbeat._pipe, b"x" * 4096)
    heartbeat.beat()
    received = read(pipe) + read(pipe)
    assert set(received) == {ord("x")}
    heartbeat.beat()
    assert read(pipe) == LINE


def test_heartbeat_without_proc_is_sent(pipe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> int:
        raise FileNotFoundError

    monkeypatch.setattr(child.os, "open", fail)
    Heartbeat().beat()
    assert read(pipe) == LINE


def test_heartbeat_without_parent_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "HEARTBEAT_SECONDS", 0.0)
    reading, writing = os.pipe()
    reopen = child._open_nonblocking
    monkeypatch.setattr(child, "_open_nonblocking", lambda descriptor: reopen(writing))
    heartbeat = Heartbeat()
    os.close(reading)
    heartbeat.beat()
    os.close(writing)
    os.close(heartbeat._pipe)


def test_heartbeat_disabled_opens_and_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> int:
        raise AssertionError

    monkeypatch.setattr(child, "_open_nonblocking", fail)
    monkeypatch.setattr(child.os, "write", fail)
    Heartbeat(is_enabled=False).beat()
