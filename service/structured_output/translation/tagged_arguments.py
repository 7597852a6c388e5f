"""Arguments of a tool call between tags, as Qwen3-Coder, Qwen3.5 and later models write them.

    <parameter=KEY>
    VALUE
    </parameter>

A value that may be a string is written as it is, any other value as JSON. Declared parameters are written in the order
of the schema. Other parameters are written only if the schema declares none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from npuserve.service.schema_types import is_annotation, json_type, resolve, schema_types
from npuserve.service.structured_output.translation import formats, pattern, schema
from npuserve.service.structured_output.translation.errors import ConstraintError
from npuserve.service.structured_output.translation.lark import GrammarBuilder, quote
from npuserve.service.text.answer_format import CALL_END, FUNCTION_END, PARAMETER_BEGIN, PARAMETER_END

MAX_DEPTH = 16
"""Maximum nesting of references and alternatives of a value that may be a string."""
_VALUE_END = "\n" + PARAMETER_END
_EXCLUDED = (PARAMETER_END, "\n" + PARAMETER_BEGIN, FUNCTION_END + CALL_END, f"{FUNCTION_END}\n{CALL_END}")
"""Texts that end a value for the parser of answers, see parsing/tagged_call.py."""
_REFUSED = frozenset({
    "$ref", "anyOf", "allOf", "oneOf", "patternProperties", "propertyNames", "minProperties", "maxProperties", "const",
    "enum", "not", "if", "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties"})
"""Keywords that restrict the arguments as a whole."""
_INNER_ANCHOR = re.compile(r"(?<!\[)\^")
_SYNTAX = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|[()|]", re.DOTALL)
"""Escapes, classes, and the characters of groups and alternatives in a translated expression."""
_DOCUMENT = ("$schema", "$defs", "definitions")


class TaggedArguments:
    """Translator of the schema of one tool's arguments.

    root: the schema.
    origin: name of the schema in errors of the library.
    """

    def __init__(self, root: Any, builder: GrammarBuilder, origin: str):
        if not isinstance(root, dict):
            raise _error("", "a schema of arguments must be an object")
        self._root: dict[str, Any] = root
        self._builder = builder
        self._origin = origin
        self._expressions: dict[str, str] = {}  # of values by what they are made of

    def expression(self) -> str:
        """Return the expression of all arguments. Raise ConstraintError."""
        for keyword in self._root:
            if keyword in _REFUSED:
                raise _error(f"/{keyword}", f"keyword '{keyword}' is not supported for arguments between tags")
        declared = self._root.get("properties", {})
        required = self._root.get("required", [])
        if not isinstance(declared, dict) or not isinstance(required, list):
            raise _error("", "'properties' must be an object, 'required' an array of strings")
        others = self._root.get("additionalProperties", True)
        parameters = {**declared, **{name: others for name in required if name not in declared}}
        parts = [self._parameter(name, value, name in required) for name, value in parameters.items()]
        if not parameters and others is not False:
            name = self._builder.terminal(r"/[^<>\n]+>\n/")
            parts.append(f"({quote(PARAMETER_BEGIN)} {name} {self._value(others, '/additionalProperties')})*")
        return self._builder.rule(" ".join(filter(None, parts)) or '""')

    def _parameter(self, name: str, value: Any, is_required: bool) -> str:
        path = schema.pointer("/properties", name)
        if not name or any(character in name for character in "<>\n"):
            raise _error(path, "the name of a parameter between tags must not be empty or have <, > or a line feed")
        if value is False and not is_required:
            return ""
        written = f"{self._builder.literal(f'{PARAMETER_BEGIN}{name}>' + chr(10))} {self._value(value, path)}"
        return written if is_required else f"({written})?"

    def _value(self, value: Any, path: str) -> str:
        """Return an expression of a value and its end."""
        key = json.dumps(value, sort_keys=True)
        if key not in self._expressions:
            options = self._options(value, path)
            self._expressions[key] = self._builder.rule(f"{self._builder.rule(' | '.join(options))} {quote(chr(10))}")
        return self._expressions[key]

    def _options(self, value: Any, path: str) -> Iterator[str]:
        """Yield an expression of each form of a value, with its end but for the last line feed."""
        if "string" not in schema_types(value, self._root):
            yield f"{self._json(value, path)} {quote(_VALUE_END)}"
            return
        branches = list(self._branches(value, path, 0))
        is_free = any(_is_open(branch) and "string" in schema_types(branch, self._root) for branch in branches)
        texts: list[str] = []
        for branch in branches:
            kinds = schema_types(branch, self._root)
            if "enum" in branch or "const" in branch:
                texts += [_written(item) for item in _values(branch)]
            elif "string" in kinds:
                yield self._text(branch, path)
            elif kinds == ("null",):
                texts += ["null"] * (not is_free)
            elif not is_free:
                yield f"{self._json(branch, path)} {quote(_VALUE_END)}"
            elif not _is_open(branch):
                raise _error(path, "a value that may be any text must not have another type with restrictions")
        if texts and not is_free:
            if any(end in text for text in texts for end in _EXCLUDED):
                raise _error(path, f"a value must not contain {PARAMETER_END}")
            yield self._builder.terminal(f"({' | '.join(map(quote, texts))}) {quote(_VALUE_END)}")

    def _branches(self, value: Any, path: str, depth: int) -> Iterator[dict[str, Any]]:
        """Yield schemas without references and alternatives, of which a value satisfies one."""
        if depth > MAX_DEPTH:
            raise _error(path, f"subschemas must be nested at most {MAX_DEPTH} deep")
        if value is False:
            raise _error(path, "the schema accepts nothing")
        branch = value if isinstance(value, dict) else {}
        keywords = {keyword for keyword in branch if not is_annotation(keyword)}
        combined = keywords & {"$ref", "anyOf", "oneOf", "allOf"}
        if combined and len(keywords) > 1:
            raise _error(path, f"'{min(combined)}' beside other keywords is not supported for a text between tags")
        if "$ref" in combined:
            yield from self._branches(self._target(branch["$ref"], path), path, depth + 1)
        elif combined:
            (keyword,) = combined
            choices = branch[keyword]
            if not isinstance(choices, list) or not choices or (keyword == "allOf" and len(choices) > 1):
                raise _error(f"{path}/{keyword}", f"'{keyword}' must be one schema or a choice of schemas")
            texts = [choice for choice in choices if "string" in schema_types(choice, self._root)]
            if keyword == "oneOf" and len(texts) > 1:
                raise _error(f"{path}/oneOf", "'oneOf' must have one text at most, for a text between tags")
            for choice in choices:
                yield from self._branches(choice, path, depth + 1)
        elif isinstance(branch.get("type"), list):
            yield from ({**branch, "type": kind} for kind in branch["type"])
        else:
            yield branch

    def _target(self, reference: Any, path: str) -> Any:
        target = resolve(reference, self._root)
        if target is None:
            raise _error(path, f"'$ref' must be a part of the schema, as #/$defs/name, got {str(reference)[:100]!r}")
        return target

    def _text(self, branch: Mapping[str, Any], path: str) -> str:
        """Return an expression of a text and its end."""
        self._checked(branch, path)
        low = branch.get("minLength", 0)
        high = branch.get("maxLength")
        bodies = []
        if low or high is not None:
            limit = "" if high is None else min(int(high), schema.MAX_COUNT)
            bodies.append(f"/(?s:.){{{int(low)},{limit}}}/")
        kind = branch.get("format")
        if kind in formats.FORMATS:
            bodies.append(f"/{formats.FORMATS[kind]}/")
        if "pattern" in branch:
            bodies.append(_whole(branch["pattern"], f"{path}/pattern"))
        body = self._builder.terminal(" & ".join(bodies)) if bodies else "/(?s:.)*/"
        return self._builder.text_until(_VALUE_END, _EXCLUDED, body=body)

    def _json(self, value: Any, path: str) -> str:
        if value in ({"type": "boolean"}, {"type": "null"}):
            return '("true" | "false")' if value["type"] == "boolean" else '"null"'
        key = f"json {json.dumps(value, sort_keys=True)}"
        if key not in self._expressions:
            self._expressions[key] = self._builder.json_schema(
                {**self._checked(value, path), schema.ORIGIN: self._origin})
        return self._expressions[key]

    def _checked(self, value: Any, path: str) -> dict[str, Any]:
        """Return a part of the schema, translated. Raise ConstraintError with its path."""
        document = {name: self._root[name] for name in _DOCUMENT if name in self._root}
        try:
            return schema.translate_value({**document, **value} if isinstance(value, dict) else value)
        except ConstraintError as error:
            message, separator, place = str(error).rpartition(" at /")
            if not separator:
                raise
            raise ConstraintError(f"{message} at {path}{'/' if place else ''}{place}") from error


def _is_open(branch: Mapping[str, Any]) -> bool:
    """Return whether a schema restricts nothing but the type."""
    return all(keyword == "type" or is_annotation(keyword) for keyword in branch)


def _values(branch: Mapping[str, Any]) -> list[Any]:
    """Return the values of `enum` and `const` that have the schema's type."""
    listed = branch.get("enum", [branch.get("const")])
    values = [value for value in listed if "const" not in branch or value == branch["const"]]
    kind = branch.get("type")
    if kind is None:
        return values
    return [value for value in values if json_type(value) == kind or (kind == "number" and isinstance(value, int))]


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _whole(text: str, path: str) -> str:
    """Return a terminal of the texts in which an expression is found. Raise ConstraintError."""
    try:
        body = pattern.translate(text, quoted=False)
    except pattern.PatternError as error:
        raise _error(path, f"regular expression {text[:60]!r}: {error}") from error
    begins = body.startswith("^")
    ends = body.endswith("$")
    inner = body[begins:len(body) - ends]
    if "$" in inner or _INNER_ANCHOR.search(inner) or ((begins or ends) and _has_alternatives(inner)):
        raise _error(path, f"regular expression {text[:60]!r}: of a text between tags, '^' may be first and '$' last, "
                           "without alternatives around them: write ^(?:a|b)$")
    any_text = "(?s:.)*"
    return f"/{'' if begins else any_text}(?:{inner}){'' if ends else any_text}/"


def _has_alternatives(body: str) -> bool:
    """Return whether a translated expression has a | outside of groups and classes."""
    depth = 0
    for part in _SYNTAX.findall(body):
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            return True
    return False


def _error(path: str, message: str) -> ConstraintError:
    return ConstraintError(f"json_schema: {message} at {path or '/'}")
