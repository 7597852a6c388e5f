"""JSON schemas: refused keywords, references, formats, and answers judged by `jsonschema`."""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import json
import random
import re
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import pytest

from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.structured_output.translation.errors import ConstraintError
from tests.support.grammars import accepts, compilation, matcher, walk

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}
SCHEMAS: dict[str, Any] = {
    "object": OBJECT,
    "closed object": {**OBJECT, "additionalProperties": False},
    "additional": {"type": "object", "properties": {"a\n\"": {"type": "integer"}},
                   "additionalProperties": {"type": "boolean"}},
    "pattern properties": {"type": "object", "patternProperties": {"^x": {"type": "integer"}, "^y": {"type": "null"}},
                           "additionalProperties": False},
    "patterns of declared names": {
        "type": "object", "patternProperties": {"^(lat|lon)$": {"type": "integer"}, "^x$": {"maximum": 3}},
        "properties": {"x": {"type": "integer"}}, "required": ["lat", "lon"], "additionalProperties": False},
    "names of an enum": {
        "$defs": {"names": {"enum": ["x", "y\"", 3], "type": "string"}}, "type": "object", "required": ["y\""],
        "properties": {"x": {"type": "null"}, "z": {"type": "string"}}, "additionalProperties": {"type": "integer"},
        "propertyNames": {"$ref": "#/$defs/names", "title": "t"}},
    "one name": {"type": "object", "additionalProperties": {"type": "null"}, "propertyNames": {"const": "x"}},
    "names of a closed object": {"type": "object", "properties": {"x": {"type": "null"}},
                                 "additionalProperties": False, "propertyNames": {"enum": ["x", "y"]}},
    "names of two subschemas": {"type": "object", "allOf": [
        {"propertyNames": {"enum": ["a", "b"]}}, {"properties": {"b": {"type": "null"}, "c": {"type": "string"}}}]},
    "names of a pattern": {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1,
                           "propertyNames": {"type": "string", "pattern": "^[ab]{1,2}$"}},
    "names of a length": {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1,
                          "propertyNames": {"minLength": 1, "maxLength": 2}},
    "names of a format": {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 1,
                          "propertyNames": {"format": "date"}},
    "counts": {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1, "maxProperties": 2},
    "array": {"type": "array", "items": {"type": "integer", "minimum": -3, "maximum": 12}, "minItems": 1,
              "maxItems": 3},
    "tuple": {"prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "type": "array", "minItems": 2},
    "old tuple": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "minItems": 1,
                  "items": [{"type": "integer"}], "additionalItems": {"type": "string"}},
    "numbers": {"type": "number", "exclusiveMinimum": -1.5, "maximum": 2.25},
    "multiples": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 10},
    "draft 4 bounds": {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 3,
                       "exclusiveMinimum": True,
                       "maximum": 6},
    "int64": {"type": "integer", "minimum": -9223372036854775808, "maximum": 9223372036854775807},
    "strings": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": '^[^"\\\\]{1,3}$'},
    "enum": {"enum": [1, "a", None, True, [1, {"b": 2}], "é\"\\\n", 2.5]},
    "fractions": {"enum": [3.141592653589793, 1e-07, -0.1, 123456.789012345, -2.5e-10, 0.0]},
    "const": {"const": {"a": [1, 2], "b": {}}},
    "any of": {"anyOf": [{"type": "integer", "maximum": 5}, {"type": "string", "maxLength": 2}, OBJECT]},
    "all of": {"allOf": [OBJECT, {"properties": {"a": {"minimum": 3}}, "required": ["b"]}]},
    "one of": {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    "discriminated union, recursive": {
        "oneOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/branch"}], "discriminator": {"propertyName": "kind"},
        "$defs": {
            "leaf": {"type": "object", "properties": {"kind": {"const": "leaf"}}, "required": ["kind"],
                     "additionalProperties": False},
            "branch": {"type": "object", "required": ["kind"], "additionalProperties": False, "properties": {
                "kind": {"enum": ["twig", "bough"]},
                "next": {"oneOf": [{"$ref": "#/$defs/branch"}, {"$ref": "#/$defs/leaf"}, {"type": "null"}]}}}}},
    "recursive": {"$ref": "#/$defs/n",
                  "$defs": {"n": {"type": "object",
                                  "properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
                                                       "required": ["next"], "additionalProperties": False}}},
    "root reference": {"type": "object",
                       "properties": {"c": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
                       "additionalProperties": False},
    "escaped reference": {"type": "array", "items": {"$ref": "#/$defs/a~1b%25"}, "maxItems": 2, "minItems": 1,
                          "$defs": {"a/b%": {"type": "null"}}},
    "anchor": {"$id": "https://example.com/root", "$ref": "#here",
               "$defs": {"x": {"$anchor": "here", "type": "boolean"}}},
    "own URI": {"$id": "urn:example:root", "$ref": "#/$defs/x", "$defs": {"x": {"type": "boolean"}}},
    "inner document": {"$id": "https://example.com/root", "$ref": "inner", "$defs": {
        "x": {"$id": "https://example.com/inner", "$ref": "#/$defs/y", "$defs": {"y": {"type": "null"}}},
        "y": {"type": "integer"}}},
    "old siblings": {"$schema": "http://json-schema.org/draft-07/schema#",
                     "definitions": {"x": {"type": "integer", "maximum": 9}},
                     "$ref": "#/definitions/x", "uniqueItems": True},
    "any value": True,
    "annotations": {"type": "integer", "maximum": 3, "title": "t", "default": "x", "x-guidance": {"lenient": True,
        "whitespace_flexible": False},
                    "unknown": {"not": {}}, "format": "int32", "uniqueItems": False},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_are_valid(name: str):
    schema = json.loads(json.dumps(SCHEMAS[name]), parse_float=Decimal)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    judge = kind(schema, format_checker=kind.FORMAT_CHECKER)
    rng = random.Random(5)
    ended, compiled = 0, compilation(Constraint("json_schema", json.dumps(SCHEMAS[name])))
    for _ in range(40):
        text = walk(compiled.matcher(), rng, 120)
        if text is not None:
            ended += 1
            judge.validate(json.loads(text, parse_float=Decimal))
    assert ended > 3


@pytest.mark.parametrize("text", ['{"a":1,"b":"x"}', '{"a": 1, "b": "x"}', '{\n  "a": 1,\n  "b": "x"\n}', '{"a" : 1}'])
def test_usual_whitespace_is_allowed(text: str):
    assert accepts(matcher("json_schema", OBJECT), text)


@pytest.mark.parametrize("text", [' {"a":1}', '{"a":1} ', '{"a":  1}', '{"a":\n\n1}', '{\n' + " " * 41 + '"a":1}'])
def test_unbounded_whitespace_is_refused(text: str):
    assert not accepts(matcher("json_schema", OBJECT), text)


@pytest.mark.parametrize("schema", [True, {}])
def test_empty_schema_accepts_any_value(schema: Any):
    for text in ("1", "null", "[1]", '{"a":true}', '"x"', "-1.5e3"):
        assert accepts(matcher("json_schema", json.dumps(schema)), text)
    assert not accepts(matcher("json_schema", json.dumps(schema)), "nul")


def test_json_object_accepts_any_object_only():
    for text in ("{}", '{"a": [1, {"b": null}], "c": "\\n"}'):
        assert accepts(matcher("json_object", ""), text)
    for text in ("[]", "1", '"a"', "{", '{"a"}'):
        assert not accepts(matcher("json_object", ""), text)


OLD = "http://json-schema.org/draft-07/schema#"
STRING, NUMBER = {"type": "string"}, {"type": "number"}
ID = "https://example.com/"
EDGES: dict[str, tuple[Any, str, str]] = {
    "open interval from 0": ({**NUMBER, "exclusiveMinimum": 0, "maximum": 0.5}, "0.25", "0"),
    "open interval to -5": ({**NUMBER, "exclusiveMaximum": -5, "minimum": -5.5}, "-5.25", "-5"),
    "open interval of two subschemas": (
        {**NUMBER, "allOf": [{"exclusiveMinimum": 12.0}, {"exclusiveMaximum": 12.75}]}, "12.5", "12"),
    "prefixItems is unknown in draft 7": ({"$schema": OLD, "prefixItems": [STRING], "items": NUMBER}, "[1]", '["a"]'),
    "prefixItems is unknown in draft 2019-09": (
        {"$schema": "https://json-schema.org/draft/2019-09/schema", "prefixItems": [STRING], "items": NUMBER}, "[1]",
        '["a"]'),
    "$id beside $ref has no effect in draft 7": (
        {"$schema": OLD, "$id": f"{ID}a/", "allOf": [{"$id": f"{ID}b/", "$ref": "x"}], "definitions": {
            "a": {"$id": "x", **NUMBER}, "b": {"$id": f"{ID}b/x", **STRING}}}, "1", '"a"'),
    "empty pattern, which all names match": (
        {"patternProperties": {"": NUMBER}}, '{"a":1}', '{"a":"x"}'),
    "empty pattern beside a declared name": (
        {"properties": {"a": {}}, "patternProperties": {"": NUMBER}}, '{"a":1}', '{"a":"x"}'),
    "patterns that are written in two ways": (
        {"patternProperties": {"(a)": STRING, "(?:a)": {"maxLength": 1}}}, '{"a":"x"}', '{"a":1}'),
    "$id of a folder in a referenced schema": (
        {"$id": f"{ID}b", "$ref": "#/$defs/x", "$defs": {
            "x": {"$id": "sub/x", "type": "array", "items": {"$ref": "y"}}, "y": {"$id": "sub/y", **NUMBER},
            "z": {"$id": "sub/sub/y", **STRING}}}, "[1]", '["x"]'),
    "$id in a constant is none": (
        {"$id": ID, "$ref": "x", "$defs": {"a": {"const": {"$id": "x", **STRING}}, "b": {"$id": "x", **NUMBER}}}, "1",
        '"a"'),
}
"""Schema, a text that it accepts, and one that it refuses."""


@pytest.mark.parametrize("name", EDGES)
def test_edge_of_a_keyword_is_honoured(name: str) -> None:
    schema, good, bad = EDGES[name]
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    assert kind(schema).is_valid(json.loads(good))
    assert not kind(schema).is_valid(json.loads(bad))
    assert accepts(matcher("json_schema", schema), good)
    assert not accepts(matcher("json_schema", schema), bad)


@pytest.mark.parametrize("other", [
    {"anyOf": [{}]}, {"allOf": [{}]}, {"oneOf": [{}]}, {"$ref": "#/$defs/any"}, {"enum": [{"a": 1}, {"b": 1}]}])
@pytest.mark.parametrize(("keywords", "good"), [
    ({"additionalProperties": False, "patternProperties": {"^a": NUMBER}}, '{"a":1}'),
    ({"additionalProperties": NUMBER, "propertyNames": {"pattern": "^a"}}, '{"a":1}'),
    ({"additionalProperties": False, "properties": {"a": NUMBER}}, '{"a":1}'),
])
def test_order_of_keywords_has_no_effect(keywords: dict[str, Any], good: str, other: dict[str, Any]) -> None:
    for order in itertools.permutations([*keywords.items(), *other.items()]):
        schema = {"type": "object", **dict(order), "$defs": {"any": {}}}
        assert accepts(matcher("json_schema", schema), good), schema
        assert not accepts(matcher("json_schema", schema), '{"b":1}'), schema


def test_properties_of_an_answer_have_the_order_of_the_schema() -> None:
    parts = {"allOf": [{"properties": {"a": NUMBER}, "required": ["a"]}],
             "properties": {"b": NUMBER}, "required": ["b"]}
    first, second = '{"a":1,"b":1}', '{"b":1,"a":1}'
    for schema, good, bad in ((parts, first, second), (dict(reversed(parts.items())), second, first)):
        assert accepts(matcher("json_schema", {"type": "object", **schema}), good)
        assert not accepts(matcher("json_schema", {"type": "object", **schema}), bad)


@pytest.mark.parametrize(("schema", "good", "bad"), [
    ({"multipleOf": 0.25}, ["0.50", "-1.50", "0.75", "1", '"a"', "[0.1]"], ["0.10", "0.20", "0.55", "1.10"]),
    ({**NUMBER, "multipleOf": 0.125}, ["0.500", "0.125", "2"], ["0.300", "0.120", "null"]),
    ({**NUMBER, "multipleOf": 0.075}, ["0.150", "0.300", "0.075", "3"], ["0.070", "0.500", "1"]),
    ({**NUMBER, "minimum": 0.5, "maximum": 0.6, "multipleOf": 0.25}, ["0.50"], ["0.25", "0.60"]),
    ({**NUMBER, "minimum": 0, "maximum": 0.99}, ["0.90", "0.99", "0"], ["1", "0.991", "-0.5"]),
    ({**NUMBER, "maximum": 12.345}, ["12.300", "12.345", "12"], ["12.35", "12.4", "12.346"]),
    ({"exclusiveMinimum": -7.75}, ["-7.70", "-7.749", '"a"', "[-8.5]"], ["-7.75", "-7.8"]),
    ({"type": ["number", "null"], "exclusiveMaximum": 0.7}, ["0.6", "null"], ["0.7", '"a"']),
    ({**NUMBER, "allOf": [{"maximum": 7.75}, {"minimum": 7.71}]}, ["7.75", "7.72"], ["7.7", "7.70"]),
    ({"exclusiveMinimum": 0.9, "maximum": 0.99}, ["0.95"], ["0.9", "0.90"]),
    ({**NUMBER, "maximum": 7.75, "multipleOf": 0.05}, ["7.70", "7.75", "7"], ["7.72"]),
])
def test_numbers_have_the_decimals_of_a_bound_or_of_a_divisor(schema: Any, good: list[str], bad: list[str]) -> None:
    for text in good + bad:
        assert accepts(matcher("json_schema", schema), text) is (text in good), text


CHECKS: dict[str, Any] = {
    "date": datetime.date.fromisoformat,
    "date-time": lambda text: datetime.datetime.fromisoformat(text.replace("Z", "+00:00")),
    "time": lambda text: datetime.time.fromisoformat(text.replace("Z", "+00:00")),
    "ipv4": ipaddress.IPv4Address, "ipv6": ipaddress.IPv6Address,
    "relative-json-pointer": lambda text: re.fullmatch(r"(0|[1-9][0-9]*)(#|(/([^~/]|~[01])*)*)", text) or 1 / 0,
    "uri": lambda text: urlsplit(text).scheme or 1 / 0,
}
EXAMPLES = {
    "date": ["2024-02-29", "1999-12-31"], "date-time": ["2024-01-02T03:04:05Z", "2024-01-02T03:04:05.123+01:00"],
    "time": ["03:04:05Z"],
    "duration": ["P1Y2M3DT4H", "PT5M", "P3W"],
    "email": ["a.b@example.com", "a@x.y.z.example.com", "a" * 64 + "@b.c", ".".join("a" * 32) + "@b.c",
              "a" * 31 + "." + "b" * 32 + "@b.c", "a.b.c" + "d" * 15 + "@b.c"],
    "hostname": ["example.com", "localhost", ".".join(["a" * 63] * 3 + ["a-" * 30 + "b"]),
                 "a.b.c.d.com", "s3.eu-west-1.compute.internal.example.com", ".".join(["a" * 63] + ["b" * 5] * 31),
                 ".".join(["a" * 63] + ["b" * 46] * 4)],
    "idn-hostname": ["a--b.abc--d"], "ipv4": ["127.0.0.1"],
    "ipv6": ["::1", "2001:db8::1", "::", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4", "64:ff9b::192.0.2.33", "::1.2.3.4",
             "1:2:3:4:5:6:1.2.3.4", "1:2:3:4:5::1.2.3.4"], "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
    "uri": ["https://example.com/a?b=c#d", "mailto:a@b.c"], "uri-reference": ["../a", "/a/b?c", ""],
    "json-pointer": ["", "/a~1b/0"],
    "relative-json-pointer": ["0/a", "1#", "10/b", "205"],
}
WRONG = {"date": ["2023-02-29", "1900-02-29", "0000-01-01", "2024-13-01", "2024-1-1"], "time": ["24:00:00Z",
    "03:04:05"], "ipv4": ["256.1.1.1", "01.1.1.1"],
         "ipv6": ["1::2::3", ":1", "1:2:3:4:5:6:7:8:9", "1:2:3:4:5:6:7:1.2.3.4",
                  "1:2:3:4:5:6::1.2.3.4", "::1.2.3.4:1", "::1.2.3"], "uuid": ["123"],
         "email": ["a@", "a b@c.d", "a..b@c.d", ".a@b.c", "a.@b.c", "a" * 65 + "@b.c", "a." * 32 + "b@c.d",
                   "a" * 32 + "." + "b" * 32 + "@c.d", ".".join(["a" * 12] * 5) + "b@c.d"],
         "hostname": ["-a", "xn--x", "a.b2--c", "a" * 64, ".".join(["a" * 63] * 4), "a.b.c.d.e.f.g-",
                      ".".join(["a" * 63] + ["b" * 5] * 31) + "b"],
         "idn-hostname": ["ab--c"], "duration": ["P", "PT", "1D", "P1Y3D", "PT1H5S", "PT0.5S"],
         "relative-json-pointer": ["01", "01/a", "-1", "/a"]}


@pytest.mark.parametrize("name", EXAMPLES)
def test_format(name: str):
    schema = {"type": "string", "format": name}
    for text in EXAMPLES[name]:
        assert accepts(matcher("json_schema", schema), json.dumps(text)), text
    for text in WRONG.get(name, []):
        assert not accepts(matcher("json_schema", schema), json.dumps(text)), text
    judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    rng, compiled = random.Random(7), compilation(Constraint("json_schema", json.dumps(schema)))
    for _ in range(30):
        text = walk(compiled.matcher(), rng, 80)
        if text is not None:
            if name != "relative-json-pointer":  # its check refuses a 0 before another digit
                judge.validate(json.loads(text))
            if name in CHECKS:
                CHECKS[name](json.loads(text))


REFUSED = [
    ({"not": {}}, "keyword 'not' is not supported at /"), ({"properties": {"a": {"uniqueItems": True}}},
        "'uniqueItems' is not supported at /properties/a"),
    ({"if": {}, "then": {"maximum": 1}}, "keyword '(if|then)'"), ({"items": {"contains": {"type": "null"}}},
        "'contains' is not supported at /items"),
    ({"propertyNames": {"pattern": "a", "maxLength": 3}}, "propertyNames"), ({"propertyNames": False}, "propertyNames"),
    ({"propertyNames": {"maxLength": 3}, "patternProperties": {"a": {}}}, "propertyNames"),
    ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "propertyNames": {"$ref": "#/$defs/a"}}, "propertyNames"),
    ({"propertyNames": {"$ref": 5}}, "'\\$ref' must be a string at /propertyNames/\\$ref"),
    ({"maximum": 10**400}, "'maximum' must be a number at /maximum"),
    ({"multipleOf": 10**400}, "'multipleOf' must be a number at /multipleOf"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"dependencies": {"a": ["b"]}}, "dependencies"), ({"unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"$dynamicRef": "#x"}, "dynamicRef"),
    ({"format": "regex"}, "format 'regex' is not supported at /format"), ({"$ref": "https://example.com/x"},
        "another document"),
    ({"$ref": "file:///etc/passwd"}, "another document"), ({"$ref": "#/$defs/x"}, "unknown part"), ({"$ref": "#x"},
        "unknown anchor"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "no finite value"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no finite value"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no finite value"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    ({"type": "string", "minLength": 5, "maxLength": 3}, "minLength"),
    ({"type": "string", "pattern": "^a{5}$", "maxLength": 3}, "empty"),
    ({"type": "integer", "const": "a"}, "nsatisfiable"), ({"enum": []}, "at least one value"), ({"type": "foo"},
        "'type' must be"), ({"type": []}, "'type' must be"), (False, "must be an object"), ([], "must be"),
    ({"minLength": -1}, "minLength"), ({"minimum": "1"}, "minimum"), ({"multipleOf": 0}, "multipleOf"),
    ({"multipleOf": 0.999999999}, "at most 8 digits at /multipleOf"), ({"multipleOf": 4000000007}, "must be in"),
    ({"const": 2**53 + 1}, "at most 9007199254740992"),
    ('{"const": 1e400}', "at most 9007199254740992 at /const"), ('{"enum": [[-1e400]]}', "at /enum"),
    ({"const": 0.19559076106322826}, "at most 15 digits"), ({"enum": [{"a": 1.5e-30}]}, "at most 15 digits"),
    ({"const": "\x01"}, "control characters"), ({"required": "a"}, "required"), ({"properties": []}, "properties"),
    ({"anyOf": []}, "at least one"),
    ({"type": "object", "minProperties": 3}, "minProperties"), ({"minimum": 1e300}, "must be within"), ({"items": 3},
        "must be an object or a boolean at /items"),
    ({"items": {"exclusiveMinimum": 2**53}}, "an exclusive bound must be .* at /items/exclusiveMinimum"),
    ({"exclusiveMaximum": -2**53}, "an exclusive bound must be .* at /exclusiveMaximum"),
    ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf"),
    ({"$schema": "http://json-schema.org/draft-03/schema#"}, "draft 3"),
    ('{"a": NaN}', "NaN"), ("{", "malformed JSON"), ('{"a": 1' * 3000, "malformed JSON"),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=range(len(REFUSED)))
def test_schema_that_cannot_be_honoured_is_refused(schema: Any, message: str):
    with pytest.raises(ConstraintError, match=message):
        matcher("json_schema", schema)
