"""The prompt of a request: text, token ids or a chat, to token ids within the context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from npuserve.service.errors import InvalidField, NoTokenizer, TokenizerLimit, Violations
from npuserve.service.ipc.messages import ModelInfo
from npuserve.service.requests.chat import chat_prompt
from npuserve.service.requests.fields import check_token_ids
from npuserve.service.text.plain_text import Prompt
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import tokenize_pb2

if TYPE_CHECKING:
    from npuserve.service.text.tokenizer import Tokenizer

MAX_PIECE_CHARACTERS = 64 << 10
"""Size of the pieces in which a long text is counted before it is tokenized as a whole, since a tokenizer needs some
150 bytes of memory per token. A text is long if it has more characters than this and than the context has tokens."""
MAX_EXCESS_PIECE_TOKENS = 256
"""Generous bound of the tokens that a piece may have in excess of its share of the whole text's tokens."""


def prompt_token_ids(
    message: pb.GenerateRequest, tokenizer: Tokenizer | None, info: ModelInfo, plain_content: bool = True
) -> list[int]:
    """Return the prompt's ids: at least one, and fewer than the context. Slow for long texts.

    plain_content: see `prompt_text`.

    Raises InvalidField, NoTokenizer, NoChatTemplate.
    """
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidField("prompt", "one of text, token_ids and chat is needed")
    if kind == "token_ids":
        ids = _given_ids(message, info)
    else:
        prompt = prompt_text(message, tokenizer, plain_content, info.max_model_len)
        check_length(prompt.text, kind, tokenizer, info.max_model_len)
        # An empty text is refused even if the tokenizer adds a beginning-of-text token.
        ids = encode(prompt, kind, tokenizer, kind == "text") if prompt.text or tokenizer is None else []
    if not ids:
        raise InvalidField(kind, "must be at least one token, got an empty prompt")
    if len(ids) >= info.max_model_len:
        raise InvalidField(kind, too_many_tokens(len(ids), info.max_model_len))
    if kind != "token_ids":
        check_made_ids(kind, ids, info)
    return ids


def check_made_ids(field: str, ids: Sequence[int], info: ModelInfo) -> None:
    """Raise InvalidField, naming `field`, if the tokenizer has made ids that the model does not have."""
    if max(ids) >= info.vocabulary_size:
        raise InvalidField(field, (
            f"the tokenizer makes token id {max(ids)} of it, "
            f"and the model's ids are in [0, {info.vocabulary_size - 1}]"))


def _given_ids(message: pb.GenerateRequest, info: ModelInfo) -> list[int]:
    """Return the client's ids, checked unless there are too many."""
    if message.HasField("parse_special_tokens"):
        raise InvalidField("parse_special_tokens", "is for text and chat; token_ids has no text to parse")
    ids = list(message.token_ids.ids)
    if len(ids) < info.max_model_len:
        bad = Violations()
        check_token_ids("token_ids.ids", ids, info.vocabulary_size, bad)
        bad.check()
    return ids


def prompt_text(
    message: pb.GenerateRequest | tokenize_pb2.TokenizeRequest,
    tokenizer: Tokenizer | None,
    plain_content: bool,
    max_model_len: int,
) -> Prompt:
    """Return the text of a prompt that is a text or a chat.

    plain_content: whether special tokens in a chat are plain text by default: for a request without
        `parse_special_tokens`, and in it for a message without `plain_content`. In a text they are tokens by default.
    """
    if message.WhichOneof("prompt") == "chat":
        plain = not message.parse_special_tokens if message.HasField("parse_special_tokens") else plain_content
        return chat_prompt(message.chat, tokenizer, plain, max_model_len)
    parse = message.parse_special_tokens if message.HasField("parse_special_tokens") else True
    return Prompt(message.text, None if parse else message.text)


def encode(prompt: Prompt, field: str, tokenizer: Tokenizer | None, add_special_tokens: bool) -> list[int]:
    """Return the ids of a prompt's text.

    field: the prompt's field, for error messages.
    add_special_tokens: add the beginning-of-text token and the like, if the tokenizer has them.
    """
    if tokenizer is None:
        raise NoTokenizer(f"{field}: the served model has no tokenizer; send token_ids")
    try:
        if prompt.renamed is None:
            return tokenizer.encode(prompt.text, add_special_tokens=add_special_tokens)
        return tokenizer.plain_text.encode(prompt, field, add_special_tokens)
    except TokenizerLimit as error:
        raise InvalidField(field, str(error)) from None


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
    if tokenizer is None or len(text) <= max_model_len:
        return
    _check_bytes(text, field, tokenizer, max_model_len)
    if len(text) <= MAX_PIECE_CHARACTERS:
        return
    count = 0
    for start in range(0, len(text), MAX_PIECE_CHARACTERS):
        piece = text[start : start + MAX_PIECE_CHARACTERS]
        count += len(encode(Prompt(piece, None), field, tokenizer, False)) - MAX_EXCESS_PIECE_TOKENS
        if count > max_model_len:
            raise InvalidField(field, (
                f"the first {start + MAX_PIECE_CHARACTERS} characters alone have more tokens than max_model_len, "
                f"{max_model_len}"))
