"""Random and hostile constraints: each is compiled or refused within its limits, and every answer is valid.

    python bench/quality/grammar_fuzz.py [--cases 10000] [--seed 0] [--seconds 600]

Schemas, regular expressions, EBNF and choices are drawn at random, some with structures that are known to hurt. A
compiled constraint is followed by a random walk through its masks on a vocabulary of bytes. `jsonschema` judges the
answers of schemas, and Python's `re` judges the answers of regular expressions. Prints counts and the slowest steps.
Exits with 1 after an invalid answer, an allowed token that is refused, or an error of another type.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import sys
import time
from collections import Counter
from decimal import Decimal, InvalidOperation
from pathlib import Path
from types import FrameType
from typing import Any

import jsonschema

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository

from npuserve.service.structured_output.compile_process import CompileProcess, build_library_matcher
from npuserve.service.structured_output.constraint import Constraint
from npuserve.service.structured_output.errors import ConstraintError, MatcherError
from npuserve.service.structured_output.matcher import Matcher
from tests.support.grammars import Kind, vocabulary, walk

FORMATS = ("date", "time", "date-time", "ipv4", "ipv6", "email", "hostname", "uuid", "duration", "uri", "unknown")
JUDGE_SECONDS = 2.0
"""Processor time of the verdict on one answer."""
ATOMS = ("a", "b", "[a-f]", "[^x]", r"\d", r"\w", r"\s", ".", '[^"]', r"\\", r"\n", "é", "(ab|a)", "[x-z0-9]",
         r"[^\n\"]", r"\S")


class Cases:
    """Random constraints."""

    def __init__(self, rng: random.Random):
        self._rng = rng

    def draw(self) -> tuple[Kind, Any]:
        rng = self._rng
        kind = rng.choice(("json_schema", "json_schema", "json_schema", "regex", "grammar", "choices", "hostile"))
        if kind == "json_schema":
            return kind, self.schema(rng.randint(0, 3))
        if kind == "regex":
            return kind, self.pattern(rng.randint(0, 3))
        if kind == "grammar":
            return kind, self.ebnf()
        if kind == "choices":
            return kind, [self.text() for _ in range(rng.randint(1, 30))]
        return self.hostile()

    def text(self) -> str:
        return "".join(self._rng.choice('ab"\\é日 \n{}[]<1') for _ in range(self._rng.randint(0, 6)))

    def pattern(self, depth: int) -> str:
        rng = self._rng
        if depth == 0:
            return rng.choice(ATOMS) + rng.choice(("", "", "*", "+", "?", "{2}", "{0,3}", "{1,}"))
        parts = [self.pattern(depth - 1) for _ in range(rng.randint(1, 3))]
        return rng.choice(("".join(parts), f"(?:{'|'.join(parts)})", f"({''.join(parts)}){rng.choice('*+?')}"))

    def schema(self, depth: int) -> Any:
        rng = self._rng
        kinds = ["integer", "number", "string", "enum", "const", "null"]
        nested = ["object", "array", "anyOf", "allOf", "ref", "map"]
        kind = rng.choice(kinds + nested if depth else kinds)
        if kind in ("integer", "number"):
            low, high = sorted(rng.randint(-200, 200) / rng.choice((1, 4)) for _ in range(2))
            step = rng.choice((1, 2, 0.5, 0.25, 7))
            return {"type": kind, **self._some({"minimum": low, "exclusiveMaximum": high, "multipleOf": step})}
        if kind == "string":
            return {"type": "string", **self._some({
                "minLength": rng.randint(0, 3), "maxLength": rng.randint(2, 9), "pattern": self.pattern(2),
                "format": rng.choice(FORMATS)})}
        if kind in ("enum", "const"):
            values = [self.value() for _ in range(rng.randint(1, 5))]
            return {"enum": values} if kind == "enum" else {"const": values[0]}
        if kind == "null":
            return rng.choice(({"type": "null"}, {"type": ["null", "boolean"]}, True, {}))
        return self._nested(kind, [self.schema(depth - 1) for _ in range(rng.randint(1, 3))])

    def _some(self, keywords: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in keywords.items() if self._rng.random() < 0.35}

    def value(self) -> Any:
        return self._rng.choice((1, -2.5, True, None, self.text(), [1, self.text()], {self.text(): 1}))

    def _nested(self, kind: str, inner: list[Any]) -> Any:
        rng = self._rng
        if kind == "array":
            return {"type": "array", "items": inner[0], "maxItems": rng.randint(0, 4),
                    **self._some({"minItems": rng.randint(0, 3), "prefixItems": inner})}
        if kind == "object":
            names = [rng.choice(("a", "b", "c", self.text())) for _ in inner]
            return {"type": "object", "properties": dict(zip(names, inner, strict=True)),
                    "required": rng.sample(names, rng.randint(0, len(names))),
                    **rng.choice(({}, {"additionalProperties": False}, {"additionalProperties": inner[-1]},
                                  {"patternProperties": {"^x": inner[0]}}))}
        if kind == "map":
            return {"type": "object", "additionalProperties": inner[0], "minProperties": rng.randint(0, 2),
                    "maxProperties": rng.randint(1, 4)}
        if kind == "ref":
            following = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
            return {"type": "object", "properties": {"next": following, "v": inner[0]}, "additionalProperties": False}
        return {kind: inner}

    def ebnf(self) -> str:
        rng = self._rng
        names = ["root", "x", "y"]

        def expression(depth: int) -> str:
            if depth == 0:
                return rng.choice(('"a"', '"ab"', '"b"', "[a-c]", "[^a\\n]", "[0-9]", *names))
            parts = [expression(depth - 1) for _ in range(rng.randint(1, 3))]
            return rng.choice((" ".join(parts), f"({' | '.join(parts)})", f"({' '.join(parts)}){rng.choice('*+?')}"))

        ends = ('"a"', '""', '"(" x ")"')
        return "\n".join(f"{name} ::= {expression(rng.randint(0, 3))} | {rng.choice(ends)}" for name in names)

    def hostile(self) -> tuple[Kind, Any]:
        n = self._rng.randint(1, 400)
        alternatives = [
            {"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(n % 8)]} for i in range(n % 7)]
        return self._rng.choice((
            ("json_schema", '{"items":' * n + "{}" + "}" * n),
            ("json_schema", {"enum": [f"{i} {n}" for i in range(20 * n)]}),
            ("json_schema", {"allOf": alternatives}),
            ("json_schema", {"type": "string", "pattern": f"^(a|b)*a(a|b){{{10 * n}}}$"}),
            ("json_schema", {"$ref": "#/allOf/0", "allOf": [{"$ref": "#"}]}),
            ("regex", f"((a{{{n}}}){{{n}}}){{{n}}}"),
            ("regex", "(a|a)*" * n + "b"),
            ("regex", "(" * n + "a" + ")*" * n),
            ("regex", f"(.*a){{{n}}}"),
            ("grammar", "root ::= " + "root " * (n % 5) + '| "a" | ""'),
            ("grammar", "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1} a{i + 1}\n" for i in range(n)) + f'a{n} ::= "a"'),
            ("grammar", "root ::= " + "(" * n + '"a" root?' + ")*" * n),
            ("grammar", "start: x\nx: x x | /[a-z]/"),
            ("grammar", "start: " + "(" * n + '"a"' + ")" * n),
            ("choices", ["a" * i for i in range(5 * n)]),
        ))


def text_is_deep(value: Any) -> bool:
    """Return whether a schema is one of `hostile`, nested more deeply than `jsonschema` can judge."""
    return isinstance(value, str)


def judged(kind: str, value: Any, answer: bytes) -> str:
    """Return why an answer is invalid, "" if it is valid or has no judge. Call it from the main thread.

    Python's `re` takes exponential time for some expressions. It has no verdict then, after JUDGE_SECONDS.
    """
    before = signal.signal(signal.SIGVTALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_VIRTUAL, JUDGE_SECONDS)
    try:
        return _verdict(kind, value, answer)
    except TimeoutError:
        return ""
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _raise_timeout(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


def _verdict(kind: str, value: Any, answer: bytes) -> str:
    if kind == "regex":
        return "" if re.fullmatch(value, answer.decode()) else "re.fullmatch"
    if kind == "choices":
        return "" if answer.decode() in value else "not a choice"
    if kind == "json_schema" and not text_is_deep(value):
        schema = json.loads(value if isinstance(value, str) else json.dumps(value), parse_float=Decimal)
        judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
        try:
            error = next(iter(judge.iter_errors(json.loads(answer, parse_float=Decimal))), None)
        except InvalidOperation:  # a number of more digits than a Decimal has, beside 'multipleOf'
            return ""
        return error.message[:200] if error else ""
    return ""


class TimedMatcher(Matcher):
    """Matcher that keeps the processor seconds of its slowest step."""

    slowest = 0.0

    def fill(self, bits: Any) -> None:
        began = time.thread_time()
        try:
            super().fill(bits)
        finally:
            self.slowest = max(self.slowest, time.thread_time() - began)

    def advance(self, token_id: int) -> bool:
        began = time.thread_time()
        try:
            return super().advance(token_id)
        finally:
            self.slowest = max(self.slowest, time.thread_time() - began)


def run(cases: int, seed: int, seconds: float) -> tuple[Counter[str], list[str], list[tuple[float, str]]]:
    """Return counts, failures, and the processor seconds of the slowest steps with their constraints."""
    rng = random.Random(seed)
    made, counts, failures, slow = Cases(rng), Counter[str](), list[str](), list[tuple[float, str]]()
    process = CompileProcess(vocabulary(), 5, 256 << 20)
    end = time.monotonic() + seconds
    for _ in range(cases):
        if time.monotonic() > end:
            break
        kind, value = made.draw()
        text = value if isinstance(value, str) else json.dumps(value)
        counts["cases"] += 1
        try:
            compiled = process.compile(Constraint(kind, text))
        except ConstraintError as error:
            counts["out of limits" if "must take at most" in str(error) else "refused"] += 1
            continue
        counts["compiled"] += 1
        state = TimedMatcher(vocabulary(), build_library_matcher(vocabulary().library, compiled.grammar, kind))
        try:
            answer = walk(state, rng, 80)
            wrong = "" if answer is None else judged(kind, value, answer)
            counts["ended"] += answer is not None
            if wrong:
                failures.append(f"{kind} {text[:400]}: {wrong}: {answer!r}")
        except MatcherError:
            counts["steps beyond the limits"] += 1
        except AssertionError as error:
            failures.append(f"{kind} {text[:400]}: {str(error)[:300]}")
        slow = sorted([*slow, (state.slowest, f"{kind} {text[:100]}")], reverse=True)[:5]
    process.end()
    return counts, failures, slow


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600)
    arguments = parser.parse_args()
    counts, failures, slow = run(arguments.cases, arguments.seed, arguments.seconds)
    print(dict(counts))
    for spent, name in slow:
        print(f"  step of {spent * 1e3:.1f} ms: {name!r}")
    for failure in failures:
        print("FAILED", failure)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
