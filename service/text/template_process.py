"""A model's chat template in a process of its own, where it can be killed.

    python -m npuserve.service.text.template_process      started by `TemplateProcess`, which writes on its stdin

A template is a program that comes with the model. jinja2's sandbox keeps it from the machine, but not from loops
without an end, numbers without an end and texts that fill the memory: no check inside Python sees a call in C that does
not return. So a front end has it run here, one conversation at a time, under the kernel's alarm (SIGALRM, which nobody
handles, so it ends the process) and a limit of memory. What is over either is the conversation's fault alone:
INVALID_ARGUMENT, and the next one gets a new process. There are as many processes as conversations were rendered at the
same time, which the threads of preparation.py bound. The environment of a process has nothing but what Python needs to
start, and the memory of the other processes is closed to it (process_control.set_dumpable).

A conversation goes there, and its text comes back, as one line of JSON.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from npuserve.service.errors import InvalidField
from npuserve.service.ipc import process_control
from npuserve.service.text.chat_template import MAX_SECONDS, load_chat_template

MAX_MEMORY = 2 << 30
"""Bytes beyond what the process takes for itself: the largest conversation is some tens of MiB, several times over."""
KEPT_VARIABLES = frozenset({
    "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "PYTHONUTF8", "TMPDIR", "TZ"})
"""Of the environment: whatever else is there may be a secret."""
COMMAND = (sys.executable, "-m", "npuserve.service.text.template_process")


class TemplateProcess:
    """Has the interface of `ChatTemplate`, whose bounds hold for every template. Safe to use from several threads.

    folder: the model's, which has a template that parses. named_tokens, roles: as of ChatTemplate. seconds: of one
    conversation.
    """

    def __init__(
        self, folder: Path, named_tokens: Mapping[str, str], seconds: float = MAX_SECONDS,
        roles: frozenset[str] = frozenset(),
    ):
        self.roles = roles
        self._start = {"folder": str(folder), "named_tokens": dict(named_tokens), "seconds": seconds,
                       "dumpable": process_control.is_dumpable()}
        self._seconds = seconds
        self._idle: deque[_Process] = deque()

    def start(self) -> None:
        """Start a process now, so that the first conversation does not wait for it."""
        self._idle.append(_Process(self._start))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_args: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """As `ChatTemplate.render`. Waits for another process, so call it from a thread."""
        try:
            request = json.dumps([list(messages), template_args, tools])
        except RecursionError:
            raise InvalidField("chat", "is nested too deeply") from None
        process = self._take()
        answer = process.ask(request.encode() + b"\n")
        if not answer.endswith(b"\n"):
            process.end()
            raise InvalidField("chat", f"the model's chat template must take at most {self._seconds:g} seconds and "
                                       f"{MAX_MEMORY >> 20} MiB of memory for it")
        self._idle.append(process)
        reply = json.loads(answer)
        if isinstance(reply, str):
            return reply
        raise InvalidField(*reply)

    def _take(self) -> _Process:
        """Return an idle process that is alive, or a new one."""
        while True:
            try:
                process = self._idle.pop()
            except IndexError:
                return _Process(self._start)
            if process.is_alive:
                return process
            process.end()


class _Process:
    """One process, for one conversation at a time. It ends with this object."""

    def __init__(self, start: Mapping[str, Any]):
        kept = {name: value for name, value in os.environ.items() if name in KEPT_VARIABLES}
        self.popen = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=kept)
        self.end = weakref.finalize(self, _end, self.popen)
        assert self.popen.stdin
        self.popen.stdin.write(json.dumps(start).encode() + b"\n")
        self.popen.stdin.flush()

    @property
    def is_alive(self) -> bool:
        return self.popen.poll() is None

    def ask(self, line: bytes) -> bytes:
        """Send a conversation and return the answer's line, without its end if the process died."""
        assert self.popen.stdin
        assert self.popen.stdout
        try:
            self.popen.stdin.write(line)
            self.popen.stdin.flush()
            return self.popen.stdout.readline()
        except BrokenPipeError:
            return b""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def contained(folder: Path, named_tokens: Mapping[str, str]) -> TemplateProcess | None:
    """Return the chat template of a model's folder; None if it has none. ValueError as of `load_chat_template`.

    The template is parsed here too: one that takes for ever to parse keeps the server from its start, and no client can
    bring that about.
    """
    template = load_chat_template(folder, named_tokens)
    return TemplateProcess(folder, named_tokens, roles=template.roles) if template else None


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    start = json.loads(sys.stdin.buffer.readline())
    process_control.set_dumpable(start["dumpable"])
    template = load_chat_template(Path(start["folder"]), start["named_tokens"])
    assert template
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MAX_MEMORY, size + MAX_MEMORY))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, start["seconds"])
        reply: object
        try:
            reply = template.render(*json.loads(line))
        except InvalidField as error:
            (reply,) = error.violations
        try:
            answer = json.dumps(reply).encode() + b"\n"
        except MemoryError:
            return 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
