"""A tokenizer of the library `tokenizers`, and one in which the special tokens have other texts."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

os.environ["TOKENIZERS_PARALLELISM"] = "false"
# The library's threads would share the texts of a batch, which is one text here. If the system has no thread at the
# first batch, the library never makes its threads again, and each batch panics.


class FastTokenizer:
    """Adapter of a `tokenizers.Tokenizer`, without truncation and padding. Safe to use from several threads.

    decoder: the `decoder` of tokenizer.json; {} if there is none.
    special_ids: ids of the special tokens.
    special_texts: texts of the special tokens, as a text has them before it is normalized. The library's name of such a
        token may be normalized.
    vocabulary_size: every id is below it.
    normalizes_special_tokens: the text is normalized before special tokens are found in it, so that other texts may be
        read as a special token.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocabulary_size: int | None = None):
        """vocabulary_size: None to take the number of tokens, or more if an added token has a larger id."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.decoder: Mapping[str, Any] = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_texts = [token.content for _, token in sorted(added.items()) if token.special]
        if vocabulary_size is None:
            vocabulary_size = max(tokenizer.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.vocabulary_size = vocabulary_size
        self.normalizes_special_tokens = tokenizer.normalizer is not None and any(
            token.special and token.normalized for token in added.values())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The library releases the GIL for batches only. A long text would stop the front end otherwise.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of ids: unknown ids have no text, invalid UTF-8 becomes U+FFFD."""
        if skip_special_tokens:  # the library does not skip a special token with a normalized name
            ids = [i for i in ids if i not in self.special_ids]
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary's name of a token, None for an unknown id."""
        return self._tokenizer.id_to_token(token_id)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its name in the vocabulary, None for an unknown one."""
        return self._tokenizer.token_to_id(token)

    def renamed(self, names: Mapping[str, str]) -> RenamedTokenizer | None:
        """Return a tokenizer that reads names[token] as the special token `token`, and the text of `token` as plain
        text. Return None if this tokenizer finds no special tokens in texts."""
        return None if self._tokenizer.encode_special_tokens else RenamedTokenizer(self._tokenizer, names)


class RenamedTokenizer(FastTokenizer):
    """Tokenizer that shares the model and the ids of another one, but finds special tokens by other texts.

    names: text of each special token of the other tokenizer to its text here.
    """

    def __init__(self, other: tokenizers.Tokenizer, names: Mapping[str, str]):
        added = other.get_added_tokens_decoder()
        texts = {i: names[token.content] if token.special else token.content for i, token in sorted(added.items())}
        tokens: list[str | tokenizers.AddedToken] = [
            tokenizers.AddedToken(
                text, single_word=added[i].single_word, lstrip=added[i].lstrip, rstrip=added[i].rstrip,
                normalized=added[i].normalized, special=False)
            for i, text in texts.items()]
        own = _copy(other, tokens)
        if _has_ambiguous_ids(own, other, texts):
            # The library numbers new tokens from the size of the vocabulary on. That may be the id of another token: of
            # the vocabulary, if its ids have gaps, or of an added token, which the post-processor adds by its id.
            # Unused tokens raise the first number.
            size, ids = own.get_vocab_size(with_added_tokens=False), other.get_vocab(with_added_tokens=True).values()
            own = _copy(other, [secrets.token_hex(16) for _ in range(size, max(ids) + 1)] + tokens)
        super().__init__(own)
        self._original_ids = {own.token_to_id(text): i for i, text in texts.items()}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [self._original_ids.get(i, i) for i in super().encode(text, add_special_tokens)]


def _copy(other: tokenizers.Tokenizer, tokens: Sequence[str | tokenizers.AddedToken]) -> tokenizers.Tokenizer:
    """Return a tokenizer with the model of another one, but with `tokens` as its added tokens."""
    own = tokenizers.Tokenizer(other.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(other, part)) is not None:
            setattr(own, part, value)
    own.add_tokens(list(tokens))
    return own


def _has_ambiguous_ids(
    tokenizer: tokenizers.Tokenizer, other: tokenizers.Tokenizer, texts: Mapping[int, str]
) -> bool:
    """Return whether the tokenizer gives one of the added tokens `texts` the id of another token of `other`."""
    own = ((i, tokenizer.token_to_id(text)) for i, text in texts.items())
    return any(found not in (None, i) and other.id_to_token(found) is not None for i, found in own)
