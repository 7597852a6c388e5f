"""Start of the server without the private names of grpcio. tests/e2e/test_fuzz.py tests the workaround itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from npuserve.service.config import ConfigError
from npuserve.service.rpc import aio_server


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
    command = [sys.executable, "-m", "npuserve.service.cli", "serve", "--port", "0", "--metrics-port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("npuserve: grpcio")]
    assert "lacks grpc._cython.cygrpc.ExecuteBatchError, without which one malformed call ends the server" in line
    assert "Traceback" not in done.stderr
