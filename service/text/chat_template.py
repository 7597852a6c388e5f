"""Renderer of a model's chat template: a conversation to the text of its prompt.

The result equals that of transformers' apply_chat_template(tokenize=False). The template comes with the model and runs
in jinja2's immutable sandbox; the conversation comes from the client. The output is bounded here. Python cannot bound
the time and memory of a template, nor of its compilation, which computes constants. So template_process.py compiles and
runs it in a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from npuserve.service.errors import InvalidField
from npuserve.service.text.answer_format import template_format

MAX_CHARACTERS = 64 << 20
# Keys of template_args that a client may not set: variables from the request and the tokenizer, functions of the
# environment, and parameters of apply_chat_template that are not variables. The named tokens are refused as well.
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
    """Tag {% generation %}, which marks the model's turns for training. Only its content is rendered."""

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
    """A model's chat template, or several by name. Safe to use from several threads.

    templates: source, or sources by name; `tool_use` is used for requests with tools, `default` for the other ones.
    named_tokens: variables of the template, such as bos_token.
    files: names of the templates' files, for errors.
    roles: strings that a template compares with a message's role.
    format: format of the model's answers.

    Raises ValueError for a template that cannot be compiled, and if none is named `default`.
    """

    def __init__(
        self, templates: str | Mapping[str, str], named_tokens: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
    ):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        sources = {"default": templates} if isinstance(templates, str) else dict(templates)
        if "default" not in sources:
            raise ValueError(f"chat template: none of {sorted(sources)} is named default")
        self._templates: dict[str, Template] = {}
        roles = set[str]()
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
                roles.update(_compared_roles(environment.parse(source)))
            except Exception as error:  # Python compiles the template too, and computes its constants
                what = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
                raise ValueError(f"{(files or {}).get(name, 'chat template')}: {what}") from error
        self.roles = frozenset(roles)
        self.format = template_format("".join(sources.values()))
        self._named_tokens = dict(named_tokens or {})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_args: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt's text.

        messages: at least one; keys are role, content and optionally name, tool_calls, tool_call_id and
            reasoning_content. A key with None is absent. The arguments of a tool call are passed to the template
            unchanged: most templates expect an object, some a string.
        template_args: variables of the template, such as enable_thinking; add_generation_prompt is true by default.
        tools: JSON schemas.

        Raises InvalidField for a key of template_args that is in REFUSED_ARGS or names a token, and for a conversation
        that the template refuses or fails on. Also for a text above MAX_CHARACTERS.
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
        size = 0
        try:
            for part in (template or self._templates["default"]).generate(variables):
                parts.append(part)
                size += len(part)
                if size > MAX_CHARACTERS:
                    raise InvalidField("chat", f"must make a prompt of at most {MAX_CHARACTERS} characters")
        except InvalidField:
            raise
        except TemplateError as error:
            raise InvalidField("chat", f"the model's chat template refuses it: {error}") from error
        except Exception as error:  # a template is a program, which may raise any exception
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
    """Return a message without None values, with its reasoning under each name that templates use."""
    known = {key: value for key, value in message.items() if value is not None}
    reasoning = next((known[key] for key in _REASONING if key in known), None)
    return known if reasoning is None else {"thinking": reasoning, **known, "reasoning_content": reasoning}


class TemplateFiles(NamedTuple):
    """Chat templates of a model's folder.

    sources: source of each template by its name; see `ChatTemplate`.
    files: name of the file of each template.
    """

    sources: dict[str, str]
    files: dict[str, str]


def read_templates(folder: Path) -> TemplateFiles | None:
    """Read the sources of the chat templates of a model's folder; return None if the folder has none.

    Reads the first of: chat_template.jinja, with additional_chat_templates/NAME.jinja; tokenizer_config.json, a string
    or a list of named templates; chat_template.json. Raises ValueError, naming the file, for a malformed one.
    """
    paths = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        paths["default"] = folder / "chat_template.jinja"
    if paths:
        files = {name: str(path.relative_to(folder)) for name, path in paths.items()}
        return TemplateFiles({name: _read(path, files[name]) for name, path in paths.items()}, files)
    for file in ("tokenizer_config.json", "chat_template.json"):
        if not (folder / file).is_file():
            continue
        try:
            templates = json.loads(_read(folder / file, file)).get("chat_template")
            if isinstance(templates, list):
                templates = {entry["name"]: entry["template"] for entry in templates}
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}: {type(error).__name__}: {error}") from error
        sources = {"default": templates} if isinstance(templates, str) else templates
        if sources and not (isinstance(sources, dict) and all(isinstance(source, str) for source in sources.values())):
            raise ValueError(
                f"{file}: chat_template: must be text or a list of named templates, got {templates!r:.100}")
        if sources and any(sources.values()):
            return TemplateFiles(sources, dict.fromkeys(sources, file))
    return None


def _read(path: Path, name: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: {error}") from error


def load_chat_template(folder: Path, named_tokens: Mapping[str, str] | None = None) -> ChatTemplate | None:
    """Compile the chat template of a model's folder; return None if the folder has none. See `read_templates`.

    Raises ValueError, naming the file, for a template that cannot be compiled.
    """
    templates = read_templates(folder)
    return ChatTemplate(templates.sources, named_tokens, templates.files) if templates else None
