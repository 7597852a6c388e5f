"""Table of processor time by test file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BUSY = """
import subprocess, sys, time

def test_child():
    burn = "import time\\nwhile time.process_time() < 0.6: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
"""


@pytest.mark.slow
def test_processor_time_counts_children_by_file(tmp_path: Path) -> None:
    (tmp_path / "test_busy.py").write_text(BUSY)
    (tmp_path / "test_idle.py").write_text("def test_idle(): pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.processor_time", "-n", "0", "-c", "/dev/null", "--rootdir",
         tmp_path, "--processor-time", "1", tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert re.search(r"processor time: \d+ s in 2 files", done.stdout)
    (line,) = re.findall(r"^ *([\d.]+) s  (.*)$", done.stdout, re.M)
    assert line[1].endswith("test_busy.py")
    assert float(line[0]) >= 0.6
