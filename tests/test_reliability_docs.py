"""docs/reliability.md names tests and benchmarks that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "reliability.md").read_text()


def functions(file: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse((ROOT / file).read_text()))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def test_each_test_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    assert len(named) > 30
    assert not [f"{file}::{name}" for file, name in named if name not in functions(file)]


def test_each_benchmark_is_there() -> None:
    named = set(re.findall(r"`(bench/\w+\.py)`", TEXT))
    assert "bench/soak.py" in named
    assert not [file for file in named if not (ROOT / file).exists()]


def test_each_promise_has_a_test_or_a_figure() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and not re.match(r"\| (promise|what) \|", line)]
    assert len(rows) > 20
    assert not [row for row in rows if not re.search(r"`(tests/\S+::\w+|bench/\w+\.py)`", row)]
