"""A small run of the program with random and hostile constraints."""

from __future__ import annotations

from tests.support.benches import bench


def test_random_constraints_are_compiled_or_refused_and_answers_are_valid():
    counts, failures, _ = bench("quality.grammar_fuzz").run(cases=150, seed=11, seconds=60)
    assert failures == []
    assert counts["compiled"] + counts["refused"] + counts["out of limits"] == counts["cases"] > 20
    assert counts["ended"] > 10
