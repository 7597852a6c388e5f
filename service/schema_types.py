"""JSON types that a JSON schema names, without a check of the schema: for values that are written as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

TYPES = ("null", "integer", "number", "boolean", "object", "array", "string")
TEXT: tuple[str, ...] = ("string",)
"""Types of a value whose schema names no type."""
MAX_DEPTH = 16
"""Maximum nesting of references and alternatives whose types are read."""
_ALIASES = (
    ("string", ("str", "text", "varchar", "char", "enum")), ("integer", ("int", "uint", "long", "short", "unsigned")),
    ("number", ("num", "float", "double")), ("boolean", ("bool", "binary")), ("object", ("obj", "dict", "map")),
    ("array", ("arr", "list", "tuple", "sequence")), ("null", ("null", "none")))
"""Type -> beginnings of its names, also of those that are not of JSON Schema."""
_ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"})


def schema_types(schema: Any, root: Any) -> tuple[str, ...]:
    """Return the types that a schema allows, as far as it names them; TEXT if it names none.

    root: schema in which references are resolved.
    """
    names = set(_named_types(schema, root, 0))
    return tuple(name for name in TYPES if name in names) or TEXT


def _named_types(schema: Any, root: Any, depth: int) -> Iterator[str]:
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return
    kinds = schema.get("type")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if isinstance(kind, str):
            yield from _known_types(kind)
    if kinds is None:
        values = schema.get("enum")
        for value in [*(values if isinstance(values, list) else ()), *([schema["const"]] if "const" in schema else ())]:
            yield json_type(value)
    for keyword in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(keyword)
        for choice in choices if isinstance(choices, list) else ():
            yield from _named_types(choice, root, depth + 1)
    if "$ref" in schema:
        yield from _named_types(resolve(schema["$ref"], root), root, depth + 1)


def _known_types(name: str) -> Sequence[str]:
    """Return the types that a name means; all for an unknown name."""
    lower = name.strip().lower()
    return [kind for kind, names in _ALIASES if lower == kind or lower.startswith(names)][:1] or TYPES


def json_type(value: Any) -> str:
    """Return the JSON type of a parsed value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case dict():
            return "object"
    return "array"


def resolve(reference: Any, root: Any) -> Any:
    """Return the part of the document that a reference of the form #/a/b names; None for another one."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    value = root
    for step in reference.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        value = value.get(step) if isinstance(value, dict) else None
    return value


def is_annotation(keyword: str) -> bool:
    """Return whether a keyword of JSON Schema restricts no value."""
    return keyword in _ANNOTATIONS
