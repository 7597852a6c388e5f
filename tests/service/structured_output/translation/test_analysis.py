"""Alternatives that exclude each other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from npuserve.service.structured_output.translation.analysis import has_exclusive_choices


def kind(*values: Any, **more: Any) -> dict[str, Any]:
    """Return a schema of objects with these kinds."""
    return {"type": "object", "properties": {"kind": {"enum": [*values]}}, "required": ["kind"], **more}


A, B = kind("a"), kind("b", 1)
UNTYPED = [{name: inner for name, inner in schema.items() if name != "type"} for schema in (A, B)]
REFERENCES = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]


@pytest.mark.parametrize(("schemas", "more", "is_exclusive"), [
    ([{"type": "integer"}, {"type": ["string", "null"]}], {}, True),
    ([{"type": "integer"}, {"type": "number"}], {}, False),
    ([{"type": "string"}, {"const": 1}], {}, True),
    ([{"type": "string"}, {"const": "a"}], {}, False),
    ([{"enum": [1, None, "1"]}, {"enum": [True, [1], {"a": 1}]}], {}, True),
    ([{"enum": [1]}, {"enum": [1.0]}], {}, False),
    ([{"enum": [{"a": 1, "b": 2}]}, {"const": {"b": 2.0, "a": 1}}], {}, False),
    ([{"const": i} for i in range(5000)], {}, True),
    ([A, B], {}, True),
    ([A, B, {"type": "array"}, False], {}, True),
    ([A, kind("b", "a")], {}, False),
    ([A, kind("b", required=[])], {}, False),
    ([A, True], {}, False),
    ([A, {}], {}, False),
    (UNTYPED, {}, False),
    (UNTYPED, {"type": "object"}, True),
    ([kind("a", type=["object", "null"]), B], {}, True),
    ([kind("a", type=["object", "null"]), kind("b", type=["object", "null"])], {}, False),
    (REFERENCES, {"$defs": {"a": A, "b": B}}, True),
    (REFERENCES, {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}, {"required": ["x"]}]}, "b": B}}, False),
    (REFERENCES, {"$defs": {"a": {"allOf": [{"properties": A["properties"]}, {"type": "object"}], "required": ["kind"]},
                            "b": B}}, True),
    (REFERENCES, {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, False),
], ids=itertools.count())
def test_alternatives_exclude_each_other(schemas: list[Any], more: dict[str, Any], is_exclusive: bool) -> None:
    assert has_exclusive_choices({"oneOf": schemas, **more}) is is_exclusive
    inner = {**more, "oneOf": schemas, "$defs": {}}
    nested = {"anyOf": [{"items": {"properties": {"x": inner}}}], "$defs": more.get("$defs", {})}
    assert has_exclusive_choices(nested) is is_exclusive
