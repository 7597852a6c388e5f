"""Constraint of one answer, as the scheduler uses it: which tokens may follow, and whether the answer may end.

`service/grammar` implements the protocols. A request that has a constraint is COMPILING until `Scheduler.constrain`
gives it a matcher that has advanced over the tokens so far. The matcher then advances with each token.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from typing import TYPE_CHECKING, Protocol

from npuserve.service import logs
from npuserve.service.errors import InternalError, InvalidField, ServeError
from npuserve.service.grammar.errors import ConstraintError, MatcherError
from npuserve.service.ipc.messages import Constraint

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

log = logging.getLogger(__name__)


class Matcher(Protocol):
    """State of a grammar after some tokens. `advance` and `fill` raise MatcherError beyond their bounded effort."""

    def advance(self, token_id: int) -> bool:
        """Append a token. False, without an effect, if it is not allowed."""

    def fill(self, bits: npt.NDArray[np.int32]) -> None:
        """Write one bit for each token of the vocabulary, 1 if it is allowed: [ceil(vocabulary / 32)] int32."""

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""


class Compilation(Protocol):
    """Grammar of a constraint, compiled apart from the engine's loop. matcher: returns a new one; call it once done."""

    @property
    def done(self) -> bool: ...

    @property
    def error(self) -> ConstraintError | None: ...

    def matcher(self) -> Matcher: ...


class AnswerMatcher:
    """Matcher of one answer.

    has_ended: the last token was one of `end_ids`, after which nothing follows. Where the constraint allows no other
        token, an end token follows nevertheless, as in an answer without a constraint.
    error: failure that ends the request when its next token arrives; None for none.
    """

    __slots__ = ("_constraint", "_end_ids", "_matcher", "error", "has_ended")

    def __init__(self, constraint: Constraint, compilation: Compilation, end_ids: Container[int]):
        """Begin before the first token. end_ids: tokens that end an answer. Raises the errors of Compilation.matcher.
        """
        self._constraint = constraint
        self._end_ids = end_ids
        self._matcher = compilation.matcher()
        self.has_ended = False
        self.error: ServeError | None = None

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_complete

    def advance(self, token_id: int) -> None:
        """Append a token. Sets `error` if that fails. Nothing after an error."""
        if self.error is not None:
            return
        try:
            if self._matcher.advance(token_id):
                self.has_ended = token_id in self._end_ids
            else:
                logs.event(log, "a token violates its constraint", level=logging.ERROR, kind=self._constraint.kind)
                self.error = InternalError(f"a sampled token violates {self._constraint.kind}")
        except Exception as error:
            self.error = self._failure(error)

    def fill(self, bits: npt.NDArray[np.int32]) -> bool:
        """Write the mask of the next token, see Matcher.fill. Return False if there is none, or sets `error`."""
        if self.error is not None or self.has_ended:
            return False
        try:
            self._matcher.fill(bits)
        except Exception as error:
            self.error = self._failure(error)
        else:
            if not bits.any():
                logs.event(log, "a constraint allows no token", level=logging.ERROR, kind=self._constraint.kind)
                self.error = InternalError(f"{self._constraint.kind}: no token may follow")
        return self.error is None

    def _failure(self, error: Exception) -> ServeError:
        if isinstance(error, MatcherError):
            return InvalidField(self._constraint.field, f"cannot be followed within limits: {error}")
        logs.bug(log, f"matcher of {self._constraint.kind} failed", error)
        return InternalError(f"{self._constraint.kind}: the matcher failed")
