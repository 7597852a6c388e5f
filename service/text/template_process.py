"""Processes that render a model's chat template, so that a template can be killed.

    python -m npuserve.service.text.template_process      started by `TemplateProcess`, reads stdin

A template is a program that comes with the model. The sandbox of jinja2 denies it access to the machine, but does not
bound endless loops, huge numbers or huge texts. No check in Python can interrupt a call in C that does not return. So a
process renders one conversation at a time, under a memory limit and timers of the kernel, whose signals have no handler
and end the process. A conversation beyond the limit of memory or of processor time gets INVALID_ARGUMENT, and the next
one gets a new process. Real time depends on the machine too, which may be loaded or frozen: a conversation that takes
MAX_WALL_RATIO times the limit gets UNAVAILABLE.

The number of processes is the largest number of conversations rendered at the same time, which the threads of
preparation.py bound. A process has only the environment variables that Python needs to start, and cannot read the
memory of the other processes (process_control.set_dumpable).

A process writes an empty line once it has started. Request and reply are one line of JSON each.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from npuserve.service.errors import InvalidField, Unavailable
from npuserve.service.ipc import process_control
from npuserve.service.text.answer_format import PLAIN, AnswerFormat
from npuserve.service.text.chat_template import load_chat_template

MAX_SECONDS = 10.0
"""Processor time of one conversation."""
MAX_WALL_RATIO = 10
"""Real time of a conversation, as a multiple of its limit of processor time."""
MAX_MEMORY_BYTES = 2 << 30
"""Memory limit for a conversation, above the memory of the idle process. The largest conversation needs some tens of
MiB, several times over."""
COMMAND = (sys.executable, "-m", "npuserve.service.text.template_process")


class TemplateProcess:
    """Chat template that is rendered in other processes, with the interface of `ChatTemplate`.

    Safe to use from several threads.

    folder: the model's folder, with a template that parses.
    named_tokens, roles, format: as of `ChatTemplate`.
    seconds: limit of processor time for one conversation.
    """

    def __init__(
        self, folder: Path, named_tokens: Mapping[str, str], seconds: float = MAX_SECONDS,
        roles: frozenset[str] = frozenset(), form: AnswerFormat = PLAIN,
    ):
        self.roles, self.format = roles, form
        self._start = {"folder": str(folder), "named_tokens": dict(named_tokens), "seconds": seconds,
                       "dumpable": process_control.is_dumpable()}
        self._seconds = seconds
        self._idle: deque[_Process] = deque()

    def start(self) -> None:
        """Start a process now, if the system can, so that the first conversation does not wait for it."""
        with contextlib.suppress(OSError):
            self._idle.append(_Process(self._start))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_args: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt's text, see `ChatTemplate.render`. Blocks on another process: call it from a thread.

        Raises Unavailable if the system cannot start a process now, or kills it, as the kernel does without memory,
        and after MAX_WALL_RATIO times the limit in real time.
        """
        try:
            request = json.dumps([list(messages), template_args, tools])
        except RecursionError:
            raise InvalidField("chat", "is nested too deeply") from None
        process = self._idle_process()
        line = process.call(request.encode() + b"\n")
        if not line.endswith(b"\n"):
            process.end()
            if process.popen.returncode in (-signal.SIGKILL, -signal.SIGALRM):
                raise Unavailable("the process of the chat template was killed")
            if not process.is_started:
                raise Unavailable("the process of the chat template cannot start")
            raise InvalidField("chat", f"the model's chat template must take at most {self._seconds:g} seconds and "
                                       f"{MAX_MEMORY_BYTES >> 20} MiB of memory for it")
        self._idle.append(process)
        reply = json.loads(line)
        if isinstance(reply, str):
            return reply
        raise InvalidField(*reply)

    def _idle_process(self) -> _Process:
        """Remove and return an idle process that is alive, or start one."""
        while True:
            try:
                process = self._idle.pop()
            except IndexError:
                break
            if process.popen.poll() is None:
                return process
            process.end()
        try:
            return _Process(self._start)
        except OSError as error:
            raise Unavailable(f"the process of the chat template cannot start: {error.strerror}") from error


class _Process:
    """One process, for one conversation at a time. It is killed when this object is garbage-collected.

    is_started: whether it has loaded the template; known after the first `call`.
    """

    def __init__(self, start: Mapping[str, Any]):
        self.is_started = False
        self.popen = process_control.start_for_clients(COMMAND)
        self.end = weakref.finalize(self, process_control.kill, self.popen)
        assert self.popen.stdin
        self.popen.stdin.write(json.dumps(start).encode() + b"\n")
        self.popen.stdin.flush()

    def call(self, line: bytes) -> bytes:
        """Send a conversation and return the line of the reply, without its newline if the process died."""
        assert self.popen.stdin
        assert self.popen.stdout
        try:
            self.popen.stdin.write(line)
            self.popen.stdin.flush()
            self.is_started = self.is_started or self.popen.stdout.readline() == b"\n"
            return self.popen.stdout.readline()
        except BrokenPipeError:
            return b""


def load_template_process(folder: Path, named_tokens: Mapping[str, str]) -> TemplateProcess | None:
    """Return the chat template of a model's folder, None if it has none. Raise ValueError as `load_chat_template`.

    The template is parsed in this process. One whose parsing never ends stops the server from starting, which clients
    cannot cause.
    """
    template = load_chat_template(folder, named_tokens)
    return TemplateProcess(folder, named_tokens, roles=template.roles, form=template.format) if template else None


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of the server; the front end ends this one
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGPROF, signal.SIGALRM, signal.SIGPIPE):  # SIGPIPE: the front end has ended
        signal.signal(number, signal.SIG_DFL)
    start = json.loads(sys.stdin.buffer.readline())
    process_control.set_dumpable(start["dumpable"])
    template = load_chat_template(Path(start["folder"]), start["named_tokens"])
    assert template
    process_control.limit_growth(MAX_MEMORY_BYTES)
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, start["seconds"])
        signal.setitimer(signal.ITIMER_REAL, MAX_WALL_RATIO * start["seconds"])
        reply: object
        try:
            reply = template.render(*json.loads(line))
        except InvalidField as error:
            (reply,) = error.violations
        try:
            answer = json.dumps(reply).encode() + b"\n"
        except MemoryError:
            return 1
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
