"""Translation of regular expressions, as ECMA-262 and Python read them, to the syntax of the grammar library.

The library reads the syntax of the Rust crate `regex`, which differs silently: `[a&&b]` is an intersection, `\\d` and
`.` contain other characters. The translation parses the expression and writes every class out. Where ECMA-262 and
Python differ, such as in `\\s`, only texts that both accept are allowed. What cannot be expressed is refused:
look-around, word boundaries, back references, flags.

In a JSON string a character has one form here: the control characters \\b \\t \\n \\f \\r their escapes, the other ones
none. The library writes a class that contains all control characters as if it contained the quotation mark and the
backslash too. So a class for JSON strings contains these five at most, beside its other characters (`quoted`).

A name of a property that must not match needs the opposite reading: `translate_name` also returns the expression of all
texts that ECMA-262 or Python accepts, in which `$` stands before a newline at the end too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

MAX_DEPTH = 100
"""Nesting of groups."""
MAX_REPEAT = 100_000
"""Bound of a counted repetition."""

_QUANTIFIER = re.compile(r"[*+?]|\{([0-9]+)(?:(,)([0-9]*))?\}")
_SPACE = r"\t\n\x0B\x0C\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_ALL_SPACE = _SPACE + r"\x{feff}\x1c-\x1f\x{85}"
_SETS = {
    "d": (r"0-9", r"\p{Nd}"),
    "w": (r"0-9A-Za-z_", r"\p{L}\p{M}\p{N}\p{Pc}"),
    "s": (_SPACE, _ALL_SPACE),
}
"""Letter of an escape -> characters that ECMA-262 and Python both include, and characters that either includes."""
_DISPUTED = {"d": r"\p{Nd}&&[^0-9]", "w": r"\x{80}-\x{10ffff}", "s": r"\x{feff}\x{85}"}
"""Letter of an escape -> superset of the characters that only one of the two includes, without control characters that
a JSON string cannot have here. The exact class of the words would exceed the library's limits in some steps."""
_LINE_ENDS = r"\r\x{2028}\x{2029}"
"""Characters that `.` excludes in ECMA-262 alone."""
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_QUOTABLE = {8: r"\x08", 9: r"\t", 10: r"\n", 12: r"\x0C", 13: r"\r"}
_PROPERTIES = re.compile(r"\{(?:L[ulmto]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?|Zs|Letter|Number|Punctuation)\}")


class PatternError(ValueError):
    """The expression is malformed or not supported. The message names the position."""


class _Item(NamedTuple):
    """Element of a class.

    inner: characters that ECMA-262 and Python both include, in the library's syntax.
    outer: characters that either includes.
    controls: the control characters of `inner`.
    code: the character if the element is one character; -1 otherwise.
    """

    inner: str
    outer: str
    controls: frozenset[int]
    code: int = -1


_ALL_CONTROLS = frozenset(range(32))
_SPACE_CONTROLS = frozenset({9, 10, 11, 12, 13})


class NamePattern(NamedTuple):
    """Readings of an expression that applies to names of properties, in the library's syntax.

    narrow: the names that ECMA-262 and Python both accept.
    wide: the names that either accepts.
    disputed: superset of the names in `wide` that are not in `narrow`; "" if there are none. It may contain names that
        are not in `wide`, and also some of `narrow`.
    """

    narrow: str
    wide: str
    disputed: str


def translate(pattern: str, *, quoted: bool) -> str:
    """Return the expression in the library's syntax. Raise PatternError.

    quoted: whether it applies to the value of a JSON string, which is written with escapes.
    """
    return _Translator(pattern, quoted).translate()


def translate_name(pattern: str) -> NamePattern:
    """Return both readings of an expression of names in JSON text. Raise PatternError."""
    narrow = _Translator(pattern, True).translate()
    translator = _Translator(pattern, True, is_wide=True)
    wide = translator.translate()
    # Anchors are the only dollar signs of a translated expression.
    disputed = [narrow.replace("$", r"\n$")] if "$" in narrow else []
    return NamePattern(narrow, wide.replace("$", r"\n?$"), "|".join([*disputed, *sorted(translator.disputed)]))


class _Translator:
    """Translator of one expression.

    is_wide: accept what ECMA-262 or Python accepts, except for `$`, instead of what both accept.
    disputed: classes of the characters that only one of the two accepts somewhere in the expression.
    """

    def __init__(self, pattern: str, quoted: bool, *, is_wide: bool = False):
        self._text = pattern
        self._quoted = quoted
        self._is_wide = is_wide
        self._at = 0
        self._anchors: list[int] = []  # positions
        self.disputed: set[str] = set()

    def translate(self) -> str:
        out = self._alternatives(0)
        if self._at < len(self._text):
            raise self._error("unmatched ')'")
        return out

    def _error(self, message: str, position: int | None = None) -> PatternError:
        return PatternError(f"{message} at position {self._at if position is None else position}")

    def _peek(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _take(self, text: str) -> bool:
        is_next = self._peek(text)
        self._at += len(text) * is_next
        return is_next

    def _alternatives(self, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise self._error(f"groups must be nested at most {MAX_DEPTH} deep")
        out = []
        is_first = True
        ends = list[int]()
        while self._at < len(self._text) and not self._peek(")"):
            if self._take("|"):
                out.append("|")
                is_first = True
                ends = []
                continue
            count = len(self._anchors)
            atom, is_repeatable = self._atom(depth)
            quantifier = self._quantifier(is_repeatable)
            out.append(atom + quantifier)
            if quantifier in ("{0}", "{0,0}"):
                del self._anchors[count:]
                continue
            self._check_anchors(self._anchors[count:], is_first, quantifier in ("", "{1}", "{1,1}"))
            is_first = is_first and set(atom) <= set("(?:)^")
            if not set(atom) <= set("(?:)$"):
                for anchor in ends:
                    self._refuse_anchor(anchor)
            ends += [anchor for anchor in self._anchors[count:] if self._text[anchor] == "$"]
        return "".join(out)

    def _check_anchors(self, anchors: Sequence[int], is_first: bool, is_once: bool) -> None:
        """Raise for the anchors in an atom that is not the first one of its alternative, or is repeated."""
        for anchor in anchors:
            if not is_once or (self._text[anchor] == "^" and not is_first):
                self._refuse_anchor(anchor)

    def _refuse_anchor(self, anchor: int) -> None:
        place = "beginning" if self._text[anchor] == "^" else "end"
        message = f"'{self._text[anchor]}' is supported only at the {place}, outside of repeated groups,"
        raise self._error(message, anchor)

    def _atom(self, depth: int) -> tuple[str, bool]:
        """Return the next atom, and whether a quantifier may follow."""
        if _QUANTIFIER.match(self._text, self._at):
            raise self._error("nothing to repeat")
        character = self._text[self._at]
        if re.compile(r"\{,[0-9]*\}").match(self._text, self._at):
            raise self._error("'{,' is read in different ways; write '{0,' or '\\\\{,'")
        if character == "(":
            return self._group(depth), True
        if character == "[":
            return self._class(), True
        self._at += 1
        if character in "^$":
            self._anchors.append(self._at - 1)
            return character, False
        if character == ".":
            self._dispute(_LINE_ENDS, frozenset({13}))
            if self._is_wide:
                return self._written(r"\n", True, _ALL_CONTROLS - {10}), True
            return self._written(r"\n" + _LINE_ENDS, True, _ALL_CONTROLS - {10, 13}), True
        if character == "\\":
            self._at -= 1
            item = self._escape(False)
            if item.code >= 0:
                return self._literal(item.code), True
            return self._written(item.outer if self._is_wide else item.inner, False, item.controls), True
        return self._literal(ord(character)), True

    def _group(self, depth: int) -> str:
        start = self._at
        self._at += 1
        if self._take("?"):
            named = re.compile(r"P?<[A-Za-z_]\w*>").match(self._text, self._at)
            if named:
                self._at = named.end()
            elif not self._take(":"):
                looks = any(self._peek(t) for t in ("=", "!", "<=", "<!"))
                raise self._error("look-around is not supported" if looks else "flags of groups are not supported")
        inner = self._alternatives(depth + 1)
        if not self._take(")"):
            self._at = start
            raise self._error("unclosed '('")
        return f"(?:{inner})"

    def _quantifier(self, is_repeatable: bool) -> str:
        match = _QUANTIFIER.match(self._text, self._at)
        if not match:
            return ""
        if not is_repeatable:
            raise self._error("an anchor cannot be repeated")
        low, comma, high = match.groups()
        for number in filter(None, (low, high)):
            if len(number) > 7 or int(number) > MAX_REPEAT:
                raise self._error(f"a repetition must be at most {MAX_REPEAT}")
        if low and high and int(low) > int(high):
            raise self._error("the bounds of the repetition are in the wrong order")
        self._at = match.end()
        if self._take("?"):
            pass  # a lazy quantifier accepts the same texts
        elif self._peek("+"):
            raise self._error("possessive quantifiers are not supported")
        if low is None:
            return match.group()
        return "{" + str(int(low)) + (comma or "") + (str(int(high)) if high else "") + "}"

    def _class(self) -> str:
        start = self._at
        self._at += 1
        negated = self._take("^")
        if self._peek("]"):
            raise self._error("an empty class is not supported; write \\] for the character")
        items: list[_Item] = []
        while not self._take("]"):
            if self._at >= len(self._text):
                self._at = start
                raise self._error("unclosed '['")
            items.append(self._range())
        controls = frozenset[int]().union(*(i.controls for i in items))
        is_outer = self._is_wide is not negated
        members = "".join(i.outer if is_outer else i.inner for i in items)
        return self._written(members, negated, _ALL_CONTROLS - controls if negated else controls)

    def _range(self) -> _Item:
        first = self._member()
        if not self._peek("-") or self._text[self._at + 1:self._at + 2] in ("]", ""):
            return first
        self._at += 1
        last = self._member()
        if first.code < 0 or last.code < 0:
            raise self._error("a range must begin and end with a character")
        if first.code > last.code:
            raise self._error("the range is in the wrong order")
        text = f"{_code(first.code)}-{_code(last.code)}"
        return _Item(text, text, frozenset(range(first.code, min(31, last.code) + 1)), -2)

    def _member(self) -> _Item:
        if self._at >= len(self._text):
            raise self._error("unclosed '['")
        if self._peek("\\"):
            return self._escape(True)
        self._at += 1
        return _single(ord(self._text[self._at - 1]))

    def _escape(self, in_class: bool) -> _Item:
        """Read an escape sequence."""
        self._at += 1
        letter = self._text[self._at:self._at + 1]
        if not letter:
            raise self._error("the last character must not be '\\'")
        if letter.lower() in _SETS:
            self._at += 1
            self._dispute(_DISPUTED[letter.lower()])
            return _class_escape(letter)
        if letter in "pP":
            return self._property()
        for prefix, digits in (("x", r"[0-9A-Fa-f]{2}"), ("u", r"[0-9A-Fa-f]{4}"), ("u", r"\{[0-9A-Fa-f]{1,6}\}")):
            match = re.compile(prefix + f"({digits})").match(self._text, self._at)
            if match:
                return self._code_point(int(match.group(1).strip("{}"), 16), match.end())
        if letter == "c" and re.match(r"[A-Za-z]", self._text[self._at + 1:self._at + 2]):
            return self._code_point(ord(self._text[self._at + 1]) % 32, self._at + 2)
        if letter == "b" and in_class:
            return self._code_point(8, self._at + 1)
        if letter in _CONTROLS and not re.match(r"0[0-9]", self._text[self._at:self._at + 2]):
            return self._code_point(_CONTROLS[letter], self._at + 1)
        if letter.isdigit() or letter == "k":
            raise self._error("back references are not supported")
        if letter in "bB":
            raise self._error("word boundaries are not supported")
        if letter.isalnum():
            raise self._error(f"the escape '\\{letter}' is not supported")
        return self._code_point(ord(letter), self._at + 1)

    def _code_point(self, code: int, end: int) -> _Item:
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise self._error("the code point must be a character")
        self._at = end
        return _single(code)

    def _property(self) -> _Item:
        letter = self._text[self._at]
        match = _PROPERTIES.match(self._text, self._at + 1)
        if not match:
            raise self._error("only general categories of letters, marks, numbers, punctuation, symbols and spaces are "
                              "supported after \\p")
        self._at = match.end()
        if letter == "p":
            text = rf"\p{match.group()}"
            return _Item(text, text, frozenset())
        text = rf"\P{match.group()}"
        return _Item(text, text, _ALL_CONTROLS)

    def _dispute(self, items: str, controls: frozenset[int] = frozenset()) -> None:
        """Enter characters that ECMA-262 and Python read differently. controls: the control characters of `items`."""
        self.disputed.add(self._written(items, False, controls))

    def _literal(self, code: int) -> str:
        if self._quoted and code < 32:
            return _QUOTABLE.get(code, r"[a&&b]")
        return _code(code)

    def _written(self, items: str, negated: bool, controls: frozenset[int]) -> str:
        """Return a class. controls: the control characters that it contains."""
        base = f"[{'^' if negated else ''}{items}]"
        if not self._quoted or not (negated or controls):
            return base
        kept = [text for code, text in _QUOTABLE.items() if code in controls]
        return "(?:" + "|".join([rf"[{base}&&[^\x00-\x1f]]", *kept]) + ")"


def _code(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else rf"\x{{{code:x}}}"


def _single(code: int) -> _Item:
    text = _code(code)
    return _Item(text, text, frozenset({code}) if code < 32 else frozenset(), code)


def _class_escape(letter: str) -> _Item:
    inner, outer = _SETS[letter.lower()]
    controls = _SPACE_CONTROLS if letter.lower() == "s" else frozenset[int]()
    if letter.islower():
        # In a negated class `outer` is left out, with the control characters that only Python counts as spaces.
        return _Item(inner, outer, controls)
    return _Item(f"[^{outer}]", f"[^{inner}]", _ALL_CONTROLS - controls)
