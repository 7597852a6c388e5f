"""A chat of a request, checked and rendered by the model's chat template, and its JSON as plain values."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

from google.protobuf import struct_pb2

from npuserve.service.errors import InvalidField, NoChatTemplate, NoTokenizer, Violations, quoted
from npuserve.service.json_text import check_unicode, parse_json
from npuserve.service.parsing.tool_choice import check_tools, forbids_calls
from npuserve.service.requests.message_limits import MAX_CHAT_MESSAGES, MAX_TOOLS
from npuserve.service.text.plain_text import Prompt
from npuserve.v1 import prompt_pb2

if TYPE_CHECKING:
    from npuserve.service.text.tokenizer import Tokenizer

ROLES = frozenset({"system", "user", "assistant", "tool"})
"""Roles of messages. Other roles that the chat template compares with are allowed as well."""
MAX_EXACT_INT = 1 << 53
"""Whole numbers up to this one are exact as floats."""


def chat_prompt(
    chat: prompt_pb2.Chat, tokenizer: Tokenizer | None, plain_content: bool, max_model_len: int
) -> Prompt:
    """Return the prompt that the model's chat template renders for the chat.

    plain_content: read the text of special tokens as plain text: in tools and template arguments, and in messages
        without a `plain_content` of their own.

    Raises InvalidField for bad fields, and for messages with more text than max_model_len tokens can have. Raises
    NoTokenizer and NoChatTemplate.
    """
    if tokenizer is None:
        raise NoTokenizer("chat: the served model has no tokenizer; send token_ids")
    if tokenizer.chat is None:
        raise NoChatTemplate("chat: the served model has no chat template; send text or token_ids")
    _check_size(chat, tokenizer, max_model_len)
    bad = Violations()
    roles = ROLES | tokenizer.chat.roles
    messages = [_message(index, message, roles, bad) for index, message in enumerate(chat.messages)]
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        _read_arguments(call, tokenizer.chat.format.has_object_arguments)
    tools: list[dict[str, Any]] = []
    arguments: dict[str, Any] = {}
    for index, tool in enumerate(chat.tools):
        with bad.collect():
            tools.append(parse_json(tool, f"chat.tools[{index}]"))
    if len(tools) == len(chat.tools):
        check_tools(chat, tools, bad)
    with bad.collect():
        arguments = from_struct(chat.template_args, "chat.template_args")
    bad.check()
    if forbids_calls(chat.tool_choice):
        tools = []
    plain = [m.plain_content if m.HasField("plain_content") else plain_content for m in chat.messages]
    if plain_content or any(plain):
        prompt = tokenizer.plain_text.render(tokenizer.chat, messages, arguments, tools, plain, plain_content)
    else:
        prompt = Prompt(tokenizer.chat.render(messages, arguments, tools))
    check_unicode(prompt.text, "chat")
    return prompt


def _check_size(chat: prompt_pb2.Chat, tokenizer: Tokenizer, max_model_len: int) -> None:
    """Raise InvalidField for a chat that is empty or larger than the context allows."""
    if not chat.messages:
        raise InvalidField("chat.messages", "must be at least one message, got none")
    bad = Violations()
    for field, items, max_items in (("messages", chat.messages, MAX_CHAT_MESSAGES), ("tools", chat.tools, MAX_TOOLS)):
        if len(items) > max_items:
            bad.add(f"chat.{field}", f"must be at most {max_items}, got {len(items)}")
    size = sum(len(message.content) for message in chat.messages)
    max_size = max_model_len * tokenizer.max_token_bytes
    if size > max_size:
        bad.add("chat.messages", (
            f"must have at most {max_size} characters of content, as max_model_len is {max_model_len}, got {size}"))
    bad.check()


def _message(index: int, message: prompt_pb2.Message, roles: frozenset[str], bad: Violations) -> dict[str, Any]:
    """Return a message as the chat template expects it; report bad fields."""
    path = f"chat.messages[{index}]"
    if not message.role:
        bad.add(f"{path}.role", "must not be empty")
    elif message.role not in roles:
        bad.add(f"{path}.role", f"must be one of {', '.join(sorted(roles))}; got {quoted(message.role)}")
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.HasField(name):
            turn[name] = getattr(message, name)
    if message.tool_calls:
        calls: list[dict[str, Any]] = []
        turn["tool_calls"] = calls
        for i, call in enumerate(message.tool_calls):
            with bad.collect():
                calls.append(parse_json(call, f"{path}.tool_calls[{i}]"))
    return turn


def _read_arguments(call: dict[str, Any], as_object: bool) -> None:
    """Replace empty or absent arguments of a tool call by {}, as vLLM does.

    as_object: also replace arguments that are the text of an object by the object. Other arguments stay.
    """
    function = call.get("function", call)
    if not isinstance(function, dict):
        return
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = function["arguments"] = "{}"
    if as_object and isinstance(arguments, str):
        with contextlib.suppress(InvalidField):
            function["arguments"] = parse_json(arguments, "arguments")


def from_struct(struct: struct_pb2.Struct, field: str) -> dict[str, Any]:
    """Return the plain values of a Struct, sorted by name, since its fields have no order.

    Its numbers are floats; whole numbers up to MAX_EXACT_INT become ints.

    Raises InvalidField, naming `field`, for a NaN or an infinity.
    """
    return {key: _plain(struct.fields[key], f"{field}.{key}") for key in sorted(struct.fields)}


def _plain(value: struct_pb2.Value, field: str) -> Any:
    match value.WhichOneof("kind"):
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                raise InvalidField(field, f"must be a finite number, got {number}")
            return int(number) if number.is_integer() and abs(number) <= MAX_EXACT_INT else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return from_struct(value.struct_value, field)
        case "list_value":
            return [_plain(item, f"{field}[{i}]") for i, item in enumerate(value.list_value.values)]
    return None
