"""Incremental decoders: token ids to text, one id at a time. A token's text is returned once it can no longer change.

`Tokenizer.text_stream` selects the class by the tokenizer's decoder. The joined pieces of all tokens, and the tail,
equal the decode of all ids. `ByteFallbackStream` and `WindowStream` document the exceptions.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

REPLACEMENT = "\ufffd"
MAX_RUN_BYTES = 32
"""Bytes of a run of single-byte tokens that `ByteFallbackStream` holds back."""
WINDOW = 8
"""Tokens before a token that its text may depend on, for `WindowStream`."""
MAX_HELD_TOKENS = 3
"""Tokens that `WindowStream` holds back while their text may be an unfinished character."""


class Piece(NamedTuple):
    """Text that one token completes.

    is_complete: no bytes of this token are left for the next piece.
    later_tokens: number of tokens after this one that the text depends on.
    """

    text: str
    is_complete: bool
    later_tokens: int = 0


class TextStream(Protocol):
    """Interface of the incremental decoders. Each token yields one piece, in order."""

    def feed(self, token_id: int) -> list[Piece]:
        """Return the pieces that became final with this token; its own piece may follow with a later token."""
        ...

    def flush(self) -> tuple[list[Piece], str]:
        """Return the remaining pieces, and the text of an unfinished character at the end."""
        ...


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("npuserve.replace_each", _replace_each)
_utf8 = codecs.getincrementaldecoder("utf-8")


class ByteLevelStream:
    """Incremental decoder of byte-level BPE: tokens are bytes of UTF-8.

    token_bytes: returns the bytes of an id, b"" for no text.
    skipped: ids that have no text here.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], skipped: frozenset[int] = frozenset()):
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decoder = _utf8("replace")
        self._is_inside_character = False  # the decoder holds the first bytes of a character

    def feed(self, token_id: int) -> list[Piece]:
        data = b"" if token_id in self._skipped else self._token_bytes(token_id)
        if not self._is_inside_character:
            try:
                return [Piece(data.decode(), True)]
            except UnicodeDecodeError:
                pass
        piece = _piece(self._decoder, data)
        self._is_inside_character = not piece.is_complete
        return [piece]

    def flush(self) -> tuple[list[Piece], str]:
        return [], self._decoder.decode(b"", True)


def _piece(decoder: codecs.IncrementalDecoder, data: bytes) -> Piece:
    text = decoder.decode(data)
    return Piece(text, not decoder.getstate()[0])


def _is_utf8(run: Sequence[bytes], is_final: bool = True) -> bool:
    try:
        _utf8().decode(b"".join(run), is_final)
    except UnicodeDecodeError:
        return False
    return True


class ByteFallbackStream:
    """Incremental decoder of SentencePiece-style BPE, which writes rare characters as runs of single-byte tokens.

    token_text: returns (text, None) or ("", byte) of an id; ("", None) for no text.
    stripped, strip: at most `strip` leading `stripped` characters of the whole text are left out.

    `tokenizers` decodes a run with invalid UTF-8 to one U+FFFD per byte, valid characters of the run included. So the
    text of a run is held back until the run ends. After MAX_RUN_BYTES the run is decoded byte by byte, and from there
    only invalid bytes become U+FFFD.
    """

    def __init__(self, token_text: Callable[[int], tuple[str, int | None]], stripped: str, strip: int):
        self._token_text = token_text
        self._stripped = stripped
        self._strip = strip
        self._run: list[bytes] = []  # one item for each token that is held back; b"" for a token without text
        self._open: codecs.IncrementalDecoder | None = None  # of a run beyond MAX_RUN_BYTES

    def feed(self, token_id: int) -> list[Piece]:
        text, byte = self._token_text(token_id)
        data = b"" if byte is None else bytes((byte,))
        if not text and (byte is not None or self._run or self._open):
            return self._in_run(data)
        return [*self._end_run(), Piece(self._strip_text(self._tail() + text), True)]

    def flush(self) -> tuple[list[Piece], str]:
        return self._end_run(), self._tail()

    def _in_run(self, data: bytes) -> list[Piece]:
        if self._open:
            return [_piece(self._open, data)]
        self._run.append(data)
        if len(self._run) < MAX_RUN_BYTES:
            return []
        self._open = _utf8("npuserve.replace_each")
        return self._release([_piece(self._open, data) for data in self._run], _is_utf8(self._run, False))

    def _end_run(self) -> list[Piece]:
        if not (is_valid := _is_utf8(self._run)):
            return self._release([Piece(REPLACEMENT * len(data), True) for data in self._run], is_valid)
        decoder = _utf8()
        return self._release([_piece(decoder, data) for data in self._run], is_valid)

    def _release(self, pieces: list[Piece], is_valid: bool) -> list[Piece]:
        """End the part of the run that is held back. Without its last tokens an invalid run may be valid."""
        self._run = []
        last = len(pieces) - 1
        return [Piece(self._strip_text(piece.text), piece.is_complete, 0 if is_valid else last - i)
                for i, piece in enumerate(pieces)]

    def _tail(self) -> str:
        tail = self._open.decode(b"", True) if self._open else ""
        self._open = None
        return tail

    def _strip_text(self, text: str) -> str:
        while self._strip and text:
            if not text.startswith(self._stripped):
                self._strip = 0
            else:
                text = text[len(self._stripped) :]
                self._strip -= 1
        return text


class WindowStream:
    """Incremental decoder for all other decoders: decodes a window of tokens with and without the new token.

    decode: ids to text; a token's text must depend on at most the WINDOW tokens before it, apart from the other
        characters of a run of single-byte tokens.
    has_text: whether an id has text.
    prompt: ids before the first one.

    A text that ends in U+FFFD may be an unfinished character. It is held back for at most MAX_HELD_TOKENS tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], has_text: Callable[[int], bool], prompt: Sequence[int]):
        self._decode = decode
        self._has_text = has_text
        self._window = list(filter(has_text, prompt))[1 - 2 * WINDOW :]
        self._done = self._shorten()
        self._held = 0

    def feed(self, token_id: int) -> list[Piece]:
        if not self._has_text(token_id):
            return [Piece("", not self._held)]
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and self._held < MAX_HELD_TOKENS:
            self._held += 1
            return [Piece("", False)]
        new = text[len(self._done) :]
        self._held = 0
        self._done = text if len(self._window) < 2 * WINDOW else self._shorten()
        return [Piece(new, True)]

    def flush(self) -> tuple[list[Piece], str]:
        return [], self._decode(self._window)[len(self._done) :] if self._held else ""

    def _shorten(self) -> str:
        """Shorten the window to WINDOW tokens, or to a few more, and return its text.

        The window must not begin inside a character: a run of single-byte tokens would be invalid UTF-8 as a whole.
        """
        sizes = (size for size in range(WINDOW, 2 * WINDOW) if self._begins_character(self._window[-size:]))
        del self._window[: -next(sizes, WINDOW)]
        return self._decode(self._window)

    def _begins_character(self, ids: Sequence[int]) -> bool:
        """Return whether the ids begin with a token of text, or with the bytes of a whole character."""
        return any(not self._decode(ids[:size]).startswith(REPLACEMENT) for size in range(1, MAX_HELD_TOKENS + 2))
