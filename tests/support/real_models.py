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
    return [pytest.param(name, marks=[*marks, pytest.mark.skipif(bool(reason := _missing(name)), reason=reason)])
            for name in names]


def model_folder(name: str) -> Path:
    """Return the folder of the built-in model or of one under NPUSERVE_TEST_MODELS; skip the test if it is missing."""
    if name == BUILT_IN:
        return FOLDER
    if reason := _missing(name):
        pytest.skip(reason)
    return Path(os.environ["NPUSERVE_TEST_MODELS"]) / name


def _missing(name: str) -> str:
    """Return why there is no model of this name; "" if it is there."""
    root = os.environ.get("NPUSERVE_TEST_MODELS")
    if not root:
        return "NPUSERVE_TEST_MODELS is not set"
    return "" if (Path(root) / name).is_dir() else f"no folder {name} under NPUSERVE_TEST_MODELS"
