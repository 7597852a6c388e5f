"""Processes that compile and render a model's chat template, so that a template can be killed.

    python -m npuserve.service.text.template_process      started by `TemplateProcess`, reads stdin

A template is a program that comes with the model. The sandbox of jinja2 denies it access to the machine, but does not
bound endless loops, huge numbers or huge texts, neither in a conversation nor in the constants that its compiler
computes. So a process compiles the template and then renders one conversation at a time (processes/sandbox.py).

A template that cannot be compiled within the limits of memory and processor time is a fault of the model's folder. A
conversation beyond them gets INVALID_ARGUMENT, and the next one gets a new process. Real time depends on the machine
too, which may be loaded or frozen: a conversation that takes MAX_WALL_RATIO times the limit gets UNAVAILABLE, and a
compilation that takes MAX_START_WALL_RATIO times the limit is repeated.

The number of processes is the largest number of conversations rendered at the same time, which the threads of
preparation.py bound. The first reply of a process is its `Description`. Requests and replies are JSON.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from npuserve.service.config import ConfigError
from npuserve.service.errors import InvalidField, Unavailable
from npuserve.service.processes import sandbox
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
CANNOT_START = "the process of the chat template cannot start, or was killed"


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
        self._start = {
            "folder": str(folder), "files": self._files, "named_tokens": dict(named_tokens), "seconds": seconds}
        self._seconds = seconds
        self._idle: deque[sandbox.Sandbox] = deque()

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
        process, description = self._begin()
        if description is None:
            if process.returncode == 1 or not process.has_exceeded_limits:
                raise Unavailable(CANNOT_START)
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
        reply = process.call(request.encode(), MAX_WALL_RATIO * self._seconds)
        if reply is None:
            process.end()
            if not process.has_exceeded_limits:
                raise Unavailable("the process of the chat template was killed")
            limits = self._limits(MAX_MEMORY_BYTES)
            raise InvalidField("chat", f"the model's chat template must take at most {limits} for it")
        self._idle.append(process)
        rendered = json.loads(reply)
        if isinstance(rendered, str):
            return rendered
        raise InvalidField(*rendered)

    def _idle_process(self) -> sandbox.Sandbox:
        """Remove and return an idle process that is alive, or start one. Raises Unavailable."""
        while True:
            try:
                process = self._idle.pop()
            except IndexError:
                break
            if process.is_alive:
                return process
            process.end()
        process, description = self._begin()
        if description is None or description.error:
            raise Unavailable(CANNOT_START)
        return process

    def _begin(self) -> tuple[sandbox.Sandbox, Description | None]:
        """Start a process that compiles the template. Return the description; None if the process has ended.

        Raises Unavailable if the system cannot start a process.
        """
        try:
            process = sandbox.Sandbox(COMMAND)
        except OSError as error:
            raise Unavailable(f"the process of the chat template cannot start: {error.strerror}") from error
        start = json.dumps(self._start).encode()
        reply = process.call(start, sandbox.MAX_START_SECONDS + MAX_START_WALL_RATIO * self._seconds)
        if reply is None:
            process.end()
            return process, None
        return process, msgspec.json.decode(reply, type=Description)


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
    messages = sandbox.messages()
    start = json.loads(next(messages))
    sandbox.limit_growth(MAX_COMPILE_BYTES)
    sandbox.limit_time(start["seconds"])
    try:
        template = load_chat_template(Path(start["folder"]), start["named_tokens"])
        assert template
        _check_memory(template, start["files"])
    except (OSError, ValueError) as error:
        sandbox.reply(msgspec.json.encode(Description([], PLAIN, str(error))))
        return 0
    description = msgspec.json.encode(Description(sorted(template.roles), template.format, ""))
    sandbox.limit_growth(MAX_MEMORY_BYTES)
    sandbox.reply(description)
    for message in messages:
        sandbox.limit_time(start["seconds"])
        rendered: object
        try:
            rendered = template.render(*json.loads(message))
        except InvalidField as error:
            (rendered,) = error.violations
        try:
            reply = json.dumps(rendered).encode()
        except MemoryError:
            return 1
        sandbox.reply(reply)
    return 0


if __name__ == "__main__":
    sys.exit(main())
