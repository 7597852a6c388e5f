"""Tests on the emulated NPU: `@emulated(...)` runs a test in a child process that activates it.

The emulator cannot be unloaded, so no test activates it in pytest's process. A child serves further tests with the same
options; between two of them faults are healed, the device is synchronized, and the call log is cleared. The test's
arguments are pickled, so other fixtures are not supported.

    pytest ── starts once ──► template: imports torch, torch_npu, the tests' modules ── forks ──► child, one at a time

A start from nothing takes seconds, most of them imports; a fork takes milliseconds.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

import pytest

F = TypeVar("F", bound=Callable[..., Any])

ROOT = Path(__file__).parents[3]
END_SECONDS = 20
"""Time for a process to end before it is killed."""


@functools.cache
def missing() -> str | None:
    """Return the reason why the emulated NPU is not possible here, or None."""
    from npuserve.npu.emulator.build import EmulatorError, find, find_compiler

    try:
        find()
        find_compiler()
    except EmulatorError as error:
        return str(error)
    return None


needs_npu = pytest.mark.skipif(missing() is not None, reason=str(missing()))
"""Mark of tests of an emulated NPU."""


def _write(stream: BinaryIO, message: Any) -> None:
    data = pickle.dumps(message)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _read(stream: BinaryIO) -> Any:
    """Read a message. Raises EOFError if the other side has ended."""
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    return pickle.loads(stream.read(struct.unpack("<Q", head)[0]))


def _environment() -> dict[str, str]:
    """Return the environment of children, which the template needs from its start."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


class Template:
    """Process that has loaded the emulator but not used it, and forks children.

    Its socket takes one message at a time:

    - (options, module), with the child's three standard files, starts a child. The reply is its process id.
    - A process id waits for that child. The reply is its exit code.
    """

    def __init__(self) -> None:
        self.environment = _environment()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve_forks; serve_forks({theirs.fileno()})"],
                cwd=ROOT, pass_fds=[theirs.fileno()], env={**self.environment, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL)

    def start(self, options: dict[str, Any], module: str, files: list[int]) -> int:
        socket.send_fds(self._socket, [pickle.dumps((options, module))], files)
        return self._answer()

    def wait(self, pid: int) -> int:
        self._socket.send(pickle.dumps(pid))
        return self._answer()

    def _answer(self) -> int:
        if not (data := self._socket.recv(1 << 16)):
            raise AssertionError(f"the process that loads the emulated NPU ended with {self._process.wait()}")
        answer: int = pickle.loads(data)
        return answer

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._process.kill()
        self._process.wait()


class Child:
    """Process with the emulated NPU. options: of `emulator.activate`. module: of its first test."""

    def __init__(self, template: Template, options: dict[str, Any], module: str):
        self.options = options
        self._template = template
        self._said = tempfile.TemporaryFile("w+b")  # noqa: SIM115  closed in `close`
        (asked, asks), (answers, answered) = os.pipe(), os.pipe()
        try:
            self._pid = template.start(options, module, [asked, answered, self._said.fileno()])
        finally:
            os.close(asked)
            os.close(answered)
        self._asks, self._answers = os.fdopen(asks, "wb"), os.fdopen(answers, "rb")
        self._code: int | None = None

    def run(self, function: Callable[..., Any], arguments: dict[str, Any], fresh: bool) -> Any:
        """Return the function's result. Raises AssertionError with its traceback, or with the output of a process that
        ended."""
        try:
            _write(self._asks, (function.__module__, function.__qualname__, arguments, fresh))
            kind, result = _read(self._answers)
        except (EOFError, BrokenPipeError):
            self._code = self._template.wait(self._pid)
            self._said.seek(0)
            said = self._said.read().decode(errors="replace")[-4000:]
            raise AssertionError(f"the process with the emulated NPU ended with {self._code}:\n{said}") from None
        except BaseException:  # such as the test's time limit: the next test would get this one's answer
            os.kill(self._pid, signal.SIGKILL)
            self.close()
            raise
        if kind == "skipped":
            pytest.skip(result)
        if kind == "failed":
            self.close()  # the failed test may have broken the process
            raise AssertionError(f"on the emulated NPU:\n{result}")
        return result

    @property
    def alive(self) -> bool:
        return self._code is None

    def close(self) -> None:
        """End the process: it exits at the end of its input, and is killed if it does not."""
        with contextlib.suppress(BrokenPipeError):
            self._asks.close()
        if self._code is None:
            # The process id stays valid until the template waits for it.
            killer = threading.Timer(END_SECONDS, os.kill, (self._pid, signal.SIGKILL))
            killer.start()
            self._answers.read()  # until the process has closed its output
            killer.cancel()
            self._code = self._template.wait(self._pid)
        self._answers.close()
        self._said.close()


_templates: list[Template] = []
"""The first one, and one for a test with other environment variables."""
_child: Child | None = None


@atexit.register
def close() -> None:
    """End the processes."""
    _close_child()
    while _templates:
        _templates.pop().close()


def _close_child() -> None:
    global _child
    if _child is not None:
        _child.close()
    _child = None


def _find_template() -> Template:
    """Return a template with this process's environment, started if necessary."""
    environment = _environment()
    for template in _templates:
        if template.environment == environment:
            return template
    if len(_templates) > 1:
        _templates.pop().close()
    _templates.append(Template())
    return _templates[-1]


def start_children(count: int, options: dict[str, Any], module: str) -> list[Child]:
    """Start processes for `Child.run`, which the caller closes. The one of earlier tests ends."""
    _close_child()
    template = _find_template()
    return [Child(template, options, module) for _ in range(count)]


def run(
    function: Callable[..., Any], arguments: dict[str, Any], options: dict[str, Any], *, fresh: bool = False
) -> Any:
    """Call `function`, which a module must name, in a child with these options. A fresh child is not used again."""
    global _child
    if _child is None or _child.options != options or not _child.alive or fresh:
        _child = start_children(1, options, function.__module__)[0]
    try:
        return _child.run(function, arguments, fresh)
    finally:
        if fresh or not _child.alive:
            _close_child()


def emulated(*, fresh: bool = False, **options: Any) -> Callable[[F], F]:
    """Decorate a test to run where the NPU is emulated with `options`; skip it with the reason where that is
    impossible.

    fresh: use a process for this test only, for tests that leave the device broken.
    """

    def mark(test: F) -> F:
        @needs_npu
        @functools.wraps(test)
        def in_child(**arguments: Any) -> None:
            run(test, arguments, options, fresh=fresh)

        return in_child  # type: ignore[return-value]

    return mark


def serve_forks(descriptor: int) -> NoReturn:
    """Run the template's loop until its socket is closed, and exit without torch_npu's clean-up of a device."""
    from npuserve.npu import emulator
    from npuserve.npu.large_import import import_large

    emulator.preload()
    import_large("npuserve.npu.execution.load")
    with socket.socket(fileno=descriptor) as requests:
        while True:
            data, files, _, _ = socket.recv_fds(requests, 1 << 16, 3, socket.MSG_CMSG_CLOEXEC)
            if not data:
                os._exit(0)
            message = pickle.loads(data)
            if isinstance(message, int):
                answer = os.waitstatus_to_exitcode(os.waitpid(message, 0)[1])
            else:
                options, module = message
                with contextlib.suppress(Exception):  # the child reports it
                    importlib.import_module(module)
                answer = os.fork()
                if not answer:
                    requests.close()
                    _become_child(files, options)
                for file in files:
                    os.close(file)
            requests.send(pickle.dumps(answer))


def _become_child(files: list[int], options: dict[str, Any]) -> NoReturn:
    """Run the tests that arrive in the first file, and exit. A hanging device cannot prevent the exit."""
    code = 1
    try:
        requests, answers, said = files
        for standard in (1, 2):  # a test's output
            os.dup2(said, standard)
        with os.fdopen(requests, "rb") as asked, os.fdopen(answers, "wb") as answered:
            _serve(asked, answered, options)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(requests: BinaryIO, answers: BinaryIO, options: dict[str, Any]) -> None:
    """Run the child's loop."""
    import torch

    from npuserve.npu import emulator

    emulator.activate(**options)
    while True:
        try:
            module, name, arguments, fresh = _read(requests)
        except EOFError:
            return
        emulator.clear_calls()
        # The plugin hands out 32 streams in turn. A child starts more backends than a server: the stream of the length
        # updates, which the plugin takes once, must not become the stream of a later test's steps.
        torch.npu.graphs._GraphDispatchMode.update_stream = None
        try:
            function: Any = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            answer = ("done", getattr(function, "__wrapped__", function)(**arguments))
        except pytest.skip.Exception as skipped:
            answer = ("skipped", str(skipped))
        except BaseException:
            answer = ("failed", traceback.format_exc())
        emulator.heal()
        try:
            if not fresh:
                torch.npu.synchronize()
        except RuntimeError:
            if answer[0] == "done":
                answer = ("failed", "the test left the device broken: it needs fresh=True\n" + traceback.format_exc())
        _write(answers, answer)
