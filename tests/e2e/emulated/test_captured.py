"""Nearly all decode tokens come from captured steps while prefill chunks arrive, by the metrics page.

The load is a trace with many lengths, and all settings are the defaults.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.e2e.server import serving
from tests.npu.emulator.child import needs_npu

pytestmark = [pytest.mark.full, needs_npu]

REQUESTS = 40
LEAST = 0.95


def synthetic(path: Path) -> Path:
    """Write a trace in the format of the Azure LLM inference trace: long prompts, short answers, bursts."""
    chance, at = random.Random(0), datetime(2023, 11, 16, 18, 15, 46)
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for _ in range(REQUESTS):
        at += timedelta(seconds=chance.choice([0, 0, 0.1, 0.4]))
        prompt, answer = (min(most, int(chance.lognormvariate(mean, 0.9)) + 1) for mean, most in ((5, 380), (3.4, 90)))
        rows.append(f"{at.isoformat(' ', 'microseconds')},{prompt},{answer}")
    path.write_text("\n".join(rows) + "\n")
    return path


def test_decode_tokens_come_from_captured_steps(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with serving("--device", "npu", "--emulate", "--max-num-batched-tokens", "96", "--max-num-seqs", "16") as server:
        subprocess.run(
            [sys.executable, "-m", "npuserve.cli", "bench", "serve", "--target", server.target, "--trace",
             str(synthetic(tmp_path / "trace.csv")), "--requests", "0", "--json", str(report)],
            check=True, capture_output=True, timeout=100)
        captured, decoder, eager = (
            server.metric("npuserve_decode_tokens_total", mode=mode) for mode in ("captured", "decoder", "eager"))
        mixed = server.metric("npuserve_step_seconds_count", phase="mixed")
    assert json.loads(report.read_text())["requests"]["ok"] == REQUESTS
    assert captured + decoder + eager > 20 * REQUESTS
    assert mixed > REQUESTS
    assert captured / (captured + decoder + eager) >= LEAST
    assert decoder == 0  # LM head and sampler of a step with chunks are part of its dispatch
