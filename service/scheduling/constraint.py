"""Constraint of one answer, as the scheduler uses it: which tokens may follow, and whether the answer may end.

A request that has a constraint is COMPILING until `Scheduler.constrain` gives it a matcher that has advanced over the
tokens so far. The matcher then advances with each token.

Forced tokens. Where the constraint leaves one text, the next token is the tokenizer's choice for this text: the mask
has its id alone. So the tokens are the same, at any temperature, whether a run of forced tokens is sampled one by one
or appended at once (`Sequence.apply`). A run is a function of the text so far and of the request, so it is the same
after a preemption and in a restarted engine. It ends before a token that the request biases or stops at: the mask there
allows every tokenization.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Container
from typing import TYPE_CHECKING

import numpy as np

from npuserve.service import logs
from npuserve.service.errors import InternalError, InvalidField, ServeError
from npuserve.service.grammar.errors import MatcherError
from npuserve.service.ipc.messages import Request

if TYPE_CHECKING:
    import numpy.typing as npt

    from npuserve.service.grammar.compiler import Compilation

log = logging.getLogger(__name__)

MAX_FORCED_WORDS = 128
"""Most words of a mask with an allowed token where the forced text is looked for. Where a token is forced, nearly all
allowed tokens are beginnings of one text. The search takes half as long as a mask."""


class AnswerMatcher:
    """Matcher of one answer, and what follows the tokens so far.

    forced_run      what follows                         mask
    None            unknown: `prepare` computes it       none yet
    []              no token is forced                   of the library
    [a, b, c]       these tokens are forced              a alone; [b, c] follow after a

    Nothing follows an error or an end token, and there is no mask. A row waits until the answer is prepared and its
    lexer is not in use (mask_threads.py).

    lexer: of the grammar. Only the thread that may use it calls `prepare`, and the loop calls the rest.
    is_complete: the answer may end here.
    has_ended: the last token was one of `end_ids`, after which nothing follows. Where the constraint allows no other
        token, an end token follows nevertheless, as in an answer without a constraint.
    error: failure that ends the request when its next token arrives; None for none.
    """

    __slots__ = ("_bits", "_compilation", "_constraint", "_end_ids", "_is_discarded", "_matcher", "_unforced", "error",
                 "forced_run", "has_ended", "is_complete", "lexer")

    def __init__(self, request: Request, compilation: Compilation, end_ids: Container[int]):
        """Begin before the first token of a request with a constraint.

        end_ids: tokens that end an answer.

        Raises the errors of Compilation.matcher.
        """
        assert request.constraint
        self._constraint = request.constraint
        self._end_ids = end_ids
        self._unforced = request.stop_token_ids.union(request.sampling.logit_bias)
        self._compilation = compilation
        self._matcher = compilation.matcher()
        self._bits: npt.NDArray[np.int32] | None = None  # the last mask
        self._is_discarded = False
        self.lexer = compilation.lexer
        self.forced_run: list[int] | None = None
        self.is_complete = self._matcher.is_complete
        self.has_ended = False
        self.error: ServeError | None = None

    @property
    def is_prepared(self) -> bool:
        """Whether it is known what follows."""
        return self.forced_run is not None or self.error is not None or self.has_ended

    def prepare(self, size: int) -> None:
        """Compute what follows, for a vocabulary of `size` ids. In any thread, while no other uses the lexer."""
        if self._is_discarded or self.is_prepared:
            return
        try:
            if self._bits is None:
                self._bits = np.zeros(-(-size // 32), np.int32)
            self._matcher.fill(self._bits)
            words = np.count_nonzero(self._bits)
            if not words:
                logs.event(log, "a constraint allows no token", level=logging.ERROR, kind=self._constraint.kind)
                self.error = InternalError(f"{self._constraint.kind}: no token may follow")
            else:
                run = self._matcher.forced(self._bits) if words <= MAX_FORCED_WORDS else []
                self.forced_run = list(itertools.takewhile(lambda token: token not in self._unforced, run))
        except BaseException as error:  # a panic of a library in Rust is no Exception; the caller must not end
            self.error = self._failure(error)

    def mask(self) -> npt.NDArray[np.int32] | None:
        """Return the mask of the next token, valid until the next `prepare` or `mask`; None if nothing follows. The
        answer must be prepared."""
        if self.error is not None or self.has_ended:
            return None
        assert self._bits is not None
        if self.forced_run:
            self._bits.fill(0)
            self._bits.view(np.uint32)[self.forced_run[0] // 32] = 1 << self.forced_run[0] % 32
        return self._bits

    def discard(self) -> None:
        """Compute nothing more: the request has ended."""
        self._is_discarded = True

    def advance(self, token_id: int) -> None:
        """Append a token. Sets `error` if that fails. Nothing after an error."""
        if self.error is not None:
            return
        run = self.forced_run
        self.forced_run = run[1:] or None if run and run[0] == token_id else None
        try:
            if self._matcher.advance(token_id):
                self.has_ended = token_id in self._end_ids
                self.is_complete = self._matcher.is_complete
            else:
                logs.event(log, "a token violates its constraint", level=logging.ERROR, kind=self._constraint.kind)
                self.error = InternalError(f"a sampled token violates {self._constraint.kind}")
        except BaseException as error:  # as in `prepare`
            self.error = self._failure(error)

    def take_forced(self, least: int, most: int) -> list[int]:
        """Advance over the forced tokens that follow, at most `most`, if these are at least `least`. Return them."""
        run = (self.forced_run or [])[:most]
        if len(run) < least:
            return []
        for count, token_id in enumerate(run):
            self.advance(token_id)
            if self.error is not None:
                return run[:count]
        return run

    def _failure(self, error: BaseException) -> ServeError:
        if isinstance(error, MatcherError):
            self._compilation.is_worn = True
            return InvalidField(self._constraint.field, f"cannot be followed within limits: {error}")
        logs.bug(log, f"matcher of {self._constraint.kind} failed", error)
        return InternalError(f"{self._constraint.kind}: the matcher failed")
