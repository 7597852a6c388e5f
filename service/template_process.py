"""A model's chat template in a process of its own, where it can be killed.

    python -m npuserve.service.template_process      started by `TemplateProcess`, which writes on its stdin

A template is a program that comes with the model. jinja2's sandbox keeps it from the machine, but not from loops
without an end, numbers without an end and texts that fill the memory: no check inside Python sees a call in C that does
not return. So a front end has it run here, one conversation at a time, under the kernel's alarm (SIGALRM, which nobody
handles, so it ends the process) and a limit of memory. What is over either is the conversation's fault alone:
INVALID_ARGUMENT, and the next one gets a new process. Its environment has nothing but what Python needs to start, and
the memory of the other processes is closed to it (process_control.set_dumpable).

A conversation goes there, and its text comes back, as one line of JSON.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from npuserve.service import process_control
from npuserve.service.chat_template import MAX_SECONDS, load_chat_template
from npuserve.service.errors import InvalidField, Unavailable

MAX_MEMORY = 2 << 30
"""Bytes beyond what the process takes for itself: the largest conversation is some tens of MiB, several times over."""
KEPT_VARIABLES = frozenset({
    "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "PYTHONUTF8", "TMPDIR", "TZ"})
"""Of the environment: whatever else is there may be a secret."""
COMMAND = (sys.executable, "-m", "npuserve.service.template_process")


class TemplateProcess:
    """Has the interface of `ChatTemplate`, whose bounds hold for every template. Safe to use from several threads.

    folder: the model's, which has a template that parses. named_tokens, roles: as of ChatTemplate. seconds: of one
    conversation, and of waiting for those before it.
    """

    def __init__(
        self, folder: Path, named_tokens: Mapping[str, str], seconds: float = MAX_SECONDS,
        roles: frozenset[str] = frozenset(),
    ):
        self.roles = roles
        self._start = {"folder": str(folder), "named_tokens": dict(named_tokens), "seconds": seconds,
                       "dumpable": process_control.is_dumpable()}
        self._seconds = seconds
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finish: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Now, and not with the first conversation."""
        with self._turn:
            self._running()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_args: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """As `ChatTemplate.render`. Waits, so call it from a thread. Unavailable if others take too long."""
        try:
            request = json.dumps([list(messages), template_args, tools])
        except RecursionError:
            raise InvalidField("chat", "is nested too deeply") from None
        if not self._turn.acquire(timeout=self._seconds):
            raise Unavailable("the model's chat template is busy with other conversations")
        try:
            reply = self._ask(request.encode() + b"\n")
        finally:
            self._turn.release()
        if isinstance(reply, str):
            return reply
        raise InvalidField(*reply)

    def _ask(self, line: bytes) -> Any:
        process = self._running()
        assert process.stdin
        assert process.stdout
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if answer.endswith(b"\n"):
            return json.loads(answer)
        self._finish()
        return "chat", (f"the model's chat template must take at most {self._seconds:g} seconds and "
                        f"{MAX_MEMORY >> 20} MiB of memory for it")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._finish()
            kept = {name: value for name, value in os.environ.items() if name in KEPT_VARIABLES}
            self._process = process = subprocess.Popen(
                COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=kept)
            self._finish = weakref.finalize(self, _end, process)
            assert process.stdin
            process.stdin.write(json.dumps(self._start).encode() + b"\n")
            process.stdin.flush()
        return self._process


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
