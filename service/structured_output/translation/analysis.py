"""Analysis of schemas: infinite values, alternatives that exclude each other, names of properties, exact numbers.

Also rewriting of keywords that the library reads otherwise than JSON Schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLTokenizer

from npuserve.service.structured_output.translation import pattern
from npuserve.service.structured_output.translation.errors import ConstraintError

MIN_BOUND = 1e-12
"""Smallest magnitude of a bound that is not 0."""
MAX_DIGITS = 8
"""Digits of a divisor, and its decimals. The library computes in 32 bits with them."""
_SCALARS = frozenset({"null", "boolean", "integer", "number", "string"})
_TYPES = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
"""Types that exclude each other: an integer, also one written as 1.0, is no fraction. "number" is both."""

_APPLICATORS = frozenset({"const", "enum", "allOf", "anyOf", "oneOf", "$ref"})
"""Keywords between which the library reads the other keywords as schemas of their own."""

_LITERALS = re.compile(r"\^(?:(\w+)|\((?:\?:)?(\w+(?:\|\w+)*)\))\$")
"""Expressions of given names, such as "^(a|b)$"."""


def require_finite_value(schema: Mapping[str, Any]) -> None:
    """Raise ConstraintError if every value of the schema is infinite.

    schema: translated schema, whose references are "#/$defs/NAME".

    The set of definitions with a finite value is the least fixed point: it grows until no definition is added.
    """
    definitions = schema.get("$defs", {})
    finite: set[str] = set()
    while True:
        added = {name for name, inner in definitions.items() if name not in finite and _has_value(inner, finite)}
        if not added:
            break
        finite |= added
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
    properties = schema.get("properties", {})
    other = schema.get("additionalProperties", True)
    return all(_has_value(properties.get(name, other), finite) for name in schema.get("required", ()))


def _has_array(schema: Mapping[str, Any], finite: set[str]) -> bool:
    prefix = schema.get("prefixItems", [])
    return all(_has_value(prefix[i] if i < len(prefix) else schema.get("items", True), finite)
               for i in range(min(schema.get("minItems", 0), len(prefix) + 1)))


def has_exclusive_choices(schema: Mapping[str, Any]) -> bool:
    """Return whether no value can satisfy two alternatives of any `oneOf`, which is then an `anyOf`.

    schema: translated schema, see `require_finite_value`.

    Alternatives exclude each other by their types, by the values of `const` and `enum`, or by these values of a
    required property. The library does not follow references to find that out.
    """
    definitions = schema.get("$defs", {})
    for part in _parts(schema):
        if "oneOf" not in part:
            continue
        types = _facts({**part, "oneOf": []}, definitions, False).types
        choices = [_facts(inner, definitions) for inner in part["oneOf"]]
        values = [value for choice in choices for value in choice.values or ()]
        if all(choice.values for choice in choices) and len(values) == len(set(values)):
            continue  # thousands of constants are compared in linear time
        if not all(_exclude(first, second, types) for first, second in combinations(choices, 2)):
            return False
    return True


def is_exact(number: float) -> bool:
    """Return whether the library reads a number of JSON text exactly.

    It multiplies the digits by a power of 10. The result is exact if both are, which doubles hold.
    """
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    return int("".join(map(str, digits))) <= 1 << 53 and abs(int(exponent)) <= 22


def divisor_fault(number: float) -> str:
    """Return why the library does not honour a divisor exactly; "" if it does.

    It multiplies the double by 10 until it is an integer, which has many more digits if a product is rounded.
    """
    if not 1e-9 <= number < 10 ** MAX_DIGITS:
        return f"must be in [1e-9, 1e{MAX_DIGITS})"
    coefficient, decimals = _decimal(number)
    if coefficient != 1 and max(len(str(coefficient)), decimals) > MAX_DIGITS:
        return f"must have at most {MAX_DIGITS} digits"
    scaled = number
    while not float(scaled).is_integer():
        scaled *= 10
    return "" if scaled < 1 << 32 else f"{number} is not supported, since its product with 10 is no exact double,"


def _decimal(number: float) -> tuple[int, int]:
    """Return the integer that the digits of a positive number make without its point, and its decimals."""
    numerator, denominator = Decimal(repr(number)).as_integer_ratio()
    decimals = 0
    while 10 ** decimals % denominator:
        decimals += 1
    return numerator * 10 ** decimals // denominator, decimals


def inside_bound(value: float, sign: int, others: Sequence[float]) -> float:
    """Return the exclusive bound, or a close one inside it that the library honours.

    sign: 1 for a lower bound, -1 for an upper one.
    others: bounds of all subschemas.

    Between an integer and a bound less than 1 away from it, the library includes the integer.
    """
    if value != int(value) or not any(0 < sign * (other - value) < 1 for other in others):
        return value
    return float(value + sign * max(MIN_BOUND, 10.0 ** (len(str(int(abs(value)))) - 15)))


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and the schemas in it."""
    ahead = [schema]
    while ahead:
        part = ahead.pop()
        if not isinstance(part, Mapping):
            continue
        yield part
        for keyword in ("properties", "patternProperties", "$defs"):
            ahead += part.get(keyword, {}).values()
        for keyword in ("anyOf", "allOf", "oneOf", "prefixItems"):
            ahead += part.get(keyword, ())
        ahead += [part[keyword] for keyword in ("items", "additionalProperties") if keyword in part]


class _Facts(NamedTuple):
    """What is known of the values of a schema.

    types: types of its values.
    values: its values, in a form in which equal JSON values are equal; None if they are not listed.
    properties: listed values of required properties, if the value is an object.
    """

    types: frozenset[str] = _TYPES
    values: frozenset[Any] | None = None
    properties: Mapping[str, frozenset[Any]] = {}


def _facts(schema: Any, definitions: Mapping[str, Any], has_properties: bool = True) -> _Facts:
    """Return what is known. has_properties: whether required properties are read too."""
    types = _TYPES
    values = None
    required = set[str]()
    properties = dict[str, list[Any]]()
    for part in _conjuncts(schema, definitions, set()):
        if part is False:
            return _Facts(frozenset())
        if part is True:
            continue
        if "type" in part:
            types &= _expanded([part["type"]] if isinstance(part["type"], str) else part["type"])
        listed = part.get("enum", [part["const"]] if "const" in part else None)
        if listed is not None:
            listed_values = frozenset(map(_comparable, listed))
            values = listed_values if values is None else values & listed_values
            types &= _expanded([name for name, _ in listed_values])
        required.update(part.get("required", ()))
        for name, inner in part.get("properties", {}).items():
            properties.setdefault(name, []).append(inner)
    known = {name: _facts({"allOf": properties[name]}, definitions, False).values
             for name in required & properties.keys()} if has_properties else {}
    return _Facts(types, values, {name: listed for name, listed in known.items() if listed is not None})


def _conjuncts(schema: Any, definitions: Mapping[str, Any], seen: set[str]) -> Iterator[Any]:
    """Yield schemas that all apply to a value of the schema. seen: references that were followed."""
    yield schema
    if isinstance(schema, bool):
        return
    for part in schema.get("allOf", ()):
        yield from _conjuncts(part, definitions, seen)
    name = schema.get("$ref", "").rpartition("/")[2]
    if name and name not in seen:
        seen.add(name)
        yield from _conjuncts(definitions[name], definitions, seen)


def _expanded(types: Sequence[str]) -> frozenset[str]:
    return frozenset(types) - {"number"} | ({"integer", "fraction"} if "number" in types else set())


def _comparable(value: Any) -> tuple[str, Any]:
    """Return the type of a JSON value, and a form in which equal values are equal: 1 is 1.0, and not true."""
    if value is None or isinstance(value, bool | str):
        return {type(None): "null", bool: "boolean"}.get(type(value), "string"), value
    if isinstance(value, int | float):
        number = Fraction(value)
        return "integer" if number.denominator == 1 else "fraction", number
    if isinstance(value, list):
        return "array", tuple(map(_comparable, value))
    return "object", frozenset((name, _comparable(inner)) for name, inner in value.items())


def _exclude(first: _Facts, second: _Facts, types: frozenset[str]) -> bool:
    """Return whether no value of these types satisfies both."""
    shared = first.types & second.types & types
    if not shared or (first.values is not None and second.values is not None and not first.values & second.values):
        return True
    names = first.properties.keys() & second.properties.keys()
    return shared == {"object"} and any(not first.properties[name] & second.properties[name] for name in names)


def separate_names(readings: Iterable[pattern.NamePattern], out: dict[str, Any]) -> str:
    """Rewrite 'patternProperties' so that an object is valid by ECMA-262's and by Python's reading of the expressions.

    readings: of each expression.
    out: translated schema of an object, whose patterns are the narrow readings.

    Returns why that is not possible, or "". A name that the readings dispute gets no value, unless additional
    properties may have any value: then it gets a value of its pattern.
    """
    wide: dict[str, str] = {}  # by the narrow reading, which several expressions may share
    disputed: dict[str, str] = {}
    for reading in readings:
        narrow = reading.narrow
        wide[narrow] = f"(?:{wide[narrow]})|(?:{reading.wide})" if narrow in wide else reading.wide
        if reading.disputed and not _matches_all(narrow):
            disputed[narrow] = f"{disputed[narrow]}|{reading.disputed}" if narrow in disputed else reading.disputed
    if not disputed:
        return ""
    values = out["patternProperties"]
    other = out.get("additionalProperties", True)
    if other is True:
        out["patternProperties"] = widened = dict[str, Any]()
        for narrow, value in values.items():
            name = wide[narrow]
            widened[name] = {"allOf": [widened[name], value]} if name in widened else value
        return ""
    if len(wide) > 1 and not are_disjoint(wide.values()):
        return "a name may match two of the expressions, as ECMA-262 and Python read them differently,"
    declared = out.get("properties", {})
    unusual = [name for name in declared if not (name.isascii() and name.isprintable())]  # others are not disputed
    for narrow in disputed:
        for name in unusual:
            if not are_disjoint([wide[narrow], literal(name)]) and are_disjoint([narrow, literal(name)]):
                declared[name] = {"allOf": [declared[name], values[narrow]]}
    if other is False:
        return ""
    excluded = "|".join(disputed.values())
    if not all(are_disjoint([excluded, expression]) for expression in (*values, *map(literal, unusual))):
        return ("ECMA-262 and Python read an expression differently: write its characters out, such as [0-9] for \\d "
                "and [A-Za-z0-9_] for \\w, or let 'additionalProperties' be true or false,")
    values[excluded] = False
    return ""


def _matches_all(expression: str) -> bool:
    """Return whether an expression matches every text, since it matches the empty text at the beginning of it."""
    return "$" not in expression and not are_disjoint([expression, literal("")])


def are_disjoint(expressions: Iterable[str]) -> bool:
    """Return whether no text matches two expressions of the library's syntax. False also if that takes too long."""
    # The library compares the expressions of one object.
    schema = {"type": "object", "patternProperties": dict.fromkeys(expressions, False)}
    matcher = LLMatcher(_tokenizer(), LLMatcher.grammar_from_json_schema(schema), log_level=0)
    return "disjoint" not in matcher.get_error()


@cache
def _tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def literal(name: str) -> str:
    """Return the expression of one name, in the library's syntax."""
    return "^" + "".join(rf"\x{{{ord(character):x}}}" for character in name) + "$"


def declare_matched_names(schema: Mapping[str, Any], out: dict[str, Any]) -> None:
    """Move patterns that match only declared names to 'properties'.

    The library would begin one more property for such a pattern, and find no name for it.
    """
    declared = {*out.get("properties", ()), *out.get("required", ())}
    for source in schema.get("patternProperties", ()):
        listed = _LITERALS.fullmatch(source)
        names = (listed[1] or listed[2]).split("|") if listed else []
        if not names or not declared.issuperset(names):
            continue
        pattern_name = pattern.translate(source, quoted=True)
        if pattern_name not in out["patternProperties"]:
            continue
        inner = out["patternProperties"].pop(pattern_name)
        properties = out.setdefault("properties", {})
        for matched in names:
            properties[matched] = {"allOf": [properties[matched], inner]} if matched in properties else inner


def restrict_names(out: dict[str, Any], names: Mapping[str, Any]) -> bool:
    """Express 'propertyNames' by other keywords. Return False, without a change, if that is not possible.

    out: translated schema of an object.
    names: translated value of 'propertyNames'.
    """
    rule = {keyword: value for keyword, value in names.items() if (keyword, value) != ("type", "string")}
    if not rule:
        return True
    if "patternProperties" in out:
        return False
    if rule.keys() <= {"enum", "const"}:
        listed = [name for name in rule.get("enum", [rule.get("const")]) if name == rule.get("const", name)]
        declared = out.get("properties", {})
        other = out.get("additionalProperties", True)
        allowed = {name: declared.get(name, other) for name in listed if isinstance(name, str)}
        out["properties"] = {name: value for name, value in allowed.items() if name in declared or other is not False}
    else:
        expression = _expression(rule)
        if expression is None or out.get("properties") or out.get("required"):
            return False
        out["patternProperties"] = {expression: out.get("additionalProperties", True)}
    out["additionalProperties"] = False
    return True


def _expression(rule: Mapping[str, Any]) -> str | None:
    """Return the expression of the names that 'pattern', 'format' or lengths allow; None for other rules."""
    if rule.keys() == {"allOf"} and len(rule["allOf"]) == 1:  # of a format
        (rule,) = rule["allOf"]
    if rule.keys() == {"pattern"}:
        return str(rule["pattern"])
    if rule.keys() <= {"minLength", "maxLength"}:
        return pattern.translate(rf"^[\s\S]{{{rule.get('minLength', 0)},{rule.get('maxLength', '')}}}$", quoted=True)
    return None


def grouped(out: Mapping[str, Any]) -> dict[str, Any]:
    """Return a translated schema with all its keywords that may refer to each other in one group.

    The library would not compare 'additionalProperties' with 'patternProperties' if 'anyOf' stood between them. The
    group has the place of 'properties' or 'required', which determines the order of the properties in an answer.
    """
    names = list(out)
    place = next((i for i, name in enumerate(names) if name in ("properties", "required")), 0)
    before = [name for name in names[:place] if name in _APPLICATORS]
    group = [name for name in names if name not in _APPLICATORS]
    after = [name for name in names[place:] if name in _APPLICATORS]
    return {name: out[name] for name in (*before, *group, *after)}
