"""Incremental scanner of one tool call: the JSON object between <tool_call> and </tool_call>."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from npuserve.service.text.answer_format import CALL_BEGIN, CALL_END

OPEN = ""
MALFORMED = "malformed"
_SPACE = " \t\r\n"
_IN_STRING = re.compile(r'[^"\\\n]+')
_OUTSIDE = re.compile(r'[^"{}\[\]<\n]+')
_ENDS = {CALL_BEGIN: CALL_BEGIN, CALL_END: CALL_END, "\n" + CALL_BEGIN: CALL_BEGIN, "\n" + CALL_END: CALL_END}
"""Text that ends a tool call -> its tag. In a JSON string only those with a line feed are ends: a string cannot contain
a line feed, and so it was never closed."""


class ToolCallScanner:
    """Scanner of the text after <tool_call>, which may be split anywhere.

    The text is a tool call as soon as it has the key "name" with a string and the beginning of the value of
    "arguments", in any order. Other keys are ignored beside these. An object that has a name alone is a call with the
    arguments {}. The value of "arguments" is kept as it is written, also if it is not JSON.

    name: name of the function; "" until known.
    is_call: whether the text is a tool call.
    arguments: text of the arguments since `take_arguments`.
    status: OPEN; MALFORMED for a character that cannot follow; else the tag that ended the call.
    rest: with MALFORMED, the text from the character on that cannot follow, as far as it was scanned.
    """

    def __init__(self) -> None:
        self.name = ""
        self.is_call = False
        self.arguments = ""
        self.status = OPEN
        self.rest = ""
        self._has_arguments = False
        self._has_other_keys = False
        self._tag = ""  # text that may be the beginning of an end
        self._step: Callable[[str], bool] = self._object  # returns whether the character can follow
        self._key = ""
        self._string = ""  # text of the key, or of the value if the key is "name"
        self._depth = 0
        self._in_string = self._is_escaped = self._is_scalar = False

    @property
    def is_held(self) -> bool:
        """Whether the meaning of a part of the scanned text is not known yet."""
        return not self.is_call or bool(self._tag)

    def take_arguments(self) -> str:
        """Return the new text of the arguments, and remove it."""
        arguments = self.arguments
        self.arguments = ""
        return arguments

    def feed(self, text: str, position: int) -> int:
        """Scan text[at:], until its end or until the status changes. Return the position after the scanned text."""
        while position < len(text) and self.status == OPEN:
            if not self._tag and self._step == self._value:
                pattern = _IN_STRING if self._in_string else _OUTSIDE
                run = None if self._is_scalar or self._is_escaped else pattern.match(text, position)
                if run:
                    self._keep(run.group())
                    position = run.end()
                    continue
            self._feed_character(text[position])
            position += 1
        return position

    def finish(self) -> None:
        """End the text: a part of a tag that is not complete belongs to the arguments."""
        held = self._tag
        self._tag = ""
        if self._step == self._value and self._key == "arguments":
            self.arguments += held

    def _feed_character(self, c: str) -> None:
        in_string = self._in_string or self._step == self._key_text
        if self._tag or c == "\n" or (c == "<" and not in_string):
            candidate = self._tag + c
            if candidate in _ENDS:
                self.status = _ENDS[candidate]
                return
            if any(end.startswith(candidate) for end in _ENDS):
                self._tag = candidate
                return
        held = self._tag
        self._tag = ""
        for i, character in enumerate(held):
            if not self._step(character):
                self.status = MALFORMED
                self.rest = held[i:] + c
                return
        if held:
            self._feed_character(c)  # it may be the beginning of another end
        elif not self._step(c):
            self.status = MALFORMED
            self.rest = c

    # Steps: each takes one character.

    def _object(self, c: str) -> bool:
        if c == "{":
            self._step = self._key_begin
        return c == "{" or c in _SPACE

    def _key_begin(self, c: str) -> bool:
        if c == '"':
            self._step = self._key_text
            self._string = c
        elif c == "}":
            self._end_object()
        return c in '"}' or c in _SPACE

    def _key_text(self, c: str) -> bool:
        self._string += c
        if self._is_escaped:
            self._is_escaped = False
        elif c == "\\":
            self._is_escaped = True
        elif c == '"':
            self._key = _decoded(self._string)
            self._step = self._colon
        return True

    def _colon(self, c: str) -> bool:
        if c == ":":
            self._step = self._value_begin
        return c == ":" or c in _SPACE

    def _value_begin(self, c: str) -> bool:
        if c in _SPACE:
            return True
        if c in ",:}]" or (self._key == "name" and not self.name and c != '"'):
            return False
        if (self._key == "name" and self.name) or (self._key == "arguments" and self._has_arguments):
            self._key = ""  # the first one counts
        if self._key == "arguments":
            self._has_arguments = True
            self.is_call = bool(self.name)
        self._has_other_keys |= self._key not in ("name", "arguments")
        self._string = ""
        self._step = self._value
        self._is_scalar = c not in '"{['
        return self._value(c)

    def _value(self, c: str) -> bool:
        if self._is_scalar and (c in ",}" or c in _SPACE):
            return self._end_value() and self._step(c)
        self._keep(c)
        if self._is_scalar:
            return True
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif c == "\\":
                self._is_escaped = True
            elif c == '"':
                self._in_string = False
        elif c == '"':
            self._in_string = True
        elif c in "{[":
            self._depth += 1
        elif c in "}]":
            self._depth -= 1
        if self._in_string or self._depth > 0:
            return True
        return self._end_value()

    def _keep(self, text: str) -> None:
        """Add text to the value that is being read."""
        if self._key == "arguments":
            self.arguments += text
        elif self._key == "name":
            self._string += text

    def _end_value(self) -> bool:
        self._step = self._after_value
        self._is_scalar = False
        self._in_string = False
        if self._key == "name":
            self.name = _decoded(self._string)
            self.is_call = self._has_arguments and bool(self.name)
            return bool(self.name)
        return True

    def _after_value(self, c: str) -> bool:
        if c == ",":
            self._step = self._key_begin
        elif c == "}":
            self._end_object()
        return c in ",}" or c in _SPACE

    def _end_object(self) -> None:
        self._step = self._after_object
        if self.name and not self._has_arguments and not self._has_other_keys:
            self._has_arguments = self.is_call = True
            self.arguments = "{}"

    def _after_object(self, c: str) -> bool:
        return c in _SPACE


def _decoded(string: str) -> str:
    """Return the value of a JSON string, "" for one that is malformed or has a lone surrogate."""
    try:
        value = json.loads(string, strict=False)
        value.encode()
    except ValueError:
        return ""
    return str(value)
