"""Incremental scanner of one tool call whose arguments are tagged: the text between <tool_call> and </tool_call>.

    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>

The line feeds around a value belong to the format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from npuserve.service.parsing.parameter_types import CallTypes, FunctionTypes, json_text
from npuserve.service.parsing.tool_call import MALFORMED, OPEN
from npuserve.service.schema_types import TEXT
from npuserve.service.text.answer_format import (
    CALL_BEGIN,
    CALL_END,
    FUNCTION_BEGIN,
    FUNCTION_END,
    PARAMETER_BEGIN,
    PARAMETER_END,
)

MAX_SPACE = 32
"""Maximum white space between the end of a value and the next tag, so that the held text is bounded."""
MAX_IMPLIED_NAME = 256
"""Maximum length of a parameter's name that ends the value before it without </parameter>."""
_SPACE = " \t\r\n"
_PLAIN = re.compile(r"[^<\n]+")
_FOLLOWERS = (PARAMETER_BEGIN, FUNCTION_END, CALL_END)
_CALL_ENDS = (FUNCTION_END + "\n" + CALL_END, FUNCTION_END + CALL_END)
_NO, _PARTIAL, _END = range(3)


class TaggedCallScanner:
    """Scanner of the text after <tool_call>, which may be split anywhere. Its interface is that of `ToolCallScanner`.

    The text is a tool call as soon as it has <function=NAME> and after it <parameter=KEY> or </function>, with white
    space alone around them. Its arguments are written as JSON. A value of a parameter that is a string is written as it
    arrives. Any other value is written at its end, since its type depends on its text, see `json_text`.

    A value ends before
    - </parameter>, if the next tag of the call follows: otherwise </parameter> is a part of the value;
    - a line <parameter=KEY>, if KEY is a declared parameter that the call does not have yet;
    - </function> and </tool_call>.

    types: of the parameters of all tools.
    """

    def __init__(self, types: CallTypes) -> None:
        self.name = ""
        self.is_call = False
        self.arguments = ""
        self.status = OPEN
        self.rest = ""
        self._types = types
        self._function = FunctionTypes({})
        self._unused: set[str] = set()  # declared parameters that the call does not have yet
        self._key = ""
        self._key_types: tuple[str, ...] = TEXT
        self._has_arguments = False
        self._tag = ""  # text that may be the beginning of a tag, or of a value's end
        self._buffer: list[str] | None = None  # parts of a value whose JSON is not written yet
        self._is_value_begin = False
        self._step: Callable[[str], bool] = self._before_function  # returns whether the character can follow

    @property
    def is_held(self) -> bool:
        """Whether the meaning of a part of the scanned text is not known yet."""
        return not self.is_call or bool(self._tag) or self._buffer is not None or self._step == self._read_key

    def take_arguments(self) -> str:
        """Return the new text of the arguments, and remove it."""
        taken = self.arguments
        self.arguments = ""
        return taken

    def feed(self, text: str, position: int) -> int:
        """Scan text[at:], until its end or until the status changes. Return the position after the scanned text."""
        while position < len(text) and self.status == OPEN:
            run = _PLAIN.match(text, position) if self._step == self._read_value and not self._tag else None
            if run:
                self._keep(run.group())
                position = run.end()
                continue
            if not self._step(text[position]):
                self.status = MALFORMED
            position += 1
        return position

    def finish(self) -> None:
        """End the text. A value that was cut has the text up to there, and its JSON is not closed."""
        if self._step != self._read_value:
            return
        held = self._tag
        self._tag = ""
        if PARAMETER_END in held:
            self._keep(held[:held.index(PARAMETER_END)].removesuffix("\n"))
            self._end_value()
            return
        self._keep(held)
        if self._buffer is not None:
            value = "".join(self._buffer)
            self._buffer = None
            self.arguments += '"' + _escaped(value) if "string" in self._key_types else value

    # Steps: each takes one character.

    def _before_function(self, c: str) -> bool:
        tag = self._read_tag(c, FUNCTION_BEGIN, CALL_BEGIN, CALL_END)
        if tag == FUNCTION_BEGIN:
            self._step = self._read_name
        elif tag:
            self.status = tag
        return tag is not None

    def _read_name(self, c: str) -> bool:
        if c == ">" and self.name:
            self._function = self._types.get(self.name, self._function)
            self._unused = {name for name in self._function.declared if len(name) <= MAX_IMPLIED_NAME}
            self._step = self._before_parameter
            return True
        self.name += c
        self.rest = c
        return c not in "<>\n"

    def _before_parameter(self, c: str) -> bool:
        tag = self._read_tag(c, PARAMETER_BEGIN, FUNCTION_END, CALL_BEGIN, CALL_END)
        if tag == PARAMETER_BEGIN:
            self._step = self._read_key
            self._key = ""
        elif tag == FUNCTION_END:
            self._end_arguments()
            self._step = self._after_function
        elif tag:
            if tag == CALL_END and self.is_call:
                self._end_arguments()
            self.status = tag
        return tag is not None

    def _read_key(self, c: str) -> bool:
        if c == ">" and self._key:
            self._begin_value()
            return True
        self._key += c
        self.rest = PARAMETER_BEGIN + self._key
        return c not in "<>\n"

    def _read_value(self, c: str) -> bool:
        if self._is_value_begin:
            self._is_value_begin = False
            if c == "\n":
                return True
        self._tag += c
        while self._tag:
            end = self._find_end()
            if end == _PARTIAL:
                return True
            if end == _END:
                following = self._tag.removeprefix("\n").removeprefix(PARAMETER_END)
                self._tag = ""
                self._end_value()
                self._step = self._before_parameter
                return all(self._step(character) for character in following)
            start = next((i for i, held in enumerate(self._tag) if i and held in "\n<"), len(self._tag))
            self._keep(self._tag[:start])
            self._tag = self._tag[start:]
        return True

    def _after_function(self, c: str) -> bool:
        tag = self._read_tag(c, CALL_BEGIN, CALL_END)
        if tag:
            self.status = tag
        return tag is not None

    def _read_tag(self, c: str, *tags: str) -> str | None:
        """Read a character of white space or of a tag. Return the tag at its end, "" before; None if it is neither."""
        if not self._tag and c in _SPACE:
            return ""
        self._tag += c
        if self._tag in tags:
            tag = self._tag
            self._tag = ""
            return tag
        if any(tag.startswith(self._tag) for tag in tags):
            return ""
        self.rest = self._tag
        self._tag = ""
        return None

    def _find_end(self) -> int:
        """Return whether the held text is the end of the value with the tag after it, may become it, or is not."""
        held = self._tag.removeprefix("\n")
        if held.startswith(PARAMETER_END):
            after = held[len(PARAMETER_END):]
            follower = after.lstrip(_SPACE)
            if follower in _FOLLOWERS:
                return _END
            is_partial = len(after) - len(follower) <= MAX_SPACE and any(tag.startswith(follower) for tag in _FOLLOWERS)
            return _PARTIAL if is_partial else _NO
        if held in _CALL_ENDS:
            return _END
        if self._tag.startswith("\n" + PARAMETER_BEGIN):
            key = held[len(PARAMETER_BEGIN):]
            if key.endswith(">"):
                return _END if key[:-1] in self._unused else _NO
            return _PARTIAL if len(key) <= MAX_IMPLIED_NAME and "<" not in key and "\n" not in key else _NO
        begins = (PARAMETER_END, *_CALL_ENDS, *[PARAMETER_BEGIN] * self._tag.startswith("\n"))
        return _PARTIAL if any(tag.startswith(held) for tag in begins) else _NO

    def _begin_value(self) -> None:
        self._unused.discard(self._key)
        self._key_types = self._function.declared.get(self._key, self._function.others)
        self.arguments += (", " if self._has_arguments else "{") + json.dumps(self._key, ensure_ascii=False) + ": "
        self._has_arguments = self.is_call = self._is_value_begin = True
        self._buffer = [] if self._key_types != TEXT else None
        if self._buffer is None:
            self.arguments += '"'
        self._step = self._read_value

    def _keep(self, text: str) -> None:
        """Add text to the value."""
        self._is_value_begin = False
        if self._buffer is None:
            self.arguments += _escaped(text)
            return
        self._buffer.append(text)
        if self._key_types == ("null", "string"):
            value = "".join(self._buffer)
            if not any(null.startswith(value.lower()) for null in ("null", "none")):
                self._buffer = None
                self.arguments += '"' + _escaped(value)

    def _end_value(self) -> None:
        if self._buffer is None:
            self.arguments += '"'
            return
        value = "".join(self._buffer)
        self._buffer = None
        self.arguments += json_text(value, self._key_types)

    def _end_arguments(self) -> None:
        self.arguments += "}" if self._has_arguments else "{}"
        self.is_call = True


def _escaped(text: str) -> str:
    """Return a text as a part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
