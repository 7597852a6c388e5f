"""Fixtures of the tests of the service. A file may define others of the same names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.collector import Collector
from tests.support.fake_engine import make_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of the model that counts."""
    return make_folder(tmp_path / "counting")


@pytest.fixture
def chat_folder(tmp_path: Path) -> Path:
    """Folder of the model that counts, with a chat template."""
    return make_folder(tmp_path / "counting", chat=True)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    made = Collector()
    yield made
    made.server.stop(None).wait()
