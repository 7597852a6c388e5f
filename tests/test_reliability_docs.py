"""Checks that docs/reliability.md names existing tests and benchmarks, and that its figures match the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from npuserve.service.processes import child
from npuserve.service.supervisor import supervisor
from npuserve.service.supervisor.supervisor import Restarts

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "reliability.md").read_text()


def functions(file: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse((ROOT / file).read_text()))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


@pytest.mark.slow
def test_reliability_tests_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    assert len(named) > 30
    assert not [f"{file}::{name}" for file, name in named if name not in functions(file)]


def test_reliability_benchmarks_exist() -> None:
    named = set(re.findall(r"`(bench/\w+/\w+\.py)`", TEXT))
    assert "bench/reliability/soak.py" in named
    assert not [file for file in named if not (ROOT / file).exists()]


def test_reliability_promises_have_test_or_benchmark() -> None:
    promises = re.sub(r"\| (set-up|risk) \|.*?\n\n", "", TEXT, flags=re.DOTALL)  # tables of facts
    rows = [line for line in promises.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not re.match(r"\| (promise|fault) \|", row)]
    assert len(rows) > 20
    assert not [row for row in rows if not re.search(r"`(tests/\S+::\w+|bench/\w+/\w+\.py)`", row)]


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]


def test_configuration_document_has_restart_limits() -> None:
    """Compare the pauses and limits of each kind of exit."""
    text = (ROOT / "docs" / "configuration.md").read_text()
    rows = re.search(r"\| the process \| pause .*\n\|[-|]+\n((?:\|.*\n){2})\n(.*)", text)
    assert rows
    never, ready = rows[1].splitlines()
    values = Restarts()
    assert numbers(never) == [values.start_pause, values.max_start_pause, values.deaths]
    assert numbers(ready) == [values.crash_pause, values.max_crash_pause, values.max_crashes]
    assert numbers(rows[2])[0] == values.healthy
    assert f"have {child.FRONTEND_STOP_SECONDS:g} s to send" in text
    assert f"{supervisor.ENGINE_STOP_SECONDS:g} s; remaining processes" in " ".join(text.split())
