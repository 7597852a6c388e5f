"""One worker behind one gateway, for the tests of the HTTP APIs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway.sdk import openai_client
from tests.e2e.gateway.smg import CHAT_TEMPLATE, Gateway, gateway
from tests.e2e.gateway.worker import LOGGING, Worker
from tests.e2e.server import serving


@pytest.fixture(scope="package")
def chat_template(tmp_path_factory: pytest.TempPathFactory) -> str:
    file: Path = tmp_path_factory.mktemp("template") / "chat.jinja"
    file.write_text(CHAT_TEMPLATE)
    return str(file)


@pytest.fixture(scope="package")
def worker() -> Iterator[Worker]:
    with serving("--dtype", "float32", "--block-size", "16", *LOGGING) as server:
        yield Worker(server)


@pytest.fixture(scope="package")
def gate(worker: Worker, chat_template: str) -> Iterator[Gateway]:
    with gateway([worker.server.target], "--chat-template", chat_template) as running:
        yield running


@pytest.fixture
def client(gate: Gateway) -> Any:
    return openai_client(gate)
