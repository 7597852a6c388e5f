"""Cheap checks of a prompt's size, before it is tokenized."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npuserve.service.errors import InvalidField
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import tokenize_pb2

if TYPE_CHECKING:
    from npuserve.service.text.tokenizer import Tokenizer

MAX_PIECE_CHARACTERS = 64 << 10
"""Size of the pieces in which a long text is counted before it is tokenized as a whole, since a tokenizer needs some
150 bytes of memory per token. A text is long if it has more characters than this and than the context has tokens."""
MAX_EXCESS_PIECE_TOKENS = 256
"""Generous bound of the tokens that a piece may have in excess of its share of the whole text's tokens."""


def check_prompt_size(
    message: pb.GenerateRequest | tokenize_pb2.TokenizeRequest, tokenizer: Tokenizer | None, max_model_len: int
) -> None:
    """Raise InvalidField for a text or a list of ids whose size alone shows that it exceeds the context."""
    kind = message.WhichOneof("prompt")
    if kind == "text":
        _check_bytes(message.text, kind, tokenizer, max_model_len)
    elif isinstance(message, pb.GenerateRequest) and (count := len(message.token_ids.ids)) >= max_model_len:
        raise InvalidField("token_ids", too_many_tokens(count, max_model_len))


def too_many_tokens(count: int, max_model_len: int) -> str:
    """Return the error message for a prompt of `count` tokens."""
    return (f"{count} tokens of prompt are too many; max_model_len {max_model_len} leaves room for "
            f"at most {max_model_len - 1}")


def _check_bytes(text: str, field: str, tokenizer: Tokenizer | None, max_model_len: int) -> None:
    if tokenizer is None or len(text) <= max_model_len:
        return
    if (size := len(text.encode(errors="replace"))) > max_model_len * tokenizer.max_token_bytes:
        raise InvalidField(field, (
            f"{size} bytes of text cannot fit; max_model_len is {max_model_len}, and a token has at most "
            f"{tokenizer.max_token_bytes} bytes"))


def check_length(text: str, field: str, tokenizer: Tokenizer | None, max_model_len: int) -> None:
    """Raise InvalidField for a text that certainly has more than max_model_len tokens, before it is tokenized.

    A text of at most max_model_len tokens always passes. A text that passes may have more tokens, but not a multiple.
    """
    _check_bytes(text, field, tokenizer, max_model_len)
    if tokenizer is None or len(text) <= max(max_model_len, MAX_PIECE_CHARACTERS):
        return
    count = 0
    for at in range(0, len(text), MAX_PIECE_CHARACTERS):
        piece = text[at : at + MAX_PIECE_CHARACTERS]
        count += len(tokenizer.encode(piece, add_special_tokens=False)) - MAX_EXCESS_PIECE_TOKENS
        if count > max_model_len:
            raise InvalidField(field, (
                f"the first {at + MAX_PIECE_CHARACTERS} characters alone have more tokens than max_model_len, "
                f"{max_model_len}"))
