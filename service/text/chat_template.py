"""A conversation to the model's prompt text, by the model's own chat template.

The result is that of transformers' apply_chat_template(tokenize=False). The template comes with the model, is run in
jinja2's immutable sandbox, and its output is bounded; the conversation comes from the client. What a template may take
of time and memory is template_process.py's to see to: nothing in Python can.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from google.protobuf import struct_pb2
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from npuserve.service.errors import InvalidField

MAX_CHARACTERS = 64 << 20
MAX_SECONDS = 10.0
"""template_process.py's, and looked at here between the template's pieces of output."""
# What template_args may not set, beside the names of the tokenizer's tokens: what the request and the tokenizer give
# the template, the environment's functions, and parameters of apply_chat_template that are no variables.
REFUSED_ARGS = frozenset({
    "messages", "tools",
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
    "raise_exception", "strftime_now", "namespace", "dict", "range", "lipsum", "cycler", "joiner",
    "conversation", "chat_template", "continue_final_message", "tokenize", "tokenizer_kwargs",
    "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "sanitize_control_tokens",
})
_REASONING = ("reasoning_content", "thinking", "reasoning")


class _Generation(Extension):
    """{% generation %} marks what the model says, for training; here its content is all that counts."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class ChatTemplate:
    """A model's chat template, or several by name: `tool_use` is taken where there are tools, else `default`.

    named_tokens: bos_token and its like, variables of the template. roles: names with which a template compares a
    message's role. Raises ValueError if a template does not parse or none is the default. Safe to use from several
    threads.
    """

    def __init__(self, templates: str | Mapping[str, str], named_tokens: Mapping[str, str] | None = None):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        sources = {"default": templates} if isinstance(templates, str) else dict(templates)
        if "default" not in sources:
            raise ValueError(f"chat template: none of {sorted(sources)} is named default")
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
            self.roles = frozenset(
                role for source in sources.values() for role in _compared_roles(environment.parse(source)))
        except TemplateError as error:
            raise ValueError(f"chat template: {error}") from error
        self._named_tokens = dict(named_tokens or {})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_args: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt's text.

        messages: at least one, of role, content and, where present, name, tool_calls, tool_call_id and
        reasoning_content; a None counts as absent. The arguments of a tool call reach the template as they are: most
        templates expect an object, some a string. template_args: variables of the template, such as enable_thinking;
        add_generation_prompt is true unless given. tools: JSON schemas.
        Raises InvalidField if a template_args key is in REFUSED_ARGS or a token's name, the template refuses the
        conversation or fails on it, or the text is longer than MAX_CHARACTERS or takes longer than MAX_SECONDS (which
        is looked at between the template's pieces of output).
        """
        if not messages:
            raise InvalidField("chat.messages", "must have at least one message")
        arguments = {"add_generation_prompt": True, "documents": None, **(template_args or {})}
        if refused := sorted((REFUSED_ARGS | self._named_tokens.keys()) & arguments.keys()):
            raise InvalidField(f"chat.template_args.{refused[0]}", "is not for the client to set")
        if not isinstance(arguments["add_generation_prompt"], bool):
            raise InvalidField("chat.template_args.add_generation_prompt", "must be true or false")
        variables = {
            **self._named_tokens,
            **arguments,
            "messages": [_with_reasoning(message) for message in messages],
            "tools": list(tools) if tools else None,
        }
        template = self._templates.get("tool_use") if tools else None
        parts: list[str] = []
        size, deadline = 0, time.monotonic() + MAX_SECONDS
        try:
            for part in (template or self._templates["default"]).generate(variables):
                parts.append(part)
                size += len(part)
                if size > MAX_CHARACTERS:
                    raise InvalidField("chat", f"must make a prompt of at most {MAX_CHARACTERS} characters")
                if time.monotonic() > deadline:
                    raise InvalidField("chat", f"the chat template must take at most {MAX_SECONDS:g} seconds")
        except InvalidField:
            raise
        except TemplateError as error:
            raise InvalidField("chat", f"the model's chat template refuses it: {error}") from error
        except Exception as error:  # the template is a program: it fails in any way on what it does not expect
            what = f"{type(error).__name__}: {error}"
            raise InvalidField("chat", f"the model's chat template fails on it: {what}") from error
        return "".join(parts)


def _compared_roles(template: nodes.Template) -> Iterator[str]:
    """Yield the strings that a template compares with `x.role`, `x["role"]` or `role`, by ==, != or in."""
    for comparison in template.find_all(nodes.Compare):
        match comparison.expr:
            case nodes.Getattr(attr="role") | nodes.Getitem(arg=nodes.Const(value="role")) | nodes.Name(name="role"):
                for operand in comparison.ops:
                    constants = [operand.expr] if isinstance(operand.expr, nodes.Const) else (
                        operand.expr.find_all(nodes.Const))
                    yield from (constant.value for constant in constants if isinstance(constant.value, str))


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without its Nones, and with its thinking under the names that templates read it by."""
    known = {key: value for key, value in message.items() if value is not None}
    reasoning = next((known[key] for key in _REASONING if key in known), None)
    return known if reasoning is None else {"thinking": reasoning, **known, "reasoning_content": reasoning}


def load_chat_template(folder: Path, named_tokens: Mapping[str, str] | None = None) -> ChatTemplate | None:
    """The chat template of a model's folder; None if it has none.

    It is taken from chat_template.jinja (with others in additional_chat_templates/NAME.jinja), else from
    tokenizer_config.json (a string, or a list of named ones), else from chat_template.json.
    Raises ValueError naming what is wrong.
    """
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    templates: Any = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    for name in ("tokenizer_config.json", "chat_template.json"):
        if not templates and (folder / name).is_file():
            templates = json.loads((folder / name).read_text(encoding="utf-8")).get("chat_template")
    if isinstance(templates, list):
        templates = {entry["name"]: entry["template"] for entry in templates}
    return ChatTemplate(templates, named_tokens) if templates else None


def from_json(text: str, field: str) -> dict[str, Any]:
    """Return a JSON object's text as plain values, its keys in their order.

    Raise InvalidField, naming `field`, for a text that is not a JSON object or that escapes a lone surrogate.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    written = ""
    try:
        value = json.loads(text, parse_constant=refuse)
        if "\\u" in text:
            written = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise InvalidField(field, f"must be the text of a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise InvalidField(field, f"must be the text of a JSON object, got {type(value).__name__}")
    check_unicode(written, field)
    return value


def check_unicode(text: str, field: str) -> None:
    """Raise InvalidField for a text with a lone surrogate: JSON can escape one, and UTF-8 cannot encode it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        raise InvalidField(field, f"must be valid Unicode, got the lone surrogate {code}") from None


def from_struct(struct: struct_pb2.Struct, field: str) -> dict[str, Any]:
    """A Struct as plain values, in the order of its names, since it has none of its own. Its numbers are all floats:
    whole ones up to 2**53 become ints again. Raises InvalidField, naming `field`, for a NaN or an infinity."""
    return {key: _plain(struct.fields[key], f"{field}.{key}") for key in sorted(struct.fields)}


def _plain(value: struct_pb2.Value, field: str) -> Any:
    match value.WhichOneof("kind"):
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                raise InvalidField(field, f"must be a finite number, got {number}")
            return int(number) if number.is_integer() and abs(number) <= 1 << 53 else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return from_struct(value.struct_value, field)
        case "list_value":
            return [_plain(item, f"{field}[{i}]") for i, item in enumerate(value.list_value.values)]
    return None
