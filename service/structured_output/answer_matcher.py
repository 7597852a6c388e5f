"""Constraint of one answer: which tokens may follow, and whether the answer may end.

A request that has a constraint is COMPILING until `Scheduler.constrain` gives it a matcher that has advanced over the
tokens so far. The scheduler then advances it with each token.

Forced tokens. Where the constraint leaves one text, the next token is the tokenizer's choice for this text: the mask
has its id alone. So the tokens are the same, at any temperature, whether a run of forced tokens is sampled one by one
or appended at once (`Sequence.apply`). A run is a function of the text so far and of the request, so it is the same
after a preemption and in a restarted engine. It ends before a token that the request biases or stops at: the mask there
allows every tokenization.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from npuserve.service import logs
from npuserve.service.errors import InternalError, QueueFull, ServeError
from npuserve.service.structured_output.constraint import ConstrainedRequest
from npuserve.service.structured_output.errors import LexerExhausted, MatcherError

if TYPE_CHECKING:
    from npuserve.service.structured_output.compiler import Compilation
    from npuserve.service.structured_output.lexer import GrammarLexer
    from npuserve.service.structured_output.matcher import Matcher

log = logging.getLogger(__name__)

MAX_FORCED_WORDS = 128
"""Most words of a mask with an allowed token where the forced text is looked for. Where a token is forced, nearly all
allowed tokens are beginnings of one text. The search takes half as long as a mask."""
MAX_REPLAYED_TOKENS = 256
"""Tokens that an answer replays before the thread prepares others. They take a few milliseconds."""
MAX_CAREFUL_TOKENS = 16
"""The same with a mask before each token."""
MAX_ATTEMPTS = 3
"""Lexers that one token of an answer may exhaust. Then it is the answer that exceeds the limits, and not another one
that uses the lexer. The last replay computes a mask before each token, as the answer did."""
MEMORY_WAIT_SECONDS = 0.001
"""Time between two checks whether an answer that waits for memory may continue."""


Mask = npt.NDArray[np.int32]
"""One bit for each token id, 1 if it is allowed."""


def _allow_one(bits: Mask, token_id: int) -> None:
    """Make a mask allow one token."""
    bits.fill(0)
    bits.view(np.uint32)[token_id // 32] = 1 << token_id % 32


class AnswerMatcher:
    """Matcher of one answer, and what follows the tokens so far.

    forced_run      what follows                         mask
    None            unknown: `prepare` computes it       none yet
    []              no token is forced                   of the library
    [a, b, c]       these tokens are forced              a alone; [b, c] follow after a

    Nothing follows an error or an end token, and there is no mask. A row waits until the answer is prepared and its
    lexer is not in use (mask_threads.py).

    The library's matcher may be behind the tokens: of an answer that an earlier engine began, and of one whose lexer is
    worn (lexer.py) or waits for memory. `prepare` replays the tokens.

    arrival: of the request.
    lexer: of the grammar. Only the thread that may use it calls `prepare`, and the loop calls the rest.
    has_ended: the last token was one of `end_ids`, after which nothing follows. Where the constraint allows no other
        token, an end token follows nevertheless, as in an answer without a constraint.
    error: failure that ends the request when its next token arrives; None for none.
    """

    __slots__ = ("__weakref__", "_attempts", "_bits", "_client", "_compilation", "_constraint", "_end_ids",
                 "_is_complete", "_is_discarded", "_matcher", "_num_matched", "_tokens", "_unforced", "arrival",
                 "error", "forced_run", "has_ended", "lexer")

    def __init__(self, request: ConstrainedRequest, compilation: Compilation, end_ids: Container[int]):
        """Begin after the output that an earlier engine computed of a request with a constraint.

        end_ids: tokens that end an answer.

        Raises the errors of Compilation.lexer.
        """
        assert request.constraint
        self._constraint = request.constraint
        self._client = request.client
        self._end_ids = end_ids
        self._unforced = request.stop_token_ids.union(request.sampling.logit_bias)
        self._compilation = compilation
        self._tokens = list(request.output_ids)
        self._num_matched = 0  # tokens that the matcher has taken
        self._attempts = 0  # at the next token, which exhausted lexers
        self._bits: Mask | None = None  # the last mask
        self._is_discarded = False
        self.arrival = request.arrival
        self.forced_run: list[int] | None = None
        self.has_ended = bool(self._tokens) and self._tokens[-1] in end_ids
        self._is_complete: bool | None = self.has_ended or (None if self._tokens else compilation.is_complete)
        self.error: ServeError | None = None
        self._matcher: Matcher | None = None
        self.lexer: GrammarLexer = compilation.lexer(self._client)
        self.lexer.add(self)
        if self.lexer.is_built and not self.lexer.in_use:
            self._matcher = self.lexer.matcher()

    @property
    def is_busy(self) -> bool:
        """Whether a thread uses the grammar, so that no token may be sampled or applied."""
        return self.lexer.in_use

    @property
    def has_forced(self) -> bool:
        """Whether tokens are known to be forced. False while the grammar is busy."""
        return bool(self.forced_run) and not self.lexer.in_use

    @property
    def is_prepared(self) -> bool:
        """Whether it is known what follows."""
        return self.forced_run is not None or self.error is not None or self.has_ended

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here. Only where the lexer is in use, an answer that is behind is not complete."""
        if self._is_complete is None and self.error is None and self.lexer.is_built and not self.lexer.in_use:
            try:
                while self._is_behind:
                    self._replay()
            except BaseException as error:  # as in `prepare`
                self._fail(error)
        return bool(self._is_complete)

    def prepare(self, size: int) -> bool:
        """Compute what follows, for a vocabulary of `size` ids. In any thread, while no other uses the lexer.

        Return whether this must be called again: the answer has moved to another lexer, replayed a part of its tokens,
        or waits for memory.
        """
        if self._is_discarded or self.is_prepared:
            return False
        try:
            if self.lexer.is_full:
                self.lexer.wear()
            if self.lexer.is_worn:
                self._move()
                return True
            if not self._compilation.may_grow(self.lexer):
                if self.lexer.is_built:
                    self.lexer.wear()
                time.sleep(MEMORY_WAIT_SECONDS)
                return True
            if self._is_behind:
                self._replay()
                if self._is_behind:
                    return True
            self._compute(size)
        except BaseException as error:  # a panic of a library in Rust is no Exception; the caller must not end
            return self._fail(error)
        return False

    def release(self) -> None:
        """Free the matcher. `prepare` builds it again. By the thread that may use the lexer."""
        self._matcher = None
        self._num_matched = 0
        self.forced_run = None

    @property
    def _is_behind(self) -> bool:
        """Whether the matcher has to take tokens before it can tell what follows."""
        return self._matcher is None or self._num_matched < len(self._tokens)

    def _move(self) -> None:
        """Use another lexer, since this one is worn."""
        self.release()
        self.lexer.remove(self)
        self.lexer = self._compilation.lexer(self._client)
        self.lexer.add(self)

    def _replay(self) -> None:
        """Take tokens that an earlier matcher has taken, at most MAX_REPLAYED_TOKENS."""
        if self._matcher is None:
            self._matcher = self.lexer.matcher()
        is_careful = self._attempts > 1
        count = MAX_CAREFUL_TOKENS if is_careful else MAX_REPLAYED_TOKENS
        tokens = self._tokens[self._num_matched : self._num_matched + count]
        if tokens and not self._matcher.replay(tokens, is_careful=is_careful):
            self.error = self._violation()
        self._num_matched += len(tokens)
        if tokens and not self._is_behind:
            self._matcher.end_replay()
        if not self._is_behind:
            self._is_complete = self._matcher.is_complete

    def _compute(self, size: int) -> None:
        """Compute the mask, for `size` ids, and the forced tokens."""
        assert self._matcher
        if self._bits is None:
            self._bits = np.zeros(-(-size // 32), np.int32)
        self.forced_run = self._following(self._matcher, self._bits)
        if self.forced_run is None:
            logs.event(log, "a constraint allows no token", level=logging.ERROR, kind=self._constraint.kind)
            self.error = InternalError(f"{self._constraint.kind}: no token may follow")
        self._attempts = 0

    def _following(self, matcher: Matcher, bits: Mask) -> list[int] | None:
        """Write the mask of a matcher, and return the forced tokens; None if no token may follow."""
        matcher.fill(bits)
        words = np.count_nonzero(bits)
        if not words:
            return None
        run = matcher.forced(bits) if words <= MAX_FORCED_WORDS else []
        return list(itertools.takewhile(lambda token: token not in self._unforced, run))

    def mask(self) -> Mask | None:
        """Return the mask of the next token, valid until the next `prepare` or `mask`; None if nothing follows. The
        answer must be prepared."""
        if self.error is not None or self.has_ended:
            return None
        assert self._bits is not None
        if self.forced_run:
            _allow_one(self._bits, self.forced_run[0])
        return self._bits

    @property
    def can_draft(self) -> bool:
        """Whether `masks_along` computes masks: the lexer is fast, and may grow."""
        return self.lexer.is_fast and not self.lexer.is_full

    def masks_along(self, drafts: Sequence[int]) -> list[Mask]:
        """Return the mask of the next token, and of those after each draft that the constraint allows in turn.

        There is none after a draft that is not allowed or ends the answer, nor after one whose mask cannot be computed
        within the limits. [] if nothing follows. The answer must be prepared, and stays as it is.
        """
        first = self.mask()
        if first is None:
            return []
        masks = [first.copy()]
        run = self.forced_run
        matcher: Matcher | None = None
        began = time.perf_counter()
        try:
            for token_id in drafts:
                is_allowed = int(masks[-1][token_id // 32]) >> token_id % 32 & 1
                if not is_allowed or token_id in self._end_ids or self._matcher is None or not self.can_draft:
                    break
                matcher = matcher or self._matcher.copy()
                if not matcher.advance(token_id):
                    break
                bits: Mask = np.zeros_like(first)
                run = run[1:] if run else []
                if not run:
                    run = self._following(matcher, bits)
                    if run is None:
                        break
                if run:
                    _allow_one(bits, run[0])
                masks.append(bits)
        except BaseException as error:  # as in `prepare`; the answer itself fails if it gets there
            logs.event(log, "masks of drafts exceed the limits", level=logging.DEBUG, error=str(error))
        self.lexer.seconds = max(self.lexer.seconds, (time.perf_counter() - began) / len(masks))
        return masks

    def discard(self) -> None:
        """Compute nothing more: the request has ended."""
        self._is_discarded = True
        self.lexer.remove(self)

    def advance(self, token_id: int) -> None:
        """Append a token. Sets `error` if that fails. Nothing after an error."""
        if self.error is not None:
            return
        run = self.forced_run
        self.forced_run = run[1:] or None if run and run[0] == token_id else None
        is_behind = self._is_behind
        self._tokens.append(token_id)
        self.has_ended = token_id in self._end_ids
        self._is_complete = self.has_ended or None
        if is_behind or self._matcher is None:  # the token is of a mask of an earlier matcher
            return
        try:
            if self._matcher.advance(token_id):
                self._num_matched += 1
                self._is_complete = self._matcher.is_complete
            else:
                self.error = self._violation()
        except BaseException as error:  # as in `prepare`
            self._fail(error)

    def take_forced(self, min_tokens: int, max_tokens: int) -> list[int]:
        """Advance over the forced tokens that follow, at most `max_tokens`, if these are at least `min_tokens`.

        Return them.
        """
        run = (self.forced_run or [])[:max_tokens]
        if len(run) < min_tokens:
            return []
        for count, token_id in enumerate(run):
            self.advance(token_id)
            if self.error is not None:
                return run[:count]
        return run

    def _violation(self) -> ServeError:
        logs.event(log, "a token violates its constraint", level=logging.ERROR, kind=self._constraint.kind)
        self.has_ended = self._is_complete = False
        return InternalError(f"a sampled token violates {self._constraint.kind}")

    def _fail(self, error: BaseException) -> bool:
        """Set `error`, or replace an exhausted lexer. Return whether `prepare` must be called again."""
        if isinstance(error, LexerExhausted):
            self.lexer.wear()
            self._attempts += 1
            if self._attempts < MAX_ATTEMPTS:
                return True
        if isinstance(error, MatcherError):
            self.error = QueueFull(f"{self._constraint.field}: cannot be followed within limits: {error}")
        else:
            logs.bug(log, f"matcher of {self._constraint.kind} failed", error)
            self.error = InternalError(f"{self._constraint.kind}: the matcher failed")
        return False
