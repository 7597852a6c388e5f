"""One worker behind one gateway, for the tests of the HTTP APIs. The worker also has a gateway of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from npuserve.npu.storyteller import FOLDER
from tests.e2e.gateway.sdk import openai_client
from tests.e2e.gateway.smg import CHAT_TEMPLATE, Gateway, gateway, program
from tests.e2e.gateway.worker import LOGGING, Worker
from tests.e2e.server import KV_CACHE_MEMORY, serving
from tests.support.processes import free_port


@pytest.fixture(scope="package")
def chat_template(tmp_path_factory: pytest.TempPathFactory) -> str:
    file: Path = tmp_path_factory.mktemp("template") / "chat.jinja"
    file.write_text(CHAT_TEMPLATE)
    return str(file)


@pytest.fixture(scope="package")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Server of the built-in model with a chat template and, by smg, an OpenAI API of its own."""
    program()
    folder = Path(shutil.copytree(FOLDER, tmp_path_factory.mktemp("model") / "storyteller"))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": CHAT_TEMPLATE}))
    with serving(str(folder), "--dtype", "float32", "--kv-cache-memory", KV_CACHE_MEMORY, "--block-size", "16",
                 "--openai-port", str(port := free_port()), *LOGGING) as server:
        yield Worker(server, port)


@pytest.fixture(scope="package")
def gate(worker: Worker, chat_template: str) -> Iterator[Gateway]:
    with gateway([worker.server.target], "--chat-template", chat_template) as running:
        yield running


@pytest.fixture
def client(gate: Gateway) -> Any:
    return openai_client(gate)
