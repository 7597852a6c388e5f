"""Python clients of the gateway's HTTP APIs, imported by the tests that run: their import takes seconds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.gateway.smg import Gateway


def openai() -> Any:
    """Return the module openai. Skips the test where it is not installed."""
    return pytest.importorskip("openai")


def openai_client(gate: Gateway) -> Any:
    """Return a client of OpenAI's API that repeats no call."""
    return openai().OpenAI(base_url=f"{gate.url}/v1", api_key="none", max_retries=0, timeout=60)


def anthropic() -> Any:
    """Return the module anthropic. Skips the test where it is not installed."""
    return pytest.importorskip("anthropic")
