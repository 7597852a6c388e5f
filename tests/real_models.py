"""Real models and tokenizers for tests that are marked `model`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def model_folder(name: str) -> Path:
    """The folder of that name under NPUSERVE_TEST_MODELS; skips the test if there is none."""
    root = os.environ.get("NPUSERVE_TEST_MODELS")
    if not root:
        pytest.skip("NPUSERVE_TEST_MODELS is not set")
    folder = Path(root) / name
    if not folder.is_dir():
        pytest.skip(f"no folder {name} under NPUSERVE_TEST_MODELS")
    return folder
