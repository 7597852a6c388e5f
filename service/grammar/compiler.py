"""Compiler of constraints, in threads of its own, with a cache."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable

from llguidance import LLMatcher

from npuserve.service.grammar.compile_process import (
    BASE_BYTES,
    CompileProcess,
    build_byte_matcher,
    build_library_matcher,
)
from npuserve.service.grammar.compile_queue import MAX_RUNNING_PER_CLIENT, CompileQueue, WaitingConstraint
from npuserve.service.grammar.errors import CompilerFailed, CompilerFull, ConstraintError
from npuserve.service.grammar.mask_threads import Lexer
from npuserve.service.grammar.matcher import LexerMemory, Matcher
from npuserve.service.grammar.vocabulary import Vocabulary
from npuserve.service.ipc.messages import Constraint

STACK_BYTES = 64 << 20
"""Stack of a thread that compiles. It is larger than a child's, which compiled the same constraint before."""
MAX_WORKERS = MAX_RUNNING_PER_CLIENT + 1


class Compilation:
    """Result of a constraint, maybe not yet there.

    num_bytes: estimated memory, also of the states that answers have built.
    memory: of the lexer.
    lexer: of all its matchers.
    is_worn: an answer exceeded the limits. They may be those of the lexer, whose states are the ones of all answers so
        far, so the next request compiles the constraint again.
    """

    def __init__(
        self, vocabulary: Vocabulary, on_growth: Callable[[LexerMemory, int], None] = lambda memory, num_bytes: None
    ):
        """on_growth: see LexerMemory."""
        self._vocabulary = vocabulary
        self.lexer = Lexer()
        self.memory = LexerMemory(on_growth)
        self._library: LLMatcher | None = None
        self._by_byte: LLMatcher | None = None
        self._lock = threading.Lock()
        self._is_done = threading.Event()
        self._error: ConstraintError | CompilerFailed | None = None
        self.num_bytes = BASE_BYTES
        self.is_worn = False

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

    def matcher(self) -> Matcher:
        """Return a new matcher at the beginning of an answer. Raise the error of a refused constraint.

        Only when done. Takes microseconds for usual constraints, since it copies the compiled grammar's state.
        """
        if self._error is not None:
            raise self._error
        if self._library is None:
            raise RuntimeError("the constraint is not yet compiled")
        with self._lock:
            by_byte = self._by_byte.deep_copy() if self._by_byte else None
            return Matcher(self._vocabulary, self._library.deep_copy(), by_byte, self.memory)

    def _finish(
        self, library: LLMatcher | None, error: ConstraintError | CompilerFailed | None,
        by_byte: LLMatcher | None = None,
    ) -> None:
        """by_byte: see Matcher."""
        self._library, self._error, self._by_byte = library, error, by_byte
        self._is_done.set()


class GrammarCompiler:
    """Compiler of constraints. It keeps the results by content, the least recently used ones up to a size.

    Safe to use from several threads. Constraints of answers that still run are not counted.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, max_cache_bytes: int = 256 << 20, max_seconds: float = 2.0,
        max_queue: int = 256, max_bytes: int = 512 << 20, on_done: Callable[[], None] | None = None,
    ):
        """Start no process before the first constraint.

        max_cache_bytes: estimated memory of the results that are kept.
        max_seconds, max_bytes: limits of processor time and memory for the compilation of one constraint.
        max_queue: see CompileQueue.
        on_done: called in a thread of the compiler after each compilation, to wake up a waiting loop.
        """
        self._vocabulary = vocabulary
        self._max_cache_bytes = max_cache_bytes
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
            if found := self._cache.get(constraint):
                if not found.is_worn:
                    self._cache.move_to_end(constraint)
                    return found
                self._cached_bytes -= self._cache.pop(constraint).num_bytes
            if found := self._pending.get(constraint):
                if constraint in self._queue:
                    with contextlib.suppress(CompilerFull):  # then it waits for the other client's turn
                        self._queue.add(constraint, client)
                return found
            if self._idle <= len(self._queue) and len(self._threads) < MAX_WORKERS:
                self._start_thread()
            self._queue.add(constraint, client)
            compilation = self._pending[constraint] = Compilation(
                self._vocabulary, functools.partial(self._grow, constraint))
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
        size = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=self._run, name=f"grammar-{len(self._threads)}", daemon=True)
            thread.start()
        except RuntimeError as error:
            if not self._threads:
                raise CompilerFull("the system has no thread to compile it") from error
            return
        finally:
            threading.stack_size(size)
        self._threads.append(thread)

    def _run(self) -> None:
        process = CompileProcess(self._vocabulary, *self._limits)
        with self._condition:
            self._processes.append(process)
        try:
            while (taken := self._next()) is not None:
                constraint = taken.constraint
                library, by_byte, error, num_bytes = None, None, None, BASE_BYTES
                try:
                    compiled = process.compile(constraint)
                    num_bytes = compiled.num_bytes
                    library = build_library_matcher(self._vocabulary.library, compiled.grammar, constraint.kind)
                    by_byte = build_byte_matcher(self._vocabulary, compiled.grammar, constraint.kind)
                except (ConstraintError, CompilerFailed) as found:
                    error = found
                except BaseException as found:  # also a panic of the library; no constraint may end the thread
                    error = CompilerFailed(f"cannot be compiled: {type(found).__name__}")
                self._keep(taken, (library, error, by_byte), num_bytes)
                if self._on_done:
                    self._on_done()
        finally:
            process.end()

    def _next(self) -> WaitingConstraint | None:
        """Wait for the next constraint; None when the compiler is closed."""
        with self._condition:
            self._idle += 1
            while not self._is_closed and (taken := self._queue.take()) is None:
                self._condition.wait()
            self._idle -= 1
            if not self._is_closed:
                return taken
            for constraint in [one for one in self._pending if one in self._queue]:
                self._pending.pop(constraint)._finish(None, CompilerFailed("the server ends"))
            self._queue.clear()
            return None

    def _keep(
        self, taken: WaitingConstraint,
        result: tuple[LLMatcher | None, ConstraintError | CompilerFailed | None, LLMatcher | None], num_bytes: int,
    ) -> None:
        """Give a compilation its result, see Compilation._finish. After CompilerFailed, the next request compiles the
        constraint again."""
        constraint, error = taken.constraint, result[1]
        with self._condition:
            self._queue.end(taken.client)
            compilation = self._pending.pop(constraint)
            compilation.num_bytes = num_bytes + 2 * len(constraint.text)
            compilation._finish(*result)
            if isinstance(error, CompilerFailed):
                return
            self._cache[constraint] = compilation
            self._cached_bytes += compilation.num_bytes
            evicted = self._evict()
        del evicted  # outside of the lock: a large one takes milliseconds

    def _grow(self, constraint: Constraint, memory: LexerMemory, num_bytes: int) -> None:
        """Count memory that answers have added to a compilation. Called in any thread."""
        with self._condition:
            compilation = self._cache.get(constraint)
            if compilation is None or compilation.memory is not memory:  # it was evicted
                return
            compilation.num_bytes += num_bytes
            self._cached_bytes += num_bytes
            evicted = self._evict()
        del evicted

    def _evict(self) -> list[Compilation]:
        """Remove the least recently used results from the cache until it fits, and return them."""
        evicted: list[Compilation] = []
        while self._cached_bytes > self._max_cache_bytes and self._cache:
            evicted.append(self._cache.popitem(last=False)[1])
            self._cached_bytes -= evicted[-1].num_bytes
        return evicted
