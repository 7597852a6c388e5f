"""Builder of grammars for the library llguidance, in its variant of Lark's syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from npuserve.service.structured_output.translation import schema
from npuserve.service.structured_output.translation.analysis import has_exclusive_choices
from npuserve.service.structured_output.translation.errors import ConstraintError
from npuserve.service.structured_output.translation.pattern import PatternError, translate

WHITESPACE = r"[ ]|\r?\n(?:[ ]{0,40}|\t{0,10})"
"""Whitespace between two elements of JSON text: none, one space, or a new line with its indentation.

Compact text and text that is indented by 2 spaces to a depth of 20 are allowed. It is bounded, since unbounded
whitespace lets a model write blanks until its limit of tokens.
"""
ESCAPES = 'nrbtf\\"'
"""Escapes in JSON strings. Each character is written in one form only, so that names can be compared. Control
characters without an escape of one letter cannot be written."""
PREAMBLE = '%llguidance {"no_forcing": true}\n'
"""Allow every tokenization of a forced text, so that a mask depends on the text alone."""
MAX_EXCLUDES = 64
MAX_GRAMMARS = 256


class GrammarBuilder:
    """Grammar of rules, with subgrammars of JSON schemas and of grammars that clients wrote.

    special: text to id of the special tokens. Their ids are not text, and so they are not part of a terminal.
    end_ids: tokens that end an answer, and so are not part of it; their text is spelled out.
    """

    def __init__(self, special: Mapping[str, int] | None = None, end_ids: Collection[int] = ()):
        self.end_ids = end_ids
        self._special = {text: i for text, i in (special or {}).items() if text and i not in end_ids}
        self._split = re.compile("(" + "|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) + ")"
                                 if self._special else r"(?!)()")
        self._lines: list[str] = []
        self._grammars: list[dict[str, Any]] = []
        self._rules = 0

    def text(self, start: str) -> str:
        """Return the grammar as the library reads it. start: expression of the whole answer."""
        main = PREAMBLE + "\n".join([f"start: {start}", *self._lines]) + "\n"
        return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *self._grammars]}, ensure_ascii=False)

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule and return its name."""
        self._rules += 1
        self._lines.append(f"r{self._rules}{attributes}: {body}")
        return f"r{self._rules}"

    def terminal(self, body: str) -> str:
        """Add a terminal and return its name."""
        self._rules += 1
        self._lines.append(f"T{self._rules}: {body}")
        return f"T{self._rules}"

    def terminals(self, define: Callable[[str], list[str]]) -> str:
        """Add terminals and return the name of the first one. define: function of the prefix of their names."""
        self._rules += 1
        self._lines += define(f"G{self._rules}_")
        return f"G{self._rules}_0"

    def json_schema(self, value: dict[str, Any], whitespace: str = WHITESPACE) -> str:
        """Add a translated schema and return an expression for it."""
        options = {"whitespace_pattern": whitespace, "whitespace_flexible": True, "lenient": False,
                   "coerce_one_of": has_exclusive_choices(value), "json_allowed_escapes": ESCAPES}
        return self._subgrammar({"json_schema": {**value, "x-guidance": options}})

    def json_schema_text(self, text: str) -> str:
        """Add a JSON schema as a client wrote it and return an expression for it. Raise ConstraintError."""
        return self.json_schema(schema.translate(text))

    def lark(self, text: str) -> str:
        """Add a grammar in Lark's syntax and return an expression for it."""
        return self._subgrammar({"lark_grammar": text})

    def _subgrammar(self, grammar: dict[str, Any]) -> str:
        if len(self._grammars) >= MAX_GRAMMARS:
            raise ConstraintError(f"must contain at most {MAX_GRAMMARS} schemas and grammars")
        self._grammars.append({"name": f"g{len(self._grammars)}", **grammar})
        return f"@g{len(self._grammars) - 1}"

    def literal(self, text: str) -> str:
        """Return an expression of a fixed text. A special token in it may be that token, or be spelled out."""
        parts = []
        for part in self._split.split(text):
            if part in self._special:
                parts.append(f"( <[{self._special[part]}]> | {quote(part)} )")
            elif part:
                parts.append(quote(part))
        return " ".join(parts) or '""'

    def special_id(self, text: str) -> int | None:
        """Return the id of a special token; None if no special token has this text."""
        return self._special.get(text)

    def has_special(self, text: str) -> bool:
        """Return whether a special token is a part of a text."""
        return self._split.search(text) is not None

    def free_text(self, excluded: Collection[str] = (), max_chars: int | None = None) -> str:
        """Return an expression of terminals for any text without the excluded ones."""
        return self.terminal(_any_text(max_chars) + _without(excluded, "*"))

    def text_until(
        self, end: str, others: Collection[str] = (), max_chars: int | None = None, body: str | None = None
    ) -> str:
        """Return an expression for any text and its end. Neither `end` nor one of `others` is complete earlier.

        max_chars: of the text before the end.
        body: terminal of the text before the end, instead of any text.
        """
        whole = self.terminal(f"{_any_text(max_chars) if body is None else body} {quote(end)}")
        return self.rule(self.terminal(whole + _without([end, *others], "+")), "[lazy]")


def _any_text(max_chars: int | None) -> str:
    return "/(?s:.)*/" if max_chars is None else f"/(?s:.){{0,{max_chars}}}/"


def _without(excluded: Collection[str], count: str) -> str:
    """Return the suffix of a terminal without the excluded texts; count: "*", or "+" if they may be at its end."""
    if len(excluded) > MAX_EXCLUDES:
        raise ConstraintError(f"must exclude at most {MAX_EXCLUDES} texts")
    texts = "|".join(map(regex_literal, excluded))
    return f" & ~/(?s:.*)(?:{texts})(?s:.){count}/" if excluded else ""


def quote(text: str) -> str:
    """Return a text as a terminal."""
    return f"/{regex_literal(text)}/" if text else '""'


def regex_literal(text: str) -> str:
    """Return the regular expression of a fixed text."""
    return "".join(c if c.isascii() and c.isalnum() else rf"\x{{{ord(c):x}}}" for c in text)


def regex(pattern: str, field: str) -> str:
    """Return a regular expression as a terminal. Raise ConstraintError that begins with `field`."""
    try:
        body = translate(pattern, quoted=False)
    except PatternError as error:
        raise ConstraintError(f"{field}: {error}") from error
    return f"/{body}/" if body else '""'
