"""Tools and tool choice of a chat: their checks, and the constraint of an answer that must be a tool call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from npuserve.service.config import MAX_CONSTRAINT_BYTES
from npuserve.service.errors import InvalidField, UnknownAnswerFormat, Violations, quoted
from npuserve.service.parsing.answer_parser import Reasoning
from npuserve.service.parsing.parameter_types import FunctionTypes, read_types
from npuserve.service.parsing.parsed_stream import reasoning_state
from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.text.answer_format import (
    CALL_BEGIN,
    CALL_END,
    FUNCTION_BEGIN,
    FUNCTION_END,
    PARAMETER_BEGIN,
    PLAIN,
    THINK_BEGIN,
    THINK_END,
    AnswerFormat,
)
from npuserve.v1 import generate_pb2 as pb
from npuserve.v1 import prompt_pb2

if TYPE_CHECKING:
    from npuserve.service.text.tokenizer import Tokenizer

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of the arguments of a tool without `parameters`, as the OpenAI API defines it."""


def needs_call(choice: prompt_pb2.ToolChoice) -> bool:
    """Return whether the answer must be a tool call."""
    return choice.WhichOneof("choice") == "name" or choice.mode == prompt_pb2.TOOL_CHOICE_MODE_REQUIRED


def forbids_calls(choice: prompt_pb2.ToolChoice) -> bool:
    """Return whether the model gets no tools."""
    return choice.WhichOneof("choice") == "mode" and choice.mode == prompt_pb2.TOOL_CHOICE_MODE_NONE


def check_tools(chat: prompt_pb2.Chat, tools: Sequence[Mapping[str, Any]], bad: Violations) -> None:
    """Report faults of the tools, and a tool choice that does not fit them.

    tools: the parsed `chat.tools`.
    """
    names: dict[str, int] = {}
    for index, tool in enumerate(tools):
        path = f"chat.tools[{index}].function"
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            bad.add(f"{path}.name", "must be a text that is not empty")
            continue
        if names.setdefault(name, index) != index:
            bad.add(f"{path}.name", f"must differ from that of chat.tools[{names[name]}]")
        assert isinstance(function, dict)
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            bad.add(f"{path}.parameters", "must be a JSON schema, which is a JSON object")
        elif isinstance(parameters, dict) and parameters.get("type", "object") != "object":
            bad.add(f"{path}.parameters.type", 'must be "object": the arguments of a function are a JSON object')
    choice = chat.tool_choice
    match choice.WhichOneof("choice"):
        case "mode" if choice.mode not in prompt_pb2.ToolChoiceMode.values():
            known = ", ".join(prompt_pb2.ToolChoiceMode.keys())
            bad.add("chat.tool_choice.mode", f"must be one of {known}; got {choice.mode}")
        case "mode" if choice.mode == prompt_pb2.TOOL_CHOICE_MODE_REQUIRED and not chat.tools:
            bad.add("chat.tool_choice.mode", "needs chat.tools to choose from")
        case "name" if not chat.tools:
            bad.add("chat.tool_choice.name", "needs chat.tools to choose from")
        case "name" if choice.name not in names:
            listed = ", ".join(quoted(name) for name in sorted(names)[:16])
            bad.add("chat.tool_choice.name", f"must be the name of a tool ({listed}), got {quoted(choice.name)}")


def check_parsing(message: pb.GenerateRequest, tokenizer: Tokenizer | None, bad: Violations) -> AnswerFormat:
    """Return the format by which the answer is parsed, PLAIN if it is not. Report bad fields.

    Raises InvalidField for a tool choice together with a constraint, and UnknownAnswerFormat if the request needs a
    format of the model that the server does not know.
    """
    is_chat = message.WhichOneof("prompt") == "chat"
    choice = message.chat.tool_choice
    must_call = is_chat and needs_call(choice)
    constraint = message.WhichOneof("constraint")
    if must_call and constraint:
        raise InvalidField(
            "chat.tool_choice", f"must not be required or a name together with {constraint}: both constrain the answer")
    if message.output.parse_output and not is_chat:
        bad.add("output.parse_output", "needs a chat: it reads what the model's chat template defines")
    if tokenizer is None or tokenizer.chat is None or not is_chat:
        return PLAIN
    form = tokenizer.chat.format
    if must_call and not form.has_tool_calls:
        raise UnknownAnswerFormat(
            "chat.tool_choice: the served model's chat template has no tool calls in a format that the server knows "
            f"(JSON, or {FUNCTION_BEGIN} and {PARAMETER_BEGIN}, between {CALL_BEGIN} and {CALL_END})")
    if not message.output.parse_output:
        return PLAIN
    if not form:
        raise UnknownAnswerFormat(
            "output.parse_output: the served model's chat template has neither reasoning nor tool calls in a format "
            f"that the server knows ({THINK_BEGIN}, or JSON or {FUNCTION_BEGIN} in {CALL_BEGIN})")
    return form._replace(has_tool_calls=form.has_tool_calls and not forbids_calls(choice))


def tool_constraint(
    message: pb.GenerateRequest, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], bad: Violations
) -> Constraint | None:
    """Return the constraint of an answer that must be a tool call, None for another one.

    prompt_ids: ids of the rendered chat; empty if a field of the chat is bad.
    """
    if not prompt_ids or tokenizer is None or tokenizer.chat is None or not needs_call(message.chat.tool_choice):
        return None
    if message.sampling.allowed_token_ids:
        bad.add("sampling.allowed_token_ids", "must be empty if chat.tool_choice is required or a name")
    form = tokenizer.chat.format
    tag = structural_tag(message.chat, form, reasoning_state(tokenizer, prompt_ids))
    for index, tool in enumerate(message.chat.tools if form.has_tagged_arguments else ()):
        if set("<>\n").intersection(json.loads(tool)["function"]["name"]):
            bad.add(f"chat.tools[{index}].function.name", (
                f"must have no <, > or line feed for this tool_choice: the model writes it as {FUNCTION_BEGIN}NAME>"))
    size = len(tag.encode())
    if size > MAX_CONSTRAINT_BYTES:
        bad.add("chat.tools", (
            f"must make a constraint of at most {MAX_CONSTRAINT_BYTES} bytes, got {size}: for this tool_choice send "
            "fewer tools, or smaller schemas"))
    return Constraint("structural_tag", tag, "chat.tools")


def constrained_format(
    form: AnswerFormat, constraint: Constraint | None, tokenizer: Tokenizer | None, prompt_ids: Sequence[int]
) -> AnswerFormat:
    """Return the format of an answer under the client's constraint.

    The constraint begins with the answer. Reasoning that the prompt has begun is therefore empty, unless the constraint
    itself writes </think>.
    """
    if not form.has_reasoning or constraint is None or tokenizer is None or _has_think_end(constraint):
        return form
    return form._replace(has_reasoning=reasoning_state(tokenizer, prompt_ids) != "begun")


def _has_think_end(constraint: Constraint) -> bool:
    """Return whether the text of a constraint has </think>, also as escaped JSON, as Go and PHP write it."""
    if constraint.kind == "structural_tag":
        return THINK_END in json.dumps(json.loads(constraint.text), ensure_ascii=False)
    return THINK_END in constraint.text


def structural_tag(chat: prompt_pb2.Chat, form: AnswerFormat, reasoning: Reasoning) -> str:
    """Return the structural tag of an answer that must be a tool call, after its reasoning.

    chat: with checked tools; the choice is a name, or required.
    reasoning: state at the end of the prompt. Reasoning that has not begun is optional.

    The format is that of xgrammar, which vLLM also accepts:
    https://xgrammar.mlc.ai/docs/structural_tag/structural_tag.html
    """
    choice = chat.tool_choice
    tools = dict(enumerate(json.loads(tool)["function"] for tool in chat.tools))
    if choice.WhichOneof("choice") == "name":
        tools = {index: tool for index, tool in tools.items() if tool["name"] == choice.name}
    tag = _tagged_call_tag if form.has_tagged_arguments else _call_tag
    calls = {
        "type": "tags_with_separator", "tags": [tag(*tool) for tool in tools.items()], "separator": "\n",
        "at_least_one": True, "stop_after_first": choice.WhichOneof("choice") == "name"}
    answer: dict[str, Any] = calls
    if form.has_reasoning and reasoning != "ended":
        begin = "" if reasoning == "begun" else THINK_BEGIN
        thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": THINK_END}
        first: dict[str, Any] = {"type": "sequence", "elements": [thought, {"type": "const_string", "value": "\n\n"}]}
        if reasoning == "possible":
            first = {"type": "optional", "content": first}
        answer = {"type": "sequence", "elements": [first, calls]}
    return json.dumps({"type": "structural_tag", "format": answer}, ensure_ascii=False)


def call_types(chat: prompt_pb2.Chat, form: AnswerFormat) -> dict[str, FunctionTypes]:
    """Return the types of the parameters of checked tools, if the format needs them."""
    return read_types([json.loads(tool) for tool in chat.tools]) if form.has_tagged_arguments else {}


def _tagged_call_tag(index: int, function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tag of a call of one function with tagged arguments. index: of its tool."""
    return {
        "type": "tag", "begin": f"{CALL_BEGIN}\n{FUNCTION_BEGIN}{function['name']}>\n",
        "content": {**_arguments(index, function), "style": "qwen_xml"}, "end": f"{FUNCTION_END}\n{CALL_END}"}


def _arguments(index: int, function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the format of the arguments of one function. index: of its tool."""
    parameters = function.get("parameters")
    schema = NO_ARGUMENTS if parameters is None else {"type": "object", **parameters}
    return {"type": "json_schema", "json_schema": schema, "x-field": f"chat.tools[{index}].function.parameters"}


def _call_tag(index: int, function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tag of a call of one function, as the chat templates write it. index: of its tool."""
    name = json.dumps(function["name"], ensure_ascii=False)
    return {
        "type": "tag", "begin": f'{CALL_BEGIN}\n{{"name": {name}, "arguments": ',
        "content": _arguments(index, function), "end": f"}}\n{CALL_END}"}
