"""Plain-text encoding of client strings: the text of a special token in them is not read as that token.

A tokenizer reads the text of a special token, such as <|im_end|>, as that token. In a client's message it would end the
turn and let the client write the following turns. `PlainText` separates the template's tokens from the client's text:

1. Mark. In the client's strings, each character that could be a part of such a text is replaced by a private code
   point, and the chat template is rendered with the marked strings. It is also rendered with the original strings. The
   results must be equal once the marks are reverted, so that strip, split and JSON in a template work as usual.
2. Rename. Each text of a special token in the marked result comes from the template. It is replaced by a random name of
   the token. The marks are reverted.
3. Encode, with a tokenizer that finds special tokens by these names only.

A prompt without such characters is neither marked nor renamed, and its ids do not change. The request is refused if the
template changes the characters of a special token's text, or if the tokenizer finds another number of special tokens.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from npuserve.service.errors import InvalidField

if TYPE_CHECKING:
    from npuserve.service.text.fast_tokenizer import FastTokenizer

COMMON = frozenset("<>/_-.:,")
"""Characters that templates search for in messages, as in </think>: marked only in the text of a special token."""
MARKS = range(0x100000, 0x10FFFE)
"""Private code points for marks. A code point that the prompt contains is not used."""
NAME_START = "\U000F0000"
NAME_END = "\U000F0001"
MATCHES_NOTHING = r"(?!)"
MAX_ATTEMPTS = 2
"""Attempts before the template is blamed for a difference between its two renderings. A first difference may come from
the current time in the prompt."""


class Prompt(NamedTuple):
    """Text of a prompt.

    text: the rendered chat, or the client's text.
    renamed: the same text with names in place of the template's special tokens; None to encode `text` as it is.
    """

    text: str
    renamed: str | None = None


class Template(Protocol):
    """Renderer of messages to the text of a prompt; see `ChatTemplate`."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str: ...


class PlainText:
    """Encoder that separates the special tokens of a template from their text in a client's strings.

    Safe to use from several threads.

    fast: the tokenizer.
    texts: texts of its special tokens.
    """

    def __init__(self, fast: FastTokenizer, texts: Sequence[str]):
        # Clients cannot write a name: no client receives one, and its random part has 128 bits.
        self._nonce = secrets.token_hex(16)
        self._names = {text: f"{NAME_START}{self._nonce}.{index}{NAME_END}" for index, text in enumerate(texts)}
        self._fast = fast
        self._renamed = fast.renamed(self._names)
        self._text = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or MATCHES_NOTHING)
        self._part = re.compile("|".join(_part_patterns(texts)) or MATCHES_NOTHING)
        self._example = min(texts, key=len, default="")

    def render(
        self, chat: Template, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]], plain_messages: Sequence[bool] | None = None, plain_rest: bool = True,
    ) -> Prompt:
        """Render a chat.

        plain_messages: for each message, whether special tokens in it are plain text; None: in all messages.
        plain_rest: whether special tokens in arguments and tools are plain text.

        Raises InvalidField if the template changes marked characters, and for the reasons of `ChatTemplate.render`.
        """
        plain = [True] * len(messages) if plain_messages is None else plain_messages
        rest = [arguments, tools] if plain_rest else []
        fields = [_client_fields(message) for message, is_plain in zip(messages, plain, strict=True) if is_plain]
        strings = list(_strings([fields, rest]))
        characters = sorted({c for string in strings for c in self._part.findall(string)})
        if self._renamed is None or not (characters or self._fast.normalizes_special_tokens):
            return Prompt(chat.render(messages, arguments, tools))
        for _ in range(MAX_ATTEMPTS):
            text = chat.render(messages, arguments, tools)
            used = set(text).union(*strings)
            free = (private for private in map(chr, MARKS) if private not in used)
            marks = dict(zip(characters, free, strict=False))

            def mark(string: str, marks: Mapping[str, str] = marks) -> str:
                return self._part.sub(lambda match: marks[match.group()], string)

            marked = chat.render(
                [{**message, **_mapped(_client_fields(message), mark, keys=False)} if is_plain else message
                 for message, is_plain in zip(messages, plain, strict=True)],
                _mapped(arguments, mark, keys=False) if plain_rest else arguments,
                _mapped(tools, mark) if plain_rest else tools)
            back = str.maketrans({private: character for character, private in marks.items()})
            if marked.translate(back) == text:
                return Prompt(text, self._text.sub(lambda match: self._names[match.group()], marked).translate(back))
        # The template escapes private code points. Without special tokens in the client's strings that is harmless.
        template_count = len(self._text.findall(marked))
        if self._fast.normalizes_special_tokens or any(map(self._text.search, strings)) or (
                len(self._text.findall(text)) != template_count):
            raise self._refusal("chat", "the model's chat template changes")
        return Prompt(text)

    def encode(self, prompt: Prompt, field: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a rendered chat, or of a client's text, for which `renamed` equals `text`.

        Raises InvalidField, naming `field`, for special tokens that come neither from the template nor from
        add_special_tokens.
        """
        if self._renamed is None or prompt.renamed is None:
            return self._fast.encode(prompt.text, add_special_tokens)
        ids = self._renamed.encode(prompt.renamed, add_special_tokens)
        around = self._renamed.encode("", True) if add_special_tokens else []
        if self._count(ids) != self._count(around) + prompt.renamed.count(self._nonce):
            raise self._refusal(field, "the model's tokenizer cannot read as plain text")
        return ids

    def _count(self, ids: Sequence[int]) -> int:
        return sum(token in self._fast.special_ids for token in ids)

    def _refusal(self, field: str, why: str) -> InvalidField:
        return InvalidField(field, (
            f"{why} the text of special tokens, such as {self._example}, in what the client sends: leave it out, or "
            "set plain_content to false in its message, or parse_special_tokens"))


def _part_patterns(texts: Sequence[str]) -> Iterator[str]:
    """Yield patterns of the characters to mark, so that an unmarked string cannot be a part of one of `texts`.

    For a text with an uncommon character, such as the bar of <|im_end|>, that character is marked everywhere. For
    another text, such as </s>, the first character is marked if the rest of the text, or the end of the string within
    it, follows.
    """
    uncommon = set()
    for text in texts:
        mark = next((c for c in text if not (c.isalnum() or c.isspace() or c in COMMON)), None)
        if mark:
            uncommon.add(mark)
        else:
            rests = [re.escape(text[1:end]) + (r"\Z" if end < len(text) else "") for end in range(len(text), 0, -1)]
            yield f"{re.escape(text[0])}(?={'|'.join(rests)})"
    yield from map(re.escape, sorted(uncommon))


def _client_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a message with free text; its role is one of the template's."""
    return {name: value for name, value in message.items() if name != "role"}


def _strings(value: object) -> Iterator[str]:
    """Yield all strings in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield key
            yield from _strings(part)
    elif isinstance(value, Sequence):
        for part in value:
            yield from _strings(part)


def _mapped(value: Any, change: Callable[[str], str], keys: bool = True) -> Any:
    """Return a JSON value with `change` applied to all strings. keys: also to the keys of the outermost object."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key) if keys else key: _mapped(part, change) for key, part in value.items()}
    if isinstance(value, Sequence):
        return [_mapped(part, change) for part in value]
    return value
