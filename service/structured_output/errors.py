"""Errors of constraints."""

from __future__ import annotations

from npuserve.service.structured_output.translation.errors import ConstraintError

__all__ = ["CompilerFailed", "CompilerFull", "ConstraintError", "LexerExhausted", "MatcherError",
           "UnsupportedVocabulary"]


class CompilerFailed(Exception):
    """A constraint was not compiled for a reason that is not its own, such as a lack of memory of the machine.

    The client may retry.
    """


class CompilerFull(Exception):
    """The queue of constraints to compile is full. The client may retry."""


class MatcherError(Exception):
    """A matcher exceeded its limits of time or memory. Its request ends with an error."""


class LexerExhausted(MatcherError):
    """A step exceeded the limits of a lexer, which no answer can use any more. With a new one it may succeed."""


class UnsupportedVocabulary(ValueError):
    """The bytes of the tokenizer's tokens are unknown, so that no answer can be constrained."""
