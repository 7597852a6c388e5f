"""Every keyword of JSON Schema drafts 7 and 2020-12, and every format: honoured, refused with its path, or without
effect, as docs/clients.md says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jsonschema_specifications import REGISTRY

from npuserve.service.structured_output.translation import formats
from npuserve.service.structured_output.translation.errors import ConstraintError
from npuserve.service.structured_output.translation.schema import translate_value
from tests.support.grammars import accepts, matcher

DOCUMENT = Path(__file__).parents[4] / "docs" / "clients.md"
OLD = "http://json-schema.org/draft-07/schema#"
INTEGER, STRING, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}

HONOURED: dict[str, tuple[Any, str, str]] = {
    "type": ({"type": "null"}, "null", "1"),
    "enum": ({"enum": [1, "a"]}, '"a"', "2"),
    "const": ({"const": [1]}, "[1]", "[2]"),
    "properties": ({"type": "object", "properties": {"a": INTEGER}}, '{"a":1}', '{"a":"b"}'),
    "patternProperties": ({"type": "object", "patternProperties": {"^x": INTEGER}}, '{"x":1}', '{"x":""}'),
    "additionalProperties": ({"type": "object", "additionalProperties": INTEGER}, '{"x":1}', '{"x":""}'),
    "required": ({"type": "object", "required": ["a"]}, '{"a":1}', "{}"),
    "propertyNames": ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, '{"b":1}', '{"c":1}'),
    "minProperties": ({"type": "object", "minProperties": 1}, '{"a":1}', "{}"),
    "maxProperties": ({"type": "object", "maxProperties": 1}, '{"a":1}', '{"a":1,"b":1}'),
    "items": ({"type": "array", "items": INTEGER}, "[1]", '[""]'),
    "prefixItems": ({"type": "array", "prefixItems": [INTEGER]}, '[1,""]', '[""]'),
    "additionalItems": (
        {"$schema": OLD, "type": "array", "items": [INTEGER], "additionalItems": STRING}, '[1,""]', "[1,2]"),
    "minItems": ({"type": "array", "minItems": 1}, "[1]", "[]"),
    "maxItems": ({"type": "array", "maxItems": 1}, "[1]", "[1,2]"),
    "minLength": ({"type": "string", "minLength": 2}, '"ab"', '"a"'),
    "maxLength": ({"type": "string", "maxLength": 1}, '"a"', '"ab"'),
    "pattern": ({"type": "string", "pattern": "b$"}, '"ab"', '"ba"'),
    "format": ({"type": "string", "format": "date"}, '"2024-02-29"', '"2023-02-29"'),
    "minimum": ({"type": "integer", "minimum": 3}, "3", "2"),
    "maximum": ({"type": "integer", "maximum": 3}, "3", "4"),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 3}, "4", "3"),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 3}, "2", "3"),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, "6", "7"),
    "anyOf": ({"anyOf": [INTEGER, NULL]}, "null", '""'),
    "allOf": ({"allOf": [INTEGER, {"minimum": 3}]}, "3", "2"),
    "oneOf": ({"oneOf": [INTEGER, NULL]}, "null", '""'),
    "$ref": ({"$ref": "#/$defs/a", "$defs": {"a": NULL}}, "null", "1"),
    "$defs": ({"$ref": "#/$defs/a", "$defs": {"a": NULL}}, "null", "1"),
    "definitions": ({"$schema": OLD, "$ref": "#/definitions/a", "definitions": {"a": NULL}}, "null", "1"),
    "$id": ({"$id": "https://a.b/c", "$ref": "d", "$defs": {"a": {"$id": "d", "type": "null"}}}, "null", "1"),
    "$anchor": ({"$ref": "#here", "$defs": {"a": {"$anchor": "here", "type": "null"}}}, "null", "1"),
    "$schema": ({"$schema": OLD, "$ref": "#/definitions/a", "definitions": {"a": NULL}, "type": "string"}, "null", "1"),
}
"""Keyword -> schema, a text that it accepts, and one that it refuses."""
REFUSED: dict[str, Any] = {
    "not": {"not": NULL}, "if": {"if": STRING, "then": NULL}, "then": {"then": NULL, "if": STRING},
    "else": {"else": NULL, "if": STRING}, "dependencies": {"dependencies": {"a": ["b"]}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}}, "dependentSchemas": {"dependentSchemas": {"a": False}},
    "contains": {"contains": {}}, "minContains": {"minContains": 2, "contains": {}},
    "maxContains": {"maxContains": 2, "contains": {}},
    "uniqueItems": {"uniqueItems": True}, "unevaluatedItems": {"unevaluatedItems": False},
    "unevaluatedProperties": {"unevaluatedProperties": False}, "$dynamicRef": {"$dynamicRef": "#a"},
}
NO_EFFECT: dict[str, Any] = {
    "title": "t", "description": "d", "default": 1, "examples": [1], "deprecated": True, "readOnly": True,
    "writeOnly": True, "$comment": "c", "$vocabulary": {"https://a.b": True}, "$dynamicAnchor": "a",
    "contentEncoding": "base64", "contentMediaType": "text/html", "contentSchema": NULL,
}
IN_PART: dict[str, tuple[Any, str, str]] = {
    "oneOf": ({"properties": {"a/b": {"oneOf": [STRING, {"type": "string", "maxLength": 3}]}}},
              "exclude each other", "/properties/a~1b/oneOf"),
    "patternProperties": ({"$defs": {"~": {"patternProperties": {"^a": INTEGER, "b$": NULL}}},
                           "items": {"$ref": "#/$defs/~0"}}, "not disjoint", "/$defs/~0/patternProperties"),
    "propertyNames": ({"items": {"properties": {"a": NULL}, "propertyNames": {"maxLength": 3}}}, "without declared",
                      "/items/propertyNames"),
    "minProperties": ({"prefixItems": [{"minProperties": 2}]}, "at most one property", "/prefixItems/0/minProperties"),
    "maxProperties": ({"anyOf": [NULL, {"properties": {"a": NULL, "b": NULL}, "maxProperties": 1}]},
                      "are in 'required'", "/anyOf/1/maxProperties"),
    "$ref": ({"items": {"$ref": "https://a.b/c"}}, "another document", "/items/$ref"),
    "pattern": ({"additionalProperties": {"pattern": "(?=a)b"}}, "look-around", "/additionalProperties/pattern"),
    "enum": ({"allOf": [{"enum": [1, 2**60]}]}, "at most 9007199254740992", "/allOf/0/enum"),
    "minimum": ({"items": {"minimum": 1e300}}, "must be within", "/items/minimum"),
    "multipleOf": ({"items": {"multipleOf": 0.07}}, "0.07 is not supported", "/items/multipleOf"),
    "minItems": ({"items": {"type": "array", "minItems": 10**6}}, "at most 100000", "/items/minItems"),
}
"""Keyword -> schema that is refused, part of the message, and the path in it."""


def keywords(kind: Any) -> set[str]:
    """Return the keywords of a draft's meta-schema and of its vocabularies."""
    found = set(kind.META_SCHEMA.get("properties", ()))
    for reference in kind.META_SCHEMA.get("allOf", ()):
        found |= set(REGISTRY.contents(f"https://json-schema.org/draft/2020-12/{reference['$ref']}")["properties"])
    return found


ALL = keywords(jsonschema.Draft7Validator) | keywords(jsonschema.Draft202012Validator)


def documented() -> dict[str, set[str]]:
    """Return the names in the table of keywords and formats in docs/clients.md, by the first column."""
    table = DOCUMENT.read_text().partition("| JSON Schema |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines()[2:]]
    return {name.strip(): set(re.findall(r"`([^`]+)`", text)) for name, text in rows}


def test_every_keyword_is_known() -> None:
    assert {*HONOURED, *REFUSED, *NO_EFFECT} == ALL - {"$recursiveAnchor", "$recursiveRef"}
    assert len(ALL) == len(HONOURED) + len(REFUSED) + len(NO_EFFECT) + len(ALL & {"$recursiveAnchor", "$recursiveRef"})


def test_documentation_lists_every_keyword_and_format() -> None:
    table = documented()
    assert table["honoured"] | table["honoured in part"] == {*HONOURED}
    assert not table["honoured"] & table["honoured in part"]
    assert table["honoured in part"] <= {*IN_PART}
    assert table["refused"] == {*REFUSED, "$recursiveRef"}
    assert table["without effect"] == {*NO_EFFECT, "$recursiveAnchor"}
    known = {name for kind in (jsonschema.Draft7Validator, jsonschema.Draft202012Validator)
             for name in kind.FORMAT_CHECKER.checkers}
    assert table["formats, honoured"] == {*formats.FORMATS} - {"ip-address", "host-name"}
    assert table["formats, refused"] == {*formats.UNSUPPORTED}
    assert known <= table["formats, honoured"] | table["formats, refused"] | {"color", "idn-hostname"}


@pytest.mark.parametrize("keyword", HONOURED)
def test_honoured_keyword_restricts_the_answer(keyword: str) -> None:
    schema, good, bad = HONOURED[keyword]
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    judge = kind(schema, format_checker=kind.FORMAT_CHECKER)
    assert judge.is_valid(json.loads(good))
    assert not judge.is_valid(json.loads(bad))
    assert accepts(matcher("json_schema", schema), good)
    assert not accepts(matcher("json_schema", schema), bad)


@pytest.mark.parametrize("keyword", REFUSED)
def test_refused_keyword_is_named_with_its_path(keyword: str) -> None:
    schema = {"properties": {"a": {"items": REFUSED[keyword]}}}
    with pytest.raises(ConstraintError) as error:
        matcher("json_schema", schema)
    assert str(error.value) == f"json_schema: keyword '{keyword}' is not supported at /properties/a/items/{keyword}"


@pytest.mark.parametrize("keyword", NO_EFFECT)
def test_keyword_without_effect_changes_nothing(keyword: str) -> None:
    plain = {"type": "object", "properties": {"a": INTEGER}}
    for schema in (plain, {"anyOf": [plain, NULL]}):
        assert translate_value({**schema, keyword: NO_EFFECT[keyword]}) == translate_value(schema)
    assert accepts(matcher("json_schema", {**INTEGER, keyword: NO_EFFECT[keyword]}), "3")


@pytest.mark.parametrize("keyword", IN_PART)
def test_keyword_that_cannot_be_honoured_is_named_with_its_path(keyword: str) -> None:
    schema, text, path = IN_PART[keyword]
    with pytest.raises(ConstraintError, match=re.escape(text)) as error:
        matcher("json_schema", schema)
    assert str(error.value).startswith("json_schema: ")
    assert str(error.value).endswith(f" at {path}")


@pytest.mark.parametrize(("schema", "path"), [
    ({"properties": {"a": {}}, "minProperties": 1}, "keyword 'minProperties' is .* at /minProperties"),
    ({"items": {"properties": {"a": {}, "b": {}}, "required": ["a"], "minProperties": 2}}, "at /items/minProperties"),
    ({"properties": {"a": {}}, "minProperties": 1, "maxProperties": 2}, "keyword 'maxProperties' .* at /maxProperties"),
    ({"properties": {"a": {}}, "allOf": [{"minProperties": 1}]}, "keyword 'maxProperties/minProperties' .* at /"),
])
def test_refused_number_of_properties_is_named_by_its_own_keyword(schema: Any, path: str) -> None:
    with pytest.raises(ConstraintError, match=f"^json_schema: .*{path}$"):
        matcher("json_schema", schema)


def test_one_more_property_is_honoured_where_no_others_may_follow() -> None:
    schema = {"type": "object", "properties": {"a": NULL, "b": NULL, "c": NULL}, "required": ["a"],
              "additionalProperties": False}
    for count, bad in (("minProperties", '{"a":null}'), ("maxProperties", '{"a":null,"b":null,"c":null}')):
        assert accepts(matcher("json_schema", {**schema, count: 2}), '{"a":null,"b":null}')
        assert not accepts(matcher("json_schema", {**schema, count: 2}), bad)


@pytest.mark.parametrize("name", sorted({*formats.FORMATS, *formats.UNSUPPORTED, "int32"}))
def test_format_is_honoured_refused_or_unknown(name: str) -> None:
    schema = {"properties": {"a": {"type": "string", "format": name}}}
    if name in formats.UNSUPPORTED:
        message = f"json_schema: format '{name}' is not supported at /properties/a/format"
        with pytest.raises(ConstraintError, match=re.escape(message)):
            matcher("json_schema", schema)
        return
    whole = {"type": "object", **schema, "required": ["a"], "additionalProperties": False}
    assert accepts(matcher("json_schema", whole), '{"a":"\\n"}') == (name == "int32")


@pytest.mark.parametrize("schema", [
    {"uniqueItems": False}, {"uniqueItems": True, "maxItems": 1}, {"if": NULL}, {"then": False}, {"minContains": 3},
    {"contains": INTEGER, "minContains": 0}, {"propertyNames": {}}, {"unevaluatedProperties": True},
    {"dependentRequired": {}},
], ids=str)
def test_refused_keyword_without_effect_is_accepted(schema: Any) -> None:
    assert accepts(matcher("json_schema", schema), "[]")
