"""bench/engine/long_context.py: a short run on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.benches import BENCH


@pytest.mark.full
def test_long_context_compares_the_tokens_of_all_chunk_sizes() -> None:
    done = subprocess.run(
        [sys.executable, BENCH / "engine" / "long_context.py", "--device", "cpu", "--dtype", "float32", "--prompts",
         "30,100", "--chunks", "16,64", "--tokens", "3", "--streams", "1", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["chunk"], row["prompt"]) for row in rows] == [(16, 30), (16, 100), (64, 30), (64, 100)]
    assert {row["agreement"] for row in rows} == {"the same"}
    assert all(row["ttft_ms"] > 0 and row["peak_mib"] > 0 for row in rows)
