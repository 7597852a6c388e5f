"""Compiler of constraints, in threads of its own, with a cache."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from npuserve.service.client_queue import ClientQueue, ClientShares
from npuserve.service.structured_output.compile_process import BASE_BYTES, CompileProcess, build_matchers
from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.structured_output.errors import CompilerFailed, CompilerFull, ConstraintError
from npuserve.service.structured_output.lexer import GrammarLexer, LexerPool, Matchers
from npuserve.service.structured_output.mask_threads import start_compiling
from npuserve.service.structured_output.matcher import Matcher
from npuserve.service.structured_output.vocabulary import Vocabulary

MAX_CACHE_BYTES = 256 << 20
"""Estimated memory of the grammars that are kept, and of all lexers."""
LEXER_SHARE = 0.75
"""Share of the memory for lexers."""
MAX_RUNNING_PER_CLIENT = 2
"""Constraints of one client that are compiled at a time. The compiler has one worker more, for other clients."""
MAX_WORKERS = MAX_RUNNING_PER_CLIENT + 1


class WaitingConstraint(NamedTuple):
    """Constraint to compile, and the client whose turn it is."""

    constraint: Constraint
    client: str


class CompileQueue:
    """Waiting constraints by client. Clients take turns. Not safe to use from several threads at a time.

    max_waiting: maximum number of waiting constraints. One client may have half of them.
    """

    def __init__(self, max_waiting: int):
        self._max_waiting = max_waiting
        self._waiting: ClientQueue[Constraint] = ClientQueue(max_waiting)
        self._running = ClientShares()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, constraint: Constraint) -> bool:
        return bool(self._waiting.clients_of(constraint))

    def add(self, constraint: Constraint, client: str) -> None:
        """Queue a constraint. If it waits for another client already, it is compiled at the first turn of both.

        Raises CompilerFull.
        """
        if self._waiting.has(client, constraint):
            return
        match self._waiting.shares.exceeded(client):
            case "client_limit":
                waiting = self._waiting.shares.items(client)
                raise CompilerFull(f"{waiting} constraints of this client wait to be compiled")
            case "queue_full":
                raise CompilerFull(f"{self._max_waiting} constraints wait to be compiled")
        self._waiting.append(client, constraint)

    def take(self) -> WaitingConstraint | None:
        """Remove and return the next constraint; None if there is none or its client has enough running ones.

        Call `end` when it is compiled.
        """
        waiting = (
            WaitingConstraint(constraint, client) for client, constraint in self._waiting.firsts()
            if self._running.items(client) < MAX_RUNNING_PER_CLIENT)
        taken = next(waiting, None)
        if taken is None:
            return None
        self._waiting.take(taken.client, taken.constraint)
        for other in self._waiting.clients_of(taken.constraint):
            self._waiting.remove(other, taken.constraint)
        self._running.add(taken.client)
        return taken

    def end(self, client: str) -> None:
        """Record that a taken constraint of a client is compiled."""
        self._running.remove(client)

    def clear(self) -> None:
        """Remove all waiting constraints."""
        self._waiting.clear()


class Compilation:
    """Result of a constraint, maybe not yet there.

    num_bytes: estimated memory of the grammar, without the states that answers build.
    is_complete: an answer without text satisfies the constraint.
    """

    def __init__(self, vocabulary: Vocabulary, pool: LexerPool | None = None):
        """pool: memory of the lexers; None for a pool of its own."""
        self._vocabulary = vocabulary
        self._pool = pool or LexerPool(MAX_CACHE_BYTES)
        self._build: Callable[[], Matchers] | None = None
        self._lexer: GrammarLexer | None = None  # of all answers until it is worn
        self._client_lexers: weakref.WeakValueDictionary[str, GrammarLexer] = weakref.WeakValueDictionary()
        self._last_lexer: GrammarLexer | None = None  # so that the next answer finds it compiled
        self._lock = threading.Lock()
        self._is_done = threading.Event()
        self._error: ConstraintError | CompilerFailed | None = None
        self.num_bytes = BASE_BYTES
        self.is_complete = False

    @property
    def done(self) -> bool:
        """Return whether the result is there. Never blocks."""
        return self._is_done.is_set()

    @property
    def error(self) -> ConstraintError | CompilerFailed | None:
        """Return why there is no grammar; None if the constraint was compiled, or is not yet done."""
        return self._error

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the result is there, at most `seconds`. Return whether it is."""
        return self._is_done.wait(seconds)

    def lexer(self, client: str = "") -> GrammarLexer:
        """Return the lexer that an answer of a client uses now. Raise the error of a refused constraint.

        Only when done. All clients share a lexer until it is worn.
        """
        if self._error is not None:
            raise self._error
        if self._lexer is None:
            raise RuntimeError("the constraint is not yet compiled")
        if not self._lexer.is_worn:
            return self._lexer
        with self._lock:
            lexer = self._client_lexers.get(client)
            if lexer is None or lexer.is_worn:
                lexer = self._client_lexers[client] = self._new_lexer((lexer or self._lexer).replayed_bytes)
            self._last_lexer = lexer
            return lexer

    def matcher(self) -> Matcher:
        """Return a new matcher at the beginning of an answer. Raise the error of a refused constraint."""
        return self.lexer().matcher()

    def may_grow(self, lexer: GrammarLexer) -> bool:
        """Return whether the answers of a lexer may use it now, or wait for memory. Raises MatcherError."""
        return self._pool.may_grow(lexer)

    def _new_lexer(self, expected_bytes: int = 0) -> GrammarLexer:
        assert self._build
        return GrammarLexer(self._vocabulary, self._build, self._pool.add_growth, expected_bytes)

    def build(self, build: Callable[[], Matchers]) -> None:
        """Compile the grammar. build: compiles it, now and for each further lexer. Raises ConstraintError."""
        self._build = build
        lexer = self._new_lexer()
        self.is_complete = lexer.matcher().is_complete
        self._lexer = lexer

    def finish(self, error: ConstraintError | CompilerFailed | None = None) -> None:
        """Set the result. error: why there is no grammar; None after `build`."""
        self._error = error
        self._is_done.set()


class GrammarCompiler:
    """Compiler of constraints. It keeps the results by content, the least recently used ones up to a size.

    Safe to use from several threads.

    lexers: memory of all lexers, also of answers whose constraint is not kept any more.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, max_cache_bytes: int = MAX_CACHE_BYTES, max_seconds: float = 2.0,
        max_queue: int = 256, max_bytes: int = 512 << 20, on_done: Callable[[], None] | None = None,
    ):
        """Start no process before the first constraint.

        max_cache_bytes: estimated memory of the results that are kept, and of all lexers.
        max_seconds, max_bytes: limits of processor time and memory for the compilation of one constraint.
        max_queue: see CompileQueue.
        on_done: called in a thread of the compiler after each compilation, to wake up a waiting loop.
        """
        self._vocabulary = vocabulary
        self.lexers = LexerPool(int(LEXER_SHARE * max_cache_bytes))
        self._max_cached_bytes = max_cache_bytes - int(LEXER_SHARE * max_cache_bytes)
        self._limits = max_seconds, max_bytes
        self._on_done = on_done
        self._condition = threading.Condition()
        self._cache: OrderedDict[Constraint, Compilation] = OrderedDict()
        self._cached_bytes = 0  # estimated memory of the results in the cache
        self._pending: dict[Constraint, Compilation] = {}
        self._queue = CompileQueue(max_queue)
        self._threads: list[threading.Thread] = []
        self._processes: list[CompileProcess] = []
        self._idle = 0
        self._is_closed = False

    def submit(self, constraint: Constraint, client: str = "") -> Compilation:
        """Return the compilation of a constraint, which may be done already. Equal constraints share one.

        Returns at once. Raises CompilerFull if too many constraints wait, or the system has no thread to compile it.
        """
        with self._condition:
            if self._is_closed:
                raise RuntimeError("the compiler is closed")
            if cached := self._cache.get(constraint):
                self._cache.move_to_end(constraint)
                return cached
            if pending := self._pending.get(constraint):
                if constraint in self._queue:
                    with contextlib.suppress(CompilerFull):  # then it waits for the other client's turn
                        self._queue.add(constraint, client)
                return pending
            if self._idle <= len(self._queue) and len(self._threads) < MAX_WORKERS:
                self._start_thread()
            self._queue.add(constraint, client)
            compilation = self._pending[constraint] = Compilation(self._vocabulary, self.lexers)
            self._condition.notify()
            return compilation

    def close(self) -> None:
        """End the threads and the processes. Constraints that wait are refused."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
            processes = list(self._processes)
        for process in processes:
            process.interrupt()
        for thread in self._threads:
            thread.join()

    def _start_thread(self) -> None:
        """Start a thread, if the system has one. Raises CompilerFull if the compiler has none at all."""
        thread = threading.Thread(target=self._run, name=f"grammar-{len(self._threads)}", daemon=True)
        try:
            start_compiling(thread)
        except RuntimeError as error:
            if not self._threads:
                raise CompilerFull("the system has no thread to compile it") from error
            return
        self._threads.append(thread)

    def _run(self) -> None:
        process = CompileProcess(self._vocabulary, *self._limits)
        with self._condition:
            self._processes.append(process)
        try:
            while (taken := self._next()) is not None:
                self._keep(taken, *self._compile(process, taken))
                if self._on_done:
                    self._on_done()
        finally:
            process.end()

    def _compile(
        self, process: CompileProcess, taken: WaitingConstraint
    ) -> tuple[ConstraintError | CompilerFailed | None, int]:
        """Compile a constraint. Return why there is no grammar, None if there is one, and its estimated memory."""
        constraint = taken.constraint
        try:
            compiled = process.compile(constraint)
            self._pending[constraint].build(
                functools.partial(build_matchers, self._vocabulary, compiled.grammar, constraint.kind))
        except (ConstraintError, CompilerFailed) as error:
            return error, BASE_BYTES
        except BaseException as error:  # also a panic of the library; no constraint may end the thread
            return CompilerFailed(f"cannot be compiled: {type(error).__name__}"), BASE_BYTES
        return None, compiled.num_bytes

    def _next(self) -> WaitingConstraint | None:
        """Wait for the next constraint; None when the compiler is closed."""
        with self._condition:
            self._idle += 1
            while not self._is_closed and (taken := self._queue.take()) is None:
                self._condition.wait()
            self._idle -= 1
            if not self._is_closed:
                return taken
            for constraint in [waiting for waiting in self._pending if waiting in self._queue]:
                self._pending.pop(constraint).finish(CompilerFailed("the server ends"))
            self._queue.clear()
            return None

    def _keep(
        self, taken: WaitingConstraint, error: ConstraintError | CompilerFailed | None, num_bytes: int
    ) -> None:
        """End a compilation. After CompilerFailed, the next request compiles the constraint again."""
        constraint = taken.constraint
        evicted: list[Compilation] = []
        with self._condition:
            self._queue.end(taken.client)
            compilation = self._pending.pop(constraint)
            compilation.num_bytes = num_bytes + 2 * len(constraint.text)
            compilation.finish(error)
            if isinstance(error, CompilerFailed):
                return
            self._cache[constraint] = compilation
            self._cached_bytes += compilation.num_bytes
            while self._cached_bytes > self._max_cached_bytes and self._cache:
                evicted.append(self._cache.popitem(last=False)[1])
                self._cached_bytes -= evicted[-1].num_bytes
        del evicted  # outside of the lock: a large one takes milliseconds
