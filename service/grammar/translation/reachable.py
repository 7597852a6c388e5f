"""Search for recursive schemas that no finite text satisfies, such as an object that requires itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npuserve.service.grammar.translation.errors import ConstraintError

_SCALARS = frozenset({"null", "boolean", "integer", "number", "string"})


def require_finite_value(schema: Mapping[str, Any]) -> None:
    """Raise ConstraintError if every value of the schema is infinite.

    schema: translated schema, whose references are "#/$defs/NAME".

    The set of definitions with a finite value is the least fixed point: it grows until no definition is added.
    """
    definitions = schema.get("$defs", {})
    finite: set[str] = set()
    while True:
        found = {name for name, inner in definitions.items() if name not in finite and _has_value(inner, finite)}
        if not found:
            break
        finite |= found
    if not _has_value(schema, finite):
        raise ConstraintError("json_schema: '$ref' is recursive, and no finite value satisfies the schema at /")


def _has_value(schema: Any, finite: set[str]) -> bool:
    if isinstance(schema, bool):
        return True  # `false` is found by the library, which knows the path
    if "$ref" in schema and schema["$ref"].rpartition("/")[2] not in finite:
        return False
    if not all(_has_value(inner, finite) for inner in schema.get("allOf", ())):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and not any(_has_value(inner, finite) for inner in schema[keyword]):
            return False
    if "enum" in schema or "const" in schema:
        return True
    types = schema.get("type", "null")
    types = {types} if isinstance(types, str) else set(types)
    return bool(types & _SCALARS) or any(
        (name == "object" and _has_object(schema, finite)) or (name == "array" and _has_array(schema, finite))
        for name in types)


def _has_object(schema: Mapping[str, Any], finite: set[str]) -> bool:
    properties, other = schema.get("properties", {}), schema.get("additionalProperties", True)
    return all(_has_value(properties.get(name, other), finite) for name in schema.get("required", ()))


def _has_array(schema: Mapping[str, Any], finite: set[str]) -> bool:
    prefix = schema.get("prefixItems", [])
    return all(_has_value(prefix[i] if i < len(prefix) else schema.get("items", True), finite)
               for i in range(min(schema.get("minItems", 0), len(prefix) + 1)))
