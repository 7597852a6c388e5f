"""Structural tags: constraints on parts of an answer, such as the calls of tools in free text.

The format is xgrammar's, which vLLM and gateways send: {"type": "structural_tag", "format": {...}}, and the older
{"structures": [{"begin", "schema", "end"}], "triggers": [...]}. `_FORMATS` lists the formats that are supported. A free
text ends at the first occurrence of the text that follows it: the end of its tag, a trigger, or a constant.

The library's lexer is greedy: a terminal that may continue takes what its successor needs. So regular expressions and
the texts after them become one terminal.

A tag that the front end made from the client's tools names the field of each schema: {"type": "json_schema",
"json_schema": ..., "x-field": "chat.tools[0].function.parameters"}. Errors of the schema name this field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from npuserve.service.structured_output.translation import schema
from npuserve.service.structured_output.translation.ebnf import is_regular, to_lark
from npuserve.service.structured_output.translation.errors import ConstraintError
from npuserve.service.structured_output.translation.gbnf_lark import to_terminals
from npuserve.service.structured_output.translation.lark import WHITESPACE, GrammarBuilder, quote, regex
from npuserve.service.structured_output.translation.tagged_arguments import TaggedArguments

MAX_DEPTH = 32
MAX_ITEMS = 1024
_FREE = frozenset({"any_text", "triggered_tags", "dispatch"})
"""Formats that end with a free text."""
_REPEATED = {"optional": "?", "plus": "+", "star": "*"}


def translate(text: str, builder: GrammarBuilder) -> str:
    """Return the expression of a structural tag. Raise ConstraintError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"structural_tag: malformed JSON: {error}") from error
    if not isinstance(value, dict) or value.get("type", "structural_tag") != "structural_tag":
        raise ConstraintError('structural_tag: must be an object with "type": "structural_tag"')
    return _Translator(builder).expression(_from_legacy(value), "/format", None, 0)


def _from_legacy(value: Mapping[str, Any]) -> Any:
    if "format" in value:
        return value["format"]
    structures = value.get("structures")
    triggers = value.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise ConstraintError("structural_tag: must have 'format', or 'structures' and 'triggers'")
    tags = []
    for i, item in enumerate(structures):
        if not isinstance(item, dict) or not {"begin", "end"} <= item.keys():
            raise ConstraintError(f"structural_tag: must have 'begin', 'schema' and 'end' at /structures/{i}")
        inner = item.get("schema", True)
        if isinstance(inner, str):
            try:
                inner = json.loads(inner)
            except (ValueError, RecursionError) as error:
                raise ConstraintError(f"structural_tag: malformed JSON at /structures/{i}/schema: {error}") from error
        tags.append({"type": "tag", "begin": item["begin"], "end": item["end"],
                     "content": {"type": "json_schema", "json_schema": inner}})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class _Translator:
    """Translator of formats to expressions.

    `ends` of the methods: texts of which one follows and ends a free text. The expression then includes it. None if no
    text follows, or the format ends by itself.
    """

    def __init__(self, builder: GrammarBuilder):
        self._builder = builder
        self._items = 0

    def expression(self, value: Any, path: str, ends: Sequence[str] | None, depth: int) -> str:
        self._enter(path, depth)
        if not isinstance(value, dict):
            raise _error(path, "a format must be an object")
        kind = _kind(value)
        method = _FORMATS.get(kind)
        if method is None:
            supported = ", ".join(_FORMATS)
            raise _error(path, f"format {value.get('type')!r} is not supported; it must be one of {supported}")
        if kind in _FREE or kind == "sequence":
            return method(self, value, path, ends, depth)
        may_continue = kind == "or" or kind in _REPEATED or (ends is not None and kind != "const_string")
        if may_continue and self._is_regular(value, depth) and (
                kind == "regex" or all(map(self._is_text_or_token, ends or ()))):
            body = self._terminal_body(value, path, depth)
            return self._builder.terminal(body) if ends is None else self._ended(body, ends)
        if kind == "or":
            return method(self, value, path, ends, depth)
        return self._then(method(self, value, path, None, depth), ends)

    def _enter(self, path: str, depth: int) -> None:
        """Count a format. Raise ConstraintError beyond the limits."""
        self._items += 1
        if depth > MAX_DEPTH or self._items > MAX_ITEMS:
            raise _error(path, f"formats must be nested at most {MAX_DEPTH} deep, and be at most {MAX_ITEMS}")

    def _is_regular(self, value: Any, depth: int) -> bool:
        """Return whether a format is a regular expression of text."""
        kind = _kind(value) if depth <= MAX_DEPTH else ""
        if kind in ("or", "sequence"):
            elements = value.get("elements")
            return isinstance(elements, list) and bool(elements) and all(
                self._is_regular(item, depth + 1) for item in elements)
        if kind in _REPEATED:
            return self._is_regular(value.get("content"), depth + 1)
        if kind == "const_string":
            return self._is_text(value.get("value"))
        if kind == "tag":
            ends = _end_texts(value)
            return self._is_text(value.get("begin")) and bool(ends) and all(map(self._is_text, ends)) and (
                self._is_regular(value.get("content"), depth + 1))
        if kind == "grammar":
            return isinstance(text := value.get("grammar"), str) and is_regular(text)
        return kind == "regex"

    def _terminal_body(self, value: Any, path: str, depth: int) -> str:
        """Return the body of a terminal for a regular format."""
        kind = value["type"]
        if kind in ("or", "sequence"):
            inner = [self._inner_body(item, f"{path}/elements/{i}", depth + 1)
                     for i, item in enumerate(value["elements"])]
            return f"({(' | ' if kind == 'or' else ' ').join(inner)})"
        if kind == "const_string":
            return quote(value["value"])
        if kind in _REPEATED:
            return f"({self._inner_body(value['content'], f'{path}/content', depth + 1)}){_REPEATED[kind]}"
        if kind == "tag":
            content = self._inner_body(value["content"], f"{path}/content", depth + 1)
            return f"({quote(value['begin'])} {content} ({' | '.join(map(quote, _end_texts(value)))}))"
        if kind == "grammar":
            return self._builder.terminals(lambda prefix: to_terminals(value["grammar"], prefix))
        return self._regex(value, path, None, depth)

    def _inner_body(self, value: Any, path: str, depth: int) -> str:
        self._enter(path, depth)
        return self._terminal_body(value, path, depth)

    def _ended(self, body: str, ends: Sequence[str]) -> str:
        """Return an expression of a terminal's body and an end: one terminal, since the library's lexer is greedy."""
        options = [self._builder.terminal(f"{body} ({' | '.join(map(quote, ends))})")]
        tokens = [token for end in ends if (token := self._builder.special_id(end)) is not None]
        text = self._builder.terminal(body) if tokens else ""
        return self._builder.rule(" | ".join([*options, *(f"{text} <[{token}]>" for token in tokens)]))

    def _is_text(self, text: Any) -> bool:
        return isinstance(text, str) and not self._builder.has_special(text)

    def _is_text_or_token(self, text: str) -> bool:
        return self._builder.special_id(text) is not None or self._is_text(text)

    def _then(self, expression: str, ends: Sequence[str] | None) -> str:
        return expression if ends is None else f"{expression} {self._one_of(ends)}"

    def _one_of(self, texts: Sequence[str]) -> str:
        return self._builder.rule(" | ".join(map(self._builder.literal, texts)))

    def _const_string(self, value: Any, path: str, ends: Any, depth: int) -> str:
        return self._builder.literal(_text(value, "value", path))

    def _regex(self, value: Any, path: str, ends: Any, depth: int) -> str:
        return regex(_text(value, "pattern", path), f"structural_tag: {path}/pattern")

    def _grammar(self, value: Any, path: str, ends: Any, depth: int) -> str:
        try:
            return self._builder.lark(to_lark(_text(value, "grammar", path)))
        except ConstraintError as error:
            raise _error(f"{path}/grammar", str(error)) from error

    def _json_schema(self, value: Any, path: str, ends: Any, depth: int) -> str:
        for name, allowed in (("style", ("json", "qwen_xml")), ("any_order", (False,)), ("excludes", ([],))):
            if value.get(name, allowed[0]) not in allowed:
                raise _error(f"{path}/{name}", f"'{name}' must be {' or '.join(map(repr, allowed))}")
        blanks = value.get("max_whitespace_cnt")
        if blanks is not None and (not isinstance(blanks, int) or blanks < 0):
            raise _error(path, "'max_whitespace_cnt' must be an integer of at least 0")
        whitespace = WHITESPACE if blanks is None else rf"[ \n]{{1,{min(blanks, 40)}}}" if blanks else "[a&&b]"
        field = value.get("x-field")
        origin = field if isinstance(field, str) else f"structural_tag: {path}/json_schema"
        try:
            if value.get("style") == "qwen_xml":
                return TaggedArguments(value.get("json_schema"), self._builder, origin).expression()
            inner = schema.translate_value(value.get("json_schema"))
        except ConstraintError as error:
            if isinstance(field, str):
                raise ConstraintError(str(error).removeprefix("json_schema: "), field) from error
            raise ConstraintError(f"structural_tag: {path}/{error}") from error
        return self._builder.json_schema({**inner, schema.ORIGIN: origin}, whitespace)

    def _token(self, value: Any, path: str, ends: Any, depth: int) -> str:
        token = value.get("token")
        token_id = token if isinstance(token, int) and not isinstance(token, bool) else None
        if isinstance(token, str):
            token_id = self._builder.special_id(token)
        if token_id is None or token_id < 0 or token_id in self._builder.end_ids:
            raise _error(path, "'token' must be the id or the text of a special token that does not end an answer")
        return f"<[{token_id}]>"

    def _or(self, value: Any, path: str, ends: Sequence[str] | None, depth: int) -> str:
        inner = [self.expression(item, f"{path}/elements/{i}", ends, depth + 1)
                 for i, item in enumerate(_items(value, "elements", path))]
        return self._builder.rule(" | ".join(inner))

    def _sequence(self, value: Any, path: str, ends: Sequence[str] | None, depth: int) -> str:
        elements = _items(value, "elements", path)
        parts = list[str]()
        i = 0
        while i < len(elements):
            item = elements[i]
            child_path = f"{path}/elements/{i}"
            count = self._count_regular(elements[i:], depth + 1)
            last = i + count == len(elements)
            if _kind(item) in _FREE and not last:
                following = elements[i + 1]
                if _kind(following) != "const_string":
                    raise _error(child_path, f"'{item['type']}' must be last, or be followed by a const_string")
                end = [_text(following, "value", f"{path}/elements/{i + 1}")]
                parts.append(self.expression(item, child_path, end, depth + 1))  # includes the constant
                count = 2
                if i + count == len(elements) and ends is not None:
                    parts.append(self._one_of(ends))
            elif count > 1:
                body = " ".join(self._inner_body(inner, f"{path}/elements/{i + n}", depth + 1)
                                for n, inner in enumerate(elements[i:i + count]))
                has_end = last and ends is not None and all(map(self._is_text_or_token, ends))
                part = self._ended(body, ends or ()) if has_end else self._builder.terminal(body)
                parts.append(part if has_end or not last else self._then(part, ends))
            else:
                parts.append(self.expression(item, child_path, ends if last else None, depth + 1))
            i += count
        return self._builder.rule(" ".join(parts))

    def _count_regular(self, elements: Sequence[Any], depth: int) -> int:
        """Return the number of the first elements that must be one terminal: regular ones after one of many texts."""
        if _kind(elements[0]) == "const_string":
            return 1
        count = next((i for i, item in enumerate(elements) if not self._is_regular(item, depth)), len(elements))
        return max(1, count)

    def _any_text(self, value: Any, path: str, ends: Sequence[str] | None, depth: int) -> str:
        if value.get("max_tokens") is not None:
            raise _error(path, "'max_tokens' is not supported")
        limit = value.get("max_chars")
        if limit is not None and (not isinstance(limit, int) or not 0 <= limit <= 1 << 20):
            raise _error(path, f"'max_chars' must be an integer in [0, {1 << 20}]")
        return self._free(_texts(value, "excludes", path), ends, limit)

    def _free(self, excluded: Sequence[str], ends: Sequence[str] | None, limit: int | None = None) -> str:
        """Return an expression of a free text, and of what ends it."""
        if ends is None or "" in ends:
            return self._builder.free_text(excluded, limit)
        text = self._builder.free_text([*excluded, *ends], limit)
        options = []
        for end in ends:
            token = self._builder.special_id(end)
            if token is not None:
                options.append(f"{text} <[{token}]>")
            options.append(self._builder.text_until(end, [*excluded, *(e for e in ends if e != end)], limit))
        return self._builder.rule(" | ".join(options))

    def _tag(self, value: Any, path: str, ends: Any, depth: int, begin: str | None = None) -> str:
        """begin: rest of the begin that follows its trigger."""
        if not isinstance(value, dict):
            raise _error(path, "a tag must be an object")
        first = self._begin(value, path) if begin is None else self._builder.literal(begin) if begin else ""
        content = value.get("content")
        last = value.get("end")
        if isinstance(last, dict):
            text = self.expression(content, f"{path}/content", None, depth + 1)
            return self._builder.rule(f"{first} {text} {self._token(last, f'{path}/end', None, depth)}")
        if not (texts := _end_texts(value)):
            raise _error(path, "'end' must be a string, strings or a token")
        return self._builder.rule(f"{first} {self.expression(content, f'{path}/content', texts, depth + 1)}")

    def _begin(self, value: Any, path: str) -> str:
        begin = value.get("begin")
        if isinstance(begin, dict):
            return self._token(begin, f"{path}/begin", None, 0)
        return self._builder.literal(_text(value, "begin", path))

    def _triggered_tags(self, value: Any, path: str, ends: Sequence[str] | None, depth: int) -> str:
        triggers = _texts(value, "triggers", path)
        excluded = _texts(value, "excludes", path)
        if not triggers or not all(triggers):
            raise _error(path, "'triggers' must be texts of at least one character")
        whole = []
        rest = {trigger: list[str]() for trigger in triggers}
        for i, tag in enumerate(_items(value, "tags", path)):
            child_path = f"{path}/tags/{i}"
            begin = _text(tag, "begin", child_path)
            matching = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(matching) != 1:
                raise _error(child_path, "'begin' must start with exactly one of the triggers")
            if value.get("at_least_one"):
                whole.append(self._tag(tag, child_path, None, depth + 1))
            rest[matching[0]].append(self._tag(tag, child_path, None, depth + 1, begin=begin[len(matching[0]):]))
        return self._dispatched(whole, rest, excluded, ends, once=bool(value.get("stop_after_first")))

    def _dispatch(self, value: Any, path: str, ends: Sequence[str] | None, depth: int) -> str:
        rest: dict[str, list[str]] = {}
        for i, rule in enumerate(_items(value, "rules", path)):
            if not isinstance(rule, list) or len(rule) != 2 or not isinstance(rule[0], str) or not rule[0]:
                raise _error(f"{path}/rules/{i}", "a rule must be a text and a format")
            rest.setdefault(rule[0], []).append(self.expression(rule[1], f"{path}/rules/{i}/1", None, depth + 1))
        return self._dispatched([], rest, _texts(value, "excludes", path), ends, once=not value.get("loop", True))

    def _dispatched(
        self, whole: Sequence[str], rest: Mapping[str, Sequence[str]], excluded: Sequence[str],
        ends: Sequence[str] | None, once: bool,
    ) -> str:
        """Return an expression of free text in which each trigger is followed by one of its expressions.

        whole: expressions of which one comes first, without text before it; none if a free text may be all.
        rest: trigger to the expressions that may follow it.
        """
        triggers = [trigger for trigger, options in rest.items() if options]
        others = {t: [*excluded, *(o for o in [*triggers, *(ends or ())] if o != t and o)] for t in triggers}
        parts = [f"{self._free(others[t], [t])} {self._builder.rule(' | '.join(rest[t]))}" for t in triggers]
        part = self._builder.rule(" | ".join(parts))
        if once:
            if whole:
                return self._then(self._builder.rule(" | ".join(whole)), ends)
            plain = self._free([*excluded, *triggers], ends)
            return self._builder.rule(f"{plain} | {self._then(part, ends)}")
        plain = self._free([*excluded, *triggers], ends)
        first = f"{self._builder.rule(' | '.join(whole))} " if whole else ""
        return self._builder.rule(f"{first}{part}* {plain}")

    def _tags_with_separator(self, value: Any, path: str, ends: Any, depth: int) -> str:
        tags = self._builder.rule(" | ".join(self._tag(tag, f"{path}/tags/{i}", None, depth + 1)
                                             for i, tag in enumerate(_items(value, "tags", path))))
        separator = self._builder.literal(_text(value, "separator", path))
        many = tags if value.get("stop_after_first") else f"{tags} ({separator} {tags})*"
        return self._builder.rule(many if value.get("at_least_one") else f"({many})?")

    def _repeated(self, value: Any, path: str, ends: Any, depth: int) -> str:
        inner = self._builder.rule(self.expression(value.get("content"), f"{path}/content", None, depth + 1))
        if value["type"] != "repeat":
            return f"{inner}{_REPEATED[value['type']]}"
        low = value.get("min")
        high = value.get("max")
        if not (isinstance(low, int) and isinstance(high, int) and 0 <= low <= 1000 and -1 <= high <= 1000) or (
                high != -1 and high < low):
            raise _error(path, "'min' and 'max' must be integers in [0, 1000], or -1 for no maximum")
        return f"{inner}{{{low},{'' if high == -1 else high}}}" if high else '""'


_FORMATS: dict[str, Callable[[_Translator, Any, str, Sequence[str] | None, int], str]] = {
    "const_string": _Translator._const_string, "json_schema": _Translator._json_schema,
    "regex": _Translator._regex, "grammar": _Translator._grammar, "any_text": _Translator._any_text,
    "token": _Translator._token, "sequence": _Translator._sequence, "or": _Translator._or, "tag": _Translator._tag,
    "triggered_tags": _Translator._triggered_tags, "tags_with_separator": _Translator._tags_with_separator,
    "dispatch": _Translator._dispatch, "optional": _Translator._repeated, "plus": _Translator._repeated,
    "star": _Translator._repeated, "repeat": _Translator._repeated,
}


def _error(path: str, message: str) -> ConstraintError:
    return ConstraintError(f"structural_tag: {message} at {path}")


def _kind(value: Any) -> str:
    """Return the name of a format; "" if it has none."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else ""


def _text(value: Any, name: str, path: str) -> str:
    text = value.get(name) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise _error(path, f"'{name}' must be a string")
    return text


def _end_texts(tag: Mapping[str, Any]) -> list[str]:
    """Return the texts of which one ends a tag; none if the tag is malformed or ends by a token."""
    end = tag.get("end")
    texts = [end] if isinstance(end, str) else end
    return texts if isinstance(texts, list) and all(isinstance(text, str) for text in texts) else []


def _texts(value: Any, name: str, path: str) -> list[str]:
    texts = value.get(name, [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _error(path, f"'{name}' must be an array of strings")
    return list(filter(None, texts)) if name == "excludes" else texts


def _items(value: Any, name: str, path: str) -> list[Any]:
    items = value.get(name) if isinstance(value, dict) else None
    if not isinstance(items, list) or not items:
        raise _error(path, f"'{name}' must be an array of at least one item")
    return items
