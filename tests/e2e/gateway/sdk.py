"""Python clients of the gateway's HTTP APIs, imported by the tests that run: their import takes seconds."""

from __future__ import annotations

from typing import Any

import pytest


def openai() -> Any:
    """Return the module openai. Skips the test where it is not installed."""
    return pytest.importorskip("openai")


def anthropic() -> Any:
    """Return the module anthropic. Skips the test where it is not installed."""
    return pytest.importorskip("anthropic")
