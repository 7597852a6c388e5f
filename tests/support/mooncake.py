"""A master of Mooncake's store, and a client that changes values."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

_PROGRAM = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 64 << 20, "tcp", "", sys.argv[1]) == 0
values = {key: bytes(store.get(key)) for key in sys.argv[2:]}
assert all(values.values())
assert [store.remove(key, True) for key in values] == [0] * len(values)
others = [*values.values()][1:] + [*values.values()][:1]  # each value under the name of another
assert [store.put(key, value) for key, value in zip(values, others)] == [0] * len(values)
print("ready", flush=True)
sys.stdin.read()  # the memory of the values is this process's
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Master:
    """Running master. address: HOST:PORT for clients. process: of the master itself."""

    def __init__(self) -> None:
        # Not skipped: whoever runs this test has the extra `store`.
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None, "pip install 'npuserve[store]'"
        assert spec.submodule_search_locations
        program = Path(spec.submodule_search_locations[0]) / "mooncake_master"
        port, self._metrics_port = _free_port(), _free_port()
        self.address = f"127.0.0.1:{port}"
        program.chmod(program.stat().st_mode | 0o100)
        self.process = subprocess.Popen(
            [program, "--rpc_address", "127.0.0.1", "--rpc_port", str(port), "--metrics_host", "127.0.0.1",
             "--metrics_port", str(self._metrics_port)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._wait(port)

    def _wait(self, port: int) -> None:
        until = time.monotonic() + 30
        while True:
            assert self.process.poll() is None, "mooncake_master has ended"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            assert time.monotonic() < until
            time.sleep(0.05)

    def keys(self) -> list[str]:
        """Return the names of all values."""
        url = f"http://127.0.0.1:{self._metrics_port}/get_all_keys"
        with urllib.request.urlopen(url, timeout=10) as page:
            return [line for line in page.read().decode().splitlines() if line]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def serving_master() -> Iterator[Master]:
    master = Master()
    try:
        yield master
    finally:
        master.close()


@contextlib.contextmanager
def exchanged(master: Master, keys: Sequence[str]) -> Iterator[None]:
    """Put the value of each of these keys under the name of another one."""
    command = [sys.executable, "-c", _PROGRAM, master.address, *keys]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin
        assert process.stdout
        try:
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            process.kill()
