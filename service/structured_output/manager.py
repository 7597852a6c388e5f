"""The one interface of structured output to the engine's loop.

    pending ──► submit ──► watch ──► poll: a matcher, or the error that ends the request
                    │                           ├─► compiled: accepted, in the queue
                    │ COMPILING                 ├─► refused: InvalidField of the constraint
                    │                           └─► the compiler failed: Unavailable
                    └── cancel: its client has left, its deadline has passed, or it was aborted

    a step: prepare (fill masks) ──► mask ──► the device samples ──► advance ──► prepare ...     AnswerMatcher

The compiler works in threads and processes of its own. `poll` never waits for it; an idle engine sleeps until the
compiler wakes it. The compiler itself is built in a thread when the first constraint arrives, since that loads the
tokenizer and the library.

A request of an earlier engine waits until the compiler's queue has space, and is not refused. Its matcher replays the
output so far when it is prepared (answer_matcher.py).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from npuserve.service import logs, metrics
from npuserve.service.errors import InvalidField, NoTokenizer, QueueFull, ServeError, Unavailable
from npuserve.service.structured_output.answer_matcher import AnswerMatcher
from npuserve.service.structured_output.constraint import ConstrainedRequest, Constraint
from npuserve.service.structured_output.errors import CompilerFailed, CompilerFull, UnsupportedVocabulary
from npuserve.service.structured_output.mask_threads import MaskThreads

if TYPE_CHECKING:
    from npuserve.service.structured_output.compiler import Compilation, GrammarCompiler

log = logging.getLogger(__name__)

POLL_SECONDS = 0.001
"""Minimum time between two polls while no compilation ends and no request arrives."""
RETRY_SECONDS = 5.0
"""Time after which a compiler that could not be built is built for the next constraint."""
MASK_WAIT_SECONDS = 0.01
"""Time that a short step waits for its masks. Most masks take less."""
MAX_MASK_WAITS = 3
"""Most times MASK_WAIT_SECONDS that a step waits: for half of its duration, in which the device computes its forward
pass. A deferred row is computed in vain."""
COMPILE_SECONDS = metrics.tally(metrics.grammar_compile_seconds)
MASK_SECONDS = metrics.tally(metrics.mask_seconds)


class BuiltCompiler(NamedTuple):
    """A compiler, and the tokens that end an answer."""

    compiler: GrammarCompiler
    end_ids: Container[int]


def build_compiler(folder: Path, vocabulary_size: int, on_done: Callable[[], None] | None = None) -> BuiltCompiler:
    """Load the tokenizer and the grammar library for the first constraint. on_done: see GrammarCompiler.

    Raises UnsupportedVocabulary for a folder without a usable tokenizer, and ConfigError.
    """
    from npuserve.service.structured_output.compiler import GrammarCompiler
    from npuserve.service.structured_output.vocabulary import Vocabulary
    from npuserve.service.text.model_folder import open_folder

    model = open_folder(folder, str(folder), "")
    if model.tokenizer is None:
        raise UnsupportedVocabulary("the model's folder has no tokenizer")
    vocabulary = Vocabulary.from_tokenizer(model.tokenizer, vocabulary_size, model.eos_token_ids)
    return BuiltCompiler(GrammarCompiler(vocabulary, on_done=on_done), vocabulary.end_ids)


class PendingGrammar:
    """Grammar that one request waits for. `submit` is called once the scheduler admits the request."""

    def __init__(
        self,
        request: ConstrainedRequest,
        constraint: Constraint,
        was_accepted: bool,
        compile: Callable[[Constraint, str], Compilation | None],
    ):
        """was_accepted: an earlier engine had accepted the request.

        compile: submits a constraint of a client to the compiler; returns None while the compiler is being built.
        """
        self.request = request
        self.constraint = constraint
        self.since = time.monotonic()
        self.compilation: Compilation | None = None
        self._was_accepted = was_accepted
        self._compile = compile

    def submit(self) -> None:
        """Begin the compilation if the compiler is built.

        Raises QueueFull unless an earlier engine had accepted the request, NoTokenizer, and Unavailable if the
        compiler could not be built.
        """
        try:
            self.compilation = self._compile(self.constraint, self.request.client)
        except CompilerFull as error:
            if not self._was_accepted:
                raise QueueFull(f"{self.constraint.field}: {error}") from error


class CompiledRequest(NamedTuple):
    """Request whose wait has ended.

    sequence_id: as given to `watch`.
    result: matcher at the end of its output so far, or the error that ends the request.
    """

    sequence_id: int
    result: AnswerMatcher | ServeError


class StructuredOutputManager:
    """Grammars that requests wait for, and the masks of their answers. For one thread.

    build: creates the compiler, in a thread. It gets a function that the compiler calls, in any thread, after each
        compilation. Raises UnsupportedVocabulary and OSError. None refuses all constraints.
    wake: called in another thread when `poll` or `prepare` has something to do; None for none.
    vocabulary_size: number of the model's token ids; 0 if no request has a constraint.
    mask_seconds: wait of a short step for its masks; infinite to wait for all.
    on_wait: called with the end of each wait for masks, in time.monotonic() seconds, and its seconds; None for none.
    """

    def __init__(
        self,
        build: Callable[[Callable[[], None]], BuiltCompiler] | None = None,
        wake: Callable[[], None] | None = None,
        vocabulary_size: int = 0,
        mask_seconds: float = math.inf,
        on_wait: Callable[[float, float], None] | None = None,
    ):
        self._on_wait = on_wait
        self._build = build
        self._wake = wake
        self._masks = MaskThreads(vocabulary_size, wake)
        self._mask_seconds = mask_seconds
        self._built: BuiltCompiler | None = None
        self._failure: BaseException | None = None
        self._retry_at = 0.0  # time.monotonic() seconds
        self._builder: threading.Thread | None = None
        self._pending: dict[int, PendingGrammar] = {}  # by the id of a sequence
        self._next_poll = 0.0
        self._is_due = False  # something changed since the last poll; set by other threads

    def __len__(self) -> int:
        """Return the number of requests that wait for their grammar."""
        return len(self._pending)

    def pending(self, request: ConstrainedRequest, was_accepted: bool = False) -> PendingGrammar | None:
        """Return the grammar that a new request will wait for, not yet submitted; None without a constraint."""
        if request.constraint is None:
            return None
        return PendingGrammar(request, request.constraint, was_accepted, self._submit)

    def watch(self, sequence_id: int, pending: PendingGrammar) -> None:
        """Poll the grammar of a request that the scheduler has admitted."""
        self._pending[sequence_id] = pending
        self._is_due = True

    def cancel(self, sequence_id: int) -> None:
        """Wait no more for the grammar of a request that has ended. Nothing if it does not wait."""
        if self._pending.pop(sequence_id, None):
            metrics.requests_compiling.set(len(self._pending))

    def poll(self) -> list[CompiledRequest]:
        """Return the requests whose wait has ended."""
        now = time.monotonic()
        if not self._pending or (now < self._next_poll and not self._is_due):
            return []
        self._is_due = False  # first: a compilation that ends from now on is due again
        self._next_poll = now + POLL_SECONDS
        compiled: list[CompiledRequest] = []
        for sequence_id, pending in self._pending.items():
            try:
                matcher = self._matcher(pending)
            except ServeError as error:
                compiled.append(CompiledRequest(sequence_id, error))
            else:
                if matcher is not None:
                    COMPILE_SECONDS.observe(now - pending.since)
                    compiled.append(CompiledRequest(sequence_id, matcher))
        for request in compiled:
            del self._pending[request.sequence_id]
        metrics.requests_compiling.set(len(self._pending))
        return compiled

    def prepare(self, matchers: Iterable[AnswerMatcher], step_seconds: float) -> None:
        """Fill the masks of answers, and wait for them within the limit. Later ones are filled by threads.

        step_seconds: expected duration of the step that the masks are for.
        """
        began = time.monotonic()
        waits = min(max(1.0, step_seconds / (2 * MASK_WAIT_SECONDS)), MAX_MASK_WAITS)
        self._masks.prepare(matchers, waits * self._mask_seconds)
        end = time.monotonic()
        MASK_SECONDS.observe(end - began)
        if self._on_wait:
            self._on_wait(end, end - began)

    def wait_for_masks(self) -> None:
        """Wait until no mask is late."""
        self._masks.wait()

    def close(self) -> None:
        """End the compiler."""
        if self._built:
            self._built.compiler.close()

    def _submit(self, constraint: Constraint, client: str) -> Compilation | None:
        """Submit a constraint; None while the compiler is being built.

        Raises CompilerFull, NoTokenizer and Unavailable.
        """
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
