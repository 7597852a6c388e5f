"""A real Prometheus beside a real server under load and an engine's death: 20 s of bench/reliability/monitoring.py."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.benches import BENCH


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.skipif(not (shutil.which("prometheus") and shutil.which("promtool")), reason="no Prometheus")
def test_every_panel_has_data_and_no_counter_goes_back(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, BENCH / "reliability" / "monitoring.py", "--seconds", "20", "--pictures", tmp_path,
               "--json", tmp_path / "verdict.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["load"]["codes"]["OK"] > 20
    assert verdict["panels"] > 50
    assert verdict["counters"] > 500
    assert verdict["rules"] >= 8  # those on kernels are evaluated once a minute
    for name in ("service", "engine", "kernels"):
        assert (tmp_path / f"dashboard-{name}.png").stat().st_size > 10_000
