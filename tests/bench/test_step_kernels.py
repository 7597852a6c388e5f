"""bench/engine/step_kernels.py: a short run on the built-in model, and its table of made-up calls."""

from __future__ import annotations

import subprocess
import sys

import pytest

from npuserve.kernels.bench.costs import Cost
from tests.support.benches import BENCH, bench


def test_lines_join_calls_of_one_label_and_keep_calls_without_cost() -> None:
    program = bench("engine.step_kernels")
    limits = program.Limits(read=100.0, peaks={"bf16": 1000.0})
    labelled = [("linear 4x2", Cost(200, 100, "bf16")), ("linear 2x4", Cost(10, 5000, "bf16")),
                ("linear 4x2", Cost(200, 100, "bf16"))]
    calls = [("take_ids", 0.5), ("linear", 3.0), ("linear", 7.0), ("linear", 4.0)]
    slower = [(kernel, 3 * seconds) for kernel, seconds in calls]
    lines = {line.label: line for line in program.lines_of([calls, calls, slower], labelled, limits)}
    assert [*lines] == ["linear 4x2", "linear 2x4", "take_ids"]
    assert (lines["linear 4x2"].calls, lines["linear 4x2"].seconds, lines["linear 4x2"].bound) == (2, 7.0, 4.0)
    assert lines["linear 2x4"].bound == 5.0
    assert lines["take_ids"].bound == 0.0


def test_lines_of_a_step_without_an_expected_call_are_refused() -> None:
    program = bench("engine.step_kernels")
    limits = program.Limits(read=1.0, peaks={"fp32": 1.0})
    with pytest.raises(ValueError, match="swiglu: the step did not call it"):
        program.lines_of([[("linear", 1.0)]], [("swiglu", Cost(1, 1, "fp32"))], limits)


@pytest.mark.full
def test_step_kernels_prints_a_table_for_each_batch_and_the_prompt() -> None:
    done = subprocess.run(
        [sys.executable, BENCH / "engine" / "step_kernels.py", "--rows", "1,3", "--context", "9", "--prompt", "20",
         "--steps", "2", "--repeats", "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    titles = [line.split(":")[0] for line in done.stdout.splitlines() if "kernels " in line]
    assert titles == ["1 x 9", "3 x 9", "prompt of 20"]
    assert done.stdout.count("| linear_argmax ") == 3
