"""Trained models and real tokenizers for tests: the built-in model, and published ones in NPUSERVE_TEST_MODELS."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from npuserve.npu.storyteller import FOLDER

BUILT_IN = "storyteller"


def published(*names: str, full: bool = False) -> list[Any]:
    """Return test parameters for models under NPUSERVE_TEST_MODELS, with the mark `model`, and `full` if wanted."""
    marks = [pytest.mark.model, *([pytest.mark.full] if full else [])]
    return [pytest.param(name, marks=marks) for name in names]


def model_folder(name: str) -> Path:
    """Return the folder of the built-in model or of one under NPUSERVE_TEST_MODELS; skip the test if it is missing."""
    if name == BUILT_IN:
        return FOLDER
    root = os.environ.get("NPUSERVE_TEST_MODELS")
    if not root:
        pytest.skip("NPUSERVE_TEST_MODELS is not set")
    folder = Path(root) / name
    if not folder.is_dir():
        pytest.skip(f"no folder {name} under NPUSERVE_TEST_MODELS")
    return folder
