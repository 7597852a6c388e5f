"""Conversion of GBNF to llguidance's Lark without a change of the language, see `gbnf.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from npuserve.service.structured_output.translation.errors import ConstraintError
from npuserve.service.structured_output.translation.gbnf import (
    Alt,
    Chars,
    Node,
    Ref,
    Rep,
    Seq,
    is_recursive,
    parse,
    references,
)
from npuserve.service.structured_output.translation.greedy import Atoms, Automaton, Budget, TooLarge, is_safe


def to_lark(text: str) -> str:
    """Return a grammar in GBNF in Lark's syntax. Raise ConstraintError."""
    return _Converter(parse(text)).convert()


def is_regular(text: str) -> bool:
    """Return whether a grammar in GBNF has neither errors nor recursion."""
    try:
        return not is_recursive(parse(text))["root"]
    except ConstraintError:
        return False


def to_terminals(text: str, prefix: str) -> list[str]:
    """Return the terminals of a grammar in GBNF without recursion. The first one, `prefix` and 0, is the whole text."""
    return _Converter(parse(text), prefix).terminals()


class _Converter:
    def __init__(self, rules: Mapping[str, Node], prefix: str = "T"):
        self._rules = rules
        self._is_recursive = is_recursive(rules)
        self._names = {name: f"{'r' if self._is_recursive[name] else prefix}{i}" for i, name in enumerate(rules)}
        self._terminals: dict[Node, str] = {}  # largest parts without recursion

    def convert(self) -> str:
        if not self._is_recursive["root"]:
            return self._text(["start: " + self._names["root"]], self._rules)
        recursive = {name: node for name, node in self._rules.items() if self._is_recursive[name]}
        for node in recursive.values():
            self._collect(node)
        if self._is_greedy_safe(recursive):
            lines = [f"{self._names[name]}: {self._expression(node)}" for name, node in recursive.items()]
            parts = self._terminals
            self._terminals = {}
            lines += [f"{terminal}: {self._inner(node)}" for node, terminal in parts.items()]
            plain = {name: node for name, node in self._rules.items() if name not in recursive}
            return self._text([f"start: {self._names['root']}", *lines], plain)
        self._names = {name: f"r{i}" for i, name in enumerate(self._rules)}
        self._terminals.clear()
        return "\n".join([f"start: {self._names['root']}",
                          *(f"{self._names[name]}: {self._expression(node)}" for name, node in self._rules.items())])

    def terminals(self) -> list[str]:
        return [f"{self._names[name]}: {self._inner(node)}" for name, node in self._rules.items()]

    def _text(self, lines: list[str], plain: Mapping[str, Node]) -> str:
        return "\n".join([*lines, *(f"{self._names[name]}: {self._inner(node)}" for name, node in plain.items())])

    def _is_regular(self, node: Node) -> bool:
        return not any(self._is_recursive[name] for name in references(node))

    def _collect(self, node: Node) -> None:
        if self._is_regular(node):
            self._terminals.setdefault(node, f"L{len(self._terminals)}")
        elif isinstance(node, Rep):
            self._collect(node.item)
        elif isinstance(node, Seq | Alt):
            for item in node.items:
                self._collect(item)

    def _expression(self, node: Node) -> str:
        """Return an expression in which the parts in `_terminals` are their names."""
        if node in self._terminals:
            return self._terminals[node]
        return self._inner(node)

    def _inner(self, node: Node) -> str:
        if isinstance(node, Chars):
            return _class(node)
        if isinstance(node, Ref):
            return self._names[node.name]
        return _combined(node, [self._expression(item) for item in _items(node)])

    def _is_greedy_safe(self, recursive: Mapping[str, Node]) -> bool:
        atoms = Atoms(c for node in self._rules.values() for c in _all_chars(node))
        budget = Budget()
        try:
            automata = {node: Automaton(node, self._rules, atoms, budget) for node in self._terminals}
        except TooLarge:
            return False
        following = _Following(recursive, automata).compute()
        repeats = {i for i, node in enumerate(automata) if self._is_star(node)}
        return is_safe(list(automata.values()), [
            {atom for terminal, atom in following[node] if terminal != i or i not in repeats}
            for i, node in enumerate(automata)])

    def _is_star(self, node: Node) -> bool:
        """Return whether a terminal is any number of characters of a set: after itself it can be empty."""
        while isinstance(node, Ref):
            node = self._rules[node.name]
        return isinstance(node, Rep) and (node.min_count, node.max_count) == (0, -1) and isinstance(node.item, Chars)


Begin = tuple[int, int]
"""Number of a terminal and an atom with which its texts begin."""


class _Following:
    """Search for what may follow each terminal: the sets FIRST and FOLLOW of the theory of parsers."""

    def __init__(self, recursive: Mapping[str, Node], automata: Mapping[Node, Automaton]):
        self._recursive = recursive
        self._automata = automata
        self._numbers = {node: i for i, node in enumerate(automata)}
        self._first: dict[str, frozenset[Begin]] = dict.fromkeys(recursive, frozenset())
        self._nullable: dict[str, bool] = dict.fromkeys(recursive, False)
        self._after_rule: dict[str, set[Begin]] = {name: set() for name in recursive}
        self._after: dict[Node, set[Begin]] = {node: set() for node in automata}

    def compute(self) -> dict[Node, set[Begin]]:
        """Return the beginnings after each terminal."""
        while True:
            begins = {name: self._begin(node) for name, node in self._recursive.items()}
            first = {name: f for name, (_, f) in begins.items()}
            nullable = {name: n for name, (n, _) in begins.items()}
            if (first, nullable) == (self._first, self._nullable):
                break
            self._first = first
            self._nullable = nullable
        before = -1
        while before != (before := self._size()):
            for name, node in self._recursive.items():
                self._spread(node, frozenset(self._after_rule[name]))
        return self._after

    def _size(self) -> int:
        return sum(map(len, self._after_rule.values())) + sum(map(len, self._after.values()))

    def _begin(self, node: Node) -> tuple[bool, frozenset[Begin]]:
        """Return whether the empty text matches, and the beginnings of texts."""
        if node in self._automata:
            automaton = self._automata[node]
            return 0 in automaton.accepting, frozenset((self._numbers[node], atom) for atom in automaton.first)
        if isinstance(node, Ref):
            return self._nullable[node.name], self._first[node.name]
        if isinstance(node, Rep):
            nullable, first = self._begin(node.item)
            return nullable or node.min_count == 0, first
        assert not isinstance(node, Chars)
        if isinstance(node, Alt):
            parts = [self._begin(item) for item in node.items]
            return any(n for n, _ in parts), frozenset().union(*(f for _, f in parts))
        nullable = True
        first = frozenset[Begin]()
        for item in node.items:
            empty, begin = self._begin(item)
            first = first | begin if nullable else first
            nullable = nullable and empty
        return nullable, first

    def _spread(self, node: Node, after: frozenset[Begin]) -> None:
        """Enter what may follow a part of a rule."""
        if node in self._automata:
            self._after[node] |= after
        elif isinstance(node, Ref):
            self._after_rule[node.name] |= after
        elif isinstance(node, Alt):
            for item in node.items:
                self._spread(item, after)
        elif isinstance(node, Rep):
            self._spread(node.item, after | self._begin(node.item)[1] if node.max_count != 1 else after)
        elif isinstance(node, Seq):
            for item in reversed(node.items):
                self._spread(item, after)
                nullable, first = self._begin(item)
                after = after | first if nullable else first


def _items(node: Seq | Alt | Rep) -> tuple[Node, ...]:
    return (node.item,) if isinstance(node, Rep) else node.items


def _combined(node: Seq | Alt | Rep, parts: list[str]) -> str:
    if isinstance(node, Rep):
        return f"({parts[0]}){{{node.min_count},{'' if node.max_count == -1 else node.max_count}}}"
    if not parts:
        return '""'
    return "(" + (" | " if isinstance(node, Alt) else " ").join(parts) + ")"


def _class(node: Chars) -> str:
    return "/[" + "".join(rf"\x{{{low:x}}}" if low == high else rf"\x{{{low:x}}}-\x{{{high:x}}}"
                          for low, high in node.ranges) + "]/"


def _all_chars(node: Node) -> Iterator[Chars]:
    if isinstance(node, Chars):
        yield node
    elif not isinstance(node, Ref):
        for item in _items(node):
            yield from _all_chars(item)
