"""A model's tokenizer: text to token ids and back, as transformers' AutoTokenizer does it, without transformers."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from npuserve.service.text.answer_format import TAGS
from npuserve.service.text.byte_bpe import token_bytes
from npuserve.service.text.fast_tokenizer import FastTokenizer
from npuserve.service.text.incremental_decoder import ByteFallbackStream, ByteLevelStream, TextStream, WindowStream
from npuserve.service.text.plain_text import PlainText

if TYPE_CHECKING:
    from npuserve.service.text.template_process import TemplateProcess

MIN_LONGEST_BYTES = 256
"""Lower bound of `max_token_bytes` for a vocabulary that is not byte-level: its unknown token may replace a whole
word."""
MAX_FAST_DECODE_IDS = 4096
"""Number of ids up to which the library `tokenizers` decodes. It holds the GIL, and would delay other threads by
milliseconds for more ids."""


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads.

    vocabulary_size: every id is below it. The model's vocabulary size may be larger, for padding.
    special_ids: ids that skip_special_tokens leaves out.
    named_tokens: bos_token, eos_token and so on, as far as the folder names them.
    eos_id: id of the eos_token; None if there is none.
    chat: the chat template; None if the folder has none.
    max_token_bytes: bytes of text of the longest token.
    is_isolated: whether `encode` blocks on another process, see `FastTokenizer`.
    """

    def __init__(
        self, fast: FastTokenizer, named_tokens: Mapping[str, str] | None = None, chat: TemplateProcess | None = None
    ):
        self._fast = fast
        self.named_tokens = dict(named_tokens or {})
        self.chat = chat
        self.vocabulary_size = fast.vocabulary_size
        self.special_ids = fast.special_ids
        self.eos_id = self.id_of(self.named_tokens.get("eos_token", ""))
        self._is_byte_level = fast.decoder.get("type") == "ByteLevel"
        self._byte_fallback = _byte_fallback(fast.decoder)
        self.is_isolated = fast.is_isolated
        self.max_token_bytes = self._longest_token_bytes()
        self._token_bytes = functools.lru_cache(maxsize=1 << 18)(self._uncached_token_bytes)
        self._token_text = functools.lru_cache(maxsize=1 << 18)(self._uncached_token_text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        add_special_tokens: add the beginning-of-text token and the like, if the tokenizer has them. Pass False for a
            rendered chat, which contains its own.

        The text of an added or special token is read as that token, as in vLLM and transformers. `plain_text` reads it
        as plain text in the strings of clients.
        """
        return self._fast.encode(text, add_special_tokens)

    @functools.cached_property
    def special_ids_around(self) -> tuple[list[int], list[int]]:
        """Ids that `encode` adds before and after a text."""
        text = "a"
        bare = self.encode(text, add_special_tokens=False)
        ids = self.encode(text)
        begin = next((i for i in range(len(ids)) if ids[i : i + len(bare)] == bare), 0)
        return ids[:begin], ids[begin + len(bare) :]

    @functools.cached_property
    def plain_text(self) -> PlainText:
        """Encoder that reads the text of special tokens in a client's strings as plain text."""
        return PlainText(self._fast, self._fast.special_texts)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids: unknown ids have no text, invalid UTF-8 becomes U+FFFD."""
        if len(ids) <= MAX_FAST_DECODE_IDS or not self._is_byte_level:
            return self._fast.decode(ids, skip_special_tokens)
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        return b"".join(self._token_bytes(i) for i in ids if i not in skipped).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        """Return a token's text inside a longer text: with its leading space, U+FFFD for a part of a character."""
        return self._token_text(token_id)

    def _uncached_token_text(self, token_id: int) -> str:
        stream = self.text_stream([token_id], skip_special_tokens=False)
        pieces = stream.feed(token_id)
        rest, tail = stream.flush()
        return "".join(piece.text for piece in [*pieces, *rest]) + tail

    @functools.cached_property
    def tag_ids(self) -> frozenset[int]:
        """Ids of the tags of reasoning and tool calls, as far as each is one token."""
        return frozenset(i for i in map(self.id_of, TAGS) if i is not None)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its name in the vocabulary, None for an unknown one."""
        return self._fast.id_of(token)

    def name_of(self, token_id: int) -> str | None:
        """Return the vocabulary's name of a token, None for an unknown id."""
        return self._fast.token(token_id)

    def token_bytes(self) -> list[bytes] | None:
        """Return the bytes that each id below `vocabulary_size` adds inside a text, b"" for none.

        None if the tokens of this kind of tokenizer have no bytes of their own.
        """
        if self._is_byte_level:
            return [self._uncached_token_bytes(i) for i in range(self.vocabulary_size)]
        token_text = self._fallback_text(frozenset())
        if token_text is None:
            return None
        contents = map(token_text, range(self.vocabulary_size))
        return [text.encode(errors="replace") if byte is None else bytes([byte]) for text, byte in contents]

    def text_stream(
        self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True, kept_ids: frozenset[int] = frozenset()
    ) -> TextStream:
        """Return an incremental decoder of the ids that follow `prompt_ids`.

        kept_ids: special tokens that are not skipped.

        For byte-level BPE the text is the decode of these ids. A SentencePiece decoder drops the first space of a text.
        There the text is what the ids add to the prompt's, so its first space is kept if the prompt has text. Bytes at
        the end of the prompt and at the beginning of the answer never form one character.
        """
        skipped = self.special_ids - kept_ids if skip_special_tokens else frozenset[int]()
        if self._is_byte_level:
            return ByteLevelStream(self._token_bytes, skipped)
        token_text = self._fallback_text(skipped)
        if token_text is None or self._byte_fallback is None:
            return WindowStream(
                lambda ids: self._fast.decode(ids, False),
                lambda i: i not in skipped and self._fast.token(i) is not None, prompt_ids)
        _, stripped, strip = self._byte_fallback
        prompt_has_text = any(token_text(i) != ("", None) for i in prompt_ids)
        return ByteFallbackStream(token_text, stripped, 0 if prompt_has_text else strip)

    def _fallback_text(self, skipped: frozenset[int]) -> Callable[[int], tuple[str, int | None]] | None:
        """Return the function from id to (text, None) or ("", byte) of SentencePiece-style BPE, None for other ones."""
        if self._byte_fallback is None:
            return None
        replace = self._byte_fallback[0]

        def token_text(token_id: int) -> tuple[str, int | None]:
            token = None if token_id in skipped else self._fast.token(token_id)
            if token is None:
                return "", None
            if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
                return "", int(token[3:5], 16)
            return token.replace(*replace), None

        return token_text

    def _longest_token_bytes(self) -> int:
        """Return the bytes of text of the longest token, at least MIN_LONGEST_BYTES if not byte-level."""
        tokens = filter(None, map(self._fast.token, range(self.vocabulary_size)))
        if self._is_byte_level:
            return max((len(token_bytes(token)) for token in tokens), default=1)
        return max(MIN_LONGEST_BYTES, *(len(token.encode(errors="replace")) for token in tokens))

    def _uncached_token_bytes(self, token_id: int) -> bytes:
        token = self._fast.token(token_id)
        return b"" if token is None else token_bytes(token)


def _byte_fallback(decoder: Mapping[str, Any]) -> tuple[tuple[str, str], str, int] | None:
    """Return the parameters of a decoder [Replace,] ByteFallback, Fuse[, Strip at the start]; None for another one.

    They are the (old, new) strings of the replacement, the stripped character, and the number of stripped characters.
    """
    steps = list(decoder.get("decoders", [])) if decoder.get("type") == "Sequence" else []
    replace = ("\0", "\0")
    stripped = " "
    strip = 0
    if steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        replace = steps[0]["pattern"]["String"], steps.pop(0)["content"]
    if steps and steps[-1]["type"] == "Strip" and not steps[-1]["stop"]:
        last = steps.pop()
        stripped = last["content"]
        strip = last["start"]
    if [step["type"] for step in steps] != ["ByteFallback", "Fuse"]:
        return None
    return replace, stripped, strip
