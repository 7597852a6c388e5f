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
    """Matcher of one answer.

    After each token the answer is prepared (mask_threads.py): its forced tokens, or else its mask, are computed. Until
    then, and while its lexer is in use, its request gets no row.

    lexer: of the grammar.
    is_complete: the answer may end here.
    has_ended: the last token was one of `end_ids`, after which nothing follows. Where the constraint allows no other
        token, an end token follows nevertheless, as in an answer without a constraint.
    error: failure that ends the request when its next token arrives; None for none.
    """

    __slots__ = ("_bits", "_compilation", "_constraint", "_end_ids", "_has_mask", "_is_discarded", "_is_prepared",
                 "_matcher", "_run", "_unforced", "error", "has_ended", "is_complete", "lexer")

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
        self.lexer = compilation.lexer
        self._run: list[int] | None = None  # the forced tokens that follow; None if they are not known
        self._bits: npt.NDArray[np.int32] | None = None
        self._has_mask = self._is_prepared = self._is_discarded = False
        self.is_complete = self._matcher.is_complete
        self.has_ended = False
        self.error: ServeError | None = None

    @property
    def is_prepared(self) -> bool:
        """Whether `mask` and `forced` are known for the tokens so far, so that they take no time."""
        return self._is_prepared or bool(self._run)

    @property
    def has_forced(self) -> bool:
        """Whether forced tokens follow; False if that is not known yet."""
        return bool(self._run)

    def prepare(self, size: int) -> None:
        """Compute the mask of the next token over `size` ids, and the forced tokens. In the thread of the masks."""
        if self._is_discarded:
            return
        try:
            if self._bits is None:
                self._bits = np.zeros(-(-size // 32), np.int32)
            self._has_mask = self.fill(self._bits)
        except BaseException as error:  # a panic of a library in Rust is no Exception; the thread must not end
            self._has_mask, self.error = False, self._failure(error)
        self._is_prepared = True

    def mask(self, size: int) -> npt.NDArray[np.int32] | None:
        """Return the mask of the next token, valid until the next call; None if there is none. Once prepared."""
        if not self._is_prepared:
            self.prepare(size)
        return self._bits if self._has_mask else None

    def discard(self) -> None:
        """Compute nothing more: the request has ended."""
        self._is_discarded = True

    def advance(self, token_id: int) -> None:
        """Append a token. Sets `error` if that fails. Nothing after an error."""
        if self.error is not None:
            return
        self._run = self._run[1:] or None if self._run and self._run[0] == token_id else None
        self._is_prepared = False
        try:
            if self._matcher.advance(token_id):
                self.has_ended = token_id in self._end_ids
                self.is_complete = self._matcher.is_complete
            else:
                logs.event(log, "a token violates its constraint", level=logging.ERROR, kind=self._constraint.kind)
                self.error = InternalError(f"a sampled token violates {self._constraint.kind}")
        except Exception as error:
            self.error = self._failure(error)

    def forced(self, mask: npt.NDArray[np.int32] | None = None) -> list[int]:
        """Return the run of forced tokens that follows; [] for none. Sets `error` if that fails.

        mask: see `forced` of grammar/matcher.py.
        """
        if self.error is not None or self.has_ended:
            return []
        if self._run is None:
            try:
                run = self._matcher.forced(mask)
                if self._unforced:
                    run = list(itertools.takewhile(lambda token: token not in self._unforced, run))
                self._run = run
            except Exception as error:
                self.error = self._failure(error)
                return []
        return self._run

    def take_forced(self, least: int, most: int) -> list[int]:
        """Advance over the run of forced tokens that follows, at most `most`, if these are at least `least`. Return
        them. The matcher must be prepared."""
        run, count = self.forced()[:most], 0
        for token_id in run if len(run) >= least else ():
            self.advance(token_id)
            if self.error is not None:
                break
            count += 1
        return run[:count]

    def fill(self, bits: npt.NDArray[np.int32]) -> bool:
        """Write the mask of the next token. Return False if there is none; `error` is set if that fails."""
        if self.error is not None or self.has_ended:
            return False
        if not self._run:
            try:
                self._matcher.fill(bits)
            except Exception as error:
                self.error = self._failure(error)
                return False
            words = np.count_nonzero(bits)
            if not words:
                logs.event(log, "a constraint allows no token", level=logging.ERROR, kind=self._constraint.kind)
                self.error = InternalError(f"{self._constraint.kind}: no token may follow")
                return False
            if words > MAX_FORCED_WORDS:
                self._run = []
        if run := self.forced(bits):
            bits.fill(0)
            bits.view(np.uint32)[run[0] // 32] = 1 << run[0] % 32
        return self.error is None

    def _failure(self, error: BaseException) -> ServeError:
        if isinstance(error, MatcherError):
            self._compilation.is_worn = True
            return InvalidField(self._constraint.field, f"cannot be followed within limits: {error}")
        logs.bug(log, f"matcher of {self._constraint.kind} failed", error)
        return InternalError(f"{self._constraint.kind}: the matcher failed")
