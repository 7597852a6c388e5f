"""Format in which a model writes its reasoning and its tool calls, decided from its chat template."""

from __future__ import annotations

import re
from typing import NamedTuple

THINK_BEGIN = "<think>"
THINK_END = "</think>"
CALL_BEGIN = "<tool_call>"
CALL_END = "</tool_call>"
FUNCTION_BEGIN = "<function="
FUNCTION_END = "</function>"
PARAMETER_BEGIN = "<parameter="
PARAMETER_END = "</parameter>"
TAGS = (THINK_BEGIN, THINK_END, CALL_BEGIN, CALL_END)
_ARGUMENTS_AS_OBJECT = re.compile(
    r"""arguments(['"]\])?\s*\|\s*tojson\b|\bfor\s[\w\s,]+\sin\s+\S*arguments\b"""
    r"""|calls?(['"]\])?(\.function|\[['"]function['"]\])?\s*\|\s*tojson""")
_ARGUMENTS_AS_TEXT = re.compile(r"arguments\s+is\s+(not\s+)?string")


class AnswerFormat(NamedTuple):
    """Format of a model's answers, whose parts are marked by tags, as in Hermes and Qwen3.

    has_reasoning: the answer may begin with <think>, the reasoning, </think>.
    has_tool_calls: a tool call is <tool_call>, a JSON object with the keys "name" and "arguments", </tool_call>.
        With has_tagged_arguments there is no object, but <function=NAME>, <parameter=KEY>VALUE</parameter> for each
        argument, </function>.
    has_object_arguments: the chat template writes the arguments of a tool call, or the whole call, as JSON, or writes
        each argument. It would write the text of an object as a JSON string, or fail on it.
    has_tagged_arguments: the form of Qwen3-Coder and of Qwen3.5 and later.
    """

    has_reasoning: bool = False
    has_tool_calls: bool = False
    has_object_arguments: bool = False
    has_tagged_arguments: bool = False

    def __bool__(self) -> bool:
        return self.has_reasoning or self.has_tool_calls


PLAIN = AnswerFormat()
"""Format of a model whose answers are text only, as far as the server knows."""


def template_format(source: str) -> AnswerFormat:
    """Return the format that the source of a chat template writes.

    A template that only removes the reasoning of earlier turns, as of DeepSeek-R1-0528-Qwen3-8B, has </think> alone.
    A template with the tags of functions and parameters writes calls by them, also if it mentions JSON elsewhere.
    """
    is_tagged = FUNCTION_BEGIN in source and PARAMETER_BEGIN in source
    has_json = '"arguments":' in source.replace('\\"', '"')
    takes_objects = bool(_ARGUMENTS_AS_OBJECT.search(source)) and not _ARGUMENTS_AS_TEXT.search(source)
    has_calls = CALL_BEGIN in source and (is_tagged or has_json)
    return AnswerFormat(
        THINK_BEGIN in source or THINK_END in source, has_calls, takes_objects, has_calls and is_tagged)
