"""Check of JSON schemas, and their translation to the part of JSON Schema that the grammar library honours exactly.

The library refuses some keywords, but not all that it cannot honour, and its errors have no path. So each schema is
walked first. Keywords without effect are dropped, formats and patterns become expressions of the library, references
become references to `$defs` of the result, and arrays of `items` become `prefixItems`. A keyword that restricts the
answer and is not supported raises ConstraintError with its path.

Specification: JSON Schema draft 2020-12; the drafts 4, 6, 7 and 2019-09 by their `$schema`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from npuserve.service.structured_output.translation import formats, pattern
from npuserve.service.structured_output.translation.analysis import (
    MIN_BOUND,
    declare_matched_names,
    divisor_fault,
    grouped,
    inside_bound,
    is_exact,
    require_finite_value,
    restrict_names,
    separate_names,
)
from npuserve.service.structured_output.translation.errors import ConstraintError

MAX_DEPTH = 64
"""Nesting of subschemas."""
MAX_INTEGER = 1 << 53
"""Larger integers are not exact in the library."""
MAX_COUNT = 100_000
"""Bound of minLength, minItems and so on. A larger maxLength or maxItems is reduced to it."""

_UNSUPPORTED = frozenset({
    "not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas", "contains", "minContains",
    "maxContains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef",
    "$recursiveRef", "extends", "disallow", "divisibleBy"})
ORIGIN = "$comment"
"""Annotation of a translated schema: the path of the client's schema, for errors of the library."""
_LISTS = ("anyOf", "allOf", "oneOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
_OLD_DRAFTS = ("http://json-schema.org/draft-04/schema", "http://json-schema.org/draft-06/schema",
               "http://json-schema.org/draft-07/schema")
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


def translate(text: str) -> dict[str, Any]:
    """Return the schema for the library. Raise ConstraintError. See `translate_value`."""
    try:
        root = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"json_schema: malformed JSON: {error}") from error
    return translate_value(root)


def translate_value(root: Any) -> dict[str, Any]:
    """Return the schema for the library, of a schema that is parsed already. Raise ConstraintError."""
    if root is False or not isinstance(root, dict | bool):
        raise ConstraintError("json_schema: must be an object or true")
    return _Schema(root if isinstance(root, dict) else {}).translate()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def pointer(path: str, name: str) -> str:
    """Return the JSON pointer of a member of the object at `path`."""
    return f"{path}/{name.replace('~', '~0').replace('/', '~1')}"


def _error(path: str, message: str) -> ConstraintError:
    return ConstraintError(f"json_schema: {message} at {path or '/'}")


class _Schema:
    """Walk of one schema."""

    def __init__(self, root: dict[str, Any]):
        self._root = root
        draft = root.get("$schema")
        name = draft.rstrip("#") if isinstance(draft, str) else ""
        if "draft-03" in name:
            raise _error("/$schema", "draft 3 is not supported")
        self._is_old = name in _OLD_DRAFTS
        self._id = "id" if "draft-04" in name else "$id"
        self._has_prefix = not self._is_old and "2019-09" not in name  # otherwise `prefixItems` is an unknown keyword
        self._documents: dict[str, tuple[Any, str]] = {}  # URI -> subschema and the base around it
        self._definitions: dict[tuple[int, str], str] = {}  # subschema and the base around it -> its name in the result
        self._ahead: list[tuple[Any, str, str, str]] = []  # subschema, base around it, path, name
        self._bounds: list[float] = []  # of numbers, of all subschemas

    def translate(self) -> dict[str, Any]:
        self._documents[self._base_of(self._root, "")] = self._root, ""
        self._find_documents(self._root, "", 0)
        result = self._walk(self._root, "", "", 0)
        definitions: dict[str, Any] = {}
        while self._ahead:
            schema, base, path, name = self._ahead.pop()
            translated = self._walk(schema, base, path, 0)
            definitions[name] = {**translated, ORIGIN: path} if isinstance(translated, dict) else translated
        result = {} if result is True else result
        if not isinstance(result, dict):
            raise _error("", "the schema accepts nothing")
        if definitions:
            result = {**result, "$defs": definitions}
        require_finite_value(result)
        return result

    def _find_documents(self, value: Any, base: str, depth: int) -> None:
        """Enter the subschemas that have a URI or an anchor of their own."""
        if depth > 4 * MAX_DEPTH:
            raise ConstraintError(f"json_schema: must be nested at most {4 * MAX_DEPTH} deep")
        if isinstance(value, dict):
            outer = base
            base = self._base_of(value, base)
            if base:
                self._documents.setdefault(base, (value, outer))
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(anchor := value.get(keyword), str):
                    self._documents.setdefault(f"{base}#{anchor}", (value, outer))
            if isinstance(identifier := value.get(self._id), str) and identifier.startswith("#"):
                self._documents.setdefault(f"{base}{identifier}", (value, outer))
            self._bounds += [value[keyword] for keyword in (*_LOWER, *_UPPER) if _is_number(value.get(keyword))]
            value = [item for keyword, item in value.items() if keyword not in ("const", "enum")]
        for item in value if isinstance(value, list) else ():
            self._find_documents(item, base, depth + 1)

    def _base_of(self, schema: Any, base: str) -> str:
        identifier = schema.get(self._id) if isinstance(schema, dict) else None
        if not isinstance(identifier, str) or identifier.startswith("#") or (self._is_old and "$ref" in schema):
            return base
        try:
            return urldefrag(urljoin(base, identifier))[0]
        except ValueError:
            return base

    def _walk(self, schema: Any, base: str, path: str, depth: int) -> Any:
        """Return the translated subschema: an object or a bool. base: the base around it, without its own `$id`."""
        if depth > MAX_DEPTH:
            raise _error(path, f"subschemas must be nested at most {MAX_DEPTH} deep")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _error(path, "a schema must be an object or a boolean")
        base = self._base_of(schema, base)
        if "$ref" in schema and self._is_old:  # in these drafts the keywords beside it have no effect
            schema = {"$ref": schema["$ref"]}
        self._refuse_unsupported(schema, path)
        out: dict[str, Any] = {}
        added: list[dict[str, Any]] = []
        for keyword, value in schema.items():
            child_path = pointer(path, keyword)
            if keyword == "$ref":
                out["$ref"] = self._reference(value, base, child_path)
            elif keyword in _LISTS:
                out[keyword] = [self._walk(item, base, f"{child_path}/{i}", depth + 1)
                                for i, item in enumerate(_list(value, child_path))]
            elif keyword in ("properties", "patternProperties"):
                out[keyword] = self._properties(keyword, value, base, child_path, depth)
            elif keyword == "additionalProperties":
                out[keyword] = self._walk(value, base, child_path, depth + 1)
            elif keyword in ("items", "prefixItems", "additionalItems", "propertyNames"):
                pass  # below
            elif keyword == "format":
                added += _format(value, child_path)
            else:
                _copy(keyword, value, child_path, out)
        self._items(schema, base, path, depth, out)
        _bounds(schema, path, out, self._bounds)
        _check_properties(out, path)
        self._pattern_names(schema, path, out)
        if "propertyNames" in schema:
            self._names(schema["propertyNames"], base, f"{path}/propertyNames", out)
        if added:
            out.setdefault("allOf", []).extend(added)
        return grouped(out) or True

    def _refuse_unsupported(self, schema: Mapping[str, Any], path: str) -> None:
        may_lack = schema.get("minContains") == 0 and "maxContains" not in schema and not self._is_old
        has_contains = "contains" in schema and not may_lack
        for keyword, value in schema.items():
            if keyword not in _UNSUPPORTED:
                continue
            has_effect = {
                "uniqueItems": value is not False and schema.get("maxItems") not in (0, 1),
                "if": "then" in schema or "else" in schema, "then": "if" in schema, "else": "if" in schema,
                "contains": has_contains, "minContains": has_contains, "maxContains": has_contains,
            }.get(keyword, value not in (True, {}) or keyword == "not")
            if has_effect:
                raise _error(f"{path}/{keyword}", f"keyword '{keyword}' is not supported")

    def _properties(self, keyword: str, value: Any, base: str, path: str, depth: int) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _error(path, f"'{keyword}' must be an object")
        out: dict[str, Any] = {}
        for source, inner in value.items():
            child_path = pointer(path, source)
            name = _name_pattern(source, child_path).narrow if keyword == "patternProperties" else source
            translated = self._walk(inner, base, child_path, depth + 1)
            # "(a)" and "(?:a)" are one pattern.
            out[name] = {"allOf": [out[name], translated]} if name in out else translated
        return out

    def _pattern_names(self, schema: Mapping[str, Any], path: str, out: dict[str, Any]) -> None:
        """Separate the names that match a pattern from the others."""
        if "patternProperties" not in out:
            return
        path = f"{path}/patternProperties"
        readings = [_name_pattern(source, pointer(path, source)) for source in schema["patternProperties"]]
        fault = separate_names(readings, out)
        if fault:
            raise _error(path, fault)
        declare_matched_names(schema, out)

    def _names(self, value: Any, base: str, path: str, out: dict[str, Any]) -> None:
        """Restrict the names of properties."""
        child_path = path
        for _ in range(MAX_DEPTH):
            if isinstance(value, dict) and value.keys() - {"title", "description"} == {"$ref"}:
                value, base, child_path = self._target(value["$ref"], base, f"{child_path}/$ref")
        translated = self._walk(value, base, child_path, 0)
        if translated is not True and not (translated and restrict_names(out, translated)):
            raise _error(path, "keyword 'propertyNames' is supported with 'enum' or 'const', or for an object without "
                               "declared properties with one of 'pattern', 'format' and lengths,")

    def _items(self, schema: Mapping[str, Any], base: str, path: str, depth: int, out: dict[str, Any]) -> None:
        items = schema.get("items", True)
        rest = "items"
        prefix = schema.get("prefixItems") if self._has_prefix else None
        if isinstance(items, list):
            prefix = items
            items = schema.get("additionalItems", True)
            rest = "additionalItems"
        if prefix:
            out["prefixItems"] = [self._walk(item, base, f"{path}/prefixItems/{i}", depth + 1)
                                  for i, item in enumerate(_list(prefix, f"{path}/prefixItems"))]
        if items is not True:
            out["items"] = self._walk(items, base, f"{path}/{rest}", depth + 1)

    def _reference(self, reference: Any, base: str, path: str) -> str:
        schema, outer, target = self._target(reference, base, path)
        key = (id(schema), outer)
        if key not in self._definitions:
            self._definitions[key] = f"r{len(self._definitions)}"
            self._ahead.append((schema, outer, target, self._definitions[key]))
        return f"#/$defs/{self._definitions[key]}"

    def _target(self, reference: Any, base: str, path: str) -> tuple[Any, str, str]:
        """Return the subschema of a reference, the base around it and its path."""
        if not isinstance(reference, str):
            raise _error(path, "'$ref' must be a string")
        try:
            if reference.startswith("#"):  # also for a base that is no hierarchical URI, such as a URN
                uri = base
                fragment = unquote(reference[1:])
            else:
                uri, fragment = urldefrag(urljoin(base, reference))
                fragment = unquote(fragment)
        except ValueError as error:
            raise _error(path, f"malformed '$ref': {error}") from error
        if fragment and not fragment.startswith("/"):
            if document := self._documents.get(f"{uri}#{fragment}"):
                return *document, f"#{fragment}"
            raise _error(path, f"'$ref' to the unknown anchor {reference[:100]!r}")
        if uri not in self._documents:
            raise _error(path, f"'$ref' to another document is not supported: {reference[:100]!r}")
        value, outer = self._documents[uri]
        for step in fragment.split("/")[1:]:
            outer = self._base_of(value, outer)
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and step in value:
                value = value[step]
            elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
                value = value[int(step)]
            else:
                raise _error(path, f"'$ref' to an unknown part of the schema: {reference[:100]!r}")
        return value, outer, fragment


def _list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _error(path, "must be an array of at least one schema")
    return value


def _pattern(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise _error(path, "must be a regular expression")
    try:
        return pattern.translate(value, quoted=True)
    except pattern.PatternError as error:
        raise _error(path, f"regular expression {value[:60]!r}: {error}") from error


def _name_pattern(value: str, path: str) -> pattern.NamePattern:
    try:
        return pattern.translate_name(value)
    except pattern.PatternError as error:
        raise _error(path, f"regular expression {value[:60]!r}: {error}") from error


def _format(value: Any, path: str) -> Iterator[dict[str, Any]]:
    if not isinstance(value, str):
        raise _error(path, "'format' must be a string")
    if value in formats.UNSUPPORTED:
        raise _error(path, f"format '{value}' is not supported")
    if value in formats.FORMATS:
        yield {"pattern": f"^(?:{formats.FORMATS[value]})$"}


def _copy(keyword: str, value: Any, path: str, out: dict[str, Any]) -> None:
    """Check a keyword without subschemas and enter it. Other ones are annotations."""
    if keyword == "pattern":
        out[keyword] = _pattern(value, path)
    elif keyword == "type":
        names = value if isinstance(value, list) else [value]
        for name in names or [None]:
            if not isinstance(name, str) or name not in _TYPES:
                raise _error(path, f"'type' must be one or several of {', '.join(sorted(_TYPES))}")
        out[keyword] = value
    elif keyword in ("enum", "const"):
        if keyword == "enum" and (not isinstance(value, list) or not value):
            raise _error(path, "'enum' must be an array of at least one value")
        _check_value(value, path, 0)
        out[keyword] = value
    elif keyword == "required":
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise _error(path, "'required' must be an array of strings")
        out[keyword] = list(dict.fromkeys(value))
    elif keyword in _COUNTS:
        is_integer = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not is_integer or value < 0:
            raise _error(path, f"'{keyword}' must be an integer of at least 0")
        if keyword.startswith("min") and value > MAX_COUNT:
            raise _error(path, f"'{keyword}' must be at most {MAX_COUNT}")
        out[keyword] = min(int(value), MAX_COUNT)
    elif keyword == "multipleOf":
        if fault := divisor_fault(value) if _is_number(value) else "must be a number":
            raise _error(path, f"'multipleOf' {fault}")
        out[keyword] = value


def _check_value(value: Any, path: str, depth: int) -> None:
    """Raise for a constant that the library would not write exactly."""
    if depth > MAX_DEPTH:
        raise _error(path, f"values must be nested at most {MAX_DEPTH} deep")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_value(item, path, depth + 1)
    elif isinstance(value, int | float) and abs(value) > MAX_INTEGER:  # also infinity, for numbers such as 1e400
        raise _error(path, f"a number must be at most {MAX_INTEGER}")
    elif isinstance(value, float) and not is_exact(value):
        raise _error(path, "a number must have at most 15 digits, and a decimal exponent within 22")
    for text in [value] if isinstance(value, str) else value if isinstance(value, dict) else ():
        if any((ord(c) < 32 and c not in "\b\t\n\f\r") or 0xD800 <= ord(c) < 0xE000 or c == "\x7f" for c in text):
            raise _error(path, "control characters without an escape of one letter are not supported")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _bounds(schema: Mapping[str, Any], path: str, out: dict[str, Any], others: Sequence[float]) -> None:
    """Enter the bounds of numbers, tightened to what a double holds.

    others: bounds of all subschemas, some of which may apply to the same numbers.
    """
    for (inclusive, exclusive), is_lower in ((_LOWER, True), (_UPPER, False)):
        for keyword in (inclusive, exclusive):
            value = schema.get(keyword)
            if isinstance(value, bool) and keyword == exclusive:  # draft 4
                if value and inclusive in out:
                    out[exclusive] = out.pop(inclusive)
            elif value is not None:
                if not _is_number(value):
                    raise _error(f"{path}/{keyword}", f"'{keyword}' must be a number")
                out[keyword] = _tightened(value, is_lower, f"{path}/{keyword}")
        if (value := out.get(exclusive)) is not None:
            if value == (MAX_INTEGER if is_lower else -MAX_INTEGER):
                raise _error(f"{path}/{exclusive}", f"an exclusive bound must be less than {MAX_INTEGER} away from 0")
            out[exclusive] = inside_bound(value, 1 if is_lower else -1, others)


def _tightened(value: float, is_lower: bool, path: str) -> float:
    inside = MAX_INTEGER if not is_lower else -MAX_INTEGER
    if (value < inside) if is_lower else (value > inside):
        return inside
    if abs(value) > MAX_INTEGER:
        raise _error(path, f"a bound must be within {MAX_INTEGER} of 0")
    if 0 < abs(value) < MIN_BOUND:
        raise _error(path, f"a bound must be 0 or at least {MIN_BOUND} away from it")
    assert Fraction(float(value)) == Fraction(value)
    return value


def _check_properties(out: Mapping[str, Any], path: str) -> None:
    """Refuse a minProperties that a repeated name would satisfy. Names of additional properties are not compared."""
    min_properties = out.get("minProperties", 0)
    if min_properties - len(out.get("required", ())) > 1:
        raise _error(f"{path}/minProperties", "keyword 'minProperties' is supported for at most one property that is "
                                              "not in 'required'")
