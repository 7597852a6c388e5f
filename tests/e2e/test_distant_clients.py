"""Clients far from a real server that is idle: a proxy delays every byte and limits what each client sends."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest

from npuserve.npu import storyteller
from npuserve.v1 import tokenize_pb2
from tests.e2e.brittle import COUNTING
from tests.e2e.server import Server, serving
from tests.support.delay_proxy import delay_proxy_process

CONTEXT = 40_960
"""As of Qwen3. A message may have 12 MiB."""
CALLS = 4
RATE = 2e6
TOKENIZE = "/npuserve.v1.InferenceService/Tokenize"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = Path(shutil.copytree(storyteller.FOLDER, tmp_path_factory.mktemp("model") / "m"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    with serving(str(folder), **COUNTING) as server:
        yield server


async def statuses(port: int, clients: int, data: bytes) -> Counter[str]:
    """Send the message CALLS times from each client, on connections of their own; return the calls' statuses."""

    async def client() -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            call = channel.unary_unary(TOKENIZE)
            for _ in range(CALLS):
                try:
                    await call(data, timeout=120, wait_for_ready=True)
                    ends["OK"] += 1
                except grpc.aio.AioRpcError as error:
                    ends[f"{error.code().name}: {error.details()}"] += 1

    ends: Counter[str] = Counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return ends


@pytest.mark.parametrize(("milliseconds", "size", "clients", "own_addresses"), [
    (100, 40_000, 32, True),
    *(pytest.param(*case, marks=pytest.mark.full) for case in (
        (40, 40_000, 8, False), (100, 200_000, 8, False), (100, 200_000, 32, False))),
])
def test_distant_clients_of_an_idle_server_are_not_refused(
    server: Server, milliseconds: int, size: int, clients: int, own_addresses: bool
) -> None:
    host, port = server.target.rsplit(":", 1)
    data = tokenize_pb2.TokenizeRequest(text=("once upon a time " * size)[:size]).SerializeToString()
    with delay_proxy_process((host, int(port)), milliseconds / 1000, RATE, own_addresses) as proxy:
        ends = asyncio.run(statuses(proxy, clients, data))
    refused = {end: number for end, number in ends.items() if end.startswith("RESOURCE_EXHAUSTED")}
    assert refused == {}
    assert ends.total() == clients * CALLS
