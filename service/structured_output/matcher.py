"""State of one constrained answer: which tokens may come next.

A mask allows every tokenization of the texts that may follow, so it depends on the text alone. With a real vocabulary
it hardly ever has a single id, not even where one text may follow: "name" is also "n" and "ame". `forced` returns the
tokenizer's own choice for such a text, also as a function of the text alone: after a forced token the rest of the run
is forced. The library's `compute_ff_tokens` is not used, since it depends on the tokens before, and its
`compute_ff_bytes` is not, since it is unbounded (forced_text.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from numpy.typing import NDArray

from npuserve.service.structured_output.errors import LexerExhausted, MatcherError
from npuserve.service.structured_output.forced_text import ForcedText, is_lexer_exhausted
from npuserve.service.structured_output.vocabulary import Vocabulary

MAX_STATES = 1 << 31
"""States of a lexer for the library, which would break it at this number. lexer.py bounds their memory."""
MAX_UNMASKED_BYTES = 256
"""Length of a text that is consumed without a mask. The library limits the work between two masks."""
MAX_FORCED_BYTES = 64
"""Length of a text whose tokens are forced at once. The library holds the GIL while it builds its states."""
WINDOW_BYTES = 64
"""Length of the text from which the tokenizer chooses one forced token."""
_REASONS = frozenset({"NotStopped", "EndOfSentence", "NoExtension"})


def limits(kind: str) -> LLParserLimits:
    """Return the limits of a grammar and of one step, in units of the library.

    A step of an ambiguous grammar takes time by the square of the items in a row: with 500 less than 20 ms. JSON is not
    ambiguous, but a schema of many alternatives has more items.
    """
    items = 500 if kind in ("grammar", "structural_tag") else 2_000
    return LLParserLimits(
        initial_lexer_fuel=1_000_000, step_lexer_fuel=100_000, step_max_items=50_000, max_items_in_row=items,
        max_lexer_states=MAX_STATES, max_grammar_size=500_000, verbose_errors=True)


class LexerMemory(Protocol):
    """Memory of the lexer that matchers use, which it measures after masks and replays."""

    def add_mask(self, seconds: float, libraries: Sequence[LLMatcher]) -> None: ...

    def add_replay(self, libraries: Sequence[LLMatcher]) -> None: ...


class Matcher:
    """State of one constrained answer. Not safe to use from several threads at a time.

    Each method may raise MatcherError if a step exceeds the limits; the matcher is then unusable. LexerExhausted means
    that those of the lexer were exceeded, maybe by another answer of the grammar.
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

    @property
    def _libraries(self) -> list[LLMatcher]:
        return [self._library, self._forced.library] if self._forced else [self._library]

    def copy(self) -> Matcher:
        """Return a matcher at the same place, which shares the lexer. It takes a few microseconds."""
        copied = Matcher(self._vocabulary, self._library.deep_copy(), memory=self._memory)
        copied._forced = self._forced.copy() if self._forced else None
        copied._has_ended = self._has_ended
        return copied

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
            raise LexerExhausted("another answer of the same grammar has exhausted their lexer")
        return taken

    def replay(self, token_ids: Sequence[int], *, is_careful: bool = False) -> bool:
        """Append tokens that an earlier matcher of the answer has taken. Return False if the constraint does not allow
        one.

        is_careful: compute a mask before each token, which takes a hundred times as long, so that no step does more
            work than a step of the earlier matcher.
        """
        bits = np.empty(-(-self._vocabulary.size // 32), np.uint32)
        part: list[int] = []
        num_bytes = 0
        for place, token_id in enumerate(token_ids, 1):
            part.append(token_id)
            num_bytes += len(self._vocabulary.data.tokens[token_id])
            if place < len(token_ids) and num_bytes < MAX_UNMASKED_BYTES and not is_careful:
                continue
            self._compute(bits)
            if self._library.try_consume_tokens(part) < len(part):
                self._check()
                return False
            if self._forced:
                for taken in part:
                    self._forced.advance(taken)
            part = []
            num_bytes = 0
        return True

    def end_replay(self) -> None:
        """Measure the memory after the last call of `replay`."""
        if self._memory:
            self._compute(np.empty(-(-self._vocabulary.size // 32), np.uint32))
            self._memory.add_replay(self._libraries)

    def fill(self, bits: NDArray[Any]) -> None:
        """Write the mask of the allowed tokens. End tokens are allowed where the text satisfies the constraint.

        bits: [ceil(vocabulary / 32)] int32 or uint32, contiguous. Bit i of word j is token 32 * j + i. After an end
            token only end tokens are allowed.
        """
        if self._has_ended:
            self._only_end(bits)
            return
        began = time.thread_time()
        self._compute(bits)
        if self._memory:
            self._memory.add_mask(time.thread_time() - began, self._libraries)

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
        position = 0
        tokens = self._vocabulary.data.tokens
        while position < min(len(text), MAX_FORCED_BYTES):
            token = self._vocabulary.first_token(text[position : position + WINDOW_BYTES])
            if token is None:
                break
            ids.append(token)
            position += len(tokens[token])
        return ids[: self._library.validate_tokens(ids)] if ids else []

    def _compute(self, bits: NDArray[Any]) -> None:
        """Write the mask of the library."""
        if bits is not self._buffer:
            words = -(-self._vocabulary.size // 32)
            if bits.shape != (words,) or bits.dtype.itemsize != 4 or not bits.flags.c_contiguous:
                raise ValueError(f"bits: must be {words} contiguous words of 32 bits")
            self._buffer = bits
            self._address = bits.ctypes.data
        self._library.unsafe_compute_mask_ptr(self._address, bits.nbytes)
        self._check()

    def _allows(self, token_id: int) -> bool:
        """Return whether the mask allows a token."""
        bits = np.zeros(-(-self._vocabulary.size // 32), np.uint32)
        self._compute(bits)
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
            reason = self._library.get_error() or self._library.stop_reason()
            kind = LexerExhausted if is_lexer_exhausted(self._library) else MatcherError
            raise kind(f"the constraint exceeds its limits: {reason.splitlines()[0][:200]}")
