"""Grammars that live requests wait for.

    Submit ──► COMPILING, no acceptance is sent ──► compiled: accepted, in the queue
                    │                           ├─► refused: InvalidField of the constraint
                    │                           └─► the compiler failed: Unavailable
                    └── cancel, abort, deadline, pause as in the queue

The compiler works in threads and processes of its own. `poll` never waits for it; an idle engine sleeps until the
compiler wakes it. The compiler itself is built in a thread when the first constraint arrives, since that loads the
tokenizer and the library.

A request of an earlier engine has output already: its matcher advances over it in parts, between the steps of others.
Such a request waits until the compiler's queue has space, and is not refused.
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
from npuserve.service.scheduling.constraint import AnswerMatcher
from npuserve.service.scheduling.scheduler import Scheduler
from npuserve.service.scheduling.sequence import Sequence, State

if TYPE_CHECKING:
    from npuserve.service.grammar.compiler import Compilation, GrammarCompiler

log = logging.getLogger(__name__)

POLL_SECONDS = 0.001
"""Minimum time between two polls while no compilation ends and no request arrives."""
RETRY_SECONDS = 5.0
"""Time after which a compiler that could not be built is built for the next constraint."""
REPLAYED_TOKENS = 1024
"""Tokens of earlier output over which the matchers advance in one poll, which takes a few milliseconds."""
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
        self.matcher: AnswerMatcher | None = None
        self.num_replayed = 0
        self._compile = compile

    def submit(self) -> None:
        """Begin the compilation if the compiler is built. Raises QueueFull, unless an earlier engine had accepted the
        request, NoTokenizer, and Unavailable if the compiler could not be built."""
        try:
            self.compilation = self._compile(self.constraint, self.request.client)
        except CompilerFull as error:
            if not self.request.prior.accepted:
                raise QueueFull(f"{self.constraint.field}: {error}") from error

    @property
    def is_blocked(self) -> bool:
        """Whether the matcher must not be created or advanced now, since another thread uses its lexer."""
        return self.compilation is not None and self.compilation.lexer.in_use

    def advance(self, end_ids: Container[int], most: int) -> int:
        """Create the matcher, and advance it over at most `most` tokens of earlier output. Return their number."""
        if self.matcher is None:
            assert self.compilation
            self.matcher = AnswerMatcher(self.request, self.compilation, end_ids)
        tokens = self.request.output_ids[self.num_replayed : self.num_replayed + most]
        for token_id in tokens:
            self.matcher.advance(token_id)
        self.num_replayed += len(tokens)
        return len(tokens)


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
        self, scheduler: Scheduler, build: Callable[[Callable[[], None]], BuiltCompiler] | None = None,
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
        self._is_replaying = False

    def __len__(self) -> int:
        """Return the number of requests that wait for their grammar."""
        return len(self._pending)

    @property
    def is_replaying(self) -> bool:
        """Whether a matcher has to advance over more tokens of earlier output, so that `poll` has work now."""
        return self._is_replaying

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
        found: list[CompiledRequest] = []
        left = REPLAYED_TOKENS
        for sequence, pending in list(self._pending.items()):
            if sequence.state is not State.ENDED:
                try:
                    left -= self._advance(pending, left)
                except ServeError as error:
                    found.append(CompiledRequest(sequence, error))
                else:
                    if not self._is_ready(pending):
                        continue
                    self._queue(sequence, pending)
                    COMPILE_SECONDS.observe(now - pending.since)
                    found.append(CompiledRequest(sequence, None))
            del self._pending[sequence]
        self._is_replaying = any(
            pending.matcher is not None and not pending.is_blocked for pending in self._pending.values())
        metrics.requests_compiling.set(len(self._pending))
        return found

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
            self._retry_at, self._failure = time.monotonic() + RETRY_SECONDS, error
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

    def _advance(self, pending: PendingGrammar, most: int) -> int:
        """Advance a request's wait. Return the number of replayed tokens. Raises the error that ends the request."""
        if pending.compilation is None:
            pending.submit()
        if pending.compilation is None or not pending.compilation.done or pending.is_blocked:
            return 0
        if isinstance(error := pending.compilation.error, CompilerFailed):
            logs.event(log, "a constraint was not compiled", level=logging.WARNING, error=str(error))
            raise Unavailable(f"{pending.constraint.field}: {error}")
        if error is not None:
            field = error.field or pending.constraint.field
            raise InvalidField(field, str(error).removeprefix(f"{pending.constraint.kind}: "))
        assert self._built
        replayed = pending.advance(self._built.end_ids, most)
        if pending.matcher and pending.matcher.error is not None:
            raise pending.matcher.error
        return replayed

    def _is_ready(self, pending: PendingGrammar) -> bool:
        return pending.matcher is not None and pending.num_replayed == len(pending.request.output_ids)

    def _queue(self, sequence: Sequence, pending: PendingGrammar) -> None:
        assert pending.matcher
        self._scheduler.constrain(sequence, pending.matcher)
        if pending.isolation and not sequence.is_paused:
            self._scheduler.isolate(sequence, *pending.isolation)
