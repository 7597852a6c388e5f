"""bench/serving/metrics_cost.py: its windows and figures, and a short run."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.benches import BENCH, bench


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return bench("serving.metrics_cost")


def test_metrics_cost_windows_come_in_random_order_and_equal_number(script: ModuleType) -> None:
    chance = random.Random(1)
    orders = [tuple(script.order(chance)) for _ in range(600)]
    assert all(kinds.count(script.ON) == kinds.count(script.OFF) == 2 for kinds in orders)
    assert len(set(orders)) == 6
    for place in range(4):  # no kind prefers a place
        assert 0.4 < sum(kinds[place] == script.ON for kinds in orders) / len(orders) < 0.6


def made(script: ModuleType, rounds: int, cost: float, period: float) -> list[object]:
    """Return rounds of a server slower by `cost` with metrics, and half as fast in a quarter of each period."""
    chance, found, at = random.Random(2), [], 0.0
    for _ in range(rounds):
        windows = {"on": [], "off": []}
        for kind in script.order(chance):
            speed = (1 - cost if kind == script.ON else 1.0) * (0.5 if at % period < period / 4 else 1.0)
            windows["on" if kind == script.ON else "off"].append(
                script.Window(round(10_000 * speed * chance.uniform(0.95, 1.05)), 1.0, 1.0 / speed))
            at += 1.0
        found.append(windows)
    return found


@pytest.mark.parametrize("cost", [0.0, 0.1])
def test_metrics_cost_finds_the_cost_beside_a_period_of_one_round(script: ModuleType, cost: float) -> None:
    found = script.report(made(script, 300, cost, 4.0))["rate"]
    assert found["interval"][0] <= 1 - cost <= found["interval"][1]
    assert found["ratio"] == pytest.approx(1 - cost, abs=0.03)
    assert found["control_interval"][0] <= 1 <= found["control_interval"][1]


def test_metrics_cost_leaves_out_a_round_with_an_empty_window(script: ModuleType) -> None:
    window, empty = script.Window(1000, 1.0, 1.0), script.Window(0, 1.0, 0.0)
    rounds = [{"on": [window, empty], "off": [window, window]}, {"on": [window, window], "off": [window, window]}]
    assert script.ratios(rounds, script.rate) == ([1.0], [1.0, 1.0])


@pytest.mark.full
def test_metrics_cost_runs(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    done = subprocess.run([sys.executable, BENCH / "serving" / "metrics_cost.py", "--rounds", "2", "--seconds", "0.1",
                           "--streams", "2", "--json", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert {kind: len(windows) for kind, windows in found["rounds"][0].items()} == {"on": 2, "off": 2}
    assert all(found["figures"][name][kind] > 0 for name in ("rate", "cpu") for kind in ("on", "off"))
