"""Grammars that live requests wait for.

    Submit ──► COMPILING, no acceptance is sent ──► compiled: accepted, in the queue
                    │                           ├─► refused: InvalidField of the constraint
                    │                           └─► the compiler failed: Unavailable
                    └── cancel, abort, deadline, pause as in the queue

The compiler works in threads and processes of its own. `poll` never waits for it; an idle engine sleeps until the
compiler wakes it. The compiler itself is built in a thread when the first constraint arrives, since that loads the
tokenizer and the library.

A request of an earlier engine waits until the compiler's queue has space, and is not refused. Its matcher replays the
output so far when it is prepared (scheduling/answer_matcher.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, NamedTuple

from npuserve.service import logs, metrics
from npuserve.service.errors import InvalidField, NoTokenizer, QueueFull, ServeError, Unavailable
from npuserve.service.grammar.errors import CompilerFailed, CompilerFull, UnsupportedVocabulary
from npuserve.service.ipc.messages import Constraint, Request
from npuserve.service.scheduling.answer_matcher import AnswerMatcher
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.sequence import Sequence, State

if TYPE_CHECKING:
    from npuserve.service.grammar.compiler import Compilation, GrammarCompiler

log = logging.getLogger(__name__)

POLL_SECONDS = 0.001
"""Minimum time between two polls while no compilation ends and no request arrives."""
RETRY_SECONDS = 5.0
"""Time after which a compiler that could not be built is built for the next constraint."""
COMPILE_SECONDS = metrics.tally(metrics.grammar_compile_seconds)


class BuiltCompiler(NamedTuple):
    """A compiler, and the tokens that end an answer."""

    compiler: GrammarCompiler
    end_ids: Container[int]


class PendingGrammar:
    """Grammar that one request waits for. `submit` is called once the scheduler admits the request."""

    def __init__(
        self, request: Request, constraint: Constraint, compile: Callable[[Constraint, str], Compilation | None]
    ):
        self.request = request
        self.constraint = constraint
        self.since = time.monotonic()
        self.isolation: tuple[int, int] | None = None
        self.compilation: Compilation | None = None
        self._compile = compile

    def submit(self) -> None:
        """Begin the compilation if the compiler is built. Raises QueueFull, unless an earlier engine had accepted the
        request, NoTokenizer, and Unavailable if the compiler could not be built."""
        try:
            self.compilation = self._compile(self.constraint, self.request.client)
        except CompilerFull as error:
            if not self.request.prior.accepted:
                raise QueueFull(f"{self.constraint.field}: {error}") from error


class CompiledRequest(NamedTuple):
    """Request whose wait has ended. error: why it must be refused; None if the scheduler has queued it."""

    sequence: Sequence
    error: ServeError | None


class Grammars:
    """The grammars that requests of `scheduler` wait for.

    build: creates the compiler, in a thread. It gets a function that the compiler calls, in any thread, after each
        compilation. Raises UnsupportedVocabulary and OSError. None refuses all constraints.
    wake: called in another thread when `poll` has something to do; None for none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        build: Callable[[Callable[[], None]], BuiltCompiler] | None = None,
        wake: Callable[[], None] | None = None,
    ):
        self._scheduler = scheduler
        self._build = build
        self._wake = wake
        self._built: BuiltCompiler | None = None
        self._failure: BaseException | None = None
        self._retry_at = 0.0  # time.monotonic() seconds
        self._builder: threading.Thread | None = None
        self._pending: dict[Sequence, PendingGrammar] = {}
        self._next_poll = 0.0
        self._is_due = False  # something changed since the last poll; set by other threads

    def __len__(self) -> int:
        """Return the number of requests that wait for their grammar."""
        return len(self._pending)

    def pending(self, request: Request) -> PendingGrammar | None:
        """Return the grammar that a new request will wait for, not yet submitted; None without a constraint."""
        return PendingGrammar(request, request.constraint, self._submit) if request.constraint else None

    def watch(self, sequence: Sequence, pending: PendingGrammar, isolation: tuple[int, int] | None = None) -> None:
        """Poll the grammar of a request that the scheduler has admitted.

        isolation: crashes and tokens of its quarantine, which begins when it enters the queue.
        """
        pending.isolation = isolation
        self._pending[sequence] = pending
        self._is_due = True

    def poll(self) -> list[CompiledRequest]:
        """Queue the requests whose grammars are compiled. Return these requests, and the refused ones."""
        now = time.monotonic()
        if not self._pending or (now < self._next_poll and not self._is_due):
            return []
        self._is_due = False  # first: a compilation that ends from now on is due again
        self._next_poll = now + POLL_SECONDS
        compiled: list[CompiledRequest] = []
        for sequence, pending in list(self._pending.items()):
            if sequence.state is not State.ENDED:
                try:
                    matcher = self._matcher(pending)
                except ServeError as error:
                    compiled.append(CompiledRequest(sequence, error))
                else:
                    if matcher is None:
                        continue
                    self._queue(sequence, pending, matcher)
                    COMPILE_SECONDS.observe(now - pending.since)
                    compiled.append(CompiledRequest(sequence, None))
            del self._pending[sequence]
        metrics.requests_compiling.set(len(self._pending))
        return compiled

    def close(self) -> None:
        """End the compiler."""
        if self._built:
            self._built.compiler.close()

    def _submit(self, constraint: Constraint, client: str) -> Compilation | None:
        """Submit a constraint; None while the compiler is being built. Raises CompilerFull, NoTokenizer,
        and Unavailable."""
        if self._build is None:
            raise NoTokenizer(f"{constraint.field}: the model's folder has no tokenizer")
        if self._failure is not None:
            if isinstance(self._failure, UnsupportedVocabulary):
                raise NoTokenizer(f"{constraint.field}: {self._failure}")
            if (left := self._retry_at - time.monotonic()) > 0:
                raise Unavailable(f"{constraint.field}: the compiler cannot start", left)
            self._failure = self._builder = None
        if self._built is not None:
            return self._built.compiler.submit(constraint, client)
        if self._builder is None:
            builder = threading.Thread(target=self._start, args=(self._build,), name="grammar-start", daemon=True)
            try:
                builder.start()
            except RuntimeError as error:  # the system has no further thread
                raise Unavailable(f"{constraint.field}: the compiler cannot start") from error
            self._builder = builder
        return None

    def _start(self, build: Callable[[Callable[[], None]], BuiltCompiler]) -> None:
        began = time.monotonic()
        try:
            self._built = build(self._notify)
        except BaseException as error:  # a panic of a library in Rust is no Exception; the requests must not wait
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._failure = error
            if not isinstance(error, UnsupportedVocabulary):
                logs.bug(log, "the compiler of constraints cannot start", error)
        else:
            logs.event(log, "compiler of constraints is ready", level=logging.DEBUG,
                       seconds=round(time.monotonic() - began, 3))
        self._notify()

    def _notify(self) -> None:
        """Make the next poll due, and wake the engine. Called in other threads."""
        self._is_due = True
        if self._wake:
            self._wake()

    def _matcher(self, pending: PendingGrammar) -> AnswerMatcher | None:
        """Return a request's matcher; None while its grammar is not compiled. Raises the error that ends it."""
        if pending.compilation is None:
            pending.submit()
        if pending.compilation is None or not pending.compilation.done:
            return None
        if isinstance(error := pending.compilation.error, CompilerFailed):
            logs.event(log, "a constraint was not compiled", level=logging.WARNING, error=str(error))
            raise Unavailable(f"{pending.constraint.field}: {error}")
        if error is not None:
            field = error.field or pending.constraint.field
            raise InvalidField(field, str(error).removeprefix(f"{pending.constraint.kind}: "))
        assert self._built
        return AnswerMatcher(pending.request, pending.compilation, self._built.end_ids)

    def _queue(self, sequence: Sequence, pending: PendingGrammar, matcher: AnswerMatcher) -> None:
        self._scheduler.constrain(sequence, matcher)
        if pending.isolation and not sequence.is_paused:
            self._scheduler.isolate(sequence, *pending.isolation)
