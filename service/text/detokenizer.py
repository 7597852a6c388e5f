"""Tokens of one answer to text that can be sent: never a part of a character, never a part of a stop string.

The unary and the streaming call both use it, so they agree by construction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from npuserve.service.text.incremental_decoder import Piece
from npuserve.service.text.tokenizer import Tokenizer

# A character is at most four tokens with bytes, so only broken text, tokens that each hold the end of one character
# and the beginning of the next, and skipped tokens inside a character make longer runs.
UNFINISHED_LIMIT = 8


class Delta(NamedTuple):
    """A part of the answer. num_tokens: tokens whose text it carries, after those of the deltas before it.

    matched_stop: the stop string that ended the answer; keep: then, tokens of the whole answer up to and with the one
    that completed it.
    """

    text: str
    num_tokens: int
    matched_stop: str | None = None
    keep: int | None = None


class Detokenizer:
    """Incremental detokenizer with stop strings. Amortised O(1) per token; holds O(longest stop string) characters.

    The answer's text is what its tokens add to the prompt's: `Tokenizer.text_stream`. A token is held back while its
    text ends inside a character or could be the beginning of a stop string; of UNFINISHED_LIMIT tokens in a row that
    end inside a character, all go out with what is complete.

    The stop string that ends the answer is the one whose last character comes first; of several with the same last
    character the longest. So the result does not depend on how tokens are pushed. That last character must be of a
    token with index >= min_tokens (a character is of the token that completes it). Skipped special tokens have no
    text. The text is cut before the stop string, or after it with include_stop.

    held_tokens: of the answer, those that a client holds already; held_characters: what they are of the text, as far as
    a message can end with the last of them or before.
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
        held_tokens: int = 0,
    ):
        self._stream = tokenizer.text_stream(prompt_ids, skip_special_tokens)
        self._matcher = _StopMatcher(stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        # The answer's text so far is what was sent, of _offset characters and _num_sent tokens, and then _text.
        self._text = ""
        self._offset = 0
        self._num_sent = 0
        self._num_tokens = 0  # of all the text so far
        self._unfinished = 0  # the last so many tokens end inside a character
        # Where the text may be cut: (characters, tokens) of the answer, ascending, all past what was sent.
        self._borders: deque[tuple[int, int]] = deque()
        self._match: tuple[str, int] | None = None  # stop string, its end in _text
        self._over = False
        self._held_tokens = held_tokens
        self.held_characters = 0

    def push(self, ids: Sequence[int]) -> Delta | None:
        """The next tokens of the answer; None if nothing can be sent yet, and after a stop string or finish."""
        if self._over:
            return None
        for token_id in ids:
            pieces = self._stream.feed(token_id)
            if len(ids) == len(pieces) == 1 and pieces[0].ends and self._holds_nothing:
                return self._straight(pieces[0].text)
            for piece in pieces:
                self._add(piece)
                if self._match:
                    return self._stopped()
        limit = self._offset + len(self._text) - (self._matcher.held if self._matcher else 0)
        border = None
        while self._borders and self._borders[0][0] <= limit:
            border = self._borders.popleft()
        if border is None:
            return None
        end = border[0] - self._offset
        delta = Delta(self._text[:end], border[1] - self._num_sent)
        self._text = self._text[end:]
        self._offset, self._num_sent = border
        return delta

    def finish(self) -> Delta:
        """All that is left: an unfinished character becomes U+FFFD. Empty after a stop string.

        A stop string may still be found here, in text that only now became certain.
        """
        if self._over:
            return Delta("", 0)
        pieces, tail = self._stream.flush()
        for piece in pieces:
            self._add(piece)
            if self._match:
                return self._stopped()
        self._num_tokens -= 1  # the tail is of the last token
        self._add(Piece(tail, True))
        if self._match:
            return self._stopped()
        self._over = True
        return Delta(self._text, self._num_tokens - self._num_sent)

    @property
    def _holds_nothing(self) -> bool:
        return not (self._text or self._matcher or self._num_tokens < self._held_tokens)

    def _straight(self, text: str) -> Delta:
        """As `_add` and a border after it: the usual token's way."""
        self._num_tokens += 1
        self._unfinished = 0
        self._offset += len(text)
        delta = Delta(text, self._num_tokens - self._num_sent)
        self._num_sent = self._num_tokens
        return delta

    def _add(self, piece: Piece) -> None:
        """Appends one token's text, and looks for the stop string in it."""
        self._num_tokens += 1
        before = len(self._text)
        self._text += piece.text
        if self._matcher:
            for i, character in enumerate(piece.text, before + 1):
                stop = self._matcher.step(character)
                if stop is not None and self._num_tokens > self._min_tokens:
                    self._match = stop, i
                    return
        self._unfinished = 0 if piece.ends else self._unfinished + 1
        if self._unfinished in (0, UNFINISHED_LIMIT):
            self._unfinished = 0
            characters = self._offset + len(self._text)
            self._borders.append((characters, self._num_tokens))
            if self._num_tokens <= self._held_tokens:
                self.held_characters = characters

    def _stopped(self) -> Delta:
        assert self._match is not None
        self._over = True
        stop, end = self._match
        text = self._text[: end if self._include_stop else end - len(stop)]
        return Delta(text, self._num_tokens - self._num_sent, stop, self._num_tokens)


class _StopMatcher:
    """Finds the first of several strings in a text given character by character (Aho and Corasick, 1975).

    A state is the longest end of the text that begins a stop string. held: how many of the last characters may be
    the beginning of one that is not complete.
    """

    def __init__(self, stops: Sequence[str]):
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._next: list[dict[str, int]] = [{}]
        self._found: list[str | None] = [None]  # the longest stop string that ends here
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
        """The longest stop string that ends with this character, None if none does."""
        self._state = self._after(self._state, character)
        self.held = self._held[self._state]
        return self._found[self._state]

    def _after(self, state: int, character: str) -> int:
        while character not in self._next[state]:
            if not state:
                return 0
            state = self._fallback[state]
        return self._next[state][character]
