"""Processes that compile a constraint, so that its compilation can be killed.

    python -m npuserve.service.structured_output.compile_process      started by `CompileProcess`, reads stdin

A constraint comes from a client, and may be hostile. So a sandbox translates and compiles it first. The engine compiles
again what the sandbox compiled within its limits; that takes the same time, releases the GIL, and runs in a thread with
a larger stack.

A process that is killed, as by the kernel without memory, says nothing about its constraint. Neither does one that
takes MAX_WALL_RATIO times the limit in real time. Another process compiles the constraint once more.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import msgspec
from llguidance import LLMatcher

from npuserve.service.processes import process_control, sandbox
from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.structured_output.errors import CompilerFailed, ConstraintError
from npuserve.service.structured_output.matcher import limits
from npuserve.service.structured_output.translation.ebnf import CONVERTED
from npuserve.service.structured_output.translation.lark import PREAMBLE
from npuserve.service.structured_output.translation.refusal import located
from npuserve.service.structured_output.translation.translate import translate
from npuserve.service.structured_output.vocabulary import Vocabulary, VocabularyData, build_tokenizer

COMMAND = (sys.executable, "-m", "npuserve.service.structured_output.compile_process")
MAX_WALL_RATIO = 10
"""Real time of a compilation after which its process is killed, as a multiple of its limit of processor time."""
BASE_BYTES = 64 << 10
"""Estimated memory of the smallest compiled constraint."""
_POSITION = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
"""Line and column in a grammar, at the beginning of a message of the library."""
_LISTING = re.compile(r"\n +\d+ \| ")
"""First line of the grammar in a message of the library."""


class Start(msgspec.Struct, array_like=True):
    """First message to a process."""

    vocabulary: VocabularyData
    seconds: float
    max_bytes: int


class Compiled(msgspec.Struct, array_like=True):
    """Reply of a process.

    grammar: grammar of the library; "" after an error.
    error: message of a ConstraintError; "" for none.
    num_bytes: estimated memory of the compiled grammar.
    field: field of the ConstraintError.
    """

    grammar: str
    error: str
    num_bytes: int
    field: str = ""


class CompileProcess:
    """Compiler in a child process, for one thread at a time. The process is started when it is needed.

    vocabulary: tokens of the model.
    seconds: limit of processor time for one constraint.
    max_bytes: memory limit of one constraint, above the memory of the idle process.
    """

    def __init__(self, vocabulary: Vocabulary, seconds: float, max_bytes: int):
        self._start = Start(vocabulary.data, seconds, max_bytes)
        self._process: sandbox.Sandbox | None = None
        self._is_interrupted = False

    def compile(self, constraint: Constraint) -> Compiled:
        """Translate and compile a constraint, in a second process if the first one fails. Blocks.

        Raises ConstraintError, and CompilerFailed if both processes fail.
        """
        try:
            reply = self._reply(constraint)
        except CompilerFailed:
            if self._is_interrupted:
                raise
            reply = self._reply(constraint)
        compiled = msgspec.msgpack.decode(reply, type=Compiled)
        if compiled.error:
            raise ConstraintError(compiled.error, compiled.field)
        return compiled

    def interrupt(self) -> None:
        """Kill the process, for another thread than the one in `compile`, which then raises CompilerFailed."""
        self._is_interrupted = True
        if (process := self._process) is not None:
            process.interrupt()

    def end(self) -> None:
        """Kill the process. The next constraint starts a new one."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def _reply(self, constraint: Constraint) -> bytes:
        """Return the process's reply. Raise ConstraintError if a limit ended it, CompilerFailed for another reason."""
        process = self._running()
        reply = process.call(msgspec.msgpack.encode(constraint), MAX_WALL_RATIO * self._start.seconds)
        if reply is not None:
            return reply
        self.end()
        if process.has_exceeded_limits:
            raise ConstraintError(f"{constraint.kind}: must take at most {self._start.seconds:g} seconds and "
                                  f"{self._start.max_bytes >> 20} MiB of memory to compile")
        raise CompilerFailed(f"the process that compiles constraints was killed by signal {-(process.returncode or 0)}")

    def _running(self) -> sandbox.Sandbox:
        """Return the process, started if there is none. Raise CompilerFailed if it does not start."""
        if self._process is not None and self._process.is_alive:
            return self._process
        self.end()
        try:
            process = self._process = sandbox.Sandbox(COMMAND)
        except OSError as error:
            raise CompilerFailed(f"the process that compiles constraints did not start: {error.strerror}") from error
        start = msgspec.msgpack.encode(self._start)
        if self._is_interrupted or process.call(start, sandbox.MAX_START_SECONDS) is None:
            self.end()
            raise CompilerFailed("the process that compiles constraints did not start")
        return process


def build_library_matcher(tokenizer: Any, grammar: str, kind: str) -> LLMatcher:
    """Compile a translated grammar. Raise ConstraintError, also if it allows no text at all.

    kind: kind of the constraint, which selects the limits.

    The first mask is computed, which shows a constraint without answers and one that exceeds the limits at once.
    """
    matcher, message = _built(tokenizer, grammar, kind)
    if message:
        raise located(message, grammar, lambda part: _built(tokenizer, part, kind)[1])
    return matcher


def _built(tokenizer: Any, grammar: str, kind: str) -> tuple[LLMatcher, str]:
    """Return the library's matcher of a grammar, and why it is unusable, "" if it is not."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits(kind))
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        is_clients = kind == "grammar" and not grammar.startswith(PREAMBLE + CONVERTED)
        return matcher, _message(matcher.get_error(), is_clients=is_clients)
    is_possible = matcher.stop_reason() in ("NotStopped", "NoExtension")
    return matcher, "" if is_possible else "no answer satisfies the constraint"


def build_matchers(vocabulary: Vocabulary, grammar: str, kind: str) -> tuple[LLMatcher, LLMatcher | None]:
    """Compile a translated grammar. Return its matchers over the vocabulary and over `vocabulary.bytes`."""
    return build_library_matcher(vocabulary.library, grammar, kind), build_byte_matcher(vocabulary, grammar, kind)


def build_byte_matcher(vocabulary: Vocabulary, grammar: str, kind: str) -> LLMatcher | None:
    """Compile a translated grammar that `build_library_matcher` has compiled, over `vocabulary.bytes`; None if that
    exceeds the limits, or without this vocabulary."""
    if vocabulary.bytes is None:
        return None
    matcher, message = _built(vocabulary.bytes, grammar, kind)
    return None if message else matcher


def _message(error: str, *, is_clients: bool) -> str:
    """Return the library's message without its dump of the state and its names of definitions.

    Also without the translated grammar and the position there, which are not the client's.

    is_clients: whether the grammar is the client's text after PREAMBLE, so that the position is given.
    """
    text = _LISTING.split(error.partition("<state>")[0].partition("<non-verbose/>")[0])[0]
    position = _POSITION.match(text)
    text = " ".join(text[position.end() if position else 0:].split()).partition(" while processing json-schema:")[0]
    if text in ("", "NoExtensionBias"):
        return "no answer satisfies the constraint"
    if position is None or not is_clients:
        return text[:400]
    line = int(position[1]) - len(PREAMBLE.splitlines())
    return f"{text[:400]} at line {line}, column {position[2]}"


def _compile(tokenizer: Any, vocabulary: VocabularyData, constraint: Constraint) -> Compiled:
    _, before = process_control.memory_bytes()
    kind = constraint.kind
    try:
        grammar = translate(kind, constraint.text, vocabulary.special, vocabulary.end_ids)
        matcher = build_library_matcher(tokenizer, grammar, kind)
    except ConstraintError as error:
        message = str(error)
        if not error.field and not message.startswith(kind):
            message = f"{kind}: {message}"
        return Compiled("", message, 0, error.field)
    grown = max(0, process_control.memory_bytes()[1] - before)
    del matcher
    return Compiled(grammar, "", BASE_BYTES + 2 * grown + 2 * len(grammar))  # the engine has two matchers


def main() -> int:
    messages = sandbox.messages()
    start = msgspec.msgpack.decode(next(messages), type=Start)
    tokenizer = build_tokenizer(start.vocabulary)
    sandbox.limit_growth(start.max_bytes)
    sandbox.reply(b"")
    for message in messages:
        constraint = msgspec.msgpack.decode(message, type=Constraint)
        sandbox.limit_time(start.seconds)
        try:
            reply = msgspec.msgpack.encode(_compile(tokenizer, start.vocabulary, constraint))
        except (MemoryError, RecursionError):
            return 1
        sandbox.reply(reply)
    return 0


if __name__ == "__main__":
    sys.exit(main())
