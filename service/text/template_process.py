"""Processes that compile and render a model's chat template, so that a template can be killed.

    python -m npuserve.service.text.template_process      started by `TemplateProcess`, reads stdin

A template is a program that comes with the model. The sandbox of jinja2 denies it access to the machine, but does not
bound endless loops, huge numbers or huge texts, neither in a conversation nor in the constants that its compiler
computes. No check in Python can interrupt a call in C that does not return. So a process compiles the template and then
renders one conversation at a time, under a memory limit and timers of the kernel, whose signals have no handler and end
the process.

A template that cannot be compiled within the limits of memory and processor time is a fault of the model's folder. A
conversation beyond them gets INVALID_ARGUMENT, and the next one gets a new process. Real time depends on the machine
too, which may be loaded or frozen: a conversation that takes MAX_WALL_RATIO times the limit gets UNAVAILABLE, and a
compilation that takes MAX_START_WALL_RATIO times the limit is repeated.

The number of processes is the largest number of conversations rendered at the same time, which the threads of
preparation.py bound. A process has only the environment variables that Python needs to start, and cannot read the
memory of the other processes (process_control.set_dumpable).

A process writes one line of JSON once it has compiled the template, see `Description`. Request and reply are one line
of JSON each.
"""

from __future__ import annotations

import json
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from npuserve.service.config import ConfigError
from npuserve.service.errors import InvalidField, Unavailable
from npuserve.service.processes import process_control
from npuserve.service.text.answer_format import PLAIN, AnswerFormat
from npuserve.service.text.chat_template import ChatTemplate, TemplateFiles, load_chat_template, read_templates

MAX_SECONDS = 10.0
"""Processor time to compile a template, and of one conversation."""
MAX_WALL_RATIO = 10
"""Real time of a conversation, as a multiple of its limit of processor time."""
MAX_START_WALL_RATIO = 100
"""The same for the compilation, for which no conversation waits."""
MAX_MEMORY_BYTES = 2 << 30
"""Memory limit for a conversation, above the memory of the idle process. The largest conversation needs some tens of
MiB, several times over."""
MAX_COMPILE_BYTES = 512 << 20
"""Memory limit for the compilation of the template. A template of 100 KB needs some 20 MiB."""
COMMAND = (sys.executable, "-m", "npuserve.service.text.template_process")


class Description(msgspec.Struct, array_like=True):
    """What a process says of the template that it has compiled.

    roles, format: as of `ChatTemplate`.
    error: why the template cannot be compiled, with the name of its file; "" if it can.
    """

    roles: list[str]
    format: AnswerFormat
    error: str


class TemplateProcess:
    """Chat template that is compiled and rendered in other processes, with the interface of `ChatTemplate`.

    The first use of `roles`, `format` or `start` blocks on a process. Safe to use from several threads.

    templates: the templates of `folder`, of which only the names of the files are used.
    named_tokens: as of `ChatTemplate`.
    seconds: limit of processor time to compile the template, and for one conversation.
    """

    def __init__(
        self, folder: Path, templates: TemplateFiles, named_tokens: Mapping[str, str], seconds: float = MAX_SECONDS
    ):
        self._folder = folder
        self._files = ", ".join(sorted(set(templates.files.values())))
        self._start = {"folder": str(folder), "files": self._files, "named_tokens": dict(named_tokens),
                       "seconds": seconds, "dumpable": process_control.is_dumpable()}
        self._seconds = seconds
        self._idle: deque[_Process] = deque()

    @property
    def roles(self) -> frozenset[str]:
        """Roles as of `ChatTemplate`. Raises as `start`."""
        return frozenset(self._description.roles)

    @property
    def format(self) -> AnswerFormat:
        """Format as of `ChatTemplate`. Raises as `start`."""
        return self._description.format

    def start(self) -> None:
        """Compile the template in a process, unless that was done, so that the first conversation does not wait for it.

        Raises ConfigError, naming the file, for a template that cannot be compiled within the limits. Raises
        Unavailable if the system cannot start a process now, or kills it.
        """
        _ = self._description

    @cached_property
    def _description(self) -> Description:
        process = self._idle_process()
        description = process.begin()
        if description is None:
            process.end()
            if process.popen.returncode == 1 or process.popen.returncode in (-signal.SIGKILL, -signal.SIGALRM):
                raise Unavailable("the process of the chat template cannot start, or was killed")
            limits = self._limits(MAX_COMPILE_BYTES)
            raise self._fault(f"{self._files}: must take at most {limits} to compile and to render one word")
        if description.error:
            raise self._fault(description.error)
        self._idle.append(process)
        return description

    def _fault(self, message: str) -> ConfigError:
        return ConfigError(f"chat template of {self._folder}: {message}")

    def _limits(self, max_bytes: int) -> str:
        return f"{self._seconds:g} seconds of processor time and {max_bytes >> 20} MiB of memory"

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
        line = process.call(request.encode())
        if not line.endswith(b"\n"):
            process.end()
            if process.popen.returncode in (-signal.SIGKILL, -signal.SIGALRM):
                raise Unavailable("the process of the chat template was killed")
            if not process.is_started:
                raise Unavailable("the process of the chat template cannot start")
            limits = self._limits(MAX_MEMORY_BYTES)
            raise InvalidField("chat", f"the model's chat template must take at most {limits} for it")
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


class _Process(process_control.LineProcess):
    """One process.

    is_started: whether it has compiled the template; known after `begin`.
    """

    def __init__(self, start: Mapping[str, Any]):
        self.is_started = False
        super().__init__(COMMAND, json.dumps(start).encode())

    def begin(self) -> Description | None:
        """Return the description of the template once it is compiled; None if the process died."""
        line = self.read()
        if not line.endswith(b"\n"):
            return None
        description = msgspec.json.decode(line, type=Description)
        self.is_started = not description.error
        return description

    def call(self, line: bytes) -> bytes:
        """Send a conversation and return the line of the reply, without its newline if the process died."""
        if not self.is_started:
            self.begin()
        return super().call(line)


def load_template_process(folder: Path, named_tokens: Mapping[str, str]) -> TemplateProcess | None:
    """Return the chat template of a model's folder, None if it has none. No process is started.

    Raises ValueError as `read_templates`.
    """
    templates = read_templates(folder)
    return TemplateProcess(folder, templates, named_tokens) if templates else None


def _check_memory(template: ChatTemplate, files: str) -> None:
    """Render a conversation of one word. Raise ValueError if that takes too much memory.

    Where the compiler of jinja2 has no memory for a constant, it leaves the computation to each conversation. Templates
    may refuse the conversation for other reasons.
    """
    try:
        template.render([{"role": "user", "content": "Hello"}])
    except InvalidField as error:
        if isinstance(error.__cause__, MemoryError):
            message = f"{files}: a conversation of one word takes more than {MAX_COMPILE_BYTES >> 20} MiB (MemoryError)"
            raise ValueError(message) from error


def main() -> int:
    start = process_control.read_start()
    process_control.limit_growth(MAX_COMPILE_BYTES)
    process_control.limit_time(start["seconds"], MAX_START_WALL_RATIO)
    try:
        template = load_chat_template(Path(start["folder"]), start["named_tokens"])
        assert template
        _check_memory(template, start["files"])
    except (OSError, ValueError) as error:
        process_control.write_line(msgspec.json.encode(Description([], PLAIN, str(error))))
        return 0
    description = msgspec.json.encode(Description(sorted(template.roles), template.format, ""))
    process_control.limit_time(0, MAX_WALL_RATIO)
    process_control.limit_growth(MAX_MEMORY_BYTES)
    process_control.write_line(description)
    for line in sys.stdin.buffer:
        process_control.limit_time(start["seconds"], MAX_WALL_RATIO)
        reply: object
        try:
            reply = template.render(*json.loads(line))
        except InvalidField as error:
            (reply,) = error.violations
        try:
            answer = json.dumps(reply).encode()
        except MemoryError:
            return 1
        process_control.limit_time(0, MAX_WALL_RATIO)
        process_control.write_line(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
