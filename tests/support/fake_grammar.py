"""A grammar without a library: the allowed tokens follow from a hash of all tokens so far. A matcher that missed,
repeated or confused a token therefore allows others.

    Constraint("regex", "7 12")     key 7; after at most 12 tokens only end tokens are allowed

Each state allows about a third of the tokens, and the end tokens after 3, 6, 9 ... tokens. Texts that begin with "bad"
are refused by the compiler, "heavy" ones exceed the limits of their matcher after 2 tokens. With "forced" the first
allowed token is forced in about three of four states.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from zlib import crc32

import numpy as np
import numpy.typing as npt

from npuserve.service.ipc.messages import Request
from npuserve.service.structured_output.answer_matcher import AnswerMatcher
from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.structured_output.errors import CompilerFailed, CompilerFull, ConstraintError, MatcherError
from npuserve.service.structured_output.mask_threads import Lexer

MAX_FORCED = 6
"""Maximum length of a run of forced tokens."""


class FakeMatcher:
    """vocabulary: number of token ids. end_ids: tokens that end an answer."""

    def __init__(self, text: str, vocabulary: int, end_ids: frozenset[int]):
        self._is_heavy = text.startswith("heavy")
        self._is_forcing = "forced" in text
        key, _, longest = text.removeprefix("heavy ").removeprefix("forced ").partition(" ")
        self._key, self._longest = int(key), int(longest or 1 << 30)
        self._vocabulary = vocabulary
        self._end_ids = end_ids
        self._hash = self._key
        self.tokens: list[int] = []

    @property
    def is_complete(self) -> bool:
        return bool(self.tokens and self.tokens[-1] in self._end_ids) or self._may_end

    @property
    def _may_end(self) -> bool:
        return (len(self.tokens) % 3 == 0 and bool(self.tokens)) or len(self.tokens) >= self._longest

    def allows(self, token_id: int) -> bool:
        if self.tokens and self.tokens[-1] in self._end_ids:
            return False
        if token_id in self._end_ids:
            return self._may_end
        if len(self.tokens) >= self._longest:
            return False
        return (self._hash + 2654435761 * token_id) % 3 == 0

    def copy(self) -> FakeMatcher:
        copied = copy.copy(self)
        copied.tokens = list(self.tokens)
        return copied

    def forced(self, mask: npt.NDArray[np.int32] | None = None) -> list[int]:
        state, run = copy.copy(self), list[int]()
        state.tokens = list(self.tokens)
        while self._is_forcing and len(run) < MAX_FORCED and state._hash % 4:
            allowed = (i for i in range(self._vocabulary) if i not in self._end_ids and state.allows(i))
            if (token := next(allowed, None)) is None:
                break
            state.advance(token)
            run.append(token)
        return run

    def advance(self, token_id: int) -> bool:
        if self._is_heavy and len(self.tokens) >= 2:
            raise MatcherError("too many items")
        if not self.allows(token_id):
            return False
        self.tokens.append(token_id)
        self._hash = crc32(b"%d" % token_id, self._hash)
        return True

    def replay(self, token_ids: Sequence[int], *, is_careful: bool = False) -> bool:
        return all(map(self.advance, token_ids))

    def end_replay(self) -> None:
        pass

    def fill(self, bits: npt.NDArray[np.int32]) -> None:
        if self._is_heavy and len(self.tokens) >= 2:
            raise MatcherError("too many items")
        words = bits.view(np.uint32)
        words[:] = 0
        for token_id in filter(self.allows, range(self._vocabulary)):
            words[token_id // 32] |= np.uint32(1 << token_id % 32)


class FakeLexer(Lexer):
    """Lexer whose matchers are `made`, with the methods of GrammarLexer."""

    def __init__(self, text: str, vocabulary: int, end_ids: frozenset[int]):
        super().__init__()
        self._rule = text, vocabulary, end_ids
        self._answers: weakref.WeakSet[AnswerMatcher] = weakref.WeakSet()
        self.made: list[FakeMatcher] = []
        self.is_built = True
        self.is_full = self.is_worn = False

    def matcher(self) -> FakeMatcher:
        self.made.append(FakeMatcher(*self._rule))
        return self.made[-1]

    def add(self, answer: AnswerMatcher) -> None:
        self._answers.add(answer)

    def remove(self, answer: AnswerMatcher) -> None:
        self._answers.discard(answer)

    def wear(self) -> None:
        self.is_worn = True
        for answer in list(self._answers):
            answer.release()


class FakeCompilation:
    def __init__(self, constraint: Constraint, vocabulary: int, end_ids: frozenset[int], done: bool):
        self.done = done
        self.error: ConstraintError | CompilerFailed | None = None
        if constraint.text.startswith("bad"):
            self.error = ConstraintError(f"{constraint.kind}: bad")
        self._rule = constraint.text, vocabulary, end_ids
        self._lexer = FakeLexer(*self._rule)
        self.is_complete = False

    @property
    def made(self) -> list[FakeMatcher]:
        return self._lexer.made

    def lexer(self, client: str = "") -> FakeLexer:
        assert self.done
        if self._lexer.is_worn:
            self._lexer = FakeLexer(*self._rule)
        return self._lexer

    def may_grow(self, lexer: FakeLexer) -> bool:
        return True


class FakeCompiler:
    """Compiler whose results are done at once, or when `finish` is called.

    most: constraints that may wait.
    on_done: called by `finish`.
    """

    def __init__(self, vocabulary: int, end_ids: frozenset[int], is_slow: bool = False, most: int = 1 << 30):
        self.is_slow = is_slow
        self.is_closed = False
        self.submitted: list[Constraint] = []
        self.compilations: dict[Constraint, FakeCompilation] = {}
        self.on_done: Callable[[], None] | None = None
        self._rule = vocabulary, end_ids
        self._most = most

    def submit(self, constraint: Constraint, client: str = "") -> FakeCompilation:
        if constraint not in self.compilations:
            if sum(not one.done for one in self.compilations.values()) >= self._most:
                raise CompilerFull("too many constraints wait")
            self.compilations[constraint] = FakeCompilation(constraint, *self._rule, done=not self.is_slow)
        self.submitted.append(constraint)
        return self.compilations[constraint]

    def finish(self) -> None:
        """Complete all that wait."""
        for one in list(self.compilations.values()):
            one.done = True
        if self.on_done:
            self.on_done()

    def close(self) -> None:
        self.is_closed = True


def answer_matcher(request: Request, vocabulary: int, end_ids: frozenset[int]) -> AnswerMatcher:
    """Return a new matcher of a request with a constraint."""
    assert request.constraint
    return AnswerMatcher(request, FakeCompilation(request.constraint, vocabulary, end_ids, done=True), end_ids)


def next_mask(matcher: AnswerMatcher, vocabulary: int) -> npt.NDArray[np.int32] | None:
    """Return the mask of the next token; None if nothing follows."""
    while matcher.prepare(vocabulary):
        pass
    return matcher.mask()


def allowed(token_id: int, mask: npt.NDArray[np.int32] | None) -> bool:
    """Return whether a mask allows a token; None allows all."""
    return mask is None or bool(int(mask[token_id // 32]) >> token_id % 32 & 1)


def first_allowed(token_id: int, vocabulary: int, mask: npt.NDArray[np.int32] | None) -> int:
    """Return the first allowed token from `token_id` on, in the cycle of all tokens."""
    return next(one for i in range(vocabulary) if allowed(one := (token_id + i) % vocabulary, mask))
