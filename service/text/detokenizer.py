"""Detokenizer of one answer, with stop strings. It never returns a part of a character or of a stop string.

Unary and streaming calls use the same class, so that their texts are equal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from npuserve.service.text.incremental_decoder import Piece
from npuserve.service.text.tokenizer import Tokenizer

MAX_UNFINISHED_TOKENS = 8
"""Consecutive tokens that end inside a character before their text is sent anyway.

A character has at most four tokens with bytes. Longer runs come from invalid UTF-8, from tokens with the end of one
character and the beginning of the next, and from skipped tokens inside a character.
"""


class Delta(NamedTuple):
    """Next part of an answer.

    num_tokens: tokens that this part's text covers.
    matched_stop: the stop string that ended the answer.
    keep: with a matched stop string, number of the answer's tokens that its text depends on. The same text and stop
        string result from these tokens alone.
    boundaries: positions within this part where it could have ended, as (characters, tokens) of this part, ascending.
    """

    text: str
    num_tokens: int
    matched_stop: str | None = None
    keep: int | None = None
    boundaries: tuple[tuple[int, int], ...] = ()


class Detokenizer:
    """Incremental detokenizer with stop strings. Amortised O(1) per token; holds O(longest stop string) characters.

    skip_special_tokens: special tokens have no text, except `kept_ids`.
    stop: strings that end the answer; none may be empty.
    include_stop: cut the text after the stop string, not before it.
    min_tokens: a stop string is ignored if a token with a smaller index completes it.
    prompt_ids: ids before the answer, see `Tokenizer.text_stream`.
    client_tokens: number of the answer's tokens that the client has already received.
    client_characters: characters of the answer up to the last boundary within `client_tokens`, known once they are
        pushed.

    A token is held back while its text ends inside a character or may be the beginning of a stop string. After
    MAX_UNFINISHED_TOKENS consecutive tokens that end inside a character, the complete characters are sent.

    The answer ends at the stop string with the first end; the longest one wins if several end there. So the result does
    not depend on how the tokens are split into calls. A character belongs to the token that completes it. A stop string
    in a run of byte tokens with invalid UTF-8 belongs to the whole run, without which the text would be another.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        stop: Sequence[str],
        include_stop: bool,
        min_tokens: int,
        prompt_ids: Sequence[int] = (),
        client_tokens: int = 0,
        kept_ids: frozenset[int] = frozenset(),
    ):
        self._stream = tokenizer.text_stream(prompt_ids, skip_special_tokens, kept_ids)
        self._matcher = _StopMatcher(stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        # The answer's text is the sent text, of _offset characters and _num_sent tokens, followed by _text.
        self._text = ""
        self._offset = 0
        self._num_sent = 0
        self._num_tokens = 0  # of the sent text and _text
        self._unfinished = 0  # number of last tokens that end inside a character
        # Positions after the sent text where it may be cut, as (characters, tokens) of the answer, ascending.
        self._boundaries: deque[tuple[int, int]] = deque()
        self._match: tuple[str, int] | None = None  # stop string, its end in _text
        self._is_finished = False
        self._client_tokens = client_tokens
        self.client_characters = 0

    def push(self, ids: Sequence[int]) -> Delta | None:
        """Add the next tokens of the answer and return the text that can be sent.

        Returns None if there is none, and after a stop string or `finish`.
        """
        if self._is_finished:
            return None
        for token_id in ids:
            pieces = self._stream.feed(token_id)
            is_usual = len(ids) == len(pieces) == 1 and pieces[0].is_complete
            if is_usual and not (self._text or self._matcher or self._num_tokens < self._client_tokens):
                return self._send_directly(pieces[0].text)
            for piece in pieces:
                self._add(piece)
                if self._match:
                    return self._finish_at_stop()
        boundaries = self._boundaries_within(len(self._text) - (self._matcher.held if self._matcher else 0))
        if not boundaries:
            return None
        end, tokens = boundaries.pop()
        delta = Delta(self._text[:end], tokens, boundaries=tuple(boundaries))
        self._text = self._text[end:]
        self._offset += end
        self._num_sent += tokens
        return delta

    def finish(self) -> Delta:
        """Return the rest of the answer: an unfinished character becomes U+FFFD. Empty after a stop string.

        The rest may contain a stop string.
        """
        if self._is_finished:
            return Delta("", 0)
        pieces, tail = self._stream.flush()
        for piece in pieces:
            self._add(piece)
            if self._match:
                return self._finish_at_stop()
        self._num_tokens -= 1  # the tail belongs to the last token, which was counted
        self._add(Piece(tail, True))
        if self._match:
            return self._finish_at_stop()
        self._is_finished = True
        boundaries = self._boundaries_within(len(self._text))
        return Delta(self._text, self._num_tokens - self._num_sent, boundaries=tuple(boundaries))

    def _send_directly(self, text: str) -> Delta:
        """Add a complete piece and send it at once: the fast path for usual tokens."""
        self._num_tokens += 1
        self._unfinished = 0
        self._offset += len(text)
        delta = Delta(text, self._num_tokens - self._num_sent)
        self._num_sent = self._num_tokens
        return delta

    def _add(self, piece: Piece) -> None:
        """Append one token's text and search it for stop strings."""
        self._num_tokens += 1
        before = len(self._text)
        self._text += piece.text
        if self._matcher:
            for i, character in enumerate(piece.text, before + 1):
                stop = self._matcher.step(character)
                if stop is not None and self._num_tokens > self._min_tokens:
                    self._match = stop, i
                    self._num_tokens += piece.later_tokens
                    return
        self._unfinished = 0 if piece.is_complete else self._unfinished + 1
        if self._unfinished in (0, MAX_UNFINISHED_TOKENS):
            self._unfinished = 0
            characters = self._offset + len(self._text)
            self._boundaries.append((characters, self._num_tokens))
            if self._num_tokens <= self._client_tokens:
                self.client_characters = characters

    def _finish_at_stop(self) -> Delta:
        assert self._match is not None
        self._is_finished = True
        stop, end = self._match
        text = self._text[: end if self._include_stop else end - len(stop)]
        if self._num_tokens <= self._client_tokens:
            self.client_characters = self._offset + len(text)
        boundaries = self._boundaries_within(len(text))
        return Delta(text, self._num_tokens - self._num_sent, stop, self._num_tokens, tuple(boundaries))

    def _boundaries_within(self, characters: int) -> list[tuple[int, int]]:
        """Remove and return the boundaries in the first characters of _text, as (characters, tokens) of _text."""
        boundaries = []
        while self._boundaries and self._boundaries[0][0] <= self._offset + characters:
            end, tokens = self._boundaries.popleft()
            boundaries.append((end - self._offset, tokens - self._num_sent))
        return boundaries


class _StopMatcher:
    """Automaton that finds the first of several strings in a text, character by character (Aho and Corasick, 1975).

    A state is the longest suffix of the text that is a prefix of a stop string.

    held: number of last characters that may be the beginning of an incomplete stop string.
    """

    def __init__(self, stops: Sequence[str]):
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._next: list[dict[str, int]] = [{}]
        self._found: list[str | None] = [None]  # by state, the longest stop string that ends there
        depths = [0]
        for stop in stops:
            state = 0
            for character in stop:
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self._found.append(None)
                    depths.append(depths[state] + 1)
                state = self._next[state][character]
            self._found[state] = stop
        self._fallback = [0] * len(depths)
        self._held = [depth if after else 0 for depth, after in zip(depths, self._next, strict=True)]
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            shorter = self._fallback[state]
            self._found[state] = self._found[state] or self._found[shorter]
            self._held[state] = self._held[state] or self._held[shorter]
            for character, after in self._next[state].items():
                self._fallback[after] = self._after(shorter, character)
                queue.append(after)
        self._state = 0
        self.held = 0

    def step(self, character: str) -> str | None:
        """Add a character and return the longest stop string that ends with it, None if none does."""
        self._state = self._after(self._state, character)
        self.held = self._held[self._state]
        return self._found[self._state]

    def _after(self, state: int, character: str) -> int:
        while character not in self._next[state]:
            if not state:
                return 0
            state = self._fallback[state]
        return self._next[state][character]
