"""Incremental parser of an answer: its content, its reasoning and its tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from npuserve.service.parsing.parameter_types import CallTypes
from npuserve.service.parsing.tagged_call import TaggedCallScanner
from npuserve.service.parsing.tool_call import MALFORMED, OPEN, ToolCallScanner
from npuserve.service.text.answer_format import CALL_BEGIN, CALL_END, THINK_BEGIN, THINK_END, AnswerFormat

Reasoning = Literal["possible", "begun", "ended"]
"""State of the reasoning at the end of the prompt: not begun, begun by an open <think>, or ended by </think>."""
_SPECIAL = re.compile(r"[<\n]")


@dataclass(frozen=True)
class CallDelta:
    """Part of a tool call. name: of the function, "" unless it is the call's first part. arguments: the next text."""

    index: int
    name: str
    arguments: str


@dataclass
class Parts:
    """Text that was parsed, by where it belongs."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def add(self, more: Parts) -> None:
        """Append the parts that follow."""
        self.content += more.content
        self.reasoning += more.reasoning
        for call in more.calls:
            self.add_call(call)

    def add_call(self, call: CallDelta) -> None:
        """Append a part of a call, to the last part if it belongs to the same call."""
        if self.calls and self.calls[-1].index == call.index:
            last = self.calls[-1]
            self.calls[-1] = replace(last, arguments=last.arguments + call.arguments)
        else:
            self.calls.append(call)


class AnswerParser:
    """Parser of one answer, whose text may be split anywhere: the joined parts are the same.

    form: format of the model.
    reasoning: state at the end of the prompt.
    types: of the parameters of the tools, for a format with tagged arguments.

    - Reasoning is the text between <think> and </think> at the beginning of the answer. Line feeds at both its ends and
      after </think> belong to the format. An answer that ends before </think> is reasoning only.
    - A tool call is the text between <tool_call> and </tool_call>, see `ToolCallScanner` and
      `TaggedCallScanner`. The line feed before it (two with tagged arguments), and white space alone before and after
      it, belong to the format. In a JSON string, and in the value of a tagged argument, </tool_call> is text.
    - All other text is content: also a block that is not a tool call, with its tags, and text between calls.
    - If a tool call is cut by the end of the answer, by another <tool_call>, or by </tool_call> too early, its
      arguments are the text up to there. Other text after the arguments, such as one brace too many, is content.
    """

    def __init__(self, form: AnswerFormat, reasoning: Reasoning, types: CallTypes | None = None):
        self._parts = Parts()
        self._calls = form.has_tool_calls
        self._types = (types or {}) if form.has_tagged_arguments else None
        self._line_feeds = "\n\n" if form.has_tagged_arguments else "\n"  # before a call, of the format
        self._count = 0  # of calls that have begun
        self._has_content = False
        self._held = ""  # white space that a tag may follow
        self._tag = ""  # text that may be the beginning of a tag, after _held
        self._expects_end = False  # </tool_call> is a tag: the rest of a malformed call is read
        self._call = self._scanner()
        self._call_text = ""  # of a block that is not known to be a call
        self._is_named = False  # the name of the call was emitted
        self._has_reasoning_text = False
        self._may_reason = form.has_reasoning and reasoning == "possible"
        self._state: Callable[[str, int], int] = self._begin
        if form.has_reasoning and reasoning == "begun":
            self._state = self._reasoning

    @property
    def is_clean(self) -> bool:
        """Whether the meaning of all text so far is known."""
        if self._state == self._tool_call:
            return not self._call.is_held
        return not (self._held or self._tag)

    def feed(self, text: str) -> None:
        """Add the next text of the answer."""
        position = 0
        while position < len(text):
            position = self._state(text, position)

    def finish(self) -> None:
        """End the answer: resolve the text that was held back."""
        if self._state == self._tool_call:
            self._call.finish()
            self._emit_call()
            self._emit(self._call_text)
        elif self._state == self._reasoning:
            self._parts.reasoning += self._held + self._tag
        elif self._state == self._after_call and not self._tag:
            pass
        else:
            self._emit(self._held + self._tag)
        self._held = self._tag = self._call_text = ""

    def take(self) -> Parts:
        """Return the parts that became known since the last call."""
        parts = self._parts
        self._parts = Parts()
        return parts

    # States: each reads at least one character of text[at:], or enters another state, and returns the next position.

    def _begin(self, text: str, position: int) -> int:
        """Read the beginning of the answer, where white space and <think> may be."""
        if not self._tag and text[position].isspace():
            self._held += text[position]
            return position + 1
        return self._read_tag(text, position)

    def _reasoning(self, text: str, position: int) -> int:
        c = text[position]
        if THINK_END.startswith(self._tag + c):
            self._tag += c
            if self._tag == THINK_END:
                self._held = self._tag = ""
                self._state = self._after_reasoning
            return position + 1
        if self._tag:
            self._emit_reasoning(self._tag)
            self._tag = ""
            return position
        if c == "\n":
            self._held += c if self._has_reasoning_text else ""
            return position + 1
        end = _end_of_run(text, position)
        self._emit_reasoning(text[position:end])
        return end

    def _after_reasoning(self, text: str, position: int) -> int:
        return position + 1 if text[position] == "\n" and not self._tag else self._read_tag(text, position)

    def _after_call(self, text: str, position: int) -> int:
        if not self._tag and text[position].isspace():
            if self._has_content:
                self._held += text[position]
            return position + 1
        return self._read_tag(text, position)

    def _content(self, text: str, position: int) -> int:
        if not self._calls:
            self._emit(text[position:])
            return len(text)
        c = text[position]
        if self._tag or c == "<":
            return self._read_tag(text, position)
        if c == "\n":
            if self._held == self._line_feeds:
                self._emit(c)
            else:
                self._held += c
            return position + 1
        end = _end_of_run(text, position)
        self._emit(self._held + text[position:end])
        self._held = ""
        return end

    def _tool_call(self, text: str, position: int) -> int:
        call = self._call
        end = call.feed(text, position)
        self._call_text += "" if self._is_named else text[position:end]
        self._emit_call()
        if call.status == OPEN:
            return end
        block = self._call_text
        self._call_text = ""
        if call.status == MALFORMED:
            self._emit(block.removesuffix(call.rest))
            self._expects_end = call.is_call
            self._state = self._content
            self.feed(call.rest)
        elif call.status == CALL_BEGIN:
            known = block.removesuffix(CALL_BEGIN).removesuffix("\n")
            self._emit(known)
            self._begin_call(block.removeprefix(known) or CALL_BEGIN)
        elif call.is_call:
            self._state = self._after_call
        else:
            self._emit(block)
            self._state = self._content
        return end

    def _read_tag(self, text: str, position: int) -> int:
        """Read a character that may belong to a tag. If it cannot, enter the state of content without reading it."""
        tags = [*[CALL_BEGIN] * self._calls, *[CALL_END] * self._expects_end]
        if self._state == self._begin and self._may_reason:
            tags.append(THINK_BEGIN)
        tag = self._tag + text[position]
        if tag in tags:
            self._enter(tag)
            return position + 1
        if any(known.startswith(tag) for known in tags):
            self._tag = tag
            return position + 1
        self._state = self._content
        self._emit(self._held + self._tag)
        self._held = self._tag = ""
        return position

    def _enter(self, tag: str) -> None:
        """Change the state at a tag."""
        held = self._held
        self._held = ""
        self._tag = ""
        if tag == THINK_BEGIN:
            self._state = self._reasoning
        elif tag == CALL_BEGIN:
            self._begin_call(held + tag)
        else:
            self._expects_end = False
            self._state = self._after_call

    def _begin_call(self, text: str) -> None:
        """Begin a block. text: of its tag, and the white space before it."""
        self._call = self._scanner()
        self._call_text = text
        self._is_named = self._expects_end = False
        self._state = self._tool_call

    def _scanner(self) -> ToolCallScanner | TaggedCallScanner:
        return ToolCallScanner() if self._types is None else TaggedCallScanner(self._types)

    def _emit(self, text: str) -> None:
        if text:
            self._parts.content += text
            self._has_content = True

    def _emit_reasoning(self, text: str) -> None:
        self._parts.reasoning += self._held + text
        self._held = ""
        self._has_reasoning_text = True

    def _emit_call(self) -> None:
        """Emit the new text of the call's arguments, the first time with its name."""
        if not self._call.is_call:
            return
        arguments = self._call.take_arguments()
        name = ""
        if not self._is_named:
            self._is_named = True
            self._call_text = ""
            name = self._call.name
            self._count += 1
        if name or arguments:
            self._parts.add_call(CallDelta(self._count - 1, name, arguments))


def _end_of_run(text: str, position: int) -> int:
    """Return the position of the next character from `position` on that may begin a tag."""
    special = _SPECIAL.search(text, position)
    return special.start() if special else len(text)
