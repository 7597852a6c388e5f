"""Client text in a prompt, read as the characters that it has.

A tokenizer reads the text of a special token, such as <|im_end|>, as that token. In a client's message it would end the
turn and let the client write the following ones. `PlainText` keeps the two apart:

1. Mark. Characters of the client's strings that could be a part of such a text are replaced by private code points, one
   by one, and the chat template is rendered with them. It also renders the unmarked strings: both results must be equal
   once the marks are taken back. So strip, split and JSON in a template stay as they are.
2. Rename. What is the text of a special token in the marked result is the template's own. It is replaced by a random
   name of the token. The marks are taken back.
3. Encode by a tokenizer that knows the special tokens by these names alone.

Strings without such characters are neither marked nor renamed, so their prompts are encoded as before. Where a template
does not keep the characters of a special token's text, or the tokenizer finds another number of special tokens, the
request is refused.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from npuserve.service.errors import InvalidField

if TYPE_CHECKING:
    from npuserve.service.text.template_process import TemplateProcess
    from npuserve.service.text.tokenizer import Backend

COMMON = frozenset("<>/_-.:,")
"""Characters that templates search messages for, as in </think>: marked only within the text of a special token."""
MARKS = range(0x100000, 0x10FFFE)
"""Code points for private use, of which those are taken that do not occur in the prompt."""
START, END = "\U000F0000", "\U000F0001"
NOTHING = r"(?!)"
TRIES = 2
"""Renderings before a difference is taken for the template's, and not for a change of the time that it shows."""


class Prompt(NamedTuple):
    """Rendered chat. text: as the template wrote it. renamed: the same with names for its special tokens; None where
    `text` itself is to be encoded."""

    text: str
    renamed: str | None = None


class PlainText:
    """Tells the special tokens of a template from their text in a client's strings. Safe to use from several threads.

    backend: of the tokenizer.
    texts: of its special tokens.
    """

    def __init__(self, backend: Backend, texts: Sequence[str]):
        # Clients cannot write a name: they never see one, and its random part has 128 bits.
        self._nonce = secrets.token_hex(16)
        self._names = {text: f"{START}{self._nonce}.{index}{END}" for index, text in enumerate(texts)}
        self._plain = backend
        self._renamed = backend.renamed(self._names)
        self._text = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or NOTHING)
        self._part = re.compile("|".join(_parts(texts)) or NOTHING)
        self._example = min(texts, key=len, default="")

    def render(
        self, chat: TemplateProcess, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
    ) -> Prompt:
        """Render a chat. Raise InvalidField if the template does not keep the characters that must be marked, and for
        what `ChatTemplate.render` refuses."""
        strings = list(_strings([[_client_fields(message) for message in messages], arguments, tools]))
        characters = sorted({c for string in strings for c in self._part.findall(string)})
        if self._renamed is None or not (characters or self._plain.normalizes_special_tokens):
            return Prompt(chat.render(messages, arguments, tools))
        for _ in range(TRIES):
            text = chat.render(messages, arguments, tools)
            used = set(text).union(*strings)
            free = (private for private in map(chr, MARKS) if private not in used)
            marks = dict(zip(characters, free, strict=False))

            def mark(string: str, marks: Mapping[str, str] = marks) -> str:
                return self._part.sub(lambda match: marks[match.group()], string)

            marked = chat.render(
                [{**message, **_mapped(_client_fields(message), mark, keys=False)} for message in messages],
                _mapped(arguments, mark, keys=False), _mapped(tools, mark))
            back = str.maketrans({private: character for character, private in marks.items()})
            if marked.translate(back) == text:
                return Prompt(text, self._text.sub(lambda match: self._names[match.group()], marked).translate(back))
        # The template shows private code points otherwise. That is of no account where there is nothing to tell apart.
        own = len(self._text.findall(marked))
        if self._plain.normalizes_special_tokens or any(map(self._text.search, strings)) or (
                len(self._text.findall(text)) != own):
            raise self._refusal("chat", "the model's chat template changes")
        return Prompt(text)

    def encode(self, prompt: Prompt, field: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a rendered chat, or of a text that is the client's as a whole (`renamed` equals it).

        Raise InvalidField if there are special tokens for which the template, and add_special_tokens, have no reason.
        """
        if self._renamed is None or prompt.renamed is None:
            return self._plain.encode(prompt.text, add_special_tokens)
        ids = self._renamed.encode(prompt.renamed, add_special_tokens)
        around = self._renamed.encode("", True) if add_special_tokens else []
        if self._count(ids) != self._count(around) + prompt.renamed.count(self._nonce):
            raise self._refusal(field, "the model's tokenizer cannot read as plain text")
        return ids

    def _count(self, ids: Sequence[int]) -> int:
        return sum(token in self._plain.special_ids for token in ids)

    def _refusal(self, field: str, why: str) -> InvalidField:
        return InvalidField(field, (
            f"{why} the text of special tokens, such as {self._example}, in what the client sends: leave it out, or "
            "set parse_special_tokens"))


def _parts(texts: Sequence[str]) -> Iterator[str]:
    """Yield patterns of single characters without which a client's string cannot be a part of one of `texts`.

    A text with an uncommon character, such as the bar of <|im_end|>, has that one marked wherever it is. Of any other
    text, such as </s>, the first character is marked if the rest follows, as far as the string goes.
    """
    uncommon = set()
    for text in texts:
        found = next((c for c in text if not (c.isalnum() or c.isspace() or c in COMMON)), None)
        if found:
            uncommon.add(found)
        else:
            rests = [re.escape(text[1:end]) + (r"\Z" if end < len(text) else "") for end in range(len(text), 0, -1)]
            yield f"{re.escape(text[0])}(?={'|'.join(rests)})"
    yield from map(re.escape, sorted(uncommon))


def _client_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a message whose strings are the client's; a role is one that the template knows."""
    return {name: value for name, value in message.items() if name != "role"}


def _strings(value: object) -> Iterator[str]:
    """Yield all strings in a value as of JSON, keys included."""
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
    """Return a value as of JSON with all its strings changed. keys: those of the outermost object too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key) if keys else key: _mapped(part, change) for key, part in value.items()}
    if isinstance(value, Sequence):
        return [_mapped(part, change) for part in value]
    return value
