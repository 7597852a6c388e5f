"""Access to the programs of bench/ as modules."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

BENCH = Path(__file__).parents[2] / "bench"


def bench(name: str) -> ModuleType:
    """Return the module of bench/FOLDER/PROGRAM.py; `name` is "FOLDER.PROGRAM"."""
    return importlib.import_module(f"bench.{name}")
