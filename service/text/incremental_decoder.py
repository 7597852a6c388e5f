"""Token ids to text, one id at a time: what each token adds to the text, as soon as it is certain.

`Tokenizer.text_stream` picks the class by the tokenizer's decoder. The pieces of all tokens, and the tail, joined are
what decode gives for all of them; the exceptions are at `ByteFallbackStream` and `WindowStream`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

REPLACEMENT = "\ufffd"
RUN_LIMIT = 32
WINDOW = 8


class Piece(NamedTuple):
    """What one token completes of the text. ends: the text so far holds all that this token says."""

    text: str
    ends: bool


class TextStream(Protocol):
    """feed: the pieces that have become certain, of one token each, in order. A token's piece may come later than the
    token, never before. flush: those still missing, and the text of an unfinished character at the very end."""

    def feed(self, token_id: int) -> list[Piece]: ...

    def flush(self) -> tuple[list[Piece], str]: ...


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("npuserve.replace_each", _replace_each)
_utf8 = codecs.getincrementaldecoder("utf-8")


class ByteLevelStream:
    """For byte-level BPE: every token is bytes, and the text is their UTF-8. token_bytes: b"" for no text."""

    def __init__(self, token_bytes: Callable[[int], bytes]):
        self._token_bytes = token_bytes
        self._decoder = _utf8("replace")
        self._inside = False  # a character, whose first bytes the decoder has

    def feed(self, token_id: int) -> list[Piece]:
        data = self._token_bytes(token_id)
        if not self._inside:
            try:
                return [Piece(data.decode(), True)]
            except UnicodeDecodeError:
                pass
        piece = _piece(self._decoder, data)
        self._inside = not piece.ends
        return [piece]

    def flush(self) -> tuple[list[Piece], str]:
        return [], self._decoder.decode(b"", True)


def _piece(decoder: codecs.IncrementalDecoder, data: bytes) -> Piece:
    text = decoder.decode(data)
    return Piece(text, not decoder.getstate()[0])


class ByteFallbackStream:
    """For SentencePiece-style BPE, whose rare characters are runs of single-byte tokens.

    `tokenizers` turns a run that is no UTF-8 into one U+FFFD per byte, the run's valid characters included. So a run
    is certain when it has ended, and is held until then; after RUN_LIMIT bytes it is taken as it stands, and from there
    on only its invalid bytes become U+FFFD. token_text: (text, None) or ("", byte); ("", None) for no text.
    strip: how many leading `stripped` characters of the whole text to leave out.
    """

    def __init__(self, token_text: Callable[[int], tuple[str, int | None]], stripped: str = " ", strip: int = 0):
        self._token_text = token_text
        self._stripped, self._strip = stripped, strip
        self._run: list[bytes] = []  # of the held tokens; b"" for one without text
        self._open: codecs.IncrementalDecoder | None = None  # of a run that is taken as it stands

    def feed(self, token_id: int) -> list[Piece]:
        text, byte = self._token_text(token_id)
        data = b"" if byte is None else bytes((byte,))
        if not text and (byte is not None or self._run or self._open):
            return self._in_run(data)
        return [*self._end_run(), self._stripped_piece(self._tail() + text)]

    def flush(self) -> tuple[list[Piece], str]:
        return self._end_run(), self._tail()

    def _in_run(self, data: bytes) -> list[Piece]:
        if self._open:
            return [_piece(self._open, data)]
        self._run.append(data)
        if len(self._run) < RUN_LIMIT:
            return []
        self._open = _utf8("npuserve.replace_each")
        return self._settle([_piece(self._open, data) for data in self._run])

    def _end_run(self) -> list[Piece]:
        try:
            b"".join(self._run).decode()
        except UnicodeDecodeError:
            return self._settle([Piece(REPLACEMENT * len(data), True) for data in self._run])
        decoder = _utf8()
        return self._settle([_piece(decoder, data) for data in self._run])

    def _settle(self, pieces: list[Piece]) -> list[Piece]:
        self._run = []
        return [self._stripped_piece(*piece) for piece in pieces]

    def _tail(self) -> str:
        tail = self._open.decode(b"", True) if self._open else ""
        self._open = None
        return tail

    def _stripped_piece(self, text: str, ends: bool = True) -> Piece:
        while self._strip and text:
            if not text.startswith(self._stripped):
                self._strip = 0
            else:
                text = text[len(self._stripped) :]
                self._strip -= 1
        return Piece(text, ends)


class WindowStream:
    """For any other decoder: the text that a token adds to that of the few tokens before it.

    decode: ids to text, where a token's text depends at most on the WINDOW tokens before it. skipped: tokens without
    text. prompt: what stands before the first. A text that ends in U+FFFD may be unfinished, and is held for at most
    three tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], skipped: frozenset[int], prompt: Sequence[int] = ()):
        self._decode, self._skipped = decode, skipped
        self._window = [i for i in prompt if i not in skipped][-WINDOW:]
        self._done = decode(self._window)
        self._held = 0

    def feed(self, token_id: int) -> list[Piece]:
        if token_id in self._skipped:
            return [Piece("", not self._held)]
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and self._held < 3:
            self._held += 1
            return [Piece("", False)]
        new = text[len(self._done) :]
        self._held = 0
        if len(self._window) >= 2 * WINDOW:
            del self._window[:-WINDOW]
            text = self._decode(self._window)
        self._done = text
        return [Piece(new, True)]

    def flush(self) -> tuple[list[Piece], str]:
        return [], self._decode(self._window)[len(self._done) :] if self._held else ""
