"""Search for the part of a JSON schema that the grammar library refuses, since its errors have no path.

A refused schema is walked from its root: where a part alone is refused with the same message, the search continues in
this part. The last one is named. Only refused schemas are searched, for a bounded time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from npuserve.service.structured_output.translation.errors import ConstraintError
from npuserve.service.structured_output.translation.schema import ORIGIN, pointer

MAX_SECONDS = 0.2
"""Processor time of a search. The path that was found until then is named."""
_SCHEMAS = ("additionalProperties", "items")
_LISTS = ("prefixItems", "anyOf", "allOf", "oneOf")
_MAPS = ("properties", "patternProperties")
_MESSAGES = {
    "oneOf constraints": (("oneOf",), "keyword 'oneOf' is supported only if its schemas exclude each other"),
    "min/maxProperties": (("maxProperties", "minProperties"), (
        "keyword '{}' is supported only if all 'properties' are in 'required', or as 1 more than 'required' lists if "
        "'additionalProperties' is false and there are no 'patternProperties'")),
    "patternProperty": (("patternProperties",), ""),
}
"""Beginning of a message -> the keywords that it is about, and clearer text that names the one found; "" for none."""

Refusal = Callable[[str], str]
"""Function that returns the library's message for a grammar, "" if it compiles."""


def located(message: str, grammar: str, refusal: Refusal) -> ConstraintError:
    """Return the error of a refused grammar with the path of the schema's part that causes it, if one does.

    message: message of the library, for `grammar`.
    """
    end = time.process_time() + MAX_SECONDS
    for part in _subgrammars(grammar):
        schema = part.get("json_schema")
        if not isinstance(schema, dict):
            continue
        options = {name: value for name, value in schema.items() if name in ("$defs", "x-guidance")}

        def is_refused(inner: Any, options: Mapping[str, Any] = options) -> bool:
            if not isinstance(inner, dict) or time.process_time() > end:
                return False
            alone = {"name": "main", "json_schema": {**inner, **options}}
            return refusal(json.dumps({"grammars": [alone]}, ensure_ascii=False)) == message

        if is_refused(schema):
            return _error(message, schema.get(ORIGIN, ""), *_refused_part(schema, is_refused))
    return ConstraintError(message)


def _subgrammars(grammar: str) -> list[dict[str, Any]]:
    """Return the parts of a grammar; none for one in the syntax of Lark."""
    if not grammar.startswith("{"):
        return []
    parts: list[dict[str, Any]] = json.loads(grammar)["grammars"]
    return parts


def _refused_part(schema: Mapping[str, Any], is_refused: Callable[[Any], bool]) -> tuple[str, Mapping[str, Any]]:
    """Return the path of the smallest refused part, and the part."""
    definitions = schema.get("$defs", {})
    path = ""
    entered = set[str]()
    while True:
        for step, inner in _parts(schema):
            if step == "$ref" and inner not in entered and is_refused(target := definitions[inner]):
                entered.add(inner)
                schema = target
                path = target.get(ORIGIN, path)
                break
            if step != "$ref" and is_refused(inner):
                schema = inner
                path += step
                break
        else:
            return path, schema


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each part; for a reference "$ref" and the name of its definition."""
    if reference := schema.get("$ref"):
        yield "$ref", reference.rpartition("/")[2]
    for keyword in _SCHEMAS:
        if keyword in schema:
            yield f"/{keyword}", schema[keyword]
    for keyword in _LISTS:
        for index, inner in enumerate(schema.get(keyword, ())):
            yield f"/{keyword}/{index}", inner
    for keyword in _MAPS:
        for name, inner in schema.get(keyword, {}).items():
            yield pointer(f"/{keyword}", name), inner


def _error(message: str, origin: str, path: str, part: Mapping[str, Any]) -> ConstraintError:
    clearer = (entry for begin, entry in _MESSAGES.items() if message.startswith(begin))
    keywords, text = next(clearer, ((), ""))
    keyword = next((name for name in keywords if name in part), "")
    text = text.format(keyword or "/".join(keywords)) or message
    path = f"{path}/{keyword}" if keyword else path or "/"
    described = f"{text} at {path}"
    if not origin:
        return ConstraintError(f"json_schema: {described}")
    if origin.startswith("structural_tag: "):
        return ConstraintError(f"{origin}: {described}")
    return ConstraintError(described, origin)
