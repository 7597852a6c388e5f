"""Model and script of servers that generate given tokens (gateway/scripted.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.gateway import scripted


@pytest.fixture(scope="module")
def scripted_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scripted.make_folder(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture(scope="module")
def script(scripted_folder: Path) -> Callable[[str], list[int]]:
    """Function that sets the text of the next answers, and returns its ids."""
    return scripted.writer(scripted_folder)
