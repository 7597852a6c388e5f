"""Contexts part of the acceptance check on replays with given differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from npuserve.cli.acceptance.replays import Replays, check_crossing
from npuserve.cli.acceptance.report import Finding


@dataclass
class FakeReplays:
    off: Callable[[int], float]

    def difference(self, contexts: Sequence[int]) -> float:
        return self.off(contexts[0])


def crossed(off: Callable[[int], float]) -> Finding:
    return check_crossing(cast(Replays, FakeReplays(off)), 2, 1000, 1100, 0.05, quick=False)


def test_crossing_names_the_first_wrong_context_before_the_worst() -> None:
    finding = crossed(lambda context: 0.0 if context < 1024 else 0.1 + (context == 1090))
    assert (finding.passed, finding.figures["context"], finding.figures["difference"]) == (False, 1024, 1.1)
    assert "first wrong at 1,024" in finding.said


def test_crossing_names_the_largest_difference_if_all_are_right() -> None:
    finding = crossed(lambda context: 0.04 if context == 1055 else 0.01)
    assert (finding.passed, finding.figures["context"], finding.figures["contexts"]) == (True, 1055, 101)
    assert "largest at 1,055" in finding.said


def test_crossing_names_the_context_of_an_exception() -> None:
    def refusing(context: int) -> float:
        if context == 1024:
            raise RuntimeError("507015")
        return 0.0

    finding = crossed(refusing)
    assert (finding.part, finding.name, finding.passed) == ("contexts", "batch 2, context 1,024: error", False)
    assert finding.said == "RuntimeError: 507015"
