"""State of one constrained answer: which tokens may come next.

A mask allows every tokenization of the texts that may follow, so it depends on the text alone. With a real vocabulary
it hardly ever has a single id, not even where one text may follow: "name" is also "n" and "ame". `forced` returns the
tokenizer's own choice for such a text, also as a function of the text alone: after a forced token the rest of the run
is forced. The library's `compute_ff_tokens` is not used, since it depends on the tokens before, and its
`compute_ff_bytes` is not, since it is unbounded (forced_text.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from numpy.typing import NDArray

from npuserve.service.grammar.errors import MatcherError
from npuserve.service.grammar.forced_text import ForcedText
from npuserve.service.grammar.vocabulary import Vocabulary

MAX_STATES = 20_000
"""States of a lexer, beyond one for each byte of the grammar. Answers build them, of up to 2 kB each. A fixed text
needs one state a byte, of 0.2 kB."""
BYTES_PER_FUEL = 32
"""Memory of a lexer by the work that built its states, in the library's unit. 13 to 28 bytes were measured."""
MAX_LEXER_BYTES = 16 << 20
"""Estimated memory of a lexer with MAX_STATES states."""
MAX_UNMEASURED_MASKS = 64
MAX_FORCED_BYTES = 64
"""Length of a text whose tokens are forced at once. The library holds the GIL while it builds its states."""
WINDOW_BYTES = 64
"""Length of the text from which the tokenizer chooses one forced token."""
_REASONS = frozenset({"NotStopped", "EndOfSentence", "NoExtension"})
_LEXER_COST = re.compile(r'"lexer_cost": (\d+)')


def limits(kind: str, num_bytes: int) -> LLParserLimits:
    """Return the limits of a grammar and of one step, in units of the library. num_bytes: length of the grammar.

    A step of an ambiguous grammar takes time by the square of the items in a row: with 500 less than 20 ms. JSON is not
    ambiguous, but a schema of many alternatives has more items.
    """
    items = 500 if kind in ("grammar", "structural_tag") else 2_000
    return LLParserLimits(
        initial_lexer_fuel=1_000_000, step_lexer_fuel=100_000, step_max_items=50_000, max_items_in_row=items,
        max_lexer_states=MAX_STATES + num_bytes, max_grammar_size=500_000, verbose_errors=True)


class LexerMemory:
    """Estimated memory of a lexer's states, which the answers of its grammar build. Safe where the lexer is.

    on_growth: called with this object and the bytes by which the estimate has grown.
    """

    def __init__(self, on_growth: Callable[[LexerMemory, int], None]):
        self._on_growth = on_growth
        self._num_bytes = 0
        self._masks = 0
        self._next = 1  # number of masks at which the lexer is measured

    def add_mask(self, library: LLMatcher) -> None:
        """Count a mask. Measure the lexer at some of them: it takes 0.2 ms."""
        self._masks += 1
        if self._masks >= self._next:
            self._next = self._masks + min(MAX_UNMEASURED_MASKS, max(1, self._masks // 2))
            self.grow(BYTES_PER_FUEL * _lexer_fuel(library))

    def grow(self, num_bytes: int) -> None:
        """Raise the estimate to `num_bytes`."""
        grown, self._num_bytes = num_bytes - self._num_bytes, max(num_bytes, self._num_bytes)
        if grown > 0:
            self._on_growth(self, grown)


def _lexer_fuel(library: LLMatcher) -> int:
    """Return the work that built the states of a matcher's lexer, as of its last mask.

    The library reports it in the message of an error alone.
    """
    copy = library.deep_copy()
    copy.rollback(1 << 30)  # an error: there are not so many tokens
    found = _LEXER_COST.search(copy.get_error())
    return int(found[1]) if found else MAX_LEXER_BYTES // BYTES_PER_FUEL


class Matcher:
    """State of one constrained answer. Not safe to use from several threads at a time.

    Each method may raise MatcherError if a step exceeds the limits; the matcher is then unusable.
    """

    def __init__(
        self, vocabulary: Vocabulary, library: LLMatcher, by_byte: LLMatcher | None = None,
        memory: LexerMemory | None = None,
    ):
        """Begin an answer.

        by_byte: matcher over `vocabulary.bytes` at the same place; None for no forced tokens.
        memory: of the lexer; None if it is not measured.
        """
        self._vocabulary = vocabulary
        self._memory = memory
        self._library = library
        self._forced = ForcedText(vocabulary, by_byte) if by_byte else None
        self._has_ended = False
        self._buffer: NDArray[Any] | None = None  # of the last mask, with its address, which takes long to find
        self._address = 0

    @property
    def is_complete(self) -> bool:
        """Return whether the text so far satisfies the constraint."""
        return self._has_ended or (not self._is_broken() and self._library.is_accepting())

    @property
    def is_stopped(self) -> bool:
        """Return whether no text may follow: an end token was taken, or only end tokens are allowed."""
        return self._has_ended or (self._library.is_stopped() and not self._is_broken())

    def advance(self, token_id: int) -> bool:
        """Append a token. Return False, without a change, if the constraint does not allow it."""
        if self._has_ended or not 0 <= token_id < self._vocabulary.size:
            return False
        if token_id in self._vocabulary.end_ids:
            self._has_ended = self.is_complete
            return self._has_ended
        if self.is_stopped:
            return False
        taken = bool(self._library.try_consume_tokens([token_id]))
        self._check()
        if taken and self._forced:
            self._forced.advance(token_id)
        if not taken and self._allows(token_id):
            # Another answer of the same grammar has exhausted the states of their lexer.
            raise MatcherError("the constraint exceeds its limits: too many states")
        return taken

    def fill(self, bits: NDArray[Any]) -> None:
        """Write the mask of the allowed tokens. End tokens are allowed where the text satisfies the constraint.

        bits: [ceil(vocabulary / 32)] int32 or uint32, contiguous. Bit i of word j is token 32 * j + i. After an end
            token only end tokens are allowed.
        """
        if bits is not self._buffer:
            words = -(-self._vocabulary.size // 32)
            if bits.shape != (words,) or bits.dtype.itemsize != 4 or not bits.flags.c_contiguous:
                raise ValueError(f"bits: must be {words} contiguous words of 32 bits")
            self._buffer, self._address = bits, bits.ctypes.data
        if self._has_ended:
            self._only_end(bits)
            return
        self._library.unsafe_compute_mask_ptr(self._address, bits.nbytes)
        self._check()
        if self._memory:
            self._memory.add_mask(self._library)

    def forced(self, mask: NDArray[Any] | None = None) -> list[int]:
        """Return the tokens that the next text begins with if only one text may follow; [] otherwise.

        They are the tokenizer's own choice for this text. It ends before a token that could be another one with the
        text after it.

        mask: what `fill` wrote for the next token, which saves time; None if it is unknown.
        """
        if self._forced is None or self.is_stopped or (mask is not None and self._texts_differ(mask.view(np.uint32))):
            return []
        text = self._forced.next(MAX_FORCED_BYTES + WINDOW_BYTES)
        ids: list[int] = []
        at, tokens = 0, self._vocabulary.data.tokens
        while at < min(len(text), MAX_FORCED_BYTES):
            token = self._vocabulary.first_token(text[at : at + WINDOW_BYTES])
            if token is None:
                break
            ids.append(token)
            at += len(tokens[token])
        return ids[: self._library.validate_tokens(ids)] if ids else []

    def _allows(self, token_id: int) -> bool:
        """Return whether the mask allows a token."""
        bits = np.zeros(-(-self._vocabulary.size // 32), np.uint32)
        self._library.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._check()
        return bool(int(bits[token_id // 32]) >> token_id % 32 & 1)

    def _texts_differ(self, mask: NDArray[np.uint32]) -> bool:
        """Return whether the allowed tokens begin with different bytes, or one of them is no text."""
        place = int(mask.argmax())
        first = self._vocabulary.data.tokens[32 * place + int(mask[place]).bit_length() - 1][:1]
        return not first or bool(np.count_nonzero(mask & self._vocabulary.other_tokens(first[0])))

    def _only_end(self, bits: NDArray[Any]) -> None:
        words = bits.view(np.uint32)
        words[:] = 0
        for i in self._vocabulary.end_ids:
            words[i // 32] |= np.uint32(1 << i % 32)

    def _is_broken(self) -> bool:
        return self._library.is_stopped() and (
            self._library.is_error() or self._library.stop_reason() not in _REASONS)

    def _check(self) -> None:
        if self._is_broken():
            if self._memory:
                self._memory.grow(MAX_LEXER_BYTES)
            reason = self._library.get_error() or self._library.stop_reason()
            raise MatcherError(f"the constraint exceeds its limits: {reason.splitlines()[0][:200]}")
