"""bench/engine/forced_tokens.py: a short run of the built-in model on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from npuserve.npu import storyteller
from tests.support.benches import BENCH


@pytest.mark.full
def test_forced_tokens_saves_steps_and_compares_tokens() -> None:
    done = subprocess.run(
        [sys.executable, BENCH / "engine" / "forced_tokens.py", storyteller.FOLDER, "--dtype", "float32", "--rows", "2",
         "--tokens", "48", "--rounds", "1", "--schemas", "report", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["plain"]["steps"] >= 48
    assert line["plain"]["forced_share"] == 0
    assert line["forced"]["steps"] < 0.6 * line["plain"]["steps"]
    assert line["forced"]["forced_share"] > 0.4
