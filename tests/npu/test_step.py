"""Types of a step."""

from __future__ import annotations

import pytest

from npuserve.npu.step import Row, Step


@pytest.mark.parametrize(
    ("rows", "phase"),
    [
        ([Row(0, [1], 4, [0], True), Row(1, [1], 9, [1], True)], "decode"),
        ([Row(0, [1, 2], 4, [0], True), Row(1, [1], 0, [1], True), Row(2, [1], 9, [2], False)], "prefill"),
        ([Row(0, [1, 2], 4, [0], True), Row(1, [1], 9, [1], True)], "mixed"),
    ],
)
def test_phase_of_a_step(rows: list[Row], phase: str) -> None:
    assert Step(rows).phase == phase
