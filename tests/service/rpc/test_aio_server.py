"""Start of the server without the private names of grpcio, lost connections and unknown methods.

tests/e2e/test_fuzz.py tests the workaround itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2_grpc

from npuserve.service.config import ConfigError
from npuserve.service.rpc import aio_server
from npuserve.service.rpc.health import HealthServicer
from tests.e2e.fuzz.wire import DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame, header
from tests.support.fake_engine import until

NO_WINDOW = struct.pack(">HI", 4, 0)
"""HTTP/2 setting with which a client receives no message."""


@pytest.mark.parametrize("name", aio_server.PRIVATE_NAMES)
def test_server_missing_private_name_raises_config_error(name: str, monkeypatch: pytest.MonkeyPatch):
    made = SimpleNamespace(
        AioServer=SimpleNamespace(_request_call=None), _ServicerContext=SimpleNamespace(abort=None),
        ExecuteBatchError=None)
    monkeypatch.setattr(aio_server, "cygrpc", made)
    aio_server.check_private_names()
    holder, _, attribute = name.rpartition(".")
    delattr(getattr(made, holder) if holder else made, attribute)
    with pytest.raises(ConfigError, match=rf"lacks grpc\._cython\.cygrpc\.{name}, without which"):
        aio_server.server([], [])
    monkeypatch.setattr(aio_server, "cygrpc", None)
    with pytest.raises(ConfigError, match=r"lacks grpc\._cython\.cygrpc\.AioServer\._request_call"):
        aio_server.server([], [])


def test_serve_missing_private_name_exits_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "sitecustomize.py").write_text("from grpc._cython import cygrpc\ndel cygrpc.ExecuteBatchError\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    command = [sys.executable, "-m", "npuserve.cli", "serve", "--port", "0", "--metrics-port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("npuserve: grpcio")]
    assert "lacks grpc._cython.cygrpc.ExecuteBatchError, without which one malformed call ends the server" in line
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_server_lost_connection_with_an_unread_message_is_no_error(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    health, server = HealthServicer(), aio_server.server([], [])
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reader, writer = await asyncio.open_connection("127.0.0.1", await _listen(server))
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", f"/grpc.health.v1.Health/{method}".encode()),
              (b":authority", b"x"), (b"te", b"trailers"), (b"content-type", b"application/grpc")]
    writer.write(PREFACE + frame(SETTINGS, payload=NO_WINDOW)
                 + frame(HEADERS, END_HEADERS, 1, b"".join(header(name, value) for name, value in fields))
                 + frame(DATA, END_STREAM, 1, bytes(5)))
    kind = SETTINGS
    while kind != HEADERS:  # then the server is sending its message
        head = await reader.readexactly(9)
        await reader.readexactly(int.from_bytes(head[:3], "big"))
        kind = head[3]
    assert health._calls
    writer.transport.abort()
    await until(lambda: not health._calls)
    await server.stop(0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_server_unknown_methods_are_unimplemented() -> None:
    server = aio_server.server([], [])
    port = await _listen(server)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError, match="Method not found!") as refused:
                    await channel.unary_unary("/a.B/C")(b"", timeout=30)
                assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    finally:
        await server.stop(0)


async def _listen(server: grpc.aio.Server) -> int:
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return port
