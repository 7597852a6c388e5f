"""A small run of the program with random and hostile constraints."""

from __future__ import annotations

import pytest

from tests.support.benches import bench


@pytest.mark.slow
def test_random_constraints_are_compiled_or_refused_and_answers_are_valid():
    counts, failures, _ = bench("quality.grammar_fuzz").run(cases=150, seed=11, seconds=60)
    assert failures == []
    assert counts["compiled"] + counts["refused"] + counts["out of limits"] == counts["cases"] > 20
    assert counts["ended"] > 10


@pytest.mark.full
def test_engine_accepts_or_refuses_random_constraints_beside_streams():
    counts, failures, *_ = bench("quality.grammar_fuzz_loop").run(
        cases=80, seed=5, seconds=60, streams=3, constrained=6)
    assert failures == []
    assert counts["compiled"] + sum(
        counts[kind] for kind in ("refused", "out of limits", "steps beyond the limits")) == counts["cases"] > 20
    assert counts["ended"] > 10
