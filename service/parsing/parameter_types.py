"""JSON types of the parameters of tools, and the values of arguments that a model writes as text between tags.

A chat template writes a text as it is and other values as JSON, so the text "5" may be a number or a string. The tool's
schema decides. The rules are those of vLLM's parsers of the same format, except that no value is changed silently: a
text that is none of its types stays a string.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from npuserve.service.schema_types import TEXT, json_type, schema_types

MAX_LITERAL_CHARACTERS = 16 << 10
"""Maximum length of a Python literal that is converted. The time to parse one is some microseconds a character."""


class FunctionTypes(NamedTuple):
    """Types of the parameters of one function, in the order of TYPES.

    declared: name of each declared parameter to its types.
    others: types of any other parameter.
    """

    declared: dict[str, tuple[str, ...]]
    others: tuple[str, ...] = TEXT


CallTypes = Mapping[str, FunctionTypes]
"""Name of each function -> types of its parameters."""


def read_types(tools: Sequence[Mapping[str, Any]]) -> dict[str, FunctionTypes]:
    """Return the types of checked tools, see `tool_choice.check_tools`."""
    types: dict[str, FunctionTypes] = {}
    for tool in tools:
        root = tool["function"].get("parameters") or {}
        properties = root.get("properties")
        declared = properties if isinstance(properties, dict) else {}
        types[tool["function"]["name"]] = FunctionTypes(
            {name: schema_types(schema, root) for name, schema in declared.items()},
            schema_types(root.get("additionalProperties"), root))
    return types


def json_text(text: str, types: Sequence[str]) -> str:
    """Return the JSON text of a value that was written as `text`. types: of its parameter."""
    stripped = text.strip()
    lower = stripped.lower()
    if lower in ("null", "none") and ("null" in types or "string" not in types):
        return "null"
    if "boolean" in types:
        if lower in ("true", "false"):
            return lower
        if lower in ("0", "1") and not {"integer", "number"}.intersection(types):
            return "true" if lower == "1" else "false"
    is_container = bool({"object", "array"}.intersection(types))
    try:
        value = json.loads(stripped, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        literal = _literal(stripped) if is_container else None
    else:
        if isinstance(value, str):  # an object as Python writes it, which is written as JSON text again
            literal = _literal(value) if is_container else None
        elif _is_of(value, types) or "string" not in types:
            return stripped
        else:
            literal = None
    return literal if literal is not None else json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _is_of(value: Any, types: Sequence[str]) -> bool:
    kind = json_type(value)
    return kind in types or (kind == "integer" and "number" in types)


def _literal(text: str) -> str | None:
    """Return the JSON text of an object or array that is written as a Python literal; None for another text."""
    if len(text) > MAX_LITERAL_CHARACTERS or not text.startswith(("{", "[", "(")):
        return None
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
