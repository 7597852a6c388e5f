"""GBNF, the EBNF of llama.cpp, which vLLM and xgrammar read too: parser, and conversion to llguidance's Lark.

The library splits a text into terminals greedily, as a lexer does, so that a conversion of every rule without recursion
to a terminal would lose texts: `root ::= x "b"` with `x ::= [a-z]*` would never end. The conversion therefore keeps the
language exactly. A grammar without recursion becomes one regular expression. In a recursive one, the largest parts
without recursion become terminals if no text is split in two ways (`greedy.py`), else every character is a terminal.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from npuserve.service.structured_output.translation.errors import ConstraintError

MAX_DEPTH = 100
"""Nesting of parentheses."""
MAX_RULES = 2000
MAX_REPEAT = 10_000
MAX_CODE = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]


class Chars(NamedTuple):
    """One character of a set."""

    ranges: Ranges


class Ref(NamedTuple):
    """Reference to a rule."""

    name: str


class Seq(NamedTuple):
    """Sequence."""

    items: tuple[Node, ...]


class Alt(NamedTuple):
    """Alternatives."""

    items: tuple[Node, ...]


class Rep(NamedTuple):
    """Repetition. most: -1 for no maximum."""

    item: Node
    min_count: int
    max_count: int


Node = Chars | Ref | Seq | Alt | Rep

_TOKEN = re.compile(
    r'\s+|\#[^\n]*|(?P<define>[A-Za-z_][\w-]*\s*::=)|(?P<name>[A-Za-z_][\w-]*)|(?P<string>"(?:\\.|[^"\\\n])*")'
    r"|(?P<chars>\[(?:\\.|[^\]\\])*\])|(?P<count>\{\s*[0-9]+\s*(?:,\s*[0-9]*\s*)?\})|(?P<mark>[()|*+?.])", re.DOTALL)
_ESCAPE = re.compile(
    r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|u\{([0-9A-Fa-f]{1,6})\}|(.))", re.DOTALL)
_LETTERS = {"n": 10, "r": 13, "t": 9, "f": 12, "b": 8, "0": 0, "v": 11}


def parse(text: str) -> dict[str, Node]:
    """Return the rules that `root` needs, by name, without the parts that match no finite text.

    Raises ConstraintError, which names the position, also for a grammar without any finite text.
    """
    return _Parser(text).parse()


def is_recursive(rules: Mapping[str, Node]) -> dict[str, bool]:
    """Return for each rule whether it is recursive, or refers to such a rule."""
    needs = {name: frozenset(references(node)) for name, node in rules.items()}
    plain: set[str] = set()
    while added := {name for name, names in needs.items() if name not in plain and names <= plain}:
        plain |= added
    return {name: name not in plain for name in rules}


def references(node: Node) -> Iterator[str]:
    """Yield the names of the rules that an expression refers to."""
    if isinstance(node, Ref):
        yield node.name
    elif isinstance(node, Rep):
        yield from references(node.item)
    elif isinstance(node, Seq | Alt):
        for item in node.items:
            yield from references(item)


class _Parser:
    def __init__(self, text: str):
        self._text = text
        self._tokens = list(self._split())
        self._next = 0

    def _split(self) -> Iterator[tuple[str, str, int]]:
        position = 0
        while position < len(self._text):
            match = _TOKEN.match(self._text, position)
            if not match:
                raise self._error(f"unexpected {self._text[position:position + 10]!r}", position)
            if match.lastgroup:
                yield match.lastgroup, match.group(), position
            position = match.end()

    def _error(self, message: str, position: int) -> ConstraintError:
        line = self._text.count("\n", 0, position) + 1
        column = position - self._text.rfind("\n", 0, position)
        return ConstraintError(f"grammar: {message} at line {line}, column {column}")

    def parse(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._next < len(self._tokens):
            kind, token, position = self._tokens[self._next]
            if kind != "define":
                raise self._error("a rule must begin with its name and '::='", position)
            name = token[:-3].strip()
            if name in rules:
                raise self._error(f"the rule {name!r} is defined twice", position)
            self._next += 1
            rules[name] = self._alternatives(0)
            if len(rules) > MAX_RULES:
                raise self._error(f"more than {MAX_RULES} rules", position)
        return _productive(_needed(rules))

    def _alternatives(self, depth: int) -> Node:
        options = []
        items = list[Node]()
        while self._next < len(self._tokens):
            kind, token, position = self._tokens[self._next]
            if kind == "define" or token == ")":
                break
            self._next += 1
            if token == "|":
                options.append(_seq(items))
                items = []
            elif token == "(":
                if depth >= MAX_DEPTH:
                    raise self._error(f"parentheses must be nested at most {MAX_DEPTH} deep", position)
                items.append(self._alternatives(depth + 1))
                if self._next >= len(self._tokens) or self._tokens[self._next][1] != ")":
                    raise self._error("unclosed '('", position)
                self._next += 1
            elif kind == "count" or token in ("*", "+", "?"):
                if not items:
                    raise self._error("nothing to repeat", position)
                items[-1] = self._repeated(items[-1], token, position)
            else:
                items.append(self._atom(kind, token, position))
        if depth == 0 and self._next < len(self._tokens) and self._tokens[self._next][1] == ")":
            raise self._error("unmatched ')'", self._tokens[self._next][2])
        options.append(_seq(items))
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def _repeated(self, item: Node, token: str, position: int) -> Node:
        if token in ("*", "+", "?"):
            return Rep(item, int(token == "+"), 1 if token == "?" else -1)
        low, comma, high = "".join(token[1:-1].split()).partition(",")
        min_count = int(low) if len(low) < 8 else MAX_REPEAT + 1
        max_count = -1 if comma and not high else int(high or low) if len(high) < 8 else MAX_REPEAT + 1
        if max(min_count, max_count) > MAX_REPEAT or (max_count != -1 and max_count < min_count):
            raise self._error(f"a repetition must be in [0, {MAX_REPEAT}], with its bounds in order", position)
        return Rep(item, min_count, max_count) if max_count else Seq(())

    def _atom(self, kind: str, token: str, position: int) -> Node:
        if kind == "name":
            return Ref(token)
        if token == ".":
            return Chars(complement(((10, 10), (13, 13))))
        if kind == "string":
            return _seq([Chars(((code, code),)) for code in self._codes(token[1:-1], position)])
        return Chars(self._class(token[1:-1], position))

    def _codes(self, text: str, position: int) -> list[int]:
        codes = []
        i = 0
        while i < len(text):
            match = _ESCAPE.match(text, i)
            codes.append(self._escaped(match, position) if match else ord(text[i]))
            i = match.end() if match else i + 1
            if 0xD800 <= codes[-1] < 0xE000 or codes[-1] > MAX_CODE:
                raise self._error("a code point must be a character", position)
        return codes

    def _escaped(self, match: re.Match[str], position: int) -> int:
        if match.group(5) is None:
            return int(next(filter(None, match.groups())), 16)
        letter = match.group(5)
        if letter.isalnum() and letter not in _LETTERS:
            raise self._error(f"the escape '\\{letter}' is not supported", position)
        return _LETTERS.get(letter, ord(letter))

    def _class(self, text: str, position: int) -> Ranges:
        is_negated = text.startswith("^")
        text = text[is_negated:]
        parts = re.findall(r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|u\{[0-9A-Fa-f]{1,6}\}|.)|[^\\]", text,
                           re.DOTALL)
        ranges = []
        i = 0
        while i < len(parts):
            (low,) = high = self._codes(parts[i], position)
            if parts[i + 1:i + 2] == ["-"] and i + 2 < len(parts):
                high = self._codes(parts[i + 2], position)
                i += 2
            if high[0] < low:
                raise self._error("a range is in the wrong order", position)
            ranges.append((low, high[0]))
            i += 1
        return complement(tuple(ranges)) if is_negated else normalized(ranges)


def _needed(rules: dict[str, Node]) -> dict[str, Node]:
    """Return the rules that `root` reaches."""
    if "root" not in rules:
        raise ConstraintError("grammar: must have the rule 'root'")
    reached = {"root": rules["root"]}
    ahead = ["root"]
    while ahead:
        name = ahead.pop()
        for other in references(rules[name]):
            if other not in rules:
                raise ConstraintError(f"grammar: the rule {name!r} refers to the unknown rule {other!r}")
            if other not in reached:
                reached[other] = rules[other]
                ahead.append(other)
    return reached


def _productive(rules: dict[str, Node]) -> dict[str, Node]:
    """Return the rules that `root` needs once all parts that match no finite text are removed."""
    finite: set[str] = set()
    while more := {name for name, node in rules.items() if name not in finite and _is_finite(node, finite)}:
        finite |= more
    if "root" not in finite:
        raise ConstraintError("grammar: no finite text satisfies the rule 'root'")
    parts = {name: _finite_part(node, finite) for name, node in rules.items()}
    return _needed({name: part for name, part in parts.items() if part is not None})


def _is_finite(node: Node, finite: Collection[str]) -> bool:
    return _finite_part(node, finite) is not None


def _finite_part(node: Node, finite: Collection[str]) -> Node | None:
    """Return an expression without the alternatives and repetitions that match no text; None if nothing is left.

    finite: rules that are known to match a text.
    """
    if isinstance(node, Chars):
        return node if node.ranges else None
    if isinstance(node, Ref):
        return node if node.name in finite else None
    if isinstance(node, Rep):
        item = _finite_part(node.item, finite)
        if item is None:
            return None if node.min_count else Seq(())
        return Rep(item, node.min_count, node.max_count)
    parts = [_finite_part(item, finite) for item in node.items]
    kept = tuple(part for part in parts if part is not None)
    if isinstance(node, Seq):
        return Seq(kept) if len(kept) == len(parts) else None
    if not kept:
        return None
    return kept[0] if len(kept) == 1 else Alt(kept)


def _seq(items: list[Node]) -> Node:
    return items[0] if len(items) == 1 else Seq(tuple(items))


def normalized(ranges: list[tuple[int, int]] | Ranges) -> Ranges:
    """Return disjoint ranges in ascending order, without surrogates."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(_without_surrogates(ranges)):
        if out and low <= out[-1][1] + 1:
            out[-1] = out[-1][0], max(out[-1][1], high)
        else:
            out.append((low, high))
    return tuple(out)


def complement(ranges: Ranges) -> Ranges:
    """Return all characters that are not in the ranges."""
    out = []
    low_end = 0
    for low, high in normalized(list(ranges)):
        out.append((low_end, low - 1))
        low_end = high + 1
    return normalized([r for r in [*out, (low_end, MAX_CODE)] if r[0] <= r[1]])


def _without_surrogates(ranges: list[tuple[int, int]] | Ranges) -> Iterator[tuple[int, int]]:
    for low, high in ranges:
        for part in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high)):
            if part[0] <= part[1]:
                yield part
