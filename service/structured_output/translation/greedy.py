"""Check that a greedy split of texts into terminals loses no text of a grammar.

The lexer of the library takes the longest terminal. A text is lost if a terminal ends where another terminal, or a
longer match of the same one, could continue with a character that may follow the first. The check is conservative: it
compares every pair of terminals, also pairs that never compete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from npuserve.service.structured_output.translation.gbnf import MAX_CODE, Alt, Chars, Node, Ref, Rep, Seq, normalized

MAX_POSITIONS = 4000
MAX_STEPS = 300_000
"""Work of the whole check; a grammar that needs more counts as not safe."""


class TooLarge(Exception):
    """The check would take too long."""


class Automaton:
    """Deterministic automaton of a terminal, over atoms of the alphabet.

    states: for each state its transitions, atom to state. State 0 is the first one.
    accepting: states at which a text of the terminal ends.
    """

    def __init__(self, node: Node, rules: Mapping[str, Node], atoms: Atoms, budget: Budget):
        positions = _Positions(rules, atoms)
        nullable, first, last = positions.build(node)
        sets = [frozenset(first)]
        index = {(sets[0], nullable): 0}
        self.accepting = {0} if nullable else set[int]()
        self.states: list[dict[int, int]] = []
        while len(self.states) < len(sets):
            ahead: dict[int, set[int]] = {}
            for position in sets[len(self.states)]:
                budget.spend(len(positions.atoms[position]))
                for atom in positions.atoms[position]:
                    ahead.setdefault(atom, set()).add(position)
            transitions = {}
            for atom, taken in ahead.items():
                target = frozenset().union(*(positions.follow[p] for p in taken))
                is_accepting = bool(taken & last)
                budget.spend(len(target) + 1)
                number = transitions[atom] = index.setdefault((target, is_accepting), len(sets))
                if number == len(sets):
                    sets.append(target)
                    if is_accepting:
                        self.accepting.add(number)
            self.states.append(transitions)

    @property
    def first(self) -> set[int]:
        """Return the atoms that a text begins with."""
        return set(self.states[0])


class Budget:
    """Remaining work, of MAX_STEPS."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise TooLarge


class Atoms:
    """Partition of the characters, so that every set of the grammar is a union of parts."""

    def __init__(self, sets: Iterable[Chars]):
        inner = (bound for chars in sets for low, high in chars.ranges for bound in (low, high + 1))
        bounds = sorted({0, MAX_CODE + 1, *inner})
        self._of = {low: i for i, (low, _) in enumerate(pairwise(bounds))}
        self._bounds = bounds

    def of(self, chars: Chars) -> frozenset[int]:
        """Return the parts of a set."""
        parts = []
        for low, high in normalized(chars.ranges):
            i = self._of[low]
            while self._bounds[i] <= high:
                parts.append(i)
                i += 1
        return frozenset(parts)


class _Positions:
    """Positions of an expression's characters: Glushkov's construction."""

    def __init__(self, rules: Mapping[str, Node], atoms: Atoms):
        self._rules = rules
        self._atoms = atoms
        self.atoms: list[frozenset[int]] = []
        self.follow: list[set[int]] = []

    def build(self, node: Node) -> tuple[bool, set[int], set[int]]:
        """Return whether the empty text matches, and the first and the last positions."""
        if isinstance(node, Chars):
            if len(self.atoms) >= MAX_POSITIONS:
                raise TooLarge
            self.atoms.append(self._atoms.of(node))
            self.follow.append(set())
            return False, {len(self.atoms) - 1}, {len(self.atoms) - 1}
        if isinstance(node, Ref):
            return self.build(self._rules[node.name])
        if isinstance(node, Alt):
            parts = [self.build(item) for item in node.items]
            return any(p[0] for p in parts), set().union(*(p[1] for p in parts)), set().union(*(p[2] for p in parts))
        if isinstance(node, Seq):
            return self._sequence(node.items)
        min_count = node.min_count
        max_count = node.max_count
        many: list[Node] = [node.item] * min_count
        if max_count != -1:
            many += [Rep(node.item, 0, 1)] * (max_count - min_count)
        if (min_count, max_count) == (0, 1):
            _, first, last = self.build(node.item)
            return True, first, last
        if max_count != -1:
            if len(many) > MAX_POSITIONS:
                raise TooLarge
            return self._sequence(many)
        if min_count > 1:
            return self._sequence([*many[1:], Rep(node.item, 1, -1)])
        nullable, first, last = self.build(node.item)
        for position in last:
            self.follow[position] |= first
        return nullable or min_count == 0, first, last

    def _sequence(self, items: Iterable[Node]) -> tuple[bool, set[int], set[int]]:
        nullable = True
        first = set[int]()
        last = set[int]()
        for item in items:
            empty, begin, end = self.build(item)
            for position in last:
                self.follow[position] |= begin
            first = first | begin if nullable else first
            last = last | end if empty else end
            nullable = nullable and empty
        return nullable, first, last


def is_safe(automata: list[Automaton], following: list[set[int]]) -> bool:
    """Return whether the greedy split is the only one.

    following: for each terminal the atoms that may follow it.
    """
    budget = Budget()
    try:
        return not any(_conflict(first, second, following[i], budget)
                       for i, first in enumerate(automata) for second in automata)
    except TooLarge:
        return False


def _conflict(first: Automaton, second: Automaton, following: set[int], budget: Budget) -> bool:
    """Return whether a text of `one`, extended by one of `following`, is the beginning of a text of `other`."""
    seen = set[tuple[int, int]]()
    ahead = [(0, 0)]
    while ahead:
        first_state, second_state = ahead.pop()
        for atom, target in first.states[first_state].items():
            budget.spend(1)
            continued = second.states[second_state].get(atom)
            if continued is None or (target, continued) in seen:
                continue
            seen.add((target, continued))
            if target in first.accepting and following & second.states[continued].keys():
                return True
            ahead.append((target, continued))
    return False
