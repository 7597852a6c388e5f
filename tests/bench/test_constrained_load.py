"""bench/serving/constrained_load.py: its summary, and a short run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.e2e.gateway.smg import find_program
from tests.support.benches import BENCH, bench


@pytest.fixture(scope="module")
def script() -> ModuleType:
    pytest.importorskip("smg_grpc_proto")
    return bench("serving.constrained_load")


def test_constrained_load_summary_divides_by_share_zero_of_the_same_server(script: ModuleType) -> None:
    def figures(*rates: float) -> list[dict[str, Any]]:
        return [{**dict.fromkeys(script.FIGURES, 1.0), "tokens_per_second": rate} for rate in rates]

    found = script.summary({"a 0 %": figures(100, 200), "a 100 %": figures(50, 200), "b 50 %": figures(7, 9)})
    assert found["medians"]["b 50 %"]["tokens_per_second"] == 8
    assert found["ratios"].keys() == {"a 100 %"}
    assert found["ratios"]["a 100 %"]["tokens_per_second"] == [0.75, 0.5, 1]


@pytest.mark.full
def test_constrained_load_measures_each_share(script: ModuleType, tmp_path: Path) -> None:
    """Also through smg where it is installed."""
    out, fields = tmp_path / "out", ["response_format", "tool_choice"] if find_program() else []
    options = ["--smg", *fields] if fields else []
    subprocess.run(
        [sys.executable, BENCH / "serving" / "constrained_load.py", "--streams", "2", "--tokens", "12", "--rounds", "1",
         "--requests", "1", "--vary", "30", "--shares", "0", "100", "--json", out, *options], check=True, timeout=100,
        stdout=subprocess.PIPE)
    found = json.loads(out.read_text())
    routes = ["npuserve", *(f"smg:{field}@npuserve" for field in fields)]
    assert found["medians"].keys() == {f"{route} {share} %" for route in routes for share in (0, 100)}
    for route in routes:
        assert found["ratios"][f"{route} 100 %"]["tokens_per_second"][0] > 0
