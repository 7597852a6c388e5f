"""Tests on the emulated NPU: `@emulated(...)` runs a test in a child process that activates it.

The emulator cannot be unloaded, so no test activates it in pytest's process. A child serves further tests with the same
options; between two of them faults are healed, the device is synchronized, and the call log is cleared. The test's
arguments are pickled, so other fixtures are not supported.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import io
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pytest

F = TypeVar("F", bound=Callable[..., Any])

ROOT = Path(__file__).parents[3]


def missing() -> str | None:
    """Return the reason why the emulated NPU is not possible here, or None."""
    from npuserve.npu.emulator.build import EmulatorError, find, find_compiler

    try:
        find()
        find_compiler()
    except EmulatorError as error:
        return str(error)
    return None


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


class Child:
    """Process with the emulated NPU. options: of `emulator.activate`."""

    def __init__(self, options: dict[str, Any]):
        self.options = options
        self._said = tempfile.TemporaryFile("w+b")  # noqa: SIM115  closed in `close`
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve()"], cwd=ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._said, env={**os.environ, "PYTHONUNBUFFERED": "1"})
        assert self._process.stdin is not None
        _write(self._process.stdin, options)

    def run(self, function: Callable[..., Any], arguments: dict[str, Any], fresh: bool) -> Any:
        """Return the function's result. Raises AssertionError with its traceback, or with the output of a process that
        ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            _write(self._process.stdin, (function.__module__, function.__qualname__, arguments, fresh))
            kind, result = _read(self._process.stdout)
        except (EOFError, BrokenPipeError):
            code = self._process.wait()
            self._said.seek(0)
            said = self._said.read().decode(errors="replace")[-4000:]
            raise AssertionError(f"the process with the emulated NPU ended with {code}:\n{said}") from None
        if kind == "skipped":
            pytest.skip(result)
        if kind == "failed":
            self.close()  # the failed test may have broken the process
            raise AssertionError(f"on the emulated NPU:\n{result}")
        return result

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._said.close()


_child: Child | None = None


@atexit.register
def close() -> None:
    """End the child that is kept."""
    global _child
    if _child is not None:
        _child.close()
    _child = None


def run(
    function: Callable[..., Any], arguments: dict[str, Any], options: dict[str, Any], *, fresh: bool = False
) -> Any:
    """Call `function`, which a module must name, in a child with these options. A fresh child is not used again."""
    global _child
    if _child is None or _child.options != options or not _child.alive or fresh:
        close()
        _child = Child(options)
    try:
        return _child.run(function, arguments, fresh)
    finally:
        if fresh or not _child.alive:
            close()


def emulated(*, fresh: bool = False, **options: Any) -> Callable[[F], F]:
    """Decorate a test to run where the NPU is emulated with `options`; skip it with the reason where that is
    impossible.

    fresh: use a process for this test only, for tests that leave the device broken.
    """

    def mark(test: F) -> F:
        @functools.wraps(test)
        def in_child(**arguments: Any) -> None:
            if reason := missing():
                pytest.skip(reason)
            run(test, arguments, options, fresh=fresh)

        return in_child  # type: ignore[return-value]

    return mark


def serve() -> None:
    """Run the child's loop."""
    # A test's output goes to stderr: stdout carries the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0), write_through=True)
    requests = sys.stdin.buffer

    from npuserve.npu import emulator

    emulator.activate(**_read(requests))
    import torch
    import torch_npu  # noqa: F401

    while True:
        try:
            module, name, arguments, fresh = _read(requests)
        except EOFError:
            return
        emulator.clear_calls()
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
